"""Balance losses over ranks: the gradients of one process with all the tokens, whatever the ranks share."""

import pytest
import torch

from megatron_dllm.config import MoEConfig
from megatron_dllm.moe.balance import BalanceLosses, ExpertBias, RoutedTokens, RoutingMonitor, balance_metrics
from megatron_dllm.moe.dispatchers.build import build_dispatcher
from megatron_dllm.moe.layer import MoELayer
from megatron_dllm.parallel import ParallelContext, Topology, communication, create_context
from megatron_dllm.tensor_parallel import Initializer
from tests.parallel.test_moe_dispatchers import CONFIG, DTYPE, Case, inputs

MOE = MoEConfig(moe_aux_loss_coeff=0.3, moe_z_loss_coeff=0.2)


def results(context, x, stream, num_counted):
    """(router gradients, metrics) of a layer."""
    monitor = RoutingMonitor()
    layer = MoELayer(
        "layers.0", CONFIG, context=context, init=Initializer(7, 0.5), dtype=DTYPE,
        dispatcher=build_dispatcher(MOE, context, CONFIG, DTYPE), losses=BalanceLosses(MOE, context, CONFIG.num_experts), monitor=monitor)
    layer(x, x, tokens=RoutedTokens.of(stream, num_counted, DTYPE)).sum().backward()
    return [p.grad for p in layer.router.parameters()], balance_metrics(monitor.drain(), context)


def differences(rank, sizes, lengths):
    """Largest difference of router gradients and of metrics to one process."""
    context = create_context(Topology(**sizes), rank=rank, device=torch.device("cpu"), sequence_parallel=sizes.get("tp", 1) > 1)
    everyone = [x for x, _, _ in inputs(Case(lengths))]
    streams = [torch.arange(n) % 3 for n in lengths]
    num_counted = sum(int((stream != 1).sum()) for stream in streams)
    own, metrics = results(context, everyone[rank], streams[rank], num_counted)
    whole, expected = results(ParallelContext.single(), torch.cat(everyone), torch.cat(streams), num_counted)
    summed = [communication.all_reduce(gradient, context.world) for gradient in own]
    assert metrics.keys() == expected.keys() and "load_balancing_loss" in metrics
    return (max((a - b).abs().max().item() for a, b in zip(summed, whole, strict=True)),
            max(abs(metrics[name] - expected[name]) for name in metrics))


@pytest.mark.parametrize(
    "sizes, lengths",
    [({"world": 2}, (5, 8)), ({"world": 2, "ep": 2}, (9, 4)), ({"world": 2, "tp": 2, "ep": 2}, (7, 7)), ({"world": 2, "cp": 2}, (0, 6)),
     ({"world": 2, "cp": 2}, (4, 6))],
    ids=["dp2", "ep2", "tp2 sp, ep2", "cp2, a rank without tokens", "cp2"])
def test_losses_and_metrics(world, sizes, lengths):
    for gradients, metrics in world.run(differences, sizes, lengths, size=2):
        assert gradients <= 1e-12 and metrics <= 1e-12


def bias_of(rank, sizes):
    """A bias after a step in which rank 0 chose expert 0 alone, and rank 1 twice as often expert 1."""
    context = create_context(Topology(**sizes), rank=rank, device=torch.device("cpu"), sequence_parallel=sizes.get("tp", 1) > 1)
    bias, count = ExpertBias(3, 0.25, DTYPE, context), 2 * (rank + 1)
    bias.note(torch.full((count, 1), rank), RoutedTokens.of(torch.zeros(count, dtype=torch.int64), 6, DTYPE))
    bias.end_step(context, update=True)
    return bias.value.tolist()


@pytest.mark.parametrize("sizes", [{"world": 2}, {"world": 2, "tp": 2}, {"world": 2, "cp": 2}], ids=["dp2", "tp2 sp", "cp2"])
def test_a_bias_follows_the_load_of_all_ranks(world, sizes):
    """Loads 2, 4 and 0 of a mean of 2."""
    assert world.run(bias_of, sizes, size=2) == [[0.0, -0.25, 0.25]] * 2
