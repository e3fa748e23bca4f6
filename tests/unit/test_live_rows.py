"""Rows without a gradient: what skips them gives what autograd makes of zeros there, and drafts are such rows."""
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron_dllm.tensor_parallel import linear
from megatron_dllm.tensor_parallel.adapted_linear import Factors, adapted_linear
from megatron_dllm.tensor_parallel.live_rows import live_linear
from tests.unit.toy import toy_inputs, toy_model, toy_plan

ROWS, LIVE, DEPTH = 11, 7, 6
SHAPES = [(5, DEPTH), (2, 4, DEPTH)]


def draw(*shape, seed):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gradients(function, leaves):
    """Of everything, for a gradient that is zero after the live rows; what is said to be skipped there is not a number."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    ys = function(*leaves)
    dys = [draw(*y.shape, seed=90 + n) for n, y in enumerate(ys)]
    results = []
    for value in (0.0, float("nan")):
        for dy in dys:
            dy[LIVE:] = value
        results.append(torch.autograd.grad(ys, leaves, dys, retain_graph=True))
    return results


def test_live_linear():
    leaves = [draw(ROWS, DEPTH, seed=1), *(draw(*shape, seed=2) for shape in SHAPES)]
    zeros, unread = gradients(lambda x, *weights: live_linear(x, weights, LIVE), leaves)
    wanted, _ = gradients(lambda x, *weights: [F.linear(x, w.flatten(0, -2)).unflatten(1, w.shape[:-1]) for w in weights], leaves)
    for ours, poisoned, want in zip(zeros, unread, wanted, strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-12, atol=1e-12)
        assert torch.equal(ours, poisoned)


def test_adapted_linear():
    weights = [draw(*shape, seed=2) for shape in SHAPES]
    leaves = [draw(ROWS, DEPTH, seed=1), draw(3, DEPTH, seed=3), draw(5, 3, seed=4), draw(2, 3, DEPTH, seed=5), draw(2, 4, 3, seed=6)]

    def adapted(num_live):
        return lambda x, a, b, c, d: adapted_linear(x, weights, [Factors(a, b, 1.5), Factors(c, d, 1.5)], num_live)

    zeros, unread = gradients(adapted(LIVE), leaves)
    wanted, _ = gradients(adapted(None), leaves)
    for ours, poisoned, want in zip(zeros, unread, wanted, strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-12, atol=1e-12)
        assert torch.equal(ours, poisoned)


@pytest.mark.parametrize("seed", range(6))
def test_drafts_are_not_live(seed, monkeypatch):
    """The gradients of a model are the same whether the rows of drafts are skipped or not, and some are skipped."""
    inputs = toy_inputs(toy_plan(seed=seed))
    live = inputs.first_pass.draws and inputs.first_pass.draws.num_live
    drafts = inputs.draft_rows.numpy()
    assert (live is not None) == np.array_equal(drafts, np.arange(inputs.first_pass.num_clean, inputs.first_pass.num_tokens))
    if live is None:
        return
    found = []
    for skips in (False, True):
        model = toy_model()
        monkeypatch.setattr(linear, "_num_live", lambda x, tp, draws, skips=skips: draws.num_live if skips and draws is not None else None)
        model(inputs).total.backward()
        found.append([p.grad for p in model.parameters()])
    for plain, skipped in zip(*found, strict=True):
        torch.testing.assert_close(skipped, plain, rtol=1e-10, atol=1e-14)
