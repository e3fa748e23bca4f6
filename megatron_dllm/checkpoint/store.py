"""Checkpoints on disk: safetensors for tensors, JSON for everything else, valid once the last file is in place.

    <folder>/iter_0000100/model_00003.safetensors      what rank 3 wrote of parameters (masters of trained ones) and buffers, by global name
                          optimizer_00003.safetensors  and of the moments: exp_avg/<name>, exp_avg_sq/<name>
                          tensors.json                 shape, dtype and pieces of every tensor, and the files they lie in
                          state.json                   iteration, consumed rows, optimizer steps, schedule, versions, the run's layout
                          args.txt                     the run's flags, valid as @args.txt
                          complete.json                written last: size and SHA-256 of every other file
    <folder>/iter_0000200.partial/                     being written, or left by a save that was cut short
    <folder>/latest_checkpointed_iteration.txt         number of the newest, as scripts expect
"""
from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

import safetensors
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from .. import __version__
from ..parallel.context import Group
from .shards import CheckpointError, Offset, Shard, ShardLoadPlanner, by_key, chunk_of
from .storage import FORMAT, INDEX, MODEL, OPTIMIZER, SafetensorsReader, kind_of, read_index, read_json
from .tensor_files import FileRecord, naming

log = logging.getLogger(__name__)
LATEST, COMPLETE, STATE, ARGUMENTS = "latest_checkpointed_iteration.txt", "complete.json", "state.json", "args.txt"
PARTIAL, REPLACED, DELETED = ".partial", ".old", ".deleting"
Report = Callable[[str], None]


@dataclass(frozen=True)
class TrainingState:
    """Where a run stands: finished iterations, rows it has consumed, updates made; what its learning rates follow; and, for people, its
    layout. `base`, of a checkpoint that holds adapters alone: path and fingerprint of the weights beside which they were trained.
    """

    iteration: int
    consumed_rows: int
    optimizer_steps: int
    layout: Mapping[str, int] = field(default_factory=dict)
    schedule: Mapping[str, float | int | str] = field(default_factory=dict)
    base: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """An opened, complete checkpoint: a TensorSource of the model's tensors."""

    path: Path
    state: TrainingState

    @property
    def arguments(self) -> str:
        """The flags of the run that saved it."""
        return (self.path / ARGUMENTS).read_text(encoding="utf-8")

    @cached_property
    def metadata(self) -> Metadata:
        """Every tensor and where its pieces lie."""
        return read_index(self.path / INDEX)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the tensors by key; moments have a slash in theirs."""
        return {key: tuple(tensor.size) for key, tensor in self.metadata.state_dict_metadata.items()}

    @cached_property
    def _reader(self) -> SafetensorsReader:
        reader = SafetensorsReader(self.path)
        reader.set_up_storage_reader(self.metadata, True)
        return reader

    def dtype(self, key: str) -> torch.dtype:
        """Of a tensor."""
        return self.metadata.state_dict_metadata[key].properties.dtype

    @property
    def has_optimizer(self) -> bool:
        """Whether there are moments."""
        return any(kind_of(key) == OPTIMIZER for key in self.shapes)

    def read(self, key: str, offset: Offset, extent: Offset) -> Tensor:
        """A rectangle of a tensor, from whatever pieces it lies in."""
        items = create_read_items_for_chunk_list(key, self.metadata.state_dict_metadata[key], [chunk_of(offset, extent)])
        if len(items) == 1:
            return self._reader.read(items[0])
        whole = torch.empty(tuple(extent), dtype=self.dtype(key))
        for item in items:
            part = tuple(slice(o, o + e) for o, e in zip(item.dest_offsets, item.lengths, strict=True))
            whole[part].copy_(self._reader.read(item))
        return whole

    def read_whole(self, key: str) -> Tensor:
        """A whole tensor."""
        return self.read(key, (0,) * len(self.shapes[key]), self.shapes[key])

    def check_all_held(self, keys: Iterable[str], world: Group | None = None, kinds: Iterable[str] = (MODEL, OPTIMIZER)) -> None:
        """CheckpointError for tensors that no rank has a place for: the checkpoint is another model's. `keys` are what this rank holds."""
        of_ranks = _gathered(set(keys), world or Group.single("world"))
        extra = sorted(key for key in set(self.shapes).difference(*of_ranks) if kind_of(key) in kinds)
        if extra:
            raise CheckpointError(f"{self.path} is of another model: it holds {', '.join(extra[:10])} ({len(extra)} tensors), for which "
                                  "this one has no place; name a checkpoint of this model, or give the flags of that one")

    def load(self, shards: Iterable[Shard]) -> None:
        """Read into shards, in place, each its own rectangles; dtypes are cast. CheckpointError names what is missing or misshapen."""
        wanted = by_key(shards)
        problems = [f"{key} is missing" for key in wanted if key not in self.shapes]
        problems += [f"{key} is {list(self.shapes[key])}, the run has {list(shard.shape)}"
                     for key, shard in wanted.items() if key in self.shapes and self.shapes[key] != shard.shape]
        if problems:
            raise CheckpointError(f"{self.path}: {'; '.join(problems[:10])} ({len(problems)} of {len(wanted)} tensors); "
                                  "give the flags that the checkpoint was saved with (its args.txt), or start from another")
        planner = ShardLoadPlanner()
        planner.set_up_planner(wanted, self.metadata)
        plan = planner.finish_plan(planner.create_local_plan())
        with torch.no_grad():
            self._reader.read_data(plan, planner).wait()


