#!/usr/bin/env python3
"""Train a block-diffusion language model: parse the flags, build the run, train. `--help` lists every flag.

Alone it is one process; under torchrun or srun each process is one rank.
"""
from __future__ import annotations

import gc
import logging
import os
import sys
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_dllm.config import RunConfig, format_problems, parse, to_arguments_text, validate
from megatron_dllm.parallel import FirstFailure, OtherRankFailed, ParallelContext, initialize
from megatron_dllm.parallel.initialize import shares_device
from megatron_dllm.parallel.launch import launched
from megatron_dllm.training.determinism import require_determinism
from megatron_dllm.training.loop import Trainer, TrainingFailed
from megatron_dllm.training.mistakes import is_told

LAST_WORD_SECONDS = 2.0


def train(run: RunConfig) -> None:
    """Run `run` as the launched process `rank`; ValueError for what the user can mend, OtherRankFailed where another rank tells."""
    context = initialize(run.parallel, device=run.training.device, timeout_minutes=run.parallel.distributed_timeout_minutes)
    with FirstFailure(context.world):
        _train(run, context)
    if dist.is_initialized():
        gc.collect()  # of what has cycles: NCCL ends no group that a CUDA graph has recorded, as long as there is the graph
        dist.destroy_process_group()


def _train(run: RunConfig, context: ParallelContext) -> None:
    rank = context.world.rank
    if rank == 0:
        print(device_line(context), flush=True)
        for note in run.overrides:
            print(note, flush=True)
        print(to_arguments_text(run), flush=True)
    if run.training.deterministic_mode:
        verified = require_determinism(run, context.device, context.world.size, os.environ)
        if rank == 0:
            print(verified, flush=True)
    Trainer.build(run, context).fit()


def device_line(context: ParallelContext) -> str:
    """The log's first line: what rank 0 computes on, and whether other ranks compute there too."""
    shared = "; all ranks of a host share it, so that no time says anything of the layout" if shares_device(context) else ""
    return f"device: {context.device}, torch {torch.__version__}{shared}"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 0: finished or was asked to stop, 2: a mistake in what it was given, 1: a failure of this rank or another."""
    rank, world_size = 0, 1  # where the launcher's own variables are the mistake, every rank tells it
    try:
        rank, world_size = launched()
        logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR, format="%(message)s")
        run = parse(sys.argv[1:] if argv is None else argv)
        problems = validate(run, world_size=world_size)
        mistakes = format_problems(problems) if problems else ""
    except ValueError as error:
        if not is_told(error):
            raise
        mistakes = str(error)
    if mistakes:  # the same on every rank
        if rank == 0:
            print(f"error: {mistakes}", file=sys.stderr)
        return 2
    who = f"rank {rank}: " if world_size > 1 else ""
    try:
        train(run)
    except OtherRankFailed as error:
        # torchrun ends every process when the first one is gone, and that must not be before the cause is told.
        time.sleep(LAST_WORD_SECONDS)
        print(f"{who}ends, since {error}", file=sys.stderr)
        return 1
    except (TrainingFailed, ValueError) as error:
        if isinstance(error, ValueError) and not is_told(error):
            raise
        _tell(f"{who}error: {error}", rank, world_size)
        return 1 if isinstance(error, TrainingFailed) else 2
    except OSError as error:
        if error.filename is None:
            raise
        # A disk that is full, a folder that is gone: no line of ours says more than the file's name.
        _tell(f"{who}error: {error}", rank, world_size)
        return 1
    return 0


def _tell(text: str, rank: int, world_size: int) -> None:
    """Without a launcher's agent rank 0 holds the store in which the others look for the cause, and must not be gone before they have."""
    print(text, file=sys.stderr, flush=True)
    if rank == 0 and world_size > 1:
        time.sleep(LAST_WORD_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
