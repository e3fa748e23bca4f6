"""kernels.hyper_connection_mappings and _streams against the torch path of transformer.hyper_connection in float64."""

import pytest
import torch

from megatron_dllm.transformer import hyper_connection as plain
from tests.unit.kernel_cases import DEVICES, need_kernels

# Tokens, streams, hidden: whole tiles, rests of them, one token, none, streams that are no power of two, one stream.
SHAPES = [(17, 4, 40), (65, 4, 36), (5, 3, 33), (1, 2, 16), (0, 4, 8), (9, 1, 24)]
STREAMS = [(5, 4, 130), (3, 3, 33), (1, 2, 16), (0, 4, 8), (2, 1, 24)]  # a program a token
ITERATIONS = 20
# Units of rounding of the largest: one for results of 16 bits; more for fp32, where sums over tokens and columns come in another order.
UNITS = {torch.bfloat16: 1, torch.float32: 16}


def draw(*shape, seed, dtype, device, scale=1.0):
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(device, dtype)


def read_inputs(shape, dtype, device):
    """x, weights that are nowhere special, and what comes back: the gradients of u and of what is written, its scale, the gradients of
    H_post and H_res; a row of zeros among the tokens."""
    tokens, n, hidden = shape
    outputs = n * n + 2 * n
    x = draw(tokens, n * hidden, seed=1, dtype=dtype, device=device)
    x[2:3] = 0
    at = {"dtype": torch.float32, "device": device}
    weight = draw(outputs, n * hidden, seed=2, **at, scale=0.2)
    alpha, bias = torch.tensor([0.7, 1.3, 0.9], **at), draw(outputs, seed=3, **at)
    low = {"dtype": dtype, "device": device}
    grads = (draw(tokens, hidden, seed=4, **low), draw(tokens, n * hidden, seed=7, **low), draw(tokens, 1, seed=8, **low),
             draw(tokens, n, seed=5, **at), draw(tokens, n, n, seed=6, **at))
    return x, (weight, alpha, bias), grads


def assert_close(kernel, torch_has, exact):
    """At most twice the error of plain torch in the same dtype, beside some units of rounding."""
    for name, ours, theirs, want in zip(range(len(exact)), kernel, torch_has, exact, strict=True):
        assert ours.shape == want.shape and ours.dtype == theirs.dtype, name
        if want.numel():
            unit = UNITS[ours.dtype] * torch.finfo(ours.dtype).eps * want.abs().max()
            error, allowed = (ours - want).abs().max(), 2 * (theirs - want).abs().max() + unit
            assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


def doubled(tensors):
    return [t.double() if t is not None else None for t in tensors]


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape, scaled", [(shape, shape[0] != 65) for shape in SHAPES], ids=str)
def test_read(shape, scaled, dtype, device):
    need_kernels(device)
    from megatron_dllm.kernels import hyper_connection_mappings, hyper_connection_streams

    n = shape[1]
    x, parameters, grads = read_inputs(shape, dtype, device)
    grads = grads if scaled else (*grads[:2], None, *grads[3:])
    weights, wide = (plain.Weights(*p, n, ITERATIONS) for p in (parameters, doubled(parameters)))
    exact_u, exact = plain.read_in_torch(x.double(), wide)
    plain_u, theirs = plain.read_in_torch(x, weights)
    u, *mapped = hyper_connection_mappings.read(x, *parameters, n, ITERATIONS)
    mapped = plain.Mapped(*mapped)
    assert_close([u, *mapped], [plain_u, *theirs], [exact_u, *exact])

    expected = plain.read_backward_in_torch(x.double(), wide, exact, *doubled(grads))
    plainly = plain.read_backward_in_torch(x, weights, theirs, *grads)
    dprojected, coefficient, dalpha, dbias = hyper_connection_mappings.mappings_backward(
        mapped.projected, mapped.root, *parameters[1:], hyper_connection_streams.read_products(x, grads[0]), *grads[3:], x.shape[1],
        ITERATIONS, dtype)
    du, grad, scale, *_ = grads
    dx, dweight = hyper_connection_streams.read_backward(
        x, parameters[0], mapped.pre, mapped.res, scale, dprojected, coefficient, du, grad)
    assert_close([dx, dweight, dalpha, dbias], plainly, expected)


@DEVICES
@pytest.mark.parametrize("scaled", [True, False], ids=["scale", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", STREAMS, ids=str)
def test_merge(shape, dtype, scaled, device):
    need_kernels(device)
    from megatron_dllm.kernels import hyper_connection_streams as kernel

    tokens, n, hidden = shape
    at = {"dtype": dtype, "device": device}
    x, y, grad = (draw(tokens, width, seed=seed, **at) for seed, width in enumerate((n * hidden, hidden, n * hidden)))
    mix = draw(tokens, n, seed=7, dtype=torch.float32, device=device), draw(tokens, n, n, seed=8, dtype=torch.float32, device=device)
    given = [x, y, *mix, draw(tokens, 1, seed=9, **at) if scaled else None]
    exact, theirs = plain.mixed_in_torch(*doubled(given)), plain.mixed_in_torch(*given)
    assert_close([kernel.merge(*given)], [theirs], [exact])
    given = [x, y, mix[0], given[-1], grad]
    assert_close(kernel.merge_backward(*given), plain.mixed_backward_in_torch(*given), plain.mixed_backward_in_torch(*doubled(given)))


@DEVICES
def test_kernels_repeat_bit_for_bit(device):
    need_kernels(device)
    from megatron_dllm.kernels import hyper_connection_mappings, hyper_connection_streams

    def once():
        x, parameters, grads = read_inputs((70, 4, 24), torch.bfloat16, device)
        _, pre, post, res, projected, root = made = hyper_connection_mappings.read(x, *parameters, 4, ITERATIONS)
        found = hyper_connection_mappings.mappings_backward(
            projected, root, *parameters[1:], hyper_connection_streams.read_products(x, grads[0]), *grads[3:], x.shape[1], ITERATIONS,
            x.dtype)
        du, grad, scale, *_ = grads
        return *made, *found, *hyper_connection_streams.read_backward(x, parameters[0], pre, res, scale, *found[:2], du, grad)

    assert all(torch.equal(a, b) for a, b in zip(once(), once(), strict=True))
