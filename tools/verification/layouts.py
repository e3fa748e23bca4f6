"""Every layout against one process: losses, gradients and parameters after three steps, in fp64 to 1e-10 and in fp32 to its tolerance.

Starts its worlds itself (torchrun, gloo on CPUs); under torchrun or srun it uses the processes that it is given and runs the layouts of
that size. First one process is compared with transformers. Planted faults, each a gradient reduction left out, must be found. With --dtype
bf16 the layouts train in bf16, and are held to the distance from fp64 that one process in bf16 has.

usage: python tools/verify.py layouts [--quick | --full]
       torchrun --nproc-per-node 2 tools/verify.py layouts --quick --device cuda --dtype bf16 --markdown layouts_bf16.md
       torchrun --nproc-per-node 2 tools/verify.py layouts --device cuda --dtype bf16 --transformer-impl transformer_engine
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
from dataclasses import asdict, replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_dllm.config import ParallelConfig
from megatron_dllm.parallel import ParallelContext, initialize
from megatron_dllm.parallel.initialize import close
from megatron_dllm.parallel.launch import launched
from tools.refusal import Refusal
from verification import canvas_traffic
from verification.layout_bf16 import LIMIT, TENSOR_LIMIT, LowTrace, compare_low, low_trace
from verification.layout_cases import LAYOUTS, Case, Layout, covering_array, product
from verification.layout_compare import FAULTS, compare_wide, layout_context, run_case
from verification.layout_table import LOW, WIDE, AnyOutcome, cells, header, line, markdown
from verification.layout_training import Trace, reference_trace
from verification.table import print_figures

TIMEOUT_MINUTES = 5.0
TABLES = {"fp64": (WIDE, compare_wide), "bf16": (LOW, compare_low)}  # by --dtype
OLDEST_TRANSFORMERS = (5, 23)  # whose DiffusionGemma is the one that MODEL describes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument("--quick", action="store_true", help="Cases in which every two values of two factors meet (the default).")
    extent.add_argument("--full", action="store_true", help="The whole product of the factors.")
    parser.add_argument("--only", default="", metavar="TEXT", help="Layouts whose name has this text.")
    parser.add_argument("--layouts", nargs="+", default=[], metavar="NAME", help="Layouts of exactly these names.")
    parser.add_argument("--at-most", type=int, default=None, metavar="N", help="Cases of each layout, the first ones; without it all.")
    parser.add_argument("--transformer-impl", choices=["local", "transformer_engine"], default="local",
                        help="What computes the layers, experts too; the one process that is compared with is local. In bf16 on CUDA.")
    parser.add_argument("--seed", type=int, default=1, help="Seed of weights, tokens and draws.")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="Where to train.")
    parser.add_argument("--dtype", choices=list(TABLES), default="fp64", help="What to train in; fp64 has a column of fp32 too.")
    parser.add_argument("--markdown", type=Path, default=None, metavar="FILE", help="Write the table there, for a page of documentation.")
    # Of a world that the suite has started: the number of the first case to run.
    parser.add_argument("--part", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, default=None, metavar="FILE", help="Write every figure there, as JSON.")


def run(arguments: argparse.Namespace) -> int:
    """Print the table; the number of cases that miss a limit."""
    torch.set_num_threads(1)
    if arguments.transformer_impl != "local" and (arguments.device, arguments.dtype) != ("cuda", "bf16"):
        raise Refusal("--transformer-impl transformer_engine computes in bf16 on CUDA: set --device cuda --dtype bf16")
    rank, world_size = launched()
    if world_size > 1:
        return run_in_world(arguments)
    started = time.monotonic()
    missed = against_transformers(arguments.seed)
    chosen = chosen_layouts(arguments)
    outcomes: list[dict] = []
    for size in sorted({layout.processes for layout in chosen}):
        outcomes += run_worlds(size, arguments)
    if any(layout.parallel.context_parallel_size > 1 for layout in chosen):
        missed += print_figures("canvas traffic", canvas_traffic.traffic_figures(canvas_traffic.measure(2)))
    cases = [outcome for outcome in outcomes if not outcome["fault"]]
    expected, whole = (len(_cases(chosen, *which)) for which in ((arguments.full, arguments.at_most), (True, None)))
    failed = sum(bool(outcome["missed"]) for outcome in cases) + expected - len(cases)
    found = [bool(outcome["missed"]) for outcome in outcomes if outcome["fault"]]
    blind = found.count(False)
    verdict = (
        f"layouts: {expected - failed} of {expected} cases hold, of {whole} that --full runs; {len(chosen)} layouts; "
        f"planted faults: {found.count(True)} of {len(found)} found; {time.monotonic() - started:.0f} s")
    print(verdict)
    if arguments.markdown is not None:
        rows = [outcome["cells"] for outcome in outcomes]
        arguments.markdown.write_text(markdown(TABLES[arguments.dtype][0], rows, [verdict]), encoding="utf-8")
    if arguments.results is not None:
        arguments.results.write_text(json.dumps(outcomes, indent=1), encoding="utf-8")
    return missed + failed + blind


def against_transformers(seed: int) -> int:
    """Hold one process to transformers, where it is recent enough; the number of missed figures."""
    version = metadata.version("transformers") if find_spec("transformers") else "none"
    if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < OLDEST_TRANSFORMERS:
        needed = ".".join(map(str, OLDEST_TRANSFORMERS))
        print(f"NOT RUN: one process against transformers (needs transformers >= {needed}, found {version})")
        return 0
    from verification import parity  # imports transformers

    return parity.run(argparse.Namespace(seed=seed))


def chosen_layouts(arguments: argparse.Namespace) -> list[Layout]:
    """Those that the options name, computed by what they name."""
    named = (layout for layout in LAYOUTS if arguments.only in layout.name and layout.name in (arguments.layouts or [layout.name]))
    return [replace(layout, transformer_impl=arguments.transformer_impl) for layout in named]


def _cases(layouts: Sequence[Layout], full: bool, at_most: int | None) -> list[Case]:
    """All cases, or those that cover every pair; of each layout the first so many."""
    cases = product(layouts) if full else covering_array(product(layouts))
    return [case for layout in layouts for case in [case for case in cases if case.layout == layout][:at_most]]


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
                   "--seed", str(arguments.seed), "--device", arguments.device, "--dtype", arguments.dtype, "--only", arguments.only,
                   "--transformer-impl", arguments.transformer_impl, "--results", str(results), "--part", str(first),
                   "--full" if arguments.full else "--quick", *(["--layouts", *arguments.layouts] if arguments.layouts else []),
                   *([] if arguments.at_most is None else ["--at-most", str(arguments.at_most)])]
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
    columns, compare = TABLES[arguments.dtype]
    missed = 0
    if arguments.part is None and launched()[0] == 0:
        missed = against_transformers(arguments.seed)
    base = initialize(ParallelConfig(), device=arguments.device, timeout_minutes=TIMEOUT_MINUTES)
    world, say = base.world, print if base.world.rank == 0 else lambda *_, **__: None
    layouts = chosen_layouts(arguments)
    # The array is chosen over all layouts, so that worlds of all sizes together are what one command runs.
    cases = [case for case in _cases(layouts, arguments.full, arguments.at_most) if case.layout.processes == world.size]
    if arguments.dtype == "bf16":
        cases = [case.for_bf16 for case in cases]
    planted = [(_first(cases, layout), fault) for fault, (layout, _) in FAULTS.items() if _first(cases, layout)]
    by = "" if arguments.transformer_impl == "local" else ", layers by Transformer Engine"
    title = (f"{world.size} processes, {describe_device(base.device)}, torch {torch.__version__}, {arguments.dtype}{by}: "
             f"{len(cases)} cases, {len(planted)} planted faults")
    say(f"\n{title}\n{header(columns)}")
    outcomes: list[AnyOutcome] = []
    todo = [*((case, "") for case in cases), *planted][arguments.part or 0:]
    traces = share_references([case for case, _ in todo], arguments, base)
    context = parallel = None
    for case, fault in todo:
        write_results(arguments, world.rank, outcomes, running=case.name)
        if case.layout.parallel != parallel:  # new groups take NCCL a while
            if context is not None:
                close(context)
            context, parallel = layout_context(case.layout, base), case.layout.parallel
        outcome = run_case(case, traces[case.reference], context, compare, fault)
        outcomes.append(outcome)
        notes = [title, *summary(outcomes, arguments.dtype)]
        if arguments.markdown is not None and world.rank == 0:  # after every case: a job may be cut off
            arguments.markdown.write_text(markdown(columns, [cells(columns, done) for done in outcomes], notes), encoding="utf-8")
        say(line(columns, outcome), flush=True)
        if outcome.explanations:
            shown = 1 if fault else 12
            say("\n".join(f"        {text}" for text in outcome.explanations[:shown]), flush=True)
    write_results(arguments, world.rank, outcomes, running="")
    say("\n".join(summary(outcomes, arguments.dtype)))
    dist.destroy_process_group()
    # A world that the suite has started tells it by its results; a status would have torchrun end the other ranks.
    return 0 if arguments.part is not None else missed + sum(bool(outcome.missed()) != bool(outcome.fault) for outcome in outcomes)


def describe_device(device: torch.device) -> str:
    """The device's name and what sends between several."""
    return f"{torch.cuda.get_device_name(device)}, NCCL" if device.type == "cuda" else "CPU, gloo"


