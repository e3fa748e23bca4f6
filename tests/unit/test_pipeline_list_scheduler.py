"""Compute lists with loops: typed by hand where that is possible, else by what must hold of them."""

import random

import pytest

from megatron_dllm.pipeline.actions import format_actions, parse_action
from megatron_dllm.pipeline.assembly import compute_lists
from megatron_dllm.pipeline.graph import Pipeline
from megatron_dllm.pipeline.list_scheduler import kept_limits, list_schedule
from megatron_dllm.pipeline.memory import peak_memory
from megatron_dllm.pipeline.schedules import legal_groups
from megatron_dllm.pipeline.timing import Costs, lower_bound, time_compute


def schedule(pipeline, *, group=None, **options):
    costs = options.pop("costs", Costs.uniform(pipeline.stages))
    return list_schedule(pipeline, group=group or pipeline.ranks, costs=costs, **options)


TYPED = {  # (ranks, chunks, coins): lists that keep no more activations than the closed form does
    (1, 1, "10"): ["F0.0 F0.0' B0.0' B0.0 F1.0 B1.0 E0.0"],
    (1, 2, "1"): ["F0.0 F0.1 F0.0' F0.1' B0.1' B0.0' B0.1 B0.0 E0.1"],
    (2, 1, "1"): ["F0.0 F0.0' B0.0' B0.0", "F0.0 F0.0' B0.0' B0.0 E0.0"],
    (2, 1, "010"): ["F0.0 F1.0 B0.0 F1.0' F2.0 B1.0' B1.0 B2.0", "F0.0 B0.0 F1.0 F1.0' B1.0' B1.0 F2.0 B2.0 E1.0"],
}


@pytest.mark.parametrize("sizes", TYPED)
def test_list_schedule_with_loops(sizes):
    ranks, chunks, coins = sizes
    lists = schedule(Pipeline(ranks, chunks, tuple(coin == "1" for coin in coins)), group=1, extra_warmup=0)
    assert [format_actions(actions) for actions in lists] == TYPED[sizes]


CLOSED_FORM_SIZES = [
    (ranks, chunks, microbatches, group)
    for ranks in (1, 2, 3, 5)
    for chunks in (1, 2, 3)
    for microbatches in (1, 3, 5, 10, 11)
    for group in legal_groups(ranks=ranks, chunks=chunks, microbatches=microbatches)
]


@pytest.mark.parametrize("equal_stages", [True, False])
def test_list_schedule_without_loops_is_the_closed_form(equal_stages):
    draws = random.Random(7)
    for ranks, chunks, microbatches, group in CLOSED_FORM_SIZES:
        pipeline = Pipeline(ranks, chunks, (False,) * microbatches)
        forwards = tuple(10 if equal_stages else draws.randint(1, 30) for _ in range(pipeline.stages))
        costs = Costs.of_forwards(forwards, backward_ratio=2 if equal_stages else draws.random() * 4)
        assert schedule(pipeline, group=group, costs=costs) == compute_lists(pipeline, group=group, costs=costs), pipeline


@pytest.mark.parametrize("options", [
    dict(), dict(split_backward=True), dict(forward_only=True), dict(embedding_trained=False),
    dict(joint=(True, False, False, True, False, False)), dict(joint=(True, False, False, True, True, False), split_backward=True)])
def test_list_schedule_runs_every_step_once(options):
    pipeline = Pipeline(3, 2, (True, False, False, True, True, False), **options)
    for rank, actions in enumerate(schedule(pipeline)):
        assert len(set(actions)) == len(actions)
        assert set(actions) == set(pipeline.compute_actions(rank))


