"""kernels.attention against its reference, the tiles' lists against the mask, and the reference against a loop over queries."""
import dataclasses

import numpy as np
import pytest
import torch

from megatron_dllm.kernels import attention_reference as reference
from megatron_dllm.kernels.attention_tiles import attention_tiles
from tests.unit.kernel_cases import DEVICES, check, draw, need_kernels, outputs_and_gradients

# (first, past, own first, own past) of each query.
NOTHING = (0, 0, 0, 0)


def causal(length, start=0):
    return [(start, start + i + 1, 0, 0) for i in range(length)]


def windowed(bounds, window):
    return [(max(first, past - window), past, *own) for first, past, *own in bounds]


def canvases(starts, length, keys):
    """Canvases of `length` after the clean keys [first, past) of `starts`; their keys follow the `keys` clean ones."""
    return [(first, past, keys + i * length, keys + (i + 1) * length) for i, (first, past) in enumerate(starts) for _ in range(length)]


# name: bounds, number of keys
LAYOUTS = {
    "one token": (causal(1) + canvases([(0, 1)], 1, 1), 2),  # alone its gradients are zero, and an error has no measure
    "17 tokens": (causal(17), 17),
    "documents and canvases": (causal(19) + causal(30, 19) + canvases([(0, 7), (19, 20), (0, 0)], 5, 49), 64),
    "windows": (windowed(causal(41), 9) + canvases([(20, 28)], 20, 41), 61),
    "blind queries": ([NOTHING] * 3 + causal(18) + [NOTHING] * 20, 18),
    "blind among seeing": ([(0, 48, 0, 0)] * 5 + [NOTHING] * 3 + [(0, 16, 32, 48)] * 11, 48),
    "canvases over a context": (canvases([(0, 40), (40, 41), (41, 70)], 17, 70), 121),
}
LONG = {
    "1025 tokens": (causal(1025) + canvases([(0, 700), (0, 64)], 37, 1025), 1099),
    "window 100": (windowed(causal(1025), 100) + canvases([(601, 700)], 256, 1025), 1281),
}


def laid_out(name, device):
    bounds, num_keys = {**LAYOUTS, **LONG}[name]
    return torch.tensor(bounds, device=device).reshape(-1, 4), num_keys


def inputs_of(bounds, num_keys, heads, groups, dim, dtype, device):
    shrink = 1.5 / dim**0.25  # scores of about 2
    # As many rows more as it takes for each to have numbers of its own: `draw` gives equal shapes equal numbers.
    query, key, value = (draw(n + more, m, dim, dtype=torch.float32, device=device).detach()[more:]
                         for more, n, m in ((0, len(bounds), heads), (5, num_keys, groups), (11, num_keys, groups)))
    inputs = [x.to(dtype).requires_grad_() for x in (query * shrink, key * shrink, value)]
    return inputs, draw(len(bounds) + 17, heads, dim, dtype=dtype, device=device, grad=False)[17:]


def plain(bounds):
    """Attention in the inputs' dtype throughout."""
    def attend(query, key, value):
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        mask = reference.visible(bounds, len(key))[:, None]
        scores = torch.einsum("qhd,khd->qhk", query, key).masked_fill(~mask, torch.finfo(query.dtype).min)
        return torch.einsum("qhk,khd->qhd", scores.softmax(-1) * mask, value)
    return attend


def compare(name, heads, groups, dim, dtype, device, **lists):
    """The kernels as a model calls them, and the wide forward on the same."""
    from megatron_dllm.kernels.attention import attention, attention_forward, shapes

    bounds, num_keys = laid_out(name, device)
    tiles = attention_tiles(bounds.cpu().numpy(), num_keys, torch.device(device), **lists)
    inputs, dy = inputs_of(bounds, num_keys, heads, groups, dim, dtype, device)
    # The gradients' probabilities come from the log-sum-exp, whose rounding counts as often as scores are larger than 1.
    check(lambda *x: attention(*x, tiles), lambda *x: reference.attention(*x, bounds)[0], plain(bounds), inputs, dy,
          units=16 if dtype == torch.float32 else 2)
    with torch.no_grad():
        wide = attention_forward(*inputs, tiles, dataclasses.replace(shapes(dim, tiles.tile), forward=None))
        exact, exact_lse = reference.attention(*(x.double() for x in inputs), bounds)
        unit = torch.finfo(dtype).eps
        assert (wide[0] - exact).abs().max() <= 2 * (plain(bounds)(*inputs) - exact).abs().max() + 2 * unit * exact.abs().max()
        torch.testing.assert_close(wide[1].double(), exact_lse, rtol=1e-5, atol=1e-5)
    return inputs, dy, tiles


@pytest.mark.parametrize("name, heads, groups, dtype", [
    ("one token", 2, 1, torch.float32), ("17 tokens", 2, 2, torch.bfloat16), ("documents and canvases", 2, 1, torch.float32),
    ("blind among seeing", 1, 1, torch.float32), ("canvases over a context", 1, 1, torch.bfloat16)])
