"""What a rank declares of each tensor of a checkpoint, and the planners of torch.distributed.checkpoint over it.

A `Shard` is the rectangles of one whole tensor that this rank holds. Its bounds are checked when it is declared; before a byte is written,
the rectangles of all ranks together are proven to make up the whole tensor, each element once (equal rectangles of several ranks are
replicas, of which one is written).
"""
from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta, TensorProperties
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType

from ..parallel.placement import Placement, cut_rectangle

Offset = tuple[int, ...]


class CheckpointError(ValueError):
    """A checkpoint that cannot be used or made; the text names the file or tensor."""


@dataclass(frozen=True)
class Rectangle:
    """A part of a whole tensor, and the tensor (a view, of its extent) that holds it."""

    offset: Offset
    tensor: Tensor

    @property
    def extent(self) -> Offset:
        return tuple(self.tensor.shape)


class Shard:
    """The rectangles of the tensor `key` that this rank holds; none where it holds nothing. ValueError when one lies outside."""

    def __init__(self, key: str, shape: Sequence[int], dtype: torch.dtype, rectangles: Iterable[Rectangle]):
        self.key, self.shape, self.dtype = key, tuple(shape), dtype
        self.rectangles = {r.offset: r for r in rectangles if r.tensor.numel()}
        for r in self.rectangles.values():
            inside = len(r.offset) == len(r.extent) == len(self.shape) and all(
                o >= 0 and o + e <= size for o, e, size in zip(r.offset, r.extent, self.shape, strict=True))
            if not inside:
                raise ValueError(f"{key} {list(self.shape)}: a shard at {list(r.offset)} of extent {list(r.extent)} lies outside")
            if r.tensor.dtype != dtype:
                raise ValueError(f"{key}: a shard of {r.tensor.dtype} in a tensor of {dtype}")

    @classmethod
    def whole(cls, key: str, tensor: Tensor) -> Shard:
        """A tensor that this rank holds whole."""
        return cls(key, tensor.shape, tensor.dtype, [Rectangle((0,) * tensor.dim(), tensor.detach())])

    @classmethod
    def placed(cls, key: str, local: Tensor, placement: Placement | None) -> Shard:
        """A parameter, or a state of its local shape, where its placement says; without one it is whole. Fill is left out."""
        if placement is None:
            return cls.whole(key, local)
        return cls(key, placement.shape, local.dtype, [Rectangle(placement.offset, placement.region(local.detach()))])

    @classmethod
    def flat_range(cls, key: str, flat: Tensor, start: int, placement: Placement) -> Shard:
        """Elements start to start + len(flat) of a parameter's local tensor [*local_shape], flattened, as rectangles. Fill is left out.

        A contiguous range is a few rectangles, each of them contiguous in `flat`: what is loaded into them lands in `flat`.
        """
        rectangles = []
        for offset, extent in rectangles_of_range(placement.local_shape, start, start + flat.numel()):
            place = sum(o * math.prod(placement.local_shape[dim + 1:]) for dim, o in enumerate(offset)) - start
            block = flat.detach()[place:place + math.prod(extent)].view(extent)
            real = tuple(max(min(e, limit - o), 0) for o, e, limit in zip(offset, extent, placement.extent, strict=True))
            at = tuple(o + p for o, p in zip(offset, placement.offset, strict=True))
            rectangles.append(Rectangle(at, cut_rectangle(block, (0,) * len(real), real)))
        return cls(key, placement.shape, flat.dtype, rectangles)

    def size(self) -> torch.Size:
        """Of the whole tensor, for the planner."""
        return torch.Size(self.shape)

    def __create_write_items__(self, fqn: str, _: Shard) -> list[WriteItem]:
        return [WriteItem(MetadataIndex(fqn, r.offset), WriteItemType.SHARD,
                          tensor_data=TensorWriteData(chunk_of(r.offset, r.extent), TensorProperties(dtype=self.dtype), self.size()))
                for r in self.rectangles.values()]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk_of(r.offset, r.extent) for r in self.rectangles.values()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.rectangles[tuple(index.offset)].tensor


def chunk_of(offset: Sequence[int], extent: Sequence[int]) -> ChunkStorageMetadata:
    """The planner's word for a rectangle."""
    return ChunkStorageMetadata(torch.Size(offset), torch.Size(extent))


