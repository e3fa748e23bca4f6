"""kernels.permute against its reference, and the torch path of moe.permute against the same."""

import pytest
import torch

from megatron_dllm.kernels import reference
from megatron_dllm.moe import permute as moe
from tests.unit.kernel_cases import DEVICES, as_many_as, check, draw, need_kernels, outputs_and_gradients

NUM_EXPERTS = 5
# (tokens, choices a token, hidden, whether some choices have no row)
CASES = pytest.mark.parametrize(
    "num_tokens, choices, hidden, is_partial",
    [(1, 1, 7, False), (17, 3, 24, False), (17, 3, 24, True), (9, 2, 1100, True), (0, 2, 8, False), (1025, 2, 3, False)],
)


def permutation_of(num_tokens, choices, is_partial, device):
    indices = torch.rand(num_tokens, NUM_EXPERTS, generator=torch.Generator().manual_seed(1)).argsort(1)[:, :choices]
    if not is_partial:
        return moe.sort_by_expert(indices.to(device), NUM_EXPERTS)
    local = torch.where(indices < 3, indices, -1)
    local[1] = -1  # a token that has no row at all
    return moe.sort_by_local_expert(local.to(device), 3, int((local >= 0).sum()))


def weights_of(num_tokens, choices, device):
    return draw(num_tokens, choices, dtype=torch.float32, device=device)


def torch_permute(x, permutation):
    return moe._Permute.apply(x, permutation.slot, permutation.row, permutation.is_partial)


def torch_unpermute(rows, weights, permutation):
    return moe._Unpermute.apply(rows, weights, permutation.slot, permutation.row, permutation.is_partial)


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@CASES
def test_permute(num_tokens, choices, hidden, is_partial, dtype, device):
    need_kernels(device)
    num_tokens = as_many_as(num_tokens, device)
    from megatron_dllm.kernels.permute import permute

    permutation = permutation_of(num_tokens, choices, is_partial, device)
    row, num_rows = permutation.row, len(permutation.slot)
    x, dy = draw(num_tokens, hidden, dtype=dtype, device=device), draw(num_rows, hidden, dtype=dtype, device=device, grad=False)
    check(lambda x: permute(x, row, num_rows), lambda x: reference.permute(x, row, num_rows), lambda x: torch_permute(x, permutation),
          [x], dy)
    assert torch.equal(permute(x, row, num_rows), torch_permute(x, permutation))


@DEVICES
@CASES
def test_tokens_that_are_not_live_get_zero(num_tokens, choices, hidden, is_partial, device):
    need_kernels(device)
    num_tokens = as_many_as(num_tokens, device)
    from megatron_dllm.kernels.permute import permute

    permutation, num_live = permutation_of(num_tokens, choices, is_partial, device), num_tokens // 2
    row, num_rows = permutation.row, len(permutation.slot)
    x, drows = draw(num_tokens, hidden, dtype=torch.float32, device=device), draw(num_rows, hidden, dtype=torch.float32, device=device)
    drows = drows.detach().masked_fill(permutation.slot[:, None] >= num_live * choices, float("nan"))
    wanted, = torch.autograd.grad(permute(x, row, num_rows), x, drows.nan_to_num())
    for function in (lambda x: permute(x, row, num_rows, num_live), lambda x: moe.permute(x, permutation, num_live)):
        dx, = torch.autograd.grad(function(x), x, drows)
        torch.testing.assert_close(dx, wanted)
        assert not dx[num_live:].any()


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@CASES
def test_unpermute(num_tokens, choices, hidden, is_partial, dtype, device):
    need_kernels(device)
    num_tokens = as_many_as(num_tokens, device)
    from megatron_dllm.kernels.permute import unpermute

    permutation = permutation_of(num_tokens, choices, is_partial, device)
    rows = draw(len(permutation.slot), hidden, dtype=dtype, device=device)
    inputs = [rows, weights_of(num_tokens, choices, device)]
    dy = draw(num_tokens, hidden, dtype=dtype, device=device, grad=False)
    check(lambda r, w: unpermute(r, w, permutation.row), lambda r, w: reference.unpermute(r, w, permutation.row),
          lambda r, w: torch_unpermute(r, w, permutation), inputs, dy, units=4)


@DEVICES
@CASES
def test_unpermute_without_weights(num_tokens, choices, hidden, is_partial, device):
    need_kernels(device)
    num_tokens = as_many_as(num_tokens, device)
    from megatron_dllm.kernels.permute import unpermute

    permutation = permutation_of(num_tokens, choices, is_partial, device)
    row, rows = permutation.row, draw(len(permutation.slot), hidden, dtype=torch.bfloat16, device=device)
    ones, dy = torch.ones(row.shape, device=device), draw(num_tokens, hidden, dtype=torch.bfloat16, device=device, grad=False)
    check(lambda r: unpermute(r, None, row), lambda r: reference.unpermute(r, ones, row),
          lambda r: moe._Sum.apply(r, permutation.slot, row, is_partial), [rows], dy)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        unpermute(rows, None, row)
    assert not any(x.is_floating_point() for x in kept)
    num_live = num_tokens // 2
    live = permutation.slot < num_live * choices
    wanted, = torch.autograd.grad(unpermute(rows, None, row), rows, dy)
    dy[num_live:] = float("nan")
    found, = torch.autograd.grad(unpermute(rows, None, row, num_live), rows, dy)
    assert torch.equal(found[live], wanted[live])


@pytest.mark.parametrize("is_partial", [False, True])
def test_the_torch_path_equals_the_reference(is_partial):
    permutation = permutation_of(17, 3, is_partial, "cpu")
    rows = draw(len(permutation.slot), 6, dtype=torch.float64, device="cpu")
    weights, x = weights_of(17, 3, "cpu").detach().double().requires_grad_(), draw(17, 6, dtype=torch.float64, device="cpu")
    pairs = [
        (lambda r, w: moe.unpermute(r, w, permutation), lambda r, w: reference.unpermute(r, w, permutation.row), [rows, weights], x),
        (lambda x: moe.permute(x, permutation), lambda x: reference.permute(x, permutation.row, len(rows)), [x], rows),
    ]
    for ours, wanted, inputs, dy in pairs:
        both = (outputs_and_gradients(function, inputs, dy.detach()) for function in (ours, wanted))
        for got, want in zip(*both, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
