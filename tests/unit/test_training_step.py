"""training.step: an update that is launched before the host has seen loss and norm is the one that waits for them, or none."""
import dataclasses

import pytest
import torch

from megatron_dllm.config import MoEConfig, OptimizerConfig
from megatron_dllm.kernels.copies import HostCopy
from megatron_dllm.training.algorithms import by_kernel
from megatron_dllm.training.optimizer import MasterOptimizer
from megatron_dllm.training.step import train_step
from tests.unit.kernel_cases import DEVICES, need_kernels
from tests.unit.toy import CONFIG, toy_inputs, toy_model, toy_plan


def make(*, ahead, moe=MoEConfig()):  # noqa: B008 (immutable)
    model = toy_model(torch.bfloat16, config=dataclasses.replace(CONFIG, num_layers=1, layer_types=("full",)), moe=moe)
    algorithm = dataclasses.replace(by_kernel, skips=ahead)
    return model, MasterOptimizer(model, OptimizerConfig(lr=1e-2, clip_grad=0.1), model.context, algorithm=algorithm)


def state(model, optimizer):
    return [*model.parameters(), *(moment for _, _, moment in optimizer.states())]


def test_steps_ahead_are_those_that_wait():
    need_kernels("cpu")
    inputs = toy_inputs(toy_plan(), dtype=torch.float32)
    (early, early_optimizer), (late, late_optimizer) = (make(ahead=ahead) for ahead in (True, False))
    for number in range(3):
        results = [train_step(*pair, [inputs], 1e-2) for pair in ((early, early_optimizer), (late, late_optimizer))]
        assert results[0].is_finite and (results[0].loss, results[0].grad_norm) == (results[1].loss, results[1].grad_norm)
        assert early_optimizer.num_steps == number + 1
    ours, theirs = state(early, early_optimizer), state(late, late_optimizer)
    assert len(ours) == len(theirs) and all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))

    before = [x.detach().clone() for x in ours]
    scale = early.final_norm.weight.data[:1].clone()
    early.final_norm.weight.data[:1] = torch.inf
    refused = train_step(early, early_optimizer, [inputs], 1e-2)
    assert not refused.is_finite and early_optimizer.num_steps == 3
    early.final_norm.weight.data[:1] = scale
    assert all(torch.equal(*pair) for pair in zip(state(early, early_optimizer), before, strict=True))
    again, want = (train_step(*pair, [inputs], 1e-2) for pair in ((early, early_optimizer), (late, late_optimizer)))
    assert (again.loss, again.grad_norm) == (want.loss, want.grad_norm)


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_numbers_come_as_they_are(dtype, device):
    numbers = [torch.tensor(value, dtype=dtype, device=device) for value in (1 / 3, float("inf"))]
    copies = HostCopy(*numbers).wait()
    assert [copy.item() for copy in copies] == [number.item() for number in numbers]
    assert all(copy.dtype == dtype and copy.device.type == "cpu" for copy in copies)


@pytest.mark.parametrize("ahead", [False, True], ids=["waits", "ahead"])
def test_a_skipped_step_leaves_the_bias_of_experts(ahead):
    need_kernels("cpu")
    model, optimizer = make(ahead=ahead, moe=MoEConfig(moe_router_enable_expert_bias=True))
    inputs, bias = toy_inputs(toy_plan(), dtype=torch.float32), model.layers["0"].moe.router.bias
    train_step(model, optimizer, [inputs], 1e-2)
    before = bias.value.clone()
    assert before.any()
    model.final_norm.weight.data[:1] = torch.inf
    assert not train_step(model, optimizer, [inputs], 1e-2).is_finite
    assert torch.equal(bias.value, before) and bias.load is None
