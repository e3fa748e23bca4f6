"""status.json: what became of a run, for launchers and people (torchrun itself returns 1 after any signal)."""
from __future__ import annotations

import json
import math
import os
import socket
import sys
import threading
import time
from pathlib import Path

PROGRESS_SECONDS = 5.0  # a fast run must not wait for its file system at every step


class RunStatus:
    """Keeps <run_dir>/status.json while it is entered: a JSON object that is always whole, since it is replaced, never rewritten.
    With run_dir None no file is kept.

        {"state": "running" | "finished" | "stopped" | "failed", "iteration": 100, "total_iterations": 500, "reason": "SIGTERM",
         "checkpoint": "runs/a/iter_0000100", "host": ..., "pid": ..., "started_at": ..., "updated_at": ...}

    reason      why it stopped or failed (for failed: the exception), or what a finished run lacks; else null
    checkpoint  the last checkpoint that was saved; before the first, the one that the run goes on from; or null

    An exception that leaves the block is written as failed and passes on. Rank 0 writes everything else; a failure is written by the rank
    that has it, and the first one stays, since the others then fail of its absence. A file that says "running" while its process is
    gone is a run that was killed.
    """

    def __init__(self, run_dir: Path | None, *, rank: int, total_iterations: int, iteration: int = 0, checkpoint: Path | None = None):
        self._path = run_dir / "status.json" if run_dir else None
        self._rank = rank
        self._record = {
            "state": "running", "iteration": iteration, "total_iterations": total_iterations, "reason": None,
            "checkpoint": None if checkpoint is None else str(checkpoint), "host": socket.gethostname(), "pid": os.getpid(), "rank": rank,
            "started_at": _now()}

        self._written_at, self._refusal = -math.inf, ""

    def __enter__(self) -> RunStatus:
        if self._rank == 0:
            self._write()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.failed(f"{type(error).__name__}: {error}")
        else:
            assert self._record["state"] != "running", "the run ended without finished() or stopped()"

    @property
    def checkpoint(self) -> str | None:
        """The newest, as in the file."""
        return self._record["checkpoint"]

    def where_it_was_lost(self) -> str:
        """For a rank that an error of torch's has ended, such as a lost connection: how far it had come, and what can be done."""
        go_on = "there is no checkpoint yet" if self.checkpoint is None else f"--load goes on from {self.checkpoint}"
        return (f"rank {self._rank}: ended by an error after iteration {self._record['iteration']}; {go_on}. Where no rank names a cause, "
                "one was killed: the launcher says which, its host why (memory, a GPU, a signal)")

    def progress(self, iteration: int, *, checkpoint: Path | None = None) -> None:
        """The run goes on: `iteration` is finished, and `checkpoint`, where given, is the newest. Without one the file is written every few
        seconds only; what it then lacks is in the next record."""
        if checkpoint is not None or time.monotonic() - self._written_at >= PROGRESS_SECONDS:
            self._update("running", iteration, None, checkpoint)
        else:
            self._record["iteration"] = iteration

    def finished(self, iteration: int, *, checkpoint: Path | None = None, reason: str | None = None) -> None:
        """All iterations are done; `reason`: what is missing all the same."""
        self._update("finished", iteration, reason, checkpoint)

    def stopped(self, iteration: int, reason: str, *, checkpoint: Path | None = None) -> None:
        """The run ended early because it was told to; `reason` as in signals.py."""
        self._update("stopped", iteration, reason, checkpoint)

    def failed(self, reason: str) -> None:
        """The run ended by an error, at the iteration and with the checkpoint last told."""
        self._record |= {"state": "failed", "reason": reason}
        try:
            if not self._failed_already():
                self._write()
        except (OSError, ValueError) as error:  # the reason itself must not be lost over it
            sys.stderr.write(f"status.json cannot say that the run failed: {error}\n")

    def _failed_already(self) -> bool:
        return self._path is not None and self._path.exists() and read_status(self._path)["state"] == "failed"

    def _update(self, state: str, iteration: int, reason: str | None, checkpoint: Path | None) -> None:
        self._record |= {"state": state, "iteration": iteration, "reason": reason}
        if checkpoint is not None:
            self._record["checkpoint"] = str(checkpoint)
        if self._rank != 0:
            return
        try:
            self._write()
        except OSError as error:  # a disk that is full must not end the training
            if self._refusal != str(error):
                self._refusal = str(error)
                sys.stderr.write(f"status.json cannot say that the run is {state}: {error}; the run goes on\n")

    def _write(self) -> None:
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # The name carries host, process and thread: two ranks that fail together must not write one temporary file.
        temporary = self._path.with_name(f".status.{self._record['host']}.{os.getpid()}.{threading.get_ident()}.tmp")
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                json.dump(self._record | {"updated_at": _now()}, file, indent=1)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self._path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        self._written_at = time.monotonic()


def read_status(path: Path) -> dict[str, str | int | None]:
    """The record of a status.json."""
    return json.loads(path.read_text(encoding="utf-8"))


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
