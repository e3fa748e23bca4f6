"""Keys and values of earlier tokens at fixed addresses, and attention of blocks of new tokens over them: how much is held is read on the
device alone, so that one recording serves every length.

Legend: R rows of the cache, S slots of a row, A blocks of C new tokens, h query heads, g key and value heads, d head dimension.

A full layer keeps position p in slot p. A sliding layer with a window of w keeps the last w - 1 tokens in a ring: position p in slot
p mod (w - 1). With w = 5, a canvas of 3 (x y z) after 6 tokens (0 to 5):

    slot        0  1  2  3    4  5  6    7
    full        0  1  2  3    4  5  x    y  z ...
    sliding     4  5  2  3    x  y  z    -          the canvas stands after the ring, and sees slots 0 to 6

A block's own keys stand right after what is held. A canvas leaves them there, to be written over; clean tokens then move into the ring.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.attention_tiles import AttentionTiles, takes_attention
from .precision import at_least_fp32


@dataclass(frozen=True)
class KeyCache:
    """key, value [R, S, g, d]."""

    key: Tensor
    value: Tensor

    def put(self, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Write key, value [n, g, d] into `slots` int64 [n] of all the rows' R S."""
        self.key.flatten(0, 1).index_copy_(0, slots, key)
        self.value.flatten(0, 1).index_copy_(0, slots, value)


@dataclass(frozen=True)
class BlockPlan:
    """Blocks of C tokens right after what the rows hold, for the layers of one type. All tensors are on the device.

        rows    int64 [A]     the row of the cache that each block goes on
        held    int64 [R]     tokens before, of every row
        ring    slots that keep tokens (full layers: all)
        own     int64 [A C]   slots, of all the rows' R S, of the blocks' own keys
        moved   int64 [A C]   where clean tokens go from there; those that do not stay, to the last slot of their row (None: they stay)
        tiles   for the wide kernels, where these are used

    Causal, a token sees its block up to itself, and what is inside the window; otherwise the whole block and all that is held.
    """

    rows: Tensor
    held: Tensor
    slots: int
    ring: int
    length: int
    window: int | None
    is_causal: bool
    own: Tensor
    moved: Tensor | None
    tiles: AttentionTiles | None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: KeyCache) -> Tensor:
        """[A C, h, d] from query [A C, h, d]; key and value [A C, g, d] are put in the cache."""
        cache.put(self.own, key, value)
        out = self.attend_placed(query, cache)
        self.move(cache)
        return out

    def move(self, cache: KeyCache) -> None:
        """Move the blocks' own keys to where clean tokens stay."""
        if self.moved is not None:
            cache.put(self.moved, *(x.flatten(0, 1).index_select(0, self.own) for x in (cache.key, cache.value)))

    def attend_placed(self, query: Tensor, cache: KeyCache) -> Tensor:
        """The same where the blocks' own keys stand in the cache already."""
        if not takes_attention(query, cache.key, cache.value):
            return attend_block_in_torch(query, cache, self)
        from ..kernels import attention, block_attention  # Triton is there with CUDA alone

        if self.tiles is not None:
            return attention.attention_forward(query, cache.key.flatten(0, 1), cache.value.flatten(0, 1), self.tiles)[0]
        return block_attention.block_attention(query, cache.key, cache.value, self.rows, self.held, ring=self.ring, length=self.length,
                                               causal=self.is_causal, window=self.window)


def slots_of(rows: Tensor, positions: Tensor, slots: int, ring: int) -> Tensor:
    """Where, of all the rows' R S slots, a cache keeps these positions of these rows (int64 [n] both)."""
    return rows * slots + positions % ring


def block_plan(rows: Tensor, held: Tensor, counts: Tensor, *, slots: int, length: int, window: int | None, is_causal: bool,
               tiles: AttentionTiles | None = None) -> BlockPlan:
    """The plan of blocks of `length` tokens, of which `counts` int64 [A] are none fill. The host reads no number of them."""
    ring = slots if window is None else window - 1
    place = torch.arange(length, device=rows.device)
    before = held[rows][:, None]
    own, moved = rows[:, None] * slots + before.clamp(max=ring) + place, None
    if window is not None and is_causal:
        stays = (place < counts[:, None]) & (place >= counts[:, None] - ring)
        moved = torch.where(stays, slots_of(rows[:, None], before + place, slots, ring), rows[:, None] * slots + slots - 1).flatten()
    return BlockPlan(rows, held, slots, ring, length, window, is_causal, own.flatten(), moved, tiles)


def attend_block_in_torch(query: Tensor, cache: KeyCache, plan: BlockPlan) -> Tensor:
    """Attention over whole rows of the cache, by a mask. The oracle of the kernels, and what runs without them."""
    heads, groups = query.shape[1], cache.key.shape[2]
    q = at_least_fp32(query).unflatten(0, (-1, plan.length))
    k, v = (at_least_fp32(x[plan.rows]).repeat_interleave(heads // groups, 2) for x in (cache.key, cache.value))
    before = plan.held[plan.rows][:, None, None]
    count = before.clamp(max=plan.ring)
    slot, number = torch.arange(plan.slots, device=q.device), torch.arange(plan.length, device=q.device)[:, None]
    own = slot - count
    if plan.is_causal:
        seen, earlier = (own >= 0) & (own <= number), slot < count
        if plan.window is not None:
            age = (before - 1 - slot) % plan.ring
            seen, earlier = seen & (number - own < plan.window), earlier & (age + number < plan.window - 1)
        seen = seen | earlier
    else:
        seen = own < plan.length
    scores = torch.einsum("aqhd,ashd->ahqs", q, k).masked_fill(~seen[:, None], -torch.inf)
    return torch.einsum("ahqs,ashd->aqhd", scores.softmax(-1), v).flatten(0, 1).to(query.dtype)
