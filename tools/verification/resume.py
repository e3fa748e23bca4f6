"""Runs taken up again: bit for bit in the same layout, equal after gathering in any other.

Same layout, on one process: a run of 16 steps (10 to an epoch) against the same run taken up from its checkpoint in the middle of an epoch,
at its end and in the second pass, with another number of loader workers, in bf16, and saved in the background: losses, norms, learning
rates, masters and moments bit-equal; so with adapters alone. Other layouts, over processes of this machine: masters and moments equal after
gathering, the next step's loss to 1e-6; adapters beside a base that was saved under a layout of its own, too.
pickle.load and torch.load raise while a checkpoint is read. Usage: python tools/verify.py resume [--quick]
"""
from __future__ import annotations

import argparse
import contextlib
import io
import pickle
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch

import pretrain_dllm
from megatron_dllm.checkpoint import store
from megatron_dllm.training.metrics_file import read_metrics
from tests.parallel.checkpoint_cases import LAYOUTS, LORA, load_under, refuse, save_under
from tests.parallel.world import World
from verification.table import Figure, print_figures

FLAGS = ("--preset toy --num-layers 2 --layer-types sliding,full --vocab-size 9 --canvas-length 8 --hidden-size 32 --ffn-hidden-size 24 "
         "--moe-ffn-hidden-size 16 --num-experts 4 --data-source sudoku --sudoku-num-puzzles 20 --seq-length 34 --micro-batch-size 2 "
         "--global-batch-size 2 --train-iters 16 --log-interval 1 --device cpu --lr 3e-3 --lr-warmup-iters 3").split()
LAST = 16
POINTS = {5: "the middle of an epoch", 10: "the end of an epoch", 13: "the second pass"}
COMPARED = ("loss", "autoregressive_loss", "diffusion_loss", "grad_norm", "learning_rate")
# What the first run has, what the second has instead, and the steps that it is taken up from.
SAME_LAYOUT = {
    "fp32": ([], [], tuple(POINTS)),
    "bf16, saved in the background": (["--bf16", "--async-save"], [], (5, 13)),
    "2 loader workers instead of none": ([], ["--num-workers", "2"], (5, 10)),
    "adapters": (LORA, [], (5, 13)),
}
QUICK = (
    ("dp4", "tp2 dp2"), ("ep4", "ep2"), ("tp2 sp", "cp2"), ("dp4, distributed optimizer", "dp4"), ("dp4", "dp2, distributed optimizer"),
    ("tp2 dp2, distributed optimizer", "1"), ("1", "ep2 etp2"), ("ep4, distributed optimizer", "tp4"), ("pp2 vpp2", "1"))
# Of runs with adapters; their base is what the run of dp4 saved.
ADAPTERS, BASE = (("tp2", "1"), ("pp2 vpp2", "ep2")), "dp4"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="The layouts of the short list alone, not every pair.")


def run(arguments: argparse.Namespace) -> int:
    """Print the table; the number of missed figures."""
    torch.set_num_threads(1)
    pairs = QUICK if arguments.quick else [(a, b) for a in LAYOUTS for b in LAYOUTS if a != b]
    with tempfile.TemporaryDirectory() as folder:
        figures = [figure for name in SAME_LAYOUT for figure in same_layout(name, Path(folder) / "same")]
        figures += other_layouts(pairs, Path(folder) / "other")
    return print_figures("resume", figures)


def train(folder: Path, *flags: str) -> None:
    """A run; nothing may read a pickle in it."""
    output = io.StringIO()
    with (contextlib.redirect_stdout(output), mock.patch.object(pickle, "load", refuse), mock.patch.object(torch, "load", refuse)):
        status = pretrain_dllm.main([*FLAGS, "--save", str(folder), *flags])
    if status:
        sys.exit(f"training failed:\n{output.getvalue()[-3000:]}")


def same_layout(name: str, folder: Path) -> Iterator[Figure]:
    """One run, taken up from several of its checkpoints."""
    flags, changed, points = SAME_LAYOUT[name]
    whole = folder / name / "whole"
    # Every checkpoint but those at multiples of 1 would go: all stay, and retention is on.
    train(whole, *flags, "--save-interval", "1", "--save-retain-interval", "1")
    for point in points:
        again = folder / name / f"from {point}"
        again.mkdir()
        shutil.copytree(store.iteration_folder(whole, point), store.iteration_folder(again, point))
        train(again, *flags, *changed, "--load", str(again))
        title = f"{name}, from {POINTS[point]}"
        yield Figure(f"{title}: records that differ", differing_records(whole, again, point), 0, f"steps {point + 1} to {LAST}")
        yield Figure(f"{title}: tensors that differ", differing_tensors(whole, again), 0, "masters, moments, buffers")


def differing_records(whole: Path, again: Path, point: int) -> int:
    """Steps after `point` of which a logged value differs, or which one run lacks."""
    sides = [{record["iteration"]: tuple(record[key] for key in COMPARED) for record in read_metrics(folder / "metrics.jsonl").records
              if "loss" in record and record["iteration"] > point} for folder in (whole, again)]
    return sum(sides[0].get(i) is None or sides[0].get(i) != sides[1].get(i) for i in range(point + 1, LAST + 1))


def differing_tensors(whole: Path, again: Path) -> int:
    left, right = (store.open_checkpoint(store.iteration_folder(folder, LAST)) for folder in (whole, again))
    both = left.shapes.keys() & right.shapes.keys()
    differing = sum(not torch.equal(left.read_whole(key), right.read_whole(key)) for key in both)
    return len(left.shapes.keys() ^ right.shapes.keys()) + differing


def other_layouts(pairs, folder: Path) -> Iterator[Figure]:
    """Each layout is saved once and read by all that follow it; then those of runs with adapters."""
    world = World(4)
    try:
        yield from reshard(world, pairs, folder)
        base = str(folder / "base")
        world.run(save_under, BASE, base, size=LAYOUTS[BASE][0], timeout=240)
        yield from reshard(world, ADAPTERS, folder / "adapters", "adapters, ", *LORA, "--pretrained-checkpoint", base)
    finally:
        world.close()


def reshard(world: World, pairs, folder: Path, title: str = "", *flags: str) -> Iterator[Figure]:
    """Runs with these flags, saved under one layout of each pair and taken up under the other."""
    saved = {}
    for number, (before, after) in enumerate(pairs):
        if before not in saved:
            place = str(folder / str(number))
            saved[before] = place, world.run(save_under, before, place, *flags, size=LAYOUTS[before][0], timeout=240)[0]
        place, left = saved[before]
        right = world.run(load_under, after, place, *flags, size=LAYOUTS[after][0], timeout=240)[0]
        names = left.tensors.keys() | right.tensors.keys()
        differ = [key for key in names if key not in left.tensors or key not in right.tensors
                  or not torch.equal(left.tensors[key], right.tensors[key])]
        yield Figure(f"{title}{before} -> {after}: tensors that differ", len(differ), 0, f"of {len(names)} masters and moments")
        yield Figure(f"{title}{before} -> {after}: next loss", abs(left.next_loss - right.next_loss), 1e-6, f"{left.next_loss:.6f}")
