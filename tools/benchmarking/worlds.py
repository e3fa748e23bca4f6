"""Parts of a benchmark in processes that it starts itself, and starts again after a part that ended them.

What hangs may hang in CUDA or NCCL, where Python gets no signal, and at the very end, when all is measured. So each process watches itself
(`Watch`), with a thread that needs no interpreter; the one that started them waits no longer than it said, and tells what it has.
"""
from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO

LATE_SECONDS = 2.0  # beyond the end at which processes end by themselves, before they are told to
STOP_SECONDS = 3.0  # from being told to end to being killed
STACK_LINES = 40  # shown of a process
END_SECONDS = 15.0  # for processes to let go of their groups, when all is measured


class Watch:
    """Ends this process when a piece of its work takes too long or `end` (of time.monotonic) has come, and tells its stack before; told
    to end (SIGTERM) or crashing, it tells its stack too. stack: where to; without it: standard error."""

    def __init__(self, end: float, stack: Path | None = None):
        self.end = end
        self.file: TextIO = sys.stderr if stack is None else stack.open("w", encoding="utf-8")
        faulthandler.enable(self.file)
        faulthandler.register(signal.SIGTERM, self.file, chain=True)

    def allow(self, seconds: float) -> None:
        """From now on, instead of what was allowed before."""
        faulthandler.dump_traceback_later(max(0.01, min(seconds, self.end - time.monotonic())), exit=True, file=self.file)


def leave(status: int) -> NoReturn:
    """End this process, watched until then: what destructors would do later, beyond any watch, is the operating system's."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def stack_file(results: Path, rank: int) -> Path:
    """Where the process `rank` of those that give `results` tells its stack."""
    return results.with_name(f"stack_{rank}.txt")


def stacks(results: Path) -> str:
    """What processes told of their stacks, each under its rank."""
    found = sorted(results.parent.glob("stack_*.txt"), key=lambda file: int(file.stem.removeprefix("stack_")))
    texts = {file.stem.removeprefix("stack_"): file.read_text(encoding="utf-8", errors="replace").splitlines() for file in found}
    return "".join("\n".join([f"rank {rank}:", *lines[:STACK_LINES], ""]) for rank, lines in texts.items() if lines)


def run_parts(names: Sequence[str], command: Callable[[int, Path], Sequence[str]], end: float) -> list[dict[str, Any]]:
    """What the parts of these names gave, in order; those that failed are left out, and told, with the stacks that their processes left.

    command(n, path): processes that run the parts from number n on, each adding what it gave to the JSON list in the file `path`; they may
    leave a `stack_file`. None runs after the time `end` (of time.monotonic), nor once this process is told to end: what there is then is
    given all the same.
    """
    results: list[dict[str, Any]] = []
    part = 0
    while part < len(names):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "results.json"
            over = "the time is over"
            try:
                status = run_until(command(part, path), end + LATE_SECONDS)
            except SystemExit:
                status, over = None, "told to end"
            found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
            told = stacks(path)
        results += found
        part += len(found)
        is_over = status is None or (status != 0 and time.monotonic() >= end)
        why = over if is_over else f"status {status}"
        if part == len(names):
            if status != 0:
                print(f"all ran, but their processes did not end by themselves ({why})\n{told}", flush=True)
        elif is_over:
            print(f"{why}, in {names[part]}; not run: {', '.join(names[part + 1:]) or 'none'}\n{told}", flush=True)
            break
        else:
            print(f"FAILED {names[part]}: its processes ended with status {status}\n{told}", flush=True)
            part += 1
    return results


def run_until(command: Sequence[str], end: float) -> int | None:
    """The status of the command, or None: it was told to end at that time (of time.monotonic). Whoever tells this process to end (SIGTERM,
    then a SystemExit) ends it too: what goes on alone on a GPU spoils every later measurement."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    process = subprocess.Popen(command, env={"OMP_NUM_THREADS": "1", **os.environ})
    try:
        return process.wait(timeout=max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not leave them behind
        stop(process)
        signal.signal(signal.SIGTERM, before)


def stop(process: subprocess.Popen) -> None:
    """Tell a process to end, which torchrun tells its workers; after STOP_SECONDS kill it and them. Nothing, if it has ended."""
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        workers = children(process.pid)
        process.kill()
        for worker in workers:
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
        process.wait()


def children(pid: int) -> list[int]:
    """The processes that this one has started and that have not ended (Linux)."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = file.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue  # it has ended meanwhile
        if int(parent) == pid and state != "Z":
            found.append(int(file.parent.name))
    return found
