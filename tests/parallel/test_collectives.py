"""Collectives: value and gradient of each against sums over all ranks' tensors, which every rank can draw; and their counts."""

import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_dllm.config.parallel import ParallelConfig
from megatron_dllm.parallel import (
    CommunicationLog,
    Group,
    Topology,
    all_to_all,
    close,
    create_context,
    gather_replicated_sequence,
    gather_sequence,
    initialize,
    scatter_sum_sequence,
    split_sequence,
    sum_grad_over,
    sum_over,
)

WIDTH = 3


def context_of(size, rank, **sizes):
    return create_context(Topology(world=size, **sizes), rank=rank, device=torch.device("cpu"), sequence_parallel=False)


def drawn(rank, rows, purpose=0):
    """What `rank` holds; any rank can draw it. Never alike on two ranks."""
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(100 * purpose + rank), dtype=torch.float64)


def value_and_gradient(function, x, upstream):
    x = x.clone().requires_grad_()
    y = function(x)
    y.backward(upstream)
    return y.detach(), x.grad


def check_collective(rank, size, name, counts):
    """Each collective over `size` ranks, on pieces of `counts` rows (None: 2 rows each), against the table of its module."""
    group = context_of(size, rank, tp=size).tp
    lengths = counts or [2] * size
    offset, total = sum(lengths[:rank]), sum(lengths)
    own = slice(offset, offset + lengths[rank])
    pieces = [drawn(r, lengths[r]) for r in range(size)]
    wholes = [drawn(r, total) for r in range(size)]
    piece_grads = [drawn(r, lengths[r], 1) for r in range(size)]
    whole_grads = [drawn(r, total, 1) for r in range(size)]
    # name: (call, our input, our upstream gradient, value, gradient)
    table = {
        "sum_over": (lambda x: sum_over(x, group), wholes[rank], whole_grads[rank], sum(wholes), whole_grads[rank]),
        "sum_grad_over": (lambda x: sum_grad_over(x, group), wholes[rank], whole_grads[rank], wholes[rank], sum(whole_grads)),
        "gather_sequence": (
            lambda x: gather_sequence(x, group, counts), pieces[rank], whole_grads[rank], torch.cat(pieces), sum(whole_grads)[own],
        ),
        "gather_replicated_sequence": (
            lambda x: gather_replicated_sequence(x, group, counts), pieces[rank], whole_grads[0], torch.cat(pieces), whole_grads[0][own],
        ),
        "scatter_sum_sequence": (
            lambda x: scatter_sum_sequence(x, group, counts), wholes[rank], piece_grads[rank], sum(wholes)[own], torch.cat(piece_grads),
        ),
        "split_sequence": (
            lambda x: split_sequence(x, group, counts), wholes[0], piece_grads[rank], wholes[0][own], torch.cat(piece_grads),
        ),
    }  # fmt: skip
    function, x, upstream, expected, expected_grad = table[name]
    y, grad = value_and_gradient(function, x, upstream)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(grad, expected_grad, rtol=0, atol=1e-14)
    again = value_and_gradient(function, x, upstream)
    assert torch.equal(y, again[0]) and torch.equal(grad, again[1])


@pytest.mark.parametrize(
    "name",
    ["sum_over", "sum_grad_over", "gather_sequence", "gather_replicated_sequence", "scatter_sum_sequence", "split_sequence"],
)
@pytest.mark.parametrize("size, counts", [(1, None), (2, None), (3, None), (3, [2, 0, 5]), (2, [0, 0])], ids=str)
def test_collective(world, name, size, counts):
    world.run(check_collective, size, name, counts, size=size)


def check_all_to_all(rank, size):
    group = context_of(size, rank, tp=size).tp
    counts = [[(3 * sender + 2 * receiver) % 4 for receiver in range(size)] for sender in range(size)]
    inputs = [drawn(r, sum(counts[r])) for r in range(size)]
    sent = [list(x.split(counts[r])) for r, x in enumerate(inputs)]
    receive_counts = [counts[sender][rank] for sender in range(size)]
    upstreams = [drawn(r, sum(counts[s][r] for s in range(size)), 1) for r in range(size)]
    y, grad = value_and_gradient(lambda x: all_to_all(x, counts[rank], receive_counts, group), inputs[rank], upstreams[rank])
    assert torch.equal(y, torch.cat([sent[sender][rank] for sender in range(size)]))
    returned = [upstreams[r].split([counts[s][r] for s in range(size)])[rank] for r in range(size)]
    assert torch.equal(grad, torch.cat(returned))
    if size > 1:
        calls, sent_bytes = group.log.total("all_to_all")
        forward = sum(counts[rank]) - counts[rank][rank]
        backward = sum(receive_counts) - counts[rank][rank]
        assert (calls, sent_bytes) == (2, (forward + backward) * WIDTH * 8)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_to_all(world, size):
    world.run(check_all_to_all, size, size=size)


