"""x @ W.T by the package's Linear, over a weight that stays ours.

The module holds no parameter: it is given our weight at every call, so that names, placements, masters, gradient buffers and checkpoints
are those of the local implementation. Cutting over tp is ours too, around the product (tensor_parallel/linear.py): the package's own would
gather x once for each of q, k and v. The gradient is autograd's, in bf16, added to our fp32 buffer as torch's is.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .engine import Engine

# In FP8 both matrices of every product are read along both sides in pieces of 16 bytes; without a row there is nothing to multiply.
ROWS = 16


class EngineLinear:
    """A LinearProduct: [T, F] from x [T, D] and weight [F, D], both bf16."""

    def __init__(self, engine: Engine, in_features: int, out_features: int):
        self.engine = engine
        self.module = engine.package.Linear(in_features, out_features, bias=False, params_dtype=torch.bfloat16, device="meta")
        del self.module.weight  # the parameter; what a call gives is a plain attribute

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        fill = self._fill(len(x))
        self.module.fast_setattr("weight", weight)
        try:
            with self.engine.precision():
                y = self.module(F.pad(x, (0, 0, 0, fill)) if fill else x)
        finally:
            del self.module.weight
        return y[:len(x)] if fill else y

    def _fill(self, rows: int) -> int:
        """Rows of zeros that the product needs beside so many."""
        if self.engine.recipe is None and rows:
            return 0
        return max(ROWS, -(-rows // ROWS) * ROWS) - rows
