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


def tokens_and_weights(shape, width, dtype, device):
    num_tokens, num_experts, _ = shape
    x = draw(num_tokens, width, dtype=torch.float32, device=device)
    weight = (draw(num_experts, width, dtype=torch.float32, device=device, grad=False) * width**-0.5).to(dtype)
    return x, weight.requires_grad_(), (draw(num_experts, dtype=torch.float32, device=device).detach() + 1).requires_grad_()


def of_tokens(function, choices, given=None):
    """Weights and probabilities of tokens, at the given choices, so that the last bits of logits decide nothing."""

    def outputs(x, weight, scale):
        results = function(x, weight, scale, None, choices, given)
        return torch.cat([results[0], results[2]], 1)

    return outputs


def in_steps(function):
    def stepwise(x, weight, scale, bias, choices, given):
        return function(x @ weight.to(x.dtype).t(), scale, bias, choices, given)

    return stepwise


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape, width", [((1, 128, 8), 40), ((19, 8, 2), 200), ((70, 72, 3), 130), ((9, 1, 1), 33), ((0, 8, 2), 16),
                                          pytest.param((1280, 128, 8), 2816, marks=pytest.mark.gpu)], ids=str)
def test_route_tokens(shape, width, dtype, device):
    """The product and its gradients too, with a weight of three parts or of one."""
    need_kernels(device)
    from megatron_dllm.kernels.router import route_tokens

    if shape[0] > 1000 and device == "cpu":
        pytest.skip("interpreted this would take minutes")
    num_tokens, num_experts, choices = shape
    inputs = tokens_and_weights(shape, width, dtype, device)
    given = torch.stack([torch.randperm(num_experts)[:choices] for _ in range(num_tokens)]).to(device) if num_tokens else None
    dy = draw(num_tokens + 1, choices + num_experts, dtype=torch.float32, device=device, grad=False)[1:]
    check(*(of_tokens(f, choices, given) for f in (route_tokens, in_steps(reference.route), in_steps(router.route_in_torch))), inputs, dy,
          units=8)
    if num_tokens:
        chosen = [f(*(p.detach() for p in inputs), None, choices, None)[1] for f in (route_tokens, in_steps(reference.route))]
        assert (chosen[0] == chosen[1]).float().mean() > 0.999


@DEVICES
def test_a_frozen_router_keeps_no_tokens_and_repeats_are_bit_equal(device):
    need_kernels(device)
    from megatron_dllm.kernels.router import route_tokens

    x, weight, scale = tokens_and_weights((70, 8, 2), 200, torch.bfloat16, device)
    frozen = weight.detach(), scale.detach()
    weights, indices, probabilities = route_tokens(x, *frozen, None, 2)
    assert not any(saved is x or saved is not None and saved.shape == x.shape for saved in weights.grad_fn.saved_tensors)
    again = route_tokens(x, *frozen, None, 2, indices)
    assert torch.equal(weights, again[0]) and torch.equal(probabilities, again[2]) and again[1].data_ptr() == indices.data_ptr()
    dy = torch.linspace(-1, 1, weights.numel(), device=device).view(weights.shape)
    first, second = torch.autograd.grad(weights, x, dy), torch.autograd.grad(again[0], x, dy)
    assert torch.equal(*first, *second)


@DEVICES
@pytest.mark.parametrize("num_tokens", [70, 1])
def test_what_choices_count_up_to(num_tokens, device):
    """Tallies are added to, and leave out tokens of no stream."""
    need_kernels(device)
    from megatron_dllm.kernels.router import route_tokens
    from megatron_dllm.kernels.tally import ENTROPY_UNITS, Tally

    x, weight, scale = tokens_and_weights((num_tokens, 12, 3), 40, torch.float32, device)
    stream = (torch.arange(num_tokens, device=device) * 7 % 4)
    load, entropy = torch.ones(3, 12, dtype=torch.int64, device=device), torch.ones(3, dtype=torch.int64, device=device)
    plain = route_tokens(x, weight, scale, None, 3)
    for _ in range(2):
        counted = route_tokens(x, weight, scale, None, 3, tally=Tally(stream, load, entropy))
        assert all(torch.equal(a, b) for a, b in zip(plain, counted, strict=True))
    for number in range(3):
        own = stream == number
        assert torch.equal(load[number] - 1, 2 * plain[1][own].flatten().bincount(minlength=12))
        want = 2 * torch.special.entr(plain[2][own].double()).sum().item()
        assert entropy[number].item() / ENTROPY_UNITS == pytest.approx(want, rel=1e-6, abs=1e-9)
