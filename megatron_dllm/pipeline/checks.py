"""Checks of action lists as they stand: every step once and after what it reads, transfers paired in order, edges of one shape."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_dllm.pipeline.actions import COMPUTE_KINDS, POST_KINDS, SEND_KINDS, STARTED_BY, WAIT_KINDS, Action, Kind, format_table
from megatron_dllm.pipeline.edges import EdgeShape
from megatron_dllm.pipeline.graph import Message, Pipeline

ShapeOf = Callable[[int, Action], EdgeShape]
"""The shape that a rank gives to the buffer of a transfer (its own end of it)."""


@dataclass(frozen=True)
class Fault:
    """What is wrong with one rank's list, and in which row (None: something is missing)."""

    rank: int
    row: int | None
    text: str

    def __str__(self) -> str:
        return f"rank {self.rank}{'' if self.row is None else f', row {self.row}'}: {self.text}"


def format_faults(faults: Sequence[Fault], lists: Sequence[Sequence[Action]], *, context: int = 6) -> str:
    """The faults, and the part of the table around the first of them with its row marked."""
    lines = [str(fault) for fault in faults]
    first = next((fault for fault in faults if fault.row is not None), None)
    if first is not None:
        start = max(0, first.row - context)
        lines += ["", f"from row {start}:"]
        part = [actions[start : first.row + context + 1] for actions in lists]
        lines.append(format_table(part, marked={first.rank: first.row - start}))
    return "\n".join(lines)


class Ends:
    """Which message each transfer and wait of each rank belongs to, for all messages that the pipeline needs."""

    def __init__(self, pipeline: Pipeline):
        self.messages: list[Message] = [
            message
            for rank in range(pipeline.ranks)
            for action in pipeline.compute_actions(rank)
            for message in pipeline.outputs(rank, action)
        ]
        self.number: list[dict[Action, int]] = [{} for _ in range(pipeline.ranks)]
        self.wait_of: list[dict[Action, Action]] = [{} for _ in range(pipeline.ranks)]
        for number, message in enumerate(self.messages):
            for action in (message.send, message.wait_send):
                self.number[message.source][action] = number
            for action in (message.receive, message.wait_receive):
                self.number[message.destination][action] = number
            self.wait_of[message.destination][message.consumer] = message.wait_receive

    def message(self, rank: int, action: Action) -> Message:
        return self.messages[self.number[rank][action]]


def check_lists(pipeline: Pipeline, lists: Sequence[Sequence[Action]], *, ends: Ends, shape_of: ShapeOf | None = None) -> list[Fault]:
    """Everything that is wrong with the lists before they are run; empty if nothing is."""
    assert len(lists) == pipeline.ranks, f"{len(lists)} lists for {pipeline.ranks} ranks"
    faults = [fault for rank, actions in enumerate(lists) for fault in _check_rank(pipeline, rank, actions, ends)]
    return faults + _check_pairing(lists, ends, shape_of)


def _check_rank(pipeline: Pipeline, rank: int, actions: Sequence[Action], ends: Ends) -> list[Fault]:
    """Faults that one rank's list shows by itself."""
    compute = set(pipeline.compute_actions(rank))
    reductions = set() if pipeline.forward_only else {Action(Kind.REDUCE, None, chunk) for chunk in range(pipeline.chunks)}
    missing = compute | reductions | set(ends.number[rank])
    rows: dict[Action, int] = {}
    for row, action in enumerate(actions):
        rows.setdefault(action, row)
    faults = []
    for row, action in enumerate(actions):
        if rows[action] < row:
            faults.append(Fault(rank, row, f"{action} stands in row {rows[action]} already"))
            continue
        if action not in missing:
            faults.append(Fault(rank, row, f"{action} is no step of this pipeline"))
            continue
        missing.remove(action)
        for needed in _needs(rank, action, pipeline, compute, ends):
            if needed not in rows:
                faults.append(Fault(rank, row, f"{action} needs {needed}, which is not in the list"))
            elif rows[needed] > row:
                faults.append(Fault(rank, row, f"{action} needs {needed}, which comes later, in row {rows[needed]}"))
    return faults + [Fault(rank, None, f"{action} is missing") for action in sorted(missing, key=str)]


def _needs(rank: int, action: Action, pipeline: Pipeline, compute: set[Action], ends: Ends) -> list[Action]:
    """The actions of the same rank that must stand before `action`."""
    if action.kind in COMPUTE_KINDS:
        wait = ends.wait_of[rank].get(action)
        return pipeline.local_inputs(action) + ([] if wait is None else [wait])
    if action.kind == Kind.SEND:
        return [ends.message(rank, action).producer]
    if action.kind in WAIT_KINDS:
        return [action._replace(kind=STARTED_BY[action.kind])]
    if action.kind == Kind.REDUCE:
        return [step for step in compute if step.chunk == action.chunk and step.kind != Kind.FORWARD]
    return []


def _check_pairing(lists: Sequence[Sequence[Action]], ends: Ends, shape_of: ShapeOf | None) -> list[Fault]:
    """Faults between the sends of one rank and the receives of another: the n-th of one must be the n-th of the other."""
    sends: dict[tuple[int, int], list[tuple[int, Action]]] = defaultdict(list)
    receives: dict[tuple[int, int], list[tuple[int, Action]]] = defaultdict(list)
    for rank, actions in enumerate(lists):
        for row, action in enumerate(actions):
            if action.kind in POST_KINDS and action in ends.number[rank]:
                sending = action.kind in SEND_KINDS
                channel = (rank, action.peer) if sending else (action.peer, rank)
                (sends if sending else receives)[channel].append((row, action))
    faults = []
    for channel in sorted({*sends, *receives}):
        source, destination = channel
        for (send_row, send), (row, receive) in zip(sends[channel], receives[channel], strict=False):
            if ends.number[source][send] != ends.number[destination][receive]:
                text = f"{receive} meets {send} of rank {source}, row {send_row}: sends and receives are not in one order"
                faults.append(Fault(destination, row, text))
                break  # whatever follows on this channel is shifted too
            if shape_of is not None and shape_of(source, send) != shape_of(destination, receive):
                text = f"{receive} makes room for {shape_of(destination, receive)}, rank {source} sends {shape_of(source, send)}"
                faults.append(Fault(destination, row, text))
        else:
            faults += _left_over(sends[channel], receives[channel], source, destination)
    return faults


def _left_over(sends: list[tuple[int, Action]], receives: list[tuple[int, Action]], source: int, destination: int) -> list[Fault]:
    if len(sends) > len(receives):
        row, send = sends[len(receives)]
        return [Fault(source, row, f"{send} is received by nobody: rank {destination} takes {len(receives)} messages, not {len(sends)}")]
    if len(receives) > len(sends):
        row, receive = receives[len(sends)]
        return [Fault(destination, row, f"{receive} is sent by nobody: rank {source} sends {len(sends)} messages, not {len(receives)}")]
    return []
