"""pipeline.clock: what it expects of a schedule, and what it sees of an executor."""

import pytest
import torch

from megatron_dllm.parallel import ParallelContext
from megatron_dllm.pipeline import EdgeShapes, Pipeline, build_schedule
from megatron_dllm.pipeline.actions import Action, Kind
from megatron_dllm.pipeline.clock import ActionClock, expected_bubble, stage_times
from megatron_dllm.pipeline.executor import PipelineExecutor
from megatron_dllm.pipeline.p2p import PointToPoint
from tests.parallel.affine import AffineCase, AffineStage, microbatches


def times(ranks, *, forward, backward):
    return {(kind, 0, stage): seconds for stage in range(ranks) for kind, seconds in ((Kind.FORWARD, forward), (Kind.BACKWARD, backward))}


@pytest.mark.parametrize("ranks,microbatches", [(2, 4), (4, 8)])
def test_expected_bubble_is_the_closed_form_of_1f1b(ranks, microbatches):
    schedule = build_schedule(Pipeline(ranks, 1, (False,) * microbatches))
    bubble, seconds = expected_bubble(schedule, times(ranks, forward=0.01, backward=0.02))
    assert bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1), abs=1e-9)
    assert seconds == pytest.approx((microbatches + ranks - 1) * 0.03)


def test_clock_times_the_compute_steps_alone():
    case = AffineCase(1, 2, 6, 2, (True, False))
    context = ParallelContext.single()
    clock = ActionClock(torch.device("cpu"))
    stages = [AffineStage(case, stage) for stage in range(2)]
    executor = PipelineExecutor(stages, PointToPoint(context.pp, True), context.device, clock=clock)
    schedule = build_schedule(Pipeline(1, 2, case.coins))
    tokens = tuple((case.rows(m, 0), case.rows(m, 1)) for m in range(2))
    executor.run(schedule, microbatches(case, 0, context.device), EdgeShapes(case.hidden, tokens, case.streams, "float64"))
    taken = clock.drain()
    wanted = {kind: sum(action.kind == kind for action in schedule.lists[0]) for kind in (Kind.FORWARD, Kind.BACKWARD)}
    assert {kind: sum(action.kind == kind for action, _ in taken) for kind in wanted} == wanted and all(t > 0 for _, t in taken)
    assert clock.drain() == []
    assert set(stage_times(schedule, 0, taken)) == {
        (kind, loop, stage) for kind in wanted for loop in (0, 1) for stage in (0, 1)} | {(Kind.EMBEDDING_GRADIENT, 0, 1)}


def test_stage_times_are_means():
    schedule = build_schedule(Pipeline(2, 1, (False, False)))
    taken = [(Action(Kind.FORWARD, 0, 0), 1.0), (Action(Kind.FORWARD, 1, 0), 3.0)]
    assert stage_times(schedule, 1, taken) == {(Kind.FORWARD, 0, 1): 2.0}
