"""How a kernel is held to its reference: one function runs either, in the given dtype, and returns outputs and gradients."""
from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def need_kernels(device: str) -> None:
    """Skip where the kernels cannot run on `device`: on a CPU they need Triton's interpreter."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton, whose interpreter runs kernels on a CPU")
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("needs no CUDA device: kernels are compiled where there is one, not interpreted")
    if device == "cpu":
        _mend_interpreter()


@functools.cache
def _mend_interpreter() -> None:
    """Three faults of Triton 3.6 where kernels are interpreted: it multiplies the bits of bf16 matrices as integers, cuts fp32 to bf16
    instead of rounding, and makes an index (a loop's bound, read from memory) of an array of one number, which numpy 2.4 refuses."""
    from triton.runtime import interpreter

    dot, patch, convert = interpreter.InterpreterBuilder.create_dot, interpreter._patch_lang_tensor, interpreter._convert_float

    def widened(handle):
        if handle.dtype.scalar == interpreter.tl.bfloat16:
            return interpreter.TensorHandle((handle.data.astype("uint32") << 16).view("float32"), interpreter.tl.float32)
        return handle

    def rounded(values, source, target, rounding):
        if (source, target) != (interpreter.tl.float32, interpreter.tl.bfloat16):
            return convert(values, source, target, rounding)
        return torch.from_numpy(values.reshape(-1).copy()).bfloat16().view(torch.int16).numpy().view("uint16").reshape(values.shape)

    def patch_and_mend(tensor, scope) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter.InterpreterBuilder.create_dot = lambda self, a, b, *others: dot(self, widened(a), widened(b), *others)
    interpreter._convert_float = rounded
    interpreter._patch_lang_tensor = patch_and_mend


def as_many_as(rows: int, device: str) -> int:
    """`rows`, at most 65 where kernels are interpreted, a program after the other."""
    return rows if device == "cuda" else min(rows, 65)


def outputs_and_gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor], dy: Tensor) -> list[Tensor]:
    """[y, gradients of the floating inputs that ask for one] of y = function(*inputs), for the gradient `dy` of y."""
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    y = function(*leaves)
    assert y.shape == dy.shape, f"{tuple(y.shape)} for {tuple(dy.shape)}"
    return [y.detach(), *torch.autograd.grad(y, [x for x in leaves if x.requires_grad], dy.to(y.dtype))]


def check(kernel: Callable[..., Tensor], reference: Callable[..., Tensor], plain: Callable[..., Tensor], inputs: Sequence[Tensor],
          dy: Tensor, units: int = 1) -> None:
    """The kernel's error against the reference in float64 is at most twice that of `plain` torch, in the inputs' own dtype.

    Some units of the result's rounding are added: one, since plain torch has no error by luck for some results; more where a gradient
    sums over a thousand rows, in another order.
    """
    exact = outputs_and_gradients(reference, [_double(x) for x in inputs], dy.double())
    ours, plainly = (outputs_and_gradients(function, inputs, dy) for function in (kernel, plain))
    for got, torch_has, want in zip(ours, plainly, exact, strict=True):
        assert got.shape == want.shape and got.dtype == torch_has.dtype
        if want.numel():
            unit = units * torch.finfo(got.dtype).eps * want.abs().max()
            error, allowed = (got - want).abs().max(), 2 * (torch_has - want).abs().max() + unit
            assert error <= allowed, f"error {error:.3g} of {tuple(got.shape)}, allowed {allowed:.3g}"


def _double(x: Tensor) -> Tensor:
    return x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x


def draw(*shape: int, dtype: torch.dtype, device: str, grad: bool = True) -> Tensor:
    """Normal numbers, rounded to `dtype`."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype).requires_grad_(grad)
