#!/usr/bin/env python3
"""Looks at checkpoints, checks them, and averages them.

    python tools/checkpoint.py list runs/chat                            every checkpoint of a run: iteration, size, layout
    python tools/checkpoint.py verify runs/chat [--all]                  every file of the newest (or of all) against its checksum
    python tools/checkpoint.py inspect runs/chat [--tensors PATTERN]     state, flags and tensors of the newest, with simple statistics
    python tools/checkpoint.py merge runs/chat --last 3 --save runs/avg  the mean of the weights of the last 3, as a checkpoint of its own
    python tools/checkpoint.py merge-adapters runs/lora --save runs/full a run's adapters and their base as one full model

A folder is a run's, or one iteration's (iter_0000100). Nothing is changed but by the last two, which write to a new folder.
"""
from __future__ import annotations

import argparse
import fnmatch
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

if find_spec("megatron_dllm") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from megatron_dllm.checkpoint import store  # noqa: E402
from megatron_dllm.checkpoint.save import check_room, describe_bytes  # noqa: E402
from megatron_dllm.checkpoint.shards import CheckpointError  # noqa: E402
from megatron_dllm.checkpoint.storage import MODEL, kind_of, read_json  # noqa: E402
from megatron_dllm.checkpoint.tensor_files import TensorSpec, row_blocks  # noqa: E402
from megatron_dllm.checkpoint.weights import write_weights  # noqa: E402
from megatron_dllm.config import CheckpointConfig, LoRAConfig, RunConfig, to_arguments_text  # noqa: E402
from megatron_dllm.models.diffusion_gemma.loading import open_base, stored_run  # noqa: E402
from megatron_dllm.models.diffusion_gemma.peft_format import adapted, with_adapter  # noqa: E402
from megatron_dllm.models.diffusion_gemma.transformers_directory import TransformersDirectory  # noqa: E402
from megatron_dllm.training.folders import ASSETS, assets_of  # noqa: E402


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 0 when all is well, 1 when a checkpoint is not, 2 for a mistake in what it was given."""
    summary, description = __doc__.split("\n\n", 1)
    parser = argparse.ArgumentParser(description=summary, epilog=description, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    acts = {"list": list_checkpoints, "verify": verify_checkpoints, "inspect": inspect_checkpoints, "merge": merge_checkpoints,
            "merge-adapters": merge_adapters}
    for name, act in acts.items():
        command = commands.add_parser(name, allow_abbrev=False)
        command.add_argument("folder", type=Path)
        command.set_defaults(act=act)
        if name == "verify":
            command.add_argument("--all", action="store_true", help="Every checkpoint of the run, not the newest alone.")
        if name == "inspect":
            command.add_argument("--tensors", metavar="PATTERN", help="Also tensors whose names match, with mean, deviation and range.")
        if name == "merge":
            command.add_argument("--last", type=int, required=True, metavar="K", help="How many of the newest valid ones.")
        if name == "merge-adapters":
            command.add_argument("--base", type=Path, metavar="DIR", help="Where the base is now, ours or transformers'. "
                                 "(default: where it was in training)")
        if name.startswith("merge"):
            command.add_argument("--save", type=Path, required=True, metavar="DIR", help="Where to; must not hold a checkpoint yet.")
    arguments = parser.parse_args(argv)
    try:
        return arguments.act(arguments)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def folders(path: Path) -> list[Path]:
    """The iterations' folders that a path stands for, the newest first."""
    found = [path] if re.fullmatch(r"iter_\d{7,}", path.name) else store.checkpoints_in(path)
    if not found or not found[0].is_dir():
        raise ValueError(f"{path} holds no checkpoint (iter_...); name a run's --save folder, or one of its iter_ folders")
    return found


