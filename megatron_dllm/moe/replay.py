"""Dispatch replay: under activation recompute, a layer's routing decision is made once and used again.

The forward of a checkpointed call records, for each MoE layer in it, the chosen experts and the dispatcher's plan (permutation, counts,
split sizes, the backend's own handle); its recompute takes them from the record, in the same order, and computes only the probabilities
anew, at the recorded indices. So a recompute exchanges no layout, and tokens cannot go elsewhere than in the forward when rounding differs.

Each checkpointed call owns its log and each run of it its own place in that log: threads share nothing but the monitor's counts.
"""
from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..parallel import ParallelContext, communication


class ReplayError(RuntimeError):
    """What a recompute meets is not what its forward recorded; the gradients of the step cannot be used."""


@dataclass(frozen=True)
class Record:
    """What one MoE layer did in one forward: `indices` int64 [T, k], the dispatcher's `plan`, the experts' `fractions` [E] of the choices
    of all ranks (None without a loss on them), and the indices' fingerprint at that time (None: nobody keeps the record)."""

    layer: str
    indices: Tensor
    plan: Any
    fractions: Tensor | None
    fingerprint: Tensor | None = None

    @classmethod
    def of(cls, layer: str, indices: Tensor, plan: Any, fractions: Tensor | None = None) -> Record:
        return cls(layer, indices, plan, fractions)


def fingerprint(indices: Tensor) -> Tensor:
    """int64 []: a sum in which every place has a weight of its own, modulo 2^64. Computed where `indices` are, without waiting."""
    flat = indices.reshape(-1)
    place = torch.arange(1, len(flat) + 1, device=flat.device)
    return ((flat + 1) * (place * 0x2545F4914F6CDD1D).bitwise_xor(place << 7)).sum()


@dataclass(frozen=True)
class ReplayReport:
    """Of the recomputes since the last report: dispatches replayed, dispatches made anew, layers whose record changed."""

    hits: int
    misses: int
    corrupted: tuple[str, ...]

    def check(self, context: ParallelContext) -> None:
        """ReplayError, on every rank, if a record changed between forward and recompute on any. Every rank of the world calls it."""
        rank = context.world.rank
        faulty = torch.tensor(rank + 1 if self.corrupted else 0, device=context.device)
        faulty = int(communication.all_reduce(faulty, context.world, "max")) - 1
        if self.corrupted:
            raise ReplayError(
                f"rank {rank}: the routing recorded by {', '.join(self.corrupted)} changed before its recompute, so the gradients of "
                "this step are wrong and not used; something writes to memory that is not its own "
                "(--no-moe-recompute-replay runs without records)")
        if faulty >= 0:
            raise ReplayError(f"rank {rank}: stopping, because a routing record changed on rank {faulty}, whose message says more")


@dataclass(frozen=True)
class ReplayNotes:
    """Of some recomputes: dispatches replayed, dispatches made anew; by layer whether a record had changed, bool [] on the device."""

    hits: int = 0
    misses: int = 0
    differs: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class ReplayMonitor:
    """Adds up over all calls of a model; `report` once a step. Safe to use from several threads."""

    _hits: int = 0
    _misses: int = 0
    _differs: dict[str, Tensor] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note_hit(self, layer: str, differs: Tensor) -> None:
        """A replay; `differs` bool [] stays on the device until the report."""
        self.note(ReplayNotes(hits=1, differs={layer: differs}))

    def note_miss(self) -> None:
        """A recompute that dispatched anew."""
        self.note(ReplayNotes(misses=1))

    def drain(self) -> ReplayNotes:
        """What was noted since the last call, for `note` here or later; the device is not waited for."""
        with self._lock:
            notes = ReplayNotes(self._hits, self._misses, self._differs)
            self._hits, self._misses, self._differs = 0, 0, {}
        return notes

    def note(self, notes: ReplayNotes) -> None:
        """Add what a `drain` gave, as if it happened again."""
        with self._lock:
            self._hits, self._misses = self._hits + notes.hits, self._misses + notes.misses
            for layer, differs in notes.differs.items():
                self._differs[layer] = differs | self._differs[layer] if layer in self._differs else differs

    def report(self) -> ReplayReport:
        """What was noted since the last call. Reads the device once if anything was replayed."""
        notes = self.drain()
        flags = torch.stack(list(notes.differs.values())).tolist() if notes.differs else []
        return ReplayReport(notes.hits, notes.misses, tuple(layer for layer, changed in zip(notes.differs, flags, strict=True) if changed))


class Call:
    """How MoE layers take part in the run that they are called in: outside any checkpoint, they neither record nor replay."""

    is_recompute = False

    def recorded(self, layer: str, num_tokens: int) -> Record | None:
        """The record to follow, or None to decide anew."""
        return None

    def record(self, record: Record) -> None:
        """Keep what a layer decided."""


NOT_CHECKPOINTED = Call()


class CallLog:
    """The records of one checkpointed call, written by its first run, the forward, and read by every later one."""

    def __init__(self, monitor: ReplayMonitor, *, replays: bool):
        self.monitor, self.replays = monitor, replays
        self.records: list[Record] = []
        self.has_run = False

    def next_run(self) -> Call:
        """What the layers of the run that starts now get."""
        first, self.has_run = not self.has_run, True
        return _Forward(self) if first else _Recompute(self)


class _Forward(Call):
    def __init__(self, log: CallLog):
        self.log = log

    def record(self, record: Record) -> None:
        if self.log.replays:
            self.log.records.append(replace(record, fingerprint=fingerprint(record.indices)))


class _Recompute(Call):
    is_recompute = True

    def __init__(self, log: CallLog):
        self.log, self.next = log, 0

    def recorded(self, layer: str, num_tokens: int) -> Record | None:
        log, number = self.log, self.next
        self.next += 1
        if number >= len(log.records):
            log.monitor.note_miss()
            return None
        record = log.records[number]
        if (record.layer, len(record.indices)) != (layer, num_tokens):
            raise ReplayError(
                f"recompute: {layer} with {num_tokens} tokens comes where the forward had {record.layer} with {len(record.indices)} "
                f"(call {number} of this checkpoint); a checkpointed function must make the same calls each time")
        log.monitor.note_hit(layer, fingerprint(record.indices) != record.fingerprint)
        return record