def test_attention_interpreted(name, heads, groups, dtype):
    need_kernels("cpu")
    compare(name, heads, groups, 16, dtype, "cpu", tile=16)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # the first product of autograd's thread
@pytest.mark.parametrize("heads, groups, dim", [(2, 2, 64), (4, 2, 128), (16, 8, 256), (2, 2, 256), (16, 2, 512), (3, 1, 512), (2, 1, 16)])
@pytest.mark.parametrize("name", [*LAYOUTS, *LONG])
def test_attention(name, heads, groups, dim):
    inputs, dy, tiles = compare(name, heads, groups, dim, torch.bfloat16, "cuda")
    from megatron_dllm.kernels.attention import attention

    runs = [outputs_and_gradients(lambda *x: attention(*x, tiles), inputs, dy) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@DEVICES
def test_several_chunks(device):
    need_kernels(device)
    *_, tiles = compare("windows", 2, 1, 16, torch.float32 if device == "cpu" else torch.bfloat16, device, tile=16, pairs_at_once=4)
    assert len(tiles.chunks) > 2


@DEVICES
@pytest.mark.parametrize("num_live, pairs_at_once", [(48, 640), (48, 4), (0, 640)])
def test_queries_without_gradient_are_left_out(num_live, pairs_at_once, device):
    """Those of the first tiles have theirs, and all keys what these make of it."""
    need_kernels(device)
    from megatron_dllm.kernels.attention import attention

    bounds, num_keys = laid_out("documents and canvases", device)
    inputs, dy = inputs_of(bounds, num_keys, 2, 1, 16, torch.float32 if device == "cpu" else torch.bfloat16, device)
    dy[num_live:] = 0
    lists = {"tile": 16, "pairs_at_once": pairs_at_once}
    whole, some = (attention_tiles(bounds.cpu().numpy(), num_keys, torch.device(device), num_live=n, **lists) for n in (None, num_live))
    wanted = outputs_and_gradients(lambda *x: attention(*x, whole), inputs, dy)
    dy[num_live:] = float("nan")
    ours = outputs_and_gradients(lambda *x: attention(*x, some), inputs, dy)
    assert torch.equal(ours[0], wanted[0]) and not ours[1][num_live:].any()
    for got, want in zip(ours[1:], wanted[1:], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5 if device == "cpu" else 2**-7, atol=1e-6 if device == "cpu" else 2**-7)


@DEVICES
def test_log_sum_exp_and_rows_of_fill(device):
    """Queries and keys after those of the lists count for nothing, whatever they hold."""
    need_kernels(device)
    from megatron_dllm.kernels.attention import attention, attention_forward

    bounds, num_keys = laid_out("blind queries", device)
    tiles = attention_tiles(bounds.cpu().numpy(), num_keys, torch.device(device), tile=16)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    inputs, dy = inputs_of(bounds, num_keys, 2, 1, 16, dtype, device)
    out, lse = attention_forward(*(x.detach() for x in inputs), tiles)
    wanted, wanted_lse = reference.attention(*(x.detach().double() for x in inputs), bounds)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-5, atol=1e-5)
    filled = [torch.cat([x, x[:1].repeat(20, 1, 1)]).detach().requires_grad_() for x in inputs]
    few = outputs_and_gradients(lambda *x: attention(*x, tiles), inputs, dy)
    more = outputs_and_gradients(lambda *x: attention(*x, tiles), filled, torch.cat([dy, dy[:1].repeat(20, 1, 1)]))
    for a, b in zip(few, more, strict=True):
        assert torch.equal(a, b[:len(a)]) and not b[len(a):].any()


@DEVICES
def test_parts_of_the_keys(device):
    """Attention to the first 16 keys and to the others, merged by log-sum-exp; the gradients of the parts from what was merged.

    Of the last 16 keys some queries see nothing and all others everything.
    """
    need_kernels(device)
    from megatron_dllm.kernels.attention import attention_backward, attention_forward

    bounds, num_keys = torch.tensor([(0, 48, 0, 0)] * 5 + [(0, 16, 0, 0)] * 3 + [(0, 16, 32, 48)] * 8, device=device), 48
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    (query, key, value), dy = inputs_of(bounds, num_keys, 2, 1, 16, dtype, device)
    parts = []
    for start, stop in ((0, 16), (16, 48)):
        seen = (bounds - start).clamp(0, stop - start).cpu().numpy()
        parts.append((slice(start, stop), attention_tiles(seen, stop - start, torch.device(device), tile=16)))
    with torch.no_grad():
        (out, lse), (other_out, other_lse) = (attention_forward(query, key[keys], value[keys], tiles, dtype=torch.float32)
                                              for keys, tiles in parts)
        merged_lse = torch.logaddexp(lse, other_lse)
        merged = (lse - merged_lse).exp()[..., None] * out + (other_lse - merged_lse).exp()[..., None] * other_out
        delta = (dy.float() * merged).sum(-1)
        found = [attention_backward(dy, query, key[keys], value[keys], merged_lse, delta, tiles, dtype=torch.float32)
                 for keys, tiles in parts]
    ours = [merged, found[0][0] + found[1][0], torch.cat([found[0][1], found[1][1]]), torch.cat([found[0][2], found[1][2]])]
    exact, plainly = (outputs_and_gradients(function, [x.detach().to(wide).requires_grad_() for x in (query, key, value)], dy)
                      for function, wide in ((lambda *x: reference.attention(*x, bounds)[0], torch.float64), (plain(bounds), dtype)))
    for got, torch_has, want in zip(ours, plainly, exact, strict=True):
        unit = torch.finfo(dtype).eps * want.abs().max()
        assert got.dtype == torch.float32 and (got - want).abs().max() <= 2 * (torch_has - want).abs().max() + 16 * unit


