"""What has to run on which rank, and what waits for what: the dependency graph that every schedule must respect.

Virtual stage i sits on rank i mod P, chunk i div P. A self-conditioned microbatch passes the S = P * V stages twice:

    loop 0   F(0) -> F(1) -> ... -> F(S-1)           clean tokens and the draft
                                      |  soft embedding, if self-conditioned
    loop 1   F'(0) -> ... -> F'(S-1)  <- (to F'(0))  the canvas; stage s also reads the contexts that F(s) kept
             B'(0) <- ... <- B'(S-1)                 its backward leaves each stage the gradient of those contexts,
    loop 0   B(0)  <- ... <- B(S-1)                  so B(s) comes after B'(s)

B'(0) also sends d(soft embedding) to the last stage, where the step E turns it into the embedding's gradient. The draft is detached, so
d(soft embedding) does not hold up B(S-1). Without a trained embedding there is neither that message nor E.

Where both loops of a microbatch have one backward (`joint`; transformer/joint_backward.py), there is no B': B(s) comes after F'(s), takes
the canvas in the place of the draft, and B(0) sends d(soft embedding).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megatron_dllm.pipeline.actions import Action, Edge, Kind


class Message(NamedTuple):
    """A tensor that one compute step makes and another one reads, on the same rank or on another."""

    edge: Edge
    source: int
    producer: Action
    destination: int
    consumer: Action

    @property
    def send(self) -> Action:
        return self._source_end(Kind.SEND)

    @property
    def wait_send(self) -> Action:
        return self._source_end(Kind.WAIT_SEND)

    @property
    def receive(self) -> Action:
        return self._destination_end(Kind.RECEIVE)

    @property
    def wait_receive(self) -> Action:
        return self._destination_end(Kind.WAIT_RECEIVE)

    def _source_end(self, kind: Kind) -> Action:
        _, microbatch, chunk, loop, _, _ = self.producer
        return Action(kind, microbatch, chunk, loop, self.edge, self.destination)

    def _destination_end(self, kind: Kind) -> Action:
        _, microbatch, chunk, loop, _, _ = self.consumer
        return Action(kind, microbatch, chunk, loop, self.edge, self.source)

    def __str__(self) -> str:
        return f"{self.edge.name.lower()} from {self.producer} on rank {self.source} to {self.consumer} on rank {self.destination}"


@dataclass(frozen=True)
class Pipeline:
    """The work of one step: `self_conditioned` says for each microbatch whether it takes loop 1, `joint` whether its loops have one
    backward (empty: none of them)."""

    ranks: int
    chunks: int
    self_conditioned: tuple[bool, ...]
    embedding_trained: bool = True
    forward_only: bool = False
    split_backward: bool = False
    joint: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        for name, value in (("ranks", self.ranks), ("chunks", self.chunks), ("microbatches", self.microbatches)):
            if value < 1:
                raise ValueError(f"a pipeline needs at least 1 of each of ranks, chunks and microbatches; {name} is {value}")
        if self.forward_only and self.split_backward:
            raise ValueError("forward_only and split_backward are both on: there is no backward to split; turn one off")
        if self.joint and (len(self.joint) != self.microbatches
                           or any(one and not again for one, again in zip(self.joint, self.self_conditioned, strict=True))):
            raise ValueError(f"joint is {self.joint} of microbatches that are self-conditioned as {self.self_conditioned}: one backward of "
                             "two loops is for those that have two; give one flag a microbatch, True only where both are")

    @cached_property
    def microbatches(self) -> int:
        return len(self.self_conditioned)

    @cached_property
    def stages(self) -> int:
        return self.ranks * self.chunks

    def loops(self, microbatch: int) -> range:
        return range(2 if self.self_conditioned[microbatch] else 1)

    def is_joint(self, microbatch: int) -> bool:
        return bool(self.joint) and self.joint[microbatch]

    def backward_loops(self, microbatch: int) -> range:
        """The loops that have a backward of their own."""
        return range(1) if self.is_joint(microbatch) else self.loops(microbatch)

    def stage(self, rank: int, chunk: int) -> int:
        return chunk * self.ranks + rank

    def place(self, stage: int) -> tuple[int, int]:
        """(rank, chunk) of a virtual stage."""
        return stage % self.ranks, stage // self.ranks

    @cached_property
    def backward_kind(self) -> Kind:
        return Kind.INPUT_GRADIENT if self.split_backward else Kind.BACKWARD

    def has_embedding_gradient(self, microbatch: int) -> bool:
        return self.self_conditioned[microbatch] and self.embedding_trained and not self.forward_only

    def compute_actions(self, rank: int) -> Iterator[Action]:
        """Every compute step that `rank` has to run, each once, in no particular order."""
        for microbatch in range(self.microbatches):
            for chunk in range(self.chunks):
                for loop in self.loops(microbatch):
                    yield Action(Kind.FORWARD, microbatch, chunk, loop)
                    if not self.forward_only and loop in self.backward_loops(microbatch):
                        yield Action(self.backward_kind, microbatch, chunk, loop)
                if self.split_backward:
                    yield Action(Kind.WEIGHT_GRADIENT, microbatch, chunk)
            if rank == self.ranks - 1 and self.has_embedding_gradient(microbatch):
                yield Action(Kind.EMBEDDING_GRADIENT, microbatch, self.chunks - 1)

    def local_inputs(self, action: Action) -> list[Action]:
        """The compute steps of the same rank that `action` reads from without a message."""
        kind, microbatch, chunk, loop = action[:4]
        if kind == Kind.FORWARD:
            return [Action(kind, microbatch, chunk, 0)] if loop == 1 else []
        if kind == self.backward_kind:
            second = Kind.FORWARD if self.is_joint(microbatch) else kind  # what comes of it, or the gradient of loop 0's contexts
            after_second = [Action(second, microbatch, chunk, 1)] if loop == 0 and self.self_conditioned[microbatch] else []
            return [Action(Kind.FORWARD, microbatch, chunk, loop), *after_second]
        if kind == Kind.WEIGHT_GRADIENT:
            return [Action(self.backward_kind, microbatch, chunk, 0)]
        return [Action(Kind.FORWARD, microbatch, chunk, 0)]  # the embedding's gradient reads the draft

    def outputs(self, rank: int, action: Action) -> list[Message]:
        """The messages that `action` on `rank` gives rise to."""
        kind, microbatch, chunk, loop = action[:4]
        stage, last = self.stage(rank, chunk), self.stages - 1
        conditioned = self.self_conditioned[microbatch]

        def message(edge: Edge, consumer_kind: Kind, consumer_stage: int, consumer_loop: int) -> list[Message]:
            destination, destination_chunk = self.place(consumer_stage)
            return [Message(edge, rank, action, destination, Action(consumer_kind, microbatch, destination_chunk, consumer_loop))]

        if kind == Kind.FORWARD:
            if stage < last:
                return message(Edge.HIDDEN, kind, stage + 1, loop)
            return message(Edge.SOFT_EMBEDDING, kind, 0, 1) if loop == 0 and conditioned else []
        if kind == self.backward_kind:
            if stage > 0:
                return message(Edge.GRADIENT, kind, stage - 1, loop)
            if loop == self.backward_loops(microbatch)[-1] and self.has_embedding_gradient(microbatch):
                return message(Edge.SOFT_EMBEDDING_GRADIENT, Kind.EMBEDDING_GRADIENT, last, 0)
        return []

    def awaits_message(self, rank: int, action: Action) -> bool:
        """Whether `action` reads a message; no step reads more than one."""
        if action.kind == Kind.FORWARD:
            return action.loop == 1 or self.stage(rank, action.chunk) > 0
        if action.kind == self.backward_kind:
            return self.stage(rank, action.chunk) < self.stages - 1
        return action.kind == Kind.EMBEDDING_GRADIENT

    def last_use(self, microbatch: int, chunk: int) -> Action | None:
        """The step of a stage after which nothing of loop 0's forward is kept; None where the forward itself is."""
        if not self.forward_only:
            return Action(Kind.WEIGHT_GRADIENT if self.split_backward else Kind.BACKWARD, microbatch, chunk, 0)
        return Action(Kind.FORWARD, microbatch, chunk, 1) if self.self_conditioned[microbatch] else None
