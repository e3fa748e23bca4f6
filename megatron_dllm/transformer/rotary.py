"""Rotary positions: "default" turns every dimension, "proportional" only the first pairs, spread over the whole head.

inv_freq, cos and sin are fp32, always. Rotate-half pairs dimension i with i + d/2. Proportional (docs/model.md section 2): inv_freq[i] =
theta^(-2i/d) for i < fraction * d/2 and 0 beyond, so with d = 512 and fraction 0.25 the dimensions 0..63 and 256..319 turn. It is not the
usual partial rotary, which would turn the first 128 dimensions with frequencies of a head of 128.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..kernels.launch import takes
from .norms import gradient_of_normed, inverse_root, rms_norm
from .plain_function import PlainFunction
from .precision import at_least_fp32


@dataclass(frozen=True)
class RotaryTable:
    """cos, sin: fp32 [T, 1, d/2], a row a token."""

    cos: Tensor
    sin: Tensor

    def __getitem__(self, rows: slice) -> RotaryTable:
        """The table of some of the tokens."""
        return RotaryTable(self.cos[rows], self.sin[rows])

    @cached_property
    def whole(self) -> tuple[Tensor, Tensor]:
        """What a head and its swapped halves are multiplied by: [cos ; cos] and [-sin ; sin], [T, 1, d], made when first asked for."""
        return torch.cat([self.cos, self.cos], -1), torch.cat([-self.sin, self.sin], -1)

    @cached_property
    def angles(self) -> Tensor:
        """fp32 [T, d], of a half turn at most: what turns each dimension, for kernels of others. Made when it is first asked for."""
        half = torch.atan2(self.sin, self.cos)[:, 0]
        return torch.cat([half, half], dim=-1)


def inverse_frequencies(head_dim: int, theta: float, fraction: float, device: torch.device) -> Tensor:
    """fp32 [d/2]; the last (1 - fraction) of them are zero."""
    turning = int(fraction * head_dim // 2)
    exponent = torch.arange(0, 2 * turning, 2, dtype=torch.float32, device=device) / head_dim
    return torch.cat([1.0 / theta ** exponent, torch.zeros(head_dim // 2 - turning, device=device)])


def rotary_table(positions: Tensor, inv_freq: Tensor) -> RotaryTable:
    """The table of tokens at `positions` (integers [T])."""
    angles = positions[:, None].float() * inv_freq
    return RotaryTable(angles.cos()[:, None], angles.sin()[:, None])


def rotate(x: Tensor, table: RotaryTable) -> Tensor:
    """x [T, heads, d] turned by its tokens' angles; the dtype of `x`."""
    low, high = at_least_fp32(x).chunk(2, dim=-1)
    return torch.cat([low * table.cos - high * table.sin, high * table.cos + low * table.sin], dim=-1).to(x.dtype)


def norm_and_rotate(x: Tensor, weight: Tensor | None, table: RotaryTable, eps: float) -> Tensor:
    """rotate(rms_norm(x)) of x [T, heads, d]; the dtype of `x`."""
    if takes(x, weight, table.cos):
        from ..kernels import norm_and_rotate as kernel  # Triton is there with CUDA alone

        return kernel.norm_and_rotate(x, weight, table.cos[:, 0], table.sin[:, 0], eps)
    return rotate(rms_norm(x, weight, eps), table)


def norm_and_rotate_pair(query: Tensor, key: Tensor, query_weight: Tensor | None, key_weight: Tensor | None, table: RotaryTable,
                         eps: float) -> tuple[Tensor, Tensor]:
    """Both of queries [T, h, d] and keys [T, g, d]."""
    return norm_and_rotate(query, query_weight, table, eps), norm_and_rotate(key, key_weight, table, eps)


def norm_heads_and_keep(query: Tensor, key: Tensor, value: Tensor, query_weight: Tensor, key_weight: Tensor, table: RotaryTable,
                        eps: float, places: Tensor, num_kept: int, num_live: int | None) -> tuple[Tensor, ...]:
    """`norm_heads` on CUDA, and the keys and values [n, g, d] of `num_kept` tokens beside them; places int64 [T]: see LayerPass.

    Gradients of tokens from `num_live` on (None: of none) are taken for zero.
    """
    from ..kernels import norm_heads as kernel  # Triton is there with CUDA alone

    return kernel.norm_heads(query, key, None if value is key else value, query_weight, key_weight, table.cos[:, 0], table.sin[:, 0], eps,
                             places, num_kept, num_live)


