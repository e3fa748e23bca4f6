"""Affine pipeline stages on integers, whose sums are exact in any order: what crosses a boundary must equal a serial run bit for bit."""
from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megatron_dllm.parallel import ParallelContext, Topology, communication, create_context
from megatron_dllm.pipeline import EdgeShapes, Kind, Pipeline, build_schedule
from megatron_dllm.pipeline.assembly import Schedule
from megatron_dllm.pipeline.executor import PipelineExecutor
from megatron_dllm.pipeline.p2p import PointToPoint
from megatron_dllm.pipeline.stage import StageOutput, new_node

LARGEST = 8
EXACT = 2 ** 53  # integers up to here are exact in float64


@dataclass(frozen=True)
class AffineCase:
    """`coins` says which microbatches pass twice; `empty` are stages that do nothing. Microbatch m has 2 * (m % 3 + 1) rows, or none."""

    ranks: int
    chunks: int
    hidden: int
    streams: int
    coins: tuple[bool, ...]
    empty: frozenset[int] = frozenset()
    batched: bool = True
    overlap: bool = True
    tp: int = 1
    rows_of_none: frozenset[int] = frozenset()
    equal_rows: bool = False

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    @property
    def width(self) -> int:
        return self.hidden * self.streams

    def rows(self, microbatch: int, loop: int) -> int:
        """Rows of a microbatch over all tp ranks; loop 1 has half of loop 0's."""
        share = 0 if microbatch in self.rows_of_none else 1 if self.equal_rows else microbatch % 3 + 1
        return (2 - loop) * share * self.tp


@dataclass(frozen=True)
class Context:
    """What a stage's loop 0 keeps: its input."""

    kept: Tensor


@dataclass
class Record:
    """What crossed the boundary before a stage, by (microbatch, loop): the tensor, and its gradient."""

    received: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    gradients: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)


