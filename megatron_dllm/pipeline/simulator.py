"""Plays action lists on a model of P ranks, before any process does.

Transfers are asynchronous, waits block, and a circle of waits is a deadlock. The lists are checked first (checks.py). Two transports can
be played, and a good schedule passes both:

    CHANNELS   each direction between two ranks is a queue of its own (gloo, or NCCL with a communicator for each direction)
    BATCHES    a rank runs its transfers one batch after the other, as on one NCCL communicator; a batch is what stands between two other
               actions, its transfers progress independently, and a wait for one of them waits for the whole batch
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from megatron_dllm.pipeline.actions import COMPUTE_KINDS, POST_KINDS, SEND_KINDS, WAIT_KINDS, Action
from megatron_dllm.pipeline.checks import Ends, Fault, ShapeOf, check_lists, format_faults
from megatron_dllm.pipeline.graph import Pipeline
from megatron_dllm.pipeline.memory import PeakMemory, peak_memory
from megatron_dllm.pipeline.timing import Costs, lower_bound


class Transport(Enum):
    CHANNELS = "channels"
    BATCHES = "batches"


class Span(NamedTuple):
    """A compute step and the ticks in which it ran."""

    action: Action
    start: int
    finish: int


@dataclass(frozen=True)
class Simulation:
    """What a run of the lists showed. With faults there are no peaks, and spans end where the run stopped."""

    faults: list[Fault]
    spans: list[list[Span]]
    peaks: list[PeakMemory]
    lower_bound: int

    @property
    def makespan(self) -> int:
        return max(spans[-1].finish for spans in self.spans if spans)

    @property
    def work(self) -> int:
        """Ticks of all compute steps together."""
        return sum(span.finish - span.start for spans in self.spans for span in spans)

    @property
    def bubble(self) -> float:
        """Share of the ranks' time in which they do not compute."""
        return 1 - self.work / (len(self.spans) * self.makespan)

    @property
    def least_bubble(self) -> float:
        """The bubble that the lower bound leaves."""
        return 1 - self.work / (len(self.spans) * self.lower_bound)


def simulate(
    pipeline: Pipeline,
    lists: Sequence[Sequence[Action]],
    costs: Costs,
    *,
    transports: Sequence[Transport] = tuple(Transport),
    latency: int = 0,
    shape_of: ShapeOf | None = None,
) -> Simulation:
    """Check the lists, then run them over each transport; spans and times are those of the first.

    `latency` is the ticks of a transfer; `shape_of` lets the shapes at both ends of each edge be compared.
    """
    ends = Ends(pipeline)
    faults = check_lists(pipeline, lists, ends=ends, shape_of=shape_of)
    runs = [_Run(pipeline, lists, costs, ends, transport, latency) for transport in transports]
    if not faults:
        for run in runs:
            run.play()
        faults = [fault for run in runs for fault in run.deadlock()]
    peaks = [] if faults else [peak_memory(pipeline, rank, actions) for rank, actions in enumerate(lists)]
    return Simulation(faults, runs[0].spans, peaks, lower_bound(pipeline, costs))


def assert_sound(pipeline: Pipeline, lists: Sequence[Sequence[Action]], costs: Costs, *, shape_of: ShapeOf | None = None) -> Simulation:
    """The simulation of lists that must be good: AssertionError with the faults and their place in the table if they are not."""
    simulation = simulate(pipeline, lists, costs, shape_of=shape_of)
    assert not simulation.faults, f"bad schedule for {pipeline}:\n{format_faults(simulation.faults, lists)}"
    return simulation


@dataclass(eq=False)
class _Queue:
    """Batches of one rank that run one after the other."""

    batches: "deque[_Batch]" = field(default_factory=deque)
    free_at: int = 0


@dataclass(eq=False)
class _Batch:
    """Transfers that a rank starts together, by the numbers of their messages; over when all of them are."""

    queue: _Queue
    posted: int
    ends: list[tuple[int, bool]]
    left: int
    latest: int = 0


