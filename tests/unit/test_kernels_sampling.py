"""kernels.sampling: the soft cap and the sampler's reading of logits against plain torch in fp64."""
from __future__ import annotations

import pytest
import torch

from megatron_dllm.diffusion.sampler import read_logits
from tests.unit.kernel_cases import DEVICES, need_kernels

SIZES = [(1, 1), (3, 5), (4, 4096), (2, 4097), (3, 20011)]


def logits_of(count: int, width: int, device: str, spread: float) -> torch.Tensor:
    return (torch.randn(count, width, generator=torch.Generator().manual_seed(count + width)) * spread).to(device)


@DEVICES
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_soft_capped(device, size):
    need_kernels(device)
    from megatron_dllm.kernels import sampling

    for dtype in (torch.float32, torch.bfloat16):
        product = logits_of(*size, device, 20.0).to(dtype)
        want = (30 * torch.tanh(product.double() / 30)).float()
        torch.testing.assert_close(sampling.soft_capped(product, 30.0), want, rtol=3e-6, atol=1e-6)


@DEVICES
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_read_logits(device, size, spread):
    """Entropies from none to log V; equal logits are a tie, which the first token wins."""
    need_kernels(device)
    from megatron_dllm.kernels import sampling

    logits = logits_of(*size, device, spread)
    uniforms = torch.rand(size[0], dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(device)
    kept, sample, argmax, entropy = sampling.read_logits(logits, 0.7, uniforms, torch.bfloat16)
    want = read_logits(logits.double()[None], 0.7, uniforms[None], torch.bfloat16)
    torch.testing.assert_close(kept, (logits / 0.7).bfloat16(), rtol=1e-2, atol=0)
    assert torch.equal(argmax, (logits / 0.7).argmax(-1))
    torch.testing.assert_close(entropy, want.entropy[0].float(), rtol=1e-5, atol=2e-6)
    check_samples(sample, logits.double() / 0.7, uniforms)


def check_samples(sample: torch.Tensor, logits: torch.Tensor, uniforms: torch.Tensor) -> None:
    """The quantile that each sample covers holds the uniform number, up to the rounding of sums in fp32."""
    probabilities = logits.softmax(-1)
    above = probabilities.cumsum(-1).gather(-1, sample[:, None])[:, 0]
    below = above - probabilities.gather(-1, sample[:, None])[:, 0]
    assert ((below - 2e-5 <= uniforms) & (uniforms <= above + 2e-5)).all()


@DEVICES
def test_a_sample_has_a_probability(device):
    """At the ends of the range: the first token that has one, and the last."""
    need_kernels(device)
    from megatron_dllm.kernels import sampling

    logits = torch.full((2, 5000), -1e9)
    logits[:, 17], logits[:, 4500] = 1.0, 1.0
    _, sample, _, entropy = sampling.read_logits(logits.to(device), 1.0, torch.tensor([0.0, 1 - 2.0**-32], device=device), torch.float32)
    assert sample.tolist() == [17, 4500]
    torch.testing.assert_close(entropy.cpu(), torch.full((2,), 2.0).log(), rtol=1e-6, atol=0)


@DEVICES
@pytest.mark.parametrize("size", SIZES[1:4], ids=str)
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_read_product_is_reading_what_is_capped(device, size, softcap):
    """Of a product in bf16, into memory that was there before, at a temperature that the device alone knows. As near to fp64 as fp32 is to
    the largest possible logit."""
    need_kernels(device)
    from megatron_dllm.kernels import sampling

    product = logits_of(*size, device, 20.0).bfloat16()
    uniforms = torch.rand(size[0], dtype=torch.float64, generator=torch.Generator().manual_seed(2)).to(device)
    product[:, -1] = product[:, 0] = product.amax(1)  # a tie, which the first token wins
    kept = torch.full(size, float("nan"), device=device)
    temperature = torch.tensor(0.7, dtype=torch.float64, device=device)
    sample, argmax, entropy = sampling.read_product(product, softcap, temperature, uniforms, kept)
    exact = (product.double() if softcap is None else softcap * torch.tanh(product.double() / softcap)) / 0.7
    # Devices' powers of two and quotients are off by two units in the last place.
    assert (kept - exact).abs().max() <= 2**-21 * (softcap or exact.abs().max()) / 0.7
    assert torch.equal(argmax, torch.zeros_like(argmax))
    check_samples(sample, exact, uniforms)
    want = read_logits(exact[None], 1.0, uniforms[None], torch.float32)
    torch.testing.assert_close(entropy, want.entropy[0].float(), rtol=1e-5, atol=2e-6)
    rounded = torch.empty_like(product)
    sampling.read_product(product, softcap, temperature, uniforms, rounded)
    assert torch.equal(rounded, kept.bfloat16())


@DEVICES
@pytest.mark.parametrize("spread", [0.0, 30.0])
@pytest.mark.parametrize("size", SIZES[::2], ids=str)
def test_softmax(device, size, spread):
    """An exponent is rounded in fp32, so a probability's relative error grows with how far its logit is below the largest."""
    need_kernels(device)
    from megatron_dllm.kernels import sampling

    for dtype in (torch.float32, torch.bfloat16):
        logits = logits_of(*size, device, spread).to(dtype)
        exact = logits.double()
        want, got = exact.softmax(-1), sampling.softmax(logits, torch.float32)
        allowed = want * (exact.amax(-1, keepdim=True) - exact + 8) * 2 ** -23 + 1e-30
        assert ((got.double() - want).abs() <= allowed).all()
        assert torch.equal(sampling.softmax(logits, torch.bfloat16), got.bfloat16())
