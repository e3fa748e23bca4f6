"""The folders of a run, looked at before anything costs time: they can be written to, and a restart will find its own checkpoints."""
from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from ..checkpoint import store
from ..config import RunConfig
from ..models.diffusion_gemma.transformers_directory import CONFIG

BEST = "best"  # of --save: the checkpoint with the lowest evaluation loss
ASSETS = "assets"  # of --save: what an export of the run carries through
EXPORTS = "exports.txt"  # of the run's folder: the directories that the run has exported to, and when the newest file of each was written


def check_folders(run: RunConfig) -> None:
    """Make the folders that the run writes to. ValueError, with flag and folder, for one that cannot be written to, that holds another
    run's checkpoints, or that holds none to load.
    """
    save, load = (Path(folder) if folder else None for folder in (run.checkpoint.save, run.checkpoint.load))
    for flag, folder in (("--save", save), ("--run-dir", run.logging.run_dir), ("--tensorboard-dir", run.logging.tensorboard_dir)):
        if folder:
            _check_writable(flag, Path(folder))
    if load and not store.checkpoints_in(load) and not is_iteration(load) and not _same(load, save):
        raise ValueError(f"--load {load} {'holds no checkpoint' if load.is_dir() else 'is no folder'}: give the folder of a run, or leave "
                         "--load out to start anew (only where it is --save as well may it be empty, for the first of several starts)")
    if save:
        _check_own(save, load)
    if run.checkpoint.save_hf:
        _check_export(run, Path(run.checkpoint.save_hf))


def forget_assets(save: Path) -> None:
    """Remove those of a start before this one, which may be another model's."""
    if (save / ASSETS).exists() and _are_of_a_model(save / ASSETS):
        shutil.rmtree(save / ASSETS)


def assets_of(checkpoint: Path) -> Path | None:
    """Where what an export of a checkpoint carries through is kept, if anywhere: beside it, or beside the folder `best` that it lies in."""
    places = [checkpoint.parent / ASSETS] + ([checkpoint.parent.parent / ASSETS] if checkpoint.parent.name == BEST else [])
    return next((place for place in places if place.is_dir()), None)


def keep_assets(checkpoint: Path, target: Path) -> None:
    """A copy of a checkpoint's assets, if it has any: whole, or none."""
    if (source := assets_of(checkpoint)) is not None:
        partial = target.with_name(target.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(source, partial)
        partial.rename(target)


def _are_of_a_model(assets: Path) -> bool:
    """A run keeps a model's configuration there before all else; a folder of this name may be anybody's."""
    if not (assets / CONFIG).is_file():
        return assets.is_dir() and not any(assets.iterdir())
    try:
        config = json.loads((assets / CONFIG).read_text(encoding="utf-8"))
    except ValueError:
        return False
    return isinstance(config, dict) and isinstance(config.get("text_config"), dict)


def is_iteration(folder: Path) -> bool:
    """Whether the folder is one checkpoint, not a run's with several in it."""
    return re.fullmatch(r"iter_\d{7,}", folder.name) is not None and folder.is_dir()


def export_folder(run: RunConfig, iteration: int) -> Path:
    """Where the export after an iteration goes: --save-hf, or with --save-hf-interval a folder of its own in there."""
    folder = Path(run.checkpoint.save_hf)
    return folder / f"iter_{iteration:07d}" if run.checkpoint.save_hf_interval else folder


def make_way(run: RunConfig, path: Path) -> None:
    """Remove what this run has exported to `path` before: it was taken up from an earlier checkpoint, or trains on."""
    if path.exists() and _is_own_export(run, path):
        shutil.rmtree(path)


def note_export(run: RunConfig, path: Path) -> None:
    """Remember that `path` is this run's."""
    if (notes := _notes(run)) is not None and not _is_own_export(run, path):
        with notes.open("a", encoding="utf-8") as file:
            file.write(_line(path))


def _is_own_export(run: RunConfig, path: Path) -> bool:
    """Not where somebody has put another folder at the path since."""
    notes = _notes(run)
    return notes is not None and notes.is_file() and path.exists() and _line(path) in notes.read_text(encoding="utf-8").splitlines(True)


def _line(path: Path) -> str:
    # In seconds, which copies keep.
    newest = max((int(file.stat().st_mtime) for file in path.iterdir()), default=0) if path.is_dir() else 0
    return f"{path.resolve()}\t{newest}\n"


def _notes(run: RunConfig) -> Path | None:
    folder = run.logging.run_dir or run.checkpoint.save
    return Path(folder) / EXPORTS if folder else None


def _check_export(run: RunConfig, folder: Path) -> None:
    """An export is made at the end, when it is too late to hear that it has no place."""
    if run.checkpoint.save_hf_interval:
        others = sorted(path for path in folder.glob("iter_*") if is_iteration(path) and not _is_own_export(run, path))
        if others:
            raise ValueError(f"--save-hf {folder} holds {_listed(others, folder)}, none of them an export of this run: give another "
                             "folder, or remove them")
        _check_writable("--save-hf", folder)
        return
    if folder.exists() and any(folder.iterdir() if folder.is_dir() else [folder]) and not _is_own_export(run, folder):
        raise ValueError(f"--save-hf {folder} exists, is not empty, and is no export of this run: give another folder, or remove it")
    _check_writable("--save-hf", folder.parent)


def _check_writable(flag: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        store.write_text(folder / ".writable", "")
        (folder / ".writable").unlink()
    except OSError as error:
        raise ValueError(f"{flag} {folder} cannot be written to: {error}; give a folder that can") from None


def _check_own(save: Path, load: Path | None) -> None:
    """What is in `save` is the run's own; other checkpoints than those that it goes on from a restart would take up in place of them."""
    if (save / ASSETS).exists() and not _are_of_a_model(save / ASSETS):
        raise ValueError(f"--save {save} holds {ASSETS}, which no run has made, and which exports would carry through: move it away, or "
                         "give another folder")
    there = [*store.checkpoints_in(save), *store.checkpoints_in(save / BEST)]
    if not there or _same(load, save):
        return
    go_on = f"add --load {save} to go on with that run"
    if load and is_iteration(load) and _same(load.parent, save):
        there = [path for path in store.checkpoints_in(save) if _iteration(path) > _iteration(load)]
        go_on = "move these away to go on from there"
    if there:
        raise ValueError(f"--save {save} holds {_listed(there, save)}, and this run starts {f'from {load}' if load else 'anew'}: a restart "
                         f"would take them for its own; {go_on}, or give another --save")


def _iteration(path: Path) -> int:
    return int(path.name.split("_")[1].removesuffix(store.REPLACED))


def _listed(paths: Sequence[Path], folder: Path) -> str:
    names = [str(path.relative_to(folder)) for path in paths]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _same(one: Path | None, other: Path | None) -> bool:
    return one is not None and other is not None and one.resolve() == other.resolve()
