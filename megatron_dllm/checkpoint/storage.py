"""Where torch.distributed.checkpoint's plans go and come from: safetensors files, and one JSON file that says what lies where.

torch's own FileSystemReader unpickles; nothing here does. A rank's part of the model and of the optimizer are two files, so that weights
can be passed on alone.
"""
from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from .shards import CheckpointError, chunk_of
from .tensor_files import DTYPE_NAMES, DTYPES, FileRecord, TensorFileWriter, TensorSpec, naming, read_rectangle

INDEX = "tensors.json"
FORMAT = 2
MODEL, OPTIMIZER = "model", "optimizer"


@dataclass(frozen=True)
class PlacedIn:
    """Where a rectangle lies: the file, and its name in there."""

    file: str
    name: str


def kind_of(key: str) -> str:
    """Which files a tensor lies in: the keys of moments are <state>/<name>, those of the model plain names."""
    return OPTIMIZER if "/" in key else MODEL


def file_name(kind: str, rank: int) -> str:
    """Of a rank's part."""
    return f"{kind}_{rank:05d}.safetensors"


def name_in_file(key: str, shape: Sequence[int], offset: Sequence[int], extent: Sequence[int]) -> str:
    """"name" for a whole tensor, "name[0:4,8:16]" for a rectangle."""
    if tuple(shape) == tuple(extent):
        return key
    return f"{key}[{','.join(f'{o}:{o + e}' for o, e in zip(offset, extent, strict=True))}]"


class SafetensorsWriter(StorageWriter):
    """Writes each rank's items into <folder>/<kind>_<rank>.safetensors. `records` says afterwards what this rank has written."""

    def __init__(self, folder: str | os.PathLike, rank: int = 0):
        self.reset(folder)
        self.rank = rank

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        if checkpoint_id is not None:
            self.folder = Path(checkpoint_id)
        self.records: dict[str, FileRecord] = {}

    def set_up_storage_writer(self, is_coordinator: bool, *arguments, **options) -> None:
        self.rank = options.get("rank", self.rank)
        self.folder.mkdir(parents=True, exist_ok=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        for kind, items in by_kind(plan.items).items():
            file = file_name(kind, self.rank)
            writer = TensorFileWriter(self.folder / file, [spec_of(item) for item in items])
            try:
                for item in items:
                    spec = spec_of(item)
                    writer.add(spec.name, planner.resolve_data(item))
                    results.append(WriteResult(item.index, spec.num_bytes, PlacedIn(file, spec.name)))
                self.records[file] = writer.close()
            except OSError:
                writer.abandon()
                raise
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.storage_data = {result.index: result.storage_data for of_rank in results for result in of_rank}
        write_index(self.folder / INDEX, metadata)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return bool(os.fspath(checkpoint_id))


class SafetensorsReader(StorageReader):
    """Reads what SafetensorsWriter wrote: of each item its rectangle alone."""

    def __init__(self, folder: str | os.PathLike):
        self.reset(folder)

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        if checkpoint_id is not None:
            self.folder = Path(checkpoint_id)
        self.places: Mapping[MetadataIndex, PlacedIn] = {}

    def read_metadata(self, *arguments, **options) -> Metadata:
        return read_index(self.folder / INDEX)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *arguments, **options) -> None:
        self.places = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read(self, item: ReadItem) -> Tensor:
        """The rectangle of one item, in the dtype of the file."""
        place = self.places[item.storage_index]
        return read_rectangle(self.folder / place.file, place.name, item.storage_offsets, item.lengths)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            target = planner.resolve_tensor(item)
            target.copy_(self.read(item))
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return (Path(checkpoint_id) / INDEX).is_file()


def by_kind(items: Iterable[WriteItem]) -> dict[str, list[WriteItem]]:
    """Items by the kind of file that they go into."""
    result: dict[str, list[WriteItem]] = {}
    for item in items:
        result.setdefault(kind_of(item.index.fqn), []).append(item)
    return result


def spec_of(item: WriteItem) -> TensorSpec:
    """What an item is in its file."""
    data = item.tensor_data
    name = name_in_file(item.index.fqn, data.size, data.chunk.offsets, data.chunk.sizes)
    return TensorSpec(name, data.properties.dtype, tuple(data.chunk.sizes))


def place_items(plans: Sequence[SavePlan], metadata: Metadata) -> None:
    """Note in the metadata where each rank's items will lie; known before they are written."""
    metadata.storage_data = {item.index: PlacedIn(file_name(kind_of(item.index.fqn), rank), spec_of(item).name)
                             for rank, plan in enumerate(plans) for item in plan.items}


def write_index(path: Path, metadata: Metadata) -> FileRecord:
    """tensors.json: {"format": 2, "tensors": {key: {"dtype": "F32", "shape": [..], "pieces": [{"offset", "extent", "file", "name"}]}}}."""
    tensors = {}
    for key, tensor in metadata.state_dict_metadata.items():
        places = [metadata.storage_data[MetadataIndex(key, chunk.offsets)] for chunk in tensor.chunks]
        pieces = [{"offset": list(chunk.offsets), "extent": list(chunk.sizes), "file": place.file, "name": place.name}
                  for chunk, place in zip(tensor.chunks, places, strict=True)]
        tensors[key] = {"dtype": DTYPE_NAMES[tensor.properties.dtype], "shape": list(tensor.size), "pieces": pieces}
    with naming(path), path.open("w", encoding="utf-8") as file:
        json.dump({"format": FORMAT, "tensors": tensors}, file, indent=0)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord.of(path)


def read_index(path: Path) -> Metadata:
    """The metadata that a tensors.json describes; CheckpointError where it is none."""
    found = read_json(path)
    if found.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {found.get('format')}, and {FORMAT} is read here; use the version that wrote it")
    tensors, places = {}, {}
    try:
        for key, tensor in found["tensors"].items():
            pieces = tensor["pieces"]
            chunks = [chunk_of(piece["offset"], piece["extent"]) for piece in pieces]
            tensors[key] = TensorStorageMetadata(TensorProperties(dtype=DTYPES[tensor["dtype"]]), torch.Size(tensor["shape"]), chunks)
            if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(tensor["shape"]):
                raise CheckpointError(f"{path}: the pieces of {key} do not make it up")
            for chunk, piece in zip(chunks, pieces, strict=True):
                places[MetadataIndex(key, chunk.offsets)] = PlacedIn(Path(piece["file"]).name, piece["name"])
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no list of tensors: {error!r}") from None
    return Metadata(tensors, storage_data=places)


def read_json(path: Path) -> dict:
    """A JSON object of a checkpoint; CheckpointError names the file that is missing or none."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: the checkpoint was not finished")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, not an object")
    return found
