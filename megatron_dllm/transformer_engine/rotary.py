"""Rotary positions by the package's fused kernel, after norms of its own (--rotary-backend transformer_engine)."""
from __future__ import annotations

import importlib
from dataclasses import dataclass

from torch import Tensor

from ..transformer.norms import NormFunction
from ..transformer.rotary import RotaryTable


@dataclass(frozen=True)
class EngineRotary:
    """A `turn` for SelfAttention: the norm and the rotation of queries and keys, four launches for our two.

    The package pairs dimension i with i + d/2 of as many dimensions as it gets angles for: it gets all d, of which those of the last pairs
    of full layers are zero.
    """

    norm: NormFunction

    def __call__(self, query: Tensor, key: Tensor, query_weight: Tensor, key_weight: Tensor, table: RotaryTable,
                 eps: float) -> tuple[Tensor, Tensor]:
        """Normed and turned [T, h, d] and [T, g, d]; the dtypes given."""
        query, key = self.norm(query, query_weight, eps), self.norm(key, key_weight, eps)
        return (query, key) if len(query) == 0 else (_turned(query, table.angles), _turned(key, table.angles))


def _turned(x: Tensor, angles: Tensor) -> Tensor:
    """x [T, heads, d] by angles fp32 [T, d], a row a token: to the package one sequence, whose positions are its rows."""
    rope = importlib.import_module("transformer_engine.pytorch.attention.rope")
    return rope.apply_rotary_pos_emb(x[:, None], angles[:, None, None], tensor_format="sbhd", fused=True)[:, 0]
