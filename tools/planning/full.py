"""What the suite full of tools/benchmark.py will measure, predicted; then how far the planner is from what one and two GPUs have given.

    work, sent    milliseconds: computed and moved; sent for tokens, tensors and sequences
    host          the least that it takes to start all that, 0 by graphs; the longer of the two counts, and the bubble on top, in which
                  stages of a pipeline send each other
    sums, AdamW   gradients summed and parameters gathered beside nothing; the update
    exposed       share of the step in which something is sent and nothing computed
"""
from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarking.full_cases import Case, Size, cases

from planning.layouts import GIB, Machine, add_host_argument, plan
from planning.measured import MEASURED

FAR = 0.25  # of what was measured
HEADER = ("case", "s/step", "tokens/s a GPU", "TFLOP/s a GPU", "GiB", "exposed", "work", "sent", "host", "bubble", "sums", "AdamW")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-gpus", type=int, default=8, metavar="N")
    parser.add_argument("--layers", type=int, default=None, metavar="N", help="as the suite's")
    parser.add_argument("--seq-length", type=int, default=None, metavar="N", help="as the suite's")
    parser.add_argument("--long-length", type=int, default=None, metavar="N", help="as the suite's")
    add_host_argument(parser)
    parser.add_argument("--commands", action="store_true", help="then what starts each case by itself")
    parser.add_argument("--measured", action="store_true", help="compare with what was measured instead")


def run(arguments: argparse.Namespace) -> int:
    """Print a table."""
    if arguments.measured:
        print(markdown(measured_rows()))
        print("".join(f"\nfar off: {one.what}: {one.far}" for one in MEASURED if one.far))
        return 0
    size = Size.of(False, arguments.layers, arguments.seq_length, arguments.long_length)
    trained = [case for case in cases(arguments.num_gpus, size) if case.trains]
    print(markdown([HEADER, *(predicted_row(case, arguments.host) for case in trained)]))
    if arguments.commands:
        print("\n".join(f"\n{case.name}:\n{case.command()}" for case in trained))
    return 0


def predicted_row(case: Case, host: float) -> tuple[str, ...]:
    found = plan(case.run(False), Machine(case.ranks, host=host))
    time = found.time
    parts = (f"{part:.0f}" for part in (time.compute, time.communication, time.launches))
    return (case.name, f"{time.total / 1e3:.3f}", f"{found.tokens_per_second:,.0f}", f"{found.tflops:.0f}", f"{found.bytes / GIB:.1f}",
            f"{time.exposed:.0%}", *parts, f"{time.waiting:.0%}", f"{time.gradients:.0f}", f"{time.optimizer:.0f}")


def measured_rows() -> list[tuple[str, ...]]:
    """A line a figure: milliseconds, predicted and measured, their ratio, GiB the same way."""
    rows = [("measured", "ms", "predicted", "ratio", "GiB", "predicted", "ratio")]
    for one in MEASURED:
        ms, gib = one.planned()
        memory = ("", "", "") if one.gib is None else (f"{one.gib:.1f}", f"{gib:.1f}", f"{gib / one.gib:.2f}")
        rows.append((one.what, f"{one.ms:.1f}", f"{ms:.1f}", f"{ms / one.ms:.2f}", *memory))
    return rows


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table whose first row is its header."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = ["| " + " | ".join(cell.rjust(width) if place else cell.ljust(width) for place, (cell, width) in enumerate(zip(
        row, widths, strict=True))) + " |" for row in rows]
    rule = "|" + "|".join("-" * (width + 1) + (":" if place else "-") for place, width in enumerate(widths)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])
