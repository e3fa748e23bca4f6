"""Exports while a run trains and at its end: whole tensors gathered over the ranks, written by rank 0."""
from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..checkpoint.model_state import named_tensors
from ..models.diffusion_gemma.huggingface import Offset
from ..models.diffusion_gemma.peft_format import adapter_names, write_adapters
from ..models.diffusion_gemma.transformers_export import Export
from ..parallel import communication
from ..parallel.gathering import gather_whole
from ..parallel.placement import cut_rectangle
from .evaluation import Beat
from .folders import ASSETS, export_folder, make_way, note_export
from .logging import RunLogger

if TYPE_CHECKING:
    from .loop import Trainer


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

    def export(self, iteration: int) -> None:
        """Write the directory that the flags name for an iteration; ranks give their parts of each tensor as it is due."""
        self.trainer.optimizer.finish_gathers()
        path, self.newest = export_folder(self.trainer.run, iteration), iteration
        gathered = _GatheredTensors(self.trainer, self.beat)
        error = _attempt(lambda: gathered.follow(self._order()))
        failed = self._on_any_rank(error)
        if not failed:
            if self.is_main:
                error = _attempt(lambda: self._write(path, gathered))
            # The others wait in the gathers of what rank 0 did not come to.
            gathered.finish()
            failed = self._on_any_rank(error)
        if failed:
            self._tell_failure(iteration, path, error)
        else:
            self.logger.message(f"exported iteration {iteration} to {path}")

    def summary(self) -> str:
        """What a run that has failed exports says of them at its end."""
        numbers = ", ".join(map(str, self.failed))
        return f"exports failed, of iterations {numbers} (see their messages)"

    def _order(self) -> list[str]:
        """Our tensors in the order in which rank 0 reads them. One process has nobody to follow it."""
        if self.trainer.context.world.size == 1:
            return []
        if self.trainer.has_adapters:
            return adapter_names(self.trainer.run.model, self.trainer.run.lora)
        return self._export_of(None).reading_order()

    def _export_of(self, gathered: _GatheredTensors | None) -> Export:
        run, assets = self.trainer.run, Path(self.trainer.run.checkpoint.save or "") / ASSETS
        assets = assets if self.trainer.run.checkpoint.save and assets.is_dir() else None
        return Export(run.model, gathered and gathered.read, lambda name: self.trainer.model.dtype, assets, self.trainer.tokenizer,
                      run.generation)

    def _write(self, path: Path, gathered: _GatheredTensors) -> None:
        run = self.trainer.run
        make_way(run, path)
        if self.trainer.has_adapters:
            write_adapters(path, run.model, run.lora, self.base["path"], gathered.whole)
        else:
            self._export_of(gathered).write(path)
        try:
            note_export(run, path)
        except OSError:
            shutil.rmtree(path, ignore_errors=True)  # the next start would take it for somebody else's, and refuse to begin
            raise

    def _on_any_rank(self, error: Exception | None) -> bool:
        failed = torch.tensor(int(error is not None), device=self.trainer.context.device)
        return bool(communication.all_reduce(failed, self.trainer.context.world, "max").item())

    def _tell_failure(self, iteration: int, path: Path, error: Exception | None) -> None:
        self.failed.append(iteration)
        if error is not None and not self.is_main:
            sys.stderr.write(f"rank {self.trainer.context.world.rank}: {type(error).__name__}: {error}\n")
        if self.is_main:
            shutil.rmtree(path.with_name(path.name + ".partial"), ignore_errors=True)  # a full disk is the usual reason
            why = "another rank says why" if error is None else str(error) if isinstance(error, OSError) else repr(error)
            save = self.trainer.run.checkpoint.save
            later = f"tools/convert.py makes it from a checkpoint in {save}" if save else "without --save no checkpoint can make up for it"
            self.logger.message(f"EXPORTING ITERATION {iteration} TO {path} FAILED: {why}; the run goes on, and its exit status will be 1; "
                                f"{later}")


class _GatheredTensors:
    """Whole tensors of the model, one at a time; every rank asks for the same ones in the same order."""

    def __init__(self, trainer: Trainer, beat: Beat):
        self.tensors, self.context, self.beat = dict(named_tensors(trainer.model)), trainer.context, beat
        self.name, self.tensor = "", None
        self.due: list[str] = []

    def follow(self, order: list[str]) -> None:
        """These will be asked for; `finish` asks for those that are left."""
        self.due = order[::-1]

    def finish(self) -> None:
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


def _attempt(act: Callable[[], object]) -> Exception | None:
    """What ended it, if anything did. An error of a collective or a device is none of an export's, and passes."""
    try:
        act()
    except RuntimeError:
        raise
    except Exception as error:  # a tokenizer's library has no type of its own for a disk that is full
        return error
    return None
