"""Runs of a recipe, each in a directory of its own, and the steps that they logged."""
from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from functional_tests.cases import ROOT, Case, Part
from functional_tests.golden import Steps, take_steps
from functional_tests.launching import Launcher, RunFailed, ask
from megatron_dllm.training.metrics_file import read_metrics

# A recipe that does not end by itself is stopped after so many times its own limit: machines may be slow and busy.
PATIENCE = 40


@dataclass(frozen=True)
class Outcome:
    """times: of each start, a text."""

    steps: Steps
    seconds: float
    times: tuple[str, ...] = ()


def run_several(starts: Mapping[str, Callable[[], Outcome]], at_once: int, stop: Callable[[], None]) -> Iterator[tuple[str, Outcome]]:
    """(name, outcome) of each run as it ends, in the order of `starts` where one runs at a time. Where a run fails, or nobody asks for
    more, no other begins, and `stop` must end those that run; where each stood is printed."""
    waiting, running = list(starts), dict[Future, str]()
    with ThreadPoolExecutor(at_once) as pool:
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    name = waiting.pop(0)
                    running[pool.submit(starts[name])] = name
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(done), done.result()
        finally:
            if running:
                stop()
                for ended in wait(running).done:
                    print(f"{running[ended]}: stopped: {str(ended.exception())[-700:]}", file=sys.stderr, flush=True)


def environment_of(case: Case, part: Part, save: Path) -> dict[str, str]:
    """What a recipe is started with: one thread a process, this interpreter, and what the case says."""
    ours = {"OMP_NUM_THREADS": "1", "PYTHON": sys.executable, "SAVE": str(save)}
    return {**os.environ, **ours, **case.environment, **part.environment}


def run_once(case: Case, folder: Path, launcher: Launcher, *, uninterrupted: bool = False) -> Outcome:
    """Run the case in `folder` (empty), as its kind says, or in one go. RunFailed when a recipe fails."""
    started = time.monotonic()
    save = folder / "run"
    common = (*case.flags, "--train-iters", str(case.steps), "--log-interval", "1", "--log-num-zeros-in-grad")
    if case.kind == "regular" or uninterrupted:
        # The last step is saved in any case; another save would only take time.
        times = [_start(case, Part(), save, (*common, "--save-interval", str(case.steps)), launcher)]
    else:
        times = [_start(case, Part(), save, (*common, "--exit-interval", str(case.stop_after)), launcher),
                 _start(case, case.then, save, (*common, *case.then.flags), launcher)]
    records = read_metrics(save / "metrics.jsonl").records
    return Outcome(take_steps(records, case.metrics), time.monotonic() - started, tuple(times))


def _start(case: Case, part: Part, save: Path, flags: tuple[str, ...], launcher: Launcher) -> str:
    """Start the recipe and wait for its end; where its time went, by the times at which its files were last written."""
    begin = time.time()
    command = ask(case.recipe, flags, environment_of(case, part, save), save.parent)
    asked = time.time()
    launcher.run(command, save.parent / "output.txt", PATIENCE * case.seconds)
    end = time.time()
    # args.txt is written when model, data and groups are there, metrics.jsonl after each step.
    ready, stepped = ((save / name).stat().st_mtime for name in ("args.txt", "metrics.jsonl"))
    return (f"asked {asked - begin:.1f} s, ready after {ready - asked:.1f} s, steps {stepped - ready:.1f} s, "
            f"saved and ended {end - stepped:.1f} s")


def verify(case: Case) -> str:
    """Hold the case's layout to one process in float64; the command. RunFailed when it does not hold."""
    return _verify(case.verify)


@cache  # several recipes share a layout
def _verify(arguments: tuple[str, ...]) -> str:
    command = ["tools/verify.py", *arguments]
    result = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if result.returncode:
        raise RunFailed(f"{' '.join(command)} ended with status {result.returncode}:\n{(result.stdout + result.stderr)[-3000:]}")
    return " ".join(command)
