"""Runs of a recipe, each in a directory of its own, and the steps that they logged."""
from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from functional_tests.cases import ROOT, Case, Part
from functional_tests.golden import Steps, take_steps
from megatron_dllm.training.metrics_file import read_metrics

# A recipe that does not end by itself is stopped after so many times its own limit: machines may be slow and busy.
PATIENCE = 40


class RunFailed(RuntimeError):
    """A recipe ended with a status other than 0; the text has its last lines."""


@dataclass(frozen=True)
class Outcome:
    steps: Steps
    seconds: float


def environment_of(case: Case, part: Part, save: Path) -> dict[str, str]:
    """What a recipe is started with: one thread a process, this interpreter, and what the case says."""
    ours = {"OMP_NUM_THREADS": "1", "PYTHON": sys.executable, "SAVE": str(save)}
    return {**os.environ, **ours, **case.environment, **part.environment}


def run_once(case: Case, folder: Path, *, uninterrupted: bool = False) -> Outcome:
    """Run the case in `folder` (empty), as its kind says, or in one go. RunFailed when a recipe fails."""
    started = time.monotonic()
    save = folder / "run"
    common = (*case.flags, "--train-iters", str(case.steps), "--log-interval", "1", "--log-num-zeros-in-grad")
    if case.kind == "regular" or uninterrupted:
        _start(case, Part(), save, common)
    else:
        _start(case, Part(), save, (*common, "--exit-interval", str(case.stop_after)))
        _start(case, case.then, save, (*common, *case.then.flags))
    records = read_metrics(save / "metrics.jsonl").records
    return Outcome(take_steps(records, case.metrics), time.monotonic() - started)


def _start(case: Case, part: Part, save: Path, flags: tuple[str, ...]) -> None:
    command = ["bash", str(ROOT / case.recipe), *flags]
    # A session of its own: what a recipe that is stopped has started goes with it.
    process = subprocess.Popen(command, env=environment_of(case, part, save), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=PATIENCE * case.seconds)
    except BaseException:
        os.killpg(process.pid, 9)
        process.wait()
        raise
    if process.returncode:
        raise RunFailed(f"{' '.join(command)} ended with status {process.returncode}:\n{output[-3000:]}")


def verify(case: Case) -> str:
    """Hold the case's layout to one process in float64; the command. RunFailed when it does not hold."""
    command = ["tools/verify.py", *case.verify]
    result = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if result.returncode:
        raise RunFailed(f"{' '.join(command)} ended with status {result.returncode}:\n{(result.stdout + result.stderr)[-3000:]}")
    return " ".join(command)
