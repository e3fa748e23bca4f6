"""Checkpoints on disk: safetensors for tensors, JSON for everything else, valid once the last file is in place.

    <folder>/iter_0000100/model.safetensors        every parameter and buffer by global name, trainable ones as their fp32 masters
                          optimizer.safetensors    the moments: exp_avg/<name>, exp_avg_sq/<name>
                          state.json               iteration, consumed rows, optimizer steps, versions
                          args.txt                 the run's flags, valid as @args.txt
                          complete.json            written last: size and SHA-256 of every other file
    <folder>/latest_checkpointed_iteration.txt     its number, as scripts expect
"""
from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import safetensors
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .. import __version__

LATEST, COMPLETE, STATE, ARGUMENTS = "latest_checkpointed_iteration.txt", "complete.json", "state.json", "args.txt"
MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
FORMAT = 1


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the text names the file."""


@dataclass(frozen=True)
class TrainingState:
    """Where a run stands: finished iterations, rows it has consumed, updates made."""

    iteration: int
    consumed_rows: int
    optimizer_steps: int


@dataclass(frozen=True)
class Checkpoint:
    """An opened, complete checkpoint."""

    path: Path
    state: TrainingState

    @property
    def arguments(self) -> str:
        """The flags of the run that saved it."""
        return (self.path / ARGUMENTS).read_text(encoding="utf-8")

    def model(self) -> dict[str, Tensor]:
        """Tensors by global name."""
        return _read_tensors(self.path / MODEL)

    def optimizer(self) -> dict[tuple[str, str], Tensor]:
        """Moments by (name, state)."""
        return {(name, state): tensor for key, tensor in _read_tensors(self.path / OPTIMIZER).items() for state, name in [key.split("/", 1)]}


def iteration_folder(folder: Path, iteration: int) -> Path:
    """Where the checkpoint of an iteration lies."""
    return folder / f"iter_{iteration:07d}"


def save(folder: Path, state: TrainingState, *, model: Mapping[str, Tensor], optimizer: Mapping[tuple[str, str], Tensor],
         arguments: str) -> Path:
    """Write a checkpoint; OSError (disk full, read-only) leaves earlier ones as they were. Returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    target = iteration_folder(folder, state.iteration)
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in model.items()}, partial / MODEL)
    save_file({f"{state_name}/{name}": tensor.contiguous() for (name, state_name), tensor in optimizer.items()}, partial / OPTIMIZER)
    versions = {"megatron_dllm": __version__, "torch": torch.__version__, "safetensors": safetensors.__version__}
    write_text(partial / STATE, json.dumps({"format": FORMAT, **asdict(state), "versions": versions}, indent=2) + "\n")
    write_text(partial / ARGUMENTS, arguments)
    files = {file.name: {"bytes": file.stat().st_size, "sha256": _digest(file)} for file in sorted(partial.iterdir())}
    write_text(partial / COMPLETE, json.dumps({"format": FORMAT, "files": files}, indent=2) + "\n")
    _replace_folder(partial, target)
    write_text(folder / LATEST, f"{state.iteration}\n")
    return target


def _replace_folder(partial: Path, target: Path) -> None:
    """Put the folder under its name; one that is there already (saved twice) goes away only after."""
    if target.exists():
        old = target.with_name(target.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
        partial.rename(target)
        shutil.rmtree(old)
    else:
        partial.rename(target)


def write_text(path: Path, text: str) -> None:
    """Write a small file so that at any moment it is the old one or the new one, whole."""
    temporary = path.with_name(path.name + ".writing")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def find_newest(folder: Path, report: Callable[[str], None] = print) -> Checkpoint | None:
    """The newest valid checkpoint in `folder`; what is skipped, and why, goes to `report`. None when there is none."""
    names = sorted(folder.glob("iter_*"), reverse=True) if folder.is_dir() else []
    for path in (name for name in names if re.fullmatch(r"iter_\d{7,}", name.name)):
        try:
            return open_checkpoint(path)
        except CheckpointError as error:
            report(f"skipping checkpoint {path.name}: {error}")
    return None


def open_checkpoint(path: Path) -> Checkpoint:
    """Open the checkpoint of one iteration after checking every file against its size and checksum; CheckpointError names what is wrong."""
    recorded = _read_json(path / COMPLETE).get("files", {})
    for name, wanted in recorded.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing")
        if file.stat().st_size != wanted["bytes"]:
            raise CheckpointError(f"{file} has {file.stat().st_size} bytes, {wanted['bytes']} were written")
        if _digest(file) != wanted["sha256"]:
            raise CheckpointError(f"{file} has changed since it was written (its checksum differs)")
    missing = {MODEL, OPTIMIZER, STATE, ARGUMENTS} - set(recorded)
    if missing:
        raise CheckpointError(f"{path / COMPLETE} does not list {', '.join(sorted(missing))}")
    state = _read_json(path / STATE)
    if state.get("format") != FORMAT:
        raise CheckpointError(f"{path / STATE} has format {state.get('format')}, this version reads {FORMAT}")
    return Checkpoint(path, TrainingState(**{name: state[name] for name in TrainingState.__dataclass_fields__}))


def _read_json(path: Path) -> dict:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: the checkpoint was not finished")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
