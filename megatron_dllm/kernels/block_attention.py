"""softmax(q k^T) v of blocks of new tokens over a cache at fixed addresses: how many keys a row holds is read on the device.

Legend: A blocks of C tokens each, h query heads, g key and value heads (h a multiple of g), d head dimension, S slots of a cache's row.

Block a belongs to row r = rows[a] of the cache. Its own keys stand in slots n to n + C, right after what the row holds: n = min(held[r],
ring). Not causal, a query sees slots 0 to n + C. Causal, query i sees its own keys up to i, and of the others, with a window of w, those
whose age, 0 for the newest, is under w - 1 - i; position p stands in slot p mod ring.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .attention import shapes
from .attention_tiles import TILE, AttentionTiles, Chunk
from .launch import has_large_shared_memory, processors

MOST_SPLITS = 8
MOVED_BYTES = 512  # of a key, at most


@dataclass(frozen=True)
class BlockShape:
    """queries x heads: of a group that share a program's keys; keys: at a time."""

    queries: int
    heads: int
    keys: int
    warps: int
    stages: int


@triton.jit
def _take(q, key, value, column, inside, seen, total, largest, mixed, KEY_STRIDE: tl.constexpr, DIM: tl.constexpr, PRECISION: tl.constexpr):
    """Takes the keys in slots `column` into the running sum, largest score (in base 2) and mix."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    at = column[:, None] * KEY_STRIDE + tl.arange(0, DIM)[None, :]
    k = tl.load(key + at, mask=inside[:, None], other=0.0)
    scores = tl.where(seen, tl.dot(q, tl.trans(k), input_precision=PRECISION) * LOG2_E, float("-inf"))
    now_largest = tl.maximum(largest, tl.max(scores, 1))
    shift = tl.where(now_largest == float("-inf"), 0.0, now_largest)  # a row that has seen nothing: 0 and not NaN below
    p = tl.exp2(scores - shift[:, None])
    rescale = tl.exp2(largest - shift)
    v = tl.load(value + at, mask=inside[:, None], other=0.0)
    mixed = tl.dot(p.to(v.dtype), v, mixed * rescale[:, None], input_precision=PRECISION)
    return total * rescale + tl.sum(p, 1), now_largest, mixed


@triton.jit(do_not_specialize=["slots", "ring", "num_queries"])
def _attend(query, key, value, rows, held, out, lse, slots, ring, num_queries, LENGTH: tl.constexpr, HEADS: tl.constexpr,
            GROUP: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr, PACK: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
            CAUSAL: tl.constexpr, WINDOW: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr):
    """out [SPLITS, A C, h, d] and lse [SPLITS, A C, h] of each part of the keys; lse is left out where there is one part."""
    BLOCKS: tl.constexpr = (LENGTH + QUERIES - 1) // QUERIES
    PACKS: tl.constexpr = HEADS // PACK
    KEY_STRIDE: tl.constexpr = HEADS // GROUP * DIM
    split, pack = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS % PACKS
    block, which = tl.program_id(0) // (SPLITS * PACKS) % BLOCKS, tl.program_id(0) // (SPLITS * PACKS * BLOCKS)
    place, inner = tl.arange(0, PACK * QUERIES), tl.arange(0, DIM)
    number, head = block * QUERIES + place % QUERIES, pack * PACK + place // QUERIES
    is_query = number < LENGTH
    at = ((which * LENGTH + number).to(tl.int64) * HEADS + head)[:, None] * DIM + inner[None, :]
    q = tl.load(query + at, mask=is_query[:, None], other=0.0)
    row = tl.load(rows + which)
    before = tl.load(held + row).to(tl.int32)
    count = tl.minimum(before, ring)
    offset = row.to(tl.int64) * slots * KEY_STRIDE + pack * PACK // GROUP * DIM
    key += offset
    value += offset

    past = count + LENGTH  # the slot after the last that any query of this program sees
    if CAUSAL:
        past = count + tl.minimum((block + 1) * QUERIES, LENGTH)
    tiles = (past + KEYS - 1) // KEYS
    share = (tiles + SPLITS - 1) // SPLITS
    total, largest = tl.zeros((PACK * QUERIES,), tl.float32), tl.full((PACK * QUERIES,), float("-inf"), tl.float32)
    mixed = tl.zeros((PACK * QUERIES, DIM), tl.float32)
    for tile in tl.range(split * share, tl.minimum((split + 1) * share, tiles), num_stages=STAGES):
        column = tile * KEYS + tl.arange(0, KEYS)
        inside = column < past
        if CAUSAL:
            own = column - count
            seen = (own >= 0)[None, :] & (own[None, :] <= number[:, None])
            if WINDOW > 0:
                seen = seen & (number[:, None] - own[None, :] < WINDOW)
                age = (before - 1 - column + ring) % ring  # of slots that hold an earlier token
                seen = seen | (column < count)[None, :] & (age[None, :] + number[:, None] < WINDOW - 1)
            else:
                seen = seen | (column < count)[None, :]
        else:
            seen = inside[None, :]
        total, largest, mixed = _take(q, key, value, column, inside, seen, total, largest, mixed, KEY_STRIDE, DIM, PRECISION)

    LN_2: tl.constexpr = 0.6931471805599453
    sees_any = total > 0
    total = tl.where(sees_any, total, 1.0)
    y = mixed / total[:, None]
    tl.store(out + split.to(tl.int64) * num_queries * (HEADS * DIM) + at, y.to(out.dtype.element_ty), mask=is_query[:, None])
    if SPLITS > 1:
        place = (split * num_queries + which * LENGTH + number) * HEADS + head
        tl.store(lse + place, tl.where(sees_any, (largest + tl.log2(total)) * LN_2, float("-inf")), mask=is_query)


@triton.jit
def _take_moved(q, key, value, at, head, column, past, total, largest, mixed, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """As `_take`, of a tile that the memory moves by itself; `largest` is the score as it is. MASKED: slots from `past` on are unseen."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    scores = tl.dot(q, key.load([at, head]).T, input_precision=PRECISION)
    if MASKED:
        scores = tl.where((column < past)[None, :], scores, float("-inf"))
    now_largest = tl.maximum(largest, tl.max(scores, 1))
    p = tl.exp2(scores * LOG2_E - (now_largest * LOG2_E)[:, None])
    rescale = tl.exp2((largest - now_largest) * LOG2_E)
    v = value.load([at, head])
    if MASKED:
        v = tl.where((column < past)[:, None], v, 0.0)
    mixed = tl.dot(p.to(v.dtype), v, mixed * rescale[:, None], input_precision=PRECISION)
    return total * rescale + tl.sum(p, 1), now_largest, mixed


