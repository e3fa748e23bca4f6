"""How long a save takes and for how long training stands still, at once and in the background, beside torch.save of the same state.

A state of 2 GiB (fp32 masters and two moments), saved three times each way; the first save of each is told apart, since it also makes the
plan and, in the background, the copy's memory. Meanwhile a training step is played by matrix products, whose pace is told too. Everything
reaches the disk (fsync) in our saves; torch.save alone does not, so it is timed with and without.
Usage: python tools/verify.py saving_time [--gib 2]
"""
from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path

import torch

from megatron_dllm.checkpoint import store
from megatron_dllm.checkpoint.retention import Retention
from megatron_dllm.checkpoint.save import CheckpointWriter
from megatron_dllm.checkpoint.shards import Shard
from verification.table import Figure, print_figures

ROWS, COLUMNS = 2048, 2048
SAVES = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gib", type=float, default=2.0, help="Size of the state.")
    parser.add_argument("--folder", type=Path, help="Where to save. (default: the system's place for temporary files)")


def run(arguments: argparse.Namespace) -> int:
    """Print the times; the number of missed figures."""
    number = max(round(arguments.gib * 2**30 / (3 * 4 * ROWS * COLUMNS)), 1)
    state = {f"{kind}layers.{i}.weight": torch.randn(ROWS, COLUMNS) for kind in ("", "exp_avg/", "exp_avg_sq/") for i in range(number)}
    size = sum(tensor.numel() * tensor.itemsize for tensor in state.values())
    print(f"state: {len(state)} tensors, {size / 2**30:.2f} GiB")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        saved = time_torch_save(state, Path(folder) / "state.pt")
        at_once = time_writer(state, Path(folder) / "at once", in_background=False)
        behind = time_writer(state, Path(folder) / "behind", in_background=True)
    return print_figures("saving_time", [
        Figure("at once: longest save after the first, against torch.save with fsync", max(at_once[1:]) / saved, 3.0, "with checksums"),
        Figure("in the background: longest stall after the first, against at once", max(behind[1:]) / max(at_once[1:]), 0.5, "")])


def time_torch_save(state: dict, path: Path) -> float:
    """Seconds until the bytes are on the disk."""
    longest = 0.0
    for _ in range(SAVES):
        started = time.perf_counter()
        with path.open("wb") as file:
            torch.save(state, file)
            written = time.perf_counter() - started
            file.flush()
            os.fsync(file.fileno())
        synced = time.perf_counter() - started
        print(f"torch.save         save {synced:6.2f} s  stall {synced:6.2f} s   ({written:.2f} s without fsync)")
        longest = max(longest, synced)
        path.unlink()
    return longest


def time_writer(state: dict, folder: Path, *, in_background: bool) -> list[float]:
    """Stalls of the saves, in seconds."""
    writer, stalls = CheckpointWriter(folder, in_background=in_background, retention=Retention(total_limit=1)), []
    weight = torch.randn(512, 512)
    alone = pace(weight, until=time.perf_counter() + 1.0)
    for number in range(1, SAVES + 1):
        started = time.perf_counter()
        shards = [Shard.whole(key, tensor) for key, tensor in state.items()]
        outcomes = writer.save(store.TrainingState(number, number, number), shards, "")
        stall, steps, computing = time.perf_counter() - started, 0, time.perf_counter()
        while not outcomes:
            weight @ weight
            steps += 1
            if outcome := writer.poll():
                outcomes = [outcome]
        seconds = time.perf_counter() - started
        assert outcomes[0].error is None, outcomes[0].error
        during = f"   (steps meanwhile at {steps / (time.perf_counter() - computing) / alone:.0%} of their pace)" if in_background else ""
        how = "in the background" if in_background else "at once          "
        print(f"{how}  save {seconds:6.2f} s  stall {stall:6.2f} s{during}")
        stalls.append(stall)
    writer.close()
    shutil.rmtree(folder)
    return stalls


def pace(weight: torch.Tensor, until: float) -> float:
    """Steps a second, undisturbed."""
    started, steps = time.perf_counter(), 0
    while time.perf_counter() < until:
        weight @ weight
        steps += 1
    return steps / (time.perf_counter() - started)
