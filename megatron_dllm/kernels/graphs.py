"""CUDA graphs: device work that is recorded once and then started again ("replayed") as one launch, on the same memory."""
from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class Recording:
    """Device work that `replay` does again; `result` is where it leaves what the recorded function returned."""

    replay: Callable[[], None]
    result: Any


class Recorder(Protocol):
    """Runs a function of device work as an ordinary call, to warm it up, and records it."""

    def warm_up(self, function: Callable[[], Any]) -> Any:
        """function(), done; it will be recorded later."""

    def record(self, function: Callable[[], Any]) -> Recording:
        """The recording of function(); whether recording does the work is left open, a replay after it does."""


class CudaRecorder:
    """CUDA graphs on a stream of their own. All share one pool of memory, so they must run one after the other, and their results be
    copied before the next one runs."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)
        self._pool: tuple[int, int] | None = None
        self._held: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def warm_up(self, function: Callable[[], Any]) -> Any:
        # On the stream of the recording: handles, workspaces and compiled kernels are then there.
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            result = function()
        current.wait_stream(self.stream)
        return result

    def record(self, function: Callable[[], Any]) -> Recording:
        # A node that adds to a parameter's gradient remembers the stream on which it was made: none of another stream may be left.
        gc.collect()
        if not self._held:  # a pool ends with the last graph that is in it
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Threads of the process that have no part in this (NCCL's, a loader's) go on calling CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self.stream, capture_error_mode="thread_local"):
            result = function()
        self._held.add(graph)
        return Recording(graph.replay, result)
