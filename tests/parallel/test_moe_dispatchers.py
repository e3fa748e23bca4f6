"""Every dispatcher, over 2 and 4 ranks, against one process with all tokens (float64): outputs, input gradients, weight gradients."""

import dataclasses
from dataclasses import dataclass

import pytest
import torch

from megatron_dllm.config import PRESETS, MoEConfig
from megatron_dllm.moe.dispatchers.build import build_dispatcher
from megatron_dllm.moe.layer import MoELayer
from megatron_dllm.parallel import ParallelContext, Topology, communication, create_context
from megatron_dllm.tensor_parallel import Initializer

DTYPE = torch.float64
TOLERANCE = 1e-12
CONFIG = dataclasses.replace(PRESETS["toy"], hidden_size=6, moe_ffn_hidden_size=4, num_experts=8, moe_router_topk=2)


@dataclass(frozen=True)
class Case:
    """`tokens` of each rank; `favourite`: the expert that every token's first choice is (None: as it comes)."""

    tokens: tuple[int, ...]
    ep: int = 1
    etp: int = 1
    favourite: int | None = None


def inputs(case):
    """(x, residual, output weights) of every rank, by rank."""
    draw = torch.Generator().manual_seed(3)
    return [tuple(torch.randn(n, CONFIG.hidden_size, generator=draw, dtype=DTYPE) for _ in range(3)) for n in case.tokens]


def build(context, dispatcher, case):
    made = build_dispatcher(MoEConfig(moe_token_dispatcher_type=dispatcher), context, CONFIG, DTYPE)
    layer = MoELayer("layers.0", CONFIG, context=context, init=Initializer(7, 0.5), dtype=DTYPE, dispatcher=made)
    if case.favourite is not None:
        with torch.no_grad():  # a row along the mean direction of the (then positive) tokens wins every time
            layer.router.weight[case.favourite] = 20.0
    return layer


def run(layer, x, residual, output_weights, case):
    if case.favourite is not None:
        residual = residual.abs()
    x, residual = x.clone().requires_grad_(), residual.clone().requires_grad_()
    y = layer(x, residual)
    (y * output_weights).sum().backward()
    return {"y": y.detach(), "dx": x.grad, "dresidual": residual.grad}


def worst_differences(rank, case, dispatcher, forget="", builder=build):
    """Largest difference of outputs and gradients to one process with all the tokens, each relative to the largest value."""
    topology = Topology(world=len(case.tokens), ep=case.ep, etp=case.etp)
    context = create_context(topology, rank=rank, device=torch.device("cpu"), sequence_parallel=False)
    everyone = inputs(case)
    layer = builder(context, dispatcher, case)
    ours = run(layer, *everyone[rank], case)
    alone = build(ParallelContext.single(), "alltoall", case)
    whole = run(alone, *(torch.cat(parts) for parts in zip(*everyone, strict=True)), case)
    start = sum(case.tokens[:rank])
    pairs = {name: (ours[name], whole[name][start:start + case.tokens[rank]], whole[name]) for name in ours}
    for (name, parameter), (_, reference) in zip(layer.named_parameters(), alone.named_parameters(), strict=True):
        placement = parameter.placement
        group = context.edp if placement.grid == "expert" else context.world
        gradient = parameter.grad.clone() if forget == name else communication.all_reduce(parameter.grad.clone(), group)
        pairs[name] = (gradient, placement.cut(reference.grad), reference.grad)
    again = run(layer, *everyone[rank], case)
    assert all(torch.equal(ours[name], again[name]) for name in ours), "repeats differ"
    return {name: ((a - b).abs().max() / (scale.abs().max() + 1e-30)).item() if a.numel() else 0.0 for name, (a, b, scale) in pairs.items()}


