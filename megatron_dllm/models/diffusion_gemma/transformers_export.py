"""Writing a model directory as transformers has it: a tensor at a time, with every file that the model once came with."""
from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...checkpoint.tensor_files import TensorFileWriter, TensorSpec, read_rectangle, read_specs, row_blocks
from ...config import GenerationConfig, ModelConfig
from ...data.tokenizers import Tokenizer
from .generation_settings import GENERATION, read_sampler, sampler_settings
from .huggingface import Read, links
from .transformers_directory import CONFIG, INDEX, SINGLE, TransformersDirectory, read_json

SHARD_BYTES = 5 * 10**9
CARRIED_FILE = "carried.safetensors"  # in a folder of assets: the vision tower
# Written anew by an export; every other file of a directory is carried through it.
WRITTEN = frozenset({CONFIG, SINGLE, INDEX})

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)


def no_progress(done: int, total: int) -> None:
    """Nobody watches."""


@dataclass(frozen=True)
class Export:
    """What an exported directory is made from.

    read        rectangles of our tensors
    dtype       of our tensor by name, as it is to be written
    assets      directory of carried files, if there is one
    tokenizer   written beside the model; None: `assets` have one
    generation  the sampler's settings; those of the assets stand where these are the defaults
    """

    config: ModelConfig
    read: Read
    dtype: Callable[[str], torch.dtype]
    assets: Path | None = None
    tokenizer: Tokenizer | None = None
    generation: GenerationConfig = field(default_factory=GenerationConfig)

    def write(self, path: str | Path, *, shard_bytes: int = SHARD_BYTES, progress: Progress = no_progress) -> None:
        """Write the directory, shard by shard. It appears under its name only when whole; ValueError when the name is taken."""
        path = Path(path)
        if path.exists() and any(path.iterdir() if path.is_dir() else [path]):
            raise ValueError(f"{path} exists and is not empty: choose another directory, or remove it")
        draft = path.with_name(path.name + ".partial")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        if self.assets:
            copy_other_files(self.assets, draft)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(draft)
        _write_json(draft / CONFIG, self._model_settings())
        self._write_generation_settings(draft)
        self._write_shards(draft, shard_bytes, progress)
        if path.exists():
            path.rmdir()
        draft.rename(path)

    def _model_settings(self) -> dict[str, Any]:
        base = read_json(self.assets / CONFIG) if self.assets else None
        dtype = str(self.dtype("embedding.weight")).removeprefix("torch.")
        return self.config.to_transformers(base) | {"dtype": dtype}

    def _write_generation_settings(self, folder: Path) -> None:
        """The carried file is left byte for byte as it is unless the run has settings of its own, and other ones."""
        file, tokens = folder / GENERATION, {
            "bos_token_id": self.config.bos_token_id, "eos_token_id": list(self.config.eos_token_id),
            "pad_token_id": self.config.pad_token_id}
        if not file.exists():
            _write_json(file, tokens | sampler_settings(self.generation))
        elif self.generation not in (GenerationConfig(), read_sampler(folder)):
            _write_json(file, read_json(file) | sampler_settings(self.generation))

    def reading_order(self, shard_bytes: int = SHARD_BYTES) -> list[str]:
        """Our names in the order in which `write` reads them: where `read` gathers over ranks, the others must follow."""
        return [name for shard in self._plan(shard_bytes) for name, _ in itertools.groupby(part.ours for part in shard) if name]

    def _plan(self, shard_bytes: int) -> list[list[_Part]]:
        """The tensors of each file, in the order in which they are written, which is that of the safetensors library."""
        shards = _deal([*self._model_parts(), *self._carried_parts()], shard_bytes)
        return [sorted(shard, key=lambda part: (-part.spec.dtype.itemsize, part.spec.name)) for shard in shards]

    def _write_shards(self, path: Path, shard_bytes: int, progress: Progress) -> None:
        shards = self._plan(shard_bytes)
        total, done = sum(part.spec.num_bytes for shard in shards for part in shard), 0
        weight_map = {}
        for number, shard in enumerate(shards, 1):
            file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            writer = TensorFileWriter(path / file, [part.spec for part in shard], {"format": "pt"})
            for part in shard:
                for elements in part.elements():
                    writer.add(part.spec.name, elements.to(part.spec.dtype))
                    done += elements.numel() * part.spec.dtype.itemsize
                    progress(done, total)
            writer.close()
            weight_map |= {part.spec.name: file for part in shard}
        if len(shards) > 1:
            _write_json(path / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})

    def _model_parts(self) -> Iterator[_Part]:
        for link in links(self.config):
            dtype = self.dtype(link.ours)
            for number, name in enumerate(link.theirs):
                elements = partial(link.to_theirs, number, dtype.itemsize, self.read)
                yield _Part(TensorSpec(name, dtype, link.their_shape), elements, link.ours)

    def _carried_parts(self) -> Iterator[_Part]:
        """The vision tower: that of the assets, or for a model that never had one, the smallest that transformers accepts."""
        if self.assets is None:
            for name, tensor in _smallest_vision_tower(self.config):
                yield _Part(TensorSpec(name, tensor.dtype, tuple(tensor.shape)), partial(iter, [tensor]))
        elif (self.assets / CARRIED_FILE).is_file():
            for spec in read_specs(self.assets / CARRIED_FILE):
                yield _Part(spec, partial(stream, spec, partial(read_rectangle, self.assets / CARRIED_FILE)))