def summary(outcomes: Sequence[AnyOutcome], dtype: str) -> list[str]:
    """What a table's columns are held to, and how many of its rows hold."""
    cases = [outcome for outcome in outcomes if not outcome.fault]
    counts = (f"{sum(not outcome.missed() for outcome in cases)} of {len(cases)} cases hold; planted faults found: "
              f"{sum(bool(outcome.missed()) for outcome in outcomes if outcome.fault)} of {len(outcomes) - len(cases)}")
    if dtype == "bf16":
        return ["own error: |g - g64| / |g64| of one process in bf16.",
                f"Other figures: distance from fp64 in units of that of one process in bf16, limit {LIMIT:g}: loss, whole gradient, worst "
                f"tensor (limit {TENSOR_LIMIT:g}), masters after three steps. Every token goes to all experts, since rounding would "
                "decide a choice.", counts]
    by_floor = [name for outcome in cases for name in outcome.by_floor_alone]
    floor = sorted({re.sub(r"layers\.\d+", "layers.N", name) for name in by_floor})
    return ["fp32 gradients with an element that passes by the floor 1e-7 |g| alone: " + (", ".join(floor) or "none"), counts]


def _first(cases: Sequence[Case], layout: str) -> Case | None:
    return next((case for case in cases if case.layout.name == layout and case.objective != "ar"), None)


