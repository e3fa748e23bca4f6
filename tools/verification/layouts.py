"""Every layout against one process: losses, gradients and parameters after three steps, in fp64 to 1e-10 and in fp32 to its tolerance.

Starts its worlds itself (torchrun, gloo on CPUs); under torchrun or srun it uses the processes that it is given and runs the layouts of
that size. First one process is compared with transformers. Planted faults, each a gradient reduction left out, must be found.

usage: python tools/verify.py layouts [--quick | --full]
       torchrun --nproc-per-node 2 tools/verify.py layouts --quick --device cuda
"""
from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_dllm.config import ParallelConfig
from megatron_dllm.parallel import ParallelContext, initialize
from megatron_dllm.parallel.launch import launched
from verification import canvas_traffic, parity
from verification.layout_cases import LAYOUTS, Case, Layout, covering_array, product
from verification.layout_compare import FAULTS, Outcome, run_case
from verification.layout_training import Trace, reference_trace
from verification.table import print_figures

TIMEOUT_MINUTES = 5.0
HEADER = (f"{'':7}{'layout · objective · lengths · accumulation · recompute':104}{'loss':>9}{'gradient':>10} {'(worst parameter)':50}"
          f"{'SGD':>9}{'AdamW/lr':>10}{'fp32 loss':>11}{'fp32 grad':>11}{'gap':>9}  bytes sent by rank 0")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument("--quick", action="store_true", help="Cases in which every two values of two factors meet (the default).")
    extent.add_argument("--full", action="store_true", help="The whole product of the factors.")
    parser.add_argument("--only", default="", metavar="TEXT", help="Layouts whose name has this text.")
    parser.add_argument("--seed", type=int, default=1, help="Seed of weights, tokens and draws.")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="Where to train.")
    # Of a world that the suite has started: the number of the first case to run.
    parser.add_argument("--part", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, default=None, metavar="FILE", help="Write every figure there, as JSON.")


def run(arguments: argparse.Namespace) -> int:
    """Print the table; the number of cases that miss a limit."""
    torch.set_num_threads(1)
    rank, world_size = launched()
    if world_size > 1:
        return run_in_world(arguments)
    started = time.monotonic()
    missed = parity.run(argparse.Namespace(seed=arguments.seed))
    chosen = [layout for layout in LAYOUTS if arguments.only in layout.name]
    available = [layout for layout in chosen if not layout.missing]
    outcomes: list[dict] = []
    for size in sorted({layout.processes for layout in available}):
        outcomes += run_worlds(size, arguments)
    if any(layout.parallel.context_parallel_size > 1 for layout in available):
        missed += print_figures("canvas traffic", canvas_traffic.traffic_figures(canvas_traffic.measure(2)))
    for layout in chosen:
        if layout.missing:
            print(f"not available yet: {layout.name} ({'; '.join(layout.missing)})")
    cases = [outcome for outcome in outcomes if not outcome["fault"]]
    expected, whole = (len(_cases(available, full)) for full in (arguments.full, True))
    failed = sum(bool(outcome["missed"]) for outcome in cases) + expected - len(cases)
    found = [bool(outcome["missed"]) for outcome in outcomes if outcome["fault"]]
    blind = found.count(False)
    print(f"layouts: {expected - failed} of {expected} cases hold, of {whole} that --full runs; {len(available)} of {len(chosen)} layouts "
          f"are available; planted faults: {found.count(True)} of {len(found)} found; {time.monotonic() - started:.0f} s")
    if arguments.results is not None:
        arguments.results.write_text(json.dumps(outcomes, indent=1), encoding="utf-8")
    return missed + failed + blind


def _cases(layouts: Sequence[Layout], full: bool) -> list[Case]:
    return product(layouts) if full else covering_array(product(layouts))


def run_worlds(size: int, arguments: argparse.Namespace) -> list[dict]:
    """Run this suite in `size` processes; what they found. After a case that ended its world another world goes on with the next."""
    outcomes: list[dict] = []
    first = 0
    while True:
        found, finished = start_world(size, arguments, first)
        outcomes += found
        if finished:
            return outcomes
        first += len(found) + 1


