"""Mixture of experts over gloo processes: dispatchers against one process, dispatch replay, exchanges counted in the call.

Usage: python tools/verify.py moe [--quick]      (--quick: 2 and 4 processes, all figures, small sizes; without it also longer sequences)
"""
from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.utils.checkpoint
from torch import Tensor

from megatron_dllm.config import PRESETS, MoEConfig
from megatron_dllm.moe.dispatchers.build import build_dispatcher
from megatron_dllm.moe.layer import MoELayer
from megatron_dllm.moe.replay import NOT_CHECKPOINTED
from megatron_dllm.parallel import ParallelContext, Topology, communication, create_context
from megatron_dllm.tensor_parallel.initialization import Initializer
from megatron_dllm.transformer.recompute import Recompute
from tests.parallel.world import World
from verification.moe_steps import STEPS, model_step
from verification.table import Figure, print_figures

CPU = torch.device("cpu")
CONFIG = dataclasses.replace(PRESETS["toy"], hidden_size=16, moe_ffn_hidden_size=8, num_experts=8, moe_router_topk=2)


@dataclass(frozen=True)
class Case:
    """Tokens of each rank, and how they are routed: `skew` makes the router prefer each expert to the one before it."""

    name: str
    tokens: tuple[int, ...]
    ep: int = 1
    etp: int = 1
    skew: float = 0.0
    favourite: int | None = None

    def __str__(self) -> str:
        return f"ep {self.ep}, etp {self.etp}, tokens {', '.join(map(str, self.tokens))}: {self.name}"


CASES = (
    Case("skewed routing", (37, 50), ep=2, skew=1.0),
    Case("one expert gets a choice of every token", (37, 50), ep=2, favourite=5),
    Case("lengths side by side", (17, 1024), ep=2, skew=0.5),
    Case("a rank with nothing", (0, 33), ep=2),
    Case("nothing at all", (0, 0), ep=2),
    Case("one token: six experts with nothing", (1, 0), ep=2),
    Case("lengths side by side", (17, 1024), etp=2, skew=0.5),
    Case("a rank with nothing", (33, 0), etp=2),
    Case("skewed routing", (37, 50, 0, 64), ep=4, skew=1.0),
    Case("skewed routing", (37, 50, 0, 64), ep=2, skew=1.0),
    Case("skewed routing, one rank with nothing", (37, 50, 0, 64), ep=2, etp=2, skew=1.0),
)
LONG_CASES = (
    Case("lengths side by side", (17, 16384), ep=2, skew=1.0),
    Case("skewed routing", (8192, 0, 4096, 1), ep=4, skew=2.0),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="Leave out the cases of many thousand tokens.")


def run(arguments: argparse.Namespace) -> int:
    """Print the table; the number of missed figures."""
    torch.set_num_threads(1)
    world = World(4)
    try:
        figures = [figure for case in CASES + (() if arguments.quick else LONG_CASES) for figure in dispatchers(world, case)]
        figures += [reduction_left_out(world), *bf16_counts(world), *replay(world), *perturbed(), corrupted()]
    finally:
        world.close()
    print(f"torch {torch.__version__}, gloo, hidden {CONFIG.hidden_size}, {CONFIG.num_experts} experts, top {CONFIG.moe_router_topk}; "
          "differences are relative to the largest value of a tensor, the worst of outputs, input gradients and weight gradients")
    return print_figures("moe", figures)


def build_layer(context: ParallelContext, dispatcher: str, case: Case, dtype: torch.dtype) -> MoELayer:
    name, _, bounded = dispatcher.partition(", ")
    bound = max(case.tokens) if bounded else None
    made = build_dispatcher(MoEConfig(moe_token_dispatcher_type=name, moe_max_tokens_per_rank=bound), context, CONFIG, dtype)
    layer = MoELayer("layers.0", CONFIG, context=context, init=Initializer(7, 0.5), dtype=dtype, dispatcher=made)
    with torch.no_grad():  # what the router reads is positive, so that adding to a row of its weight adds to that expert's logits
        layer.router.weight += torch.arange(CONFIG.num_experts)[:, None] * case.skew
        if case.favourite is not None:
            layer.router.weight[case.favourite] = 30.0
    return layer


