"""Checkpoints under kill -9 and bad disks: whatever happens while one is saved, the newest valid one loads, whole.

A child process saves one checkpoint after another, at once or in the background, and tells the phase that it is in; it is killed at a
random moment of a chosen phase. Then the folder must give the last checkpoint that was published (or one that was just being), bit for bit,
and the next child goes on from there in the same folder. After that: a file system that fills up before and during a save, one that is
read-only, files cut short, with one bit turned, missing. Usage: python tools/verify.py crash [--quick] [--seed N]
"""
from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_dllm.checkpoint import store
from megatron_dllm.checkpoint.retention import Retention
from megatron_dllm.checkpoint.save import CheckpointWriter
from megatron_dllm.checkpoint.shards import Shard
from tools.refusal import Refusal
from verification.table import Figure, print_figures

PHASES = ("staging", "writing", "index", "last file", "pruning")
PER_PHASE = 5
# Big enough that each phase takes a time in which one can be hit; an odd count, several dtypes, an element alone.
SHAPES = {"embedding.weight": ((501, 1024), torch.float32), "layers.0.down": ((128, 1025), torch.bfloat16), "alpha": ((1,), torch.float32),
          "exp_avg/embedding.weight": ((501, 1024), torch.float32), "exp_avg_sq/embedding.weight": ((501, 1024), torch.float32)}
STATE_BYTES = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in SHAPES.values())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="50 kills instead of 200.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the moments.")


def run(arguments: argparse.Namespace) -> int:
    """Print the table; the number of missed figures."""
    torch.set_num_threads(1)
    generator = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        tried, faults, messages = kill_many(Path(folder) / "killed", 50 if arguments.quick else 200, generator)
        print(f"killed at: {', '.join(f'{phase} {tried[phase]}' for phase in PHASES)}; {sum(tried.values())} in all")
        for message in messages:
            print(f"  {message}")
        figures = [Figure(f"killed while {phase}: kills short of {PER_PHASE}", max(PER_PHASE - tried[phase], 0), 0, f"{tried[phase]} tried")
                   for phase in PHASES]
        figures += [Figure(f"killed while {phase}: newest checkpoint lost or not whole", len(faults[phase]), 0, f"{tried[phase]} survived")
                    for phase in PHASES]
        for found in (fault for phase in PHASES for fault in faults[phase]):
            print(f"  FAULT {found}")
        figures += [figure for case in CASES for figure in attempt(case, Path(folder))]
    return print_figures("crash", figures)


# What is saved: every element says its iteration.

def state_of(iteration: int) -> list[Shard]:
    shards = []
    for number, (key, (shape, dtype)) in enumerate(SHAPES.items()):
        values = (torch.arange(torch.Size(shape).numel()) * 7 + 1000 * iteration + number) % 4093
        shards.append(Shard.whole(key, values.view(shape).to(dtype)))
    return shards


def check_state(found: store.Checkpoint) -> str | None:
    """What is wrong with a loaded checkpoint; None for nothing."""
    if found.state.optimizer_steps != found.state.iteration:
        return f"{found.path}: state of step {found.state.optimizer_steps}"
    loaded = [Shard.whole(key, torch.zeros(shape, dtype=dtype)) for key, (shape, dtype) in SHAPES.items()]
    found.load(loaded)
    for wanted, shard in zip(state_of(found.state.iteration), loaded, strict=True):
        (left,), (right,) = wanted.rectangles.values(), shard.rectangles.values()
        if not torch.equal(left.tensor, right.tensor):
            return f"{found.path}: {shard.key} is not what was saved"
    return None


def save_one(writer: CheckpointWriter, iteration: int) -> list:
    return writer.save(store.TrainingState(iteration, iteration, iteration), state_of(iteration), f"# iteration {iteration}\n")


# Kills.

@dataclass(frozen=True)
class Kill:
    """When to kill: in this phase of the child's save number `save`, after a share of what the phase usually takes."""

    phase: str
    save: int
    share: float


