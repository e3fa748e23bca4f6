"""Sends, receives, waits and reductions, on lists typed by hand and on random ones."""

import random

import pytest

from megatron_dllm.pipeline.actions import POST_KINDS, SEND_KINDS, Kind, format_actions, parse_actions
from megatron_dllm.pipeline.assembly import compute_lists
from megatron_dllm.pipeline.graph import Pipeline
from megatron_dllm.pipeline.simulator import Transport, simulate
from megatron_dllm.pipeline.timing import Costs, lower_bound, time_compute
from megatron_dllm.pipeline.transfers import add_reductions, add_transfers, transfer_order

TYPED = {  # name: (ranks, chunks, coins, overlap): compute list and full list of each rank
    "P2 plain": (2, 1, "0", True, [
        ("F0.0 B0.0", "F0.0 Sh0.0>1 Rg0.0<1 Rg0.0<1! B0.0 Sh0.0>1!"),
        ("F0.0 B0.0", "Rh0.0<0 Rh0.0<0! F0.0 B0.0 Sg0.0>0 Sg0.0>0!"),
    ]),
    "P2 with a loop": (2, 1, "1", True, [
        ("F0.0 F0.0' B0.0' B0.0",
         "F0.0 Sh0.0>1 Rs0.0'<1 Rs0.0'<1! F0.0' Sh0.0>1! Sh0.0'>1 Rg0.0'<1 Rg0.0'<1! B0.0' "
         "Sh0.0'>1! Sd0.0'>1 Rg0.0<1 Rg0.0<1! B0.0 Sd0.0'>1!"),
        ("F0.0 F0.0' B0.0' B0.0 E0.0",
         "Rh0.0<0 Rh0.0<0! F0.0 Ss0.0>0 Rh0.0'<0 Rh0.0'<0! F0.0' Ss0.0>0! B0.0' Sg0.0'>0 "
         "Rd0.0<0 B0.0 Sg0.0'>0! Sg0.0>0 Rd0.0<0! E0.0 Sg0.0>0!"),
    ]),
    "P1 V2, inside one process": (1, 2, "0", True, [
        ("F0.0 F0.1 B0.1 B0.0",
         "F0.0 Sh0.0>0 Rh0.1<0 Rh0.1<0! F0.1 Sh0.0>0! B0.1 Sg0.1>0 Rg0.0<0 Rg0.0<0! B0.0 Sg0.1>0!"),
    ]),
    "P2, the second receive starts before the first forward": (2, 1, "00", True, [
        ("F0.0 F1.0 B0.0 B1.0",
         "F0.0 Sh0.0>1 F1.0 Sh0.0>1! Sh1.0>1 Rg0.0<1 Rg0.0<1! Rg1.0<1 B0.0 Sh1.0>1! Rg1.0<1! B1.0"),
        ("F0.0 B0.0 F1.0 B1.0",
         "Rh0.0<0 Rh0.0<0! F0.0 Rh1.0<0 B0.0 Sg0.0>0 Rh1.0<0! F1.0 Sg0.0>0! B1.0 Sg1.0>0 Sg1.0>0!"),
    ]),
    "the same without overlap": (2, 1, "00", False, [
        ("F0.0 F1.0 B0.0 B1.0",
         "F0.0 Sh0.0>1 F1.0 Sh0.0>1! Sh1.0>1 Rg0.0<1 Rg0.0<1! B0.0 Sh1.0>1! Rg1.0<1 Rg1.0<1! B1.0"),
        ("F0.0 B0.0 F1.0 B1.0",
         "Rh0.0<0 Rh0.0<0! F0.0 Rh1.0<0 Rh1.0<0! B0.0 Sg0.0>0 F1.0 Sg0.0>0! B1.0 Sg1.0>0 Sg1.0>0!"),
    ]),
}


@pytest.mark.parametrize("name", TYPED)
def test_add_transfers(name):
    ranks, chunks, coins, overlap, lists = TYPED[name]
    pipeline = Pipeline(ranks, chunks, tuple(coin == "1" for coin in coins))
    compute = [parse_actions(steps) for steps, _ in lists]
    full = add_transfers(pipeline, compute, Costs.uniform(pipeline.stages), overlap=overlap)
    assert [format_actions(actions) for actions in full] == [text for _, text in lists]


def test_add_transfers_refuses_lists_that_wait_for_each_other():
    lists = [parse_actions("F0.0 B0.0 F1.0 B1.0"), parse_actions("F0.0 F1.0 B0.0 B1.0")]
    with pytest.raises(ValueError, match="wait for each other: rank 0 at B0.0, rank 1 at F1.0"):
        add_transfers(Pipeline(2, 1, (False, False)), lists, Costs.uniform(2))


