"""kernels.block_attention against attention over whole rows of the cache, by a mask."""
from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_dllm.transformer.key_cache import KeyCache, attend_block_in_torch, block_plan
from tests.unit.kernel_cases import DEVICES, need_kernels

ROWS = 3
# Held tokens of the rows; blocks of `length`; window, which keeps a ring of window - 1.
CASES = {
    "nothing held": ((0, 0, 0), 5, 9),
    "before the ring is full": ((3, 7, 1), 5, 9),
    "around its end": ((8, 9, 15), 5, 9),
    "long after": ((100, 33, 40), 20, 17),
    "a block longer than the ring": ((4, 40, 0), 20, 6),
    "no window": ((3, 90, 0), 5, None),
    "no window, many": ((70, 1, 33), 40, None),
}


def case(name: str, heads: int, groups: int, dim: int, dtype: torch.dtype, device: str, is_causal: bool, order=(2, 0)):
    """A cache of random numbers, NaN where no query may look, and the plan and queries of blocks of some rows."""
    held, length, window = CASES[name]
    slots = (max(held) + length if window is None else window - 1 + length + 1) + 3
    generator = torch.Generator().manual_seed(length + dim)
    cache = KeyCache(*(torch.randn(ROWS, slots, groups, dim, generator=generator).to(device, dtype) for _ in range(2)))
    rows, counts = torch.tensor(order, device=device), torch.full((len(order),), length, device=device)
    plan = block_plan(rows, torch.tensor(held, device=device), counts, slots=slots, length=length, window=window, is_causal=is_causal)
    query = torch.randn(len(order) * length, heads, dim, generator=generator).to(device, dtype) * dim**-0.5
    return query, cache, plan


def exact(query, cache, plan):
    return attend_block_in_torch(query.double(), KeyCache(cache.key.double(), cache.value.double()), plan)


def hide_unseen(cache: KeyCache, plan) -> KeyCache:
    """The cache with NaN in every slot after the blocks' own, and in rows that have no block."""
    hidden = [x.clone() for x in (cache.key, cache.value)]
    for row in range(ROWS):
        past = min(int(plan.held[row]), plan.ring) + plan.length if row in plan.rows.tolist() else 0
        for x in hidden:
            x[row, past:] = float("nan")
    return KeyCache(*hidden)


def check(query, cache, plan, tolerance, **options):
    from megatron_dllm.kernels.block_attention import block_attention

    hidden, want = hide_unseen(cache, plan), exact(query, cache, plan)
    got = block_attention(query, hidden.key, hidden.value, plan.rows, plan.held, ring=plan.ring, length=plan.length,
                          causal=plan.is_causal, window=plan.window, **options)
    assert got.dtype == query.dtype and got.shape == query.shape
    assert (got - want).abs().max() <= tolerance * want.abs().max()


def test_clean_tokens_move_to_the_slots_of_their_positions():
    """Of a ring of 4 the last positions alone, also of a block that is as long or longer, or of which some tokens are fill."""
    held, counts, length, ring = (0, 6, 3), (7, 4, 3), 7, 4
    plan = block_plan(torch.arange(3), torch.tensor(held), torch.tensor(counts), slots=ring + length + 1, length=length, window=ring + 1,
                      is_causal=True)
    cache = KeyCache(*(torch.full((3, ring + length + 1, 1, 1), -1.0) for _ in range(2)))
    for row, before in enumerate(held):
        for position in range(max(before - ring, 0), before):
            cache.key[row, position % ring] = position
        cache.key[row, min(before, ring):][:length] = (before + torch.arange(length)).view(-1, 1, 1).float()
    plan.move(cache)
    for row, total in enumerate(map(sum, zip(held, counts, strict=True))):
        kept = range(max(total - ring, 0), total)
        assert [int(cache.key[row, position % ring]) for position in kept] == list(kept)


@DEVICES
@pytest.mark.parametrize("is_causal", [False, True], ids=["canvas", "clean"])
@pytest.mark.parametrize("name, splits", [*((name, 4) for name in CASES), ("around its end", 1), ("no window", 1)])
def test_block_attention(name, is_causal, splits, device):
    need_kernels(device)
    from megatron_dllm.kernels.block_attention import BlockShape

    check(*case(name, 4, 2, 16, torch.float32, device, is_causal), 2e-6, shape=BlockShape(16, 2, 16, 4, 2), splits=splits)


@DEVICES
@pytest.mark.parametrize("name, splits", [("around its end", 1), ("no window, many", 4)])
def test_a_canvas_where_processors_move_what_they_read(name, splits, device, monkeypatch):
    need_kernels(device)
    from megatron_dllm.kernels import block_attention

    monkeypatch.setattr(block_attention, "MOVED_BYTES", 0)
    check(*case(name, 4, 2, 16, torch.float32, device, False), 2e-6, shape=block_attention.BlockShape(16, 2, 16, 4, 2), splits=splits)


@DEVICES
def test_heads_without_a_partner_and_one_block(device):
    need_kernels(device)
    for heads, groups in ((3, 3), (3, 1)):
        for is_causal in (True, False):
            check(*case("around its end", heads, groups, 16, torch.float32, device, is_causal, order=(1,)), 2e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("heads, groups, dim", [(16, 8, 256), (16, 2, 512), (4, 4, 64)])
@pytest.mark.parametrize("is_causal", [False, True], ids=["canvas", "clean"])
@pytest.mark.parametrize("name", CASES)
def test_block_attention_in_bf16(name, is_causal, heads, groups, dim):
    for splits in (None, 1):
        check(*case(name, heads, groups, dim, torch.bfloat16, "cuda", is_causal), 2**-6, splits=splits)


@DEVICES
def test_wide_tiles(device):
    need_kernels(device)
    from megatron_dllm.kernels.attention import attention_forward, shapes
    from megatron_dllm.kernels.block_attention import suits_wide, wide_tiles

    held, slots, length, dtype = (200, 0, 128), 512, 128, torch.float32 if device == "cpu" else torch.bfloat16
    assert suits_wide(512, length, slots) and not suits_wide(256, length, slots) and not suits_wide(512, 64, slots)
    dim, heads = (16, 2) if device == "cpu" else (512, 8)
    query, cache, plan = case("no window", heads, 1, dim, dtype, device, False)
    generator = torch.Generator().manual_seed(0)
    cache = KeyCache(*(torch.randn(ROWS, slots, 1, dim, generator=generator).to(device, dtype) for _ in range(2)))
    query = (torch.randn(2 * length, heads, dim, generator=generator) * dim**-0.5).to(device, dtype)
    plan = dataclasses.replace(plan, held=torch.tensor(held, device=device), slots=slots, ring=slots, length=length)
    tiles = wide_tiles(plan.rows, plan.held, slots, length)
    how = dataclasses.replace(shapes(dim, 128), forward=None)
    got = attention_forward(query, cache.key.flatten(0, 1), cache.value.flatten(0, 1), tiles, how)[0]
    want = exact(query, cache, plan)
    assert (got - want).abs().max() <= (2e-6 if device == "cpu" else 2**-6) * want.abs().max()
