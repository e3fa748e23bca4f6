"""What a virtual stage is to the executor: a function of what it receives, and what comes out of it."""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

# By layer, a dataclass of tensors: what loop 0 keeps for loop 1, gradients included.
Contexts = Mapping[Any, Any]


@dataclass(frozen=True)
class StageOutput:
    """What a forward gives.

    hidden          [T, width]: for the next stage; None from the last one
    loss            scalar, from the last stage: its backward starts here
    soft_embedding  [T of loop 1, hidden], from the last stage's loop 0 of a self-conditioned microbatch: the signal for loop 1, whose graph
                    ends in the embedding alone
    contexts        from loop 0, where loop 1 follows; whatever the stage likes where both have one backward
    joined          from loop 1 where both loops have one backward: where that starts, if there is no loss
    report          whatever the caller wants to know of the last stage; None: nothing
    """

    hidden: Tensor | None = None
    loss: Tensor | None = None
    soft_embedding: Tensor | None = None
    contexts: Contexts = field(default_factory=dict)
    joined: Tensor | None = None
    report: Any = None

    @property
    def root(self) -> Tensor:
        """Where the backward starts."""
        if self.hidden is None:
            return self.loss
        return self.hidden if self.joined is None else self.joined


class PipelineStage(Protocol):
    """A virtual stage. It never sees a process group of the pipeline."""

    def __call__(self, microbatch: Any, loop: int, received: Tensor | None, earlier: Contexts | None) -> StageOutput:
        """Forward. `received`: hidden states, or in loop 1 of the first stage the soft embedding, or None in its loop 0.

        `earlier`: in loop 1 the contexts that loop 0 of this stage kept, cut from its graph unless both loops have one backward. A stage
        that has nothing to do returns `new_node(received)`.
        """
        ...


class _NewNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


def new_node(x: Tensor) -> Tensor:
    """A copy with a node of its own in the graph: what is received is a leaf, and must not be sent on and released as an output is."""
    return _NewNode.apply(x)


@dataclass(frozen=True)
class CutContexts:
    """Contexts between the loops: `leaves` is what loop 1 reads, cut from loop 0's graph; `pairs` ties each leaf to its original."""

    leaves: Contexts
    pairs: tuple[tuple[Tensor, Tensor], ...]

    @classmethod
    def of(cls, contexts: Contexts) -> CutContexts:
        pairs = []

        def cut(original: Tensor) -> Tensor:
            leaf = original.detach().requires_grad_(original.requires_grad)
            pairs.append((original, leaf))
            return leaf

        leaves = {
            layer: type(context)(**{f.name: cut(getattr(context, f.name)) for f in dataclasses.fields(context)})
            for layer, context in contexts.items()}
        return cls(leaves, tuple(pairs))

    def gradients(self) -> tuple[list[Tensor], list[Tensor]]:
        """Originals that loop 1 gave a gradient, and these gradients."""
        reached = [(original, leaf.grad) for original, leaf in self.pairs if leaf.grad is not None]
        return [original for original, _ in reached], [gradient for _, gradient in reached]


def release(output: Tensor) -> None:
    """Free the memory of a stage's output that has been sent. Its graph stays: nothing in it reads the output.

    A view shares its memory with what others may read, and is left alone.
    """
    if not output._is_view():
        output.untyped_storage().resize_(0)