def iteration_folder(folder: Path, iteration: int) -> Path:
    """Where the checkpoint of an iteration lies."""
    return folder / f"iter_{iteration:07d}"


class Draft:
    """A checkpoint being written: a folder of its own that takes its final name once every file is in it."""

    def __init__(self, folder: Path, iteration: int):
        self.folder, self.target = folder, iteration_folder(folder, iteration)
        self.path = self.target.with_name(self.target.name + PARTIAL)

    def create(self) -> None:
        """Make the folder anew; OSError where the file system refuses."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            shutil.rmtree(self.path)
        self.path.mkdir()

    def write_state(self, state: TrainingState, arguments: str) -> dict[str, FileRecord]:
        """state.json and args.txt."""
        versions = {"megatron_dllm": __version__, "torch": torch.__version__, "safetensors": safetensors.__version__}
        write_text(self.path / STATE, json.dumps({"format": FORMAT, **asdict(state), "versions": versions}, indent=2) + "\n")
        write_text(self.path / ARGUMENTS, arguments)
        return {name: FileRecord.of(self.path / name) for name in (STATE, ARGUMENTS)}

    def publish(self, files: Mapping[str, FileRecord]) -> Path:
        """Write the last file and give the folder its name; from here on the checkpoint is valid."""
        recorded = {name: {"bytes": record.num_bytes, "sha256": record.sha256} for name, record in sorted(files.items())}
        write_text(self.path / COMPLETE, json.dumps({"format": FORMAT, "files": recorded}, indent=2) + "\n")
        sync_folder(self.path)
        old = self.target.with_name(self.target.name + REPLACED)
        if self.target.exists():  # the same iteration again: the old one stays readable, under another name, until the new one has its
            shutil.rmtree(old, ignore_errors=True)
            self.target.rename(old)
        self.path.rename(self.target)
        sync_folder(self.folder)
        try:
            write_text(self.folder / LATEST, f"{int(self.target.name.partition('_')[2])}\n")
        except OSError as error:  # the checkpoint is good all the same
            log.warning("%s; it names an older checkpoint than %s", error, self.target.name)
        shutil.rmtree(old, ignore_errors=True)
        return self.target


def write_text(path: Path, text: str) -> None:
    """Write a small file so that at any moment it is the old one or the new one, whole."""
    temporary = path.with_name(path.name + ".writing")
    try:
        with naming(path), temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def sync_folder(path: Path) -> None:
    """Have a folder's entries on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checkpoints_in(folder: Path) -> list[Path]:
    """Folders of iterations, complete or not, the newest first; one that a repeated save was about to replace comes behind its successor.
    """
    pattern = re.compile(rf"iter_(\d{{7,}})({re.escape(REPLACED)})?")
    found = [(match, path) for path in folder.iterdir() if (match := pattern.fullmatch(path.name))] if folder.is_dir() else []
    return [path for match, path in sorted(found, key=lambda pair: (-int(pair[0][1]), pair[1].name))]


