"""--optimizer-backend: every backend steps as torch's AdamW, counts on from a checkpoint's steps, and a missing package is named."""
import sys
import types
from dataclasses import replace

import pytest
import torch

from megatron_dllm.config import OptimizerConfig
from megatron_dllm.parallel import ParallelContext
from megatron_dllm.training.algorithms import BACKENDS, PACKAGES
from megatron_dllm.training.optimizer import MasterOptimizer
from tests.unit.test_gradient_buckets import SHAPES, Parameters

CONTEXT = ParallelContext.single()


class FusedAdam(torch.optim.Optimizer):
    """As both packages': the moments in each parameter's state, the number of steps in its group. Written from Adam's formulas."""

    def __init__(self, params, lr, betas, eps, adam_w_mode, bias_correction):
        assert adam_w_mode and bias_correction
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            (first, second), lr = group["betas"], group["lr"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                mean, square = state["exp_avg"], state["exp_avg_sq"]
                mean.mul_(first).add_(p.grad, alpha=1 - first)
                square.mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
                p.mul_(1 - lr * group["weight_decay"])
                size = (square / (1 - second ** group["step"])).sqrt_().add_(group["eps"])
                p.sub_(lr * mean / (1 - first ** group["step"]) / size)


@pytest.fixture
def packages(monkeypatch):
    """Both packages, as far as the optimizer looks into them."""
    for path in PACKAGES.values():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
        sys.modules[path].FusedAdam = FusedAdam


def make(backend):
    model = Parameters(half=("embedding", "head"), dtype=torch.float32)
    config = OptimizerConfig(optimizer_backend=backend, lr=0.1, weight_decay=0.3, clip_grad=0.5)
    return model, MasterOptimizer(model, config, CONTEXT, bucket_elements=12)


def train(model, optimizer, steps):
    for factor in steps:
        optimizer.buckets.last_microbatch()
        model.backward(factor=factor)
        optimizer.finish_gradients()
        optimizer.step(0.1, optimizer.grad_norm())


def hand_over(first, second):
    """Masters and moments after two steps, as a checkpoint would take them from one optimizer to the other."""
    second.make_moments(2)
    for source, target in zip(first.shards(), second.shards(), strict=True):
        assert source.key == target.key
        for read, written in zip(source.rectangles.values(), target.rectangles.values(), strict=True):
            written.tensor.copy_(read.tensor)
    second.refresh_parameters()


def values(optimizer):
    whole = {name: master.clone() for name, master in optimizer.masters()}
    return whole | {f"{state}/{name}": moment.clone() for name, state, moment in optimizer.states()}


@pytest.mark.parametrize("backend", PACKAGES)
def test_backends_step_as_torch(packages, backend):
    results = []
    for name in ("torch", backend):
        model, optimizer = make(name)
        train(model, optimizer, (1.0, 0.5, 2.0))
        results.append(values(optimizer))
        for parameter, master in zip(model.parameters(), (results[-1][name] for name in SHAPES), strict=True):
            assert torch.equal(parameter.detach(), master.to(parameter.dtype))
    theirs, ours = results
    assert theirs.keys() == ours.keys() and len(ours) == 3 * len(SHAPES)
    for name, value in theirs.items():
        assert torch.allclose(ours[name], value, rtol=1e-6, atol=1e-7), name


@pytest.mark.parametrize("before", BACKENDS)
@pytest.mark.parametrize("after", BACKENDS)
def test_a_run_goes_on_under_another_backend(packages, before, after):
    model, optimizer = make("torch")
    train(model, optimizer, (1.0, 0.5, 2.0))
    expected = values(optimizer)
    interrupted, first = make(before)
    train(interrupted, first, (1.0, 0.5))
    model, second = make(after)
    hand_over(first, second)
    train(model, second, (2.0,))
    for name, value in values(second).items():
        assert torch.allclose(value, expected[name], rtol=1e-6, atol=1e-7), name


def test_fp32_gradients_are_clipped_within_the_update(monkeypatch):
    results = []
    for divides in (True, False):
        model, optimizer = make("torch")
        optimizer.algorithm = replace(optimizer.algorithm, divides=divides)
        scaled = []
        once = optimizer.buckets.scale
        monkeypatch.setattr(optimizer.buckets, "scale", lambda factor, once=once, seen=scaled: (seen.append(factor), once(factor)))
        train(model, optimizer, (1.0, 0.5, 2.0))
        assert len(scaled) == (0 if divides else 3)
        results.append(values(optimizer))
    for name, value in results[1].items():
        assert torch.allclose(results[0][name], value, rtol=1e-6, atol=1e-8), name
    _, whole = make("torch")
    assert any(not torch.allclose(results[0][name], master, rtol=1e-3) for name, master in whole.masters())


@pytest.mark.parametrize("backend", PACKAGES)
def test_a_missing_package_is_named_with_what_to_do(backend, monkeypatch):
    monkeypatch.setitem(sys.modules, PACKAGES[backend], None)  # an import of it fails
    with pytest.raises(ValueError, match=rf"--optimizer-backend {backend} needs {PACKAGES[backend]} .*install_gpu.sh --{backend}, or set"):
        make(backend)
    make("torch")
