"""kernels.hyper_connection_projection, _mappings and _streams against the torch path of transformer.hyper_connection in float64."""

import dataclasses

import pytest
import torch

from megatron_dllm.config import PRESETS
from megatron_dllm.parallel import ParallelContext
from megatron_dllm.tensor_parallel.initialization import Initializer
from megatron_dllm.transformer import hyper_connection as plain
from tests.unit.kernel_cases import DEVICES, need_kernels

# Tokens, streams, hidden: whole tiles, rests of them, one token, none, streams that are no power of two, one stream.
SHAPES = [(17, 4, 40), (67, 4, 36), (5, 3, 33), (1, 2, 16), (0, 4, 8), (9, 1, 24)]
STREAMS = [(5, 4, 130), (3, 3, 33), (1, 2, 16), (0, 4, 8), (2, 1, 24)]  # a program a token
ITERATIONS = 3
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


def read(x, parameters, grads, num_live, dtype, iterations=ITERATIONS):
    """All that a read gives, and the gradients of x and the parameters, of which rows from `num_live` on have none."""
    from megatron_dllm.kernels import hyper_connection_mappings, hyper_connection_projection, hyper_connection_streams

    weight, alpha, bias = parameters
    du, grad, scale, dpost, dres = grads
    n = dpost.shape[1]
    (u, *mapped), _, _ = hyper_connection_mappings.read(x, hyper_connection_projection.project(x, weight, n), alpha, bias, n, iterations)
    mapped = plain.Mapped(*mapped)
    through = hyper_connection_mappings.mappings_backward(
        mapped.projected, mapped.root, alpha, bias, mapped.res, scale, hyper_connection_streams.read_products(x, du, num_live), dpost, dres,
        x.shape[1], iterations, dtype)
    return [u, *mapped], hyper_connection_streams.read_backward(x, weight, mapped.pre, through, du, grad)


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape, scaled, iterations", [*((shape, shape[0] != 67, ITERATIONS) for shape in SHAPES), ((19, 4, 24), True, 20)],
                         ids=str)
def test_read(shape, scaled, iterations, dtype, device):
    need_kernels(device)
    n = shape[1]
    x, parameters, grads = read_inputs(shape, dtype, device)
    grads = grads if scaled else (*grads[:2], None, *grads[3:])
    weights, wide = (plain.Weights(*p, n, iterations) for p in (parameters, doubled(parameters)))
    exact_u, exact = plain.read_in_torch(x.double(), wide)
    plain_u, theirs = plain.read_in_torch(x, weights)
    made, gradients = read(x, parameters, grads, len(x), dtype, iterations)
    assert_close(made, [plain_u, *theirs], [exact_u, *exact])
    expected = plain.read_backward_in_torch(x.double(), wide, exact, *doubled(grads))
    assert_close(gradients, plain.read_backward_in_torch(x, weights, theirs, *grads), expected)


@DEVICES
@pytest.mark.parametrize("num_live", [0, 3])
def test_rows_without_gradient_are_not_read(num_live, device):
    """What comes back for them is anything, here nothing that is a number; their own gradients are zero."""
    need_kernels(device)
    from megatron_dllm.kernels import hyper_connection_streams as kernel

    x, parameters, grads = read_inputs((35, 2, 20), torch.bfloat16, device)
    y = draw(35, 20, seed=9, dtype=torch.bfloat16, device=device)
    known, unknown = (tuple(g.clone() for g in grads) for _ in range(2))
    for index in (0, 1, 3, 4):
        known[index][num_live:] = 0
        unknown[index][num_live:] = float("nan")
    made, expected = read(x, parameters, known, 35, torch.bfloat16)
    _, found = read(x, parameters, unknown, num_live, torch.bfloat16)
    assert not found[0][num_live:].any() and not expected[0][num_live:].any()
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4 if ours.dtype == torch.float32 else 1e-2, atol=1e-4)
    expected = kernel.merge_backward(x, y, made[2], known[2], known[1], 35)
    found = kernel.merge_backward(x, y, made[2], known[2], unknown[1], num_live)
    assert torch.equal(found[0], expected[0]) and not found[0][num_live:].any()
    assert all(torch.equal(ours[:num_live], theirs[:num_live]) for ours, theirs in zip(found[1:], expected[1:], strict=True))


