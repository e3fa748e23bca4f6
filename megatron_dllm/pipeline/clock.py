"""How long the compute steps of a pipeline took on this rank, and what that makes of the schedule: its bubble, measured and expected."""
from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from .actions import Action, Kind
from .assembly import Schedule
from .timing import Costs, time_compute

COMPUTE = (Kind.FORWARD, Kind.BACKWARD, Kind.EMBEDDING_GRADIENT)
TICKS_A_SECOND = 10_000_000  # costs are whole numbers
Times = Mapping[tuple[Kind, int, int], float]  # (kind, loop, virtual stage) -> seconds of one step


@dataclass
class ActionClock:
    """Times actions while it is given to an executor. On a GPU by events of the current stream, so that nothing waits for the device."""

    device: torch.device
    spans: list[tuple[Action, object, object]] = field(default_factory=list)

    @contextmanager
    def around(self, action: Action) -> Iterator[None]:
        """The block is the action."""
        start = self._now()
        yield
        self.spans.append((action, start, self._now()))

    def drain(self) -> list[tuple[Action, float]]:
        """Compute steps since the last call, with their seconds; waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        taken = [(action, self._seconds(start, end)) for action, start, end in self.spans if action.kind in COMPUTE]
        self.spans.clear()
        return taken

    def _now(self):
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, start, end) -> float:
        return start.elapsed_time(end) / 1e3 if self.device.type == "cuda" else end - start


def stage_times(schedule: Schedule, rank: int, taken: Iterable[tuple[Action, float]]) -> dict[tuple[Kind, int, int], float]:
    """The mean time of each kind of step of each virtual stage of `rank`: microbatches differ, costs do not."""
    found = defaultdict(list)
    for action, seconds in taken:
        found[action.kind, action.loop, schedule.pipeline.stage(rank, action.chunk)].append(seconds)
    return {key: statistics.fmean(values) for key, values in found.items()}


def expected_bubble(schedule: Schedule, times: Times) -> tuple[float, float]:
    """(share of the ranks' time that no step fills, seconds of the whole) if messages took no time; `times` are those of all ranks."""
    stages = range(schedule.pipeline.stages)

    def ticks(kind: Kind, loop: int) -> tuple[int, ...]:
        return tuple(max(1, round(times.get((kind, loop, stage), 0.0) * TICKS_A_SECOND)) for stage in stages)

    gradient = max((seconds for (kind, _, _), seconds in times.items() if kind == Kind.EMBEDDING_GRADIENT), default=0.0)
    costs = Costs(forward=(ticks(Kind.FORWARD, 0), ticks(Kind.FORWARD, 1)), backward=(ticks(Kind.BACKWARD, 0), ticks(Kind.BACKWARD, 1)),
                  embedding_gradient=max(1, round(gradient * TICKS_A_SECOND)))
    compute = [[action for action in actions if action.kind in COMPUTE] for actions in schedule.lists]
    makespan = time_compute(schedule.pipeline, compute, costs).makespan
    busy = sum(costs.of(schedule.pipeline, rank, action) for rank, actions in enumerate(compute) for action in actions)
    return 1 - busy / (makespan * len(compute)), makespan / TICKS_A_SECOND