def kill_many(folder: Path, wanted: int, generator: random.Random) -> tuple[Counter, dict[str, list[str]], list[str]]:
    """Kill until there are enough in each phase; how many were tried, what went wrong, and some of the reader's messages."""
    tried, faults, messages = Counter(), {phase: [] for phase in PHASES}, []
    usual = dict.fromkeys(PHASES, 0.005)
    newest, attempts = 0, 0
    while sum(tried.values()) < wanted or any(tried[phase] < PER_PHASE for phase in PHASES):
        attempts += 1
        if attempts > 20 * wanted:
            break
        rare = min(PHASES, key=lambda phase: (tried[phase], generator.random()))
        kill = Kill(rare, generator.randint(2, 4), generator.random())
        background = rare == "staging" or generator.random() < 0.5
        died_in, published = run_and_kill(folder, newest, kill, usual, background=background)
        tried[died_in] += 1
        said: list[str] = []
        found = store.find_newest(folder, said.append)
        if found is None or found.state.iteration < published:
            there = found and found.state.iteration
            faults[died_in].append(f"{kill}: {published} was published, {there} is there; {said}")
        elif fault := check_state(found):
            faults[died_in].append(f"{kill}: {fault}")
        newest = found.state.iteration if found else newest
        messages += [f"(killed while {died_in}) {text}" for text in said if len(messages) < 3]
    return tried, faults, messages


def run_and_kill(folder: Path, newest: int, kill: Kill, usual: dict[str, float], *, background: bool) -> tuple[str, int]:
    """Let a child save from iteration newest + 1 on and kill it; (phase that it died in, last iteration that it knew to be published)."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        save_until_killed(folder, newest, writing, background)
    os.close(writing)
    events = _Events(reading)
    events.wait_for(kill.phase, kill.save)
    time.sleep(kill.share * usual[kill.phase])
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    events.drain()
    os.close(reading)
    for phase, seconds in events.seconds.items():  # a running mean: the moments follow the machine's speed
        usual[phase] = 0.8 * usual[phase] + 0.2 * seconds
    return events.phase, max(events.published, newest)


def save_until_killed(folder: Path, newest: int, writing: int, background: bool) -> None:
    """The child's life: it ends by a kill, or with a status that the parent does not expect."""
    def tell(phase: str) -> None:
        os.write(writing, f"{time.monotonic()} {phase}\n".encode())

    try:
        writer = CheckpointWriter(folder, in_background=background, retention=Retention(total_limit=2), observe=tell)
        for iteration in range(newest + 1, newest + 1000):
            for outcome in [*save_one(writer, iteration), *writer.wait()]:
                assert outcome.error is None, outcome.error
                tell(f"published {outcome.iteration}")
    finally:
        os._exit(3)


class _Events:
    """What the child has told."""

    def __init__(self, reading: int):
        self.file = os.fdopen(os.dup(reading), "r")
        self.phase, self.published, self.since = "staging", 0, 0.0
        self.saves: Counter = Counter()
        self.seconds: dict[str, float] = {}

    def note(self, line: str) -> None:
        moment, _, what = line.strip().partition(" ")
        if self.phase in PHASES and self.since:
            self.seconds[self.phase] = float(moment) - self.since
        if what.startswith("published"):
            self.published = int(what.split()[1])
            self.since = 0.0
        else:
            self.phase, self.since = what, float(moment)
            self.saves[what] += 1

    def wait_for(self, phase: str, save: int) -> None:
        while self.saves[phase] < save:
            line = self.file.readline()
            assert line, "the child ended by itself"
            self.note(line)

    def drain(self) -> None:
        for line in self.file:
            if line.endswith("\n"):
                self.note(line)
        self.file.close()


# Bad disks and bad files. Each case gets a folder with checkpoints 1 and 2 and yields what must hold.

Case = Callable[[Path], Iterator[Figure]]


def attempt(case: Case, folder: Path) -> Iterator[Figure]:
    place = folder / case.__name__
    writer = CheckpointWriter(place)
    for iteration in (1, 2):
        save_one(writer, iteration)
    yield from case(place)


def survives(name: str, folder: Path, iteration: int, named: str, said: list[str]) -> list[Figure]:
    """The checkpoint of `iteration` is the newest, and whole; `named` stands in what was said."""
    found = store.find_newest(folder, said.append)
    fault = "none is found" if found is None else f"{found.path.name}" if found.state.iteration != iteration else check_state(found)
    text = " | ".join(said)
    print(f"{name}: {text}".replace(str(folder), "RUN"))
    return [Figure(f"{name}: iteration {iteration} not loaded whole", float(fault is not None), 0, fault or "loaded, equal"),
            Figure(f"{name}: message does not name what it is about", float(named not in text), 0, Path(named).name)]


