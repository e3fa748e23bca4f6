"""Weights that go with the rows to the experts' kernels, against weights that are applied to what comes back."""
import pytest
import torch

from megatron_dllm.config import PRESETS, MoEConfig
from megatron_dllm.moe.balance import CLEAN, DRAFT, BalanceLosses, RoutedTokens, RoutingMonitor
from megatron_dllm.moe.dispatchers.alltoall import AllToAllDispatcher
from megatron_dllm.moe.experts import Experts
from megatron_dllm.moe.layer import MoELayer
from megatron_dllm.parallel import ParallelContext
from megatron_dllm.tensor_parallel.initialization import Initializer
from tests.unit.kernel_cases import DEVICES, need_kernels


def layer_of(context, is_frozen):
    layer = MoELayer("layer", PRESETS["toy"], context=context, init=Initializer(1, 0.2), dtype=torch.bfloat16,
                     losses=BalanceLosses(MoEConfig(moe_aux_loss_coeff=0.1), context, PRESETS["toy"].num_experts), monitor=RoutingMonitor(),
                     dispatcher=AllToAllDispatcher(context, PRESETS["toy"].num_experts))
    layer.experts.by_kernels = True
    layer.experts.requires_grad_(not is_frozen)
    return layer


@DEVICES
@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_layer_gives_the_same_either_way(device, is_frozen, monkeypatch):
    need_kernels(device)
    context = ParallelContext.single(torch.device(device))
    layer = layer_of(context, is_frozen)
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


@DEVICES
@pytest.mark.parametrize("is_frozen", [False, True])
def test_rows_without_gradient_are_left_out(device, is_frozen, monkeypatch):
    """The same gradients, although what is not computed is not a number."""
    need_kernels(device)
    layer, num_live, hidden = layer_of(ParallelContext.single(torch.device(device)), is_frozen), 12, PRESETS["toy"].hidden_size
    draw = torch.Generator().manual_seed(0)
    x, residual, dy = (torch.randn(19, hidden, generator=draw).to(device, torch.bfloat16) for _ in range(3))
    dy[num_live:] = 0
    stream = torch.where(torch.arange(19) < num_live, CLEAN, DRAFT).to(device)
    # As fast algorithms leave memory: whatever was there.
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: filled(empty(*a, **k)))

    def filled(t):
        return t.fill_(float("nan")) if t.is_floating_point() else t

    def results(known):
        inputs = [t.detach().requires_grad_() for t in (x, residual)]
        trained = [p for p in layer.parameters() if p.requires_grad]
        y = layer(*inputs, tokens=RoutedTokens.of(stream, num_live, torch.float32, known))
        layer.monitor.drain()
        return y.detach(), *torch.autograd.grad(y, [*inputs, *trained], dy)

    for got, want in zip(results(num_live), results(None), strict=True):
        assert torch.equal(got, want)
