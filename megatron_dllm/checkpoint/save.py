"""Saving: plan with all ranks, copy what may change, write in the background if asked to, publish once every rank has written.

Phases, in this order: staging (a copy of the state, asynchronous saves alone), writing (tensors), index (the JSON files), last file (which
makes the checkpoint valid), pruning (of older checkpoints).
"""
from __future__ import annotations

import errno
import logging
import math
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from ..parallel.context import Group
from .retention import Retention, prune
from .shards import CheckpointError, PartitionSavePlanner, Shard, save_planner
from .storage import INDEX, SafetensorsWriter, place_items, spec_of, write_index
from .store import Draft, TrainingState
from .tensor_files import FileRecord

log = logging.getLogger(__name__)
SPARE_BYTES = 64 << 20  # for the files that are not tensors, and the file system's own use
Observe = Callable[[str], None]


@dataclass(frozen=True)
class SaveOutcome:
    """How a save ended: where the checkpoint lies, or why there is none."""

    iteration: int
    path: Path | None
    error: str | None
    seconds: float


@dataclass(frozen=True)
class SharedPlan:
    """What this rank writes, and what all ranks together do; the same in every save of a run."""

    keys: tuple
    own: SavePlan
    metadata: Metadata
    total_bytes: int


class CheckpointWriter:
    """Saves checkpoints into a folder. Every rank of `world` makes the same calls.

    With `in_background`, `save` returns when the state has been copied; call `poll` once a step: it gives the outcome when there is one.
    `observe` is told of each phase, `on_tensor` of each tensor as it is written, in the background from there.
    One save runs at a time: another `save` waits for the one before.
    """

    def __init__(self, folder: Path, world: Group | None = None, *, in_background: bool = False, retention: Retention | None = None,
                 observe: Observe = lambda phase: None, on_tensor: Observe = lambda key: None):
        self.folder, self.world = folder, world or Group.single("world")
        self.in_background, self.retention, self.observe, self.on_tensor = in_background, retention or Retention(), observe, on_tensor
        self._plan: SharedPlan | None = None
        self._staged: dict[MetadataIndex, Tensor] = {}
        self._thread = ThreadPoolExecutor(1, "checkpoint") if in_background else None
        self._running: _RunningSave | None = None

    @property
    def is_main(self) -> bool:
        return self.world.rank == 0

    def save(self, state: TrainingState, shards: Iterable[Shard], arguments: str) -> list[SaveOutcome]:
        """Save; the outcomes known when this returns: of an earlier save that was waited for, and of this one unless it goes on.

        CheckpointError, on every rank, where the shards are no partition of the model: nothing is written then.
        """
        known = self.wait()
        planner = save_planner(shards, is_coordinator=self.is_main)
        plan = self._shared_plan(planner)
        running = _RunningSave(state, arguments, Draft(self.folder, state.iteration), plan, time.monotonic())
        refusal = self._prepare(running)
        if refusal is not None:
            return [*known, SaveOutcome(state.iteration, None, refusal, 0.0)]
        if self.in_background:
            self.observe("staging")
            resolve = self._stage(plan.own, planner)
            running.future = self._thread.submit(self._write, running, resolve)
            self._running = running
            return known
        written = _attempt(lambda: self._write(running, planner.resolve_data))
        return [*known, self._complete(running, written)]

    def poll(self) -> SaveOutcome | None:
        """The outcome of the running save once every rank has written; None while it goes on, and where there is none."""
        running = self._running
        if running is None or not self._all(running.future.done()):
            return None
        self._running = None
        return self._complete(running, _attempt(running.future.result))

    def wait(self) -> list[SaveOutcome]:
        """The outcome of the running save, if there is one, waited for."""
        running, self._running = self._running, None
        return [] if running is None else [self._complete(running, _attempt(running.future.result))]

    def close(self) -> None:
        """Let the background thread end; call `wait` first."""
        if self._thread is not None:
            self._thread.shutdown()

    def _shared_plan(self, planner: PartitionSavePlanner) -> SharedPlan:
        """This rank's part of the global plan; made once, and again when the tensors have changed."""
        local = planner.create_local_plan()
        keys = tuple((item.index.fqn, item.index.offset, item.tensor_data.chunk.sizes) for item in local.items)
        if self._plan is None or not self._all(self._plan.keys == keys):
            outcome = self._plan_globally(planner, local)
            if isinstance(outcome, str):
                raise CheckpointError(outcome)
            own, metadata, total = outcome
            self._plan, self._staged = SharedPlan(keys, own, metadata, total), {}
        # torch's planner hands out the tensors of the plan that it was last given.
        planner.finish_plan(self._plan.own)
        return self._plan

    def _plan_globally(self, planner: PartitionSavePlanner, local: SavePlan) -> tuple[SavePlan, Metadata, int] | str:
        plans = self._gather(local)
        answers = [None] * self.world.size
        if self.is_main:
            try:
                global_plans, metadata = planner.create_global_plan(plans)
                place_items(global_plans, metadata)
                total = sum(spec_of(item).num_bytes for plan in global_plans for item in plan.items)
                # The others need no metadata: rank 0 writes the index.
                answers = [(plan, metadata if rank == 0 else Metadata({}), total) for rank, plan in enumerate(global_plans)]
            except CheckpointError as error:
                answers = [str(error)] * self.world.size
        return self._scatter(answers)

    def _prepare(self, running: _RunningSave) -> str | None:
        """Make the folder, if there is room for the checkpoint; why not, on every rank, or None."""
        refusal = None
        if self.is_main:
            try:
                running.draft.create()
                check_room(self.folder, running.plan.total_bytes)
            except OSError as error:
                refusal = str(error)
                shutil.rmtree(running.draft.path, ignore_errors=True)
        return self._agree(refusal)

    def _stage(self, plan: SavePlan, planner: PartitionSavePlanner) -> Callable[[WriteItem], Tensor]:
        """Copy this rank's part of the state to host memory that is kept from save to save, pinned where it comes from a GPU.

        A GPU's copies are only queued here, in front of whatever changes the state next; the thread that writes waits for them.
        """
        copied = None
        for item in plan.items:
            tensor = planner.resolve_data(item)
            if item.index not in self._staged:
                self._staged[item.index] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._staged[item.index].copy_(tensor, non_blocking=tensor.is_cuda)
            if tensor.is_cuda:
                copied = copied or torch.cuda.Event()
        if copied is not None:
            copied.record()
        staged = self._staged

        def resolve(item: WriteItem) -> Tensor:
            if copied is not None:
                copied.synchronize()
            return staged[item.index]

        return resolve

    def _write(self, running: _RunningSave, resolve: Callable[[WriteItem], Tensor]) -> Mapping[str, FileRecord] | Path:
        """Write this rank's files. A single process also publishes: nobody has to be waited for."""
        self.observe("writing")
        writer = SafetensorsWriter(running.draft.path, self.world.rank)

        def resolve_next(item: WriteItem) -> Tensor:
            self.on_tensor(item.index.fqn)
            return resolve(item)

        writer.write_data(running.plan.own, _Resolver(resolve_next)).wait()
        files = dict(writer.records)
        if self.is_main:
            self.observe("index")
            files[INDEX] = write_index(running.draft.path / INDEX, running.plan.metadata)
            files |= running.draft.write_state(running.state, running.arguments)
        return self._publish(running, [files]) if self.world.size == 1 else files

    def _complete(self, running: _RunningSave, written: Mapping[str, FileRecord] | Path | OSError) -> SaveOutcome:
        """Publish what all ranks have written, unless one of them failed."""
        error = None
        if self.world.size > 1:
            of_ranks = self._gather(str(written) if isinstance(written, OSError) else written)
            failures = [f"rank {rank}: {found}" for rank, found in enumerate(of_ranks or []) if isinstance(found, str)]
            outcome: Path | str | None = "; ".join(failures)
            if self.is_main and not failures:
                published = _attempt(lambda: self._publish(running, of_ranks))
                outcome = str(published) if isinstance(published, OSError) else published
            outcome = self._agree(outcome)
        else:
            outcome = str(written) if isinstance(written, OSError) else written
        path = outcome if isinstance(outcome, Path) else None
        error = None if path is not None else outcome
        if error is not None and self.is_main:
            shutil.rmtree(running.draft.path, ignore_errors=True)  # a full disk is the usual reason
        return SaveOutcome(running.state.iteration, path, error, time.monotonic() - running.started)

    def _publish(self, running: _RunningSave, of_ranks: Sequence[Mapping[str, FileRecord]]) -> Path:
        self.observe("last file")
        path = running.draft.publish({name: record for files in of_ranks for name, record in files.items()})
        self.observe("pruning")
        failed = _attempt(lambda: prune(self.folder, self.retention, keep=path))
        if isinstance(failed, OSError):  # the checkpoint is good all the same
            log.warning("older checkpoints in %s could not be deleted: %s", self.folder, failed)
        return path

    def _all(self, value: bool) -> bool:
        """Whether it is true on every rank."""
        if self.world.size == 1:
            return value
        answers = [None] * self.world.size
        dist.all_gather_object(answers, value, group=self.world.handle)
        return all(answers)

    def _gather(self, value) -> list | None:
        """Every rank's value, on rank 0."""
        if self.world.size == 1:
            return [value]
        values = [None] * self.world.size if self.is_main else None
        dist.gather_object(value, values, dst=self.world.ranks[0], group=self.world.handle)
        return values

    def _scatter(self, values: Sequence):
        """Rank r's value of rank 0's list."""
        if self.world.size == 1:
            return values[0]
        box = [None]
        dist.scatter_object_list(box, list(values) if self.is_main else None, src=self.world.ranks[0], group=self.world.handle)
        return box[0]

    def _agree(self, value):
        """Rank 0's value, on every rank."""
        return self._scatter([value] * self.world.size)


