"""A model directory as transformers has it: config.json, safetensors (sharded or not), tokenizer and other files; read and written tensor by tensor."""
from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...config import ModelConfig
from .huggingface import check_names, is_carried, links

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
# Written anew by an export; every other file of a directory is carried through it.
WRITTEN = frozenset({"config.json", SINGLE, INDEX})


@dataclass(frozen=True)
class TransformersDirectory:
    """An opened directory: its configuration, as given and as ours, and which file holds each tensor (with its shape)."""

    path: Path
    raw_config: dict[str, Any]
    config: ModelConfig
    files: Mapping[str, Path]
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def open(cls, path: str | Path) -> TransformersDirectory:
        """ValueError that names the file or tensor: no directory of this model, a truncated shard, a tensor that is missing or misshapen."""
        path = Path(path)
        raw = _read_json(path / "config.json")
        config = ModelConfig.from_transformers(raw)
        files, shapes = {}, {}
        for file in _weight_files(path):
            with open_safetensors(file) as shard:
                for name in shard.keys():  # noqa: SIM118 (not a mapping)
                    if name in files:
                        raise ValueError(f"{name} is in {files[name]} and in {file}")
                    files[name], shapes[name] = file, tuple(shard.get_slice(name).get_shape())
        _check_index(path, files)
        check_names(shapes, config, str(path))
        return cls(path, raw, config, files, shapes)

    def tensor(self, name: str) -> Tensor:
        """One tensor of theirs, in the dtype of the file."""
        with open_safetensors(self.files[name]) as shard:
            return shard.get_tensor(name)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of ours, one at a time."""
        for link in links(self.config):
            yield link.ours, link.to_ours([self.tensor(name) for name in link.theirs])

    def carried(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of what belongs to the vision tower."""
        for name in sorted(filter(is_carried, self.files)):
            yield name, self.tensor(name)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path} is missing: {path.parent} is no transformers model directory")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None


def _weight_files(path: Path) -> list[Path]:
    if not (path / INDEX).is_file():
        return [path / SINGLE]
    names = sorted(set(_read_json(path / INDEX)["weight_map"].values()))
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise ValueError(f"{path / INDEX} names files outside its directory: {outside}")
    return [path / name for name in names]


def _check_index(path: Path, files: Mapping[str, Path]) -> None:
    if (path / INDEX).is_file():
        for name, file in _read_json(path / INDEX)["weight_map"].items():
            if files.get(name) != path / file:
                raise ValueError(f"{path / INDEX} puts {name} into {file}, which does not hold it")


def open_safetensors(file: Path):
    """An open safetensors file; ValueError that names it when it is missing or cut short."""
    if not file.is_file():
        raise ValueError(f"{file} is missing")
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{file} is not a whole safetensors file: {error}") from None


@dataclass(frozen=True)
class Export:
    """What an exported directory is made from: `load` gives our tensor by name; `assets` is a directory of carried files, if there is one."""

    config: ModelConfig
    load: Callable[[str], Tensor]
    dtype: torch.dtype
    assets: Path | None = None

    def write(self, path: str | Path, *, shard_bytes: int = SHARD_BYTES, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Write the directory, shard by shard. It appears under its name only when whole; ValueError when the name is taken."""
        path = Path(path)
        if path.exists() and any(path.iterdir() if path.is_dir() else [path]):
            raise ValueError(f"{path} exists and is not empty: choose another directory, or remove it")
        partial = path.with_name(path.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        base = _read_json(self.assets / "config.json") if self.assets else None
        written = self.config.to_transformers(base) | {"dtype": str(self.dtype).removeprefix("torch.")}
        (partial / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
        if self.assets:
            _copy_other_files(self.assets, partial)
        self._write_shards(partial, shard_bytes, progress)
        if path.exists():
            path.rmdir()
        partial.rename(path)

    def _write_shards(self, path: Path, shard_bytes: int, progress: Callable[[int, int], None]) -> None:
        shards = list(self._shards(shard_bytes))
        total, done, weight_map = sum(len(names) for names, _ in shards), 0, {}
        for number, (names, produce) in enumerate(shards, 1):
            file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            save_file(produce(), path / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(names, file)
            done += len(names)
            progress(done, total)
        if len(shards) > 1:
            size = sum((path / file).stat().st_size for file in set(weight_map.values()))
            index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
            (path / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _shards(self, shard_bytes: int) -> Iterator[tuple[list[str], Callable[[], dict[str, Tensor]]]]:
        """(names, a function that makes the tensors) of each shard, planned from shapes alone, so that the files can be numbered."""
        pending, names, size = [], [], 0
        for link in links(self.config):
            link_bytes = torch.Size(link.shape).numel() * self.dtype.itemsize
            if pending and size + link_bytes > shard_bytes:
                yield names, _producer(self, pending)
                pending, names, size = [], [], 0
            pending.append(link)
            names = [*names, *link.theirs]
            size += link_bytes
        carried = dict(carried_tensors(self.assets, self.config))
        yield [*names, *carried], _producer(self, pending, carried)


def _producer(export: Export, pending: list, carried: Mapping[str, Tensor] | None = None) -> Callable[[], dict[str, Tensor]]:
    def produce() -> dict[str, Tensor]:
        tensors = {name: t for link in pending for name, t in link.to_theirs(export.load(link.ours).to(export.dtype)).items()}
        return tensors | dict(carried or {})
    return produce


def carried_tensors(assets: Path | None, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """The vision tower's tensors: those of `assets`, or for a model that never had one, the smallest tower transformers accepts."""
    if assets is not None and (assets / CARRIED_FILE).is_file():
        with open_safetensors(assets / CARRIED_FILE) as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)
    elif assets is None:
        yield from _smallest_vision_tower(config)


CARRIED_FILE = "carried.safetensors"


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
    shutil.copyfile(source.path / "config.json", path / "config.json")
    _copy_other_files(source.path, path)
    carried = dict(source.carried())
    if carried:
        save_file(carried, path / CARRIED_FILE, metadata={"format": "pt"})


def _copy_other_files(source: Path, target: Path) -> None:
    for file in sorted(source.iterdir()):
        if file.name not in WRITTEN and file.name != CARRIED_FILE and file.suffix != ".safetensors":
            copy = shutil.copytree if file.is_dir() else shutil.copyfile
            copy(file, target / file.name)