def tokens_of(case: Case, dtype: torch.dtype) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(experts' input, router's input, output weights) of every rank."""
    draw = torch.Generator().manual_seed(3)
    made = [[torch.randn(n, CONFIG.hidden_size, generator=draw, dtype=torch.float64) for _ in range(3)] for n in case.tokens]
    return [(x.to(dtype), residual.abs().to(dtype), weights.to(dtype)) for x, residual, weights in made]


def layer_results(layer: MoELayer, x: Tensor, residual: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Output and gradients, those of the parameters under their names."""
    x, residual = x.clone().requires_grad_(), residual.clone().requires_grad_()
    y = layer(x, residual)
    names, parameters = zip(*layer.named_parameters(), strict=True)
    gradients = torch.autograd.grad((y * weights).sum(), [x, residual, *parameters])
    return dict(zip(["output", "dx", "dresidual", *names], [y.detach(), *gradients], strict=True))


def compare(rank: int, case: Case, dispatcher: str, dtype: torch.dtype, forget: str = "") -> tuple[float, str, list[int]]:
    """(largest difference to one process in float64, the tensor's name, rows of each of our experts)."""
    context = create_context(Topology(world=len(case.tokens), ep=case.ep, etp=case.etp), rank=rank, device=CPU, sequence_parallel=False)
    everyone = tokens_of(case, dtype)
    layer = build_layer(context, dispatcher, case, dtype)
    ours = layer_results(layer, *everyone[rank])
    alone = build_layer(ParallelContext.single(), "alltoall", case, torch.float64)
    alone.load_state_dict(build_layer(ParallelContext.single(), "alltoall", case, dtype).state_dict())  # with weights as rounded
    whole = layer_results(alone, *(torch.cat(parts).to(torch.float64) for parts in zip(*everyone, strict=True)))
    start, worst = sum(case.tokens[:rank]), (0.0, "-")
    placements = {name: parameter.placement for name, parameter in layer.named_parameters()}
    for name, value in ours.items():
        if name in placements:
            group = context.edp if placements[name].grid == "expert" else context.world
            value = value.to(torch.float64) if name == forget else communication.all_reduce(value.to(torch.float64), group)
            expected = placements[name].cut(whole[name])
        else:
            expected = whole[name][start:start + case.tokens[rank]]
        if value.numel():
            scale = whole[name].abs().max().item() or 1.0
            worst = max(worst, ((value - expected).abs().max().item() / scale, name))
    return *worst, rows_of_experts(layer, *everyone[rank][:2])


def rows_of_experts(layer: MoELayer, x: Tensor, residual: Tensor) -> list[int]:
    """How many rows arrive for each of our experts."""
    routing = layer.router.route(residual)
    trip = layer.dispatcher.trip(layer.dispatcher.prepare(routing.indices), routing.weights)
    trip.dispatch(x)
    return trip.after_dispatch()[1].tolist()


def dispatchers(world: World, case: Case) -> list[Figure]:
    figures = []
    for dispatcher in ("allgather", "alltoall", "alltoall, bounded"):
        results = world.run(compare, case, dispatcher, torch.float64, size=len(case.tokens), timeout=120)
        rows = [count for _, _, counts in results for count in counts]
        value, name = max(result[:2] for result in results)
        figures.append(Figure(f"{dispatcher}, {case}", value, 1e-12, f"worst {name}; rows of an expert {min(rows)} to {max(rows)}"))
    return figures


def reduction_left_out(world: World) -> Figure:
    """A planted fault: the experts' gradients of one rank alone."""
    case = next(case for case in CASES if len(case.tokens) == 4 and case.ep == 2 and case.etp == 1)
    value = max(result[0] for result in world.run(compare, case, "alltoall", torch.float64, "experts.down", size=4))
    return Figure("planted fault: a reduction over edp left out is seen (negated difference)", -value, -1e-3, "at least 1e-3")


def bf16_counts(world: World) -> list[Figure]:
    """Experts with more rows than bf16 counts exactly (256): the counts themselves, and the error beside that of one process in bf16."""
    case = Case("counts above 256, bf16", (700, 333), ep=2, favourite=5)
    expected = torch.cat([torch.bincount(indices.flatten(), minlength=CONFIG.num_experts)[None] for indices in bf16_indices(case)]).sum(0)
    figures = []
    for dispatcher in ("allgather", "alltoall"):
        results = world.run(compare, case, dispatcher, torch.bfloat16, size=2)
        alone = world.run(compare, dataclasses.replace(case, tokens=(sum(case.tokens),), ep=1), dispatcher, torch.bfloat16, size=1)[0]
        wrong = sum(a != b for a, b in zip([n for result in results for n in result[2]], expected.tolist(), strict=True))
        figures.append(Figure(f"{dispatcher}, {case}: experts whose count is wrong", wrong, 0, f"largest count {expected.max().item()}"))
        value, name = max(result[:2] for result in results)
        figures.append(Figure(f"{dispatcher}, {case}: error against float64", value, 2 * alone[0],
                              f"twice that of one process in bf16; worst {name}"))
    return figures


