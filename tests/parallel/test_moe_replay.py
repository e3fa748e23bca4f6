"""Dispatch replay over two ranks: layouts exchanged, host reads, and bit-equal results with and without it."""

import pytest
import torch

from megatron_dllm.moe.replay import NOT_CHECKPOINTED, ReplayError
from megatron_dllm.parallel import Topology, create_context
from megatron_dllm.transformer.recompute import Recompute
from tests.parallel.test_moe_dispatchers import Case, build, inputs

CASE = Case((5, 9), ep=2)


def step(rank, dispatcher, part, replays):
    """(gradients, calls by kind in the forward, and in the backward, hits, misses) of two layers one after the other."""
    context = create_context(Topology(world=2, ep=2), rank=rank, device=torch.device("cpu"), sequence_parallel=False)
    layers = [build(context, dispatcher, CASE) for _ in range(2)]
    x = inputs(CASE)[rank][0].requires_grad_()
    recompute = Recompute(frozenset([part]), replays=replays)

    def both(call, h):
        for layer in layers:
            h = h + recompute.with_moe("moe", lambda call, h, layer=layer: layer(h, h, call), call, h)
        return h

    context.log.clear()
    y = recompute.with_moe("block", both, NOT_CHECKPOINTED, x)
    forward = {kind: calls for kind, (calls, _) in context.log.by_kind().items()}
    context.log.clear()
    gradients = torch.autograd.grad(y.square().sum(), [x, *(p for layer in layers for p in layer.parameters())])
    backward = {kind: calls for kind, (calls, _) in context.log.by_kind().items()}
    report = recompute.monitor.report()
    return gradients, forward, backward, report.hits, report.misses


@pytest.mark.parametrize("part", ["block", pytest.param("moe", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dispatcher", ["alltoall", pytest.param("allgather", marks=pytest.mark.slow)])
def test_each_layout_is_exchanged_once(world, dispatcher, part):
    plain = world.run(step, dispatcher, "none", True, size=2)
    for replays in (True, False):
        for known, got in zip(plain, world.run(step, dispatcher, part, replays, size=2), strict=True):
            gradients, forward, backward, hits, misses = got
            assert all(torch.equal(a, b) for a, b in zip(gradients, known[0], strict=True))
            assert forward == known[1] and forward["layout_exchange"] == 2
            assert (hits, misses) == ((2, 0) if replays else (0, 2))
            assert backward.get("layout_exchange", 0) == (0 if replays else 2)
            if dispatcher == "alltoall":
                # Two a layer for gradients, and what the recompute sends again: rows there, and back where something after it reads them.
                assert 6 <= backward["all_to_all"] <= 8
                assert backward.get("all_gather", 0) == (0 if replays else 2)


def corrupt_on_one_rank(rank):
    """The message that each rank stops with when a record changes on rank 1."""
    context = create_context(Topology(world=2, ep=2), rank=rank, device=torch.device("cpu"), sequence_parallel=False)
    layer, recompute, records = build(context, "alltoall", CASE), Recompute(frozenset(["moe"])), []

    def function(call, h):
        y = layer(h, h, call)
        records.extend([] if call.is_recompute else call.log.records)
        return y

    y = recompute.with_moe("moe", function, NOT_CHECKPOINTED, inputs(CASE)[rank][0].requires_grad_())
    if rank == 1:
        records[0].indices[2, 0] ^= 1
    y.sum().backward()
    with pytest.raises(ReplayError) as caught:
        recompute.monitor.report().check(context)
    return str(caught.value)


def test_a_corrupted_record_stops_every_rank(world):
    other, own = world.run(corrupt_on_one_rank, size=2)
    assert "rank 1: the routing recorded by layers.0 changed" in own
    assert "rank 0: stopping, because a routing record changed on rank 1" in other
