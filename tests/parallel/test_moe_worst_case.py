"""Rooms for the worst case, of which the host knows the size: what rooms of the right size give, whatever lies in the rest."""

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
from megatron_dllm.transformer.precision import at_least_fp32
from megatron_dllm.transformer.recompute import Recompute
from tests.parallel import fake_deep_ep

CONFIG = dataclasses.replace(PRESETS["toy"], hidden_size=16, moe_ffn_hidden_size=8, num_experts=8, moe_router_topk=2)
ROOM = 12
# Of alltoall a dispatcher of its own takes the place, which adds up in another order: it is compared in float64.
DTYPES = {"deepep": torch.bfloat16, "alltoall": torch.float64}
CASES = {  # name: dispatcher, tokens of each rank, the expert that is every token's first choice, sizes
    "alltoall": ("alltoall", (5, 9), None, {"ep": 2}),
    "alltoall, all that fits": ("alltoall", (ROOM, ROOM), 5, {"ep": 2}),
    "alltoall, a rank with nothing": ("alltoall", (0, 9), None, {"ep": 2}),
    "alltoall, etp": ("alltoall", (5, 9), None, {"etp": 2}),
    "alltoall, ep and etp": ("alltoall", (5, 9, 0, 1), None, {"ep": 2, "etp": 2}),
    "alltoall, more choices than experts of a rank": ("alltoall", (5, 9, 2, 3), None, {"ep": 4}),
    "deepep": ("deepep", (5, 9), None, {"ep": 2}),
    "deepep, all that fits": ("deepep", (ROOM, ROOM), 5, {"ep": 2}),
    "deepep, a rank with nothing": ("deepep", (0, 9), None, {"ep": 2}),
}


def results(rank, case, part, bounds):
    """For each bound on the tokens the output and all gradients, and how often a layout was exchanged."""
    name, tokens, favourite, sizes = CASES[case]
    context = create_context(Topology(world=len(tokens), **sizes), rank=rank, device=torch.device("cpu"), sequence_parallel=False)
    found, dtype = [], DTYPES[name]
    config = dataclasses.replace(CONFIG, moe_router_topk=3) if context.ep.size == 4 else CONFIG
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "import_package", lambda *_: fake_deep_ep)
        for bound in bounds:
            moe = MoEConfig(moe_token_dispatcher_type=name, moe_max_tokens_per_rank=bound)
            layer = MoELayer("layers.0", config, context=context, init=Initializer(7, 0.5), dtype=dtype,
                             dispatcher=build.build_dispatcher(moe, context, config, dtype))  # fmt: skip
            draw = torch.Generator().manual_seed(rank)
            x = torch.randn(tokens[rank], 16, generator=draw).to(dtype).requires_grad_()
            if favourite is not None:
                layer.router.weight.data[favourite] = 9 * x.detach().to(layer.router.weight.dtype).mean(0) if len(x) else 0
            context.log.clear()
            y = Recompute(frozenset([part])).with_moe("moe", lambda call, h, layer=layer: layer(h, h, call), NOT_CHECKPOINTED, x)
            gradients = torch.autograd.grad(at_least_fp32(y).square().sum(), [x, *layer.parameters()])
            found.append(([y.detach(), *gradients], context.log.calls["layout_exchange", "ep"]))
    return found


@pytest.mark.parametrize("case", CASES)
def test_same_results(world, case):
    name, tokens, *_ = CASES[case]
    for part in ("none", "moe"):
        for exact, *roomy in world.run(results, case, part, [None, ROOM, ROOM + 5], size=len(tokens)):
            assert exact[1] == 1 and all(value.isfinite().all() for value in exact[0])
            for values, exchanges in roomy:
                assert exchanges == 1
                if name == "deepep":
                    assert all(torch.equal(a, b) for a, b in zip(values, exact[0], strict=True))
                else:
                    assert all((a - b).abs().max() <= 1e-12 * b.abs().max() if b.numel() else True
                               for a, b in zip(values, exact[0], strict=True))  # fmt: skip
                    assert all(torch.equal(a, b) for a, b in zip(values, roomy[0][0], strict=True))


def on_the_host(rank, bound):
    """What the alltoall plan tells the host, and what a forward and backward send."""
    context = create_context(Topology(world=2, ep=2), rank=rank, device=torch.device("cpu"), sequence_parallel=False)
    dispatcher = build.build_dispatcher(MoEConfig(moe_max_tokens_per_rank=bound), context, CONFIG, torch.bfloat16)
    indices = torch.tensor([[0, 1], [2, 3], [0, 7]][: 3 - rank])
    plan = dispatcher.prepare(indices)
    context.log.clear()
    x, weights = torch.ones(len(indices), 16, dtype=torch.bfloat16, requires_grad=True), torch.ones(indices.shape, requires_grad=True)
    trip = dispatcher.trip(plan, weights)
    trip.dispatch(x)
    rows, counts = trip.after_dispatch()
    trip.combine(rows)
    trip.after_combine().sum().backward()
    return len(rows), counts.tolist(), x.grad.unique().tolist(), weights.grad.unique().tolist(), context.log.by_kind()


def test_tokens_are_sent_and_numbers_of_rows_stay_on_the_device(world):
    """Rank 0 has choices 0 1, 2 3, 0 7 and rank 1 the first two tokens of these; each has four of eight experts."""
    exact, roomy = world.run(on_the_host, None, size=2), world.run(on_the_host, 3, size=2)
    assert [(rows, counts) for rows, counts, *_ in exact] == [(9, [3, 2, 2, 2]), (1, [0, 0, 0, 1])]
    assert [(rows, counts) for rows, counts, *_ in roomy] == [(12, [3, 2, 2, 2]), (12, [0, 0, 0, 1])]
    for both in (exact, roomy):
        assert all((dx, dweights) == ([2.0], [16.0]) for _, _, dx, dweights, _ in both)
    # Three tokens of 16 bf16 numbers each way, with two weights in fp32 one way, and of these the gradients.
    assert all(sent == {"all_gather": (3, 2 * 96 + 24), "all_to_all": (3, 2 * 96 + 24)} for *_, sent in roomy)


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
