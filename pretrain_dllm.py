#!/usr/bin/env python3
"""Train a block-diffusion language model: parse the flags, build the run, train. `--help` lists every flag.

Alone it is one process; under torchrun or srun each process is one rank.
"""
from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

import torch

from megatron_dllm.config import RunConfig, format_problems, parse_or_exit, to_arguments_text, validate
from megatron_dllm.parallel import ParallelContext
from megatron_dllm.training.loop import Trainer, TrainingFailed


def device_of(name: str) -> torch.device:
    """The device of --device; `auto` is CUDA where torch sees one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device; install a CUDA build of torch, or set --device cpu")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name, 0) if name == "cuda" else torch.device(name)


def train(run: RunConfig) -> None:
    """Run `run` on this process; ValueError for what the user can mend."""
    problems = validate(run)
    if problems:
        raise ValueError(format_problems(problems))
    device = device_of(run.training.device)
    print(f"device: {device}, torch {torch.__version__}", flush=True)
    for note in run.overrides:
        print(note, flush=True)
    print(to_arguments_text(run), flush=True)
    if run.training.deterministic_mode:
        torch.use_deterministic_algorithms(True)
    Trainer.build(run, ParallelContext.single(device)).fit()


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 0 when the run finished or was asked to stop, 2 for a mistake in what it was given, 1 for a failure."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run = parse_or_exit(argv)
    try:
        train(run)
    except TrainingFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
