"""When a run saves and exports, and how it takes up what was saved."""
from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..checkpoint import store
from ..checkpoint.model_state import TensorSource, fingerprint, load_tensors, named_tensors
from ..checkpoint.retention import Retention
from ..checkpoint.save import CheckpointWriter, SaveOutcome, describe_bytes
from ..checkpoint.shards import Shard
from ..checkpoint.storage import MODEL
from ..config import to_arguments_text
from ..models.diffusion_gemma.loading import no_model_in, stored_run
from ..models.diffusion_gemma.lora import is_base
from ..models.diffusion_gemma.transformers_directory import CONFIG, TransformersDirectory
from ..models.diffusion_gemma.transformers_export import save_assets
from .changes import changed_flags
from .evaluation import Beat
from .exporting import Exporter
from .folders import ASSETS, BEST, forget_assets, is_iteration, keep_assets
from .logging import RunLogger
from .mistakes import TrainingFailed
from .status import RunStatus

if TYPE_CHECKING:
    from .loop import Trainer


@dataclass(frozen=True)
class Restored:
    """Where a run goes on: the iteration, what its adapters stand beside (TrainingState.base; empty without adapters), the checkpoint."""

    iteration: int
    base: Mapping[str, str]
    checkpoint: Path | None = None


def restore(trainer: Trainer) -> Restored:
    """Load --load's newest valid checkpoint, or the one that it names, or else --pretrained-checkpoint's weights. Adapters take both."""
    options, world = trainer.run.checkpoint, trainer.context.world
    found = None
    if options.load:
        folder = Path(options.load)
        found = (store.open_checkpoint(folder, world=world) if is_iteration(folder)
                 else store.find_newest(folder, lambda text: _say(trainer, text), world=world))
        if found is None and store.checkpoints_in(folder):
            raise ValueError(f"--load {folder}: none of its checkpoints is valid (see above); to start anew, move them away, or name "
                             "another folder")
        if found is None:
            _say(trainer, f"--load {folder} holds no checkpoint: starting "
                 + (f"from --pretrained-checkpoint {options.pretrained_checkpoint}" if options.pretrained_checkpoint else "at random"))
    if found is None and options.save and world.rank == 0:
        forget_assets(Path(options.save))
    base = _start(trainer) if found is None or trainer.has_adapters else {}
    if found is None:
        return Restored(0, base)
    _check_adapters(trainer, found, base)
    assets = _assets_folder(trainer)
    if assets is not None and world.rank == 0 and not assets.exists():  # another folder than the checkpoint's
        keep_assets(found.path, assets)
    _resume(trainer, found)
    _say(trainer, f"resuming from {found.path}, iteration {found.state.iteration}")
    if changed := changed_flags(found.arguments, to_arguments_text(trainer.run)):
        _say(trainer, f"changed since that checkpoint: {', '.join(changed)}")
    return Restored(found.state.iteration, base, found.path)


def _start(trainer: Trainer) -> Mapping[str, str]:
    """Take the weights of --pretrained-checkpoint, if there is one; what adapters then stand beside."""
    run, path = trainer.run, trainer.run.checkpoint.pretrained_checkpoint
    source = _load_pretrained(trainer, Path(path)) if path else None
    if not trainer.has_adapters:
        return {}
    base = {"path": "", "fingerprint": f"random weights of --seed {run.training.seed}, --init-method-std {run.model.init_method_std}"
            + ("" if run.training.use_cpu_initialization else ", drawn on the GPU")}
    if source is not None:
        base = {"path": str(Path(path).resolve()), "fingerprint": fingerprint(source, trainer.model.dtype)}
    _say(trainer, f"adapters of rank {run.lora.lora_rank}, alpha {run.lora.lora_alpha:g} for {', '.join(run.lora.lora_targets)}, beside "
         f"{base['path'] or base['fingerprint']}, which stays as it is")
    return base


