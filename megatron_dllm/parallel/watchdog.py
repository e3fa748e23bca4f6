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
TELL_SECONDS = 10.0
LOOKS = 64  # at the collectives, while the time passes that may pass without progress


class Watchdog:
    """While entered: after `seconds` without progress, write stacks and collectives to `output` and end the process.

    Progress is a `beat`, and any collective that the rank starts: one that stands still starts none.

    Every rank has its own, so that a hang shows which ranks wait for a collective and which never came to it. Set `seconds`
    below the process groups' timeout, which would end the job without the stacks. On a GPU a collective counts as ended
    when the stream has been told to wait for it; the last one started is named in any case. `standing` gives further lines; `tell` is
    handed one line, the reason, to leave it where it is looked for, and is not waited for where the file system is what stands still.
    """

    def __init__(
        self, log: CommunicationLog, *, rank: int, seconds: float, output: TextIO | None = None, end: Callable[[int], object] = os._exit,
        standing: Callable[[], Sequence[str]] = tuple, tell: Callable[[str], object] = lambda reason: None,
    ):  # fmt: skip
        self._log, self._rank, self._seconds, self._end = log, rank, seconds, end
        self._standing, self._tell = standing, tell
        self._output = sys.stderr if output is None else output
        self._beat, self._what = time.monotonic(), "start"
        self._collectives = log.started
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
        # One that stands still is ended up to two looks later than it could be.
        while not self._stop.wait(self._seconds / LOOKS):
            if self._log.started != self._collectives:
                self._collectives, self._beat = self._log.started, max(self._beat, time.monotonic())
            elif time.monotonic() - self._beat >= self._seconds:
                self._report()
                self._end(EXIT_CODE)
                return

    def _report(self) -> None:
        waiting = list(self._log.under_way.values()) or ["no collective"]
        reason = f"no progress for {self._seconds:g} s since {self._what}"
        lines = [
            f"rank {self._rank}: {reason}; set a longer --distributed-timeout-minutes if this may take so long",
            *(f"rank {self._rank}: waits for {description}" for description in waiting),
            f"rank {self._rank}: last collective started: {self._log.last}",
            *self._standing(),
        ]
        # One write, so that the ranks' reports do not run into each other.
        self._output.write("\n".join(lines) + "\n")
        self._output.flush()
        faulthandler.dump_traceback(file=self._output, all_threads=True)
        self._output.flush()
        telling = threading.Thread(target=self._tell, args=(f"{reason}, waiting for {waiting[0]}",), daemon=True)
        telling.start()
        telling.join(TELL_SECONDS)
