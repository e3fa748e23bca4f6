"""kernels.residual against its reference, and the torch path of transformer.residual against the same."""

import pytest
import torch

from megatron_dllm.kernels import reference
from megatron_dllm.transformer import residual, residual_in_torch
from tests.unit.kernel_cases import DEVICES, check, draw, need_kernels, outputs_and_gradients

SHAPES = [(1, 2816), (7, 96), (5, 7), (0, 32)]
EPS, FACTOR = 1e-3, 0.3


def weights(count, width, dtype, device):
    return [(draw(width + n, dtype=dtype, device=device).detach()[:width] + 1).requires_grad_() for n in range(count)]


def attended(function):
    def joined(x, y, weight, *readers):
        return torch.cat([part.to(readers[2].dtype) for part in function(x, y, weight, readers, FACTOR, EPS)])

    return joined


def attended_arguments(shape, dtype, device):
    x, y, dy = (draw(shape[0] + n, shape[1], dtype=dtype, device=device) for n in (1, 2, 3))
    last = [w.detach().float().requires_grad_() for w in weights(1, shape[1], dtype, device)]
    inputs = [x.detach()[1:].requires_grad_(), y.detach()[2:].requires_grad_(), *weights(3, shape[1], dtype, device), *last]
    return inputs, torch.cat([dy.detach()[3:] * n for n in (1, 2, 3, 4)])


def fed_forward(function, num_first):
    return lambda h, a, b, weight_a, weight_b, weight, scalars: function(h, a, b, weight_a, weight_b, weight, scalars, num_first, EPS)


