"""Everything that one GPU is measured by: the suites training, adapters, generation and kernels, each in a process of its own.

A process that has ended leaves no memory behind, and one that fails costs the others nothing; their exit status is counted.
"""
from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import torch

from tools.refusal import Refusal

TOOL = Path(__file__).resolve().parents[1] / "benchmark.py"
# transformers compiles for its static cache as long as there are layers: two at batch sizes 1 and 8 were not done in 70 s, six not in 100.
SUITES = {"training": (), "adapters": (), "generation": ("--static-cache-layers", "2", "--static-cache-limit", "100"), "kernels": ()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nemo", action="store_true", help="NeMo AutoModel beside the training steps, which must be installed.")
    parser.add_argument("--only", nargs="+", choices=tuple(SUITES), default=tuple(SUITES), metavar="SUITE",
                        help=f"Some of {', '.join(SUITES)}.")


def run(arguments: argparse.Namespace) -> int:
    """Print what the suites print, as they print it, then a line each; the number of suites that missed or failed."""
    if not torch.cuda.is_available():
        raise Refusal("the suite h200 needs a CUDA device, and torch sees none; --suite cpu runs here")
    lines, missed = [], 0
    for suite in arguments.only:
        options = [*SUITES[suite], *(["--nemo"] if suite == "training" and arguments.nemo else [])]
        print(f"== {suite}", flush=True)
        start = time.monotonic()
        status = subprocess.run([sys.executable, str(TOOL), "--suite", suite, *options], check=False).returncode
        missed += status != 0
        verdict = "every aim is reached" if status == 0 else "an aim is missed, or a loss differs: see above" if status == 1 else "FAILED"
        lines.append(f"{suite:12} {time.monotonic() - start:6.0f} s   {verdict}")
    print("\n".join(lines), flush=True)
    return missed