def list_checkpoints(arguments: argparse.Namespace) -> int:
    """One line a checkpoint; whether files are missing or of another size is seen, their contents are not read."""
    print(f"{'iteration':>10} {'size':>10} {'files':>6} {'saved under':24} state")
    for path in folders(arguments.folder):
        files = [file for file in path.iterdir() if file.is_file()]
        try:
            found = store.open_checkpoint(path, kinds=())
            layout = ", ".join(f"{axis} {size}" for axis, size in found.state.layout.items() if size > 1) or "one process"
            told = "whole" if found.has_optimizer else "weights alone"
            told = f"adapters of {found.state.base['path'] or 'random weights'}" if found.state.base else told
        except CheckpointError as error:
            layout, told = "?", f"NOT VALID: {error}"
        number = int(re.search(r"\d+", path.name)[0])
        print(f"{number:>10} {describe_bytes(sum(file.stat().st_size for file in files)):>10} {len(files):>6} {layout:24} {told}")
    for path in sorted(arguments.folder.glob(f"iter_*{store.PARTIAL}")):
        print(f"{path.name}: being written, or left by a save that was cut short")
    return 0


def verify_checkpoints(arguments: argparse.Namespace) -> int:
    """Every file against its size and checksum; all problems are named."""
    chosen = folders(arguments.folder)
    failed = 0
    for path in chosen if arguments.all else chosen[:1]:
        problems = store.problems_of(path)
        failed += bool(problems)
        print(f"{path}: {'valid' if not problems else f'{len(problems)} problems'}")
        for problem in problems:
            print(f"  {problem}")
    return 1 if failed else 0


def inspect_checkpoints(arguments: argparse.Namespace) -> int:
    """What a checkpoint holds."""
    found = store.open_checkpoint(folders(arguments.folder)[0], kinds=())
    state = read_json(found.path / store.STATE)
    print(found.path)
    for name in ("iteration", "consumed_rows", "optimizer_steps", "layout", "schedule", "base", "versions"):
        print(f"  {name.replace('_', ' '):16} {state.get(name)}")
    for kind in ("model", "optimizer"):
        keys = [key for key in found.shapes if kind_of(key) == kind]
        elements = sum(torch.Size(found.shapes[key]).numel() for key in keys)
        dtypes = sorted({str(found.dtype(key)).removeprefix("torch.") for key in keys})
        print(f"  {kind:16} {len(keys)} tensors, {elements:,} elements, {', '.join(dtypes) or 'none'}")
    for key in fnmatch.filter(found.shapes, arguments.tensors) if arguments.tensors else ():
        print(f"    {key} {list(found.shapes[key])} {str(found.dtype(key)).removeprefix('torch.')}: {statistics(found, key)}")
    return 0


def statistics(found: store.Checkpoint, key: str) -> str:
    """Mean, deviation, range, and whether anything is not finite; a block at a time."""
    count, total, squares, low, high, bad = 0, 0.0, 0.0, float("inf"), float("-inf"), 0
    for offset, extent in row_blocks(found.shapes[key], 8):
        block = found.read(key, offset, extent).double()
        finite = block[block.isfinite()]
        bad += block.numel() - finite.numel()
        if finite.numel():
            count, total, squares = count + finite.numel(), total + finite.sum().item(), squares + finite.square().sum().item()
            low, high = min(low, finite.min().item()), max(high, finite.max().item())
    if not count:
        return f"{bad} elements, none finite"
    mean = total / count
    note = f", {bad} NOT FINITE" if bad else ""
    return f"mean {mean:.4g}, deviation {max(squares / count - mean**2, 0) ** 0.5:.4g}, from {low:.4g} to {high:.4g}{note}"