def fed_forward_arguments(shape, dtype, device):
    h, a, b, dy = (draw(shape[0] + n, shape[1], dtype=dtype, device=device).detach()[n:].requires_grad_() for n in (1, 2, 3, 4))
    return [h, a, b, *weights(3, shape[1], dtype, device), torch.tensor([0.5, 1.7], dtype=dtype, device=device)], dy.detach()


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_after_attention(shape, dtype, device):
    need_kernels(device)
    from megatron_dllm.kernels.residual import after_attention

    functions = (after_attention, reference.after_attention, residual_in_torch.after_attention)
    check(*map(attended, functions), *attended_arguments(shape, dtype, device), units=8)


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_after_feed_forward(shape, dtype, device):
    need_kernels(device)
    from megatron_dllm.kernels.residual import after_feed_forward

    functions = (after_feed_forward, reference.after_feed_forward, residual_in_torch.after_feed_forward)
    inputs, dy = fed_forward_arguments(shape, dtype, device)
    check(*(fed_forward(function, shape[0] // 3) for function in functions), inputs, dy, units=8)


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_before_and_of_feed_forward(shape, dtype, device):
    need_kernels(device)
    from megatron_dllm.kernels import residual as kernel

    (h, _, _, *readers), dy = attended_arguments(shape, dtype, device)
    functions = (kernel.before_feed_forward, lambda h, *others: reference.after_attention(h, torch.zeros_like(h), readers[0], *others)[1:],
                 residual.before_feed_forward_in_torch)
    joined = (lambda h, *readers, f=f: torch.cat([part.to(readers[2].dtype) for part in f(h, readers, FACTOR, EPS)]) for f in functions)
    check(*joined, [h, *readers], dy[shape[0]:], units=8)

    (_, a, b, *weights, _), dy = fed_forward_arguments(shape, dtype, device)

    def alone(a, b, *weights):
        return reference.after_feed_forward(torch.zeros_like(a), a, b, *weights, torch.ones(2, device=device), 0, EPS)

    fused, plain = (lambda *inputs, f=f: f(*inputs, EPS) for f in (kernel.of_feed_forward, residual.of_feed_forward_in_torch))
    check(fused, alone, plain, [a, b, *weights], dy, units=8)


def fed_and_normed(function):
    return lambda h, a, b, weight_a, weight_b, weight, scalars, last: torch.cat(
        function(h, a, b, weight_a, weight_b, weight, last, scalars, len(h) // 3, EPS))


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_after_feed_forward_and_norm(shape, dtype, device):
    need_kernels(device)
    from megatron_dllm.kernels import residual as kernel

    def in_two(h, *others):
        *before, last, scalars, num_first, eps = others
        y = reference.after_feed_forward(h, *before, scalars, num_first, eps)
        return y, reference.rms_norm(y, last, eps)

    inputs, dy = fed_forward_arguments(shape, dtype, device)
    inputs.append(weights(5, shape[1], dtype, device)[-1])
    double = torch.cat([dy, (2 * dy).flip(0)])
    functions = (kernel.after_feed_forward_and_norm, in_two, residual.after_feed_forward_and_norm)
    check(*map(fed_and_normed, functions), inputs, double, units=8)
    first, again = (outputs_and_gradients(fed_and_normed(functions[0]), inputs, double) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))


@DEVICES
def test_repeats_are_bit_equal_and_frozen_weights_get_nothing(device):
    need_kernels(device)
    from megatron_dllm.kernels import residual as kernel

    rows = 300 if device == "cuda" else 9
    cases = [(attended(kernel.after_attention), attended_arguments((rows, 24), torch.bfloat16, device), 2),
             (fed_forward(kernel.after_feed_forward, 100), fed_forward_arguments((rows, 24), torch.bfloat16, device), 3)]
    for function, (inputs, dy), num_streams in cases:
        first, second = (outputs_and_gradients(function, inputs, dy) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        frozen = outputs_and_gradients(function, [*inputs[:num_streams], *(x.detach() for x in inputs[num_streams:])], dy)
        assert len(frozen) == 1 + num_streams and all(torch.equal(a, b) for a, b in zip(frozen, first, strict=False))


def test_the_torch_path_equals_the_reference():
    cases = [(attended(residual.after_attention), attended(reference.after_attention), attended_arguments((17, 30), torch.float64, "cpu")),
             (fed_forward(residual.after_feed_forward, 5), fed_forward(reference.after_feed_forward, 5),
              fed_forward_arguments((17, 30), torch.float64, "cpu"))]
    for ours, want, (inputs, dy) in cases:
        inputs = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
        for a, b in zip(*(outputs_and_gradients(function, inputs, dy) for function in (ours, want)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@DEVICES
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
def test_rows_without_a_gradient_are_not_read(trained, device):
    need_kernels(device)
    from megatron_dllm.kernels import residual as kernel
    from megatron_dllm.kernels.rms_norm import rms_norm_beside

    shape, live = (7, 96), 4
    (x, y, *of_first), dy = attended_arguments(shape, torch.bfloat16, device)
    (h, a, b, *of_second), _ = fed_forward_arguments(shape, torch.bfloat16, device)
    scalars = of_second.pop()
    dead = torch.arange(7, device=device) >= live

    def gradients(fill, num_live):
        leaves = [[w.detach().clone().requires_grad_(trained or number < first) for number, w in enumerate(inputs)]
                  for first, inputs in ((2, (x, y, *of_first)), (3, (h, a, b, *of_second)), (1, (x, of_first[0])),
                                        (3, (h, a, b, *of_second, of_first[0])))]
        attend, feed, norm, both = leaves
        outs = [*kernel.after_attention(*attend[:3], tuple(attend[3:]), FACTOR, EPS, num_live),
                kernel.after_feed_forward(*feed, scalars, 3, EPS, num_live), *rms_norm_beside(*norm, EPS, num_live),
                *kernel.after_feed_forward_and_norm(*both, scalars, 3, EPS, num_live)]
        douts = [torch.where(dead[:, None], fill, dy[:7] * (number + 1)).to(out.dtype) for number, out in enumerate(outs)]
        return torch.autograd.grad(outs, [leaf for each in leaves for leaf in each if leaf.requires_grad], douts)

    want, ours = gradients(0.0, None), gradients(torch.nan, live)
    assert all(torch.equal(*pair) for pair in zip(ours, want, strict=True))