@triton.jit(do_not_specialize=["slots", "ring", "num_queries"])
def _attend_canvas(query, key, value, rows, held, out, lse, slots, ring, num_queries, LENGTH: tl.constexpr, HEADS: tl.constexpr,
                   GROUP: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr, PACK: tl.constexpr, KEYS: tl.constexpr,
                   SPLITS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr):
    """As `_attend`, not causal: all queries see the same slots, so that only the last tile needs a mask. key, value: descriptors of
    [R S, g d] by [KEYS, d]."""
    BLOCKS: tl.constexpr = (LENGTH + QUERIES - 1) // QUERIES
    PACKS: tl.constexpr = HEADS // PACK
    split, pack = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS % PACKS
    block, which = tl.program_id(0) // (SPLITS * PACKS) % BLOCKS, tl.program_id(0) // (SPLITS * PACKS * BLOCKS)
    place, inner = tl.arange(0, PACK * QUERIES), tl.arange(0, DIM)
    number, head = block * QUERIES + place % QUERIES, pack * PACK + place // QUERIES
    is_query = number < LENGTH
    at = ((which * LENGTH + number).to(tl.int64) * HEADS + head)[:, None] * DIM + inner[None, :]
    q = tl.load(query + at, mask=is_query[:, None], other=0.0)
    row = tl.load(rows + which)
    past = tl.minimum(tl.load(held + row).to(tl.int32), ring) + LENGTH
    first, column = (row * slots).to(tl.int32), pack * PACK // GROUP * DIM
    tiles = (past + KEYS - 1) // KEYS
    share = (tiles + SPLITS - 1) // SPLITS
    start, end = split * share, tl.minimum((split + 1) * share, tiles)
    whole = tl.minimum(end, past // KEYS)
    total, largest = tl.zeros((PACK * QUERIES,), tl.float32), tl.full((PACK * QUERIES,), float("-inf"), tl.float32)
    mixed = tl.zeros((PACK * QUERIES, DIM), tl.float32)
    for tile in tl.range(start, whole, num_stages=STAGES):
        total, largest, mixed = _take_moved(q, key, value, first + tile * KEYS, column, 0, past, total, largest, mixed, False, PRECISION)
    for tile in tl.range(tl.maximum(start, whole), end, num_stages=1):
        slot = tile * KEYS + tl.arange(0, KEYS)
        total, largest, mixed = _take_moved(q, key, value, first + tile * KEYS, column, slot, past, total, largest, mixed, True, PRECISION)

    LN_2: tl.constexpr = 0.6931471805599453
    sees_any = total > 0
    total = tl.where(sees_any, total, 1.0)
    y = mixed / total[:, None]
    tl.store(out + split.to(tl.int64) * num_queries * (HEADS * DIM) + at, y.to(out.dtype.element_ty), mask=is_query[:, None])
    if SPLITS > 1:
        place = (split * num_queries + which * LENGTH + number) * HEADS + head
        tl.store(lse + place, tl.where(sees_any, largest + tl.log2(total) * LN_2, float("-inf")), mask=is_query)


@triton.jit(do_not_specialize=["count"])
def _merge(parts, lse, out, count, DIM: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr):
    """out [count, d] from parts fp32 [SPLITS, count, d] and their lse [SPLITS, count]."""
    row, inner = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, DIM)
    inside = row < count
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    for split in tl.static_range(SPLITS):
        largest = tl.maximum(largest, tl.load(lse + split * count + row, mask=inside, other=0.0))
    total, mixed = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, DIM), tl.float32)
    for split in tl.static_range(SPLITS):
        weight = tl.exp(tl.load(lse + split * count + row, mask=inside, other=0.0) - largest)
        at = (split * count + row).to(tl.int64)[:, None] * DIM + inner[None, :]
        mixed += weight[:, None] * tl.load(parts + at, mask=inside[:, None], other=0.0)
        total += weight
    at = row.to(tl.int64)[:, None] * DIM + inner[None, :]
    tl.store(out + at, (mixed / total[:, None]).to(out.dtype.element_ty), mask=inside[:, None])