@pytest.mark.parametrize("ranks, chunks, microbatches", [(2, 1, 8), (4, 1, 16), (4, 2, 16), (8, 1, 16), (4, 3, 12), (8, 2, 16)])
@pytest.mark.parametrize("coins", ["half", "all"])
@pytest.mark.parametrize("is_joint", [False, True])
def test_list_schedule_with_loops_comes_near_the_lower_bound(ranks, chunks, microbatches, coins, is_joint):
    conditioned = tuple(coins == "all" or m % 2 == 0 for m in range(microbatches))
    pipeline = Pipeline(ranks, chunks, conditioned, joint=conditioned if is_joint else ())
    costs = Costs.uniform(pipeline.stages)
    makespan = time_compute(pipeline, schedule(pipeline), costs).makespan
    assert lower_bound(pipeline, costs) <= makespan <= 1.025 * lower_bound(pipeline, costs)


def test_a_split_backward_makes_the_bubble_smaller():
    whole, split = (Pipeline(4, 1, (True, False) * 4, split_backward=split) for split in (False, True))
    times = [time_compute(p, schedule(p), Costs.uniform(4)).makespan for p in (whole, split)]
    assert times[1] < 0.95 * times[0]


def test_list_schedule_is_the_same_every_time():
    pipeline = Pipeline(4, 2, (True, False, True, True, False, False, True, False))
    assert schedule(pipeline) == schedule(pipeline)


@pytest.mark.parametrize("ranks, chunks, group, limit", [(4, 1, 1, 1), (4, 1, 1, 3), (4, 2, 4, 5), (3, 3, 4, 9), (1, 2, 3, 4)])
@pytest.mark.parametrize("coins", ["none", "half", "all"])
def test_kept_limit_bounds_the_activations(ranks, chunks, group, limit, coins):
    pipeline = Pipeline(ranks, chunks, tuple(coins == "all" or coins == "half" and m % 2 == 1 for m in range(12)))
    lists = schedule(pipeline, group=group, kept_limit=limit)
    peaks = [peak_memory(pipeline, rank, actions) for rank, actions in enumerate(lists)]
    assert max(peak.activations for peak in peaks) == limit
    assert all(len(actions) == len(set(pipeline.compute_actions(rank))) for rank, actions in enumerate(lists))


def test_a_kept_limit_that_would_stop_the_pipeline_is_refused():
    pipeline = Pipeline(2, 3, (False,) * 4)
    with pytest.raises(ValueError, match="a limit of 4 kept activations stops .* set the limit to at least 5"):
        schedule(pipeline, group=2, kept_limit=4)
    assert max(peak_memory(pipeline, 0, actions).activations for actions in schedule(pipeline, group=2, kept_limit=5)) <= 5


def test_kept_limits():
    assert kept_limits(Pipeline(4, 1, (False,) * 8), group=1, extra_warmup=0, kept_limit=None) == [4, 3, 2, 1]
    assert kept_limits(Pipeline(4, 2, (False,) * 8), group=4, extra_warmup=1, kept_limit=None) == [12, 10, 8, 6]
    assert kept_limits(Pipeline(4, 2, (False,) * 8), group=4, extra_warmup=1, kept_limit=9) == [9, 9, 8, 6]


def test_one_backward_for_both_loops():
    """Takes the place of two: after the second forward, and with the message that the second backward had."""
    pipeline = Pipeline(2, 1, (True, False), joint=(True, False))
    lists = schedule(pipeline, group=1)
    assert [str(action) for action in lists[1]].count("B0.0") == 1 and not any("B0.0'" in map(str, actions) for actions in lists)
    for actions in lists:
        assert actions.index(parse_action("B0.0")) > actions.index(parse_action("F0.0'"))
    message, = pipeline.outputs(0, parse_action("B0.0"))
    assert (message.edge, message.destination, str(message.consumer)) == ("d", 1, "E0.0")
    peaks = [peak_memory(pipeline, rank, actions) for rank, actions in enumerate(lists)]
    assert all(peak.contexts == 1 and peak.loop_activations == 1 for peak in peaks)


@pytest.mark.parametrize("joint", [(True,), (True, True), (True, False, False)])
def test_one_backward_needs_two_loops(joint):
    with pytest.raises(ValueError, match="give one flag a microbatch, True only where both are"):
        Pipeline(2, 1, (True, False), joint=joint)
