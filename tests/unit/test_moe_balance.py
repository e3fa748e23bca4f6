"""Balance losses by hand, what they leave out, and the figures of each stream."""

import dataclasses

import pytest
import torch

from megatron_dllm.config import PRESETS, MoEConfig
from megatron_dllm.moe import balance
from megatron_dllm.moe import router as router_module
from megatron_dllm.moe.balance import CANVAS, CLEAN, DRAFT, BalanceLosses, ExpertBias, RoutedTokens, RoutingMonitor, balance_metrics
from megatron_dllm.moe.dispatchers.build import build_dispatcher
from megatron_dllm.moe.layer import MoELayer
from megatron_dllm.moe.permute import count_values
from megatron_dllm.moe.replay import NOT_CHECKPOINTED
from megatron_dllm.moe.router import Router
from megatron_dllm.parallel import ParallelContext
from megatron_dllm.tensor_parallel import Initializer
from megatron_dllm.transformer.recompute import Recompute
from tests.unit.kernel_cases import DEVICES, need_kernels

CONFIG = dataclasses.replace(PRESETS["toy"], hidden_size=6, moe_ffn_hidden_size=4, num_experts=5, moe_router_topk=2)
STREAM = torch.tensor([CLEAN, CLEAN, DRAFT, CANVAS, DRAFT, CANVAS, CANVAS])
SINGLE = ParallelContext.single()


def build(aux=0.0, z=0.0):
    moe = MoEConfig(moe_aux_loss_coeff=aux, moe_z_loss_coeff=z)
    monitor = RoutingMonitor()
    layer = MoELayer(
        "layers.1", CONFIG, context=SINGLE, init=Initializer(7, 0.5), dtype=torch.float64,
        dispatcher=build_dispatcher(moe, SINGLE, CONFIG, torch.float64), losses=BalanceLosses(moe, SINGLE, CONFIG.num_experts),
        monitor=monitor)
    return layer, monitor


