"""Worlds of gloo processes for tests: started once, they run many cases; a hanging or failing rank fails its test with its stack.

For example:

    def sum_of_ranks(rank, offset):                 # any function of a module, called on every rank
        value = torch.tensor([rank + offset])
        dist.all_reduce(value)
        return value

    def test_sum(world):                            # the fixture of tests/parallel/conftest.py: one world for the whole session
        for value in world.run(sum_of_ranks, 10, size=3):
            assert value.item() == 33
"""

import faulthandler
import multiprocessing
import os
import pickle
import random
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

# Above every case's own timeout, so that a hang is reported with all stacks and not as one rank's lost connection.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
# After one rank fails or is found hanging: how long the others may take to end by themselves, or to write their stacks.
GRACE_SECONDS = 3.0
START_SECONDS = 120.0


class RankFailure(Exception):
    """One or more ranks raised, hung or died; the message holds what each of them was doing."""


@dataclass(frozen=True)
class Case:
    """What one rank gets through its pipe."""

    number: int
    size: int
    function: Callable[..., Any]
    arguments: tuple
    filters: list[tuple]


@dataclass(frozen=True)
class Outcome:
    """What one rank sends back; `traceback` is None if it returned."""

    value: Any
    traceback: str | None


class World:
    """`processes` workers that stay alive between cases; each case gets a fresh default process group over its first `size` ranks.

    They start with the first case, and again after a case that left one of them hanging or dead.
    """

    def __init__(self, processes: int):
        self.processes = processes
        self._workers: list[multiprocessing.Process] = []
        self._pipes: list[Connection] = []
        self._cases = 0

    def run(self, function: Callable[..., Any], *arguments: Any, size: int | None = None, timeout: float = 60.0) -> list[Any]:
        """Call `function(rank, *arguments)` on the first `size` ranks (default all); their results by rank, copied by pickle.

        Every rank starts with the same seeds (0), one thread, NaN in fresh memory and this process's warning filters. Raises
        RankFailure when a rank raises, dies or has not returned after `timeout` seconds (starting the workers is not counted).
        """
        __tracebackhide__ = True
        size = self.processes if size is None else size
        if not 1 <= size <= self.processes:
            raise ValueError(f"size={size}: a world of {self.processes} processes runs cases of 1 to {self.processes} ranks")
        if not self._workers:
            self._start()
        self._cases += 1
        message = pickle.dumps(Case(self._cases, size, function, arguments, list(warnings.filters)))
        for pipe in self._pipes[:size]:
            pipe.send_bytes(message)
        outcomes = self._collect(size, timeout)
        failed = [rank for rank, outcome in outcomes.items() if outcome.traceback is not None]
        if len(outcomes) == size and not failed:
            return [outcomes[rank].value for rank in range(size)]
        report = self._report(outcomes, size, timeout)
        if len(outcomes) < size:
            self.close()
        raise RankFailure(report)

    def close(self) -> None:
        """End every worker, hanging ones too; a later `run` starts new ones."""
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.join()
        for pipe in self._pipes:
            pipe.close()
        if self._workers:
            self._folder.cleanup()
            del self._store
        self._workers, self._pipes = [], []

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="world-")
        # Port 0 lets the system choose; the store lives here, so no port is guessed and then lost to another process.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        for rank in range(self.processes):
            ours, theirs = context.Pipe()
            settings = (rank, theirs, self._store.port, self._output(rank), self._stack(rank))
            worker = context.Process(target=_serve, args=settings, name=f"rank {rank}", daemon=True)
            worker.start()
            theirs.close()
            self._workers.append(worker)
            self._pipes.append(ours)
        ready = self._collect(self.processes, START_SECONDS)
        if len(ready) < self.processes:
            report = self._report(ready, self.processes, START_SECONDS)
            self.close()
            raise RankFailure(f"the world did not start\n{report}")

    def _output(self, rank: int) -> Path:
        return Path(self._folder.name, f"output{rank}.txt")

    def _stack(self, rank: int) -> Path:
        return Path(self._folder.name, f"stack{rank}.txt")

    def _collect(self, size: int, timeout: float) -> dict[int, Outcome]:
        """Outcomes in order of arrival; ranks that died, or are still at work when time is up, are missing."""
        outcomes: dict[int, Outcome] = {}
        waiting = {self._pipes[rank]: rank for rank in range(size)}
        deadline = time.monotonic() + timeout
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left):
                rank = waiting.pop(pipe)
                try:
                    outcomes[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:  # the process is gone
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                    continue
                if outcomes[rank].traceback is not None:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return outcomes

    def _report(self, outcomes: dict[int, Outcome], size: int, timeout: float) -> str:
        """What each rank did: failures in order of arrival, then the dead, then the stacks of those still at work."""
        failures = [(rank, outcome.traceback) for rank, outcome in outcomes.items() if outcome.traceback is not None]
        parts = [f"rank {rank} raised:\n{text}" for rank, text in failures]
        missing = [rank for rank in range(size) if rank not in outcomes]
        for rank in missing:
            self._workers[rank].join(0.1)
        hanging = [rank for rank in missing if self._workers[rank].exitcode is None]
        parts += [f"rank {rank} died with exit code {self._workers[rank].exitcode}" for rank in missing if rank not in hanging]
        parts += [f"rank {rank} {self._hang(timeout, bool(failures))}\n{stack}" for rank, stack in self._stacks(hanging).items()]
        returned = [rank for rank, outcome in outcomes.items() if outcome.traceback is None]
        if returned:
            parts.append(f"ranks {sorted(returned)} returned")
        for rank in [rank for rank, _ in failures] + missing:
            output = self._output(rank).read_text(errors="replace")[-2000:].strip()
            parts += [f"rank {rank} printed last:\n{output}"] if output else []
        return "\n\n".join(parts)

    @staticmethod
    def _hang(timeout: float, after_failure: bool) -> str:
        return f"was still at work {GRACE_SECONDS:g} s after that:" if after_failure else f"was still at work after {timeout:g} s:"

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        """The Python stack of every thread of each rank, also of ranks that are blocked in C code."""
        for rank in ranks:
            os.kill(self._workers[rank].pid, signal.SIGUSR1)
        end = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < end and not all(_written(self._stack(rank)) for rank in ranks):
            time.sleep(0.05)
        return {rank: _threads(self._stack(rank)) for rank in ranks}


def run_world(size: int, function: Callable[..., Any], *arguments: Any, timeout: float = 60.0) -> list[Any]:
    """World(size).run(function, *arguments), with processes of its own: for cases that harm their process; otherwise share a World."""
    __tracebackhide__ = True
    world = World(size)
    try:
        return world.run(function, *arguments, timeout=timeout)
    finally:
        world.close()


def _written(path: Path) -> bool:
    return path.exists() and "Current thread" in path.read_text()


def _threads(path: Path) -> str:
    if not _written(path):
        return "(no stack was written)"
    return "\n\n".join(thread for thread in path.read_text().split("\n\n") if "in _end_with_parent" not in thread).strip()


def _serve(rank: int, pipe: Connection, port: int, output: Path, stack: Path) -> None:
    """A worker's life: one case after another, until the pipe closes."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):  # gloo prints from C++
        os.dup2(descriptor, stream)
    sys.stdout.reconfigure(line_buffering=True)
    stack_file = open(stack, "w")  # stays open: faulthandler writes to its descriptor
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # The host's own name need not resolve (macOS), and no other machine is involved.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    pipe.send_bytes(pickle.dumps(Outcome("ready", None)))
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        pipe.send_bytes(_run_case(rank, message, store))


def _run_case(rank: int, message: bytes, store: dist.Store) -> bytes:
    """The pickled Outcome of one case. BaseException: a case may end in SystemExit or KeyboardInterrupt, and its test wants to know."""
    try:
        case: Case = pickle.loads(message)
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        torch.set_deterministic_debug_mode("error")  # fresh memory holds NaN, as in every test (tests/conftest.py)
        with warnings.catch_warnings():
            _apply(case.filters)
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(f"case {case.number}", store),
                rank=rank,
                world_size=case.size,
                timeout=COLLECTIVE_TIMEOUT,
            )
            value = case.function(rank, *case.arguments)
        return pickle.dumps(Outcome(value, None))
    except BaseException:  # noqa: B036
        return pickle.dumps(Outcome(None, traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        torch.set_default_dtype(torch.float32)


def _apply(filters: list[tuple]) -> None:
    warnings.resetwarnings()
    for action, message, category, module, line in filters:
        warnings.filterwarnings(action, _pattern(message), category, _pattern(module), line, append=True)


def _pattern(entry: re.Pattern | str | None) -> str:
    """What `filterwarnings` wants, of what it keeps (the interpreter's own first filters keep plain strings)."""
    return entry.pattern if isinstance(entry, re.Pattern) else entry or ""


def _end_with_parent() -> None:
    # Without this, a killed test run would leave ranks waiting for each other.
    multiprocessing.parent_process().join()
    os._exit(1)
