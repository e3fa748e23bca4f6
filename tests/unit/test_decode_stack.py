"""decode_stack and its kernels against the blocks, and against what they put together."""
from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from megatron_dllm.kernels import reference
from megatron_dllm.moe.permute import sort_by_expert
from megatron_dllm.transformer.block_pass import block_pass
from megatron_dllm.transformer.decode_stack import DecodeStack, suits_decode_stack
from megatron_dllm.transformer.key_cache import KeyCache
from tests.unit.kernel_cases import DEVICES, draw, need_kernels
from tests.unit.toy import CONFIG, toy_model

BF16 = torch.bfloat16


@DEVICES
@pytest.mark.parametrize("num_tokens, choices, num_experts, height", [(1, 1, 1, 16), (5, 2, 3, 4), (1100, 8, 12, 24), (256, 8, 128, 32)])
def test_expert_rows(num_tokens, choices, num_experts, height, device):
    """In one launch and in three, of which no block may be full; experts without a row, several tiles an expert."""
    need_kernels(device)
    from megatron_dllm.kernels.expert_rows import expert_rows

    scores = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(num_tokens))
    scores[:, 0] += 0.5 * (num_experts > 3)
    indices = scores.topk(choices).indices.to(device)
    got, want = expert_rows(indices, num_experts, height), sort_by_expert(indices, num_experts)
    assert torch.equal(got.row, want.row) and torch.equal(got.token, want.slot // choices)
    counts = want.counts.tolist()
    starts = [sum(counts[:expert]) for expert in range(num_experts + 1)]
    tiles = [[expert, start, min(height, starts[expert] + count - start)] for expert, count in enumerate(counts)
             for start in range(starts[expert], starts[expert] + count, height)]
    assert got.tiles.starts.tolist() == starts and got.tiles.number.item() == len(tiles) <= len(got.tiles.table)
    assert got.tiles.table[:len(tiles), :3].tolist() == tiles


@DEVICES
@pytest.mark.parametrize("num_tokens, width, num_experts, choices", [(1, 40, 1, 1), (5, 130, 12, 3), (17, 70, 16, 16)])
def test_choose_experts(num_tokens, width, num_experts, choices, device):
    check_choices(num_tokens, width, num_experts, choices, device)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [256, 2048])
def test_choose_experts_at_the_models_widths(num_tokens):
    check_choices(num_tokens, 2816, 128, 8, "cuda")


def check_choices(num_tokens, width, num_experts, choices, device):
    """As near to float64 as twice torch's own fp32: the weights, and the probabilities of those chosen."""
    need_kernels(device)
    from megatron_dllm.kernels.router_logits import choose_experts, in_parts

    x, weight = (draw(*shape, dtype=torch.float32, device=device, grad=False) for shape in ((num_tokens, width), (num_experts, width)))
    x, scale = x * width**-0.5, torch.rand(num_experts).to(device) + 0.5
    weights, indices = choose_experts(in_parts(x), in_parts(weight), scale, choices)
    assert weights.dtype == torch.float32 and indices.dtype == torch.int64 and (indices.sort(-1).values.diff() > 0).all()

    def chosen(dtype):
        probabilities = (x.to(dtype) @ weight.to(dtype).mT).softmax(-1)
        best = probabilities.topk(choices).values.double()
        own = probabilities.gather(-1, indices)
        return best, own.double(), (own * scale.to(dtype)[indices] / own.sum(-1, keepdim=True)).double()

    best, own, exact = chosen(torch.float64)
    _, _, plain = chosen(torch.float32)
    # Of two experts that are as likely up to rounding either may be chosen.
    assert (best - own).abs().max() <= 1e-6
    assert (weights - exact).abs().max() <= 2 * (plain - exact).abs().max() + 2**-23