def tokens_and_input():
    x = torch.randn(len(STREAM), 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return RoutedTokens.of(STREAM, 10, torch.float64), x  # 10: five here count, and five somewhere else


def by_hand(layer, x, aux, z):
    """Both losses, written out token by token."""
    routing = layer.router.route(x)
    counted = [t for t in range(len(x)) if STREAM[t] != DRAFT]
    chosen = [int(e) for t in counted for e in routing.indices[t]]
    load = z_loss = 0.0
    for t in counted:
        for e in range(CONFIG.num_experts):
            load = load + chosen.count(e) / len(chosen) * routing.logits[t].softmax(-1)[e] * CONFIG.num_experts / 10
        z_loss = z_loss + routing.logits[t].exp().sum().log() ** 2 / 10
    return aux * load, z * z_loss


@pytest.mark.parametrize("recompute", [(), ("moe",)], ids=["none", "recompute"])
@pytest.mark.parametrize("aux, z", [(0.3, 0.0), (0.0, 0.2), (0.3, 0.2)])
def test_losses_are_those_written_out(aux, z, recompute):
    layer, monitor = build(aux, z)
    plain, _ = build()
    tokens, x = tokens_and_input()
    y = Recompute(frozenset(recompute)).with_moe("moe", lambda call, h: layer(h, h, call, tokens), NOT_CHECKPOINTED, x.requires_grad_())
    y.sum().backward()
    expected = by_hand(plain, x, aux, z)
    (plain(x, x).sum() + sum(expected)).backward()
    for (name, parameter), other in zip(layer.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(parameter.grad, other.grad, rtol=1e-12, atol=1e-14), name
    figures = monitor.drain()["layers.1"]
    values = torch.tensor([*(torch.as_tensor(loss).item() for loss in expected), 0.5], dtype=torch.float64)
    assert torch.allclose(figures.losses, values, rtol=1e-12)
    assert figures.load.sum() == 2 * len(STREAM), "noted once, in the forward"


def test_a_frozen_router_still_passes_its_losses_on_to_what_it_reads():
    gradients = []
    for aux in (0.0, 0.3):
        layer, _ = build(aux)
        layer.router.requires_grad_(False)
        tokens, x = tokens_and_input()
        residual = x.clone().requires_grad_()
        layer(x, residual, tokens=tokens).sum().backward()
        gradients.append(residual.grad)
        wanted, _ = by_hand(layer, residual, aux, 0.0)
    of_loss, = torch.autograd.grad(wanted, residual)
    torch.testing.assert_close(gradients[1] - gradients[0], of_loss, rtol=1e-9, atol=1e-12)
    assert of_loss.any()


def test_even_use_costs_the_coefficient():
    losses = BalanceLosses(MoEConfig(moe_aux_loss_coeff=0.7), SINGLE, 4)
    indices = torch.tensor([[0, 1], [2, 3]])
    tokens = RoutedTokens.of(torch.zeros(2, dtype=torch.int64), 2, torch.float64)
    even, lopsided = torch.full((2, 4), 0.25, dtype=torch.float64), torch.tensor([[0.7, 0.3, 0, 0]] * 2, dtype=torch.float64)
    assert losses(even, even, tokens, losses.fractions(indices, tokens))[0].item() == pytest.approx(0.7)
    same = torch.tensor([[0, 1], [0, 1]])
    assert losses(even, lopsided, tokens, losses.fractions(same, tokens))[0].item() == pytest.approx(1.4)


def test_figures_of_each_stream():
    layer, monitor = build()
    tokens, x = tokens_and_input()
    routing = layer.router.route(x)
    for _ in range(2):
        layer(x.requires_grad_(), x, tokens=tokens)
    with torch.no_grad():
        layer(x, x, tokens=tokens)  # evaluation is no part of training's figures
    figures = monitor.drain()
    assert monitor.drain() == {}
    metrics = balance_metrics(figures, SINGLE)
    assert len(metrics) == 9 and "load_balancing_loss" not in metrics
    for name, stream in (("clean", CLEAN), ("draft", DRAFT), ("canvas", CANVAS)):
        mine = STREAM == stream
        load = routing.indices[mine].flatten().bincount(minlength=5).double()
        p = routing.probabilities[mine]
        assert metrics[f"routing/layers.1/{name}/max_over_mean_load"] == pytest.approx((load.max() / load.mean()).item())
        assert metrics[f"routing/layers.1/{name}/idle_experts"] == pytest.approx((load == 0).double().mean().item())
        assert metrics[f"routing/layers.1/{name}/entropy"] == pytest.approx(-(p * p.log()).sum(1).mean().item())


@pytest.mark.parametrize("is_draft", [False, True], ids=["an evaluation", "drafts made beforehand"])
def test_what_has_no_gradient_is_noted_for_drafts_alone(is_draft):
    layer, monitor = build(aux=0.3)
    layer.router.bias = ExpertBias(CONFIG.num_experts, 0.1, torch.float64, SINGLE)
    tokens, x = tokens_and_input()
    with torch.no_grad():
        layer(x, x, tokens=dataclasses.replace(tokens, is_draft=is_draft))
    assert set(monitor.drain()) == ({"layers.1"} if is_draft else set())
    assert (layer.router.bias.load is not None) == is_draft


def test_count_values():
    values = torch.tensor([[3, 0], [3, 5], [0, 3]])
    assert count_values(values, 6).tolist() == [2, 0, 0, 3, 0, 1]
    assert count_values(values[:0], 3).tolist() == [0, 0, 0]


def test_expert_bias_turns_choices_towards_idle_experts():
    bias = ExpertBias(4, 0.25, torch.float64, SINGLE)
    tokens = RoutedTokens.of(torch.tensor([CLEAN, CANVAS, DRAFT]), 2, torch.float64)
    indices = torch.tensor([[0, 1], [0, 1], [3, 2]])
    bias.note(indices[:1], tokens.map(lambda values: values[:1]))
    bias.note(indices[1:], tokens.map(lambda values: values[1:]))
    assert bias.load.tolist() == [2, 2, 0, 0]  # the draft does not count
    bias.end_step(SINGLE, update=True)
    assert bias.value.tolist() == [-0.25, -0.25, 0.25, 0.25] and bias.load is None
    bias.note(indices, tokens)
    bias.end_step(SINGLE, update=False)  # a skipped step
    bias.note(torch.tensor([[0, 1], [2, 3], [0, 0]]), tokens)
    bias.end_step(SINGLE, update=True)  # even use
    assert bias.value.tolist() == [-0.25, -0.25, 0.25, 0.25]


def test_router_chooses_by_the_bias_and_weighs_without_it():
    router = Router("r", CONFIG, context=SINGLE, init=Initializer(7, 0.5), dtype=torch.float64, bias_rate=1e-3)
    x = torch.randn(9, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    plain = router.route(x)
    router.bias.value[3] = 2.0
    routing = router.route(x)
    assert (routing.indices == 3).any(1).all() and not (plain.indices == 3).any(1).all()
    assert torch.equal(routing.probabilities, plain.probabilities)
    chosen = plain.probabilities.gather(1, routing.indices)
    assert torch.allclose(routing.weights, chosen / chosen.sum(1, keepdim=True), rtol=1e-12)
    assert "bias.value" in router.state_dict() and "bias.load" not in router.state_dict()


@DEVICES
@pytest.mark.parametrize("aux", [0.0, 0.3])
def test_what_kernels_count_is_what_torch_does(aux, device, monkeypatch):
    """Of two passes, one of them of drafts, in more layers than one page has."""
    need_kernels(device)
    place = torch.device(device)
    monkeypatch.setattr(balance, "PAGE_LAYERS", 1)
    found = []
    for by_kernel in (False, True):
        if device == "cpu" or not by_kernel:
            for name in ("takes", "has_large_shared_memory"):
                monkeypatch.setattr(router_module, name, lambda *x, by_kernel=by_kernel: by_kernel)
        monitor = RoutingMonitor()
        moe, context = MoEConfig(moe_aux_loss_coeff=aux), ParallelContext.single(place)
        layers = [MoELayer(
            f"layers.{n}", CONFIG, context=context, init=Initializer(7 + n, 0.5), dtype=torch.float32, monitor=monitor,
            dispatcher=build_dispatcher(moe, context, CONFIG, torch.float32), losses=BalanceLosses(moe, context, CONFIG.num_experts))
            for n in range(2)]
        x = torch.randn(len(STREAM), 6, generator=torch.Generator().manual_seed(2)).to(place).requires_grad_()
        tokens = RoutedTokens.of(STREAM.to(place), 10, torch.float32)
        drafts = RoutedTokens.of(torch.full_like(STREAM, DRAFT).to(place), 10, torch.float32, is_draft=True)
        for layer in layers:
            y = layer(x, x, tokens=tokens)
            with torch.no_grad():
                layer(x, x, tokens=drafts)
                layer(x, x, tokens=tokens)  # an evaluation
        figures = monitor.drain()
        assert monitor.drain() == {}
        found.append((y, *torch.autograd.grad(y.sum(), x), figures))
        monkeypatch.undo()
        monkeypatch.setattr(balance, "PAGE_LAYERS", 1)
    for ours, want in zip(found[1][:2], found[0][:2], strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-4, atol=1e-5)
    for layer, want in found[0][2].items():
        ours = found[1][2][layer]
        assert torch.equal(ours.load, want.load) and torch.equal(ours.num_tokens, want.num_tokens)
        assert torch.allclose(ours.entropy.float(), want.entropy, rtol=1e-5) and torch.allclose(ours.losses, want.losses, rtol=1e-5)
    assert list(found[1][2]) == ["layers.0", "layers.1"]


def test_passes_are_added_up_in_a_long_run(monkeypatch):
    monkeypatch.setattr(balance, "MOST_PASSES", 2)
    monitor, tokens = RoutingMonitor(), RoutedTokens.of(STREAM, 10, torch.float32)
    for _ in range(7):
        tally = monitor.tally("layers.0", tokens, 5)
        tally.load[0, 1] += 1
        monitor.note_tallied("layers.0", tokens, None)
    figures = monitor.drain()["layers.0"]
    assert figures.load[0, 1] == 7 and torch.equal(figures.num_tokens, 7 * tokens.num_tokens)
    assert torch.allclose(figures.losses, 7 * tokens.totals)


@pytest.mark.parametrize(("experts", "by_kernel"), [(128, True), (129, False)])
def test_a_router_of_more_experts_than_fit_on_chip_is_multiplied_by_torch(monkeypatch, experts, by_kernel):
    monkeypatch.setattr(router_module, "has_large_shared_memory", lambda device: True)
    config = dataclasses.replace(CONFIG, num_experts=experts)
    assert Router("r", config, context=SINGLE, init=Initializer(7, 0.5), dtype=torch.float32).multiplies_by_kernel == by_kernel