def start_world(size: int, arguments: argparse.Namespace, first: int) -> tuple[list[dict], bool]:
    """What one world found from its case number `first` on, and whether it came to its end."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        script = str(Path(__file__).resolve().parents[1] / "verify.py")
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size), "--standalone", "--", script, "layouts",
                   "--seed", str(arguments.seed), "--device", arguments.device, "--only", arguments.only, "--results", str(results),
                   "--part", str(first), "--full" if arguments.full else "--quick"]
        status = subprocess.run(command, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode
        if not results.is_file():
            print(f"MISSED the world of {size} processes ended with status {status} before its first case")
            return [], True
        text = json.loads(results.read_text(encoding="utf-8"))
        if text["running"]:
            print(f"MISSED {text['running']}: the world of {size} processes ended with status {status} in it")
        return text["outcomes"], not text["running"]


def run_in_world(arguments: argparse.Namespace) -> int:
    """The cases of layouts of this world's size; rank 0 prints."""
    base = initialize(ParallelConfig(), device=arguments.device, timeout_minutes=TIMEOUT_MINUTES)
    world, say = base.world, print if base.world.rank == 0 else lambda *_, **__: None
    layouts = [layout for layout in LAYOUTS if arguments.only in layout.name and not layout.missing]
    # The array is chosen over all layouts, so that worlds of all sizes together are what one command runs.
    cases = [case for case in _cases(layouts, arguments.full) if case.layout.processes == world.size]
    planted = [(_first(cases, layout), fault) for fault, (layout, _) in FAULTS.items() if _first(cases, layout)]
    say(f"\n{world.size} processes, {base.device.type}, torch {torch.__version__}: {len(cases)} cases, {len(planted)} planted faults\n"
        + HEADER)
    outcomes: list[Outcome] = []
    todo = [*((case, "") for case in cases), *planted][arguments.part or 0:]
    traces = share_references([case for case, _ in todo], arguments.seed, base)
    for case, fault in todo:
        write_results(arguments, world.rank, outcomes, running=case.name)
        outcome = run_case(case, traces[case.reference], base, fault)
        outcomes.append(outcome)
        say(line(outcome), flush=True)
        if outcome.explanations:
            shown = 1 if fault else 12
            say("\n".join(f"        {text}" for text in outcome.explanations[:shown]), flush=True)
    write_results(arguments, world.rank, outcomes, running="")
    by_floor = [name for outcome in outcomes if not outcome.fault for name in outcome.by_floor_alone]
    floor = sorted({re.sub(r"layers\.\d+", "layers.N", name) for name in by_floor})
    say("fp32 gradients with an element that passes by the floor 1e-7 |g| alone: " + (", ".join(floor) or "none"))
    dist.destroy_process_group()
    # A world that the suite has started tells it by its results; a status would have torchrun end the other ranks.
    return 0 if arguments.part is not None else sum(bool(outcome.missed()) != bool(outcome.fault) for outcome in outcomes)


def _first(cases: Sequence[Case], layout: str) -> Case | None:
    return next((case for case in cases if case.layout.name == layout and case.objective != "ar"), None)


def write_results(arguments: argparse.Namespace, rank: int, outcomes: Sequence[Outcome], *, running: str) -> None:
    """What has been found so far, and the case that is under way."""
    if arguments.results is not None and rank == 0:
        found = [asdict(outcome) | {"missed": outcome.missed()} for outcome in outcomes]
        arguments.results.write_text(json.dumps({"running": running, "outcomes": found}), encoding="utf-8")


def share_references(cases: Sequence[Case], seed: int, base: ParallelContext) -> dict[object, Trace]:
    """What one process computes for each of the cases: the ranks share the work, and give each other the results."""
    firsts = {case.reference: case for case in reversed(cases)}
    traces = {}
    for place, (reference, case) in enumerate(sorted(firsts.items(), key=repr)):
        if place % base.world.size == base.world.rank:
            traces[reference] = reference_trace(case, seed, torch.device("cpu"))
    gathered: list = [None] * base.world.size
    dist.all_gather_object(gathered, traces)
    return {reference: trace for part in gathered for reference, trace in part.items()}


def line(outcome: Outcome) -> str:
    """One row of the table."""
    missed = outcome.missed()
    if outcome.fault:
        verdict, name = ("found" if missed else "MISSED"), f"planted: {outcome.fault} ({outcome.case.split(' · ')[0]})"
    else:
        verdict, name = ("MISSED" if missed else "ok"), outcome.case
    sent = " ".join(f"{kind} {_short(sent_bytes)}" for kind, sent_bytes in outcome.sent_bytes.items())
    return (f"{verdict:7}{name:104}{outcome.loss:9.1e}{outcome.gradient.value:10.1e} {'(' + outcome.gradient.name + ')':50}"
            f"{outcome.after_sgd.value:9.1e}{outcome.after_adamw.value:10.1e}{outcome.narrow_loss:11.1e}"
            f"{outcome.narrow_gradient.value:11.2g}{outcome.routing_gap:9.1e}  {sent}"
            + (f"  [{', '.join(missed)}; fp32 worst in {outcome.narrow_gradient.name}]" if missed else ""))


def _short(count: int) -> str:
    return f"{count / 1e6:.2f}M" if count >= 1e5 else f"{count / 1e3:.1f}k"
