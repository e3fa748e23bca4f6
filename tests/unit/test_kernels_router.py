"""kernels.router against its reference, and the torch path of moe.router against the same."""

import pytest
import torch

from megatron_dllm.kernels import reference
from megatron_dllm.moe import router
from tests.unit.kernel_cases import DEVICES, check, draw, need_kernels, outputs_and_gradients

# tokens, experts, choices
SHAPES = [(1, 128, 8), (19, 8, 2), (11, 5, 5), (9, 1, 1), (0, 8, 2), (33, 72, 3)]


def arguments(shape, dtype, device, spread=2.0):
    num_tokens, num_experts, choices = shape
    logits = (draw(num_tokens, num_experts, dtype=dtype, device=device).detach() * spread).requires_grad_()
    scale = (draw(num_experts, dtype=dtype, device=device).detach() + 1).requires_grad_()
    return [logits, scale], draw(num_tokens + 1, choices + num_experts, dtype=dtype, device=device, grad=False)[1:]


def joined(function, choices, bias=None, given=None, parts=(0, 2)):
    def outputs(logits, scale):
        results = function(logits, scale, bias, choices, given)
        return torch.cat([results[n] if n in parts else results[n].detach() for n in (0, 2)], 1)

    return outputs


@DEVICES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_route(shape, device):
    need_kernels(device)
    from megatron_dllm.kernels.router import route

    inputs, dy = arguments(shape, torch.float32, device)
    num_tokens, num_experts, choices = shape
    bias = draw(num_experts + 1, dtype=torch.float32, device=device, grad=False)[1:]
    given = torch.stack([torch.randperm(num_experts)[:choices] for _ in range(num_tokens)]).to(device) if num_tokens else None
    for options in ({}, {"bias": bias}, {"given": given}, {"parts": (0,)}):
        chosen = [f(*(x.detach() for x in inputs), options.get("bias"), choices, options.get("given"))[1] for f in (route, reference.route)]
        assert chosen[0].dtype == torch.int64 and torch.equal(*chosen)
        check(*(joined(f, choices, **options) for f in (route, reference.route, router.route_in_torch)), inputs, dy, units=8)


@DEVICES
def test_of_equal_experts_the_lowest_and_no_nan_of_vanishing_ones(device):
    need_kernels(device)
    from megatron_dllm.kernels.router import route

    logits = torch.tensor([[1.0, 3.0, 3.0, 1.0], [0.0, 0.0, 0.0, 0.0], [0.0, -300.0, 0.0, -300.0]], device=device, requires_grad=True)
    weights, indices, _ = route(logits, torch.ones(4, device=device), None, 3)
    assert indices.tolist() == [[1, 2, 0], [0, 1, 2], [0, 2, 1]]
    weights.square().sum().backward()
    assert weights.isfinite().all() and logits.grad.isfinite().all()


@DEVICES
def test_repeats_are_bit_equal_and_a_frozen_scale_gets_nothing(device):
    need_kernels(device)
    from megatron_dllm.kernels.router import route

    (logits, scale), dy = arguments((70, 8, 2), torch.float32, device)
    first, second = (outputs_and_gradients(joined(route, 2), [logits, scale], dy) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    frozen = outputs_and_gradients(joined(route, 2), [logits, scale.detach()], dy)
    assert len(frozen) == 2 and torch.equal(frozen[1], first[1])


@pytest.mark.parametrize("with_bias", [True, False])
def test_the_torch_path_equals_the_reference(with_bias):
    inputs, dy = arguments((17, 6, 2), torch.float64, "cpu")
    bias = torch.rand(6, dtype=torch.float64) if with_bias else None
    both = (outputs_and_gradients(joined(f, 2, bias), inputs, dy) for f in (router.route_in_torch, reference.route))
    for ours, want in zip(*both, strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-12, atol=1e-12)
