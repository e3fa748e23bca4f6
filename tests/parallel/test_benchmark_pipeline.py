"""The pipeline suite of tools/benchmark.py on two gloo ranks: what it compares holds, and every planted fault is found."""

import argparse
import contextlib
import sys
from pathlib import Path

import pytest
import torch

from megatron_dllm.config import ObjectiveConfig
from megatron_dllm.parallel import ParallelContext, Topology, create_context
from megatron_dllm.pipeline import parse_layout
from megatron_dllm.training.optimizer import MasterOptimizer

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from benchmarking import pipeline, pipeline_runs  # noqa: E402

CASE = pipeline_runs.Case(layers=2, streams=1, steps=3)  # two later steps: the distance of one loss may be small by chance
FIRST_LOSS, FIRST_NORM, FIRST_CHANGE = "loss of the first step", "norm of the first step", "change of a layer by the first update"


def other_coin(patch):
    """The first microbatch's canvas is self-conditioned in one of the two runs alone."""
    inputs = pipeline_runs.Suite.inputs

    def swapped(suite, config, step, context):
        made = inputs(suite, config, step, context)
        if context.pp.size == 1:
            return made
        with pytest.MonkeyPatch.context() as drawn:
            probability = float(made[0].second_pass is None)
            drawn.setattr(pipeline_runs, "ObjectiveConfig", lambda: ObjectiveConfig(self_conditioning_prob=probability))
            return [inputs(suite, config, step, context)[0], *made[1:]]

    patch.setattr(pipeline_runs.Suite, "inputs", swapped)


def stale_stage(patch):
    """The last rank computes on with its first weights."""
    refresh = MasterOptimizer.refresh_parameters
    patch.setattr(MasterOptimizer, "refresh_parameters", lambda self: None if self.context.pp.rank == 1 else refresh(self))


def dropped_gradient(patch):
    """The first rank's layer gets no gradient."""
    finish = MasterOptimizer.finish_gradients

    def without(self):
        for name, parameter in self.parameters.items() if self.context.pp.size > 1 else ():
            if name.startswith("layers.0"):
                (parameter.grad if parameter.grad is not None else parameter.main_gradient.total).zero_()
        finish(self)

    patch.setattr(MasterOptimizer, "finish_gradients", without)


FAULTS = {other_coin: FIRST_LOSS, dropped_gradient: FIRST_NORM, stale_stage: FIRST_CHANGE}


def missed_figures(rank, faults):
    """The figures that do not hold, with each of the faults."""
    context = create_context(Topology(world=2, pp=2), rank=rank, device=torch.device("cpu"), sequence_parallel=False)
    # Of 32 tokens a row one choice of a router moves a norm further than three roundings happened to.
    arguments = argparse.Namespace(width="toy", microbatches=2, seq_length=48)
    suite, found = pipeline_runs.Suite(arguments, context, ParallelContext.single(context.device)), []
    reference, variants = pipeline.in_one_process(suite, CASE)
    limits = pipeline.allowed(variants[:-1], reference, arguments.microbatches * arguments.seq_length)
    for fault in faults:
        with pytest.MonkeyPatch.context() as patch:
            (fault or contextlib.nullcontext)(patch)
            outcome, _ = pipeline_runs.pipelined(suite, CASE, parse_layout("Et|tL", ranks=2, layers="tt"))
        assert outcome.freed
        changes = pipeline_runs.gathered(outcome.changes, context)
        found.append([figure.name for figure in pipeline.compared("", outcome, reference, changes, limits) if not figure.holds])
    fault = variants[-1]
    return found, [limit < far for limit, far in zip(limits, pipeline.farthest([fault.changes], fault, reference), strict=True)]


@pytest.mark.slow
def test_faults_are_found(world):
    (plain, *faulty), beyond = world.run(missed_figures, [None, *FAULTS], size=2, timeout=240)[0]
    assert plain == [] and beyond[:2] == [True, True]
    for missed, figure in zip(faulty, FAULTS.values(), strict=True):
        assert f": {figure}" in missed