@DEVICES
@pytest.mark.parametrize("hidden, inner, num_tokens", [(40, 24, 9), (64, 64, 40), (72, 104, 1)])
def test_grouped_decode(hidden, inner, num_tokens, device):
    need_kernels(device)
    from megatron_dllm.kernels.expert_rows import expert_rows
    from megatron_dllm.kernels.grouped_decode import DecodeTiling, Dense, activated_rows, narrowed_rows

    experts, choices = 5, 2
    gate_up, down = ((draw(*shape, dtype=torch.float32, device=device, grad=False) * shape[-1]**-0.5).to(BF16)
                     for shape in ((experts, 2, inner, hidden), (experts, hidden, inner)))
    x = draw(num_tokens, hidden, dtype=BF16, device=device, grad=False)
    scores = torch.rand(num_tokens, experts, generator=torch.Generator().manual_seed(1))
    scores[:, 3] = -1  # nobody's
    indices = scores.topk(choices).indices.to(device)
    tiling = DecodeTiling(16, 64, 64, 4, 2)
    rows = expert_rows(indices, experts, tiling.rows)
    persistent = dataclasses.replace(tiling, programs=1)
    activated, _ = activated_rows(x, gate_up, rows, tiling)
    assert torch.equal(activated, activated_rows(x, gate_up, rows, persistent)[0])
    lower = dataclasses.replace(tiling, dense_rows=16)
    ordered = x[rows.token.long()]
    narrowed, _ = narrowed_rows(activated, down, rows, tiling)
    assert torch.equal(narrowed, narrowed_rows(activated, down, rows, dataclasses.replace(persistent, flatten=True))[0])
    counts = rows.tiles.starts.diff().long()
    for got, product in ((activated, lambda part, expert: gated(part @ gate_up[expert].double().flatten(0, 1).mT)),
                         (narrowed, lambda part, expert: part @ down[expert].double().mT)):
        source = ordered if got is activated else activated
        want = torch.cat([product(part.double(), expert) for expert, part in enumerate(source.split(counts.tolist()))])
        # Gate and up are rounded before they meet.
        assert (got - want).abs().max() <= 2**-7 * want.abs().max()
    # A dense feed-forward in the same launches, which changes nothing of the others.
    wider = inner + 64 + 8
    dense = Dense(x * 0.5, *((draw(*shape, dtype=torch.float32, device=device, grad=False) * shape[-1]**-0.5).to(BF16)
                             for shape in ((2, wider, hidden), (hidden, wider))))
    for way in (lower, persistent, tiling):
        same, dense_activated = activated_rows(x, gate_up, rows, way, dense=dense)
        again, dense_y = narrowed_rows(same, down, rows, way, dense=dense, dense_activated=dense_activated)
        assert torch.equal(same, activated) and torch.equal(again, narrowed)
    for got, want in ((dense_activated, gated(dense.x.double() @ dense.gate_up.double().flatten(0, 1).mT)),
                      (dense_y, dense_activated.double() @ dense.down.double().mT)):
        assert (got - want).abs().max() <= 2**-7 * want.abs().max()


@DEVICES
@pytest.mark.parametrize("hidden, inner, num_tokens", [(40, 24, 9), (64, 72, 45), (128, 64, 1)])
def test_grouped_many(hidden, inner, num_tokens, device):
    """Tiles of one part and of two; the same as in tiles of few rows."""
    need_kernels(device)
    from megatron_dllm.kernels import grouped_decode, grouped_many
    from megatron_dllm.kernels.expert_rows import expert_rows

    experts, choices = 4, 2
    gate_up, down = ((draw(*shape, dtype=torch.float32, device=device, grad=False) * shape[-1]**-0.5).to(BF16)
                     for shape in ((experts, 2, inner, hidden), (experts, hidden, inner)))
    x = draw(num_tokens, hidden, dtype=BF16, device=device, grad=False)
    scores = torch.rand(num_tokens, experts, generator=torch.Generator().manual_seed(1))
    scores[:, 3], scores[:, 1] = -1, scores[:, 1] + 0.5  # nobody's, and that of many
    indices = scores.topk(choices).indices.to(device)
    few, many = grouped_decode.DecodeTiling(16, 64, 64, 4, 2), grouped_many.ManyTiling(16, 16, 64, 64, 4, 2)
    rows, higher = (expert_rows(indices, experts, height) for height in (few.rows, many.height))
    assert num_tokens < 45 or (higher.tiles.table[:higher.tiles.number, 2] > many.rows).any()
    activated = grouped_many.activated_rows(x, gate_up, higher, many)
    assert torch.equal(activated, grouped_decode.activated_rows(x, gate_up, rows, few)[0])
    narrowed = grouped_many.narrowed_rows(activated, down, higher, many)
    assert torch.equal(narrowed, grouped_decode.narrowed_rows(activated, down, rows, few)[0])


