"""When a run saves and exports, and how it takes up what was saved."""
from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor, nn

from ..checkpoint import store
from ..checkpoint.model_state import load_whole_tensors, named_tensors
from ..config import to_arguments_text
from ..models.diffusion_gemma.transformers_directory import Export, TransformersDirectory, save_assets
from ..parallel import ParallelContext
from ..parallel.gathering import gather_whole
from .logging import RunLogger
from .status import RunStatus

if TYPE_CHECKING:
    from .loop import Trainer

Key = TypeVar("Key")
ASSETS = "assets"  # what an export of the run carries through: beside its checkpoints
BEST = "best"


def restore(trainer: Trainer) -> int:
    """Load --load's newest valid checkpoint, or else --pretrained-checkpoint's weights; the iteration to go on from."""
    options = trainer.run.checkpoint
    if options.load:
        found = store.find_newest(Path(options.load))
        if found is not None:
            _resume(trainer, found)
            _say(trainer, f"resuming from {found.path}, iteration {found.state.iteration}")
            return found.state.iteration
        _say(trainer, f"--load {options.load} holds no checkpoint: starting "
             + (f"from --pretrained-checkpoint {options.pretrained_checkpoint}" if options.pretrained_checkpoint else "at random"))
    if options.pretrained_checkpoint:
        _load_pretrained(trainer, Path(options.pretrained_checkpoint))
    return 0


def _resume(trainer: Trainer, found: store.Checkpoint) -> None:
    size, consumed = trainer.run.training.global_batch_size, found.state.consumed_rows
    if consumed != found.state.iteration * size:
        raise ValueError(f"--global-batch-size {size}: checkpoint {found.path} has consumed {consumed} rows in {found.state.iteration} "
                         f"iterations; resume with {consumed // max(found.state.iteration, 1)}, or start anew from --pretrained-checkpoint")
    tensors = found.model()
    load_whole_tensors(trainer.model, tensors.items(), str(found.path))
    trainer.optimizer.load(tensors, found.optimizer(), found.state.optimizer_steps)


def _load_pretrained(trainer: Trainer, path: Path) -> None:
    if (path / "config.json").is_file():
        source = TransformersDirectory.open(path)
        load_whole_tensors(trainer.model, source.tensors(), str(path))
        assets = _assets_folder(trainer)
        if assets is not None and trainer.context.world.rank == 0 and not assets.exists():
            save_assets(source, assets)
    else:
        found = store.open_checkpoint(path) if path.name.startswith("iter_") else store.find_newest(path)
        if found is None:
            raise ValueError(f"--pretrained-checkpoint {path} holds neither a transformers model nor a valid checkpoint of ours")
        load_whole_tensors(trainer.model, found.model().items(), str(found.path))
        assets, theirs = _assets_folder(trainer), found.path.parent / ASSETS
        if assets is not None and theirs.is_dir() and not assets.exists():
            shutil.copytree(theirs, assets)
    trainer.optimizer.refresh_masters()
    _say(trainer, f"starting from the weights of {path}")


def _say(trainer: Trainer, text: str) -> None:
    if trainer.context.world.rank == 0:
        print(text, flush=True)


def _assets_folder(trainer: Trainer) -> Path | None:
    save = trainer.run.checkpoint.save
    return Path(save) / ASSETS if save else None


