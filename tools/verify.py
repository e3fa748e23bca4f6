#!/usr/bin/env python3
"""Verification suites: each prints its figures last and ends with a status other than 0 when one is missed.

usage: python tools/verify.py SUITE [options]      (--help after a suite tells its options)
"""
from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

SUITES = {
    "parity": "model, losses and gradients against transformers",
    "layouts": "training over several processes against one process",
    "pipeline": "transfers and schedules over processes: stages on integers bit for bit, the model against one process",
    "transport": "transfers alone between the ranks of a launched world (torchrun), over NCCL on GPUs, bit for bit",
    "context": "context parallelism of a launched world (torchrun) against one device: ours and Transformer Engine's",
    "graphs": "CUDA graphs over the GPUs of a launched world (torchrun): replayed steps against ordinary ones, bit for bit",
    "fp8": "FP8 by Transformer Engine against bf16 on a CUDA device: the loss over 100 steps of a toy, and the time of a layer's products",
    "moe": "dispatchers, expert parallelism and dispatch replay, over processes of this machine",
    "adapters": "a run's adapters as PEFT loads them into transformers: the same logits",
    "sampler": "generation against transformers, with the same draws",
    "resume": "runs taken up again: bit-equal in the same layout, equal after gathering in any other",
    "saving_time": "time and training stall of a save, at once and in the background, beside torch.save",
    "conversion": "peak memory of tools/convert.py, and that there and back is the identity",
    "crash": "kill -9 while saving, full and read-only disks, damaged files",
}


def main() -> int:
    """0 when every figure is reached, 1 when one is missed, 2 for what the suite refuses."""
    sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    suites = parser.add_subparsers(dest="suite", required=True, metavar="SUITE")
    chosen = next((word for word in sys.argv[1:] if word in SUITES), None)
    for name, summary in SUITES.items():
        suite = suites.add_parser(name, help=summary, allow_abbrev=False)
        if name == chosen:
            importlib.import_module(f"verification.{name}").add_arguments(suite)
    arguments = parser.parse_args()
    from tools.refusal import status_of

    return status_of(lambda: importlib.import_module(f"verification.{arguments.suite}").run(arguments))


if __name__ == "__main__":
    sys.exit(main())
