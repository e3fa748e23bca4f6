"""Peak memory of tools/convert.py on a checkpoint of 8 GiB, both ways, and that the way there and back is the identity.

The checkpoint is synthetic: layers as wide as the released model has them, with its vocabulary, as many as it takes. Each way runs as a
process of its own, whose peak is the largest resident set that the system saw. It takes three times the size on the disk.
Usage: python tools/verify.py conversion [--gib 8]
"""
from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from megatron_dllm.checkpoint.tensor_files import read_rectangle, row_blocks
from megatron_dllm.config import PRESETS, ModelConfig
from megatron_dllm.models.diffusion_gemma.huggingface import links
from megatron_dllm.models.diffusion_gemma.transformers_directory import TransformersDirectory
from megatron_dllm.models.diffusion_gemma.transformers_export import Export
from verification.table import Figure, print_figures

LIMIT_GIB = 3.0
CONVERT = Path(__file__).resolve().parents[1] / "convert.py"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gib", type=float, default=8.0, help="Size of the checkpoint.")
    parser.add_argument("--folder", type=Path, help="Where to write. (default: the system's place for temporary files)")


def run(arguments: argparse.Namespace) -> int:
    """Print the peaks; the number of missed figures."""
    torch.set_num_threads(1)
    config = model_of(arguments.gib)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as place:
        folder = Path(place)
        Export(config, marked, lambda name: torch.bfloat16).write(folder / "theirs")
        source = TransformersDirectory.open(folder / "theirs")
        size = sum(spec.num_bytes for spec in source.specs.values()) / 2**30
        print(f"{config.num_layers} layers, {len(source.specs)} tensors, {size:.2f} GiB")
        there = convert(folder / "theirs", folder / "ours")
        back = convert(folder / "ours", folder / "back")
        differing = differing_tensors(source, TransformersDirectory.open(folder / "back"))
    return print_figures("conversion", [
        Figure("transformers -> ours: peak memory, GiB", there, LIMIT_GIB, f"of a checkpoint of {size:.2f} GiB"),
        Figure("ours -> transformers: peak memory, GiB", back, LIMIT_GIB, ""),
        Figure("tensors that differ after both ways", differing, 0, f"of {len(source.specs)}")])


def model_of(gib: float) -> ModelConfig:
    """The released model with as many layers as make at least this size in bf16; with fewer tokens where the vocabulary alone is larger."""
    released = PRESETS["diffusiongemma-26b-a4b"]
    vocabulary = min(released.vocab_size, int(gib * 2**30 / 4 / released.hidden_size / 2))
    for num_layers in range(1, released.num_layers + 1):
        kinds = (*("sliding",) * (num_layers - 1), "full")
        config = replace(released, num_layers=num_layers, layer_types=kinds, vocab_size=vocabulary, max_position_embeddings=4096)
        if sum(2 * torch.Size(link.shape).numel() for link in links(config)) >= gib * 2**30:
            return config
    raise ValueError(f"--gib {gib}: the released model is smaller; set no more than its size")


def marked(name: str, offset: tuple[int, ...], extent: tuple[int, ...]) -> torch.Tensor:
    """A rectangle whose values tell the tensor and the row: a block in the wrong place shows."""
    rows = (torch.arange(offset[0], offset[0] + extent[0]) * 37 + sum(name.encode())) % 251
    return rows.to(torch.bfloat16).view(-1, *(1 for _ in extent[1:])).expand(extent).contiguous()


def convert(load: Path, save: Path) -> float:
    """Peak memory in GiB."""
    done = subprocess.run([sys.executable, str(CONVERT), "--load", str(load), "--save", str(save)], stdout=subprocess.PIPE, text=True)
    print(done.stdout.strip().splitlines()[-1].replace(str(save.parent), "...") if done.stdout else "")
    if done.returncode:
        raise RuntimeError("the conversion failed: see above")
    return float(re.search(r"peak memory ([\d.]+) GiB", done.stdout)[1])


def differing_tensors(one: TransformersDirectory, other: TransformersDirectory) -> int:
    """Compared a block at a time."""
    differing = len(one.specs.keys() ^ other.specs.keys())
    for name in one.specs.keys() & other.specs.keys():
        spec = one.specs[name]
        blocks = row_blocks(spec.shape, spec.dtype.itemsize)
        differing += not all(torch.equal(read_rectangle(one.files[name], name, *block), read_rectangle(other.files[name], name, *block))
                             for block in blocks)
    return differing
