"""A model directory as transformers has it: config.json, safetensors (sharded or not), tokenizer and other files; read rectangle by
rectangle.
"""
from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...checkpoint.tensor_files import TensorSpec, read_rectangle, read_specs
from ...config import ModelConfig
from .huggingface import Link, Offset, check_names, is_carried, links

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
AGAIN = "download the directory again (hf download REPO --local-dir DIR)"


@dataclass(frozen=True)
class TransformersDirectory:
    """An opened directory: its configuration; which file holds each of its tensors, and what each is."""

    path: Path
    config: ModelConfig
    files: Mapping[str, Path]
    specs: Mapping[str, TensorSpec]

    @classmethod
    def open(cls, path: str | Path) -> TransformersDirectory:
        """ValueError that names the file or tensor: no directory of this model, a truncated shard, a tensor that is missing or misshapen.
        """
        path = Path(path)
        config = ModelConfig.from_transformers(read_json(path / CONFIG))
        files, specs = {}, {}
        for file in _weight_files(path):
            for spec in read_specs(file):
                if spec.name in files:
                    raise ValueError(f"{spec.name} is in {files[spec.name]} and in {file}; {AGAIN}")
                files[spec.name], specs[spec.name] = file, spec
        _check_index(path, files)
        check_names({name: spec.shape for name, spec in specs.items()}, config, str(path))
        return cls(path, config, files, specs)

    @cached_property
    def links(self) -> Mapping[str, Link]:
        """Our tensors by name, and what they are made of."""
        return {link.ours: link for link in links(self.config)}

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of our tensors by name."""
        return {name: link.shape for name, link in self.links.items()}

    def dtype(self, name: str) -> torch.dtype:
        """Of our tensor: that of the file. ValueError where it would be made of tensors of several dtypes."""
        dtypes = {self.specs[theirs].dtype for theirs in self.links[name].theirs}
        if len(dtypes) > 1:
            found = ", ".join(sorted(map(str, dtypes)))
            raise ValueError(f"{self.path}: {', '.join(self.links[name].theirs)} are of different dtypes: {found}; give "
                             "tools/convert.py a --dtype")
        return dtypes.pop()

    def read(self, name: str, offset: Offset, extent: Offset) -> Tensor:
        """A rectangle of our tensor, in the dtype of the file; nothing else is read."""
        return self.links[name].to_ours(tuple(offset), tuple(extent), self.read_theirs)

    def read_theirs(self, name: str, offset: Offset, extent: Offset) -> Tensor:
        """A rectangle of a tensor of theirs."""
        return read_rectangle(self.files[name], name, offset, extent)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of ours, whole, one at a time."""
        for name, link in self.links.items():
            yield name, self.read(name, (0,) * len(link.shape), link.shape)

    def carried(self) -> list[TensorSpec]:
        """What belongs to the vision tower."""
        return [self.specs[name] for name in sorted(filter(is_carried, self.files))]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of a model directory; ValueError names it."""
    if not path.is_file():
        raise ValueError(f"{path} is missing: {path.parent} is no transformers model directory; name one that has it, or {AGAIN}")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}; {AGAIN}") from None


def _weight_files(path: Path) -> list[Path]:
    if not (path / INDEX).is_file():
        return [path / SINGLE]
    names = sorted(set(read_json(path / INDEX)["weight_map"].values()))
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise ValueError(f"{path / INDEX} names files outside its directory: {outside}; {AGAIN}")
    return [path / name for name in names]


def _check_index(path: Path, files: Mapping[str, Path]) -> None:
    if (path / INDEX).is_file():
        for name, file in read_json(path / INDEX)["weight_map"].items():
            if files.get(name) != path / file:
                raise ValueError(f"{path / INDEX} puts {name} into {file}, which does not hold it; {AGAIN}")
