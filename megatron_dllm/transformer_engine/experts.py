"""The experts' products by the package's GroupedLinear, over weights that stay ours."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..moe.experts import ExpertProduct, looped_linear
from .engine import Engine
from .linear import ROWS


def grouped_product(engine: Engine, num_experts: int, shapes: list[tuple[int, int]], device: torch.device) -> ExpertProduct:
    """The product of rows with weights [num_experts, F, D] of these shapes (F, D). The host waits for the numbers of rows."""
    package = engine.package
    modules = {shape: _grouped_linear(engine, num_experts, shape, device) for shape in set(shapes)}
    pad, cut = package.Fp8Padding(num_experts, ROWS), package.Fp8Unpadding(num_experts, ROWS)
    last_counts: list[tuple[Tensor, list[int]]] = []

    def splits_of(counts: Tensor) -> list[int]:
        """Both products of a call have the same counts: read once."""
        if not last_counts or last_counts[0][0] is not counts:
            last_counts[:] = [(counts, counts.tolist())]
        return last_counts[0][1]

    def transformer_engine(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        splits = splits_of(counts)
        total = sum(splits)
        if not total:
            return looped_linear(rows, weight, counts)
        module, own = modules[weight.shape[1], weight.shape[2]], rows[:total]
        for number, expert in enumerate(_PerExpert.apply(weight)):
            module.fast_setattr(f"weight{number}", expert)
        try:
            with engine.precision():
                if engine.recipe is None:
                    y = module(own, splits)
                else:
                    padded, padded_splits = pad(own, splits)
                    y = cut(module(padded, padded_splits), splits)
        finally:
            for number in range(num_experts):
                delattr(module, f"weight{number}")
        return F.pad(y, (0, 0, 0, len(rows) - total)) if total < len(rows) else y

    return transformer_engine


class _PerExpert(torch.autograd.Function):
    """The matrices [F, D] of a weight [E, F, D]. Gradients that lie one after the other, as the package makes them, are not copied."""

    @staticmethod
    def forward(ctx, weight: Tensor) -> tuple[Tensor, ...]:
        return weight.unbind(0)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor) -> Tensor:
        first, step = grads[0], grads[0].numel()
        storage, start = first.untyped_storage().data_ptr(), first.storage_offset()
        if all(grad.is_contiguous() and grad.untyped_storage().data_ptr() == storage and grad.storage_offset() == start + number * step
               for number, grad in enumerate(grads)):
            return first.as_strided((len(grads), *first.shape), (step, *first.stride()))
        return torch.stack(grads)


def _grouped_linear(engine: Engine, num_experts: int, shape: tuple[int, int], device: torch.device) -> torch.nn.Module:
    """A GroupedLinear without parameters."""
    out_features, in_features = shape
    module = engine.package.GroupedLinear(num_experts, in_features, out_features, bias=False, params_dtype=torch.bfloat16, device="meta")
    nothing = torch.empty(0, dtype=torch.bfloat16, device=device)
    for number in range(num_experts):
        delattr(module, f"weight{number}")
        module.fast_setattr(f"bias{number}", nothing)  # it hands these to its kernels, which take none that is on "meta"
    return module