@dataclass
class _RunningSave:
    state: TrainingState
    arguments: str
    draft: Draft
    plan: SharedPlan
    started: float
    future: Future | None = None


@dataclass(frozen=True)
class _Resolver:
    """What a StorageWriter asks a planner for."""

    resolve_data: Callable[[WriteItem], Tensor]


def _attempt(act: Callable[[], object]):
    """The result, or the OSError by which the disk refused."""
    try:
        return act()
    except OSError as error:
        return error


def save(folder: Path, state: TrainingState, *, model: Mapping[str, Tensor], optimizer: Mapping[tuple[str, str], Tensor],
         arguments: str) -> Path:
    """Save whole tensors from this process alone: the model by name, moments by (name, state). OSError where the disk refuses."""
    shards = [Shard.whole(name, tensor) for name, tensor in model.items()]
    shards += [Shard.whole(f"{state_name}/{name}", tensor) for (name, state_name), tensor in optimizer.items()]
    outcome, = CheckpointWriter(folder).save(state, shards, arguments)
    if outcome.path is None:
        raise OSError(outcome.error)
    return outcome.path


def check_room(folder: Path, num_bytes: int, what: str = "a checkpoint") -> None:
    """OSError where a checkpoint, or `what`, of this size does not fit."""
    free = shutil.disk_usage(folder).free
    if num_bytes + SPARE_BYTES > free:
        text = (f"{what} takes {describe_bytes(num_bytes)}, {describe_bytes(SPARE_BYTES)} are spared for other files, "
                f"and only {describe_bytes(free)} are free")
        raise OSError(errno.ENOSPC, text, str(folder))


def describe_bytes(num_bytes: int) -> str:
    """"1.5 GiB"."""
    power = min(int(math.log(max(num_bytes, 1), 1024)), 4)
    return f"{num_bytes / 1024 ** power:.{1 if power else 0}f} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
