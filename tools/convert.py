#!/usr/bin/env python3
"""Converts a model: transformers directory to checkpoint of ours, checkpoint of ours to transformers directory, adapters to PEFT's format.

    python tools/convert.py --load models/diffusiongemma --save checkpoints/released        (transformers -> ours)
    python tools/convert.py --load runs/chat --save exports/chat                            (ours -> transformers)
    python tools/convert.py --load runs/lora --save exports/adapters                        (adapters of a LoRA run -> PEFT)

--load is a transformers directory, a run's folder (its newest valid checkpoint) or one iteration's folder, which decides the direction.
Tensors go through one block at a time, so that memory holds a block and never a model. Vision tower, tokenizer and every other file are
carried.
"""
from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

if find_spec("megatron_dllm") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn  # noqa: E402

from megatron_dllm.checkpoint.save import check_room  # noqa: E402
from megatron_dllm.checkpoint.store import TrainingState  # noqa: E402
from megatron_dllm.checkpoint.tensor_files import TensorSpec, row_blocks  # noqa: E402
from megatron_dllm.checkpoint.weights import write_weights  # noqa: E402
from megatron_dllm.config import DataConfig, RunConfig, TrainingConfig, to_arguments_text  # noqa: E402
from megatron_dllm.data.build import build_tokenizer  # noqa: E402
from megatron_dllm.models.diffusion_gemma.generation_settings import read_sampler  # noqa: E402
from megatron_dllm.models.diffusion_gemma.loading import compute_dtype, open_run, stored_run  # noqa: E402
from megatron_dllm.models.diffusion_gemma.peft_format import write_adapters  # noqa: E402
from megatron_dllm.models.diffusion_gemma.transformers_directory import CONFIG, TransformersDirectory  # noqa: E402
from megatron_dllm.models.diffusion_gemma.transformers_export import Export, save_assets  # noqa: E402
from megatron_dllm.training.folders import ASSETS, assets_of  # noqa: E402

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TOKENIZER = "tokenizer_config.json"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 0 when the whole model was written, 2 for a mistake in what it was given."""
    arguments = parse(argv)
    started = time.perf_counter()
    try:
        if (arguments.load / CONFIG).is_file():
            written = import_model(arguments.load, arguments.save, arguments.dtype)
        else:
            written = export_model(arguments.load, arguments.save, arguments.dtype, int(arguments.shard_gb * 10**9))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(f"wrote {written} in {time.perf_counter() - started:.1f} s, peak memory {peak / 2**30:.2f} GiB")
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    summary, description = __doc__.split("\n\n", 1)
    parser = argparse.ArgumentParser(description=summary, epilog=description, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", required=True, type=Path, metavar="DIR", help="What to convert.")
    parser.add_argument("--save", required=True, type=Path, metavar="DIR", help="Where to; must not hold a model yet.")
    parser.add_argument("--dtype", choices=DTYPES, help="(default: weights as they are stored; of a training run, what it computed in)")
    parser.add_argument("--shard-gb", type=float, default=5.0, metavar="N", help="Size of an exported file. (default: 5)")
    arguments = parser.parse_args(argv)
    if arguments.shard_gb <= 0:
        parser.error(f"--shard-gb {arguments.shard_gb}: must be more than 0")
    return arguments


def import_model(load: Path, save: Path, dtype: str | None) -> Path:
    """A transformers directory as the checkpoint of iteration 0 in the folder `save`, with its other files beside it."""
    if save.exists() and any(save.iterdir()):
        raise ValueError(f"{save} exists and is not empty: choose another folder, or remove it")
    source = TransformersDirectory.open(load)
    specs = [TensorSpec(name, DTYPES[dtype] if dtype else source.dtype(name), shape) for name, shape in source.shapes.items()]
    save.mkdir(parents=True, exist_ok=True)
    check_room(save, sum(spec.num_bytes for spec in [*specs, *source.carried()]))
    save_assets(source, save / ASSETS)
    data = DataConfig()
    if (load / TOKENIZER).is_file():
        data = DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str((save / ASSETS).resolve()))
    in_bf16 = any(spec.dtype == torch.bfloat16 for spec in specs)
    run = RunConfig(model=source.config, data=data, training=TrainingConfig(bf16=in_bf16), generation=read_sampler(load),
                    model_origin=f"transformers directory {load}")
    elements = ((spec.name, source.read(spec.name, offset, extent).to(spec.dtype))
                for spec in specs for offset, extent in row_blocks(spec.shape, 4))
    with progress_bar() as shown:
        return write_weights(save, TrainingState(0, 0, 0), specs, elements, to_arguments_text(run), shown.advance_to)


def export_model(load: Path, save: Path, dtype: str | None, shard_bytes: int) -> Path:
    """The newest valid checkpoint of a run as a transformers directory; one of adapters as PEFT's."""
    found = open_run(load)
    run = stored_run(found)
    if found.state.base:
        held = DTYPES[dtype] if dtype else compute_dtype(run)
        print(f"converting the adapters of {found.path}")
        write_adapters(save, run.model, run.lora, found.state.base["path"], lambda name: found.read_whole(name).to(held))
        return save
    if dtype:
        dtype_of = {name: DTYPES[dtype] for name in found.shapes}.__getitem__
    elif found.state.iteration:  # a run's: its masters are more precise than what it computed with
        dtype_of = {name: torch.bfloat16 if run.training.bf16 else torch.float32 for name in found.shapes}.__getitem__
    else:
        dtype_of = found.dtype
    tokenizer = build_tokenizer(run.data, run.model.eos_token_id)
    export = Export(run.model, found.read, dtype_of, assets_of(found.path), tokenizer, run.generation)
    print(f"converting {found.path}")
    with progress_bar() as shown:
        export.write(save, shard_bytes=shard_bytes, progress=shown.advance_to)
    return save


class progress_bar:
    """A bar on standard error, by bytes written."""

    def __enter__(self) -> progress_bar:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(),
                   TimeRemainingColumn())
        self.progress = Progress(*columns, console=Console(stderr=True))
        self.task = self.progress.add_task("writing", total=None)
        self.progress.start()
        return self

    def advance_to(self, done: int, total: int) -> None:
        self.progress.update(self.task, completed=done, total=total)

    def __exit__(self, *error: object) -> None:
        self.progress.stop()


if __name__ == "__main__":
    sys.exit(main())
