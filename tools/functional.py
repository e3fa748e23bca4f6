#!/usr/bin/env python3
"""Recipes held to golden values: every loss term, the gradient norm and the number of zero gradients of their first steps, bit for bit.

    python tools/functional.py run [--repeat 3] [--only TEXT]      run each recipe; repeats must be equal, and match the golden file
    python tools/functional.py record [--only TEXT]                make the golden files of this environment anew
    python tools/functional.py diff GOLDEN OTHER                   compare two golden files

A case is tests/functional/<recipe>/config.yaml. A golden file is of a kind of device, a CPU or a GPU by its name, and says in which
environment it was recorded: in the same one a run must match it exactly, in another one to the case's tolerances, and the table says so.
Cases for more GPUs than there are here are left out, except with SHARE_GPU=1, which lets all ranks share one and has golden files of its
own. --at-once N starts so many runs of a recipe beside each other, where GPUs have the memory: most of a short run is waiting, and no bit
depends on it. While it records, what is done so far lies beside it in a file partial_*.json, which no run compares with; record --continue
goes on from there, on the same code and in the same environment.
"""
from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from functional_tests.cases import ROOT, Case, read_cases  # noqa: E402
from functional_tests.fingerprint import changed, code_digest, fingerprint, golden_name  # noqa: E402
from functional_tests.golden import Golden, Steps, compare, explain, partial_path, read_partial, write_partial  # noqa: E402
from functional_tests.launching import Launcher, RunFailed  # noqa: E402
from functional_tests.running import Outcome, environment_of, run_once, run_several, verify  # noqa: E402

from megatron_dllm.parallel.launch import shares_gpu  # noqa: E402

WHOLE = "uninterrupted run"


