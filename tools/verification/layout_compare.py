"""One case in a world against one process: figures, and for what is off an explanation that says where to look."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dllm.data_parallel import Piece, finalize
from megatron_dllm.data_parallel.buckets import Bucket
from megatron_dllm.parallel import ParallelContext, Topology, Watchdog, create_context
from megatron_dllm.parallel.communication import Pending
from megatron_dllm.training.algorithms import adamw, sgd
from verification.layout_cases import Case, Layout
from verification.layout_training import (
    LEARNING_RATE,
    SMALLEST_SHARE,
    Trace,
    Trainer,
    finish,
    largest,
    make_examples,
    make_run,
    narrow_excess,
    second_run,
)

# fp64: differences of losses, of gradients relative to the tensor's largest, of parameters after SGD. Under AdamW, in units of the learning
# rate, a gradient of the size of adam_eps moves with its relative rounding, so that the gate is wider.
WIDE_LIMIT, ADAMW_LIMIT = 1e-10, 1e-6
# fp32 (docs/design.md 3.6): loss relative to the loss; a gradient element |d| in units of 1e-5 |ref| + 1e-7 |g|.
NARROW_LOSS_LIMIT, NARROW_GRADIENT_LIMIT = 1e-6, 1.0
CASE_SECONDS = 150.0  # a case takes about two; one that hangs ends its world, with the stacks of all ranks
Computed, Figures = TypeVar("Computed"), TypeVar("Figures")  # what one process computed; what a case is judged by


@dataclass(frozen=True)
class Worst:
    """A difference, the parameter that has it, and the rank that holds the shard."""

    value: float = 0.0
    name: str = "-"
    rank: int = 0


@dataclass(frozen=True)
class Outcome:
    """The figures of one case, over all ranks."""

    case: str
    fault: str
    seed: int
    routing_gap: float
    loss: float
    norm: float
    gradient: Worst
    after_sgd: Worst
    after_adamw: Worst
    narrow_loss: float
    narrow_gradient: Worst
    by_floor_alone: tuple[str, ...]
    same_noise: bool
    sent_bytes: Mapping[str, int]  # by kind of collective, this case's SGD run, rank 0
    explanations: tuple[str, ...]

    def missed(self) -> list[str]:
        """The figures that are over their limits; NaN is over every limit."""
        gates = {
            "loss": (self.loss, WIDE_LIMIT), "gradient norm": (self.norm, WIDE_LIMIT), "gradient": (self.gradient.value, WIDE_LIMIT),
            "parameters after SGD": (self.after_sgd.value, WIDE_LIMIT), "parameters after AdamW": (self.after_adamw.value, ADAMW_LIMIT),
            "fp32 loss": (self.narrow_loss, NARROW_LOSS_LIMIT), "fp32 gradient": (self.narrow_gradient.value, NARROW_GRADIENT_LIMIT)}
        return [name for name, (value, limit) in gates.items() if not value <= limit] + ([] if self.same_noise else ["noise"])


def _forget_shares() -> AbstractContextManager:
    return mock.patch.object(finalize, "sum_shared_gradients", lambda *_: None)


def _forget_a_bucket() -> AbstractContextManager:
    start = Bucket.start_sum

    def start_all_but_one(bucket: Bucket) -> None:
        if "final_norm.weight" in bucket.names:
            bucket.pending = Pending(bucket.gradients)
        else:
            start(bucket)

    return mock.patch.object(Bucket, "start_sum", start_all_but_one)


# Planted faults, each a reduction left out: what must be found -> (layout, how).
FAULTS: dict[str, tuple[str, Callable[[], AbstractContextManager]]] = {
    "one bucket is not summed over dp_cp": ("dp2", _forget_a_bucket),
    "shares are not summed over tp": ("tp2+sp", _forget_shares),
}


def layout_context(layout: Layout, base: ParallelContext) -> ParallelContext:
    """The groups of a layout over the whole world, which must be of its size."""
    return create_context(
        Topology.of(layout.parallel, base.world.size), rank=base.world.rank, device=base.device,
        sequence_parallel=layout.parallel.sequence_parallel)


def run_case(case: Case, trace: Computed, context: ParallelContext, compare: Callable[[Case, Computed, ParallelContext, str], Figures],
             fault: str = "") -> Figures:
    """Train `case` on all ranks of its layout's context and compare; every rank gets the outcome."""
    with Watchdog(context.log, rank=context.world.rank, seconds=CASE_SECONDS) as watchdog, FAULTS[fault][1]() if fault else nullcontext():
        watchdog.beat(case.name)
        return compare(case, trace, context, fault)


