#!/usr/bin/env python3
"""Benchmark suites: each measures beside a reference in the same run and prints its table last.

usage: python tools/benchmark.py --suite SUITE [options]      (with --help, the options of that suite)
"""
from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from pathlib import Path

BEGUN = time.monotonic()  # imports take seconds, and a suite that is to end in time counts them

# Name -> (module of tools/benchmarking, what it measures). A module has add_arguments(parser) and run(arguments) -> number of failures.
SUITES = {
    "h200": ("h200", "the suites training, adapters, generation and kernels, one after the other, on one GPU"),
    "training": ("training", "training steps of real width beside transformers, on one GPU"),
    "scaling": ("scaling", "forward and backward of one global batch on one GPU and on two: dp2, tp2+sp, ep2, cp2"),
    "cpu": ("toy", "training steps of the toy beside transformers, on a CPU"),
    "adapters": ("adapters", "training steps of low-rank adapters on a frozen model beside transformers with PEFT"),
    "kernels": ("kernels", "attention, the experts' products and mHC beside torch"),
    "engine": ("engine", "attention, rotary and cross entropy by Transformer Engine beside ours"),
    "generation": ("generation", "a denoising step of generation beside transformers"),
    "pipeline": ("pipeline", "PP2 and PP2/VPP2 beside one process, with mHC and without: equal steps, time, bubble"),
    "context": ("context", "optimizer steps on documents of 100,096 tokens, on one GPU or shared by several: tokens/s, memory, bytes"),
    "full": ("full", "the recipes' whole steps by layout on 2 to 8 GPUs: s/step, tokens/s, memory, exposed communication, loss beside one"),
    "moe": ("moe", "training steps by dispatcher and recompute over ranks that share experts: time, exchanges, exposed communication"),
}


def main() -> int:
    """0 when every aim is reached, 1 when one is missed, 2 for what the suite refuses."""
    sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]
    listed = "\n".join(f"  {name:<10} {summary}" for name, (_, summary) in SUITES.items())
    parser = argparse.ArgumentParser(description=f"{__doc__}\nsuites:\n{listed}", formatter_class=argparse.RawDescriptionHelpFormatter,
                                     add_help=False, allow_abbrev=False)
    parser.add_argument("--suite", choices=SUITES, metavar="SUITE", required=not {"-h", "--help"} & set(sys.argv), help="see above")
    chosen, _ = parser.parse_known_args()
    parser.add_argument("-h", "--help", action="help", help="show this and end")
    if chosen.suite:
        module = importlib.import_module(f"benchmarking.{SUITES[chosen.suite][0]}")
        module.add_arguments(parser)
        parser.set_defaults(begun=BEGUN)
    arguments = parser.parse_args()
    import torch  # late: --help does not wait for it

    is_toy = chosen.suite == "cpu" or vars(arguments).get("toy") or vars(arguments).get("width") == "toy"  # their times tell little
    from benchmarking.alone import refuse_company

    from megatron_dllm.parallel.launch import shares_gpu
    from tools.refusal import Refusal, status_of

    def measure() -> int:
        if not is_toy and shares_gpu():
            raise Refusal("SHARE_GPU=1: ranks that take turns on a GPU tell no time; unset it, or add --toy --device cuda to --suite full")
        if not is_toy and torch.cuda.is_available():
            refuse_company(torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))))
        return module.run(arguments)

    return status_of(measure)


if __name__ == "__main__":
    sys.exit(main())