def test_reference_by_hand():
    """Against a loop over queries and heads."""
    bounds, num_keys = laid_out("documents and canvases", "cpu")
    (query, key, value), _ = inputs_of(bounds, num_keys, 4, 2, 16, torch.float64, "cpu")
    out, lse = reference.attention(query, key, value, bounds)
    for q, (first, past, own_first, own_past) in enumerate(bounds.tolist()):
        seen = [*range(first, past), *range(own_first, own_past)]
        for head in range(4):
            scores = key[seen, head // 2] @ query[q, head]
            torch.testing.assert_close(lse[q, head], scores.exp().sum().log(), rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(out[q, head], scores.softmax(0) @ value[seen, head // 2], rtol=1e-12, atol=1e-12)


def test_tiles_by_hand():
    """The picture of attention_tiles: 5 clean tokens, and a canvas of 2 after the third."""
    bounds = np.array([NOTHING, NOTHING, *causal(4)[2:], (0, 5, 0, 0), *canvases([(0, 3)], 2, 5)])
    tiles = attention_tiles(bounds, 7, torch.device("cpu"), tile=2)
    assert tiles.rows.tolist() == [[0, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 1], [0, 1, 0, 0, 1, 3], [0, 1, 0, 0, 4, 3]]
    assert tiles.masked[:7].tolist() == [1, 1, 2, 3, 1, 2, 3]


@pytest.mark.parametrize("pairs_at_once", [1, 7, 512])
@pytest.mark.parametrize("name", [*LAYOUTS, *LONG])
def test_tiles_are_those_of_the_mask(name, pairs_at_once):
    bounds, num_keys = laid_out(name, "cpu")
    tile = 16
    tiles = attention_tiles(bounds.numpy(), num_keys, torch.device("cpu"), tile=tile, pairs_at_once=pairs_at_once)
    mask, seeing = reference.visible(bounds, num_keys), reference.visible(bounds, num_keys).any(1)
    wanted = {}
    for q in range(0, len(bounds), tile):
        for k in range(0, num_keys, tile):
            part = mask[q:q + tile, k:k + tile]
            if part.any():
                wanted[q // tile, k // tile] = bool(part[seeing[q:q + tile]].all()) and k + tile <= num_keys
    assert forward_pairs(tiles) == wanted
    assert backward_pairs(tiles) == wanted
    assert max(int(c.by_query[:, 1].clamp(min=0).sum()) for c in tiles.chunks) <= max(pairs_at_once, tiles.chunks[0].by_key.shape[0])


def forward_pairs(tiles):
    found = {}
    for query_tile, (start, count, then, then_count, masked, num_masked) in enumerate(tiles.rows.tolist()):
        runs = [*range(start, start + count), *range(then, then + then_count)]
        for key_tile, is_full in [(t, True) for t in runs] + [(t, False) for t in tiles.masked[masked:masked + num_masked].tolist()]:
            assert (query_tile, key_tile) not in found
            found[query_tile, key_tile] = is_full
    return found


def backward_pairs(tiles):
    """The pairs of all chunks, which each chunk's lists by query and by key must name once."""
    found = {}
    for chunk in tiles.chunks:
        pairs = chunk.pairs.tolist()
        held = {slot: (q, k) for slot, (q, k, _) in enumerate(pairs) if q >= 0}
        by_query = [(slot, q) for q, (first, count) in enumerate(chunk.by_query.tolist()) for slot in range(first, first + max(count, 0))]
        assert sorted(by_query) == sorted((slot, q) for slot, (q, _) in held.items())
        slots = chunk.slots.tolist()
        by_key = [(*slots[i], k) for k, (first, count) in enumerate(chunk.by_key.tolist()) for i in range(first, first + count)]
        assert sorted(by_key) == sorted((slot, *pair) for slot, pair in held.items())
        found.update({(q, k): bool(is_full) for q, k, is_full in pairs if q >= 0})
    written = torch.stack([chunk.by_query[:, 1] >= 0 for chunk in tiles.chunks]).sum(0)
    assert (written == 1).all(), "each query tile's gradient is written by one chunk"
    return found
