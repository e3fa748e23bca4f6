#!/usr/bin/env python3
"""Train a block-diffusion language model: parse the flags, build the run, train. `--help` lists every flag.

Alone it is one process; under torchrun or srun each process is one rank.
"""
from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_dllm.config import RunConfig, format_problems, parse, to_arguments_text, validate
from megatron_dllm.parallel import initialize
from megatron_dllm.parallel.launch import launched
from megatron_dllm.training.determinism import require_determinism
from megatron_dllm.training.loop import Trainer, TrainingFailed


def train(run: RunConfig, rank: int) -> None:
    """Run `run` as the launched process `rank`; ValueError for what the user can mend."""
    context = initialize(run.parallel, device=run.training.device, timeout_minutes=run.parallel.distributed_timeout_minutes)
    if rank == 0:
        print(f"device: {context.device}, torch {torch.__version__}", flush=True)
        for note in run.overrides:
            print(note, flush=True)
        print(to_arguments_text(run), flush=True)
    if run.training.deterministic_mode:
        verified = require_determinism(run, context.device, context.world.size, os.environ)
        if rank == 0:
            print(verified, flush=True)
    Trainer.build(run, context).fit()
    if dist.is_initialized():
        dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 0 when the run finished or was asked to stop, 2 for a mistake in what it was given, 1 for a failure."""
    rank, world_size = launched()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR, format="%(message)s")
    try:
        run = parse(sys.argv[1:] if argv is None else argv)
        if problems := validate(run, world_size=world_size):
            raise ValueError(format_problems(problems))
    except ValueError as error:  # the same on every rank
        if rank == 0:
            print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        train(run, rank)
    except (TrainingFailed, ValueError) as error:
        # All ranks may see it, or one alone: each says so.
        print(f"{f'rank {rank}: ' if world_size > 1 else ''}error: {error}", file=sys.stderr)
        return 1 if isinstance(error, TrainingFailed) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
