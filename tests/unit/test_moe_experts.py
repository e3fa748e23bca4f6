"""Grouped matrix products against the loop, and what each is chosen for."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from megatron_dllm.config import PRESETS
from megatron_dllm.kernels.row_weights import RowWeights
from megatron_dllm.moe.experts import Experts, choose_product, grouped_linear, looped_linear
from megatron_dllm.moe.permute import permute, sort_by_expert, sort_by_local_expert, unpermute
from megatron_dllm.parallel import ParallelContext
from megatron_dllm.tensor_parallel import Initializer
from megatron_dllm.transformer.precision import accumulation_dtype

COUNTS = {"usual": (3, 0, 5, 1), "none": (0, 0, 0, 0), "all in one": (0, 9, 0, 0), "more than 256": (1, 0, 300, 2)}


def results(product, dtype, counts, broadcast):
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(counts), 16, generator=draw).to(dtype).requires_grad_()
    weight = torch.randn(4, 24, 16, generator=draw).to(dtype).requires_grad_()
    y = product(rows, weight, torch.tensor(counts))
    grad = torch.ones((), dtype=dtype).expand_as(y) if broadcast else torch.randn(y.shape, generator=draw).to(dtype)
    return y.detach(), *torch.autograd.grad(y, (rows, weight), grad)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("broadcast", [False, True])
def test_grouped_linear(counts, broadcast):
    reference = results(looped_linear, torch.float64, counts, broadcast)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        grouped, looped = (results(product, dtype, counts, broadcast) for product in (grouped_linear, looped_linear))
        for ours, loop, exact in zip(grouped, looped, reference, strict=True):
            assert ours.dtype == dtype and ours.shape == exact.shape
            if ours.numel():
                scale = exact.abs().max()
                # At most twice the error of plain products in the same dtype, where both read the same rounded numbers.
                if dtype == torch.float32:
                    assert (ours - exact).abs().max() <= tolerance * scale
                assert (ours - loop).abs().max() <= tolerance * scale
        assert not grouped[2][[n for n, count in enumerate(counts) if count == 0]].any()


@pytest.mark.parametrize(
    "dtype, device, hidden, inner, grouped, chosen",
    [
        (torch.bfloat16, "cuda", 64, 32, True, grouped_linear),
        (torch.bfloat16, "cpu", 64, 32, False, looped_linear),
        (torch.bfloat16, "cpu", 64, 12, True, looped_linear),
        (torch.bfloat16, "cpu", 60, 32, True, looped_linear),
        (torch.float32, "cuda", 64, 32, True, looped_linear),
        (torch.float32, "cpu", 64, 32, True, grouped_linear),
        (torch.float32, "cpu", 62, 32, True, looped_linear),
        (torch.float64, "cpu", 64, 32, True, looped_linear),
    ],
)
def test_choose_product(dtype, device, hidden, inner, grouped, chosen):
    assert choose_product(dtype, torch.device(device), hidden, inner, grouped=grouped) is chosen


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_both_products_are_equal_to_the_bit_on_a_cpu(counts):
    grouped, looped = (results(product, torch.float32, counts, False) for product in (grouped_linear, looped_linear))
    assert all(torch.equal(a, b) for a, b in zip(grouped, looped, strict=True))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_the_whole_feed_forward_equals_its_parts(counts, dtype, tolerance, weighted):
    """Values and gradients, those of the rows' weights too, which it takes before its second product."""
    config = dataclasses.replace(PRESETS["toy"], hidden_size=16, moe_ffn_hidden_size=8, num_experts=4)
    experts = Experts("experts", config, context=ParallelContext.single(), init=Initializer(3, 0.5), dtype=dtype)
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(counts), 16, generator=draw).to(dtype).requires_grad_()
    slot = torch.randperm(sum(counts), generator=draw)
    weights = torch.rand(sum(counts), 1, generator=draw).to(accumulation_dtype(dtype)).requires_grad_(weighted)
    counts = torch.tensor(counts)

    def with_gradients(y):
        factors = torch.linspace(-1, 1, 16, dtype=y.dtype).expand_as(y)
        inputs = [rows, *experts.parameters(), *[weights] * weighted]
        return y.detach(), *torch.autograd.grad((y * factors).sum(), inputs)

    def exact(x):
        return x.double()

    hidden = looped_linear(exact(rows), exact(experts.gate_up.flatten(1, 2)), counts).unflatten(1, (2, -1))
    y = looped_linear(F.gelu(hidden[:, 0], approximate="tanh") * hidden[:, 1], exact(experts.down), counts)
    parts = with_gradients(y * exact(weights)[slot] if weighted else y)
    ours = with_gradients(experts(rows, counts, RowWeights(weights, slot) if weighted else None))
    for got, want in zip(ours, parts, strict=True):
        assert got.shape == want.shape and (got.double() - want.double()).norm() <= tolerance * want.double().norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["loop", "grouped"])
