"""Parts of a benchmark in processes that it starts itself, and starts again after a part that ended them."""
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def run_parts(names: Sequence[str], command: Callable[[int, Path], Sequence[str]], end: float) -> list[dict[str, Any]]:
    """What the parts of these names gave, in order; those that failed are left out, and told.

    command(n, path): processes that run the parts from number n on, each adding what it gave to the JSON list in the file `path`. None runs
    after the time `end` (of time.monotonic).
    """
    results: list[dict[str, Any]] = []
    part = 0
    while part < len(names):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "results.json"
            status = run_until(command(part, path), end)
            found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
        results += found
        part += len(found)
        if status is None:
            print(f"the time is over; not run: {', '.join(names[part:])}", flush=True)
            break
        if part < len(names):
            print(f"FAILED {names[part]}: its processes ended with status {status}", flush=True)
            part += 1
    return results


def run_until(command: Sequence[str], end: float) -> int | None:
    """The status of the command, or None: it was told to end at that time (of time.monotonic). Whoever ends this process ends it too: what
    goes on alone on a GPU spoils every later measurement."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    process = subprocess.Popen(command, env={"OMP_NUM_THREADS": "1", **os.environ})
    try:
        return process.wait(timeout=max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
    finally:
        process.terminate()  # torchrun ends its workers; nothing, if it has ended
        process.wait()
        signal.signal(signal.SIGTERM, before)
