"""kernels.norm_and_rotate against its reference, and the torch path of transformer.rotary against the same."""

import pytest
import torch

from megatron_dllm.kernels import reference
from megatron_dllm.transformer import norms, rotary
from tests.unit.kernel_cases import DEVICES, check, draw, need_kernels, outputs_and_gradients

SHAPES = [(1, 16, 256), (17, 3, 16), (5, 2, 512), (1025, 1, 20), (0, 2, 32)]
EPS = 1e-3


def arguments(shape, weighted, dtype, device):
    num_tokens, _, head_dim = shape
    angles = torch.rand(num_tokens, head_dim // 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 6
    # The same rounded angles for all dtypes; only their own dtype may be wider.
    table = [angles.cos().float().to(device), angles.sin().float().to(device)]
    weight = [(draw(head_dim, dtype=dtype, device=device).detach() + 1).requires_grad_()] if weighted else []
    return [*table, draw(*shape, dtype=dtype, device=device), *weight], draw(*shape, dtype=dtype, device=device, grad=False).flip(0)


def in_order(function):
    return lambda cos, sin, x, weight=None: function(x, weight, cos, sin, EPS)


def torch_path(x, weight, cos, sin, eps):
    return rotary.rotate(norms._RMSNorm.apply(x, weight, eps), rotary.RotaryTable(cos[:, None], sin[:, None]))


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weighted", [True, False], ids=["weight", "none"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norm_and_rotate(shape, weighted, dtype, device):
    need_kernels(device)
    from megatron_dllm.kernels.norm_and_rotate import norm_and_rotate

    functions = (in_order(norm_and_rotate), in_order(reference.norm_and_rotate), in_order(torch_path))
    check(*functions, *arguments(shape, weighted, dtype, device), units=8)


@DEVICES
def test_norm_and_rotate_of_a_part_of_a_fused_projection(device):
    need_kernels(device)
    from megatron_dllm.kernels.norm_and_rotate import norm_and_rotate

    (cos, sin, x, weight), dy = arguments((6, 3, 16), True, torch.float32, device)
    whole = outputs_and_gradients(in_order(norm_and_rotate), [cos, sin, x, weight], dy)

    def part(cos, sin, x, weight):
        fused = torch.cat([x.flatten(1), torch.full_like(x[:, :2].flatten(1), torch.nan)], dim=1)
        return norm_and_rotate(fused[:, :48].unflatten(1, (3, 16)), weight, cos, sin, EPS)

    strided = outputs_and_gradients(part, [cos, sin, x, weight], dy)
    assert all(torch.equal(a, b) for a, b in zip(whole, strided, strict=True))


@pytest.mark.parametrize("weighted", [True, False], ids=["weight", "none"])
def test_the_torch_path_equals_the_reference(weighted):
    inputs, dy = arguments((17, 3, 30), weighted, torch.float64, "cpu")

    def ours(cos, sin, x, weight=None):
        return rotary.norm_and_rotate(x, weight, rotary.RotaryTable(cos[:, None], sin[:, None]), EPS)

    both = (outputs_and_gradients(function, inputs, dy) for function in (ours, in_order(reference.norm_and_rotate)))
    for got, want in zip(*both, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("own_values", [True, False], ids=["values", "keys as values"])
@pytest.mark.parametrize("num_tokens", [9, 0])
def test_all_heads_at_once_equal_one_kind_after_the_other(num_tokens, own_values):
    (cos, sin, query, query_weight), dy = arguments((num_tokens, 4, 6), True, torch.float64, "cpu")
    key, value = (draw(num_tokens, 2, 6 + n, dtype=torch.float64, device="cpu").detach()[..., :6].requires_grad_() for n in (1, 2))
    key_weight = (query_weight.detach() * 2 - 0.3).requires_grad_()
    table = rotary.RotaryTable(cos[:, None], sin[:, None])

    def joined(function):
        return lambda *x: torch.cat(function(x[0], x[1], x[2] if own_values else x[1] + 0 * x[2], *x[3:], table, EPS), dim=1)

    def apart(query, key, value, query_weight, key_weight, table, eps):
        return (rotary.rotate(norms.rms_norm(query, query_weight, eps), table), rotary.rotate(norms.rms_norm(key, key_weight, eps), table),
                norms.rms_norm(value, None, eps))

    inputs, dy = [query, key, value, query_weight, key_weight], torch.cat([dy, dy.flip(1)], dim=1)
    for got, want in zip(*(outputs_and_gradients(joined(f), inputs, dy) for f in (rotary.norm_heads, apart)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_heads_of_16_bits_are_rounded_once():
    (cos, sin, query, weight), _ = arguments((5, 3, 8), True, torch.bfloat16, "cpu")
    table = rotary.RotaryTable(cos[:, None], sin[:, None])
    turned = rotary.norm_heads(query, query, query, weight, weight, table, EPS)
    wide = [x.detach().float() for x in (query, weight)]
    want = rotary.rotate(norms.rms_norm(*wide, EPS), table)
    assert torch.equal(turned[0], want.bfloat16()) and torch.equal(turned[2], norms.rms_norm(wide[0], None, EPS).bfloat16())