def norm_heads(query: Tensor, key: Tensor, value: Tensor, query_weight: Tensor, key_weight: Tensor, table: RotaryTable,
               eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [T, h, d] and keys [T, g, d] normed and turned, values [T, g, d] normed without a weight, which may be the raw keys.

    All heads in one function: one kernel each way on CUDA, elsewhere a dozen operations in plain torch.
    """
    if takes(query, key, value, query_weight, key_weight, table.cos):
        from ..kernels import norm_heads as kernel  # Triton is there with CUDA alone

        return kernel.norm_heads(query, key, None if value is key else value, query_weight, key_weight, table.cos[:, 0], table.sin[:, 0],
                                 eps)
    joined = torch.cat([query, key] if value is key else [query, key, value], 1)
    return norm_joined_heads(joined, query.shape[1], key.shape[1], query_weight, key_weight, table, eps)


def norm_joined_heads(joined: Tensor, num_queries: int, num_keys: int, query_weight: Tensor, key_weight: Tensor, table: RotaryTable,
                      eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """`norm_heads` of [query ; key ; value] or, where the values are the raw keys, [query ; key], in plain torch."""
    return _NormHeads.of(joined, num_queries, num_keys, query_weight, key_weight, *table.whole, eps)


class _NormHeads(PlainFunction):
    """n = x * r of all heads x; the first h + g of them times their weight and turned, the last g as they are. Saved: n and r."""

    @staticmethod
    def forward(ctx, joined: Tensor, num_queries: int, num_keys: int, query_weight: Tensor, key_weight: Tensor, cos: Tensor, sin: Tensor,
                eps: float) -> tuple[Tensor, Tensor, Tensor]:
        head_dim, num_turned = joined.shape[2], num_queries + num_keys
        x = at_least_fp32(joined)
        root = inverse_root(x, eps)
        normed = x * root
        weight = torch.cat([query_weight.expand(num_queries, head_dim), key_weight.expand(num_keys, head_dim)]).to(x.dtype)
        turned = _turn(normed[:, :num_turned] * weight, cos, sin).to(joined.dtype)
        ctx.save_for_backward(normed, root, weight, cos, sin)
        ctx.num_queries, ctx.num_keys, ctx.dtype, ctx.weight_dtype = num_queries, num_keys, joined.dtype, query_weight.dtype
        return *turned.split([num_queries, num_keys], 1), normed[:, -num_keys:].to(joined.dtype)

    @staticmethod
    def backward(ctx, dquery: Tensor, dkey: Tensor, dvalue: Tensor):
        normed, root, weight, cos, sin = ctx.saved_tensors
        num_queries, num_turned = ctx.num_queries, ctx.num_queries + ctx.num_keys
        back = _turn(at_least_fp32(torch.cat([dquery, dkey], 1)), cos, sin, -1)
        of_weights = (None, None)
        if any(ctx.needs_input_grad[3:5]):
            by_head = (back * normed[:, :num_turned]).sum(0)
            of_weights = tuple(part.sum(0).to(ctx.weight_dtype) for part in (by_head[:num_queries], by_head[num_queries:]))
        if normed.shape[1] == num_turned:
            grad = back.mul_(weight)
            grad[:, num_queries:].add_(dvalue)
        else:
            grad = torch.empty_like(normed)
            torch.mul(back, weight, out=grad[:, :num_turned])
            grad[:, num_turned:].copy_(dvalue)
        return gradient_of_normed(grad, normed, root).to(ctx.dtype), None, None, *of_weights, None, None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, sign: int = 1) -> Tensor:
    """`rotate` of x [T, heads, d], at least fp32, by a table's `whole`, or with -1 back; in place, without gradient."""
    low, high = x.chunk(2, -1)
    swapped = torch.cat([high, low], -1)
    return x.mul_(cos).addcmul_(swapped, sin, value=sign)
