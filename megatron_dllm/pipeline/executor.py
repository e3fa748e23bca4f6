"""Runs one rank's action list: which tensor goes where is written in the list, and nothing is decided here.

    F    the stage's forward. What it reads is cut from the graph: a received tensor, and in loop 1 the contexts of loop 0
    B    backward from the received gradient (or the loss); of loop 0 also from the gradients that loop 1 left at the contexts. Of a joint
         microbatch one for both loops, into what loop 0 received, or of the first stage into the soft embedding
    E    the soft embedding's backward, into the embedding
    S R  transfers, consecutive ones together; a sent output is released when its wait says that it has left
    G    what the caller has to do when a chunk's gradients are complete
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from .actions import POST_KINDS, SEND_KINDS, STARTED_BY, Action, Edge, Kind, format_actions
from .assembly import Schedule
from .clock import ActionClock
from .edges import EdgeShapes
from .p2p import PointToPoint, Post, empty_buffer
from .progress import Progress
from .stage import CutContexts, PipelineStage, StageOutput, release

# What a compute step's result goes out on, and what a step reads.
_INPUT_EDGES = {Kind.FORWARD: (Edge.HIDDEN, Edge.SOFT_EMBEDDING), Kind.BACKWARD: (Edge.GRADIENT,),
                Kind.EMBEDDING_GRADIENT: (Edge.SOFT_EMBEDDING_GRADIENT,)}


@dataclass
class Forward:
    """A forward whose backward has still to come."""

    received: Tensor | None
    root: Tensor | None


@dataclass
class PipelineExecutor:
    """One rank's stages, by chunk, and its transfers. `after_chunk` is called at each reduction with the chunk's number; a `clock` times
    the actions."""

    stages: Sequence[PipelineStage]
    transport: PointToPoint
    device: torch.device
    after_chunk: Callable[[int], None] = lambda chunk: None
    progress: Progress = field(default_factory=Progress)
    clock: ActionClock | None = None

    def run(self, schedule: Schedule, microbatches: Sequence[Any], shapes: EdgeShapes) -> list[tuple[int, int, Any]]:
        """Execute a step; (microbatch, loop, report) of the last stage's forwards, in this order, none elsewhere.

        Gradients are added to the parameters' own. Every rank of the pipeline calls this with the same schedule.
        """
        pipeline, rank = schedule.pipeline, self.transport.group.rank
        assert len(microbatches) == pipeline.microbatches and len(self.stages) == pipeline.chunks and not pipeline.split_backward
        step = _Step(self, schedule, microbatches, shapes)
        with torch.set_grad_enabled(not pipeline.forward_only):
            for actions in batches(schedule.lists[rank]):
                self.progress.begin(format_actions(actions))
                try:
                    with nullcontext() if self.clock is None else self.clock.around(actions[0]):
                        step.execute(actions)
                except RuntimeError as error:  # a transfer whose peer is gone, a collective of a stage, memory
                    raise RuntimeError(f"pipeline rank {rank} of {pipeline.ranks} failed {self.progress}: {error}") from error
                self.progress.end()
        self.transport.close()
        step.check_empty()
        return sorted(step.reports, key=lambda report: report[:2])


def batches(actions: Sequence[Action]) -> Iterator[list[Action]]:
    """Consecutive starts of transfers together, every other action alone."""
    for posts, group in groupby(actions, key=lambda action: action.kind in POST_KINDS):
        if posts:
            yield list(group)
        else:
            yield from ([action] for action in group)


class _Step:
    """The tensors that one run of a list holds."""

    def __init__(self, executor: PipelineExecutor, schedule: Schedule, microbatches: Sequence[Any], shapes: EdgeShapes):
        self.executor, self.transport, self.microbatches, self.shapes = executor, executor.transport, microbatches, shapes
        self.pipeline, self.rank = schedule.pipeline, executor.transport.group.rank
        self.reports: list[tuple[int, int, Any]] = []
        # By (edge, microbatch, chunk, loop) of this rank's end: what has come, and what is to go.
        self.arrived: dict[tuple, Tensor] = {}
        self.leaving: dict[tuple, Tensor] = {}
        # By (microbatch, chunk, loop) and (microbatch, chunk).
        self.forwards: dict[tuple, Forward] = {}
        self.contexts: dict[tuple, Any] = {}  # CutContexts, or of joint microbatches what the stage gave
        self.soft_embeddings: dict[int, Tensor] = {}
        self.outputs: dict[Action, Tensor] = {}
        self.compute = {Kind.FORWARD: self._forward, Kind.BACKWARD: self._backward, Kind.EMBEDDING_GRADIENT: self._embedding_gradient,
                        Kind.REDUCE: lambda action: executor.after_chunk(action.chunk),
                        Kind.WAIT_SEND: self._wait_send, Kind.WAIT_RECEIVE: self._wait_receive}

    def execute(self, actions: Sequence[Action]) -> None:
        """One compute step or wait, or a batch of starts."""
        if actions[0].kind in POST_KINDS:
            self.transport.start([self._post(action) for action in actions])
        else:
            self.compute[actions[0].kind](actions[0])

    def check_empty(self) -> None:
        """Nothing is left that somebody should have used."""
        left = {name: list(held) for name in ("arrived", "leaving", "forwards", "soft_embeddings") if (held := getattr(self, name))}
        assert not left, f"after the step there is still {left}"

    def _post(self, action: Action) -> Post:
        if action.kind not in SEND_KINDS:
            return Post(action, empty_buffer(self.shapes.of(action), self.executor.device))
        tensor, shape = self.leaving.pop(_end(action)), self.shapes.of(action)
        assert tensor.shape == (shape.tokens, shape.width), f"{action} carries {shape}, the stage gave {list(tensor.shape)}"
        if action.edge == Edge.HIDDEN and action.peer != self.rank and tensor.requires_grad:
            self.outputs[action] = tensor
        return Post(action, tensor.detach().contiguous())

    def _wait_send(self, action: Action) -> None:
        self.transport.wait(action)
        output = self.outputs.pop(action._replace(kind=STARTED_BY[action.kind]), None)
        if output is not None:
            release(output)

    def _wait_receive(self, action: Action) -> None:
        self.arrived[_end(action)] = self.transport.wait(action)

    def _read(self, action: Action) -> Tensor | None:
        """The message that a compute step reads."""
        if not self.pipeline.awaits_message(self.rank, action):
            return None
        keys = [(edge, *action[1:4]) for edge in _INPUT_EDGES[action.kind]]
        key, = (key for key in keys if key in self.arrived)
        return self.arrived.pop(key)

    def _forward(self, action: Action) -> None:
        _, microbatch, chunk, loop = action[:4]
        received = self._read(action)
        if received is not None:
            # A message to ourselves may be the sender's own tensor.
            received = received.detach().requires_grad_(torch.is_grad_enabled())
        output = self.executor.stages[chunk](self.microbatches[microbatch], loop, received,
                                              self._earlier(microbatch, chunk) if loop else None)
        if output.hidden is not None:
            self.leaving[Edge.HIDDEN, microbatch, chunk, loop] = output.hidden
        elif output.report is not None:
            self.reports.append((microbatch, loop, output.report))
        if self.pipeline.self_conditioned[microbatch]:
            self._keep(output, microbatch, chunk, loop)
        if self.pipeline.forward_only:
            return
        if loop and self.pipeline.is_joint(microbatch):
            first = self.forwards[microbatch, chunk, 0].received
            self.forwards[microbatch, chunk, 0] = Forward(received if first is None else first, output.root)
        else:
            self.forwards[microbatch, chunk, loop] = Forward(received, output.root)

    def _earlier(self, microbatch: int, chunk: int) -> Any:
        """What loop 1 reads of loop 0."""
        kept = self.contexts[microbatch, chunk]
        return kept if self.pipeline.is_joint(microbatch) else kept.leaves

    def _keep(self, output: StageOutput, microbatch: int, chunk: int, loop: int) -> None:
        """What loop 1 needs of loop 0, and what E needs."""
        is_joint = self.pipeline.is_joint(microbatch)
        if loop == 0:
            self.contexts[microbatch, chunk] = output.contexts if is_joint else CutContexts.of(output.contexts)
            if output.soft_embedding is not None:
                self.leaving[Edge.SOFT_EMBEDDING, microbatch, chunk, 0] = output.soft_embedding
                if self.pipeline.has_embedding_gradient(microbatch):
                    self.soft_embeddings[microbatch] = output.soft_embedding
        elif self.pipeline.forward_only or is_joint:
            del self.contexts[microbatch, chunk]

    def _backward(self, action: Action) -> None:
        _, microbatch, chunk, loop = action[:4]
        forward = self.forwards.pop((microbatch, chunk, loop))
        roots, gradients = [forward.root], [self._read(action)]
        if loop == 0 and len(self.pipeline.backward_loops(microbatch)) == 2:
            originals, given = self.contexts.pop((microbatch, chunk)).gradients()
            roots, gradients = roots + originals, gradients + given
        reached = [(root, gradient) for root, gradient in zip(roots, gradients, strict=True) if root.requires_grad]
        if reached:
            torch.autograd.backward(*map(list, zip(*reached, strict=True)))
        for message in self.pipeline.outputs(self.rank, action):
            received = forward.received
            self.leaving[message.edge, microbatch, chunk, loop] = torch.zeros_like(received) if received.grad is None else received.grad

    def _embedding_gradient(self, action: Action) -> None:
        torch.autograd.backward(self.soft_embeddings.pop(action.microbatch), self._read(action))


def _end(action: Action) -> tuple:
    """This rank's end of an edge."""
    return action.edge, action.microbatch, action.chunk, action.loop
