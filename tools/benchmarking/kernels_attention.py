"""Attention kernels beside SDPA's and plain products over blocks of rows."""
from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_dllm.kernels.attention_tiles import AttentionTiles, attention_tiles
from megatron_dllm.transformer.core_attention import attend_dense
from megatron_dllm.transformer.visibility import CLEAN, Visibility

from .kernel_cases import BF16, Case, Check, Sizes, Way, compare

ROW_BLOCK = 512
# (document's length, where its canvas stands); canvases of 81 or 5 tokens: nothing fills a tile of 128.
PACKED, FEW = ([(5, 0), (1, None), (200, 77), (65, 1)], 81), ([(7, 3), (1, 1)], 3)


def checks(sizes: Sizes, device: torch.device) -> Iterator[Check]:
    """Both head dimensions, packed documents with canvases, with and without a window; repeats are equal bit for bit."""
    documents, canvas = PACKED if device.type == "cuda" else FEW
    whole = _packed(documents, canvas)
    for head_dim, groups, window in ((sizes.wide_head, sizes.wide_groups, None), (sizes.head, sizes.groups, None),
                                     (sizes.head, sizes.groups, min(70, sizes.window))):
        seen = whole.windowed(window)
        q, k, v = _inputs(len(seen.canvas_id), len(seen.canvas_id), sizes.heads, groups, head_dim, device)
        dout, tiles = torch.randn_like(q), _tiles(seen, device)
        ours, again = (_both(q, k, v, dout, tiles) for _ in range(2))
        mask = torch.from_numpy(seen.dense()).to(device)
        exact = _by_autograd(lambda *x, seen=seen: attend_dense(*x, seen), [x.double() for x in (q, k, v)], dout.double())
        plain = _by_autograd(lambda *x, mask=mask: _plain(*x, mask), [q, k, v], dout)
        name = f"head_dim {head_dim}, {len(q)} packed tokens{f', window {window}' if window else ''}"
        for what, *results in zip(("out", "dq", "dk", "dv"), ours, plain, exact, strict=True):
            yield compare(f"{name}, {what}", *results)
        yield Check(f"{name}, repeats equal bit for bit", all(torch.equal(a, b) for a, b in zip(ours, again, strict=True)))


def cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """Causal attention of one document."""
    wide = (sizes.heads, sizes.wide_groups, sizes.wide_head)
    usual = (sizes.heads, sizes.groups, sizes.head)
    first, *longer = sizes.lengths

    def case(length: int, heads: tuple[int, int, int], window: int | None, *, aim: float | None = None, beside: str = "",
             is_compiled_apart: bool = True) -> Case:
        pairs = sum(min(token + 1, window or length) for token in range(length))
        name = f"{'causal' if window is None else f'window {window}'}, head_dim {heads[2]}, S {length}"
        return Case(name, partial(_ways, length, heads, window, device, beside), 14 * pairs * heads[0] * heads[2], aim,
                    is_compiled_apart)

    yield case(first, wide, None, aim=sizes.wide_aim, beside="wide")
    yield case(first, usual, None, beside="sdpa")
    yield case(first, usual, sizes.window)
    for length in longer:
        yield case(length, wide, None, is_compiled_apart=False)


def _ways(length: int, heads: tuple[int, int, int], window: int | None, device: torch.device, beside: str) -> Mapping[str, Way]:
    from megatron_dllm.kernels.attention import attention_forward

    q, k, v = _inputs(length, length, *heads, device)
    dout, tiles = torch.randn_like(q), _tiles(_packed([(length, None)], 1).windowed(window), device)
    ways = {"ours": Way(lambda: attention_forward(q, k, v, tiles), lambda: _both(q, k, v, dout, tiles))}
    repeated = [x.repeat_interleave(heads[0] // x.shape[1], 1).transpose(0, 1)[None] for x in (q, k, v)]
    others = {"sdpa": {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention": SDPBackend.FLASH_ATTENTION}, "wide": {"SDPA's plain path":
              SDPBackend.MATH}, "": {}}[beside]
    if device.type != "cuda":
        others = {name: SDPBackend.MATH for name in others}

    def with_backend(function, backend: SDPBackend):
        def call(*inputs: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return function(*inputs)

        return call

    for name, backend in others.items():
        ways[name] = _way(with_backend(partial(F.scaled_dot_product_attention, is_causal=True, scale=1.0), backend), repeated)
    if beside == "wide":
        ways["products over blocks of rows"] = _way(_by_blocks, repeated)
    return ways


def _way(function, inputs: list[Tensor]) -> Way:
    dout = torch.randn_like(inputs[0])
    return Way(lambda: function(*inputs), lambda: _by_autograd(function, inputs, dout))


def _by_autograd(function, inputs: list[Tensor], dout: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def _by_blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of [1, h, S, d], memory linear in S in the forward: rows see the keys up to their block's end."""
    outs = []
    for start in range(0, q.shape[2], ROW_BLOCK):
        rows = slice(start, min(start + ROW_BLOCK, q.shape[2]))
        later = torch.ones(rows.stop - start, rows.stop, dtype=torch.bool, device=q.device).triu(start + 1)
        scores = (q[:, :, rows] @ k[:, :, :rows.stop].mT).masked_fill(later, -math.inf)
        outs.append(scores.softmax(-1) @ v[:, :, :rows.stop])
    return torch.cat(outs, 2)


def _plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k).masked_fill(~mask, -math.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def _both(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, tiles: AttentionTiles) -> tuple[Tensor, ...]:
    from megatron_dllm.kernels.attention import attention_backward, attention_forward, row_products

    out, lse = attention_forward(q, k, v, tiles)
    return out, *attention_backward(dout, q, k, v, lse, row_products(out, dout), tiles)


def _inputs(queries: int, keys: int, heads: int, groups: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of a standard deviation of one."""
    draw = torch.Generator(device).manual_seed(head_dim)

    def normal(rows: int, count: int, scale: float) -> Tensor:
        return (torch.randn(rows, count, head_dim, generator=draw, device=device) * scale).to(BF16)

    return normal(queries, heads, head_dim ** -0.25), normal(keys, groups, head_dim ** -0.25), normal(keys, groups, 1.0)


def _tiles(seen: Visibility, device: torch.device) -> AttentionTiles:
    return attention_tiles(seen.key_intervals(), seen.num_clean_keys + len(seen.canvas_keys), device)


def _packed(documents: list[tuple[int, int | None]], canvas_length: int) -> Visibility:
    """Documents one after the other, then their canvases, each after so many tokens of its document (None: it has none)."""
    first, past, canvases, start = [], [], [], 0
    for length, canvas in documents:
        first += [start] * length
        past += range(start + 1, start + length + 1)
        canvases += [] if canvas is None else [(start, start + canvas)]
        start += length
    ids = np.repeat(np.arange(len(canvases)), canvas_length)
    bounds = [np.concatenate([clean, np.repeat(np.array(of, np.int64), canvas_length)]) for clean, of in zip(
        (first, past), zip(*canvases, strict=True) if canvases else ((), ()), strict=True)]
    return Visibility(*bounds, np.concatenate([np.full(start, CLEAN), ids]), ids, start)
