"""kernels.norm_heads against the three norms apart, in float64."""
import pytest
import torch

from megatron_dllm.kernels import reference
from megatron_dllm.transformer import norms, rotary
from megatron_dllm.transformer.token_pass import LayerPass
from tests.unit.kernel_cases import DEVICES, check, draw, need_kernels, outputs_and_gradients

EPS = 1e-3
SHAPES = [(17, 3, 1, 16), (5, 4, 2, 512), (1, 16, 8, 256), (67, 2, 2, 20), (0, 2, 1, 32)]  # tokens, heads, groups, head dimension


def arguments(shape, dtype, device, has_value=True, trained=False):
    num_tokens, heads, groups, head_dim = shape
    angles = torch.rand(num_tokens, head_dim // 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 6
    query, key, value = (draw(num_tokens, count, head_dim, dtype=dtype, device=device) for count in (heads, groups, groups))
    weights = [(draw(head_dim, dtype=dtype, device=device, grad=False) + add).requires_grad_(trained) for add in (1, 2)]
    value = (value * 0.7).detach().requires_grad_()
    dy = draw(num_tokens, (heads + 2 * groups) * head_dim, dtype=dtype, device=device, grad=False).flip(0)
    return [angles.cos().float().to(device), angles.sin().float().to(device), *weights, query, key, *[value] * has_value], dy


def joined(function):
    """[T, all outputs] of what takes query, key, value or None, both weights, cos, sin and eps."""
    def run(cos, sin, query_weight, key_weight, query, key, value=None):
        return torch.cat([out.flatten(1) for out in function(query, key, value, query_weight, key_weight, cos, sin, EPS)], 1)

    return run


def apart(norm):
    def turned(x, weight, cos, sin, eps):
        return rotary.rotate(norm(x, weight, eps), rotary.RotaryTable(cos[:, None], sin[:, None]))

    return joined(lambda query, key, value, query_weight, key_weight, cos, sin, eps: (
        turned(query, query_weight, cos, sin, eps), turned(key, key_weight, cos, sin, eps),
        norm(key if value is None else value, None, eps)))


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_value", [True, False], ids=["values", "raw keys"])
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norm_heads(shape, trained, has_value, dtype, device):
    need_kernels(device)
    from megatron_dllm.kernels.norm_heads import norm_heads

    # In bf16 the raw keys' two gradients are rounded before they are added up where each norm is by itself.
    check(joined(norm_heads), apart(reference.rms_norm), apart(norms._RMSNorm.apply),
          *arguments(shape, dtype, device, has_value, trained), units=8)


@DEVICES
def test_parts_of_a_fused_projection_and_repeats(device):
    need_kernels(device)
    from megatron_dllm.kernels.norm_heads import norm_heads

    (cos, sin, query_weight, key_weight, query, key, value), dy = arguments((6, 3, 1, 16), torch.bfloat16, device)
    tables = [cos, sin, query_weight, key_weight]
    first, again = (outputs_and_gradients(joined(norm_heads), [*tables, query, key, value], dy) for _ in range(2))

    def split(cos, sin, query_weight, key_weight, fused):
        return joined(norm_heads)(cos, sin, query_weight, key_weight, *fused.unflatten(1, (-1, 16)).split([3, 1, 1], 1))

    fused = torch.cat([query, key, value], 1).flatten(1).detach().requires_grad_()
    y, dfused = outputs_and_gradients(split, [*tables, fused], dy)
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    assert torch.equal(y, first[0]) and torch.equal(dfused, torch.cat(first[1:], 1).flatten(1))


@DEVICES
@pytest.mark.parametrize("has_value", [True, False], ids=["values", "raw keys"])
@pytest.mark.parametrize("num_kept, trained", [(0, False), (7, False), (7, True), (11, True)])
def test_keys_and_values_that_are_handed_on(num_kept, trained, has_value, device):
    need_kernels(device)
    from megatron_dllm.kernels.norm_heads import norm_heads

    # Fewer tokens, and more, than a tile has.
    inputs, _ = arguments((11, 4, 2, 256), torch.float32, device, has_value, trained)
    index = torch.randperm(11, generator=torch.Generator().manual_seed(2))[:num_kept].to(device)
    table = rotary.RotaryTable(inputs[0][:, None], inputs[1][:, None])
    places = LayerPass(table, None, index).places
    assert places.tolist() == [index.tolist().index(token) if token in index.tolist() else -1 for token in range(11)]
    sizes = [11 * 4 * 256, *[11 * 2 * 256] * 2, *[num_kept * 2 * 256] * 2]
    dy = draw(sum(sizes), dtype=torch.float32, device=device, grad=False)

    def flat(function):
        def run(cos, sin, query_weight, key_weight, query, key, value=None):
            return torch.cat([out.flatten() for out in function(query, key, value, query_weight, key_weight, cos, sin, EPS)])

        return run

    def taken(norm):
        def function(query, key, value, query_weight, key_weight, cos, sin, eps):
            outs = apart(norm)(cos, sin, query_weight, key_weight, query, key, value)
            query, key, value = (part.unflatten(1, (-1, 256)) for part in outs.split([4 * 256, 2 * 256, 2 * 256], 1))
            return query, key, value, key[index], value[index]

        return flat(function)

    kept = flat(lambda *args: norm_heads(*args, places, num_kept))
    check(kept, taken(reference.rms_norm), taken(norms._RMSNorm.apply), inputs, dy, units=8)


@DEVICES
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_tokens_without_a_gradient_are_not_read(trained, device):
    need_kernels(device)
    from megatron_dllm.kernels.norm_heads import norm_heads

    (cos, sin, query_weight, key_weight, *heads), _ = arguments((11, 4, 2, 256), torch.bfloat16, device, trained=trained)
    places = torch.tensor([-1, 1, 0, *[-1] * 8], device=device)

    def gradients(fill, num_live):
        leaves = [x.detach().requires_grad_() for x in heads]
        outs = norm_heads(*leaves, query_weight, key_weight, cos, sin, EPS, places, 2, num_live)
        douts = [torch.ones_like(out) for out in outs]
        for dout in douts[:3]:
            dout[6:] = fill
        return torch.autograd.grad(outs, [*leaves, query_weight, key_weight] if trained else leaves, douts)

    assert all(torch.equal(*pair) for pair in zip(gradients(torch.nan, 6), gradients(0.0, None), strict=True))