class AffineStage(nn.Module):
    """y = x * scale + shift (loop 1: + what loop 0 kept). The first one reads data, or the signal in all streams; the last has a loss."""

    def __init__(self, case: AffineCase, stage: int):
        super().__init__()
        self.case, self.stage, self.record = case, stage, Record()
        draw = torch.Generator().manual_seed(stage)
        self.scale, self.shift = (nn.Parameter(integers(draw, case.width)) for _ in range(2))
        self.embedding = nn.Parameter(integers(draw, case.hidden)) if stage == case.stages - 1 else None

    def forward(self, microbatch: Microbatch, loop: int, received: Tensor | None, earlier: dict | None) -> StageOutput:
        case, key = self.case, (microbatch.number, loop)
        if received is not None:
            self.record.received[key] = received.detach().clone()
            if received.requires_grad:
                received.register_hook(lambda gradient: self.record.gradients.__setitem__(key, gradient.clone()))
        x = received
        if self.stage == 0:
            x = microbatch.data if loop == 0 else received.repeat(1, case.streams)
        if self.stage in case.empty:
            y = new_node(x)
        else:
            y = x * self.scale + self.shift
            if loop == 1:
                y = y + earlier["kept"].kept
        contexts = {"kept": Context(x[:len(x) // 2])} if loop == 0 and self.stage not in case.empty else {}
        if self.stage < case.stages - 1:
            self.record.outputs.append(y)
            return StageOutput(hidden=y, contexts=contexts)
        loss = (y * microbatch.weights[:len(y)]).sum()
        soft = y.detach()[:len(y) // 2, :case.hidden] * self.embedding if loop == 0 else None
        return StageOutput(loss=loss, soft_embedding=soft, contexts=contexts, report=loss.detach())


@dataclass(frozen=True)
class Microbatch:
    """data and weights [T, width] of our rows."""

    number: int
    data: Tensor
    weights: Tensor


def integers(draw: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(-LARGEST, LARGEST + 1, shape, generator=draw).double()


def microbatches(case: AffineCase, tp_rank: int, device: torch.device) -> list[Microbatch]:
    made = []
    for number in range(len(case.coins)):
        draw = torch.Generator().manual_seed(100 + number)
        whole = [integers(draw, case.rows(number, 0), case.width) for _ in range(2)]
        made.append(Microbatch(number, *((x.unflatten(0, (case.tp, -1))[tp_rank] if len(x) else x).to(device) for x in whole)))
    return made


@dataclass
class Outcome:
    """What one run gives: by stage its record, by (stage, name) parameter gradients, by (microbatch, loop) losses."""

    records: dict[int, Record]
    gradients: dict[tuple[int, str], Tensor]
    losses: dict[tuple[int, int], Tensor]


def serial(case: AffineCase, tp_rank: int, device: torch.device) -> Outcome:
    """The same stages one after the other in one process, by plain autograd."""
    stages = [AffineStage(case, stage).to(device) for stage in range(case.stages)]
    losses = {}
    for microbatch, again in zip(microbatches(case, tp_rank, device), case.coins, strict=True):
        x, contexts, total = None, [], 0.0
        for loop in range(2 if again else 1):
            for stage in stages:
                out = stage(microbatch, loop, x, contexts[stage.stage] if loop else None)
                contexts.append(out.contexts)
                x = out.hidden
            losses[microbatch.number, loop] = out.loss.detach()
            total, x = total + out.loss, out.soft_embedding
        total.backward()
    return outcome(stages, losses)


def outcome(stages: list[AffineStage], losses: dict) -> Outcome:
    gradients = {(s.stage, name): torch.zeros_like(p) if p.grad is None else p.grad for s in stages for name, p in s.named_parameters()}
    return Outcome({s.stage: s.record for s in stages}, gradients, losses)


def pipelined(case: AffineCase, context: ParallelContext, tamper=lambda schedule, rank: schedule) -> Outcome:
    """The stages of this rank, run by the executor. `tamper` may change the schedule as this rank sees it."""
    rank, device = context.pp.rank, context.device
    stages = [AffineStage(case, chunk * case.ranks + rank).to(device) for chunk in range(case.chunks)]
    schedule = build_schedule(Pipeline(case.ranks, case.chunks, case.coins), overlap=case.overlap)
    tokens = tuple((case.rows(m, 0) // case.tp, case.rows(m, 1) // case.tp) for m in range(len(case.coins)))
    executor = PipelineExecutor(stages, PointToPoint(context.pp, case.batched), device)
    reports = executor.run(
        tamper(schedule, rank), microbatches(case, context.tp.rank, device), EdgeShapes(case.hidden, tokens, case.streams, "float64"))
    return outcome(stages, {(number, loop): loss for number, loop, loss in reports})


def compare(rank: int, case: AffineCase, tamper=lambda schedule, rank: schedule) -> dict[str, int]:
    """`compare_in` of a world of the case's own size, on the CPU."""
    context = create_context(
        Topology(world=case.ranks * case.tp, pp=case.ranks, tp=case.tp), rank=rank, device=torch.device("cpu"),
        sequence_parallel=case.tp > 1)
    return compare_in(context, case, tamper)


def compare_in(context: ParallelContext, case: AffineCase, tamper=lambda schedule, rank: schedule) -> dict[str, int]:
    """Tensors compared with the serial run, those that differ in any bit, and outputs that still hold memory, on this rank."""
    got, expected = pipelined(case, context, tamper), serial(case, context.tp.rank, context.device)
    pairs = []
    for stage, record in got.records.items():
        for name in ("received", "gradients"):
            ours, theirs = getattr(record, name), getattr(expected.records[stage], name)
            assert ours.keys() == theirs.keys(), f"stage {stage}, {name}: {sorted(ours)} against {sorted(theirs)}"
            pairs += [(ours[key], theirs[key]) for key in ours]
    # Shares of the sequence are summed over tp, as the gradients of norms are.
    pairs += [(communication.all_reduce(gradient, context.tp), communication.all_reduce(expected.gradients[key], context.tp))
              for key, gradient in got.gradients.items()]
    pairs += [(loss, expected.losses[key]) for key, loss in got.losses.items()]
    assert all(theirs.numel() == 0 or theirs.abs().max() < EXACT for _, theirs in pairs), "too large to be exact"
    outputs = [output for record in got.records.values() for output in record.outputs]
    held = sum(output.untyped_storage().nbytes() > 0 for output in outputs)
    different = sum(not torch.equal(ours, theirs) for ours, theirs in pairs)
    return {"compared": len(pairs), "different": different, "outputs": len(outputs), "held": held}


def swap_receives(schedule: Schedule, rank: int) -> Schedule:
    """The schedule with two neighbouring receives of rank 1, from one peer, in the wrong order."""
    lists = [list(actions) for actions in schedule.lists]
    row = next(row for row, pair in enumerate(zip(lists[1], lists[1][1:], strict=False)) if all(a.kind == Kind.RECEIVE for a in pair))
    lists[1][row:row + 2] = lists[1][row:row + 2][::-1]
    return Schedule(schedule.pipeline, schedule.costs, lists)
