"""The one rule of precision: "fp32" means at least fp32, so that a float64 model runs in float64 throughout."""
from __future__ import annotations

import torch
from torch import Tensor, nn

from ..kernels.precision import accumulation_dtype


def at_least_fp32(x: Tensor) -> Tensor:
    """`x`, upcast to fp32 when it has fewer bits."""
    dtype = accumulation_dtype(x.dtype)
    return x if x.dtype == dtype else x.to(dtype)


def freeze(module: nn.Module, dtype: torch.dtype) -> None:
    """Leave the module's parameters out of training: no gradient, and held once, in `dtype`, also where trained ones are held in fp32."""
    for parameter in module.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(dtype)
