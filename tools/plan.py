#!/usr/bin/env python3
"""Plans of a run, made and checked before any process starts.

usage: python tools/plan.py PLAN [options]      (--help after a plan tells its options)
"""
from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

PLANS = {
    "layouts": "every legal layout of a run on so many GPUs, by predicted step time, with the memory of a GPU by kind",
    "full": "what tools/benchmark.py --suite full will measure, and how far the planner is from what was measured",
    "pipeline": "the schedule of a pipeline: its steps, timeline, memory and bubble; with --sweep all sizes are checked",
}


def main() -> int:
    sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    plans = parser.add_subparsers(dest="plan", required=True, metavar="PLAN")
    chosen = next((word for word in sys.argv[1:] if word in PLANS), None)
    for name, summary in PLANS.items():
        plan = plans.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        if name == chosen:
            importlib.import_module(f"planning.{name}").add_arguments(plan)
    arguments = parser.parse_args()
    try:
        return importlib.import_module(f"planning.{arguments.plan}").run(arguments)
    except ValueError as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