def truncated_shard(folder: Path) -> Iterator[Figure]:
    file = folder / "iter_0000002" / "model_00000.safetensors"
    os.truncate(file, file.stat().st_size - 1000)
    yield from survives("truncated shard", folder, 1, str(file), [])


def flipped_bit(folder: Path) -> Iterator[Figure]:
    file = folder / "iter_0000002" / "optimizer_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(content)
    yield from survives("bit turned in a shard", folder, 1, str(file), [])


def missing_shard(folder: Path) -> Iterator[Figure]:
    file = folder / "iter_0000002" / "model_00000.safetensors"
    file.unlink()
    yield from survives("missing shard", folder, 1, f"{file} is missing: the part of rank 0", [])


def truncated_last_file(folder: Path) -> Iterator[Figure]:
    file = folder / "iter_0000002" / store.COMPLETE
    os.truncate(file, file.stat().st_size // 2)
    yield from survives("truncated last file", folder, 1, str(file), [])


def failed_write(folder: Path) -> Iterator[Figure]:
    """The system refuses to let the file grow in the midst of it."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (STATE_BYTES // 4, limits[1]))
        said = [outcome.error for outcome in _save_in_both_ways(folder)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    yield from survives("write refused on the way", folder, 2, "model_00000.safetensors", said)
    yield Figure("write refused on the way: files left behind", len(list(folder.glob("*.partial"))), 0, "none")


def full_disk(folder: Path) -> Iterator[Figure]:
    """No room is seen before a byte is written; a disk that fills up meanwhile fails in the write."""
    with file_system(folder.with_name("full"), STATE_BYTES * 4 + (70 << 20)) as small:
        shutil.copytree(folder, small, dirs_exist_ok=True)
        filler = small / "filler"

        def fill(phase: str) -> None:
            if phase == "writing":
                with filler.open("wb") as file:
                    file.truncate(0)
                    try:
                        while file.write(bytes(1 << 20)):
                            file.flush()
                    except OSError:
                        pass

        writer = CheckpointWriter(small, in_background=True, observe=fill)
        save_one(writer, 3)
        said = [outcome.error for outcome in writer.wait()]
        writer.close()
        yield from survives("disk fills up on the way", small, 2, "model_00000.safetensors", said)
        refused = [outcome.error for outcome in save_one(CheckpointWriter(small), 3)]
        yield from survives("full disk", small, 2, "are free", refused)
        filler.unlink()
        save_one(CheckpointWriter(small), 3)
        yield from survives("after room was made", small, 3, "", [])


def read_only_directory(folder: Path) -> Iterator[Figure]:
    if os.geteuid():
        folder.chmod(0o555)
        said = [outcome.error for outcome in _save_in_both_ways(folder)]
        yield from survives("read-only directory", folder, 2, "iter_0000003.partial", said)
        folder.chmod(0o755)
        return
    with file_system(folder.with_name("read only"), STATE_BYTES * 4 + (70 << 20)) as mounted:  # root may write into any directory
        shutil.copytree(folder, mounted, dirs_exist_ok=True)
        subprocess.run(["mount", "-o", "remount,ro", str(mounted)], check=True)
        said = [outcome.error for outcome in _save_in_both_ways(mounted)]
        yield from survives("read-only directory", mounted, 2, "iter_0000003.partial", said)


def _save_in_both_ways(folder: Path) -> list:
    outcomes = []
    for background in (False, True):
        writer = CheckpointWriter(folder, in_background=background)
        outcomes += [*save_one(writer, 3), *writer.wait()]
        writer.close()
    return outcomes


@contextmanager
def file_system(folder: Path, num_bytes: int) -> Iterator[Path]:
    """A small file system in memory. It takes root, or `unshare --map-root-user --mount python tools/verify.py crash`."""
    folder.mkdir()
    mounting = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)], capture_output=True, text=True)
    if mounting.returncode:
        raise Refusal(f"cannot mount a small file system ({mounting.stderr.strip()}); run as "
                      "unshare --map-root-user --mount python tools/verify.py crash")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


CASES: tuple[Case, ...] = (truncated_shard, flipped_bit, missing_shard, truncated_last_file, failed_write, full_disk, read_only_directory)
