"""--use-flashinfer-fused-rope: that package gets all angles and turns as ours does; what its kernel cannot do is refused."""
import sys
import types

import pytest
import torch

from megatron_dllm.transformer.rotary import inverse_frequencies, norm_and_rotate_pair, rotary_table
from megatron_dllm.transformer.rotary_flashinfer import FlashInferRotary, check_flashinfer, use_flashinfer_rope
from tests.unit.toy import toy_model

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def apply_rope(positions, query, key, head_size, table, is_neox):
    """FlashInfer's interface: a row of `table` a position, cosines then sines of half a head each."""
    assert is_neox and table.dtype == torch.float32 and table.shape[1] == head_size
    cos, sin = table[positions][:, None].chunk(2, -1)

    def turned(x):
        low, high = x.unflatten(1, (-1, head_size)).float().chunk(2, -1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).flatten(1).to(x.dtype)

    return turned(query), turned(key)


def case(device, dtype, head_dim=512, fraction=0.25):
    generator = torch.Generator().manual_seed(0)
    query, key, *weights = (torch.randn(*shape, generator=generator).to(device, dtype)
                            for shape in ((17, 4, head_dim), (17, 2, head_dim), (head_dim,), (head_dim,)))
    positions = torch.arange(1000, 1017, device=device)
    return query, key, *weights, rotary_table(positions, inverse_frequencies(head_dim, 1e6, fraction, device)), 1e-6


@pytest.mark.parametrize(("head_dim", "fraction"), [(512, 0.25), (256, 1.0)])
def test_the_same_as_ours(head_dim, fraction):
    given = case(CPU, torch.float32, head_dim, fraction)
    for ours, theirs in zip(norm_and_rotate_pair(*given), FlashInferRotary(apply_rope)(*given), strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-6, atol=1e-6)


def test_all_layers_take_it(monkeypatch):
    model = toy_model()
    monkeypatch.setattr("megatron_dllm.transformer.rotary_flashinfer.check_flashinfer",
                        lambda device, sizes: types.SimpleNamespace(apply_rope_with_cos_sin_cache=apply_rope))
    use_flashinfer_rope(model, CPU)
    assert all(isinstance(block.attention.turn, FlashInferRotary) for block in model.layers.values())


def test_refusals(monkeypatch):
    with pytest.raises(ValueError, match="heads of size 96, and its kernel is right only for 64, 128, 256, 512"):
        check_flashinfer(CUDA, [256, 96])
    with pytest.raises(ValueError, match="need a CUDA device"):
        check_flashinfer(CPU, [256, 512])
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ImportError, match="install_gpu.sh --flashinfer"):
        check_flashinfer(CUDA, [256, 512])


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "fraction"), [(512, 0.25), (256, 1.0)])
def test_kernel_of_the_package(head_dim, fraction):
    """bf16: a rounding of the normed numbers more than ours, 2^-8 of the largest."""
    flashinfer = pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
    given = case(CUDA, torch.bfloat16, head_dim, fraction)
    for ours, theirs in zip(norm_and_rotate_pair(*given), FlashInferRotary(flashinfer.apply_rope_with_cos_sin_cache)(*given), strict=True):
        assert (theirs - ours).abs().max() <= 2 ** -7 * ours.abs().max()
