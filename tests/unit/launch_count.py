"""Counting what a computation would launch on a GPU: operations of torch that are no views, and kernels of ours as one each."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_dllm.diffusion.nested import map_tensors, tensors_of
from megatron_dllm.models.diffusion_gemma import model
from megatron_dllm.moe import experts, router
from megatron_dllm.moe.dispatchers import alltoall
from megatron_dllm.tensor_parallel import cross_entropy
from megatron_dllm.transformer import attention, block, mlp, norms, rotary

# Operations that start nothing: memory, views of other names, and checks that plain torch makes on a CPU alone.
FREE = ("empty", "_unsafe_view", "_reshape_alias", "detach", "_local_scalar_dense", "promote_types", "lift_fresh")


class LaunchCounter(TorchDispatchMode):
    """`launches` by name, of everything that runs inside."""

    def __init__(self):
        super().__init__()
        self.launches: Counter[str] = Counter()
        self._is_paused = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not self._is_paused:
            self._note(function)
        return function(*args, **(kwargs or {}))

    def _note(self, function) -> None:
        name, returns = str(function).removeprefix("aten."), function._schema.returns
        is_view = bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write
        if not is_view and not name.startswith(FREE) and "empty" not in name:
            self.launches[name] += 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing inside."""
        before, self._is_paused = self._is_paused, True
        yield
        self._is_paused = before

    @property
    def total(self) -> int:
        return self.launches.total()


class _AsKernel(torch.autograd.Function):
    """A function of nested tensors that counts as `forward` and `backward` launches whatever it does."""

    @staticmethod
    def forward(ctx, counter: LaunchCounter, name: str, function: Callable, args: tuple, num_backward: int, *leaves: Tensor):
        with counter.paused(), torch.enable_grad():
            ctx.leaves = [leaf.detach().requires_grad_(leaf.requires_grad) for leaf in leaves]
            remaining = iter(ctx.leaves)
            outputs = function(*map_tensors(args, lambda _: next(remaining)))
            ctx.outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            results = tuple(output.detach().clone() for output in ctx.outputs)
        ctx.mark_non_differentiable(*(result for result in results if not result.is_floating_point()))
        counter.launches[name] += 1
        ctx.counter, ctx.name, ctx.num_backward = counter, name, num_backward
        return results if isinstance(outputs, tuple) else results[0]

    @staticmethod
    def backward(ctx, *grads: Tensor):
        wanted = [leaf for leaf in ctx.leaves if leaf.requires_grad]
        pairs = [(output, grad) for output, grad in zip(ctx.outputs, grads, strict=True) if output.requires_grad]
        with ctx.counter.paused():
            found = iter(torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True))
        ctx.counter.launches[f"{ctx.name} backward"] += ctx.num_backward
        return (*[None] * 5, *(next(found) if leaf.requires_grad else None for leaf in ctx.leaves))


def as_kernel(counter: LaunchCounter, function: Callable, name: str, num_backward: int) -> Callable:
    """`function` with the launches that its kernel has."""

    def call(*args):
        return _AsKernel.apply(counter, name, function, args, num_backward, *tensors_of(args))

    return call


def count_kernels_as_launches(counter: LaunchCounter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the functions that are kernels on a GPU count as such. Backward: one launch, one more where partial sums are added."""
    rms_norm = norms.rms_norm

    def plain_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        return as_kernel(counter, rms_norm, "rms_norm", 1 if weight is None else 2)(x, weight, eps)

    def patch(place, name: str, num_backward: int) -> None:
        monkeypatch.setattr(place, name, as_kernel(counter, getattr(place, name), name, num_backward))

    for place in (norms, attention, model):
        monkeypatch.setattr(place, "rms_norm", plain_norm)
    monkeypatch.setattr(rotary, "rms_norm", rms_norm)

    def beside(self: norms.RMSNorm, x: Tensor, num_live: int | None = None) -> tuple[Tensor, Tensor]:
        return as_kernel(counter, lambda x, weight: (rms_norm(x, weight, self.eps), x), "rms_norm beside", 2)(x, self.weight)

    monkeypatch.setattr(norms.RMSNorm, "beside", beside)
    monkeypatch.setattr(attention.SelfAttention, "_projects_at_once", lambda self, x: False)  # a CPU alone does
    monkeypatch.setattr(experts.Experts, "_is_one_function", False)  # the same
    monkeypatch.setattr(cross_entropy, "_is_first_of_largest", lambda logits, rows, is_largest: (logits.argmax(1) == rows) & is_largest)
    for place, name, num_backward in (
            (attention, "norm_heads", 2), (attention, "attend", 4), (block, "after_attention", 3), (block, "after_feed_forward", 2),
            (mlp, "gated_gelu", 1), (experts, "gated_gelu", 1), (router, "route", 2), (alltoall, "permute", 1), (alltoall, "unpermute", 1)):
        patch(place, name, num_backward)
