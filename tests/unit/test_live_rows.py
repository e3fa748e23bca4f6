"""Rows without a gradient: what skips them gives what autograd makes of zeros there, and drafts are such rows."""
import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron_dllm.config import LoRAConfig, ObjectiveConfig
from megatron_dllm.diffusion.inputs import to_device
from megatron_dllm.models.diffusion_gemma.lora import add_adapters
from megatron_dllm.parallel import MainGradient, ParallelContext
from megatron_dllm.tensor_parallel import linear
from megatron_dllm.tensor_parallel.adapted_linear import Factors, adapted_linear
from megatron_dllm.tensor_parallel.initialization import Initializer
from megatron_dllm.tensor_parallel.live_rows import live_linear
from megatron_dllm.transformer import core_attention
from tests.unit.kernel_cases import DEVICES, need_kernels
from tests.unit.toy import CONFIG, toy_inputs, toy_model, toy_plan

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


def with_buffers(weights, buffers):
    """The weights, which add up their gradients there (None: autograd does)."""
    for number, weight in enumerate(weights):
        weight.main_gradient = None if buffers is None else buffers[number]
    return weights


def test_live_linear():
    leaves = [draw(ROWS, DEPTH, seed=1), *(draw(*shape, seed=2) for shape in SHAPES)]
    zeros, unread = gradients(lambda x, *weights: live_linear(x, with_buffers(weights, None), LIVE), leaves)
    wanted, _ = gradients(lambda x, *weights: [F.linear(x, w.flatten(0, -2)).unflatten(1, w.shape[:-1]) for w in weights], leaves)
    for ours, poisoned, want in zip(zeros, unread, wanted, strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-12, atol=1e-12)
        assert torch.equal(ours, poisoned)


@DEVICES
@pytest.mark.parametrize("live", [LIVE, None])
def test_gradients_go_to_their_buffers(live, device):
    """Of two uses in each backward, at once, over two backwards, the first of which finds what the step before has left."""
    told, dtype = [], torch.bfloat16
    x, *weights = (draw(*shape, seed=n).to(device, dtype).requires_grad_() for n, shape in enumerate([(ROWS, DEPTH), *SHAPES]))
    dys = [draw(*(ROWS, *weight.shape[:-1]), seed=8 + n).to(device, dtype) for n, weight in enumerate(weights)]
    factors = (1.0, 0.5)  # of the uses

    def loss(function):
        return sum((y[:live] * dy[:live] * factor).float().sum() for factor in factors
                   for y, dy in zip(function(x), dys, strict=True))

    want = torch.autograd.grad(loss(lambda x: live_linear(x, with_buffers(weights, None), live)), [x, *weights])
    buffers = [MainGradient(torch.full(w.shape, 7.0, device=device), lambda n=n: told.append(n)) for n, w in enumerate(weights)]
    for number in (1, 2):
        x.grad = None
        loss(lambda x: live_linear(x, with_buffers(weights, buffers), live)).backward()
        if number == 1:
            for buffer in buffers:
                buffer.is_fresh.fill_(1)
            x.grad = None
            loss(lambda x: live_linear(x, weights, live)).backward()
        for buffer, right in zip(buffers, want[1:], strict=True):
            torch.testing.assert_close(buffer.total, number * right.float(), rtol=2**-6, atol=2**-6 * right.abs().max().item())
            assert buffer.squares.double().sum().item() == pytest.approx(buffer.total.double().square().sum().item(), rel=1e-6)
        assert torch.equal(x.grad, want[0]) and all(weight.grad is None for weight in weights)
    assert sorted(told) == [0] * 3 + [1] * 3


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


def without_live(value):
    """Inputs that say nothing of which rows are live."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        known = {"num_live": None, "live": None}
        return type(value)(**{f.name: known[f.name] if f.name in known else without_live(getattr(value, f.name))
                              for f in dataclasses.fields(value)})
    return {k: without_live(v) for k, v in value.items()} if isinstance(value, dict) else value


@DEVICES
@pytest.mark.parametrize("has_adapters", [False, True])
def test_kernels_skip_drafts(has_adapters, device, monkeypatch):
    """With the kernels of attention and experts, which leave rows of drafts unwritten in the backward: the same gradients."""
    need_kernels(device)
    place = torch.device(device)
    config = dataclasses.replace(CONFIG, num_layers=2, layer_types=("sliding", "full"))
    if device == "cpu":
        monkeypatch.setattr(core_attention, "takes_attention", lambda *x: True)
        monkeypatch.setattr(linear, "_num_live", lambda x, tp, draws: draws and draws.num_live)
    objective = ObjectiveConfig(self_conditioning_prob=1.0)
    inputs = to_device(toy_inputs(toy_plan(objective, ((5, 6), (3, 8)), config=config), objective=objective, config=config,
                                  dtype=torch.float32), place)
    model = toy_model(torch.bfloat16, config=config, context=ParallelContext.single(place))
    for block in model.layers.values():
        block.moe.experts.by_kernels = True
    if has_adapters:
        add_adapters(model, LoRAConfig(lora_rank=4, lora_targets=("attention", "mlp")), Initializer(3, 0.1))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("adapter.b"):
                    parameter.fill_(0.05)
    trained, found = [p for p in model.parameters() if p.requires_grad], []
    known = inputs.first_pass
    assert known.draws.num_live == known.routed.num_live == known.num_clean and known.layers["full"].attention.tiles.live is not None
    for given in (inputs, without_live(inputs)):
        loss = model(given).total
        found.append((loss.item(), torch.autograd.grad(loss, trained)))
        model.routing.drain()
    assert found[0][0] == found[1][0]
    for ours, want in zip(found[0][1], found[1][1], strict=True):
        assert ours.isfinite().all() and (ours.float() - want.float()).norm() <= 2**-6 * want.float().norm() + 1e-7
