"""A pass that is to have one backward with a later one, through the whole stack or through the layers of one pipeline stage."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...diffusion.nested import tensors_of
from ...transformer.joint_backward import KeptTensors, grafted
from ...transformer.rows import Rows
from ...transformer.token_pass import LayerContext, ReplacedContext, TokenPass

Contexts = Mapping[int, LayerContext | ReplacedContext]
Layers = Callable[[Tensor, TokenPass, Contexts | None], tuple[Tensor, Contexts]]


@dataclass(frozen=True)
class KeptPass:
    """From `leaf` [T, ...] to `result` [T, ...]: the layers' contexts for the later pass, and all that is kept for the backward."""

    leaf: Tensor
    result: Tensor
    contexts: Contexts
    kept: KeptTensors

    @classmethod
    def of(cls, layers: Layers, leaf: Tensor, token_pass: TokenPass, earlier: Contexts | None = None) -> KeptPass:
        """What `layers` make of a leaf, with the contexts of an `earlier` pass."""
        kept = KeptTensors(token_pass.num_tokens, tensors_of(token_pass))
        if token_pass.routed is not None:
            token_pass = dataclasses.replace(token_pass, routed=dataclasses.replace(token_pass.routed, note_routing=kept.note_routing))
        with kept.recorded():
            result, contexts = layers(leaf, token_pass, earlier)
        return cls(leaf, result, contexts, kept)

    @torch.no_grad()
    def put(self, later: KeptPass, rows: Rows) -> None:
        """The later pass's results in the place of `rows` of ours."""
        rows.put(self.result.detach(), later.result)

    def joined(self, later: KeptPass, rows: Rows, entered: Tensor) -> Tensor:
        """Our result as what becomes of `entered` [T, ...], by a backward of the pass in which the later one's tokens stand at `rows`. Both
        passes' graphs are void then."""
        self.kept.take_over(later.kept, rows)
        return grafted(entered, self.leaf, self.result)
