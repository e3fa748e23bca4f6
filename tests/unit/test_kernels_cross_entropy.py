"""kernels.cross_entropy against its reference in float64, by itself and inside linear_cross_entropy."""

import importlib

import pytest
import torch

from megatron_dllm.kernels import reference
from megatron_dllm.parallel import ParallelContext
from megatron_dllm.tensor_parallel import cross_entropy
from tests.unit.kernel_cases import DEVICES, draw, need_kernels

soft_embedding = importlib.import_module("megatron_dllm.tensor_parallel.soft_embedding")  # its function hides it in the package
CASES = pytest.mark.parametrize(
    "num_tokens, width, softcap, has_bonus",
    [(1, 5, 30.0, False), (3, 2100, 30.0, True), (2, 9001, None, True), (3, 17, None, False), (0, 8, 30.0, True), (2, 0, 30.0, False),
     (2, 8192, 30.0, False), (3, 2100, 50.0, False)],
)


def arguments(num_tokens, width, has_bonus, device):
    """product, target, observed, bonus; the borders, a token of another rank (-1), and a bonus on the target itself among them."""
    product = 20 * draw(num_tokens, width, dtype=torch.float32, device=device, grad=False)
    target = torch.tensor([width - 1, -1, 0], device=device)[:num_tokens]
    if not has_bonus:
        return product, target, None, None
    return product, target, torch.tensor([0, 3, 0], device=device)[:num_tokens], torch.tensor([2.5, 40.0, 0.5], device=device)[:num_tokens]


def double(*tensors):
    return [x.double() if x is not None and x.is_floating_point() else x for x in tensors]


def close(got, want, units):
    return want.numel() == 0 or (got - want).abs().max() <= units * torch.finfo(got.dtype).eps * want.abs().max()


@DEVICES
@CASES
def test_softmax_statistics(num_tokens, width, softcap, has_bonus, device):
    need_kernels(device)
    from megatron_dllm.kernels.cross_entropy import softmax_statistics

    product, target, observed, bonus = arguments(num_tokens, width, has_bonus, device)
    own = softmax_statistics(product, target, softcap, observed, bonus)
    assert own.dtype == torch.float32 and not own.isnan().any()
    if not width:
        assert (own[:, 0] == -torch.inf).all() and not own[:, 1:].any()
        return
    largest, total, at_target, best = reference.softmax_statistics(*double(product), target, softcap, *double(observed, bonus))[0]
    overall, winner = own[:, 0].max(0)
    assert close(overall, largest, 4) and close(own[:, 2].sum(0), at_target, 4)
    assert close((own[:, 1] * (own[:, 0] - overall).exp()).sum(0), total, 60)  # exp of a logit of 30, itself rounded
    assert torch.equal(own[:, 3].gather(0, winner[None])[0], best.float())


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@CASES
def test_logit_gradient(num_tokens, width, softcap, has_bonus, dtype, device):
    need_kernels(device)
    from megatron_dllm.kernels.cross_entropy import logit_gradient

    product, target, observed, bonus = arguments(num_tokens, width, has_bonus, device)
    weights = torch.tensor([0.5, 2.0, 0.0], device=device)[:num_tokens]
    largest = product.new_full((num_tokens,), 30.0 if softcap else 60.0)
    scale = product.new_full((num_tokens,), 0.25)
    exact = double(product, target, weights, largest, scale)
    want = reference.logit_gradient(*exact, softcap, *double(observed, bonus), torch.float64)
    got = logit_gradient(product, target, weights, largest, scale, softcap, observed, bonus, dtype)
    assert got.dtype == dtype and close(got, want, 60 if dtype == torch.float32 else 1)


@DEVICES
def test_equal_logits_go_to_the_lowest_token(device):
    need_kernels(device)
    from megatron_dllm.kernels.cross_entropy import softmax_statistics

    own = softmax_statistics(torch.ones(2, 5000, device=device), torch.tensor([0, 2500], device=device), None, None, None)
    assert own[:, 3].gather(0, own[:, 0].max(0).indices[None]).tolist() == [[1.0, 0.0]]


@DEVICES
@pytest.mark.parametrize("has_bonus", [False, True])
def test_linear_cross_entropy_by_kernel(has_bonus, device, monkeypatch):
    need_kernels(device)
    hidden, weight = draw(7, 6, dtype=torch.float32, device=device), draw(2100, 6, dtype=torch.float32, device=device)
    targets = torch.tensor([0, 2099, 5, 5, 1000, 2048, 2047], device=device)
    extras = {"observed": targets.flip(0), "bonus": torch.linspace(0, 5, 7, device=device)} if has_bonus else {}
    results = []
    for score in (cross_entropy._score_by_kernel, cross_entropy._score_in_torch):
        for name in ("_score_by_kernel", "_score_in_torch"):
            monkeypatch.setattr(cross_entropy, name, score)
        ours = cross_entropy.linear_cross_entropy(hidden, weight, targets, torch.linspace(0, 1, 7, device=device), softcap=3.0,
                                                  tp=ParallelContext.single().tp, vocab_size=2100, chunk_bytes=3 * 2100 * 4, **extras)
        results.append([ours.per_token, ours.correct.float(), *torch.autograd.grad(ours.loss, (hidden, weight))])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@CASES
def test_probabilities(num_tokens, width, softcap, has_bonus, dtype, device):
    need_kernels(device)
    from megatron_dllm.kernels.cross_entropy import probabilities

    product, *_ = arguments(num_tokens, width, has_bonus, device)
    largest, scale = product.new_full((num_tokens,), 60.0), product.new_full((num_tokens,), 0.25)
    want = reference.probabilities(*double(product, largest, scale), softcap, torch.float64)
    got = probabilities(product, largest, scale, softcap, dtype)
    assert got.dtype == dtype and close(got, want, 60 if dtype == torch.float32 else 1)


@DEVICES
def test_soft_embedding_by_kernel(device, monkeypatch):
    need_kernels(device)
    hidden, weight = draw(7, 6, dtype=torch.float32, device=device), draw(2100, 6, dtype=torch.float32, device=device)
    results = []
    for steps in (soft_embedding._ByKernel, soft_embedding._InTorch):
        monkeypatch.setattr(soft_embedding, "_steps", lambda *_, steps=steps: steps)
        y = soft_embedding.soft_embedding(hidden, weight, softcap=3.0, scale=2.0, tp=ParallelContext.single().tp, vocab_size=2100,
                                          chunk_bytes=3 * 2100 * 4)
        results.append([y.detach(), *torch.autograd.grad(y.square().sum(), weight)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
