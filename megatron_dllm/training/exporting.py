"""Exports while a run trains and at its end: whole tensors gathered over the ranks, written by rank 0."""
from __future__ import annotations

import errno
import itertools
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor

from ..checkpoint.model_state import named_tensors
from ..checkpoint.save import check_room
from ..checkpoint.store import agreed
from ..models.diffusion_gemma.huggingface import Offset
from ..models.diffusion_gemma.peft_format import adapter_names, write_adapters
from ..models.diffusion_gemma.transformers_export import Export
from ..parallel.gathering import gather_whole
from ..parallel.placement import cut_rectangle
from .evaluation import Beat
from .folders import ASSETS, export_folder, make_way, note_export
from .logging import RunLogger

if TYPE_CHECKING:
    from .loop import Trainer

Result = TypeVar("Result")


class Exporter:
    """Writes transformers directories (of adapters: PEFT's) in the dtype that the run computes in. Every rank makes the same calls.

    An export that fails is told, and the run goes on: what it needs is its checkpoints, from which exports can be made later.
    base: what adapters stand beside (TrainingState.base). beat: told of each tensor. newest: the last iteration that was tried.
    failed: the iterations without an export, the same on every rank.
    """

    def __init__(self, trainer: Trainer, logger: RunLogger, base: Mapping[str, str], beat: Beat):
        self.trainer, self.logger, self.base, self.beat = trainer, logger, base, beat
        self.is_main = trainer.context.world.rank == 0
        self.newest: int | None = None
        self.failed: list[int] = []
        save = trainer.run.checkpoint.save
        # Rank 0 alone reads it, and has made it by now.
        self.assets = Path(save) / ASSETS if save and (Path(save) / ASSETS).is_dir() else None

    def export(self, iteration: int) -> None:
        """Write the directory that the flags name for an iteration; ranks give their parts of each tensor as it is due."""
        self.trainer.optimizer.finish_gathers()
        world, self.newest = self.trainer.context.world, iteration
        path, gathered = export_folder(self.trainer.run, iteration), _GatheredTensors(self.trainer, self.beat)
        order, error = _attempt(self._order) if self.is_main else (None, None)
        order = agreed(order, world)
        if order is not None:
            gathered.follow(order)
            if self.is_main:
                _, error = _attempt(lambda: self._write(path, gathered))
            # The others wait in the gathers of what rank 0 did not come to.
            gathered.finish()
        if agreed(error is not None, world):
            self.failed.append(iteration)
            if self.is_main:
                self._tell_failure(iteration, path, error)
        else:
            self.logger.message(f"exported iteration {iteration} to {path}")

    def summary(self) -> str:
        """What a run that has failed exports says of them at its end."""
        return f"exports failed, of iterations {', '.join(map(str, self.failed))} (see their messages)"

    def _order(self) -> list[str]:
        """Our tensors in the order in which `_write` reads them. One process has nobody to follow it."""
        if self.trainer.context.world.size == 1:
            return []
        if self.trainer.has_adapters:
            return adapter_names(self.trainer.run.model, self.trainer.run.lora)
        return self._export_of(None).reading_order()

    def _export_of(self, gathered: _GatheredTensors | None) -> Export:
        if self.assets is not None and not self.assets.is_dir():  # without it the model would lose its vision tower, unseen
            raise FileNotFoundError(errno.ENOENT, "what exports carry through is gone", str(self.assets))
        run, model = self.trainer.run, self.trainer.model
        return Export(run.model, gathered and gathered.read, lambda name: model.dtype, self.assets, self.trainer.tokenizer, run.generation)

    def _write(self, path: Path, gathered: _GatheredTensors) -> None:
        run = self.trainer.run
        make_way(run, path)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Also since a full disk is no OSError in every library that writes the small files.
        check_room(path.parent, self._num_bytes(), "an export")
        if self.trainer.has_adapters:
            write_adapters(path, run.model, run.lora, self.base["path"], gathered.whole)
        else:
            self._export_of(gathered).write(path)
        try:
            note_export(run, path)
        except OSError:
            shutil.rmtree(path, ignore_errors=True)  # the next start would take it for somebody else's, and refuse to begin
            raise

    def _num_bytes(self) -> int:
        """Of the tensors that are written, those that are carried through aside."""
        model, trained = self.trainer.model, self.trainer.optimizer.parameters
        return sum(torch.Size(getattr(tensor, "placement", tensor).shape).numel() * model.dtype.itemsize
                   for name, tensor in named_tensors(model) if name in trained or not self.trainer.has_adapters)

    def _tell_failure(self, iteration: int, path: Path, error: Exception) -> None:
        shutil.rmtree(path.with_name(path.name + ".partial"), ignore_errors=True)  # a full disk is the usual reason
        why, save = str(error) if isinstance(error, OSError) else repr(error), self.trainer.run.checkpoint.save
        later = f"tools/convert.py makes it from a checkpoint in {save}" if save else "without --save no checkpoint can make up for it"
        self.logger.message(f"EXPORTING ITERATION {iteration} TO {path} FAILED: {why}; the run goes on, to end with status 1; {later}")


class _GatheredTensors:
    """Whole tensors of the model, one at a time; every rank asks for the same ones in the same order."""

    def __init__(self, trainer: Trainer, beat: Beat):
        self.tensors, self.context, self.beat = dict(named_tensors(trainer.model)), trainer.context, beat
        self.name, self.tensor = "", None
        self.due: list[str] = []

    def follow(self, order: Sequence[str]) -> None:
        """These will be asked for. One that two files of an export have a part of is there twice, and gathered once."""
        self.due = [name for name, _ in itertools.groupby(order)][::-1]

    def finish(self) -> None:
        """Gather what is left."""
        while self.due:
            self.whole(self.due[-1])

    def whole(self, name: str) -> Tensor:
        self.beat(f"{name} of an export")
        if name != self.name:
            tensor = self.tensors[name].detach()
            placement = getattr(self.tensors[name], "placement", None)
            self.name, self.tensor = name, (tensor if placement is None else gather_whole(tensor, placement, self.context)).cpu()
            assert not self.due or self.due[-1] == name, f"{name} is gathered, and the other ranks gather {self.due[-1]}"
            self.due = self.due[:-1]
        return self.tensor

    def read(self, name: str, offset: Offset, extent: Offset) -> Tensor:
        """As a TensorSource."""
        return cut_rectangle(self.whole(name), offset, extent)


def _attempt(act: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    """Its result, or the error by which the disk or what is to be written refused. One of a collective or a device passes."""
    try:
        return act(), None
    except (OSError, ValueError, SafetensorError) as error:
        return None, error
