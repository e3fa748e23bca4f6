"""Weights that go with the rows to the experts' kernels, against weights that are applied to what comes back."""
import pytest
import torch

from megatron_dllm.config import PRESETS
from megatron_dllm.moe.dispatchers.alltoall import AllToAllDispatcher
from megatron_dllm.moe.experts import Experts
from megatron_dllm.moe.layer import MoELayer
from megatron_dllm.parallel import ParallelContext
from megatron_dllm.tensor_parallel.initialization import Initializer
from tests.unit.kernel_cases import DEVICES, need_kernels


@DEVICES
@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_layer_gives_the_same_either_way(device, is_frozen, monkeypatch):
    need_kernels(device)
    context = ParallelContext.single(torch.device(device))
    layer = MoELayer("layer", PRESETS["toy"], context=context, init=Initializer(1, 0.2), dtype=torch.bfloat16,
                     dispatcher=AllToAllDispatcher(context, PRESETS["toy"].num_experts))
    layer.experts.by_kernels = True
    layer.experts.requires_grad_(not is_frozen)
    draw = torch.Generator().manual_seed(0)
    x, residual, dy = (torch.randn(19, PRESETS["toy"].hidden_size, generator=draw).to(device, torch.bfloat16) for _ in range(3))

    def results():
        inputs = [t.detach().requires_grad_() for t in (x, residual)]
        trained = [p for p in layer.parameters() if p.requires_grad]
        y = layer(*inputs)
        return y.detach(), *torch.autograd.grad(y, [*inputs, *trained], dy)

    assert layer.experts.takes_weights
    ours = results()
    monkeypatch.setattr(Experts, "takes_weights", False)
    for got, want in zip(ours, results(), strict=True):
        assert got.dtype == want.dtype and (got.float() - want.float()).norm() <= 2**-6 * want.float().norm()