def merge_checkpoints(arguments: argparse.Namespace) -> int:
    """The mean of the weights, without optimizer state: for --pretrained-checkpoint, generation and export."""
    if arguments.last < 2:
        raise ValueError(f"--last {arguments.last}: an average takes 2 checkpoints or more; set --last 2")
    if store.checkpoints_in(arguments.save):
        raise ValueError(f"--save {arguments.save} holds checkpoints already: choose another folder")
    sources = []
    for path in folders(arguments.folder):
        try:
            sources.append(store.open_checkpoint(path, kinds=(MODEL,)))
        except CheckpointError as error:
            print(f"skipping {path.name}: {error}")
        if len(sources) == arguments.last:
            break
    if len(sources) < arguments.last:
        raise ValueError(f"--last {arguments.last}: {arguments.folder} holds {len(sources)} valid checkpoints; "
                         + (f"set --last {len(sources)}" if len(sources) > 1 else "keep more of them (--save-total-limit) to have a mean"))
    newest = sources[0]
    specs = [TensorSpec(key, newest.dtype(key), shape) for key, shape in newest.shapes.items() if kind_of(key) == MODEL]
    for other in sources[1:]:
        differing = [spec.name for spec in specs if other.shapes.get(spec.name) != spec.shape]
        if differing:
            raise ValueError(f"{other.path} is another model than {newest.path}: {', '.join(differing[:5])}; move one of them to "
                             "another folder")
    arguments.save.mkdir(parents=True, exist_ok=True)
    check_room(arguments.save, sum(spec.num_bytes for spec in specs))
    state = store.TrainingState(newest.state.iteration, 0, 0)
    written = write_weights(arguments.save, state, specs, mean_of(sources, specs), newest.arguments, lambda done, total: None)
    if (assets := assets_of(newest.path)) is not None:
        shutil.copytree(assets, arguments.save / ASSETS, dirs_exist_ok=True)
    print(f"wrote {written}: the mean of iterations {', '.join(str(source.state.iteration) for source in sources)}")
    return 0


def merge_adapters(arguments: argparse.Namespace) -> int:
    """The base's weights with the adapters added in fp32, block by block, in the base's dtypes: for everything that takes a full model."""
    if store.checkpoints_in(arguments.save):
        raise ValueError(f"--save {arguments.save} holds checkpoints already: choose another folder")
    found = store.open_checkpoint(folders(arguments.folder)[0], kinds=(MODEL,))
    if not found.state.base:
        raise ValueError(f"{found.path} holds a full model, not adapters (--lora-rank): use it as it is, or name the run of the adapters")
    run, base = stored_run(found), open_base(found, arguments.base)
    specs = [TensorSpec(name, base.dtype(name), tuple(shape)) for name, shape in base.shapes.items() if kind_of(name) == MODEL]
    arguments.save.mkdir(parents=True, exist_ok=True)
    check_room(arguments.save, sum(spec.num_bytes for spec in specs))
    full = replace(run, lora=LoRAConfig(), checkpoint=CheckpointConfig())
    written = write_weights(arguments.save, store.TrainingState(found.state.iteration, 0, 0), specs,
                            merged_elements(base, found, specs, run), to_arguments_text(full), lambda done, total: None)
    if (assets := assets_of(found.path)) is not None:
        shutil.copytree(assets, arguments.save / ASSETS, dirs_exist_ok=True)
    print(f"wrote {written}: {base.path} with the adapters of {found.path}")
    return 0


def merged_elements(base: store.Checkpoint | TransformersDirectory, adapters: store.Checkpoint, specs: Sequence[TensorSpec],
                    run: RunConfig) -> Iterator[tuple[str, Tensor]]:
    """(name, elements) of the base's weights with W + alpha / rank * B A, a block of rows at a time."""
    starts = {link.ours: start for link, start in adapted(run.model, run.lora)}
    for spec in specs:
        start = starts.get(spec.name)
        a, b = (adapters.read_whole(f"{start}.{part}") for part in "ab") if start else (None, None)
        for offset, extent in row_blocks(spec.shape, 4):
            block = base.read(spec.name, offset, extent)
            if start:
                block = with_adapter(block, offset, a, b, run.lora.lora_alpha / run.lora.lora_rank)
            yield spec.name, block.to(spec.dtype)


def mean_of(sources: Sequence[store.Checkpoint], specs: Sequence[TensorSpec]) -> Iterator[tuple[str, Tensor]]:
    """(name, elements) of the mean, added up in fp64, a block of rows at a time."""
    for spec in specs:
        for offset, extent in row_blocks(spec.shape, 8):
            total = sum(source.read(spec.name, offset, extent).double() for source in sources)
            yield spec.name, (total / len(sources)).to(spec.dtype)


if __name__ == "__main__":
    sys.exit(main())
