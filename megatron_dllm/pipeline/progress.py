"""Where the ranks of pipelines stand: each one says it once a second through the store of the process group, and rank 0 can tell of all.

A hang shows on the ranks that wait, and its cause is elsewhere: so one report must show all of them side by side.
"""
from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

SECONDS = 1.0
# Without word for so long, a rank has ended or its host is gone.
SILENT_SECONDS = 5 * SECONDS


@dataclass
class Progress:
    """Where a rank stands in its list: the last action that has ended, and the one it is at."""

    last: str = "nothing yet"
    current: str = "outside of a step"
    since: float = field(default_factory=time.monotonic)

    def begin(self, what: str) -> None:
        self.current, self.since = what, time.monotonic()

    def end(self) -> None:
        self.last, self.current, self.since = self.current, "between two actions", time.monotonic()

    def __str__(self) -> str:
        return f"at {self.current} for {time.monotonic() - self.since:.0f} s, after {self.last}"


class ProgressBoard:
    """While entered, publishes this rank's `progress`; `lines` tells of this rank, on rank 0 of all `ranks`.

    `stage` names what this rank holds. The store lives with the launcher or with rank 0, so that it outlives every other rank.
    """

    def __init__(self, progress: Progress, *, rank: int, ranks: int, stage: str, store: dist.Store | None = None):
        self.progress, self.rank, self.ranks, self.stage = progress, rank, ranks, stage
        # A connection of our own: a call of the main thread that waits must not hold ours.
        self._store = dist.PrefixStore("progress", (_get_default_store() if store is None else store).clone())
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._publish, name="progress board", daemon=True)

    def __enter__(self) -> ProgressBoard:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def lines(self) -> list[str]:
        """One a rank: its stages, its current action and since when, the last one that ended."""
        own = f"rank {self.rank}, {self.stage}: {self.progress}"
        return [own] if self.rank else [own, *(self._line(rank) for rank in range(1, self.ranks))]

    def _line(self, rank: int) -> str:
        if not self._store.check([str(rank)]):
            return f"rank {rank}: has never said anything"
        at, text = self._store.get(str(rank)).decode().split(" ", 1)
        silent = time.time() - float(at)
        return text if silent < SILENT_SECONDS else f"{text} (that was its last word, {silent:.0f} s ago)"

    def _publish(self) -> None:
        while True:
            try:
                self._store.set(str(self.rank), f"{time.time()} rank {self.rank}, {self.stage}: {self.progress}")
            except dist.DistError:  # rank 0 has ended, and with it who would read this
                return
            if self._stop.wait(SECONDS):
                return
