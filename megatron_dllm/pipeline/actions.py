"""What one rank does in one step of a pipeline schedule, as a value that prints as a short token and parses back.

A token reads: kind, edge (transfers only), microbatch . chunk, one ' if it is loop 1, then the peer's rank, and ! if it is a wait.

    F3.1     forward of microbatch 3 through this rank's chunk 1, loop 0      F3.1'    the same, loop 1
    B3.1     backward: input gradient and weight gradient                     I3.1     input gradient alone
    W3.1     weight gradient alone, of all loops of microbatch 3              E3.1     d(soft embedding) into the embedding's gradient
    Sh3.1>2  start to send to rank 2 what F3.1 gave                           Sh3.1>2! wait until it has left (its buffer may go)
    Rg3.1<2  start to receive from rank 2 what B3.1 needs                     Rg3.1<2! wait until it is here
    G.1      reduce the gradients of chunk 1, which are complete

A transfer carries the microbatch, chunk and loop of *this* rank's end of the edge: of the compute step whose result it sends or whose input
it receives. A transfer whose peer is the own rank hands the tensor over inside the process, in the same order of sends and receives.
"""

import re
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """The letter that heads a token."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"
    EMBEDDING_GRADIENT = "E"
    SEND = "S"
    RECEIVE = "R"
    WAIT_SEND = "S!"
    WAIT_RECEIVE = "R!"
    REDUCE = "G"


class Edge(StrEnum):
    """What a transfer carries; edges.py gives its shape."""

    HIDDEN = "h"
    """Residual streams, from a stage's forward to the next stage's."""
    GRADIENT = "g"
    """Gradient of the residual streams, from a stage's backward to the previous stage's."""
    SOFT_EMBEDDING = "s"
    """Self-conditioning signal, from the last stage's loop 0 to the first stage's loop 1."""
    SOFT_EMBEDDING_GRADIENT = "d"
    """Its gradient, from the first stage's loop 1 back to the last stage."""


COMPUTE_KINDS = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT, Kind.EMBEDDING_GRADIENT})
SEND_KINDS = frozenset({Kind.SEND, Kind.WAIT_SEND})
POST_KINDS = frozenset({Kind.SEND, Kind.RECEIVE})
WAIT_KINDS = frozenset({Kind.WAIT_SEND, Kind.WAIT_RECEIVE})
# The transfer that a wait completes.
STARTED_BY = {Kind.WAIT_SEND: Kind.SEND, Kind.WAIT_RECEIVE: Kind.RECEIVE}

_TOKEN = re.compile(
    r"(?P<compute>[FBIWE])(?P<slot>\d+\.\d+'?)"
    r"|(?P<reduce>G)\.(?P<reduced>\d+)"
    r"|(?P<transfer>[SR])(?P<edge>[hgsd])(?P<end>\d+\.\d+'?)(?P<arrow>[<>])(?P<peer>\d+)(?P<wait>!?)"
)


class Action(NamedTuple):
    """One step. `microbatch` is None for a reduction only; `edge` and `peer` are there for transfers only."""

    kind: str
    microbatch: int | None
    chunk: int
    loop: int = 0
    edge: str | None = None
    peer: int | None = None

    def __str__(self) -> str:
        if self.kind == Kind.REDUCE:
            return f"G.{self.chunk}"
        slot = f"{self.microbatch}.{self.chunk}{chr(39) * self.loop}"
        if self.edge is None:
            return f"{self.kind}{slot}"
        arrow = ">" if self.kind in SEND_KINDS else "<"
        return f"{self.kind[0]}{self.edge}{slot}{arrow}{self.peer}{self.kind[1:]}"


def parse_action(token: str) -> Action:
    """The action that prints as `token`; ValueError if there is none."""
    match = _TOKEN.fullmatch(token)
    if not match:
        raise ValueError(
            f"{token!r} is no action: expected a compute step such as F3.1 or B3.1', a transfer such as Sh3.1>2, Rg3.1<2 or Rg3.1<2!, "
            "or a reduction such as G.1"
        )
    if match["compute"]:
        return Action(Kind(match["compute"]), *_slot(match["slot"]))
    if match["reduce"]:
        return Action(Kind.REDUCE, None, int(match["reduced"]))
    if (match["transfer"] == "S") != (match["arrow"] == ">"):
        raise ValueError(f"{token!r} is no action: a send (S) points to its peer with >, a receive (R) comes from it with <")
    return Action(Kind(match["transfer"] + match["wait"]), *_slot(match["end"]), Edge(match["edge"]), int(match["peer"]))


def _slot(text: str) -> tuple[int, int, int]:
    """(microbatch, chunk, loop) of `3.1'`."""
    microbatch, chunk = text.rstrip("'").split(".")
    return int(microbatch), int(chunk), int(text.endswith("'"))


def parse_actions(text: str) -> list[Action]:
    """The actions of a list of tokens separated by blanks."""
    return [parse_action(token) for token in text.split()]


def format_actions(actions: Iterable[Action]) -> str:
    """Their tokens, separated by blanks."""
    return " ".join(map(str, actions))


def format_table(lists: Sequence[Sequence[Action]], *, marked: dict[int, int] | None = None) -> str:
    """Steps down, ranks across. `marked` gives rows to point at: rank -> row."""
    marked = marked or {}
    columns = [[f"rank {rank}", *(f"{action}{' <--' if marked.get(rank) == row else ''}" for row, action in enumerate(actions))]
               for rank, actions in enumerate(lists)]
    widths = [max(map(len, column)) for column in columns]
    rows = max(map(len, columns))
    digits = len(str(max(rows - 2, 0)))
    lines = []
    for row in range(rows):
        cells = (column[row] if row < len(column) else "" for column in columns)
        label = "" if row == 0 else str(row - 1)
        lines.append("  ".join([label.rjust(digits), *(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))]).rstrip())
    return "\n".join(lines)