@DEVICES
@pytest.mark.parametrize("scaled", [True, False], ids=["scale", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", STREAMS, ids=str)
def test_merge(shape, dtype, scaled, device):
    need_kernels(device)
    from megatron_dllm.kernels import hyper_connection_projection as projection
    from megatron_dllm.kernels import hyper_connection_streams as kernel

    tokens, n, hidden = shape
    at = {"dtype": dtype, "device": device}
    x, y, grad = (draw(tokens, width, seed=seed, **at) for seed, width in enumerate((n * hidden, hidden, n * hidden)))
    mix = draw(tokens, n, seed=7, dtype=torch.float32, device=device), draw(tokens, n, n, seed=8, dtype=torch.float32, device=device)
    given = [x, y, *mix, draw(tokens, 1, seed=9, **at) if scaled else None]
    exact, theirs = plain.mixed_in_torch(*doubled(given)), plain.mixed_in_torch(*given)
    assert_close([kernel.merge(*given)], [theirs], [exact])
    weight = draw(n * n + 2 * n, n * hidden, seed=10, dtype=torch.float32, device=device)
    new, projected = projection.merge_and_project(*given, weight)
    assert_close([new], [theirs], [exact])
    product_and_square = [torch.cat([values @ factor.T, values.square().sum(1, keepdim=True)], 1)
                          for values, factor in ((new.float(), weight), (new.double(), weight.double()))]
    assert_close([projected.sum(1)], product_and_square[:1], product_and_square[1:])
    given = [x, y, mix[0], given[-1], grad]
    assert_close(kernel.merge_backward(*given, tokens), plain.mixed_backward_in_torch(*given),
                 plain.mixed_backward_in_torch(*doubled(given)))


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", STREAMS, ids=str)
def test_expansion_and_contraction(shape, dtype, device):
    need_kernels(device)
    from megatron_dllm.kernels import hyper_connection_streams as kernel

    tokens, n, hidden = shape
    x = draw(tokens, n * hidden, seed=1, dtype=dtype, device=device)
    assert_close([kernel.sum_streams(x, n, 1 / n)], [x.float().unflatten(1, (n, -1)).mean(1).to(dtype)],
                 [x.double().unflatten(1, (n, -1)).mean(1)])
    assert torch.equal(kernel.spread(x, n, 0.5), (x * 0.5).repeat(1, n))


@DEVICES
@pytest.mark.parametrize("count, dtype, frozen", [(1, torch.float32, False), (3, torch.float32, False), (3, torch.bfloat16, False),
                                                  (1, torch.bfloat16, True)])
def test_norms_of_what_is_read(count, dtype, frozen, device, monkeypatch):
    """By the kernels that read, against the norms after a read in float64; rows without gradient among them."""
    need_kernels(device)
    n, hidden, tokens, num_live = 2, 20, 5, 4
    x, (weight, alpha, bias), _ = read_inputs((tokens, n, hidden), dtype, device)
    of_norms = [draw(hidden, seed=20 + k, dtype=torch.float32 if k == 2 else dtype, device=device) for k in range(count)]
    comes_back = [draw(tokens, hidden, seed=30 + k, dtype=dtype, device=device) for k in range(count)]
    grad = draw(tokens, n * hidden, seed=40, dtype=dtype, device=device)
    for g in (*comes_back, grad):
        g[num_live:] = 0
    config = dataclasses.replace(PRESETS["toy"], enable_mhc_connections=True, mhc_num_residual_streams=n, hidden_size=hidden,
                                 mhc_sinkhorn_iterations=ITERATIONS)
    module = plain.HyperConnection("mhc", config, context=ParallelContext.single(), init=Initializer(1, 0.02), dtype=torch.float32)

    def run(wide, by_kernels):
        monkeypatch.setattr(plain, "takes", lambda *tensors: by_kernels)
        module.to(device, torch.float64 if wide else torch.float32)
        with torch.no_grad():
            for parameter, value in zip((module.weight, module.alpha, module.bias), (weight, alpha, bias), strict=True):
                parameter.copy_(value)
        leaves = [(t.double() if wide else t.clone()).requires_grad_() for t in (x, *of_norms)]
        weights = tuple(w.detach() if frozen else w for w in leaves[1:])
        normed, streams, mix = module.read_normed(leaves[0], None, plain.Norms(weights, 1e-6, 0.7), num_live=num_live)
        total = sum((a.double() * b.double()).sum() for a, b in zip((*normed, streams), (*comes_back, grad), strict=True))
        total = total + (mix.post[:num_live].sin().sum() + mix.res[:num_live].cos().sum()).double()
        wanted = [*leaves[:1 if frozen else None], *module.parameters()]
        return [*normed, *torch.autograd.grad(total, wanted)]

    assert_close(run(False, True), run(False, False), run(True, False))


@DEVICES
@pytest.mark.parametrize("tokens, n, num_live, recomputed, parts, dtype", [
    (5, 2, 4, False, 2, torch.float32), (9, 4, 7, True, 2, torch.float32), (1, 3, 1, False, 2, torch.float32),
    (35, 4, 30, False, 1, torch.float32), (35, 4, 30, False, 1, torch.bfloat16)], ids=str)
def test_from_copies_to_the_mean(tokens, n, num_live, recomputed, parts, dtype, device, monkeypatch):
    """A model's first part reads one tensor for all streams, its last one writes their mean; a part may be both."""
    need_kernels(device)
    hidden, outputs = 20, n * n + 2 * n
    config = dataclasses.replace(PRESETS["toy"], enable_mhc_connections=True, mhc_num_residual_streams=n, hidden_size=hidden,
                                 mhc_sinkhorn_iterations=ITERATIONS)
    modules = [plain.HyperConnection(f"mhc{k}", config, context=ParallelContext.single(), init=Initializer(1, 0.02), dtype=torch.float32)
               for k in range(parts)]
    x, norm, y = (draw(*shape, seed=seed, dtype=dtype, device=device) for seed, shape in enumerate(
        ((tokens, hidden), (hidden,), (tokens, hidden))))
    values = draw(outputs, n * hidden, seed=4, dtype=torch.float32, device=device, scale=0.2), torch.tensor([0.7, 1.3, 0.9]), draw(
        outputs, seed=5, dtype=torch.float32, device=device)
    scale, back = draw(tokens, 1, seed=6, dtype=dtype, device=device), draw(tokens, hidden, seed=7, dtype=dtype, device=device)
    back[num_live:] = 0

    def run(wide, by_kernels):
        monkeypatch.setattr(plain, "takes", lambda *tensors: by_kernels)
        for module in modules:
            module.to(device, torch.float64 if wide else torch.float32)
            with torch.no_grad():
                for parameter, value in zip((module.weight, module.alpha, module.bias), values, strict=True):
                    parameter.copy_(value)
        leaves = [(t.double() if wide else t.clone()).requires_grad_() for t in (x, norm, y)]
        chain = plain.StreamChain() if recomputed else None
        streams = plain.as_copies(leaves[0], n)
        for module, reader in zip(modules, [*modules[1:], plain.AsMean()], strict=True):
            norms = plain.Norms(leaves[1:2], 1e-6)
            (normed,), streams, mix = module.read_normed(streams, chain, norms, scale.to(leaves[0].dtype), num_live)
            streams = module.write(streams, leaves[2] + normed.sin(), mix, chain, reader)
        assert streams.shape == (tokens, hidden)
        return [streams, *torch.autograd.grad(streams, [*leaves, *(p for m in modules for p in m.parameters())], back.to(streams.dtype))]

    assert_close(run(False, True), run(False, False), run(True, False))


@DEVICES
def test_connections_one_after_the_other(device, monkeypatch):
    """As autograd functions: what the second reads was projected by the first one's write."""
    need_kernels(device)
    monkeypatch.setattr(plain, "takes", lambda *tensors: all(x is None or x.dtype != torch.float64 for x in tensors))
    n, hidden, tokens, num_live = 2, 20, 5, 3
    first, second = (draw(n * n + 2 * n, n * hidden, seed=seed, dtype=torch.float32, device=device, scale=0.2) for seed in (1, 2))
    alpha, bias = torch.tensor([0.7, 1.3, 0.9], device=device), draw(n * n + 2 * n, seed=3, dtype=torch.float32, device=device)
    x, y, scale = (draw(tokens, width, seed=width, dtype=torch.float32, device=device) for width in (n * hidden, hidden, 1))
    live = (torch.arange(tokens, device=device) < num_live)[:, None]

    def run(dtype, reads_ahead):
        leaves = [t.to(dtype).requires_grad_() for t in (x, y, first, second, alpha, bias)]
        streams, written, one, two, gates, shift = leaves
        u, streams, post, res = plain._Read.apply(streams, one, gates, shift, n, ITERATIONS, None, None, num_live, None)
        ahead = two.detach() if reads_ahead else None
        streams, projection = plain._Write.apply(streams, u * written, plain.Mix(post, res, None, num_live), post, res, None, ahead)
        assert (projection is None) == (not reads_ahead or dtype == torch.float64)
        u, streams, post, res = plain._Read.apply(streams, two, gates, shift, n, ITERATIONS, None, scale.to(dtype), num_live, projection)
        mix = plain.Mix(post, res, scale.to(dtype), num_live)
        streams, _ = plain._Write.apply(streams, u.square(), mix, post, res, None, None)
        total = plain.contract_streams(plain.expand_streams(streams, 2), 2)
        return [total, *torch.autograd.grad((total.sin() * live).sum(), leaves)]

    exact = run(torch.float64, True)
    for found in (run(torch.float32, True), run(torch.float32, False)):
        for ours, theirs in zip(found, exact, strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)


@DEVICES
def test_kernels_repeat_bit_for_bit(device):
    need_kernels(device)

    def once():
        x, parameters, grads = read_inputs((18, 2, 24), torch.bfloat16, device)
        made, gradients = read(x, parameters, grads, 17, torch.bfloat16)
        return *made, *gradients

    assert all(torch.equal(a, b) for a, b in zip(once(), once(), strict=True))