def compare_wide(case: Case, trace: Trace, context: ParallelContext, fault: str) -> Outcome:
    """Train `case` in fp64, one step in fp32 too, and compare."""
    world, examples = context.world, make_examples(case.reference, make_run(case.alone, trace.seed))
    narrow = Trainer(case, context, torch.float32, trace.seed, sgd, examples)
    narrow.gradients()
    narrow_worst, by_floor = _narrow_gradients(narrow.optimizer.buckets.pieces(), trace, world.rank)
    wide = Trainer(case, context, torch.float64, trace.seed, sgd, examples)
    context.log.clear()
    wide.gradients()
    gradient, explanations = _wide_gradients(list(wide.optimizer.buckets.pieces()), trace, context)
    adamw_run = second_run(wide)
    wide.update()
    finish(wide)
    sent = {kind: sent_bytes for kind, (_, sent_bytes) in context.log.by_kind().items()}
    after_sgd = _parameters(wide, trace.after_sgd, world.rank, unit=1.0)
    adamw_run.update()
    finish(adamw_run)
    own = (gradient, after_sgd, _parameters(adamw_run, trace.after_adamw, world.rank, unit=LEARNING_RATE[adamw]), narrow_worst)
    gathered: list = [None] * world.size
    dist.all_gather_object(gathered, (own, by_floor, explanations, wide.noise))
    worst = [worst_of(ranks[0][place] for ranks in gathered) for place in range(len(own))]
    noise = {sample: digest for ranks in gathered for sample, digest in ranks[3].items()}
    return Outcome(
        case.name, fault, trace.seed, trace.routing_gap, _difference(wide.losses, trace.losses), _difference(wide.norms, trace.norms),
        *worst[:3], abs(narrow.losses[0] - trace.narrow.loss) / max(abs(trace.narrow.loss), 1.0), worst[3],
        tuple(sorted({name for ranks in gathered for name in ranks[1]})), noise == trace.noise, sent,
        tuple(text for ranks in gathered for text in ranks[2]))


def worst_of(several: Iterable[Worst]) -> Worst:
    """The largest; NaN is the largest of all."""
    return max(several, key=lambda worst: worst.value if worst.value == worst.value else float("inf"))


def _difference(ours: Sequence[float], reference: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, reference, strict=True))


def _narrow_gradients(pieces: Iterator[Piece], trace: Trace, rank: int) -> tuple[Worst, list[str]]:
    worst, by_floor = Worst(), []
    for piece in pieces:
        reference = piece.cut(trace.narrow.gradients[piece.name])
        ours = piece.gradient.cpu()
        worst = _worse(worst, Worst(narrow_excess(ours, reference, trace.narrow.norm), piece.name, rank))
        if ((ours - reference).abs() > 1e-5 * reference.abs()).any():
            by_floor.append(piece.name)
    return worst, by_floor


def _wide_gradients(pieces: Sequence[Piece], trace: Trace, context: ParallelContext) -> tuple[Worst, list[str]]:
    """The worst difference, and an explanation for each parameter that is off on this rank."""
    worst, explanations = Worst(), []
    for piece in pieces:
        whole = trace.gradients[piece.name]
        ours, reference = piece.gradient.cpu(), piece.cut(whole)
        scale = max(largest(whole), SMALLEST_SHARE * trace.norms[0])
        difference = largest(ours - reference) / scale
        worst = _worse(worst, Worst(difference, piece.name, context.world.rank))
        if not difference <= WIDE_LIMIT:
            explanations.append(explain(piece, ours, reference, difference, context))
    return worst, explanations


def _parameters(run: Trainer, reference: Mapping[str, Tensor], rank: int, *, unit: float) -> Worst:
    worst = Worst()
    for name, parameter in run.model.named_parameters():
        placement = parameter.placement
        difference = largest(placement.region(parameter.detach()).cpu() - placement.cut(reference[name])) / unit
        worst = _worse(worst, Worst(difference, name, rank))
    return worst


def _worse(one: Worst, other: Worst) -> Worst:
    return other if other.value > one.value or other.value != other.value else one


def explain(piece: Piece, ours: Tensor, reference: Tensor, difference: float, context: ParallelContext) -> str:
    """What a reader needs to find the fault: the shard, how it differs, and the reductions that this gradient depends on."""
    placement, world = piece.placement, context.world
    places = ", ".join(f"{axis} {context.group(axis).rank}" for axis in ("tp", "cp", "dp", "ep", "etp") if context.group(axis).size > 1)
    data_parallel = context.dp_cp if placement.grid == "dense" else context.edp
    steps = [f"sum over {data_parallel.name} {data_parallel.ranks}"] if data_parallel.size > 1 else []
    if placement.partial_over_tp and context.tp.size > 1:
        steps.append(f"sum over tp {context.tp.ranks}, each rank having a share (partial_over_tp)")
    if placement.copies > 1:
        steps.append(f"sum over the {placement.copies} tp ranks that hold these KV heads (copies)")
    cut = [f"dimension {dim} by {axis}" for axis, dim in placement.axes.items() if dim is not None and context.group(axis).size > 1]
    needs = "; ".join(steps) or "no reduction"
    factor = (ours * reference).sum() / reference.square().sum()
    rest = largest(ours - factor * reference) / max(largest(reference), 1e-300)
    ratio = f"; it is {factor:.6g} times the reference throughout" if rest < 1e-6 else ""
    shard = f"{'cut in ' + ', '.join(cut) if cut else 'whole'}, elements {piece.start} to {piece.stop} from {list(placement.offset)}"
    return (f"{piece.name} {list(placement.shape)}: rank {world.rank} ({places}), {shard}: gradient off by {difference:.2e} of the "
            f"largest{ratio}. It depends on: {needs}")
