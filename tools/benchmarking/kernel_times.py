"""How a step's time on the device divides into computing, collectives and nothing, from a profiler's kernels."""
from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.profiler import profile

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of a trace; others are annotations, which cover kernels

Interval = tuple[float, float]


@dataclass(frozen=True)
class KernelTimes:
    """Milliseconds from the first kernel to the end of the last.

    collective_ms  a collective's kernel runs (waiting for other ranks included)
    exposed_ms     of them, nothing else runs
    idle_ms        nothing runs
    """

    span_ms: float
    collective_ms: float
    exposed_ms: float
    idle_ms: float


def kernel_times(profiler: profile) -> KernelTimes:
    """Of a profile that has ended, made with ProfilerActivity.CUDA."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return divide((event["name"], event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3) for event in events
                  if event.get("cat") in ON_DEVICE)


def divide(kernels: Iterable[tuple[str, float, float]]) -> KernelTimes:
    """Of (name, start, end) in milliseconds. NCCL's kernels have its name in theirs."""
    kernels = list(kernels)
    assert kernels, "the profile has no kernel"
    collective = [(start, end) for name, start, end in kernels if "nccl" in name.lower()]
    compute = [(start, end) for name, start, end in kernels if "nccl" not in name.lower()]
    span = max(end for _, _, end in kernels) - min(start for _, start, _ in kernels)
    busy, computing = covered(collective + compute), covered(compute)
    return KernelTimes(span, covered(collective), busy - computing, span - busy)


def covered(intervals: Sequence[Interval]) -> float:
    """Length of the union."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
