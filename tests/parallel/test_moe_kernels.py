"""The dispatchers that use deep_ep, over a fake of it, against one process; and replay over them."""

import gc
import time
import weakref

import pytest
import torch

from megatron_dllm.moe.dispatchers.deepep import DeepEPDispatcher, make_buffer
from megatron_dllm.moe.dispatchers.hybridep import HybridEPDispatcher
from megatron_dllm.moe.layer import MoELayer
from megatron_dllm.moe.replay import NOT_CHECKPOINTED
from megatron_dllm.parallel import ParallelContext, Topology, create_context
from megatron_dllm.tensor_parallel import Initializer
from megatron_dllm.transformer.recompute import Recompute
from tests.parallel import fake_deep_ep
from tests.parallel.test_moe_dispatchers import CASES, CONFIG, DTYPE, TOLERANCE, Case, build, inputs, marked, run, worst_differences

DISPATCHERS = {"deepep": DeepEPDispatcher, "hybridep": HybridEPDispatcher}


def build_over_fake(context, name, case):
    if name not in DISPATCHERS:
        return build(context, name, case)
    # The kernels move bf16 alone; the fake moves anything, so that the mathematics is held to float64.
    dispatcher = DISPATCHERS[name](
        context, CONFIG.num_experts, hidden_size=CONFIG.hidden_size, dtype=torch.bfloat16, package=fake_deep_ep)
    layer = MoELayer("layers.0", CONFIG, context=context, init=Initializer(7, 0.5), dtype=DTYPE, dispatcher=dispatcher)
    layer.router.load_state_dict(build(context, "alltoall", case).router.state_dict())
    return layer


def differences_over_fake(rank, case, name):
    return worst_differences(rank, case, name, builder=build_over_fake)


@pytest.mark.parametrize("name", DISPATCHERS)
@pytest.mark.parametrize("case", marked(name for name, case in CASES.items() if case.ep > 1 and case.etp == 1))
def test_dispatcher(world, case, name):
    for rank, differences in enumerate(world.run(differences_over_fake, CASES[case], name, size=len(CASES[case].tokens))):
        for which, difference in differences.items():
            assert difference <= TOLERANCE, f"rank {rank}, {which}: {difference:.1e}"


def step(rank, name, part, replays):
    """(gradients, layouts exchanged by the backend in the forward, and in all, hits, kept alive) of a layer that may be recomputed."""
    context = create_context(Topology(world=2, ep=2), rank=rank, device=torch.device("cpu"), sequence_parallel=False)
    case = Case((5, 9), ep=2)
    layer = build_over_fake(context, name, case)
    x = inputs(case)[rank][0].requires_grad_()
    recompute = Recompute(frozenset([part]), replays=replays)
    y = recompute.with_moe("moe", lambda call, h: layer(h, h, call), NOT_CHECKPOINTED, x)
    forward = layer.dispatcher.buffer.layouts
    gradients = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
    assert context.log.calls["layout_exchange", "ep"] == layer.dispatcher.buffer.layouts
    return gradients, forward, layer.dispatcher.buffer.layouts, recompute.monitor.report().hits


@pytest.mark.parametrize("name", DISPATCHERS)
def test_each_layout_is_exchanged_once(world, name):
    plain = world.run(step, name, "none", True, size=2)
    for replays in [True, False] if name == "deepep" else [True]:
        for known, got in zip(plain, world.run(step, name, "moe", replays, size=2), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got[0], known[0], strict=True))
            assert got[1:] == (1, 1, 1) if replays else got[1:] == (1, 2, 0)


def graph_is_freed(rank, name):
    """Whether nothing holds the graph of a layer after its backward, or without one (nobody collects a cycle of autograd's nodes)."""
    context = create_context(Topology(world=2, ep=2), rank=rank, device=torch.device("cpu"), sequence_parallel=False)
    case = Case((5, 9), ep=2)
    layer = build_over_fake(context, name, case)
    held = []
    layer.router.register_forward_hook(lambda module, _, routing: held.append(weakref.ref(routing.probabilities)))
    run(layer, *inputs(case)[rank], case)
    layer(*inputs(case)[rank][:2])  # a forward alone, its graph dropped
    deadline = time.monotonic() + 10  # autograd's own thread may still be letting go of the last nodes
    while any(reference() is not None for reference in held) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.05)
    return [reference() is None for reference in held]


@pytest.mark.parametrize("name", ["alltoall", *DISPATCHERS])
def test_the_graph_is_freed(world, name):
    assert world.run(graph_is_freed, name, size=2) == [[True, True]] * 2


def refusals(rank):
    """The message of each use that cannot work."""
    tall = create_context(Topology(world=2, etp=2), rank=rank, device=torch.device("cpu"), sequence_parallel=False)
    two = create_context(Topology(world=2, ep=2), rank=rank, device=torch.device("cpu"), sequence_parallel=False)
    messages = []
    for context, dtype in ((ParallelContext.single(), torch.bfloat16), (tall, torch.bfloat16), (two, torch.float32)):
        with pytest.raises(ValueError) as caught:
            DeepEPDispatcher(context, 8, hidden_size=8, dtype=dtype, package=fake_deep_ep)
        messages.append(str(caught.value))
    with pytest.raises(ValueError) as caught:
        make_buffer(fake_deep_ep, two.edp, 16)
    return [*messages, str(caught.value)]


def test_what_cannot_work_is_refused(world):
    one, tall, wide, odd = world.run(refusals, size=2)[0]
    assert "--expert-model-parallel-size above 1" in one and "alltoall" in one
    assert "--expert-model-parallel-size above 1" in tall
    assert "--bf16" in wide and "float32" in wide
    assert "over 1 ranks" in odd and "(2, 4, 8)" in odd
