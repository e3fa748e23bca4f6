"""kernels.gated_gelu against its reference, and the torch path against the same."""

import pytest
import torch

from megatron_dllm.kernels import reference
from megatron_dllm.transformer import activations
from tests.unit.kernel_cases import DEVICES, as_many_as, check, draw, need_kernels, outputs_and_gradients


def plain(gate_up):
    gate, up = gate_up.unbind(1)
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def arguments(num_rows, width, dtype, device):
    # Normal numbers times 3 reach both tails of gelu.
    return ([(3 * draw(num_rows, 2, width, dtype=dtype, device=device)).detach().requires_grad_()],
            draw(num_rows, width, dtype=dtype, device=device, grad=False))


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_rows, width", [(1, 704), (17, 257), (1025, 3), (0, 16), (9, 256)])
def test_gated_gelu(num_rows, width, dtype, device):
    need_kernels(device)
    from megatron_dllm.kernels.gated_gelu import gated_gelu

    check(gated_gelu, reference.gated_gelu, plain, *arguments(as_many_as(num_rows, device), width, dtype, device))


@DEVICES
def test_gated_gelu_of_large_and_strided_inputs(device):
    need_kernels(device)
    from megatron_dllm.kernels.gated_gelu import gated_gelu

    values = torch.tensor([-1e4, -100.0, -10.0, 0.0, 10.0, 100.0, 1e4], device=device)
    gate_up = torch.stack([values, torch.full_like(values, 2.0)])[None].requires_grad_()
    y, grad = outputs_and_gradients(gated_gelu, [gate_up], torch.ones(1, 7, device=device))
    assert torch.allclose(y, 2 * values.clamp(min=0)) and torch.allclose(grad[0, 0], 2.0 * (values > 0) + 1.0 * (values == 0))
    (x,), dy = arguments(5, 6, torch.float32, device)
    whole = outputs_and_gradients(gated_gelu, [x], dy)
    strided = outputs_and_gradients(lambda x: gated_gelu(x.mT.contiguous().mT), [x], dy.t().contiguous().t())
    assert all(torch.equal(a, b) for a, b in zip(whole, strided, strict=True))


@DEVICES
@pytest.mark.parametrize("num_rows, width", [(1, 704), (17, 257), (65, 3)])
def test_weighted_rows(num_rows, width, device):
    need_kernels(device)
    from megatron_dllm.kernels import gated_gelu as kernel
    from megatron_dllm.kernels.row_weights import RowWeights

    (gate_up,), dy = arguments(num_rows, width, torch.bfloat16, device)
    weights = draw(num_rows, 1, dtype=torch.float32, device=device)
    slot = torch.randperm(num_rows, generator=torch.Generator().manual_seed(0)).to(device)
    weighted = RowWeights(weights.detach(), slot)
    exact = outputs_and_gradients(lambda x, w: reference.gated_gelu(x) * w[slot], [gate_up.double(), weights.double()], dy.double())
    grads = kernel.gradient(gate_up.detach(), dy, with_value=True, weighted=weighted)
    assert torch.equal(grads.value, kernel.value(gate_up.detach(), weighted))
    for ours, want, bound in zip((grads.value, grads.gate_up, grads.weights), exact, (2**-8, 2**-8, 1e-5), strict=True):
        assert ours.shape == want.shape and (ours - want).abs().max() <= bound * want.abs().max()


@DEVICES
def test_rows_that_are_not_live_give_zero_to_their_weights_and_are_not_written(device, monkeypatch):
    need_kernels(device)
    from megatron_dllm.kernels import gated_gelu as kernel
    from megatron_dllm.kernels.row_weights import LiveRows, RowWeights

    (gate_up,), dy = arguments(18, 300, torch.bfloat16, device)
    slot = torch.randperm(18, generator=torch.Generator().manual_seed(0)).to(device)
    weights, dead = draw(9, 2, dtype=torch.float32, device=device, grad=False), slot >= 5 * 2
    dy[dead] = 0
    want = kernel.gradient(gate_up.detach(), dy, weighted=RowWeights(weights, slot))
    dy[dead] = float("nan")
    monkeypatch.setattr(torch, "empty_like", lambda x: torch.full(x.shape, 7.0, dtype=x.dtype, device=x.device))
    ours = kernel.gradient(gate_up.detach(), dy, with_value=True, weighted=RowWeights(weights, slot, LiveRows(5, slot)))
    assert torch.equal(ours.gate_up[~dead], want.gate_up[~dead]) and torch.equal(ours.weights, want.weights)
    assert (ours.gate_up[dead] == 7).all() and (ours.value[dead] == 7).all() and not ours.weights[5:].any() and ours.weights[:5].all()


def test_the_torch_path_equals_the_reference():
    inputs, dy = arguments(17, 30, torch.float64, "cpu")
    both = (outputs_and_gradients(function, inputs, dy) for function in (activations.gated_gelu, reference.gated_gelu))
    for ours, want in zip(*both, strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-12, atol=1e-12)