def gated(hidden):
    gate, up = hidden.to(BF16).double().chunk(2, dim=1)
    return F.gelu(gate, approximate="tanh") * up


@DEVICES
@pytest.mark.parametrize("has_values", [True, False])
def test_place_heads(has_values, device):
    need_kernels(device)
    from megatron_dllm.kernels.place_heads import place_heads

    tokens, heads, groups, dim, eps = 5, 4, 2, 16, 1e-6
    x = draw(tokens, (heads + groups * (1 + has_values)) * dim, dtype=BF16, device=device, grad=False)
    query_weight, key_weight = (draw(dim, dtype=BF16, device=device, grad=False) + which for which in (1, 2))
    turns = torch.rand(tokens, dim // 2).to(device) * 6
    angles = turns.cos(), turns.sin()
    slots = torch.tensor([7, 3, 11, 0, 5], device=device)
    key, value = (torch.full((12, groups, dim), float("nan"), dtype=BF16, device=device) for _ in range(2))
    query = place_heads(x, query_weight, key_weight, *angles, slots, key, value, heads, eps)
    raw = x.unflatten(1, (-1, dim)).split([heads, groups] + [groups] * has_values, dim=1)
    torch.testing.assert_close(query, reference.norm_and_rotate(raw[0], query_weight, *angles, eps), rtol=2**-7, atol=1e-5)
    torch.testing.assert_close(key[slots], reference.norm_and_rotate(raw[1], key_weight, *angles, eps), rtol=2**-7, atol=1e-5)
    torch.testing.assert_close(value[slots], reference.rms_norm(raw[-1], None, eps), rtol=2**-7, atol=1e-5)
    assert key.isnan().any(dim=(1, 2)).sum() == 12 - tokens and value.isnan().any(dim=(1, 2)).sum() == 12 - tokens


@DEVICES
@pytest.mark.parametrize("tokens, width", [(1, 40), (6, 130)])
def test_after_attention(tokens, width, device):
    """h rounded, then what follows from it as it is stored; the last result in parts that are as near as fp32."""
    need_kernels(device)
    from megatron_dllm.kernels.decode_residual import after_attention

    x, y = (draw(tokens, width, dtype=BF16, device=device, grad=False) * factor for factor in (1, 3))
    norms = [torch.rand(width).to(device, BF16) + 0.5 for _ in range(3)]
    scale, factor, eps = torch.rand(width).to(device) + 0.5, 0.3, 1e-6
    h, *got, parts = after_attention(x, y, norms[0], (norms[1], norms[2], scale), factor, eps)
    want = x.double() + reference.rms_norm(y.double(), norms[0].double(), eps)
    torch.testing.assert_close(h.double(), want, rtol=2**-8, atol=1e-6)
    for ours, norm in zip(got, norms[1:], strict=True):
        torch.testing.assert_close(ours.double(), reference.rms_norm(h.double(), norm.double(), eps), rtol=2**-8, atol=1e-6)
    want = reference.rms_norm(h.double(), scale.double(), eps) * factor
    assert parts.shape == (3, tokens, width) and parts.dtype == BF16
    torch.testing.assert_close(parts.double().sum(0), want, rtol=2**-21, atol=2**-23 * want.abs().max().item())


@DEVICES
def test_finish_layer(device):
    need_kernels(device)
    from megatron_dllm.kernels.decode_residual import finish_layer

    tokens, width, choices, eps = 6, 40, 3, 1e-6
    h, a = (draw(tokens, width, dtype=BF16, device=device, grad=False) * factor for factor in (1, 3))
    rows = draw(tokens * choices, width, dtype=BF16, device=device, grad=False)
    row = torch.randperm(tokens * choices, generator=torch.Generator().manual_seed(0)).view(tokens, choices).to(device)
    weights = torch.rand(tokens, choices).to(device)
    norms = [torch.rand(width).to(device, BF16) + 0.5 for _ in range(4)]
    scalar = torch.tensor(1.25, dtype=BF16, device=device)
    y, normed = finish_layer(h, a, rows, row.int(), weights, *norms[:3], scalar, norms[3], eps)
    b = reference.unpermute(rows, weights, row).double()
    total = reference.rms_norm(a.double(), norms[0], eps) + reference.rms_norm(b, norms[1], eps)
    want = (h.double() + reference.rms_norm(total, norms[2], eps)) * 1.25
    torch.testing.assert_close(y.double(), want, rtol=2**-7, atol=1e-4)
    torch.testing.assert_close(normed.double(), reference.rms_norm(y.double(), norms[3], eps), rtol=2**-7, atol=1e-4)


@DEVICES
@pytest.mark.parametrize("is_clean, few, together", [(False, True, True), (True, True, False), (True, False, False)])
def test_the_stack_is_the_blocks(is_clean, few, together, device, monkeypatch):
    """As far from the blocks in fp32 as the blocks in bf16 are, whichever products the experts take; the caches too."""
    need_kernels(device)
    from megatron_dllm.kernels import grouped_decode
    from megatron_dllm.transformer import decode_stack

    monkeypatch.setattr(decode_stack, "FEW_ROWS", 48 if few else 0)
    monkeypatch.setattr(decode_stack, "MOST_TOGETHER", 256 if together else 0)
    tiling = grouped_decode.DecodeTiling(16, 64, 64, 4, 2)
    monkeypatch.setattr(grouped_decode, "UP_TILING", tiling)
    monkeypatch.setattr(grouped_decode, "DOWN_TILING", tiling)
    monkeypatch.setattr(grouped_decode, "TOGETHER_DOWN_TILING", tiling)
    config = dataclasses.replace(CONFIG, num_experts=4)
    rounded = toy_model(BF16, config=config).requires_grad_(False)
    exact = toy_model(torch.float32, config=config).requires_grad_(False)
    exact.load_state_dict({name: x.float() for name, x in rounded.state_dict().items()})
    held, slots, length = torch.tensor([9, 2]), {"sliding": 24, "full": 40}, CONFIG.canvas_length
    generator = torch.Generator().manual_seed(1)  # with 0 one token has two experts as good as tied, which bf16 tells apart otherwise
    x, rows, counts = torch.randn(2 * length, config.hidden_size, generator=generator), torch.tensor([1, 0]), torch.tensor([3, 4])

    def result(model, run_layers):
        dtype = model.dtype
        caches = {}
        for number in range(config.num_layers):
            generator = torch.Generator().manual_seed(number)
            kind = config.layer_types[number]
            shape = 2, slots[kind], config.kv_heads(number), config.head_dim(number)
            caches[number] = KeyCache(*(torch.randn(shape, generator=generator).to(BF16).to(device, dtype) for _ in range(2)))
        blocks = block_pass(config, rows.to(device), held.to(device), counts.to(device), slots, dtype, length=length, is_clean=is_clean)
        y = run_layers(x.to(BF16).to(device, dtype), blocks, caches)
        return [y.double(), *(part.double() for cache in caches.values() for part in (cache.key[:, :-1], cache.value[:, :-1]))]

    with torch.no_grad():
        exact, rounded = exact.to(device), rounded.to(device)
        want = result(exact, lambda *inputs: exact.run_layers(*inputs)[0])
        plain = result(rounded, lambda *inputs: rounded.run_layers(*inputs)[0])
        got = result(rounded, DecodeStack(list(rounded.layers.values()), rounded.final_norm.weight))
    for ours, blocks, exactly in zip(got, plain, want, strict=True):
        allowed = 2 * (blocks - exactly).abs().max() + 2**-8 * exactly.abs().max()
        assert (ours - exactly).abs().max() <= allowed
    # A token that another expert gets for rounding is far off.
    assert (got[0] - want[0]).abs().median() < 2**-7 * want[0].abs().max()


def test_what_suits():
    model = toy_model(BF16)
    blocks = list(model.layers.values())
    assert not suits_decode_stack(blocks, model.config, torch.float32)
    assert suits_decode_stack(blocks, model.config, BF16) == blocks[0].moe.experts.by_kernels
