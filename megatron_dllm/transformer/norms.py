"""RMSNorm with a plain weight (not 1 + w), computed in at least fp32 and cast back."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..parallel import ParallelContext, place
from ..tensor_parallel.initialization import Constant, make_parameter
from .precision import at_least_fp32


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x * (mean(x^2) + eps)^-0.5 * weight over the last dimension; the dtype of `x`."""
    wide = at_least_fp32(x)
    return F.rms_norm(wide, wide.shape[-1:], None if weight is None else weight.to(wide.dtype), eps).to(x.dtype)


class RMSNorm(nn.Module):
    """y = rms_norm(x) * weight; x, y [..., size], weight [size], equal on every rank.

    With `sharded_heads`, x holds this tp rank's heads only, so the weight's gradient is this rank's share.
    """

    def __init__(self, name: str, size: int, *, eps: float, context: ParallelContext, dtype: torch.dtype, sharded_heads: bool = False):
        super().__init__()
        self.eps = eps
        placement = place((size,), context, partial_over_tp=sharded_heads or context.sequence_parallel)
        self.weight = make_parameter(f"{name}.weight", placement, init=Constant(1.0), dtype=dtype, device=context.device)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)