class Saver:
    """Saves a run's checkpoints and exports as its flags say, and keeps status.json.

    Every rank takes part, since whole tensors are gathered; rank 0 has them and writes.
    """

    def __init__(self, trainer: Trainer, logger: RunLogger, status: RunStatus):
        self.trainer, self.logger, self.status, self.options = trainer, logger, status, trainer.run.checkpoint
        self.is_writer = trainer.context.world.rank == 0
        self.saved_at: int | None = None
        self.best_loss = _best_so_far(self.options.save)

    def after(self, iteration: int) -> None:
        """What is due after an iteration."""
        if self.options.save and self.options.save_interval and iteration % self.options.save_interval == 0:
            self.save(iteration)
        if self.options.save_hf and self.options.save_hf_interval and iteration % self.options.save_hf_interval == 0:
            self.export(iteration, Path(self.options.save_hf) / f"iter_{iteration:07d}")

    def after_evaluation(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Keep the model with the lowest evaluation loss under <save>/best."""
        loss = metrics["loss"]
        if self.options.save_best and self.options.save and loss < self.best_loss:
            self.best_loss = loss
            folder = Path(self.options.save) / BEST
            self._write(folder, iteration)
            if self.is_writer:
                store.write_text(folder / "loss.txt", f"{loss!r}\n")
                for path in folder.glob("iter_*"):
                    if path != store.iteration_folder(folder, iteration):
                        shutil.rmtree(path)
            self.logger.message(f"lowest evaluation loss so far, {loss:.6f}: saved to {folder}")

    def finish(self, iteration: int, reason: str | None) -> None:
        """Save and export at the end of the run, and write how it ended."""
        path = None
        if self.options.save:
            path = store.iteration_folder(Path(self.options.save), iteration)
            if self.saved_at != iteration:
                self.save(iteration)
        if self.options.save_hf and reason is None:
            self.export(iteration, Path(self.options.save_hf))
        if reason is None:
            self.status.finished(iteration, checkpoint=path)
        else:
            self.logger.message(f"stopped after iteration {iteration}: {reason}")
            self.status.stopped(iteration, reason, checkpoint=path)

    def save(self, iteration: int) -> None:
        """Write a checkpoint now."""
        path = self._write(Path(self.options.save), iteration)
        self.saved_at = iteration
        self.status.progress(iteration, checkpoint=path)
        self.logger.message(f"saved {path}")

    def _write(self, folder: Path, iteration: int) -> Path:
        optimizer, training = self.trainer.optimizer, self.trainer.run.training
        state = store.TrainingState(iteration, iteration * training.global_batch_size, optimizer.num_steps())
        tensors = self._tensors()
        moments = self._kept(((name, kind), tensor) for name, kind, tensor in optimizer.states())
        if self.is_writer:
            store.save(folder, state, model=tensors, optimizer=moments, arguments=to_arguments_text(self.trainer.run))
        return store.iteration_folder(folder, iteration)

    def _tensors(self) -> dict[str, Tensor]:
        """Every parameter and buffer, whole, trainable ones as their masters; nothing on ranks that do not write."""
        trained, context = self.trainer.optimizer.parameters, self.trainer.context
        others = ((name, _whole(t, context)) for name, t in named_tensors(self.trainer.model) if name not in trained)
        return self._kept(itertools.chain(others, self.trainer.optimizer.masters()))

    def _kept(self, tensors: Iterable[tuple[Key, Tensor]]) -> dict[Key, Tensor]:
        """The tensors on the rank that writes; the others take part in gathering them and keep none."""
        return {key: tensor.detach() for key, tensor in tensors if self.is_writer}

    def export(self, iteration: int, path: Path) -> None:
        """Write a transformers directory, in bf16 where the run computes in it."""
        tensors, assets = self._tensors(), _assets_folder(self.trainer)
        if not self.is_writer:
            return
        Export(self.trainer.run.model, lambda name: tensors[name].cpu(), self.trainer.model.dtype,
               assets if assets is not None and assets.is_dir() else None).write(path)
        self.trainer.tokenizer.save_pretrained(path)
        self.logger.message(f"exported iteration {iteration} to {path}")


def _whole(tensor: Tensor, context: ParallelContext) -> Tensor:
    """A parameter whole; a buffer as it is, since every rank has all of it."""
    return gather_whole(tensor.detach(), tensor.placement, context) if isinstance(tensor, nn.Parameter) else tensor


def _best_so_far(save: str | None) -> float:
    file = Path(save) / BEST / "loss.txt" if save else None
    return float(file.read_text()) if file is not None and file.is_file() else float("inf")