CASES = {
    "ep2": Case((5, 7), ep=2),
    "ep2, lengths 17 and 1024": Case((17, 1024), ep=2),
    "ep2, an expert with everything": Case((5, 7), ep=2, favourite=6),
    "ep2, a rank without tokens": Case((0, 7), ep=2),
    "ep2, no tokens at all": Case((0, 0), ep=2),
    "ep2, one token, most experts without rows": Case((1, 0), ep=2),
    "etp2": Case((5, 7), etp=2),
    "etp2, a rank without tokens": Case((3, 0), etp=2),
    "ep4": Case((5, 7, 0, 3), ep=4),
    "ep4, an expert with everything": Case((4, 2, 3, 1), ep=4, favourite=1),
    "ep2 edp2": Case((5, 7, 2, 3), ep=2),
    "ep2 etp2": Case((5, 7, 2, 3), ep=2, etp=2),
    "ep2 etp2, one rank with tokens": Case((0, 0, 9, 0), ep=2, etp=2),
    "etp4": Case((1, 2, 0, 3), etp=4),
    "edp2": Case((4, 3)),
}


QUICK = (
    "ep2, lengths 17 and 1024", "ep2, an expert with everything", "ep2, a rank without tokens", "etp2", "ep2 etp2, one rank with tokens")


def marked(names):
    """Names of cases; those that are not quick are slow tests."""
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("case", marked(CASES))
def test_dispatcher(world, case, dispatcher):
    case = CASES[case]
    for rank, differences in enumerate(world.run(worst_differences, case, dispatcher, size=len(case.tokens))):
        assert len(differences) == 3 + 5
        for name, difference in differences.items():
            assert difference <= TOLERANCE, f"rank {rank}, {name}: {difference:.1e}"


@pytest.mark.parametrize("name", ["router.weight", "experts.gate_up"])
def test_a_reduction_left_out_is_seen(world, name):
    results = world.run(worst_differences, CASES["ep2 edp2"], "alltoall", name, size=4)
    assert all({n for n, difference in differences.items() if difference > 1e-3} == {name} for differences in results)


def count_calls(rank, dispatcher):
    """Calls of one forward and of one forward and backward."""
    context = create_context(Topology(world=2, ep=2), rank=rank, device=torch.device("cpu"), sequence_parallel=False)
    case = Case((5, 7), ep=2)
    layer = build(context, dispatcher, case)
    x, residual, _ = inputs(case)[rank]
    context.log.clear()
    with torch.no_grad():
        layer(x, residual)
    forward = {kind: calls for kind, (calls, _) in context.log.by_kind().items()}
    context.log.clear()
    run(layer, *inputs(case)[rank], case)
    return forward, {kind: calls for kind, (calls, _) in context.log.by_kind().items()}


def test_calls_are_as_few_as_documented(world):
    for forward, both in world.run(count_calls, "alltoall", size=2):
        assert forward == {"layout_exchange": 1, "all_gather": 1, "all_to_all": 2}
        assert both == {"layout_exchange": 1, "all_gather": 1, "all_to_all": 4}


def overlap_order(rank):
    """What is under way while other work is done between the phases, forward and backward."""
    context = create_context(Topology(world=2, ep=2), rank=rank, device=torch.device("cpu"), sequence_parallel=False)
    case = Case((5, 7), ep=2)
    layer = build(context, "alltoall", case)
    x, residual, _ = inputs(case)[rank]
    x = x.clone().requires_grad_()
    seen = []

    class Meanwhile(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            seen.append(sum("all_to_all" in text for text in context.log.under_way.values()))
            return value * 2

        @staticmethod
        def backward(ctx, grad):
            seen.append(sum("all_to_all" in text for text in context.log.under_way.values()))
            return grad * 2

    trip = layer.start(x, residual)
    widened = Meanwhile.apply(x)
    layer.compute(trip)
    dense = Meanwhile.apply(widened)
    (dense + trip.after_combine()).sum().backward()
    return seen


def test_other_work_runs_while_rows_are_under_way(world):
    """On the way there and back, in the forward and in the backward."""
    assert world.run(overlap_order, size=2) == [[1, 1, 1, 1]] * 2
