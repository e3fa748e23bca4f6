"""Which rank is the slowest: each rank's own time of a step, before it waits for the others."""
from __future__ import annotations

import time

import torch

from ..parallel import ParallelContext, communication


class RankTimes:
    """Own time: from the end of the step before to the end of the last backward, waiting for data included, on the device's clock.

    After it the sums of gradients make all ranks wait for the slowest. Ranks that already exchange something in forward or backward
    (tensor, context, expert parallelism) share their time: what is told apart are data-parallel copies and their hosts. So do all where a
    CUDA graph has the sums in it.
    """

    def __init__(self, context: ParallelContext):
        self._context = context
        self._start: torch.cuda.Event | float | None = None
        self._intervals: list[tuple[torch.cuda.Event | float, torch.cuda.Event | float]] = []

    def restart(self) -> None:
        """A step begins (the one before has ended)."""
        self._start = self._now() if self._context.world.size > 1 else None

    def after_backward(self) -> None:
        """The last backward is under way on the device, nothing of the gradients' sums is waited for yet."""
        if self._start is not None:
            self._intervals.append((self._start, self._now()))
            self._start = None

    def _now(self) -> torch.cuda.Event | float:
        if self._context.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def drain(self) -> dict[str, float | int]:
        """Mean own milliseconds a step since the last call, of the slowest and the fastest rank; then counts anew. Empty for one process.

        Every rank of the world calls it, after a step whose loss has been read.
        """
        if not self._intervals:
            return {}
        spans = [1e3 * (end - start) if isinstance(start, float) else start.elapsed_time(end) for start, end in self._intervals]
        self._intervals.clear()
        own = torch.tensor([sum(spans) / len(spans)], dtype=torch.float64, device=self._context.device)
        return slowest_and_fastest(communication.all_gather(own, self._context.world).tolist())


def slowest_and_fastest(milliseconds: list[float]) -> dict[str, float | int]:
    """Metrics of the ranks' times, in rank order; of equals the first."""
    slowest = max(range(len(milliseconds)), key=milliseconds.__getitem__)
    return {"slowest_rank": slowest, "slowest_rank_ms": milliseconds[slowest], "fastest_rank_ms": min(milliseconds)}