@dataclass(frozen=True)
class _Part:
    """A tensor of a file, what gives its elements, and for tensors of the model the name of ours."""

    spec: TensorSpec
    elements: Callable[[], Iterator[Tensor]]
    ours: str = ""


def _deal(parts: Sequence[_Part], shard_bytes: int) -> Iterator[list[_Part]]:
    """Parts in order, as many to a file as fit."""
    pending, size = [], 0
    for part in parts:
        if pending and size + part.spec.num_bytes > shard_bytes:
            yield pending
            pending, size = [], 0
        pending.append(part)
        size += part.spec.num_bytes
    yield pending


def stream(spec: TensorSpec, read: Read) -> Iterator[Tensor]:
    """The elements of a tensor, a block of rows at a time."""
    for offset, extent in row_blocks(spec.shape, spec.dtype.itemsize):
        yield read(spec.name, offset, extent)


def _smallest_vision_tower(config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    from transformers.models.auto import AutoConfig, AutoModel

    vision = dict(config.to_transformers()["vision_config"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tower = AutoModel.from_config(AutoConfig.for_model(**vision))
        projection = torch.randn(config.hidden_size, vision["hidden_size"]) * config.init_method_std
    for name, tensor in sorted(tower.state_dict().items()):
        yield f"model.encoder.vision_tower.{name}", tensor.contiguous()
    yield "model.encoder.embed_vision.embedding_projection.weight", projection


def save_assets(source: TransformersDirectory, path: Path) -> None:
    """Keep what an export must carry through: the vision tower, the configuration, and every other file of the source."""
    path.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source.path / CONFIG, path / CONFIG)
    copy_other_files(source.path, path)
    carried = source.carried()
    if carried:
        (path / CARRIED_FILE).unlink(missing_ok=True)
        writer = TensorFileWriter(path / CARRIED_FILE, carried, {"format": "pt"})
        for spec in carried:
            for elements in stream(spec, source.read_theirs):
                writer.add(spec.name, elements)
        writer.close()


def copy_other_files(source: Path, target: Path) -> None:
    """Every file and folder of a model directory but its configuration and weights."""
    for file in sorted(source.iterdir()):
        if file.name not in WRITTEN and file.suffix != ".safetensors":
            if file.is_dir():
                shutil.copytree(file, target / file.name, dirs_exist_ok=True)
            else:
                shutil.copyfile(file, target / file.name)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
