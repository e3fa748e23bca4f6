"""Who we are in each process group. A ParallelContext is passed to whoever communicates; there is no global one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Sent:
    """Calls and bytes by (kind, group), as the log counts them."""

    calls: dict[tuple[str, str], int] = field(default_factory=dict)
    sent_bytes: dict[tuple[str, str], int] = field(default_factory=dict)


@dataclass
class CommunicationLog:
    """What this rank has sent: calls and bytes by (kind, group), counted in the call itself; and what is under way.
    `started` counts over the whole run.

    Bytes are those that leave this rank under a bandwidth-optimal (ring) algorithm.
    """

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    sent_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    under_way: dict[int, str] = field(default_factory=dict)
    last: str = "nothing yet"
    started: int = 0

    def start(self, kind: str, group_name: str, sent_bytes: int, description: str) -> Callable[[], None]:
        """Count a call; returns what to call when it has ended."""
        self.calls[kind, group_name] += 1
        self.sent_bytes[kind, group_name] += sent_bytes
        self.last = description
        self.started += 1
        key = self.started
        self.under_way[key] = description
        return lambda: self.under_way.pop(key, None)

    def total(self, kind: str | None = None, group_name: str | None = None) -> tuple[int, int]:
        """(calls, bytes) of one kind, one group, or all."""
        keys = [k for k in self.calls if kind in (None, k[0]) and group_name in (None, k[1])]
        return sum(self.calls[k] for k in keys), sum(self.sent_bytes[k] for k in keys)

    def by_kind(self) -> dict[str, tuple[int, int]]:
        """(calls, bytes) of each kind over all groups."""
        return {kind: self.total(kind) for kind in sorted({k[0] for k in self.calls})}

    def clear(self) -> None:
        """Start counting anew."""
        self.calls.clear()
        self.sent_bytes.clear()

    def drain(self) -> Sent:
        """What was counted since the last `clear` or `drain`, for `add` here or later."""
        sent = Sent(dict(self.calls), dict(self.sent_bytes))
        self.clear()
        return sent

    def add(self, sent: Sent) -> None:
        """Count what a `drain` gave, as if it was sent again: a recording's calls, when it is replayed."""
        self.calls.update(sent.calls)
        self.sent_bytes.update(sent.sent_bytes)


@dataclass(frozen=True)
class Group:
    """The ranks that share one axis with us; `rank` is ours among them, `ranks` are their numbers in the world."""

    name: str
    size: int
    rank: int
    process_group: ProcessGroup | None
    ranks: tuple[int, ...]
    log: CommunicationLog = field(default_factory=CommunicationLog, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert self.size == len(self.ranks) and 0 <= self.rank < self.size, f"group {self.name}: rank {self.rank} of {self.ranks}"

    @staticmethod
    def single(name: str, rank: int = 0, log: CommunicationLog | None = None) -> Group:
        """A group of the process `rank` alone, over which every collective is the identity."""
        return Group(name, 1, 0, None, (rank,), CommunicationLog() if log is None else log)

    @property
    def handle(self) -> ProcessGroup:
        """The process group; RuntimeError where none was created (torch would take None for the whole world)."""
        if self.process_group is None:
            raise RuntimeError(
                f"group {self.name} of ranks {self.ranks} has no process group; take it from parallel.initialize, which creates every group"
            )
        return self.process_group


@dataclass(frozen=True)
class ParallelContext:
    """This process in two grids over one world: dense (tp, cp, dp, pp) and expert (etp, ep, edp, pp).

    dp_cp is dp and cp together: the ranks over which gradients of dense parameters are summed; those of experts are
    summed over edp.
    """

    tp: Group
    cp: Group
    dp: Group
    pp: Group
    ep: Group
    etp: Group
    edp: Group
    dp_cp: Group
    world: Group
    sequence_parallel: bool
    device: torch.device
    log: CommunicationLog = field(repr=False, compare=False)

    @staticmethod
    def single(device: str | torch.device = "cpu") -> ParallelContext:
        """One process, no process groups: every collective is the identity."""
        log = CommunicationLog()
        groups = {name: Group.single(name, log=log) for name in GROUP_NAMES}
        return ParallelContext(**groups, sequence_parallel=False, device=torch.device(device), log=log)

    @property
    def sizes(self) -> dict[str, int]:
        """The ranks along each axis of both grids."""
        return {axis: self.group(axis).size for axis in AXES}

    def group(self, axis: str) -> Group:
        """The group named `axis`."""
        if axis not in GROUP_NAMES:
            raise ValueError(f"no axis {axis!r}; there are {', '.join(GROUP_NAMES)}")
        return getattr(self, axis)


AXES = ("tp", "cp", "dp", "pp", "ep", "etp", "edp")
GROUP_NAMES = (*AXES, "dp_cp", "world")
