"""Linear layers whose products add the weights' gradients to the fp32 buffers (--gradient-accumulation-fusion).

Autograd would make each gradient in 16 bits, add those of a layer's uses in 16 bits, and have the sum read and added to the buffer: here
no use is rounded, and nothing is written but the buffer.
"""
from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_dllm.parallel import MainGradient

from .linear import ColumnParallelLinear, RowParallelLinear
from .vocabulary import add_product_

APEX = "fused_weight_gradient_mlp_cuda"  # the module of apex that is built with its CUDA extensions

# (x [T, D], dy [T, F], total [F, D] in fp32): total += dy.T @ x
AddGradient = Callable[[Tensor, Tensor, Tensor], None]


@dataclass(frozen=True)
class WeightGradients:
    """What adds a weight's gradient, and its name."""

    add: AddGradient
    name: str


def weight_gradients(device: torch.device) -> WeightGradients:
    """apex's kernel on a CUDA device where that package is installed, else torch's product; both give the same sums.

    ValueError, with the remedy, where apex is installed and cannot be imported.
    """
    if device.type != "cuda" or find_spec(APEX) is None:
        return WeightGradients(_by_torch, "torch")
    try:
        kernels = importlib.import_module(APEX)
    except (ImportError, OSError) as error:  # built for another torch, say
        raise ValueError(f"--gradient-accumulation-fusion: {APEX} of apex is installed and cannot be imported ({error}); build it anew "
                         "with tools/install_gpu.sh --apex, uninstall it, or leave the flag out") from error
    return WeightGradients(kernels.wgrad_gemm_accum_fp32, "apex")


def _by_torch(x: Tensor, dy: Tensor, total: Tensor) -> None:
    add_product_(total, dy.t(), x)


def fuse_gradients(model: nn.Module, gradients: WeightGradients) -> None:
    """Let every linear layer of `model` that is trained add its weight's gradient by itself."""
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear) and module.weight.requires_grad:
            module.product = AccumulatingLinear(module.weight, gradients.add)


@dataclass(frozen=True)
class AccumulatingLinear:
    """A LinearProduct, [T, F] from x [T, D], of this weight alone, [F, D] or with parts [..., F, D]; plain where the weight has no buffer
    (see data_parallel.buckets) or nothing is recorded."""

    weight: nn.Parameter
    add: AddGradient

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        main = self.weight.main_gradient
        if main is None or not torch.is_grad_enabled():
            return F.linear(x, weight)
        return _AccumulatingLinear.apply(x, weight.detach(), main.ticket, main, self.add)


class _AccumulatingLinear(torch.autograd.Function):
    """Saved: x and the weight. The ticket gets an empty gradient, which tells that this use has been added."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, ticket: Tensor, main: MainGradient, add: AddGradient) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.main, ctx.add = main, add
        return F.linear(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        x, weight = ctx.saved_tensors
        dy = dy.contiguous()
        total = ctx.main.open().flatten(0, -2)
        if len(x):
            ctx.add(x.contiguous(), dy, total)
        dx = dy @ weight if ctx.needs_input_grad[0] else None
        return dx, None, ctx.main.ticket.new_empty(0), None, None