def _check_adapters(trainer: Trainer, found: store.Checkpoint, base: Mapping[str, str]) -> None:
    """ValueError where a checkpoint holds adapters and the run has none, or others, or the other way round; or stands beside other weights.
    """
    if trainer.has_adapters and not found.state.base:
        raise ValueError(f"checkpoint {found.path} holds a whole model, and --lora-rank asks for adapters beside one: give it as "
                         "--pretrained-checkpoint, and another folder as --load and --save")
    theirs = found.state.base
    if not trainer.has_adapters and theirs:
        raise ValueError(f"checkpoint {found.path} holds adapters alone, beside {theirs['path'] or 'random weights'}: resume with "
                         "--lora-rank, or merge them (tools/checkpoint.py merge-adapters) and give the result as --pretrained-checkpoint")
    if not trainer.has_adapters:
        return
    stored, ours = asdict(stored_run(found).lora), asdict(trainer.run.lora)
    changed = [f"--{name.replace('_', '-')} {stored[name]} became {value}" for name, value in ours.items()
               if stored[name] != value and name != "lora_dropout"]
    if changed:
        raise ValueError(f"checkpoint {found.path} holds other adapters: {', '.join(changed)}; give the values of the run again")
    if theirs["fingerprint"] != base["fingerprint"]:
        raise ValueError(f"checkpoint {found.path} holds adapters of {theirs['path'] or theirs['fingerprint']}; this run's weights are "
                         f"others: {base['path'] or base['fingerprint']} (fingerprints {theirs['fingerprint'][:12]} and "
                         f"{base['fingerprint'][:12]}). Give those that they were trained with as --pretrained-checkpoint")


def _resume(trainer: Trainer, found: store.Checkpoint) -> None:
    if found.state.iteration and not found.has_optimizer:
        raise ValueError(f"checkpoint {found.path} holds weights alone; start from them with --pretrained-checkpoint")
    size, consumed = trainer.run.training.global_batch_size, found.state.consumed_rows
    if consumed != found.state.iteration * size:
        raise ValueError(f"--global-batch-size {size}: checkpoint {found.path} has consumed {consumed} rows in {found.state.iteration} "
                         f"iterations; resume with {consumed // max(found.state.iteration, 1)}, or start anew from --pretrained-checkpoint")
    _check_schedule(trainer, found)
    optimizer = trainer.optimizer
    optimizer.make_moments(found.state.optimizer_steps)
    shards = list(state_shards(trainer))
    found.check_all_held((shard.key for shard in shards), trainer.context.world, kinds=(MODEL,))
    found.load(shards)
    optimizer.refresh_parameters()


def _check_schedule(trainer: Trainer, found: store.Checkpoint) -> None:
    """ValueError where the learning rates to come are not those that the run was started with, unless --override-opt-param-scheduler."""
    stored, ours = found.state.schedule, schedule_values(trainer)
    changed = [f"{name} {stored[name]} became {value}" for name, value in ours.items() if name in stored and stored[name] != value]
    if not changed:
        return
    if not trainer.run.checkpoint.override_opt_param_scheduler:
        raise ValueError(f"checkpoint {found.path} was saved under another schedule of the learning rate: {', '.join(changed)}; give the "
                         f"run's own flags again (decay defaults to the length of the run: set --lr-decay-iters {stored.get('decay')}), or "
                         "--override-opt-param-scheduler to go on with the new one")
    _say(trainer, f"--override-opt-param-scheduler: {', '.join(changed)}")


def schedule_values(trainer: Trainer) -> dict[str, float | int | str]:
    """What the learning rates and the weight decay of a run follow from."""
    return asdict(trainer.schedule) | {"weight_decay": trainer.run.optimizer.weight_decay}


def state_shards(trainer: Trainer) -> Iterator[Shard]:
    """What this rank holds of a checkpoint: parameters and buffers, trained ones as their masters, and moments; of a run with
    adapters, these alone.
    """
    trained = trainer.optimizer.parameters
    for name, tensor in named_tensors(trainer.model) if not trainer.has_adapters else ():
        if name not in trained:
            yield Shard.placed(name, tensor, tensor.placement if isinstance(tensor, nn.Parameter) else None)
    yield from trainer.optimizer.shards()