def check_counts(rank):
    context = context_of(4, rank, tp=2, cp=2)
    assert context.log.total() == (0, 0)  # warming up is not counted
    x = drawn(rank, 4).requires_grad_()
    sum_over(x, context.cp)
    scatter_sum_sequence(gather_sequence(x, context.tp), context.tp).sum().backward()
    own_bytes = 4 * WIDTH * 8
    expected = {
        ("all_reduce", "cp"): (1, own_bytes),  # 2 (R - 1) / R of it
        ("all_gather", "tp"): (2, 2 * own_bytes),  # forward of the gather, backward of the scatter
        ("reduce_scatter", "tp"): (2, 2 * own_bytes),  # half of twice the rows, each way
    }
    assert {key: (context.log.calls[key], context.log.sent_bytes[key]) for key in context.log.calls} == expected
    assert context.log.by_kind() == {kind: value for (kind, _), value in expected.items()}
    assert not context.log.under_way and context.log.last.startswith("reduce_scatter over tp")
    context.log.clear()
    assert context.log.by_kind() == {}


def test_log_counts_each_call(world):
    world.run(check_counts, size=4)


def check_context(rank):
    context = context_of(4, rank, cp=2, ep=2, pp=2)
    for name, ranks in {
        "tp": (rank,),
        "cp": (rank // 2 * 2, rank // 2 * 2 + 1),
        "pp": (rank % 2, rank % 2 + 2),
        "world": (0, 1, 2, 3),
    }.items():
        group = context.group(name)
        assert group.ranks == ranks and ranks[group.rank] == rank
        assert sum_over(torch.tensor([float(rank)]), group).item() == sum(ranks)
    # Axes of equal ranks have groups of their own, so that what overlaps on one cannot be taken for the other's.
    assert context.cp.ranks == context.ep.ranks and context.cp.process_group is not context.ep.process_group
    close(context)
    assert sum_over(torch.tensor([1.0]), context.world).item() == 4
    with pytest.raises((RuntimeError, ValueError)):
        dist.get_rank(context.cp.process_group)


def test_create_context(world):
    world.run(check_context, size=4)


def check_initialize(rank, port):
    dist.destroy_process_group()  # the world's own: here we are what torchrun starts
    launcher = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in launcher.items():
            patch.setenv(name, str(value))
        with pytest.raises(ValueError, match="--tensor-model-parallel-size to one of \\[1, 2\\]"):
            initialize(ParallelConfig(tensor_model_parallel_size=4), device="cpu")
        context = initialize(ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True), device="cpu", timeout_minutes=3.0)
    for group in (context.world, context.tp):
        assert group.handle._get_backend(context.device).options._timeout == timedelta(minutes=3)
    assert dist.get_backend() == "gloo" and context.sequence_parallel
    assert (context.tp.ranks, context.tp.rank, context.dp.ranks) == ((0, 1), rank, (rank,))
    assert sum_over(torch.tensor([rank + 1.0]), context.tp).item() == 3


def test_initialize_from_the_launchers_environment(world):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world.run(check_initialize, port, size=2)


def check_overwrite(rank):
    group = context_of(2, rank, tp=2).tp
    x = drawn(rank, 3).requires_grad_()
    for overwrite in (False, True):
        y = 2 * x
        z = sum_over(y, group, overwrite=overwrite)
        assert torch.equal(z, 2 * (drawn(0, 3) + drawn(1, 3)))
        assert (z.data_ptr() == y.data_ptr()) == overwrite
        assert torch.equal(torch.autograd.grad(z, x, torch.ones_like(z))[0], torch.full_like(x, 2))
    # What autograd has kept of y is no longer valid, and autograd knows.
    squared = (y := 2 * x).square()
    sum_over(y, group, overwrite=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.sum().backward()


def test_sum_over_in_place(world):
    world.run(check_overwrite, size=2)


def check_unset_group(rank):
    x = torch.ones(2, WIDTH)
    with pytest.raises(RuntimeError, match="group tp of ranks .* has no process group"):
        sum_over(x, Group("tp", 2, rank, None, (0, 1)))
    with pytest.raises(TypeError, match="expected a Group, got None"):
        gather_sequence(x, None)


def test_unset_group_is_an_error_at_the_call_not_the_world(world):
    world.run(check_unset_group, size=2)


def check_indivisible(rank):
    group = context_of(2, rank, tp=2).tp
    x = torch.ones(3, WIDTH)
    for function in (scatter_sum_sequence, split_sequence):
        with pytest.raises(ValueError, match="3 rows do not divide over the 2 ranks of tp; fill them up to a multiple of 2"):
            function(x, group)
    with pytest.raises(ValueError, match="do not fit rank"):
        gather_sequence(x, group, [2, 2])
    assert not group.log.under_way and group.log == CommunicationLog()


def test_rows_that_do_not_divide_are_refused(world):
    world.run(check_indivisible, size=2)