def rectangles_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[Offset, Offset]]:
    """(offset, extent) of rectangles that make up elements start to stop of a flattened tensor, in order: 2 * dimensions - 1 at most.

    Elements 2 to 9 of a 4 x 3 tensor are row 0 from column 2, and rows 1 and 2 whole.
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # rows first to last are whole
    if first > last:  # inside one row
        for offset, extent in rectangles_of_range(shape[1:], start - last * row, stop - last * row):
            yield (last, *offset), (1, *extent)
        return
    for offset, extent in rectangles_of_range(shape[1:], start - (first - 1) * row, row) if first * row > start else ():
        yield (first - 1, *offset), (1, *extent)
    if last > first:
        yield (first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:])
    for offset, extent in rectangles_of_range(shape[1:], 0, stop - last * row):
        yield (last, *offset), (1, *extent)


class PartitionSavePlanner(DefaultSavePlanner):
    """torch's planner over shards; CheckpointError unless the ranks' rectangles partition every tensor."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        check_partition(all_plans)
        return super().create_global_plan(all_plans)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


class ShardLoadPlanner(DefaultLoadPlanner):
    """torch's planner over shards, which are read into in place."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(self, state_dict: Mapping[str, Shard], metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self.state_dict = self.original_state_dict = dict(state_dict)
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        return self.transform_tensor(read_item, self.lookup_tensor(read_item.dest_index))


def save_planner(shards: Iterable[Shard], *, is_coordinator: bool) -> PartitionSavePlanner:
    """A planner set up for this rank's shards."""
    planner = PartitionSavePlanner()
    planner.set_up_planner(by_key(shards), StorageMeta(), is_coordinator)
    return planner


def by_key(shards: Iterable[Shard]) -> dict[str, Shard]:
    """Shards by key; ValueError where one is declared twice."""
    result: dict[str, Shard] = {}
    for shard in shards:
        if shard.key in result:
            raise ValueError(f"{shard.key} is declared twice")
        result[shard.key] = shard
    return result


def check_partition(plans: Sequence[SavePlan]) -> None:
    """CheckpointError that names the tensor and ranks where shapes or dtypes differ, rectangles overlap, or elements are in none."""
    declared = defaultdict(lambda: defaultdict(list))  # key -> (offset, extent) -> ranks
    kinds = defaultdict(lambda: defaultdict(list))  # key -> (shape, dtype) -> ranks
    for rank, plan in enumerate(plans):
        for item in plan.items:
            chunk = item.tensor_data.chunk
            declared[item.index.fqn][tuple(chunk.offsets), tuple(chunk.sizes)].append(rank)
            kinds[item.index.fqn][tuple(item.tensor_data.size), item.tensor_data.properties.dtype].append(rank)
    problems = []
    for key, found in declared.items():
        if len(kinds[key]) > 1:
            told = [f"{list(shape)} {dtype} on ranks {ranks}" for (shape, dtype), ranks in kinds[key].items()]
            problems.append(f"{key} is {' and '.join(told)}")
            continue
        (shape, _), = kinds[key]
        problems += [f"{key} {list(shape)}: {_told(*one, found[one])} overlaps {_told(*other, found[other])}"
                     for one, other in itertools.islice(_overlaps(list(found)), 3)]
        volume = sum(math.prod(extent) for _, extent in found)
        if volume < math.prod(shape):
            problems.append(f"{key} {list(shape)}: {math.prod(shape) - volume} of {math.prod(shape)} elements are on no rank")
    if problems:
        raise CheckpointError("the shards of the ranks do not make up the model, nothing is written: " + "; ".join(problems[:10]))


def _told(offset: Offset, extent: Offset, ranks: Sequence[int]) -> str:
    return f"the shard at {list(offset)} of extent {list(extent)} (rank {', '.join(map(str, ranks))})"


def _overlaps(rectangles: Sequence[tuple[Offset, Offset]]) -> Iterator[tuple[tuple[Offset, Offset], tuple[Offset, Offset]]]:
    """Pairs that share an element, by a sweep along the first dimension."""
    active: list[tuple[Offset, Offset]] = []
    for one in sorted(rectangles):
        if one[0]:
            active = [other for other in active if other[0][0] + other[1][0] > one[0][0]]
        for other in active:
            if all(a < b + e and b < a + d for a, d, b, e in zip(*one, *other, strict=True)):
                yield other, one
        active.append(one)