def _load_pretrained(trainer: Trainer, path: Path) -> TensorSource:
    """Each rank reads its own rectangles alone; where from."""
    assets, world = _assets_folder(trainer), trainer.context.world
    keeps_assets = assets is not None and world.rank == 0 and not assets.exists()
    if (path / CONFIG).is_file():
        source = TransformersDirectory.open(path)
        load_tensors(trainer.model, source, str(path), wanted=is_base)
        if keeps_assets:
            save_assets(source, assets)
    else:
        source = (store.open_checkpoint(path, world=world, kinds=(MODEL,)) if path.name.startswith("iter_") else
                  store.find_newest(path, lambda text: _say(trainer, text), world=world, kinds=(MODEL,)))
        if source is None:
            raise ValueError(f"--pretrained-checkpoint {no_model_in(path)}")
        if source.state.base:
            raise ValueError(f"--pretrained-checkpoint {source.path} holds adapters alone; merge them with their base first "
                             "(tools/checkpoint.py merge-adapters)")
        source.check_all_held((name for name, _ in named_tensors(trainer.model)), world, kinds=(MODEL,))
        load_tensors(trainer.model, source, str(source.path), wanted=is_base)
        if keeps_assets:
            keep_assets(source.path, assets)
    trainer.optimizer.refresh_masters()
    _say(trainer, f"starting from the weights of {path}")
    return source


def _say(trainer: Trainer, text: str) -> None:
    if trainer.context.world.rank == 0:
        print(text, flush=True)


def _assets_folder(trainer: Trainer) -> Path | None:
    save = trainer.run.checkpoint.save
    return Path(save) / ASSETS if save else None


