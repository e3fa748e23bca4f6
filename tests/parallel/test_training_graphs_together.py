"""training.graphs over two ranks that share experts: both call, record or replay each microbatch; held to ordinary steps, bit for bit."""

import dataclasses

import pytest
import torch

from megatron_dllm.config import MoEConfig, ObjectiveConfig, OptimizerConfig
from megatron_dllm.diffusion.nested import tensors_of
from megatron_dllm.models.diffusion_gemma.model import DiffusionGemma
from megatron_dllm.moe.dispatchers.interface import LAYOUT_EXCHANGE
from megatron_dllm.parallel import Topology, create_context
from megatron_dllm.tensor_parallel import Initializer
from megatron_dllm.training.graphs import GraphedMicrobatches, forward_backward_of, note
from megatron_dllm.training.optimizer import MasterOptimizer
from megatron_dllm.training.step import train_step
from megatron_dllm.transformer.recompute import Recompute
from tests.unit.test_training_graphs import Rerun, reshuffled
from tests.unit.toy import CONFIG, LENGTHS, toy_inputs, toy_plan

ALWAYS = ObjectiveConfig(self_conditioning_prob=1.0)
# How many rows each rank's microbatches have, step by step: a form that one rank has seen comes beside one that the other has not.
ROWS = (((1, 1), (1, 1)), ((1, 2), (1, 1)), ((2, 1), (1, 2)), ((2, 2), (1, 1)))


def steps(rank):
    """Of each step: what the two microbatches were (e, r, p: an ordinary call, recorded and replayed, replayed), whether everything is the
    same as without graphs, and the layout exchanges of both ways."""
    context = create_context(Topology(world=2, ep=2), rank=rank, device=torch.device("cpu"), sequence_parallel=False)

    def built():
        model = DiffusionGemma(CONFIG, context=context, init=Initializer(5, 0.15), dtype=torch.float32, recompute=Recompute({"block"}),
                               moe=MoEConfig(moe_max_tokens_per_rank=150))  # fmt: skip
        return model, MasterOptimizer(model, OptimizerConfig(lr=1e-2), context, distributed=True)

    (plain, plain_optimizer), (model, optimizer) = built(), built()
    recorder = Rerun()
    recorder.untouched = tuple(bucket.gradients for bucket in optimizer.buckets.buckets)
    graphs = GraphedMicrobatches(forward_backward_of(model), lambda notes: note(model, notes), recorder, device=context.device, limit=8,
                                 peers=(context.ep, context.etp))
    found, seed = [], 100 * rank
    for of_step in ROWS:
        batch = []
        for rows in (both[rank] for both in of_step):
            inputs = toy_inputs(toy_plan(ALWAYS, LENGTHS[3:3 + rows]), objective=ALWAYS, dtype=torch.float32)
            batch.append(reshuffled(inputs, seed := seed + 1))
        context.log.clear()
        expected = train_step(plain, plain_optimizer, batch, 1e-2)
        exchanges = [context.log.drain().calls[LAYOUT_EXCHANGE, "ep"]]
        before = dataclasses.replace(graphs._counts)
        got = train_step(model, optimizer, batch, 1e-2, graphs=graphs)
        exchanges.append(context.log.drain().calls[LAYOUT_EXCHANGE, "ep"])
        counts = graphs._counts
        same = (got.loss, got.grad_norm, got.replay) == (expected.loss, expected.grad_norm, expected.replay) and all(
            torch.equal(a, b) for a, b in zip(tensors_of(got.terms), tensors_of(expected.terms), strict=True))
        found.append((counts.eager - before.eager, counts.recorded - before.recorded, counts.replayed - before.replayed, same, exchanges))
    same = all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    return found, same


@pytest.mark.slow
def test_ranks_record_and_replay_together(world):
    first, second = world.run(steps, size=2, timeout=120)
    assert first == second
    found, same = first
    assert same
    # (eager, recorded, replayed): a new pair of forms in each step, in the last one of two that each rank has seen; two come again.
    assert [step[:3] for step in found] == [(1, 1, 1), (1, 0, 1), (1, 1, 1), (1, 0, 1)]
    # Three layers, two passes, two microbatches; recomputes follow the record.
    assert all(is_same and exchanges == [12, 12] for *_, is_same, exchanges in found)
