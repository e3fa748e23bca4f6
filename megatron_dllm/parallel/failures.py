"""One rank's failure is the failure of all: who failed first, and why, is told through the store, when no collective can tell it."""

from __future__ import annotations

import sys
import time
from types import TracebackType

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from .context import Group

KEY = "first failure"
SAID_EVERY = 60.0  # seconds
LONGEST_SLEEP = 1.0  # seconds


class OtherRankFailed(RuntimeError):
    """This rank cannot go on since another one failed: the text says which, and of what."""


class FirstFailure:
    """While entered: the first rank that an exception ends says so to the others.

    An exception of its own that is just what follows (a lost connection, or the same words) becomes an OtherRankFailed. Any other passes.
    """

    def __init__(self, world: Group):
        self._world = world

    def __enter__(self) -> FirstFailure:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None or self._world.size == 1 or isinstance(error, OtherRankFailed):
            return
        text = describe(error)
        # torch's lost connections are plain RuntimeErrors, or its own that derive from it.
        follows = type(error) is RuntimeError or isinstance(error, dist.DistError)
        try:
            rank, _, first = _get_default_store().compare_set(KEY, "", f"{self._world.rank} {text}").decode().partition(" ")
        except dist.DistError:  # the store has ended with the process that holds it: the launcher's, or rank 0
            if follows and self._world.rank != 0:
                raise OtherRankFailed("rank 0, or the launcher, has ended: see what it says") from None
            return
        if int(rank) != self._world.rank and (follows or first == text):
            raise OtherRankFailed(f"rank {rank} failed: {first_line(first)}") from None


class FirstRankFirst:
    """Rank 0 runs the block alone, then all others run it, however long it takes: no collective, and no limit of one, is at work.

    Where the block fails on rank 0 the others raise OtherRankFailed. `what` is what rank 0 does there, as in "prepares the data".
    """

    def __init__(self, world: Group, what: str):
        self._world, self._what = world, what

    def __enter__(self) -> None:
        if self._world.size == 1:
            return
        self._store = dist.PrefixStore(self._what, _get_default_store())
        # Every rank counts its own calls, so that a second block waits for its own end.
        self._key = f"end {self._store.add(f'calls of {self._world.rank}', 1)}"
        if self._world.rank != 0 and (failure := self._wait()):
            raise OtherRankFailed(f"rank 0 failed: {failure}")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._world.size > 1 and self._world.rank == 0:
            self._store.set(self._key, "" if error is None else first_line(describe(error)))

    def _wait(self) -> str:
        """Until rank 0 has left the block; what it failed of, or ""."""
        started = said = time.monotonic()
        sleep = 0.001
        while not self._store.check([self._key]):
            time.sleep(sleep)
            sleep = min(2 * sleep, LONGEST_SLEEP)
            if self._world.rank == 1 and time.monotonic() - said >= SAID_EVERY:
                said = time.monotonic()
                sys.stderr.write(f"rank 0 {self._what}, since {(said - started) / 60:.0f} min; the other ranks wait\n")
        return self._store.get(self._key).decode()


def first_line(text: str) -> str:
    """Of a message that may be a table, or nothing."""
    return text.strip().partition("\n")[0] or "an error without a text"


def describe(error: BaseException) -> str:
    """The exception's type and text; of a ValueError, which is told to people, the text alone."""
    return str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
