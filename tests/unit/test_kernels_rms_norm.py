"""kernels.rms_norm against its reference, and the torch path of transformer.norms against the same."""

import pytest
import torch

from megatron_dllm.kernels import reference
from megatron_dllm.transformer import norms
from tests.unit.kernel_cases import DEVICES, check, draw, need_kernels, outputs_and_gradients

SHAPES = [(1, 2816), (17, 96), (5, 3, 16), (1025, 7), (0, 32), (2, 1100)]


def arguments(shape, weighted, dtype, device):
    weight = [(draw(shape[-1], dtype=dtype, device=device).detach() + 1).requires_grad_()] if weighted else []
    return [draw(*shape, dtype=dtype, device=device), *weight], draw(*shape, dtype=dtype, device=device, grad=False).flip(0)


def with_eps(function):
    return lambda x, weight=None: function(x, weight, 1e-3)


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weighted", [True, False], ids=["weight", "none"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm(shape, weighted, dtype, device):
    need_kernels(device)
    from megatron_dllm.kernels.rms_norm import rms_norm

    functions = (with_eps(rms_norm), with_eps(reference.rms_norm), with_eps(norms._RMSNorm.apply))
    check(*functions, *arguments(shape, weighted, dtype, device), units=8)


@DEVICES
def test_rms_norm_of_strided_tensors(device):
    need_kernels(device)
    from megatron_dllm.kernels.rms_norm import rms_norm

    (x, weight), dy = arguments((6, 10), True, torch.float32, device)
    whole = outputs_and_gradients(with_eps(rms_norm), [x, weight], dy)
    strided = outputs_and_gradients(lambda x, w: rms_norm(x.t().contiguous().t(), w, 1e-3), [x, weight], dy.t().contiguous().t())
    assert all(torch.equal(a, b) for a, b in zip(whole, strided, strict=True))


@DEVICES
def test_rms_norm_repeats_bit_for_bit_and_without_a_weight_gradient(device):
    need_kernels(device)
    from megatron_dllm.kernels.rms_norm import rms_norm

    (x, weight), dy = arguments((300, 24), True, torch.bfloat16, device)
    first, second = (outputs_and_gradients(with_eps(rms_norm), [x, weight], dy) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    frozen = outputs_and_gradients(with_eps(rms_norm), [x, weight.detach()], dy)
    assert len(frozen) == 2 and torch.equal(frozen[1], first[1])


@DEVICES
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("shape", [(1, 2816), (17, 96), (0, 32)], ids=str)
def test_two_readers_of_one_input(shape, trained, device):
    need_kernels(device)
    from megatron_dllm.kernels.rms_norm import rms_norm_beside

    (x, weight), dy = arguments(shape, True, torch.bfloat16, device)
    joined = torch.cat([dy, 3 * dy.flip(1)], 1)

    def beside(norm):
        return lambda x, weight: torch.cat(norm(x, weight, 1e-3), 1)

    def apart(norm):
        return beside(lambda x, weight, eps: (norm(x, weight, eps), x))

    check(beside(rms_norm_beside), apart(reference.rms_norm), apart(norms._RMSNorm.apply), [x, weight.detach().requires_grad_(trained)],
          joined, units=8)


@pytest.mark.parametrize("weighted", [True, False], ids=["weight", "none"])
def test_the_torch_path_equals_the_reference(weighted):
    inputs, dy = arguments((17, 30), weighted, torch.float64, "cpu")
    both = (outputs_and_gradients(with_eps(function), inputs, dy) for function in (norms.rms_norm, reference.rms_norm))
    for ours, want in zip(*both, strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-12, atol=1e-12)
