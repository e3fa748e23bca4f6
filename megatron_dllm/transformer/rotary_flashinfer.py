"""Rotary positions by FlashInfer's kernel (`--use-flashinfer-fused-rope`), in generation alone: it has no gradient.

Queries and keys are turned in one launch, from the same table of all d angles that our own kernel takes: on full layers most of them are
zero, and that package's own tables, which stop at the first pairs, would turn other dimensions (see rotary.py).
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor, nn

from ..kernels.flashinfer import load_flashinfer
from .attention import SelfAttention
from .norms import rms_norm
from .rotary import RotaryTable

FLAG = "--use-flashinfer-fused-rope"
HEAD_DIMS = (64, 128, 256, 512)  # with others that package returns wrong numbers without an error

# (positions, query [T, h * d], key [T, g * d], head size, table [positions, d], is_neox) -> both turned
ApplyRope = Callable[[Tensor, Tensor, Tensor, int, Tensor, bool], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class FlashInferRotary:
    """A `turn` for SelfAttention. `apply_rope`: FlashInfer's apply_rope_with_cos_sin_cache."""

    apply_rope: ApplyRope

    def __call__(self, query: Tensor, key: Tensor, query_weight: Tensor, key_weight: Tensor, table: RotaryTable,
                 eps: float) -> tuple[Tensor, Tensor]:
        """Normed and turned [T, h, d] and [T, g, d]; the dtypes given."""
        head_dim, rows = query.shape[-1], torch.arange(len(query), device=query.device)
        angles = torch.cat([table.cos, table.sin], dim=-1)[:, 0]  # a row a token: positions are rows
        normed = (rms_norm(x, weight, eps).flatten(1) for x, weight in ((query, query_weight), (key, key_weight)))
        turned = self.apply_rope(rows, *normed, head_dim, angles, True)
        return tuple(x.unflatten(1, (-1, head_dim)) for x in turned)


def use_flashinfer_rope(model: nn.Module, device: torch.device) -> None:
    """Let every attention layer of `model`, which is to generate, take that kernel. ValueError or ImportError, with the remedy."""
    layers = [module for module in model.modules() if isinstance(module, SelfAttention)]
    turn = FlashInferRotary(check_flashinfer(device, (layer.head_dim for layer in layers)).apply_rope_with_cos_sin_cache)
    for layer in layers:
        layer.turn = turn


def check_flashinfer(device: torch.device, head_dims: Iterable[int] = ()) -> ModuleType:
    """The package. ValueError or ImportError, with the remedy, if its kernel cannot run on `device`, or would be wrong for one of the head
    sizes."""
    wrong = sorted(set(head_dims) - set(HEAD_DIMS))
    if wrong:
        raise ValueError(f"{FLAG}: heads of size {', '.join(map(str, wrong))}, and its kernel is right only for "
                         f"{', '.join(map(str, HEAD_DIMS))}; leave the flag out")
    return load_flashinfer(FLAG, device)
