"""Rooms for the worst case, of which the host knows the size: the same bits as rooms of the right size, whatever lies in the rest."""

import dataclasses

import pytest
import torch

from megatron_dllm.config import PRESETS, MoEConfig
from megatron_dllm.moe.dispatchers import build
from megatron_dllm.moe.dispatchers.deepep import DeepEPDispatcher
from megatron_dllm.moe.layer import MoELayer
from megatron_dllm.moe.replay import NOT_CHECKPOINTED
from megatron_dllm.parallel import Topology, create_context
from megatron_dllm.tensor_parallel import Initializer
from megatron_dllm.transformer.recompute import Recompute
from tests.parallel import fake_deep_ep

CONFIG = dataclasses.replace(PRESETS["toy"], hidden_size=16, moe_ffn_hidden_size=8, num_experts=8, moe_router_topk=2)
ROOM = 12
CASES = {  # name: dispatcher, tokens of each rank, the expert that is every token's first choice, sizes
    "alltoall": ("alltoall", (5, 9), None, {"ep": 2}),
    "alltoall, all that fits": ("alltoall", (ROOM, ROOM), 5, {"ep": 2}),
    "alltoall, a rank with nothing": ("alltoall", (0, 9), None, {"ep": 2}),
    "alltoall, etp": ("alltoall", (5, 9), None, {"etp": 2}),
    "deepep": ("deepep", (5, 9), None, {"ep": 2}),
    "deepep, all that fits": ("deepep", (ROOM, ROOM), 5, {"ep": 2}),
    "deepep, a rank with nothing": ("deepep", (0, 9), None, {"ep": 2}),
}


def results(rank, case, part, bounds):
    """For each bound on the tokens the output and all gradients, and how often a layout was exchanged."""
    name, tokens, favourite, sizes = CASES[case]
    context = create_context(Topology(world=2, **sizes), rank=rank, device=torch.device("cpu"), sequence_parallel=False)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "import_package", lambda *_: fake_deep_ep)
        for bound in bounds:
            moe = MoEConfig(moe_token_dispatcher_type=name, moe_max_tokens_per_rank=bound)
            layer = MoELayer("layers.0", CONFIG, context=context, init=Initializer(7, 0.5), dtype=torch.bfloat16,
                             dispatcher=build.build_dispatcher(moe, context, CONFIG, torch.bfloat16))  # fmt: skip
            draw = torch.Generator().manual_seed(rank)
            x = torch.randn(tokens[rank], 16, generator=draw).bfloat16().requires_grad_()
            if favourite is not None:
                layer.router.weight.data[favourite] = 9 * x.detach().float().mean(0) if len(x) else 0
            context.log.clear()
            y = Recompute(frozenset([part])).with_moe("moe", lambda call, h, layer=layer: layer(h, h, call), NOT_CHECKPOINTED, x)
            gradients = torch.autograd.grad(y.float().square().sum(), [x, *layer.parameters()])
            found.append(([y.detach(), *gradients], context.log.calls["layout_exchange", "ep"]))
    return found


@pytest.mark.parametrize("case", CASES)
def test_same_bits(world, case):
    for part in ("none", "moe"):
        for exact, *roomy in world.run(results, case, part, [None, ROOM, ROOM + 5], size=2):
            assert exact[1] == 1 and all(value.isfinite().all() for value in exact[0])
            for values, exchanges in roomy:
                assert exchanges == 1
                assert all(torch.equal(a, b) for a, b in zip(values, exact[0], strict=True))


def on_the_host(rank, bound):
    """What the alltoall plan tells the host."""
    context = create_context(Topology(world=2, ep=2), rank=rank, device=torch.device("cpu"), sequence_parallel=False)
    dispatcher = build.build_dispatcher(MoEConfig(moe_max_tokens_per_rank=bound), context, CONFIG, torch.bfloat16)
    plan = dispatcher.prepare(torch.tensor([[0, 1], [2, 3], [0, 7]][: 3 - rank]))
    return plan.send, plan.receive, plan.counts.tolist()


def test_numbers_of_rows_stay_on_the_device(world):
    """Rank 0 has choices 0 1, 2 3, 0 7 and rank 1 the first two tokens of these; each has four of eight experts."""
    assert world.run(on_the_host, None, size=2) == [((5, 1), (5, 4), [3, 2, 2, 2]), ((4, 0), (1, 0), [0, 0, 0, 1])]
    assert world.run(on_the_host, 3, size=2) == [((6, 6), (6, 6), [3, 2, 2, 2]), ((6, 6), (6, 6), [0, 0, 0, 1])]


def refusals(rank):
    context = create_context(Topology(world=2, ep=2), rank=rank, device=torch.device("cpu"), sequence_parallel=False)
    messages = []
    deepep = DeepEPDispatcher(context, 8, hidden_size=16, dtype=torch.bfloat16, package=fake_deep_ep, max_tokens=2)
    alltoall = build.build_dispatcher(MoEConfig(moe_max_tokens_per_rank=2), context, CONFIG, torch.bfloat16)
    for dispatcher in (deepep, alltoall):
        with pytest.raises(ValueError) as caught:
            dispatcher.prepare(torch.zeros(3, 2, dtype=torch.int64))
        messages.append(str(caught.value))
    return messages


def test_too_many_tokens_are_refused(world):
    for message in world.run(refusals, size=2)[0]:
        assert "--moe-max-tokens-per-rank 2: this rank has 3 tokens in a pass; set it to 3 or more" in message