def bf16_indices(case: Case) -> Sequence[Tensor]:
    layer = build_layer(ParallelContext.single(), "alltoall", case, torch.bfloat16)
    with torch.no_grad():
        return [layer.router.route(residual).indices for _, residual, _ in tokens_of(case, torch.bfloat16)]


def replay(world: World) -> list[Figure]:
    """Whole steps of the toy model over ep 2: exchanges counted, losses and gradients bit-equal."""
    figures = []
    for dispatcher in ("alltoall", "allgather"):
        results = {step.name: world.run(model_step, dispatcher, step, size=2, timeout=180) for step in STEPS}
        plain = results["no recompute"]
        for step in STEPS[1:]:
            ranks = results[step.name]
            different = sum(not same for known, got in zip(plain, ranks, strict=True) for same in got.equal_to(known))
            figures.append(Figure(f"{dispatcher}, {step.name}: losses and gradients not bit-equal to no recompute", different, 0,
                                  f"of {len(ranks[0].digests)} on each of 2 ranks"))
            exchanges, forwards = ranks[0].exchanges, ranks[0].forward_dispatches
            expected = forwards if step.replays else 2 * forwards
            figures.append(Figure(f"{dispatcher}, {step.name}: layout exchanges a step, off from {expected}", abs(exchanges - expected), 0,
                                  f"{forwards} forward dispatches; recompute: {ranks[0].hits} replayed, {ranks[0].misses} dispatched anew"))
    return figures


def tie(direction: int) -> tuple[MoELayer, Tensor, Tensor]:
    """A layer whose first two experts tie for second place for every token, its tokens, and these moved by one unit in the last place."""
    layer = build_layer(ParallelContext.single(), "alltoall", CASES[0], torch.float32)
    x = torch.randn(64, CONFIG.hidden_size, generator=torch.Generator().manual_seed(5))
    x[:, 1] = x[:, 0] = x[:, 0].abs() + 1
    with torch.no_grad():
        layer.router.weight.mul_(0.01)
        layer.router.weight[:3] = 0
        layer.router.weight[:3, :2] = torch.tensor([[300.0, 0.0], [0.0, 300.0], [151.0, 151.0]])
    moved = x.clone()
    moved[:, 0] = torch.nextafter(x[:, 0], torch.full_like(x[:, 0], direction * 99.0))
    return layer, x, moved


def perturbed() -> list[Figure]:
    """A recompute whose router reads tokens one unit in the last place away, at a tie."""
    elsewhere = changed = 0
    gradient = torch.inf
    for direction in (1, -1):
        layer, x, moved = tie(direction)
        with torch.no_grad():
            changed += (layer.router.route(x).indices != layer.router.route(moved).indices).any(1).sum().item()
        seen = []
        hook = layer.router.register_forward_hook(lambda module, _, routing, seen=seen: seen.append(routing.indices))
        y = Recompute(frozenset(["moe"])).with_moe(
            "moe", lambda call, h, layer=layer, x=x, moved=moved: layer(h, moved if call.is_recompute else x, call), NOT_CHECKPOINTED,
            x.clone().requires_grad_())
        y.square().sum().backward()
        hook.remove()
        forward, again = seen
        elsewhere += (forward != again).any(1).sum().item()
        gradient = min(gradient, layer.router.weight.grad.norm().item())
    return [
        Figure("perturbed recompute: tokens routed elsewhere than in the forward", elsewhere, 0, "router input one ulp away, 128 tokens"),
        Figure("the same without replay (negated)", -changed, -1, "tokens that a router deciding anew sends elsewhere"),
        Figure("perturbed recompute: the router's gradient is there (negated norm)", -gradient, -1e-6, "at least 1e-6"),
    ]


def corrupted() -> Figure:
    """A record that something wrote to between forward and recompute."""
    layer, x, _ = tie(1)
    recompute, records = Recompute(frozenset(["moe"])), []

    def function(call, h):
        y = layer(h, h, call)
        records.extend([] if call.is_recompute else call.log.records)
        return y

    y = recompute.with_moe("moe", function, NOT_CHECKPOINTED, x.requires_grad_())
    records[0].indices[17, 0] ^= 1
    y.sum().backward()
    caught = recompute.monitor.report().corrupted
    return Figure("a corrupted record is not caught", float(caught != ("layers.0",)), 0, f"one index of 128 changed; caught in {caught}")
