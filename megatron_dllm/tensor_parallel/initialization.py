"""Initial weights: a pure function of seed and global parameter name, so that no layout changes them."""

from __future__ import annotations

import hashlib
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from megatron_dllm.parallel.placement import Placement, cut_rectangle


class Init(Protocol):
    """Draws a whole parameter (or that of one expert), the same on every rank."""

    def __call__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, expert: int | None = None) -> Tensor: ...

    def with_std(self, std: float) -> Init:
        """The same draws with another standard deviation (a constant stays as it is)."""
        ...


class Initializer:
    """Normal draws of standard deviation `std`, made in fp32 on the CPU whatever the dtype asked for."""

    def __init__(self, seed: int, std: float):
        self.seed = seed
        self.std = std

    def __call__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, expert: int | None = None) -> Tensor:
        """Weights of `shape` for the parameter with this global name; each expert has a stream of its own."""
        # Philox takes a key of 128 bits; torch's CPU generator would keep 32 bits of its seed, and two of the release's
        # thousands of expert matrices would coincide one time in a hundred.
        generator = np.random.Generator(np.random.Philox(key=_key(self.seed, name, expert)))
        draw = torch.from_numpy(generator.standard_normal(shape, dtype=np.float32))
        return draw.mul_(self.std).to(dtype)

    def with_std(self, std: float) -> Initializer:
        """The same draws, scaled."""
        return Initializer(self.seed, std)


class DeviceInitializer:
    """The same distribution drawn in fp32 on `device`, a GPU: fast, alike for every layout, other values than `Initializer`'s."""

    def __init__(self, seed: int, std: float, device: torch.device):
        self.seed, self.std, self.device = seed, std, device

    def __call__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, expert: int | None = None) -> Tensor:
        """Weights of `shape` for the parameter with this global name; each expert has a stream of its own."""
        # A CUDA generator keeps 64 bits of its seed, as a signed number.
        generator = torch.Generator(self.device).manual_seed(_key(self.seed, name, expert) >> 65)
        return torch.empty(shape, device=self.device).normal_(std=self.std, generator=generator).to(dtype)

    def with_std(self, std: float) -> DeviceInitializer:
        """The same draws, scaled."""
        return DeviceInitializer(self.seed, std, self.device)


class Constant:
    """Every weight is `value`, e.g. 1 for norms."""

    def __init__(self, value: float):
        self.value = value

    def __call__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, expert: int | None = None) -> Tensor:
        """Weights of `shape`, all equal."""
        return torch.full(shape, self.value, dtype=dtype)

    def with_std(self, std: float) -> Constant:
        """Itself: it has no spread."""
        return self


def _key(seed: int, name: str, expert: int | None) -> int:
    text = f"{seed}/{name}" if expert is None else f"{seed}/{name}/{expert}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")


def make_parameter(name: str, placement: Placement, *, init: Init, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Our shard of the parameter `name`, drawn whole and cut (experts: one by one, along dimension 0); fill is zero.

    Its `placement` attribute is the placement; `main_gradient` is None until gradients get a buffer (see data_parallel.buckets). With
    `hold_fp32` the dtype is fp32 at least.
    """
    if placement.hold_fp32:
        dtype = torch.promote_types(dtype, torch.float32)
    local = torch.zeros(placement.local_shape, dtype=dtype, device=device)
    region = placement.region(local)
    if placement.grid == "expert":
        for i in range(placement.extent[0]):
            whole = init(name, placement.shape[1:], dtype, expert=placement.offset[0] + i)
            region[i].copy_(cut_rectangle(whole, placement.offset[1:], placement.extent[1:]))
    else:
        region.copy_(placement.cut(init(name, placement.shape, dtype)))
    parameter = nn.Parameter(local)
    parameter.placement, parameter.main_gradient = placement, None
    return parameter