def main(argv: list[str] | None = None) -> int:
    """0 when everything matches; 1 when something does not; 2 for a mistake in what was given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    run = actions.add_parser("run", help="run recipes and hold them to their golden files", allow_abbrev=False)
    run.add_argument("--repeat", type=int, default=1, metavar="N", help="run each N times; all must be equal")
    record = actions.add_parser("record", help="write golden files", allow_abbrev=False)
    record.add_argument("--without-verify", action="store_true",
                        help="do not hold the layout to one process first; the golden file says that it was not")
    record.add_argument("--continue", dest="goes_on", action="store_true", help="keep the runs of a recording that was cut short")
    for action in (run, record):
        action.add_argument("--only", default="", metavar="TEXT", help="recipes whose name has this text")
        action.add_argument("--at-once", type=int, default=1, metavar="N", help="runs of a recipe beside each other")
    diff = actions.add_parser("diff", help="compare two golden files", allow_abbrev=False)
    diff.add_argument("golden", type=Path)
    diff.add_argument("other", type=Path)
    arguments = parser.parse_args(argv)
    try:
        if arguments.action == "diff":
            return print_diff(arguments.golden, arguments.other)
        cases = read_cases(arguments.only)
        if not cases:
            raise ValueError(f"--only {arguments.only}: no recipe has this in its name")
        if arguments.at_once < 1:
            raise ValueError(f"--at-once {arguments.at_once}: nothing would run; set at least 1")
        gpus = torch.cuda.device_count()
        there = [case for case in cases if case.device != "cuda" or case.processes <= gpus or gpus and shares_gpu()]
        if absent := [f"{case.name} ({case.processes})" for case in cases if case not in there]:
            print(f"left out, since torch sees {gpus} CUDA devices: {', '.join(absent)}")
        cases = there
        # Whoever ends this process ends the runs with it.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        with Launcher() as launcher:
            act = (lambda case: run_case(case, arguments.repeat, launcher, at_once=arguments.at_once)) if arguments.action == "run" else (
                lambda case: record_case(case, launcher, verified=not arguments.without_verify, goes_on=arguments.goes_on,
                                         at_once=arguments.at_once))
            failed = [case.name for case in cases if not attempt(case, act)]
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    names = f"; not: {', '.join(failed)}" if failed else ""
    print(f"{arguments.action}: {len(cases) - len(failed)} of {len(cases)} recipes hold{names}")
    return 1 if failed else 0


def attempt(case: Case, act: Callable[[Case], bool]) -> bool:
    """Whether the case holds; a recipe that fails does not, and the others go on."""
    try:
        return act(case)
    except RunFailed as failure:
        print(f"{case.name}: FAILED: {failure}", flush=True)
        return False


def run_here(case: Case, launcher: Launcher, *, uninterrupted: bool = False) -> Outcome:
    """One run, in a directory of its own that goes with it."""
    with tempfile.TemporaryDirectory(prefix=f"{case.name}_") as folder:
        return run_once(case, Path(folder), launcher, uninterrupted=uninterrupted)


def runs_of(case: Case, names: Sequence[str], launcher: Launcher, at_once: int) -> Iterator[tuple[str, Outcome]]:
    """(name, outcome) of these runs as they end, at most `at_once` beside each other; the one named WHOLE is not interrupted."""
    return run_several({name: partial(run_here, case, launcher, uninterrupted=name == WHOLE) for name in names}, at_once, launcher.stop)


def differing(case: Case, runs: list[Steps]) -> str:
    """How the repeats differ, "" if they are equal bit for bit and complete."""
    for number, steps in enumerate(runs):
        if wrong := compare(steps, runs[0], metrics=case.metrics, num_steps=case.steps, tolerances=None):
            return f"repeat {number + 1} against repeat 1 (here called golden): {explain(wrong, steps, runs[0])}"
    return ""


def run_case(case: Case, times: int, launcher: Launcher, *, at_once: int = 1) -> bool:
    """Run it, print a line, or what is wrong; whether it holds."""
    here = fingerprint(case.device, environment_of(case, case.then, Path()), case.processes)
    path = case.folder / golden_name(here, case.processes)
    if not path.is_file():
        print(f"{case.name}: FAILED: there is no {path.name} for this kind of device; python tools/functional.py record --only {case.name}")
        return False
    golden = Golden.read(path)
    outcomes = [outcome for _, outcome in runs_of(case, repeats(times), launcher, at_once)]
    runs, seconds = [outcome.steps for outcome in outcomes], max(outcome.seconds for outcome in outcomes)
    if difference := differing(case, runs):
        print(f"{case.name}: FAILED: {difference}", flush=True)
        return False
    others = changed(here, golden.fingerprint)
    wrong = compare(runs[0], golden.steps, metrics=case.metrics, num_steps=case.steps, tolerances=case.limits if others else None)
    how = f"{loosely(case)}, since the environment is another: {'; '.join(others)}" if others else "bit for bit"
    if wrong:
        print(f"{case.name}: FAILED: does not match {path.name} {how}: {explain(wrong, runs[0], golden.steps)}", flush=True)
        return False
    equal = f"{times} repeats equal, " if times > 1 else ""
    print(f"{case.name}: {case.steps} steps, {equal}matches {path.name} {how}; {seconds:.0f} s a run", flush=True)
    return True


def loosely(case: Case) -> str:
    """What a comparison with a golden file of another environment holds, and what it does not."""
    text = f"to {case.tolerances['default']:g}"
    return f"{text} without {' and '.join(case.exact_only)}" if case.exact_only else text


def record_case(case: Case, launcher: Launcher, *, verified: bool, goes_on: bool = False, at_once: int = 1) -> bool:
    """Write the golden file of this environment; refused when repeats differ or the layout does not hold."""
    here = fingerprint(case.device, environment_of(case, case.then, Path()), case.processes)
    path = case.folder / golden_name(here, case.processes)
    with_code = here | {"code": code_digest(ROOT)}
    started = time.monotonic()
    runs = runs_before(case, path, with_code) if goes_on else {}
    for name in runs:
        print(f"{case.name}: {name} was done before", flush=True)
    wrong = fault(case, runs)
    to_do = [] if wrong else [name for name in order_of_runs(case) if name not in runs]
    for name, outcome in runs_of(case, to_do, launcher, at_once):
        runs[name] = outcome.steps
        write_partial(partial_path(path), with_code, runs)
        print(f"{case.name}: {time.monotonic() - started:.0f} s: {name} done in {outcome.seconds:.1f} s "
              f"({'; '.join(outcome.times)})", flush=True)
        if wrong := fault(case, runs):
            break
    if wrong:
        print(f"{case.name}: not recorded: {wrong}", flush=True)
        return False
    by = verify(case) if verified else f"not verified when recorded (meant: tools/verify.py {' '.join(case.verify)})"
    Golden(here, by, runs["repeat 1"]).write(path)
    partial_path(path).unlink()
    beside = " and one uninterrupted run" if WHOLE in runs else ""
    print(f"{case.name}: recorded {path.name} from {case.repeats} equal repeats of {case.steps} steps{beside}; {by}; "
          f"{time.monotonic() - started:.0f} s in all", flush=True)
    return True


def fault(case: Case, runs: Mapping[str, Steps]) -> str:
    """How those of the runs to record that are done contradict each other; "" if they do not."""
    done = [runs[name] for name in repeats(case.repeats) if name in runs]
    if difference := differing(case, done):
        return difference
    # The same layout must give the same bits; another one adds up in another order.
    limits = None if case.kind == "resume" else case.limits
    whole = runs.get(WHOLE)
    if whole and done and (wrong := compare(done[0], whole, metrics=case.metrics, num_steps=case.steps, tolerances=limits)):
        return f"it is not what an uninterrupted run (here called golden) gives: {explain(wrong, done[0], whole)}"
    return ""


def runs_before(case: Case, path: Path, fingerprint_with_code: dict[str, str]) -> dict[str, Steps]:
    """What a recording that was cut short has done; nothing, and why, where it cannot be gone on from."""
    try:
        return read_partial(partial_path(path), fingerprint_with_code)
    except ValueError as reason:
        print(f"{case.name}: recorded from the start: {reason}", flush=True)
        return {}


def order_of_runs(case: Case) -> list[str]:
    """What recording runs: the run that is not interrupted second, so that a difference shows early."""
    names = repeats(case.repeats)
    return names if case.kind == "regular" else [*names[:1], WHOLE, *names[1:]]


def repeats(times: int) -> list[str]:
    return [f"repeat {number + 1}" for number in range(times)]


def print_diff(golden: Path, other: Path) -> int:
    ours, theirs = Golden.read(other), Golden.read(golden)
    metrics = sorted({name for metrics in theirs.steps.values() for name in metrics if "/" not in name})
    for line in changed(ours.fingerprint, theirs.fingerprint):
        print(f"environment: {line}")
    wrong = compare(ours.steps, theirs.steps, metrics=metrics, num_steps=max(theirs.steps), tolerances=None)
    print(explain(wrong, ours.steps, theirs.steps) if wrong else f"{len(theirs.steps)} steps are equal bit for bit")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
