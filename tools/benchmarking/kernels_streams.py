"""mHC's read and write of the residual streams beside the same in torch."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_dllm.transformer import hyper_connection as streams

from .kernel_cases import BF16, Case, Check, Sizes, Way, compare

ITERATIONS = 20
UNITS = {torch.bfloat16: 1, torch.float32: 16}  # sums in fp32 come in another order


class _Data:
    """Streams, weights that are nowhere special, mappings, and gradients of what a read and a write give."""

    def __init__(self, tokens: int, sizes: Sizes, device: torch.device):
        draw = torch.Generator(device).manual_seed(tokens)
        n, width = sizes.streams, sizes.streams * sizes.hidden
        outputs = n * n + 2 * n

        def normal(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
            return (scale * torch.randn(shape, generator=draw, device=device)).to(dtype)

        self.shape = n, ITERATIONS
        self.x, self.y, self.scale = (normal(tokens, size, dtype=BF16) for size in (width, sizes.hidden, 1))
        self.parameters = (normal(outputs, width, scale=(2 / (outputs + width)) ** 0.5), torch.tensor([0.7, 1.3, 0.9], device=device),
                           normal(outputs))
        self.du, self.grad = (normal(*shape, dtype=BF16) for shape in (self.y.shape, self.x.shape))
        self.dpost, self.dres = normal(tokens, n), normal(tokens, n, n)

    def in_float64(self) -> _Data:
        wide = object.__new__(_Data)
        wide.__dict__ = {name: value.double() if isinstance(value, Tensor) else tuple(x.double() for x in value) if name == "parameters"
                         else value for name, value in self.__dict__.items()}
        return wide

    @property
    def weights(self) -> streams.Weights:
        return streams.Weights(*self.parameters, *self.shape)


def _read(data: _Data, forward: Callable[..., Any], backward: Callable[..., Any] | None) -> tuple[Tensor, ...]:
    u, mapped = forward(data.x, data.weights)
    gradients = () if backward is None else backward(data.x, data.weights, mapped, data.du, data.grad, data.scale, data.dpost, data.dres)
    return u, *mapped[:3], *gradients


def _write(data: _Data, mapped: streams.Mapped, forward: Callable[..., Any], backward: Callable[..., Any] | None) -> tuple[Tensor, ...]:
    written = forward(data.x, data.y, mapped.post, mapped.res, data.scale)
    return written, *(() if backward is None else backward(data.x, data.y, mapped.post, data.scale, data.grad))


def _kernels() -> dict[str, Callable[..., Any]]:
    """The four functions as kernels, also where tensors are on a CPU and kernels interpreted."""
    from megatron_dllm.kernels import hyper_connection_mappings as mappings
    from megatron_dllm.kernels import hyper_connection_projection as projection
    from megatron_dllm.kernels import hyper_connection_streams as kernel

    def read(x: Tensor, w: streams.Weights) -> tuple[Tensor, streams.Mapped]:
        projected = projection.project(x, w.weight, w.num_streams)
        (u, *mapped), _, _ = mappings.read(x, projected, w.alpha, w.bias, w.num_streams, w.iterations)
        return u, streams.Mapped(*mapped)

    def read_backward(x: Tensor, w: streams.Weights, mapped: streams.Mapped, du: Tensor, grad: Tensor, scale: Tensor, dpost: Tensor,
                      dres: Tensor):
        through = mappings.mappings_backward(
            mapped.projected, mapped.root, w.alpha, w.bias, mapped.res, scale, kernel.read_products(x, du, len(x)), dpost, dres, x.shape[1],
            w.iterations, x.dtype)
        return kernel.read_backward(x, w.weight, mapped.pre, through, du, grad)

    def write_backward(x: Tensor, y: Tensor, post: Tensor, scale: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        return kernel.merge_backward(x, y, post, scale, grad, len(x))

    return {"read": read, "read_backward": read_backward, "write": kernel.merge, "write_backward": write_backward}


IN_TORCH = {"read": streams.read_in_torch, "read_backward": streams.read_backward_in_torch, "write": streams.mixed_in_torch,
            "write_backward": streams.mixed_backward_in_torch}


def checks(sizes: Sizes, device: torch.device) -> Iterator[Check]:
    """Everything that a read and a write give, and every gradient, against the same in fp64."""
    data = _Data(min(sizes.tokens, 517), sizes, device)
    wide = data.in_float64()
    kernels = _kernels()
    mapped, exact_mapped = streams.read_in_torch(data.x, data.weights)[1], streams.read_in_torch(wide.x, wide.weights)[1]
    read = [_read(of, how["read"], how["read_backward"]) for of, how in ((data, kernels), (data, IN_TORCH), (wide, IN_TORCH))]
    write = [_write(of, by, how["write"], how["write_backward"]) for of, by, how in (
        (data, mapped, kernels), (data, mapped, IN_TORCH), (wide, exact_mapped, IN_TORCH))]
    for what, results in (("read", read), ("write", write)):
        every = [compare(what, *each, units=UNITS[each[0].dtype]) for each in zip(*results, strict=True)]
        yield Check(f"{len(data.x)} tokens, {what}: {sum(check.holds for check in every)} of {len(every)} results and gradients",
                    all(check.holds for check in every))


def cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """A read and a write of all tokens of a pass."""
    for what in ("read", "write"):
        yield Case(f"mHC {what}, {sizes.tokens} tokens, n = {sizes.streams}", partial(_ways, what, sizes, device))


def _ways(what: str, sizes: Sizes, device: torch.device) -> Mapping[str, Way]:
    data = _Data(sizes.tokens, sizes, device)
    call = _read
    if what == "write":
        mapped = streams.read_in_torch(data.x, data.weights)[1]

        def call(data: _Data, forward, backward) -> tuple[Tensor, ...]:
            return _write(data, mapped, forward, backward)

    return {name: Way(partial(call, data, how[what], None), partial(call, data, how[what], how[f"{what}_backward"]))
            for name, how in (("ours", _kernels()), ("torch", IN_TORCH))}
