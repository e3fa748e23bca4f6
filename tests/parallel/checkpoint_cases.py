"""A run saved under one layout and taken up under another: what every rank does, and what comes of it."""
from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path

import torch
from torch import Tensor

from megatron_dllm.checkpoint import store
from megatron_dllm.checkpoint.save import CheckpointWriter
from megatron_dllm.config import parse, to_arguments_text
from megatron_dllm.parallel.gathering import gather_whole
from megatron_dllm.parallel.initialize import close, create_context
from megatron_dllm.parallel.topology import Topology
from megatron_dllm.training.batches import training_batches
from megatron_dllm.training.loop import Trainer
from megatron_dllm.training.saving import restore, schedule_values, state_shards
from megatron_dllm.training.step import train_step

FLAGS = ("--preset toy --num-layers 2 --layer-types sliding,full --vocab-size 11 --canvas-length 8 --data-source sudoku --hidden-size 32 "
         "--ffn-hidden-size 24 --moe-ffn-hidden-size 16 --num-experts 4 --sudoku-num-puzzles 24 --seq-length 34 --micro-batch-size 1 "
         "--global-batch-size 4 --train-iters 8 --device cpu --lr 3e-3 --lr-decay-style constant").split()
STEPS = 2  # before the checkpoint

LAYOUTS = {
    "1": (1, ""),
    "dp4": (4, ""),
    "dp4, distributed optimizer": (4, "--use-distributed-optimizer"),
    "dp2, distributed optimizer": (2, "--use-distributed-optimizer"),
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "tp2 sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "tp2 dp2": (4, "--tensor-model-parallel-size 2"),
    "tp2 dp2, distributed optimizer": (4, "--tensor-model-parallel-size 2 --use-distributed-optimizer"),
    "tp4": (4, "--tensor-model-parallel-size 4"),
    "cp2": (2, "--context-parallel-size 2"),
    "ep2": (2, "--expert-model-parallel-size 2"),
    "ep2 etp2": (4, "--expert-model-parallel-size 2 --expert-tensor-parallel-size 2"),
    "ep4": (4, "--expert-model-parallel-size 4"),
    "ep4, distributed optimizer": (4, "--expert-model-parallel-size 4 --use-distributed-optimizer"),
    "pp2 vpp2": (2, "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E|t|t|L"),
    "pp2 tp2": (4, "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2"),
}
LORA = "--lora-rank 4 --lora-targets attention mlp router self_conditioning experts".split()


@dataclasses.dataclass(frozen=True)
class Taken:
    """A run's state, gathered whole, and the losses of its next step."""

    tensors: dict[str, Tensor]
    next_loss: float


def refuse(*arguments, **options):
    """In place of what reads pickles."""
    raise AssertionError("a pickle was read")


def save_under(rank: int, layout: str, folder: str, *flags: str) -> Taken:
    """Train STEPS steps, save, and go on for one."""
    trainer = build(rank, layout, *flags)
    base = restore(trainer).base
    for number, prepared in zip(range(STEPS), training_batches(trainer.train, start_iteration=0, iterations=STEPS), strict=True):
        train_step(trainer.model, trainer.optimizer, prepared.inputs, trainer.schedule.at(number), pipeline=trainer.pipeline)
    state = store.TrainingState(STEPS, STEPS * 4, trainer.optimizer.num_steps, {}, schedule_values(trainer), base)
    outcome, = CheckpointWriter(Path(folder), trainer.context.world).save(state, state_shards(trainer), to_arguments_text(trainer.run))
    assert outcome.error is None, outcome.error
    return take(trainer)


def load_under(rank: int, layout: str, folder: str, *flags: str) -> Taken:
    """Resume and go on for one step. Nothing may read a pickle."""
    trainer = build(rank, layout, "--load", folder, *flags)
    kept = pickle.load, torch.load
    pickle.load = torch.load = refuse
    try:
        assert restore(trainer).iteration == STEPS
    finally:
        pickle.load, torch.load = kept
    return take(trainer)


def build(rank: int, layout: str, *flags: str) -> Trainer:
    """The trainer of FLAGS in a layout."""
    size, words = LAYOUTS[layout]
    run = parse([*FLAGS, *words.split(), *flags])
    context = create_context(Topology.of(run.parallel, size), rank=rank, device=torch.device("cpu"),
                             sequence_parallel=run.parallel.sequence_parallel)
    return Trainer.build(run, context)


def take(trainer: Trainer) -> Taken:
    """Gather everything, then take one step."""
    optimizer = trainer.optimizer
    tensors = {name: master.clone() for name, master in optimizer.masters()}
    tensors |= {f"{state}/{name}": moment.clone() for name, state, moment in optimizer.states()}
    if trainer.context.pp.size > 1:  # each stage has its own
        of_stages = [None] * trainer.context.pp.size
        torch.distributed.all_gather_object(of_stages, tensors, group=trainer.context.pp.handle)
        tensors = {name: tensor for stage in of_stages for name, tensor in stage.items()}
    prepared = next(iter(training_batches(trainer.train, start_iteration=STEPS, iterations=STEPS + 1)))
    loss = train_step(trainer.model, optimizer, prepared.inputs, trainer.schedule.at(STEPS), pipeline=trainer.pipeline).loss
    close(trainer.context)
    return Taken(tensors, loss)


def start_under(rank: int, layout: str, folder: str) -> dict[str, Tensor]:
    """Whole masters, and the parameters computed with as "copy/NAME", before the first step of bf16 training from `folder`'s weights."""
    trainer = build(rank, layout, "--bf16", "--seed", "7", "--pretrained-checkpoint", folder)
    restore(trainer)
    copies = ((f"copy/{name}", gather_whole(p.detach(), p.placement, trainer.context)) for name, p in trainer.model.named_parameters())
    tensors = {name: tensor.clone() for name, tensor in (*trainer.optimizer.masters(), *copies)}
    close(trainer.context)
    return tensors