def block_shape(head_dim: int, group: int, *, moved: bool) -> BlockShape:
    """As the ordinary forward's shapes (see attention.shapes); two heads of a group share the keys that a program reads. `moved`: by the
    memory itself (eight canvases of 256 over 1024 keys, 106 us on an H200; two heads 107, without that 116)."""
    if head_dim >= 512:
        return BlockShape(64, 1, 32, warps=8, stages=2)
    if moved:
        return BlockShape(128, 1, 64, warps=8, stages=2)
    heads = 2 if group % 2 == 0 else 1
    return BlockShape(64, heads, 64, warps=4 * heads, stages=2)


def block_attention(query: Tensor, key: Tensor, value: Tensor, rows: Tensor, held: Tensor, *, ring: int, length: int, causal: bool,
                    window: int | None, shape: BlockShape | None = None, splits: int | None = None) -> Tensor:
    """[A C, h, d] of query [A C, h, d] over the cache key, value [R, S, g, d]; rows int64 [A], held int64 [R] as above.

    `splits` parts of the keys are mixed by programs of their own, then put together (None: as many as fill the device).
    """
    num_queries, heads, head_dim = query.shape
    slots, groups = key.shape[1:3]
    assert query.is_contiguous() and key.is_contiguous() and value.is_contiguous() and slots >= ring + length or window is None
    group, moved = heads // groups, not causal and _moves_tiles(query, head_dim)
    shape = shape or block_shape(head_dim, group, moved=moved)
    blocks = len(rows) * triton.cdiv(length, shape.queries) * (heads // shape.heads)
    if splits is None:
        splits = 1
        while 2 * splits * blocks <= processors(query.device) and splits < MOST_SPLITS:
            splits *= 2
    out = torch.empty_like(query)
    if not num_queries:
        return out
    parts, lse = out, None
    if splits > 1:
        parts = torch.empty(splits, *query.shape, dtype=torch.float32, device=query.device)
        lse = torch.empty(splits, num_queries, heads, dtype=torch.float32, device=query.device)
    sizes = {"LENGTH": length, "HEADS": heads, "GROUP": group, "DIM": head_dim, "QUERIES": shape.queries, "PACK": shape.heads,
             "KEYS": shape.keys, "SPLITS": splits, "STAGES": shape.stages, "num_warps": shape.warps,
             "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32"}
    if moved:
        tiles = (TensorDescriptor.from_tensor(x.flatten(2).flatten(0, 1), [shape.keys, head_dim]) for x in (key, value))
        _attend_canvas[(blocks * splits,)](query, *tiles, rows, held, parts, lse, slots, ring, num_queries, **sizes)
    else:
        _attend[(blocks * splits,)](
            query, key, value, rows, held, parts, lse, slots, ring, num_queries, CAUSAL=causal, WINDOW=window or 0, **sizes)
    if splits > 1:
        count, some = num_queries * heads, max(1, 2048 // head_dim)
        _merge[(triton.cdiv(count, some),)](parts, lse, out, count, DIM=head_dim, SPLITS=splits, ROWS=some, num_warps=4)
    return out


def _moves_tiles(query: Tensor, head_dim: int) -> bool:
    """Whether tiles of keys and values come without the processors' doing: where the memory can (or kernels are interpreted), and two of
    them leave room for the next two."""
    return head_dim * query.element_size() <= MOVED_BYTES and (has_large_shared_memory(query.device) or not query.is_cuda)


def suits_wide(head_dim: int, length: int, slots: int) -> bool:
    """Whether blocks can take the wide kernels (attention_wide), which suit the widest heads, and whose tiles no block may share."""
    return shapes(head_dim, TILE).forward is None and length % TILE == 0 and slots % TILE == 0


def wide_tiles(rows: Tensor, held: Tensor, slots: int, length: int) -> AttentionTiles:
    """The lists with which each block sees slots 0 to held + C of its row, in a cache seen as [R S, g, d]; made on the device."""
    of_block, across = length // TILE, slots // TILE
    past = (held[rows] + length).repeat_interleave(of_block, output_size=len(rows) * of_block)
    row = rows.repeat_interleave(of_block, output_size=len(rows) * of_block)
    number, tile = torch.arange(len(row), device=rows.device)[:, None], torch.arange(across, device=rows.device)[None, :]
    used, full = tile * TILE < past[:, None], (tile + 1) * TILE <= past[:, None]
    pairs = torch.stack([torch.where(used, number, -1), row[:, None] * across + tile, full.long()], dim=-1).flatten(0, 1).int()
    by_query = torch.stack([number[:, 0] * across, (past + TILE - 1) // TILE], dim=-1).int()
    nothing = torch.zeros_like(row)
    bounds = torch.stack([row * slots, row * slots + past, nothing, nothing], dim=-1).int()
    bounds = bounds[:, None].expand(-1, TILE, -1).flatten(0, 1).contiguous()
    none = pairs[:0]
    return AttentionTiles(bounds, by_query, none, (Chunk(pairs, by_query, none, none),), len(bounds), 0, TILE)