def find_newest(folder: Path, report: Report = print, *, world: Group | None = None,
                kinds: Iterable[str] = (MODEL, OPTIMIZER)) -> Checkpoint | None:
    """The newest valid checkpoint in `folder`; what is skipped, and why, goes to `report`. None when there is none.

    With a world of several ranks each reads its share of the files, and all come to the same result.
    """
    world = world or Group.single("world")
    for path in agreed(checkpoints_in(folder), world):
        try:
            return open_checkpoint(path, world=world, kinds=kinds)
        except CheckpointError as error:
            report(f"skipping checkpoint {path.name}: {error}")
    leftovers = [path.name for path in folder.glob(f"iter_*{PARTIAL}")] if folder.is_dir() else []
    if leftovers:
        report(f"{', '.join(sorted(leftovers))} in {folder}: saving was cut short, so it is no checkpoint")
    return None


def open_checkpoint(path: Path, *, world: Group | None = None, kinds: Iterable[str] = (MODEL, OPTIMIZER)) -> Checkpoint:
    """Open the checkpoint of one iteration after checking every file against its size and checksum; CheckpointError names what is wrong.

    Checksums of tensors are computed for these kinds of files alone, dealt out over the ranks of `world`.
    """
    world = world or Group.single("world")
    problems = agreed(_structure_problems(path), world)
    if not problems:
        files = _recorded_files(path)
        mine = [name for name in tensor_files(files, kinds)][world.rank::world.size]
        found = [problem for name in mine if (problem := _content_problem(path / name, files[name]))]
        problems = [problem for of_rank in _gathered(found, world) for problem in of_rank]
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise CheckpointError(f"{shown}; copy it here again, or take another checkpoint of the run")
    state = read_json(path / STATE)
    return Checkpoint(path, TrainingState(**{name: state[name] for name in TrainingState.__dataclass_fields__ if name in state}))


def problems_of(path: Path) -> list[str]:
    """Everything that is wrong with the checkpoint of one iteration, every file read; [] for a valid one."""
    problems = _structure_problems(path)
    try:
        files = _recorded_files(path)
    except CheckpointError:
        return problems
    seen = [problem for name in tensor_files(files) if (path / name).is_file() and (path / name).stat().st_size == files[name].num_bytes
            and (problem := _content_problem(path / name, files[name]))]
    return problems + seen


def tensor_files(names: Iterable[str], kinds: Iterable[str] = (MODEL, OPTIMIZER)) -> list[str]:
    """Those of these names that hold tensors of these kinds."""
    return [name for name in names if name.endswith(".safetensors") and name.startswith(tuple(kinds))]


def _recorded_files(path: Path) -> dict[str, FileRecord]:
    try:
        files = read_json(path / COMPLETE)["files"]
        return {Path(name).name: FileRecord(wanted["bytes"], wanted["sha256"]) for name, wanted in files.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path / COMPLETE} is no list of files: {error!r}") from None


def _structure_problems(path: Path) -> list[str]:
    """What can be seen without reading tensors: absent files, wrong sizes, small files that have changed, another format."""
    try:
        files = _recorded_files(path)
    except CheckpointError as error:
        return [str(error)]
    problems = [f"{path / COMPLETE} does not list {name}" for name in (INDEX, STATE, ARGUMENTS) if name not in files]
    for name, record in files.items():
        file = path / name
        if not file.is_file():
            rank = re.fullmatch(r"\w+_(\d+)\.safetensors", name)
            problems.append(f"{file} is missing" + (f": the part of rank {int(rank[1])}" if rank else ""))
        elif file.stat().st_size != record.num_bytes:
            problems.append(f"{file} has {file.stat().st_size} bytes, {record.num_bytes} were written")
        elif not name.endswith(".safetensors") and (problem := _content_problem(file, record)):
            problems.append(problem)
    if problems:
        return problems
    try:
        found = read_json(path / STATE).get("format")
        listed = {place.file for place in read_index(path / INDEX).storage_data.values()}
    except CheckpointError as error:
        return [str(error)]
    if found != FORMAT:
        return [f"{path / STATE} has format {found}, this version reads {FORMAT}"]
    return [f"{path / COMPLETE} does not list {name}, in which tensors lie" for name in sorted(listed - set(files))]


def _content_problem(file: Path, record: FileRecord) -> str | None:
    try:
        if FileRecord.of(file) != record:
            return f"{file} has changed since it was written (its checksum differs)"
    except OSError as error:
        return f"{file} cannot be read: {error}"
    return None


def agreed(value, world: Group):
    """Rank 0's value, on every rank."""
    if world.size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=world.ranks[0], group=world.handle)
    return box[0]


def _gathered(value, world: Group) -> list:
    """Every rank's value, on every rank."""
    if world.size == 1:
        return [value]
    boxes = [None] * world.size
    dist.all_gather_object(boxes, value, group=world.handle)
    return boxes
