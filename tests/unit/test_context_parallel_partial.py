"""megatron_dllm.context_parallel.partial: attention to parts of the keys, merged, against the dense oracle; values and gradients."""
import numpy as np
import pytest
import torch

from megatron_dllm.context_parallel.partial import Partial, partial_attention, partial_gradients, partial_plan
from megatron_dllm.context_parallel.plan import seen_by
from megatron_dllm.transformer.core_attention import attend_dense
from tests.unit.largest_tensor import LargestTensor
from tests.unit.test_core_attention import random_inputs
from tests.unit.test_visibility import DOCUMENTS, layout

CPU = torch.device("cpu")


def parts_of(visibility, ranks):
    """The keys dealt out at random: (plan, rows of the key array) of each part, all queries over it."""
    draw = np.random.default_rng(0)
    clean, canvas = draw.integers(ranks, size=visibility.num_clean_keys), draw.integers(ranks, size=len(visibility.canvas_keys))
    canvas = np.sort(canvas)  # parts of a canvas stand together
    queries = np.arange(len(visibility.canvas_id))
    for rank in range(ranks):
        held, own = np.flatnonzero(clean == rank), np.flatnonzero(canvas == rank)
        yield partial_plan(seen_by(visibility, queries, held, own), CPU, block=7), np.concatenate([held, visibility.num_clean_keys + own])


@pytest.mark.parametrize("window", [None, 3, 70])
@pytest.mark.parametrize("documents", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize(("heads", "groups", "dim", "ranks"), [(4, 2, 16, 1), (4, 2, 6, 3), (3, 3, 5, 2)], ids=["whole", "grouped", "odd"])
def test_merged_parts_equal_the_oracle(documents, window, heads, groups, dim, ranks):
    visibility = layout(documents, canvas_length=5).windowed(window)
    query, key, value = inputs = random_inputs(visibility, heads=heads, groups=groups, dim=dim, dtype=torch.float64)
    expected = attend_dense(*inputs, visibility)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted = torch.autograd.grad(expected, inputs, upstream)
    with torch.no_grad():
        parts = list(parts_of(visibility, ranks))
        results = [partial_attention(query, key[rows], value[rows], plan) for plan, rows in parts]
        merged = results[0]
        for result in results[1:]:
            merged = merged.merge(result)
        assert torch.allclose(merged.out, expected, rtol=0, atol=1e-12)
        delta = (upstream * merged.out).sum(-1)
        found = [torch.zeros_like(x) for x in inputs]
        for plan, rows in parts:
            gradients = partial_gradients(upstream, query, key[rows], value[rows], merged.lse, delta, plan)
            found[0] += gradients.query
            found[1][rows] += gradients.key
            found[2][rows] += gradients.value
    for a, b in zip(found, wanted, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)


def test_a_query_that_sees_nothing_counts_for_nothing():
    """Its out is 0 and its lse -inf, and merging with it changes no bit; nor does it make a gradient that is not finite."""
    visibility = layout([(4, None)], canvas_length=1)
    query, key, value = random_inputs(visibility, heads=2, groups=1, dim=4, dtype=torch.float64)
    whole = seen_by(visibility, np.arange(4), np.arange(4), np.zeros(0, np.int64))
    late = partial_plan(seen_by(visibility, np.arange(4), np.array([2, 3]), np.zeros(0, np.int64)), CPU)
    with torch.no_grad():
        some = partial_attention(query, key[2:], value[2:], late)
        assert torch.equal(some.lse[:2], torch.full((2, 2), -torch.inf, dtype=torch.float64)) and not some.out[:2].any()
        all_keys = partial_attention(query, key, value, partial_plan(whole, CPU))
        nothing = Partial(torch.zeros_like(all_keys.out), torch.full_like(all_keys.lse, -torch.inf))
        for merged in (nothing.merge(all_keys), all_keys.merge(nothing)):
            assert torch.equal(merged.out, all_keys.out) and torch.equal(merged.lse, all_keys.lse)
        both = nothing.merge(nothing)
        assert not both.out.any() and torch.isneginf(both.lse).all()
        gradients = partial_gradients(query, query, key[2:], value[2:], some.lse, (query * some.out).sum(-1), late)
        assert all(torch.isfinite(x).all() for x in (gradients.query, gradients.key, gradients.value)) and not gradients.query[:2].any()


def test_blocks_that_see_nothing_are_left_out():
    visibility = layout([(10, None)], canvas_length=1)
    late = seen_by(visibility, np.arange(10), np.array([8, 9]), np.zeros(0, np.int64))
    plan = partial_plan(late, CPU, block=4)
    assert [block.queries for block in plan.blocks] == [slice(8, 10)]
    full = partial_plan(seen_by(visibility, np.array([8, 9]), np.arange(5), np.zeros(0, np.int64)), CPU)
    assert not full.blocks[0].masked and full.blocks[0].clean == slice(0, 5)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_precision(dtype, device):
    """As good as plain attention of the same dtype, in gradients too; lse is fp32."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and torch sees none")
    visibility = layout(DOCUMENTS["unequal"], canvas_length=5)
    inputs = [x.detach().to(device) for x in random_inputs(visibility, heads=4, groups=2, dim=16, dtype=dtype)]

    def oracle(compute):
        leaves = [x.to(compute).requires_grad_() for x in inputs]
        out = attend_dense(*leaves, visibility)
        return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    plan = partial_plan(visibility, torch.device(device))
    found = partial_attention(*inputs, plan)
    upstream = torch.ones_like(inputs[0])
    gradients = partial_gradients(upstream, *inputs, found.lse, found.out.sum(-1), plan)
    ours = [found.out, gradients.query, gradients.key, gradients.value]
    assert {x.dtype for x in (found.lse, *ours)} == {torch.float32}
    for own, plain, exact in zip(ours, oracle(dtype), oracle(torch.float64), strict=True):
        assert (own.to(dtype).double() - exact).norm() <= 2 * (plain.double() - exact).norm()


def test_memory_is_linear_in_the_sequence():
    """The largest tensor is a block's scores, [heads, block, keys]."""
    sizes = []
    for length in (500, 1000):
        visibility = layout([(length, None)], canvas_length=1)
        inputs = [x.detach() for x in random_inputs(visibility, heads=2, groups=1, dim=4, dtype=torch.float32)]
        plan = partial_plan(visibility, CPU, block=50)
        with LargestTensor() as seen:
            part = partial_attention(*inputs, plan)
            partial_gradients(inputs[0], *inputs, part.lse, part.lse, plan)
        sizes.append(seen.numel)
    assert sizes[1] <= 2.1 * sizes[0]
