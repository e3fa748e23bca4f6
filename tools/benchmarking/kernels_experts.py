"""One layer's experts, both passes of a microbatch, beside torch's grouped product."""
from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from megatron_dllm.config import PRESETS
from megatron_dllm.data_parallel import GradientBuckets
from megatron_dllm.kernels import reference
from megatron_dllm.moe.experts import Experts
from megatron_dllm.parallel import ParallelContext

from .kernel_cases import BF16, Case, Check, Sizes, Way, compare
from .workload import DeviceNormal


def checks(sizes: Sizes, device: torch.device) -> Iterator[Check]:
    """Uneven counts, an expert without rows, against fp64; torch's grouped product as the yardstick."""
    config = dataclasses.replace(sizes, experts=4)
    counts = torch.tensor([3, 0, 141, 67] if device.type == "cuda" else [3, 0, 5, 1], device=device)
    experts, rows = _experts(config, device), _rows(int(counts.sum()), sizes.hidden, device)
    dy = torch.randn_like(rows)

    def results(function, *inputs: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        y = function(*leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]

    def by_layer(by_kernels: bool) -> list[Tensor]:
        experts.by_kernels = by_kernels
        x = rows.detach().requires_grad_()
        y = experts(x, counts)
        return [y.detach(), *torch.autograd.grad(y, (x, experts.gate_up, experts.down), dy)]

    exact = results(lambda x, up, down: reference.grouped_mlp(x, up, down, counts),
                    *(x.double() for x in (rows, experts.gate_up, experts.down)))
    for what, *each in zip(("y", "dx", "gate and up", "down"), by_layer(True), by_layer(False), exact, strict=True):
        yield compare(f"{len(rows)} rows of 4 experts, {what}", *each)


def cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """All experts' weights trained, their gradients added to fp32 buffers; then frozen."""
    for number, uses in enumerate(sizes.rows):
        products = 6 * sum(uses) * sizes.hidden * sizes.inner
        name = f"{sizes.experts} experts, {' + '.join(map(str, uses))} rows"
        yield Case(f"{name}, fp32 gradients", partial(_ways, sizes, uses, device, is_trained=True), 3 * products,
                   is_compiled_apart=number == 0)
        yield Case(f"{name}, frozen", partial(_ways, sizes, uses, device, is_trained=False), 2 * products, is_compiled_apart=number == 0)


def _ways(sizes: Sizes, uses: tuple[int, ...], device: torch.device, *, is_trained: bool) -> Mapping[str, Way]:
    experts = _experts(sizes, device).requires_grad_(is_trained)
    buckets = GradientBuckets(experts.named_parameters() if is_trained else (), experts.context)
    draw = torch.Generator(device).manual_seed(1)
    counts = [torch.randint(0, sizes.experts, (n,), generator=draw, device=device).bincount(minlength=sizes.experts) for n in uses]
    rows = [_rows(n, sizes.hidden, device).requires_grad_() for n in uses]
    dys = [0.1 * torch.randn_like(x) for x in rows]

    def forward(by_kernels: bool) -> list[Tensor]:
        experts.by_kernels = by_kernels
        return [experts(x, count) for x, count in zip(rows, counts, strict=True)]

    def whole(by_kernels: bool) -> None:
        for x in rows:
            x.grad = None
        buckets.zero()
        torch.autograd.backward(forward(by_kernels), dys)

    return {name: Way(partial(forward, by_kernels), partial(whole, by_kernels)) for name, by_kernels in
            (("ours", True), ("grouped_mm", False))}


def _experts(sizes: Sizes, device: torch.device) -> Experts:
    config = dataclasses.replace(PRESETS["toy"], hidden_size=sizes.hidden, moe_ffn_hidden_size=sizes.inner, num_experts=sizes.experts)
    context = ParallelContext.single(device)
    experts = Experts("experts", config, context=context, init=DeviceNormal(device), dtype=BF16)
    experts.context = context
    return experts


def _rows(count: int, width: int, device: torch.device) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator(device).manual_seed(count), device=device).to(BF16)
