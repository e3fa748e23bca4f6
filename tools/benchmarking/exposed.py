"""How much of a step's communication no other work runs beside, from a profile of the device."""
from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

Interval = tuple[float, float]  # start, end; microseconds

# What a communication kernel does, by its name; the first that fits. deep_ep's kernels serve experts alone, NCCL's also gradients.
KINDS = {"deep_ep": r"deep_ep|hybrid_ep", "all-to-all": r"nccl.*(SendRecv|AlltoAll)", "all-gather": r"nccl.*AllGather",
         "reduce-scatter": r"nccl.*ReduceScatter", "all-reduce": r"nccl.*AllReduce", "other NCCL": r"nccl"}
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Work:
    """A kernel, copy or fill on the device."""

    name: str
    start: float
    end: float

    @property
    def kind(self) -> str | None:
        """What it communicates, None for other work."""
        return next((kind for kind, pattern in KINDS.items() if re.search(pattern, self.name)), None)


@dataclass(frozen=True)
class Share:
    """Of one kind of communication: kernels; milliseconds in which any of them runs, and in which nothing but communication does."""

    kernels: int
    running: float
    exposed: float


@dataclass(frozen=True)
class Exposure:
    """By kind and for all; `span` from the first start to the last end, `busy` with anything running, milliseconds."""

    by_kind: dict[str, Share]
    total: Share
    span: float
    busy: float

    def text(self) -> str:
        """One line a kind, the whole last."""
        lines = [f"  {kind:<15} {share.kernels:6d} kernels, running {share.running:8.2f} ms, exposed {share.exposed:8.2f} ms"
                 for kind, share in (*self.by_kind.items(), ("communication", self.total))]
        return "\n".join([*lines, f"  exposed: {self.total.exposed / self.busy:.1%} of {self.busy:.2f} ms in which the device works, "
                                  f"{self.total.exposed / self.span:.1%} of {self.span:.2f} ms"])


def exposure(work: Sequence[Work]) -> Exposure:
    """Of what one device did; ValueError where it did nothing."""
    if not work:
        raise ValueError("the profile shows nothing on the device; take a CUDA device, and a driver that lets it be profiled")
    other = union((w.start, w.end) for w in work if w.kind is None)

    def share(of: Sequence[Work]) -> Share:
        running = union((w.start, w.end) for w in of)
        return Share(len(of), length(running), length(running) - length(intersection(running, other)))

    kinds = {kind: [w for w in work if w.kind == kind] for kind in KINDS}
    return Exposure({kind: share(of) for kind, of in kinds.items() if of}, share([w for w in work if w.kind is not None]),
                    (max(w.end for w in work) - min(w.start for w in work)) / 1e3, length(union((w.start, w.end) for w in work)))


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals, rising, that cover the same."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersection(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """What lies in both of two unions."""
    common, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            common.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return common


def length(intervals: Iterable[Interval]) -> float:
    """Milliseconds that disjoint intervals last."""
    return sum(end - start for start, end in intervals) / 1e3


def profile(step: Callable[[], object], meet: Callable[[], object]) -> list[Work]:
    """What the device does in a step, which ends with nothing left running; `meet` begins with an all-reduce, with which the ranks meet
    once all of them profile, so that none waits for another's preparations."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        meet()
        step()
        torch.cuda.synchronize()
    return after_first("all-reduce", work_of(profiled))


def kernel_table(step: Callable[[], object], rows: int) -> str:
    """What takes the device longest in a step, by kernel, one line each, after a line with the sum."""
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    return table_of(work_of(profiled), rows)


def table_of(work: Sequence[Work], rows: int) -> str:
    """The `rows` names with the most time: milliseconds, times it ran, microseconds each."""
    by_name: dict[str, list[float]] = {}
    for w in work:
        by_name.setdefault(w.name, []).append(w.end - w.start)
    most = sorted(by_name.items(), key=lambda item: -sum(item[1]))
    busy = length(union((w.start, w.end) for w in work))
    span = (max(w.end for w in work) - min(w.start for w in work)) / 1e3
    return "\n".join([f"  {len(work)} kernels, busy {busy:.1f} of {span:.1f} ms"] + [
        f"  {sum(times) / 1e3:9.3f} ms {len(times):6d} x {sum(times) / len(times):8.1f} us  {name[:100]}" for name, times in most[:rows]])


def work_of(profiled: torch.profiler.profile) -> list[Work]:
    """What the device did while it was profiled."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(trace))
        return read_trace(json.loads(trace.read_text()))


def after_first(kind: str, work: Sequence[Work]) -> list[Work]:
    """What starts after the end of the first work of a kind."""
    first = min((w for w in work if w.kind == kind), key=lambda w: w.start)
    return [w for w in work if w.start >= first.end]


def read_trace(trace: dict) -> list[Work]:
    """Of a trace in Chrome's format."""
    return [Work(event["name"], event["ts"], event["ts"] + event["dur"]) for event in trace["traceEvents"] if event.get("cat") in ON_DEVICE]