def random_lists(pipeline, draws):
    """Compute lists in some order that the dependencies allow."""
    waiting = {(rank, action) for rank in range(pipeline.ranks) for action in pipeline.compute_actions(rank)}
    inputs = {(rank, action): {(rank, step) for step in pipeline.local_inputs(action)} for rank, action in waiting}
    for rank, action in waiting:
        for message in pipeline.outputs(rank, action):
            inputs[message.destination, message.consumer].add((rank, action))
    lists = [[] for _ in range(pipeline.ranks)]
    while waiting:
        ready = sorted((key for key in waiting if not inputs[key] & waiting), key=str)
        rank, action = draws.choice(ready)
        lists[rank].append(action)
        waiting.remove((rank, action))
    return lists


@pytest.mark.parametrize("seed", range(25))
def test_add_transfers_keeps_any_order_of_steps_sound(seed):
    """Not only good schedules: whatever order the compute steps have, no transport stops and no time is below the bound."""
    draws = random.Random(seed)
    ranks, chunks, microbatches = draws.randint(1, 4), draws.randint(1, 3), draws.randint(1, 4)
    pipeline = Pipeline(ranks, chunks, tuple(draws.random() < 0.6 for _ in range(microbatches)), split_backward=draws.random() < 0.3)
    costs = Costs.of_forwards(tuple(draws.randint(1, 20) for _ in range(pipeline.stages)), loop_share=draws.random())
    compute = random_lists(pipeline, draws)
    lists = add_reductions(pipeline, add_transfers(pipeline, compute, costs, overlap=draws.random() < 0.5))
    simulation = simulate(pipeline, lists, costs, latency=draws.choice([0, 3]))
    assert simulation.faults == []
    assert simulation.makespan >= time_compute(pipeline, compute, costs).makespan >= lower_bound(pipeline, costs)


@pytest.mark.parametrize("transport", Transport)
@pytest.mark.parametrize("ranks, chunks, coins", [(2, 1, "0110"), (2, 3, "1011"), (4, 2, "10101010"), (3, 2, "000000"), (1, 2, "11")])
def test_transfers_that_overlap_cost_no_time(ranks, chunks, coins, transport):
    """With messages that take no time the full lists run as fast as the compute steps alone."""
    pipeline = Pipeline(ranks, chunks, tuple(coin == "1" for coin in coins))
    costs = Costs.uniform(pipeline.stages)
    compute = compute_lists(pipeline, group=ranks, costs=costs)
    lists = add_reductions(pipeline, add_transfers(pipeline, compute, costs))
    simulation = simulate(pipeline, lists, costs, transports=[transport])
    assert simulation.makespan == time_compute(pipeline, compute, costs).makespan


def test_transfer_order_leaves_no_ties():
    pipeline = Pipeline(2, 2, (True, False, True))
    messages = [m for rank in range(2) for action in pipeline.compute_actions(rank) for m in pipeline.outputs(rank, action)]
    assert len({transfer_order(5, message) for message in messages}) == len(messages) > 20
    assert all(transfer_order(5, a) < transfer_order(6, b) for a in messages for b in messages)


@pytest.mark.parametrize("coins", ["0000", "0110", "1111"])
def test_the_order_of_transfers_is_one_for_both_ranks(coins):
    """At P = 2 both neighbours are the same rank: row for row, what one end sends the other end receives."""
    pipeline = Pipeline(2, 2, tuple(coin == "1" for coin in coins))
    costs = Costs.uniform(pipeline.stages)
    lists = add_transfers(pipeline, compute_lists(pipeline, group=2, costs=costs), costs)
    between = [[a for a in actions if a.kind in POST_KINDS and a.peer != rank] for rank, actions in enumerate(lists)]
    assert len(between[0]) == len(between[1])
    for ours, theirs in zip(*between, strict=True):
        assert (ours.kind in SEND_KINDS) != (theirs.kind in SEND_KINDS)
        assert (ours.edge, ours.microbatch) == (theirs.edge, theirs.microbatch)


@pytest.mark.parametrize(
    "options, actions, expected",
    [
        (dict(), "F0.0 F0.1 B0.1 Sg0.1>1 B0.0 Sg0.1>1!", "F0.0 F0.1 B0.1 Sg0.1>1 G.1 B0.0 G.0 Sg0.1>1!"),
        (dict(split_backward=True), "F0.0 F0.1 I0.1 I0.0 W0.0 W0.1", "F0.0 F0.1 I0.1 I0.0 W0.0 G.0 W0.1 G.1"),
        (dict(), "B0.1 B0.0 E0.1", "B0.1 B0.0 G.0 E0.1 G.1"),  # the last stage's gradients include the embedding's
        (dict(forward_only=True), "F0.0 F0.1", "F0.0 F0.1"),
    ],
)
def test_add_reductions(options, actions, expected):
    pipeline = Pipeline(1, 2, (False,), **options)
    assert format_actions(add_reductions(pipeline, [parse_actions(actions)])[0]) == expected


def test_reductions_come_once_for_each_chunk():
    pipeline = Pipeline(3, 2, (True,) * 6)
    compute = compute_lists(pipeline, group=3, costs=Costs.uniform(6))
    for actions in add_reductions(pipeline, compute):
        assert sorted(str(action) for action in actions if action.kind == Kind.REDUCE) == ["G.0", "G.1"]