class Saver:
    """Saves a run's checkpoints and exports as its flags say, and keeps status.json. Every rank makes the same calls.

    A save that fails on the way is reported, and the run goes on; one at its end raises. `beat` is told of each phase and tensor.
    """

    def __init__(self, trainer: Trainer, logger: RunLogger, status: RunStatus, base: Mapping[str, str], beat: Beat):
        self.beat = beat
        self.trainer, self.logger, self.status, self.options, self.base = trainer, logger, status, trainer.run.checkpoint, base
        self.is_main = trainer.context.world.rank == 0
        self.saved: Path | None = None
        self.iteration = 0
        self.exporter = Exporter(trainer, logger, base, beat)
        self.best_loss = _best_so_far(self.options.save)
        self.writer = self._writer(Path(self.options.save)) if self.options.save else None
        if self.writer:
            self._announce(Path(self.options.save))

    def _writer(self, folder: Path) -> CheckpointWriter:
        retention = Retention(self.options.save_total_limit, self.options.save_retain_interval)
        return CheckpointWriter(folder, self.trainer.context.world, in_background=self.options.async_save, retention=retention,
                                observe=self._observe, on_tensor=self._observe)

    def _observe(self, what: str) -> None:
        self.beat(f"{what} of a checkpoint")

    def _announce(self, folder: Path) -> None:
        """The size of a checkpoint, and the room there is."""
        if not self.is_main:
            return
        size, free = checkpoint_bytes(self.trainer), shutil.disk_usage(folder).free
        self.logger.message(f"a checkpoint takes {describe_bytes(size)}; {folder} has {describe_bytes(free)} free"
                            + (f": room for {free // size}" if free < 20 * size else ""))

    def after(self, iteration: int) -> None:
        """What is due after an iteration."""
        self.iteration = iteration
        if self.writer and (outcome := self.writer.poll()):
            self._tell(outcome)
        if self.options.save and self.options.save_interval and iteration % self.options.save_interval == 0:
            self.save(iteration)
        if self.options.save_hf and self.options.save_hf_interval and iteration % self.options.save_hf_interval == 0:
            self.exporter.export(iteration)

    def after_evaluation(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Keep the model with the lowest evaluation loss under <save>/best."""
        loss = metrics["loss"]
        if self.options.save_best and self.options.save and loss < self.best_loss:
            folder = Path(self.options.save) / BEST
            writer = CheckpointWriter(folder, self.trainer.context.world, retention=Retention(total_limit=1), observe=self._observe,
                                      on_tensor=self._observe)
            outcome, = writer.save(self._state(iteration), state_shards(self.trainer), to_arguments_text(self.trainer.run))
            if outcome.path is None:
                self.logger.message(f"the best model so far could not be saved: {outcome.error}")
                return
            self.best_loss = loss
            if self.is_main:
                self._note_best(folder, outcome.path)
            self.logger.message(f"lowest evaluation loss so far, {loss:.6f}: saved to {folder}")

    def _note_best(self, folder: Path, path: Path) -> None:
        """Keep the loss for a restart, and no other checkpoint: of a later iteration neither, where the run was taken up from before it."""
        try:
            store.write_text(folder / "loss.txt", f"{self.best_loss!r}\n")
            for other in store.checkpoints_in(folder):
                if other != path:
                    shutil.rmtree(other)
        except OSError as error:  # the checkpoint is good all the same
            self.logger.message(f"{folder}: {error}; the run goes on, and a restart may take another model for the best")

    def finish(self, iteration: int, reason: str | None) -> None:
        """Save and export at the end of the run, and write how it ended. TrainingFailed where the last checkpoint is missing."""
        self.iteration = iteration
        is_saved = self._save_last(iteration) if self.writer else True
        # Also without the checkpoint: where exports have another disk, this is what is left of the last iterations.
        if self.options.save_hf and reason is None and self.exporter.newest != iteration:
            self.exporter.export(iteration)
        if not is_saved:
            raise TrainingFailed(f"the last checkpoint, of iteration {iteration}, could not be saved (see above); "
                                 f"the newest of this run is {self.status.checkpoint}")
        if reason is None:
            self.status.finished(iteration, checkpoint=self.saved, reason=self.exporter.summary() if self.exporter.failed else None)
        else:
            self.logger.message(f"stopped after iteration {iteration}: {reason}")
            self.status.stopped(iteration, reason, checkpoint=self.saved)

    def _save_last(self, iteration: int) -> bool:
        """Whether the checkpoint of the last iteration is there."""
        self._tell_all(self.writer.wait())
        path = store.iteration_folder(self.writer.folder, iteration)
        if self.saved != path:
            self.save(iteration)
            self._tell_all(self.writer.wait())
        self.writer.close()
        return self.saved == path

    def save(self, iteration: int) -> None:
        """Save now; in the background with --async-save."""
        self.trainer.optimizer.finish_gathers()
        self._tell_all(self.writer.save(self._state(iteration), state_shards(self.trainer), to_arguments_text(self.trainer.run)))

    def _tell_all(self, outcomes: list[SaveOutcome]) -> None:
        for outcome in outcomes:
            self._tell(outcome)

    def _tell(self, outcome: SaveOutcome) -> None:
        if outcome.path is None:
            newest = self.status.checkpoint or "none of this run's"
            newest += "" if self.status.checkpoint is None or Path(newest).is_dir() else ", which is gone"
            self.logger.message(f"SAVING ITERATION {outcome.iteration} FAILED: {outcome.error}; the newest checkpoint is {newest}")
            return
        self.saved = outcome.path
        self.status.progress(max(outcome.iteration, self.iteration), checkpoint=outcome.path)
        self.logger.message(f"saved {outcome.path} in {outcome.seconds:.1f} s")

    def _state(self, iteration: int) -> store.TrainingState:
        trainer = self.trainer
        return store.TrainingState(
            iteration, iteration * trainer.run.training.global_batch_size, trainer.optimizer.num_steps, trainer.context.sizes,
            schedule_values(trainer), self.base)


def checkpoint_bytes(trainer: Trainer) -> int:
    """Size of a checkpoint after the first step: trained parameters with two moments, all in fp32 at least, and what else it holds."""
    trained, size = trainer.optimizer.parameters, 0
    for name, tensor in named_tensors(trainer.model):
        if trainer.has_adapters and name not in trained:
            continue
        elements = torch.Size(getattr(tensor, "placement", tensor).shape).numel()
        size += elements * (3 * max(tensor.itemsize, 4) if name in trained else tensor.itemsize)
    return size


def _best_so_far(save: str | None) -> float:
    file = Path(save) / BEST / "loss.txt" if save else None
    return float(file.read_text()) if file is not None and file.is_file() else float("inf")
