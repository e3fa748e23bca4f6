"""Ends a process that makes no progress, after it has said where it stands and what it waited for."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TextIO

from .context import CommunicationLog

EXIT_CODE = 124


class Watchdog:
    """While entered: after `seconds` without a `beat`, write stacks and collectives to `output` and end the process.

    Every rank has its own, so that a hang shows which ranks wait for a collective and which never came to it. Set `seconds`
    below the process groups' timeout, which would end the job without the stacks. On a GPU a collective counts as ended
    when the stream has been told to wait for it; the last one started is named in any case. `standing` gives further lines.
    """

    def __init__(
        self, log: CommunicationLog, *, rank: int, seconds: float, output: TextIO | None = None, end: Callable[[int], object] = os._exit,
        standing: Callable[[], Sequence[str]] = tuple,
    ):  # fmt: skip
        self._log, self._rank, self._seconds, self._end = log, rank, seconds, end
        self._standing = standing
        self._output = sys.stderr if output is None else output
        self._beat, self._what = time.monotonic(), "start"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self.beat("start")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def beat(self, what: str) -> None:
        """Progress has been made; `what` (e.g. "iteration 12") names it if it was the last."""
        self._beat, self._what = time.monotonic(), what

    def _watch(self) -> None:
        while not self._stop.wait(max(0.01, self._beat + self._seconds - time.monotonic())):
            if time.monotonic() - self._beat >= self._seconds:
                self._report()
                self._end(EXIT_CODE)
                return

    def _report(self) -> None:
        waiting = list(self._log.under_way.values()) or ["no collective"]
        lines = [
            f"rank {self._rank}: no progress for {self._seconds:g} s since {self._what}; set a longer timeout if this may take so long",
            *(f"rank {self._rank}: waits for {description}" for description in waiting),
            f"rank {self._rank}: last collective started: {self._log.last}",
            *self._standing(),
        ]
        # One write, so that the ranks' reports do not run into each other.
        self._output.write("\n".join(lines) + "\n")
        self._output.flush()
        faulthandler.dump_traceback(file=self._output, all_threads=True)
        self._output.flush()
