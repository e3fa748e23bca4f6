"""The model over pipelines against one process (float64): losses, every gradient, the norm, and evaluation."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from megatron_dllm.models.diffusion_gemma.stages import ModelPipeline, no_terms, over_stages
from megatron_dllm.parallel import ParallelContext, Topology, create_context
from tests.parallel.pipeline_cases import ALL, NONE, PipelineCase, compare, forget_the_tie

TOLERANCE = 1e-10


def sizes(**sizes):
    return tuple(sizes.items())


PP2 = sizes(world=2, pp=2)
CASES = {
    "one rank, three chunks": PipelineCase(sizes(world=1), "Et|t|tL"),
    "pp2, some": PipelineCase(PP2, "Et|ttL"),
    "pp2, all": PipelineCase(PP2, "Ett|tL", (ALL,)),
    "pp2, none": PipelineCase(PP2, "Et|ttL", (NONE,)),
    "pp2 vpp2, recompute": PipelineCase(PP2, "E|t|t|tL", recompute=frozenset({"block"})),
    "pp2 vpp3 with an empty stage, mhc": PipelineCase(PP2, "Et|t||t||L", mhc=True),
    "pp2 with a gated-delta layer": PipelineCase(PP2, "Eg|ttL", linear=True),
    "pp2 with multi-token prediction": PipelineCase(PP2, "Et|ttmL", mtp=1),
    "pp4": PipelineCase(sizes(world=4, pp=4), "E|t|tt|L"),
    "pp2 dp2, distributed optimizer": PipelineCase(sizes(world=4, pp=2), "Et|ttL", ("1100", "A000"), distributed_optimizer=True),
    "tp2 sp pp2": PipelineCase(sizes(world=4, pp=2, tp=2), "Et|ttL", sequence_parallel=True),
    "tp2 sp pp2, one form": PipelineCase(sizes(world=4, pp=2, tp=2), "Et|ttL", ("10A0",), sequence_parallel=True, one_form=True),
    "cp2 pp2": PipelineCase(sizes(world=4, pp=2, cp=2), "Et|ttL"),
    "one rank, three chunks, joint": PipelineCase(sizes(world=1), "Et|t|tL", joint=True),
    "pp2, joint": PipelineCase(PP2, "Et|ttL", joint=True),
    "pp2, all joint, embedding and loss alone": PipelineCase(PP2, "E|ttt||L", (ALL,), joint=True),
    "pp2 vpp3 with an empty stage, mhc, joint": PipelineCase(PP2, "Et|t||t||L", mhc=True, joint=True),
    "pp2 with multi-token prediction, joint": PipelineCase(PP2, "Et|ttmL", mtp=1, joint=True),
    "pp2 dp2, joint": PipelineCase(sizes(world=4, pp=2), "Et|ttL", ("1100", "A000"), distributed_optimizer=True, joint=True),
    "pp2, one form, joint": PipelineCase(PP2, "Et|ttL", ("10A0",), one_form=True, joint=True),
    "ep2 pp2": PipelineCase(sizes(world=4, pp=2, ep=2), "Et|ttL", ("100", "010")),
}


SLOW = ("pp2, all joint, embedding and loss alone", "pp2 vpp3 with an empty stage, mhc, joint", "pp2 dp2, joint")
FULL = ("one rank, three chunks, joint", "pp2 with multi-token prediction, joint", "pp2, one form, joint")  # left to the longest run
MARKS = dict.fromkeys(SLOW, pytest.mark.slow) | dict.fromkeys(FULL, pytest.mark.full)


@pytest.mark.parametrize("case", [pytest.param(case, id=name, marks=MARKS.get(name, ())) for name, case in CASES.items()])
def test_model_pipeline(world, case):
    for rank, found in enumerate(world.run(compare, case, size=case.topology.world)):
        assert found.difference <= TOLERANCE, f"rank {rank}: {found}"
        assert max(found.loss, found.norm, found.evaluation) <= TOLERANCE, f"rank {rank}: {found}"
        assert found.gradients > 0 and (found.messages > 0) == (case.topology.pp > 1)


def test_tied_embeddings_are_summed(world):
    found = world.run(compare, PipelineCase(PP2, "Et|ttL"), forget_the_tie, size=2)
    assert all(rank.worst == "embedding.weight" and rank.difference > 1e-3 for rank in found), found


def metrics_of(rank):
    context = create_context(Topology(world=2, pp=2), rank=rank, device=torch.device("cpu"), sequence_parallel=False)
    own = {"router_z_loss": 1.0}, {"router_z_loss": 2.0, "routing/layers.1/clean/entropy": 1.5}
    return over_stages(own[rank], context.pp)


def test_metrics_of_all_stages_come_together(world):
    for found in world.run(metrics_of, size=2):
        assert found == {"router_z_loss": 3.0, "routing/layers.1/clean/entropy": 1.5}


def lose_the_signal(model, context):
    """As if nothing of the backward reached the soft embedding."""
    whole = model.of_all_canvases
    model.of_all_canvases = lambda signal, *given: whole(signal.detach(), *given)


def test_one_backward_reaches_the_soft_embedding(world):
    found = world.run(compare, PipelineCase(PP2, "Et|ttL", (ALL,), joint=True), lose_the_signal, size=2)
    assert all(rank.worst == "embedding.weight" and rank.difference > 1e-6 and rank.loss <= TOLERANCE for rank in found), found


@pytest.mark.parametrize("count", [1, 2, 3])
def test_what_fills_up_an_evaluation_counts_for_nothing(count):
    """A schedule of several chunks wants as many microbatches as there are ranks, here 3; of which each loses its number plus 1."""
    context, seen = ParallelContext.single(), []

    def run(schedule, inputs, shapes):
        seen.append(len(inputs))
        return [(number, 0, dataclasses.replace(no_terms(context), total=torch.tensor(number + 1.0))) for number in range(len(inputs))]

    stand_in = SimpleNamespace(
        context=SimpleNamespace(device=context.device, pp=SimpleNamespace(size=3)), layout=SimpleNamespace(chunks=2),
        schedule=lambda *given: None, executor=SimpleNamespace(run=run), _shapes=lambda inputs: None)
    total = ModelPipeline._run(stand_in, [SimpleNamespace(second_pass=None, joint=None)] * count, forward_only=True).total
    assert total == sum(range(count + 1)) and seen == [3]