def test_rows_of_no_expert_stand_last_and_give_weights_nothing(dtype):
    config = dataclasses.replace(PRESETS["toy"], hidden_size=16, moe_ffn_hidden_size=8, num_experts=4)
    experts = Experts("experts", config, context=ParallelContext.single(), init=Initializer(3, 0.5), dtype=dtype)
    rows, counts = torch.randn(12, 16, dtype=dtype), torch.tensor([3, 0, 5, 1])

    def results(rows):
        own = rows.clone().requires_grad_()
        y = experts(own, counts)[:9]
        return [y, *torch.autograd.grad(y.square().sum(), (own, *experts.parameters()))]

    for found, wanted in zip(results(rows), results(rows[:9]), strict=True):
        torch.testing.assert_close(found[:len(wanted)], wanted)


def test_sort_by_local_expert_leaves_other_choices_out():
    indices = torch.tensor([[1, -1], [-1, -1], [0, 1], [-1, 0]])
    permutation = sort_by_local_expert(indices, 3, 4)
    assert permutation.counts.tolist() == [2, 2, 0]
    assert permutation.slot.tolist() == [4, 7, 0, 5]  # token 2 and 3 for expert 0, token 0 and 2 for expert 1
    assert permutation.row.tolist() == [[2, 4], [4, 4], [0, 3], [4, 1]]
    x, weights = torch.randn(4, 3, dtype=torch.float64, requires_grad=True), torch.rand(4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: unpermute(permute(x, permutation).sin(), w, permutation), (x, weights))
    y = unpermute(permute(x, permutation), weights, permutation)
    kept = (weights * (indices >= 0)).sum(1, keepdim=True)
    assert torch.allclose(y, x * kept)


def test_permute_and_unpermute():
    indices = torch.tensor([[2, 0], [2, 1], [0, 2]])
    permutation = sort_by_expert(indices, 4)
    assert permutation.counts.tolist() == [2, 1, 3, 0]
    assert permutation.slot.tolist() == [1, 4, 3, 0, 2, 5]
    x, weights = torch.randn(3, 2, dtype=torch.float64, requires_grad=True), torch.rand(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: unpermute(permute(x, permutation).cos(), w, permutation), (x, weights))


@pytest.mark.gpu
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_grouped_linear_on_a_gpu(counts):
    draw = torch.Generator().manual_seed(0)
    rows, weight, grad = (torch.randn(shape, generator=draw).to("cuda", torch.bfloat16)
                          for shape in ((sum(counts), 64), (4, 128, 64), (sum(counts), 128)))
    results = []
    for product in (grouped_linear, looped_linear):
        inputs = rows.clone().requires_grad_(), weight.clone().requires_grad_()
        y = product(*inputs, torch.tensor(counts, device="cuda"))
        results.append((y.detach(), *torch.autograd.grad(y, inputs, grad)))
    for ours, loop in zip(*results, strict=True):
        assert ours.shape == loop.shape and torch.isfinite(ours).all()
        if ours.numel():
            assert (ours - loop).abs().max() <= 2e-2 * loop.abs().max()
    assert not results[0][2][[n for n, count in enumerate(counts) if count == 0]].any(), "an expert without rows has a gradient of zero"
