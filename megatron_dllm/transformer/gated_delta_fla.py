"""The gated delta rule by the kernels of the flash-linear-attention package (`--gdn-kernel-backend fla`), for bf16 on CUDA.

A call of that package takes sequences of any lengths, each from a state of its own. Runs that start where others end need those first, so
the runs of a pass go in as many calls as the longest such chain has links: two for one canvas a document.
"""
from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .gated_delta_net import GatedDeltaNet
from .gated_delta_plan import GatedDeltaPlan

LARGEST_KEY = 256  # features of a head's key, that package's limit
WRONG_ON_HOPPER = ((3, 4, 0), (3, 7, 1))  # Triton versions from and before: its gradients of a gated rule are wrong on sm_90

# (q, k, v, g, beta, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu) -> o, final states
FlaRule = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class FlaGatedDelta:
    """A rule for GatedDeltaNet. `chunk_gated_delta_rule`: the package's function of that name."""

    chunk_gated_delta_rule: FlaRule

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, initial: Tensor,
                 plan: GatedDeltaPlan) -> tuple[Tensor, Tensor | None]:
        """o [T, h, v] in value's dtype and the states to keep, fp32; arguments as GatedDeltaNet.rule has them."""
        states, outputs = initial, []
        for level in plan.run_levels:
            rows = [level.tokens.take(x)[None] for x in (query, key, value, decay, beta)]
            bounds = torch.tensor(level.bounds, dtype=torch.int64)
            out, ends = self.chunk_gated_delta_rule(
                *rows, initial_state=states[level.parents], output_final_state=True, cu_seqlens=bounds.to(query.device, non_blocking=True),
                cu_seqlens_cpu=bounds)
            outputs.append(out[0])
            states = torch.cat([states, ends])
        kept = None if plan.kept_runs is None else states[plan.kept_runs]
        return plan.run_order.take(torch.cat(outputs)), kept


def use_fla(model: nn.Module, device: torch.device) -> None:
    """Let every gated-delta layer of `model` take that package's kernels. ValueError or ImportError, with the remedy, where they fail."""
    layers = [module for module in model.modules() if isinstance(module, GatedDeltaNet)]
    if not layers:
        raise ValueError("--gdn-kernel-backend fla: no layer of this model is linear (gated delta net); leave the flag out")
    check_fla(device, (layer.key_dim for layer in layers))
    rule = FlaGatedDelta(importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule)
    for layer in layers:
        layer.rule = rule


def check_fla(device: torch.device, key_dims: Iterable[int] = ()) -> None:
    """ValueError or ImportError, with the remedy, if the package's kernels cannot run on `device`, or would be wrong there."""
    instead = "or set --gdn-kernel-backend torch"
    if device.type != "cuda":
        raise ValueError(f"--gdn-kernel-backend fla: its kernels need a CUDA device, and the device is {device}; {instead}")
    too_large = sorted({size for size in key_dims if size > LARGEST_KEY})
    if too_large:
        raise ValueError(f"--gdn-kernel-backend fla: --linear-key-head-dim is {too_large[0]}, and its kernels take at most {LARGEST_KEY}; "
                         f"lower it, {instead}")
    try:
        importlib.import_module("fla")
    except ImportError as error:
        raise ImportError(f"--gdn-kernel-backend fla: the package flash-linear-attention cannot be imported ({error}); install it with "
                          f"`bash tools/install_gpu.sh --fla`, {instead}") from error
    why = _needs_tilelang(torch.cuda.get_device_capability(device))
    if why is None:
        return
    try:
        importlib.import_module("tilelang")
    except ImportError as error:
        raise ImportError(f"--gdn-kernel-backend fla: {why}, unless the package tilelang computes them, which cannot be imported "
                          f"({error}); `python -m pip install tilelang` or another Triton, {instead}") from error


def _needs_tilelang(capability: tuple[int, int]) -> str | None:
    """Why Triton alone would give wrong gradients there, if so."""
    version = importlib.import_module("triton").__version__
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:3])
    if capability[0] != 9 or not WRONG_ON_HOPPER[0] <= numbers < WRONG_ON_HOPPER[1]:
        return None
    least, fixed = (".".join(map(str, bound)) for bound in WRONG_ON_HOPPER)
    return f"Triton is {version}, and from {least} until before {fixed} its gradients of the gated delta rule are wrong on sm_90"