class _Run:
    """The state of a run: each rank's row and clock, and for each end of each message its batch and when it became active.

    An end is (number of the message, whether it is the sending end).
    """

    def __init__(
        self, pipeline: Pipeline, lists: Sequence[Sequence[Action]], costs: Costs, ends: Ends, transport: Transport, latency: int
    ):
        self.pipeline, self.lists, self.costs, self.ends = pipeline, lists, costs, ends
        self.transport, self.latency = transport, latency
        self.rows, self.clocks = [0] * len(lists), [0] * len(lists)
        self.spans: list[list[Span]] = [[] for _ in lists]
        self.queues: dict[tuple, _Queue] = defaultdict(_Queue)
        self.batches: dict[tuple[int, bool], _Batch] = {}
        self.active: dict[tuple[int, bool], int] = {}
        self.sleeping: dict[_Batch, int] = {}
        self.awake = deque(range(len(lists)))

    def play(self) -> None:
        """Run every rank as far as it gets."""
        while self.awake:
            self._advance(self.awake.popleft())

    def _advance(self, rank: int) -> None:
        actions, row = self.lists[rank], self.rows[rank]
        while row < len(actions):
            action = actions[row]
            if action.kind in COMPUTE_KINDS:
                start = self.clocks[rank]
                self.clocks[rank] += self.costs.of(self.pipeline, rank, action)
                self.spans[rank].append(Span(action, start, self.clocks[rank]))
            elif action.kind in POST_KINDS:
                first = row
                while row + 1 < len(actions) and actions[row + 1].kind in POST_KINDS:
                    row += 1
                self._post(rank, actions[first : row + 1])
            elif action.kind in WAIT_KINDS:
                batch = self.batches[self.ends.number[rank][action], action.kind in SEND_KINDS]
                if batch.left:
                    self.sleeping[batch] = rank
                    break
                self.clocks[rank] = max(self.clocks[rank], batch.latest)
            row += 1
        self.rows[rank] = row

    def _post(self, rank: int, posts: Sequence[Action]) -> None:
        """Put transfers that stand together into their queues."""
        together = []
        for action in posts:
            end = (self.ends.number[rank][action], action.kind in SEND_KINDS)
            if self.transport == Transport.BATCHES and action.peer != rank:
                together.append(end)
            else:
                self._enqueue(self.queues[rank, action.peer, end[1]], rank, [end])
        if together:
            self._enqueue(self.queues[rank,], rank, together)

    def _enqueue(self, queue: _Queue, rank: int, ends: list[tuple[int, bool]]) -> None:
        batch = _Batch(queue, self.clocks[rank], ends, len(ends))
        self.batches.update(dict.fromkeys(ends, batch))
        queue.batches.append(batch)
        if len(queue.batches) == 1:
            self._start(queue)

    def _start(self, queue: _Queue) -> None:
        """Make the batch at the head of `queue` active, and whatever becomes active because of that."""
        free = [queue]
        while free:
            queue = free.pop()
            if not queue.batches:
                continue
            batch = queue.batches[0]
            for number, sending in batch.ends:
                self.active[number, sending] = max(batch.posted, queue.free_at)
                if (number, not sending) in self.active:
                    free += self._complete(number)

    def _complete(self, number: int) -> list[_Queue]:
        """Both ends of a message are active: it is over. Returns the queues whose head this has finished."""
        tick = max(self.active[number, True], self.active[number, False]) + self.latency
        free = []
        for sending in (True, False):
            batch = self.batches[number, sending]
            batch.left -= 1
            batch.latest = max(batch.latest, tick)
            if not batch.left:
                batch.queue.batches.popleft()
                batch.queue.free_at = batch.latest
                free.append(batch.queue)
                if batch in self.sleeping:
                    self.awake.append(self.sleeping.pop(batch))
        return free

    def deadlock(self) -> list[Fault]:
        """The circle of waits in which the run has stopped, as one fault; none if every rank came to its end."""
        stuck = [rank for rank, actions in enumerate(self.lists) if self.rows[rank] < len(actions)]
        if not stuck:
            return []
        # A place is a rank that waits in its list, or one whose transfers stand behind a batch that is not over.
        place: tuple[int, _Batch | None] = (stuck[0], None)
        path: dict[tuple[int, _Batch | None], str] = {}
        while place not in path:
            path[place], place = self._obstacle(*place)
        links = list(path.values())[list(path).index(place) :]
        return [Fault(place[0], self.rows[place[0]], f"deadlock over {self.transport.value}: {', '.join(links)}")]

    def _obstacle(self, rank: int, blocking: _Batch | None) -> tuple[str, tuple[int, _Batch | None]]:
        """What keeps a place from going on, in words, and the place that has to go on first."""
        if blocking is None:
            row = self.rows[rank]
            action = self.lists[rank][row]
            batch = self.batches[self.ends.number[rank][action], action.kind in SEND_KINDS]
        else:
            batch = blocking
        number = next(number for number, _ in batch.ends if not self._is_over(number))
        message = self.ends.messages[number]
        owners = {True: message.source, False: message.destination}
        sending = next(sending for sending in owners if (number, sending) not in self.active)
        owner, posted = owners[sending], self.batches.get((number, sending))
        if blocking is None:
            words = f"rank {rank} waits at {action} (row {row}) for rank {owner}"
        else:
            own_end = message.send if message.source == rank else message.receive
            words = f"rank {rank} has transfers behind {own_end}, which waits for rank {owner}"
        return words, (owner, None if posted is None else posted.queue.batches[0])

    def _is_over(self, number: int) -> bool:
        return (number, True) in self.active and (number, False) in self.active
