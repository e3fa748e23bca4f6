"""Placement, initial weights and layers on one process; how the ranks share heads."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from megatron_dllm.parallel import Group, ParallelContext, place
from megatron_dllm.tensor_parallel import (
    ColumnParallelLinear,
    Constant,
    Initializer,
    LocalHeads,
    RowParallelLinear,
    VocabularyParallelEmbedding,
    column_linear,
    local_heads,
    make_parameter,
)

SINGLE = ParallelContext.single()
INIT = Initializer(seed=3, std=0.02)
CPU = torch.device("cpu")


def on_rank(rank, size, *axes):
    """A context for arithmetic only: no process groups."""
    groups = {axis: Group(axis, size, rank, None, tuple(range(size))) for axis in axes}
    return dataclasses.replace(SINGLE, **groups)


def test_place_cuts_rectangles():
    placement = place((2, 6, 5), on_rank(1, 3, "tp"), cut={"tp": 1})
    whole = torch.arange(60).view(2, 6, 5)
    assert torch.equal(placement.cut(whole), whole[:, 2:4])
    assert (placement.offset, placement.extent, placement.local_shape) == ((0, 2, 0), (2, 2, 5), (2, 2, 5))
    assert placement.axes == {"tp": 1} and placement.first


def test_place_fills_up():
    # 13 rows over 4 ranks: 4, 4, 4, 1; 5 rows: 2, 2, 1, 0.
    for rows, extents in ((13, [4, 4, 4, 1]), (5, [2, 2, 1, 0])):
        placements = [place((rows, 3), on_rank(rank, 4, "tp"), cut={"tp": 0}, fill=True) for rank in range(4)]
        assert [p.extent[0] for p in placements] == extents
        assert {p.local_shape[0] for p in placements} == {max(extents)}
        whole = torch.arange(3 * rows).view(rows, 3)
        assert torch.equal(torch.cat([p.cut(whole) for p in placements]), whole)
        assert [p.region(torch.zeros(p.local_shape)).shape[0] for p in placements] == extents


def test_place_cuts_experts_over_two_axes():
    context = dataclasses.replace(on_rank(1, 2, "ep"), etp=Group("etp", 3, 2, None, (0, 1, 2)))
    placement = place((4, 2, 6, 5), context, cut={"ep": 0, "etp": 2}, grid="expert")
    assert (placement.offset, placement.extent) == ((2, 0, 4, 0), (2, 2, 2, 5))
    assert placement.axes == {"ep": 0, "etp": 2}


def test_place_counts_each_rectangle_once():
    assert [place((4,), on_rank(rank, 4, "tp")).first for rank in range(4)] == [True, False, False, False]
    copied = [place((4, 3), on_rank(rank, 4, "tp"), cut={"tp": 0}, copies=2) for rank in range(4)]
    assert [(p.offset[0], p.extent[0], p.first) for p in copied] == [(0, 2, True), (0, 2, False), (2, 2, True), (2, 2, False)]


def test_place_lists_sizes_that_fit():
    with pytest.raises(ValueError, match=r"6 elements, which do not divide over 4 pieces \(tp\); .* \[1, 2, 3, 6\]"):
        place((6, 3), on_rank(0, 4, "tp"), cut={"tp": 0})


def test_initializer_depends_on_seed_name_and_expert_alone():
    draw = INIT("layers.0.mlp.down", (40, 50), torch.float64)
    assert torch.equal(draw, INIT("layers.0.mlp.down", (40, 50), torch.float64))
    assert torch.equal(draw.float(), INIT("layers.0.mlp.down", (40, 50), torch.float32))
    assert torch.equal(draw.bfloat16(), INIT("layers.0.mlp.down", (40, 50), torch.bfloat16))
    assert abs(draw.std() - 0.02) < 1e-3 and abs(draw.mean()) < 2e-3
    others = [
        Initializer(4, 0.02)("layers.0.mlp.down", (40, 50), torch.float64),
        INIT("layers.1.mlp.down", (40, 50), torch.float64),
        INIT("layers.0.mlp.down", (40, 50), torch.float64, expert=0),
        INIT("layers.0.mlp.down", (40, 50), torch.float64, expert=1),
    ]
    for i, other in enumerate(others):
        for another in [draw, *others[:i]]:
            assert abs(torch.corrcoef(torch.stack([other.flatten(), another.flatten()]))[0, 1]) < 0.1


@pytest.mark.parametrize("rank", range(2))
def test_make_parameter_cuts_what_one_process_draws(rank):
    context = on_rank(rank, 2, "tp", "ep")
    whole = INIT("w", (6, 3), torch.float64)
    ours = make_parameter("w", place((6, 3), context, cut={"tp": 0}), init=INIT, dtype=torch.float64, device=CPU)
    assert torch.equal(ours, whole[3 * rank : 3 * rank + 3]) and ours.is_contiguous() and ours.requires_grad
    assert ours.placement.shape == (6, 3)
    experts = make_parameter("e", place((4, 3, 2), context, cut={"ep": 0}, grid="expert"), init=INIT, dtype=torch.float64, device=CPU)
    assert torch.equal(experts, torch.stack([INIT("e", (3, 2), torch.float64, expert=2 * rank + i) for i in range(2)]))
    filled = make_parameter("v", place((5, 3), context, cut={"tp": 0}, fill=True), init=Constant(7), dtype=torch.float64, device=CPU)
    assert filled[:, 0].tolist() == ([7, 7, 7] if rank == 0 else [7, 7, 0])


def test_make_parameter_holds_fp32_at_least():
    held = place((4,), SINGLE, hold_fp32=True)
    dtypes = [make_parameter("b", held, init=Constant(1), dtype=dtype, device=CPU).dtype for dtype in (torch.bfloat16, torch.float64)]
    assert dtypes == [torch.float32, torch.float64]


def test_layers_on_one_process_are_plain_layers():
    context, dtype = SINGLE, torch.float64
    x = torch.randn(5, 4, dtype=dtype)
    column = ColumnParallelLinear("c", (6, 4), context=context, init=INIT, dtype=dtype)
    row = RowParallelLinear("r", (6, 4), context=context, init=INIT, dtype=dtype)
    embedding = VocabularyParallelEmbedding("e", (7, 4), context=context, init=INIT, dtype=dtype)
    for layer in (column, row):
        assert torch.equal(layer(x), F.linear(x, layer.weight))
    tokens = torch.tensor([6, 0, 3, 3])
    assert torch.equal(embedding(tokens), embedding.weight[tokens])
    with pytest.raises(RuntimeError, match="token outside the vocabulary of 7"):
        embedding(torch.tensor([7]))


def test_column_linear_keeps_the_parts_of_a_fused_weight_apart():
    x, gate_up, other = torch.randn(5, 4), torch.randn(2, 3, 4), torch.randn(6, 4)
    y, z = column_linear(x, (gate_up, other), tp=SINGLE.tp, sequence_parallel=False)
    assert y.shape == (5, 2, 3) and torch.equal(z, x @ other.T)
    torch.testing.assert_close(y[:, 1], x @ gate_up[1].T)


@pytest.mark.parametrize(
    "heads, kv_heads, size, expected",
    [
        (16, 8, 2, [(8, 0, 4, 0, 1), (8, 8, 4, 4, 1)]),
        (16, 2, 4, [(4, 0, 1, 0, 2), (4, 4, 1, 0, 2), (4, 8, 1, 1, 2), (4, 12, 1, 1, 2)]),
        (4, 1, 2, [(2, 0, 1, 0, 2), (2, 2, 1, 0, 2)]),
    ],
)
def test_local_heads(heads, kv_heads, size, expected):
    ours = [local_heads(heads, kv_heads, Group("tp", size, rank, None, tuple(range(size)))) for rank in range(size)]
    assert ours == [LocalHeads(*numbers) for numbers in expected]


@pytest.mark.parametrize(
    "heads, kv_heads, size", [(16, 8, 2), (16, 8, 4), (16, 8, 8), (16, 2, 2), (16, 2, 4), (16, 2, 8), (16, 8, 16), (12, 6, 3)]
)
def test_every_query_head_finds_its_kv_head(heads, kv_heads, size):
    for rank in range(size):
        ours = local_heads(heads, kv_heads, Group("tp", size, rank, None, tuple(range(size))))
        for query in range(ours.num_query):
            whole = (ours.first_query + query) // (heads // kv_heads)
            local = ours.first_kv + query // (ours.num_query // ours.num_kv)
            assert local == whole


@pytest.mark.parametrize(
    "heads, kv_heads, size, message", [(6, 2, 4, r"one of \[1, 2, 6\]"), (6, 4, 2, "6 query heads do not divide over 4")]
)
def test_local_heads_lists_what_fits(heads, kv_heads, size, message):
    with pytest.raises(ValueError, match=message):
        local_heads(heads, kv_heads, Group("tp", size, 0, None, tuple(range(size))))