def write_results(arguments: argparse.Namespace, rank: int, outcomes: Sequence[AnyOutcome], *, running: str) -> None:
    """What has been found so far, and the case that is under way."""
    if arguments.results is not None and rank == 0:
        columns, _ = TABLES[arguments.dtype]
        found = [asdict(outcome) | {"missed": outcome.missed(), "cells": cells(columns, outcome)} for outcome in outcomes]
        arguments.results.write_text(json.dumps({"running": running, "outcomes": found}), encoding="utf-8")


def share_references(cases: Sequence[Case], arguments: argparse.Namespace, base: ParallelContext) -> dict[object, Trace | LowTrace]:
    """What one process computes for each of the cases: the ranks share the work, and give each other the results."""
    firsts = {case.reference: case for case in reversed(cases)}
    traces = {}
    for place, (reference, case) in enumerate(sorted(firsts.items(), key=repr)):
        if place % base.world.size == base.world.rank:
            exact = reference_trace(case, arguments.seed, base.device, with_fp32=arguments.dtype == "fp64")
            traces[reference] = exact if arguments.dtype == "fp64" else low_trace(case, exact, base.device)
    gathered: list = [None] * base.world.size
    dist.all_gather_object(gathered, traces)
    return {reference: trace for part in gathered for reference, trace in part.items()}
