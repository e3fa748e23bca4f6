"""megatron_dllm.transformer.rotary and norms, against their formulas and transformers."""
import pytest
import torch
from transformers.models.diffusion_gemma.modeling_diffusion_gemma import DiffusionGemmaRMSNorm, apply_rotary_pos_emb

from megatron_dllm.transformer.norms import rms_norm
from megatron_dllm.transformer.rotary import inverse_frequencies, norm_heads, rotary_table, rotate

CPU = torch.device("cpu")


def test_proportional_frequencies_turn_the_first_quarter():
    frequencies = inverse_frequencies(512, 1e6, 0.25, CPU)
    assert frequencies.shape == (256,) and (frequencies[64:] == 0).all()
    assert torch.allclose(frequencies[:64], 1e6 ** (-2 * torch.arange(64.0) / 512), rtol=1e-6)


@pytest.mark.parametrize(("head_dim", "fraction"), [(16, 1.0), (32, 0.25), (8, 0.5)])
def test_rotate_equals_transformers(head_dim, fraction):
    positions = torch.tensor([0, 1, 5, 4095, 262143])
    x = torch.randn(5, 3, head_dim, generator=torch.Generator().manual_seed(0))
    frequencies = inverse_frequencies(head_dim, 1e4, fraction, CPU)
    angles = torch.cat([positions[:, None].float() * frequencies] * 2, dim=-1)
    assert torch.equal(rotate(x, rotary_table(positions, frequencies)), apply_rotary_pos_emb(x, angles.cos(), angles.sin()))


def test_rotation_keeps_the_dtype_and_the_table_fp32():
    table = rotary_table(torch.arange(3), inverse_frequencies(8, 1e4, 1.0, CPU))
    assert table.cos.dtype == torch.float32
    assert all(rotate(torch.ones(3, 1, 8, dtype=dtype), table).dtype == dtype for dtype in (torch.bfloat16, torch.float32, torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 7), (1, 64), (3, 2, 9), (0, 4)])
def test_rms_norm_equals_transformers(shape, dtype):
    norm = DiffusionGemmaRMSNorm(shape[-1], eps=1e-6)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    # pow(-0.5) there, rsqrt here: one unit in the last place.
    assert torch.allclose(rms_norm(x, norm.weight, 1e-6), norm(x), rtol=2**-7 if dtype == torch.bfloat16 else 1e-6, atol=0)


@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm_gradients(weighted):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(3, 2, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(5, generator=generator, dtype=torch.float64, requires_grad=True) if weighted else None
    assert torch.autograd.gradcheck(lambda *inputs: rms_norm(inputs[0], inputs[1] if weighted else None, 1e-3),
                                    (x, weight) if weighted else (x,))


@pytest.mark.parametrize("has_value", [True, False], ids=["values", "values are raw keys"])
def test_norm_heads_is_norms_and_turns(has_value):
    """Results and gradients of the one function are those of the formulas, by autograd."""
    generator = torch.Generator().manual_seed(4)
    query, key, value = (torch.randn(5, heads, 8, generator=generator, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    weights = [torch.rand(8, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    table = rotary_table(torch.tensor([0, 1, 7, 30, 500]), inverse_frequencies(8, 1e2, 0.5, CPU))
    leaves = [query, key, *([value] if has_value else []), *weights]
    value = value if has_value else key
    turned = [rotate(rms_norm(x, weight, 1e-3), table) for x, weight in zip((query, key), weights, strict=True)]
    wanted, found = [*turned, rms_norm(value, None, 1e-3)], norm_heads(query, key, value, *weights, table, 1e-3)
    upstream = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in wanted]
    torch.testing.assert_close(list(found), wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(found, leaves, upstream), torch.autograd.grad(wanted, leaves, upstream),
                               rtol=1e-12, atol=1e-12)
