"""The simulator: what it measures on lists that are easy to work out, and that it sees every fault planted."""

import pytest

from megatron_dllm.pipeline.actions import POST_KINDS, SEND_KINDS, parse_action, parse_actions
from megatron_dllm.pipeline.assembly import build_schedule
from megatron_dllm.pipeline.checks import format_faults
from megatron_dllm.pipeline.edges import EdgeShapes
from megatron_dllm.pipeline.graph import Pipeline
from megatron_dllm.pipeline.memory import PeakMemory, peak_memory
from megatron_dllm.pipeline.simulator import Span, Transport, assert_sound, simulate
from megatron_dllm.pipeline.timing import Costs, lower_bound

SIZES = {
    "P2": (2, 1, (False, True, False)),
    "P2 V2": (2, 2, (True, False)),
    "P3": (3, 1, (True, False)),
    "P1 V2": (1, 2, (True,)),
}


def pipeline_of(name):
    return Pipeline(*SIZES[name])


def faults_of(pipeline, lists, **options):
    return [str(fault) for fault in simulate(pipeline, lists, Costs.uniform(pipeline.stages), **options).faults]


def swapped(actions, first, second):
    result = list(actions)
    result[first], result[second] = result[second], result[first]
    return result


def test_simulate_gives_times_that_can_be_worked_out():
    pipeline = Pipeline(2, 1, (True,))
    schedule = build_schedule(pipeline)
    simulation = simulate(pipeline, schedule.lists, schedule.costs, latency=3)
    steps = [[(str(span.action), span.start, span.finish) for span in spans] for spans in simulation.spans]
    assert steps == [
        [("F0.0", 0, 10), ("F0.0'", 26, 28), ("B0.0'", 40, 44), ("B0.0", 60, 80)],
        [("F0.0", 13, 23), ("F0.0'", 31, 33), ("B0.0'", 33, 37), ("B0.0", 37, 57), ("E0.0", 57, 59)],
    ]
    assert simulation.makespan == 80
    assert simulation.work == (10 + 2 + 4 + 20) * 2 + 2
    assert simulation.bubble == 1 - 74 / 160
    assert simulation.lower_bound == 10 + 10 + 2 + 2 + 4 + 20 + 20  # without latency, and with B0.0 of rank 1 beside B0.0' of rank 0
    assert isinstance(simulation.spans[0][0], Span)


@pytest.mark.parametrize("name", SIZES)
def test_simulate_finds_nothing_wrong_with_our_schedules(name):
    pipeline = pipeline_of(name)
    schedule = build_schedule(pipeline)
    assert_sound(pipeline, schedule.lists, schedule.costs)


@pytest.mark.parametrize("name", SIZES)
def test_a_dropped_action_is_found(name):
    """Whichever one: a step, a transfer, a wait, a reduction."""
    pipeline = pipeline_of(name)
    lists = build_schedule(pipeline).lists
    for rank, actions in enumerate(lists):
        for row, action in enumerate(actions):
            damaged = [*lists[:rank], actions[:row] + actions[row + 1 :], *lists[rank + 1 :]]
            assert any(f"{action} is missing" in fault for fault in faults_of(pipeline, damaged)), f"rank {rank} without {action}"


@pytest.mark.parametrize("name", ["P2", "P2 V2", "P3"])
def test_swapped_transfers_are_found(name):
    """Any two neighbouring sends, or receives, of one rank with the same peer."""
    pipeline = pipeline_of(name)
    lists = build_schedule(pipeline).lists
    tried = 0
    for rank, actions in enumerate(lists):
        posts = [row for row, action in enumerate(actions) if action.kind in POST_KINDS]
        for first in posts:
            way = (actions[first].kind, actions[first].peer)
            other = next((row for row in posts if row > first and (actions[row].kind, actions[row].peer) == way), None)
            if other is not None:
                damaged = [*lists[:rank], swapped(actions, first, other), *lists[rank + 1 :]]
                assert faults_of(pipeline, damaged), f"rank {rank}, rows {first} and {other}"
                tried += 1
    assert tried > 5


def test_a_swap_of_activation_and_gradient_is_named_at_two_ranks():
    """Rank 0 sends rank 1 an activation and a gradient (wrap-around); the wrong order would swap the two without any error."""
    pipeline = Pipeline(2, 2, (False, False))
    lists = build_schedule(pipeline).lists
    rows = [lists[0].index(parse_action(token)) for token in ("Sh1.1>1", "Sg0.1>1")]
    received = [lists[1].index(parse_action(token)) for token in ("Rh1.1<0", "Rg0.0<0")]
    # Only the two receives change places, so each rank by itself is in order.
    damaged = [lists[0], swapped(lists[1], *received)]
    where = f"rank 1, row {received[0]}: Rg0.0<0 meets Sh1.1>1 of rank 0, row {rows[0]}"
    assert f"{where}: sends and receives are not in one order" in faults_of(pipeline, damaged)


def test_a_width_that_depends_on_the_rank_is_found():
    pipeline = Pipeline(2, 2, (True, False))
    schedule = build_schedule(pipeline)
    shapes = EdgeShapes(8, ((6, 2), (5, 0)), mhc_num_residual_streams=4)
    plain = EdgeShapes(8, shapes.tokens)

    def by_rank(rank, action):
        # The classic mistake: the last rank believes that it always receives contracted streams.
        return plain.of(action) if rank == 1 and action.kind == "R" else shapes.of(action)

    assert simulate(pipeline, schedule.lists, schedule.costs, shape_of=lambda rank, action: shapes.of(action)).faults == []
    faults = faults_of(pipeline, schedule.lists, shape_of=by_rank)
    assert "Rh0.0<0 makes room for [6, 8] bfloat16, rank 0 sends [6, 32] bfloat16" in faults[0]
    assert not any("Rd0.1" in fault or "Rs" in fault for fault in faults)  # the soft embedding is as wide at both ends


def test_a_circle_of_waits_is_named():
    lists = [
        parse_actions("F0.0 Sh0.0>1 Rg0.0<1 Sh0.0>1! Rg0.0<1! B0.0 F1.0 Sh1.0>1 Rg1.0<1 Sh1.0>1! Rg1.0<1! B1.0 G.0"),
        parse_actions("Rh0.0<0 Rh0.0<0! F0.0 Rh1.0<0 Rh1.0<0! F1.0 B0.0 Sg0.0>0 Sg0.0>0! B1.0 Sg1.0>0 Sg1.0>0! G.0"),
    ]
    faults = faults_of(Pipeline(2, 1, (False, False)), lists)
    assert len(faults) == len(Transport)
    assert faults[0] == (
        "rank 0, row 4: deadlock over channels: rank 0 waits at Rg0.0<1! (row 4) for rank 1, rank 1 waits at Rh1.0<0! (row 4) for rank 0"
    )


def test_a_receive_that_blocks_a_send_stops_one_transport_only():
    """Posted before the send that its message depends on, in a batch of its own: fatal where one rank's batches run in turn."""
    lists = [
        parse_actions("Rg0.0<1 F0.0 Sh0.0>1 Rg0.0<1! B0.0 Sh0.0>1! G.0"),
        parse_actions("Rh0.0<0 Rh0.0<0! F0.0 B0.0 Sg0.0>0 G.0 Sg0.0>0!"),
    ]
    pipeline = Pipeline(2, 1, (False,))
    assert faults_of(pipeline, lists, transports=[Transport.CHANNELS]) == []
    (fault,) = faults_of(pipeline, lists, transports=[Transport.BATCHES])
    assert fault.endswith(
        "deadlock over batches: rank 1 waits at Rh0.0<0! (row 1) for rank 0, rank 0 has transfers behind Rg0.0<1, which waits for rank 1"
    )


@pytest.mark.parametrize(
    "rank, old, new, words",
    [
        (0, "F0.0 Sh0.0>1", "Sh0.0>1 F0.0", "Sh0.0>1 needs F0.0, which comes later, in row 1"),
        (1, "Rh0.0<0! F0.0", "F0.0 Rh0.0<0!", "F0.0 needs Rh0.0<0!, which comes later, in row 2"),
        (0, "F0.0 Sh", "F0.0 F0.0 Sh", "F0.0 stands in row 0 already"),
        (0, "F0.0 Sh", "F0.0 F1.0 Sh", "F1.0 is no step of this pipeline"),
        (1, "B0.0 Sg0.0>0", "B0.0 Sg0.0>1", "Sg0.0>1 is no step of this pipeline"),
        (1, "B0.0 Sg0.0>0 G.0", "G.0 B0.0 Sg0.0>0", "G.0 needs B0.0, which comes later"),
        (1, "F0.0 B0.0", "B0.0 F0.0", "B0.0 needs F0.0, which comes later"),
    ],
)
def test_misplaced_actions_are_found(rank, old, new, words):
    texts = ["F0.0 Sh0.0>1 Rg0.0<1 Rg0.0<1! B0.0 G.0 Sh0.0>1!", "Rh0.0<0 Rh0.0<0! F0.0 B0.0 Sg0.0>0 G.0 Sg0.0>0!"]
    pipeline = Pipeline(2, 1, (False,))
    assert faults_of(pipeline, [parse_actions(text) for text in texts]) == []
    assert old in texts[rank]
    texts[rank] = texts[rank].replace(old, new)
    faults = faults_of(pipeline, [parse_actions(text) for text in texts])
    assert any(fault.startswith(f"rank {rank}, row ") and words in fault for fault in faults)


def test_a_message_that_nobody_receives_is_found():
    pipeline = Pipeline(2, 1, (False, False))
    lists = build_schedule(pipeline).lists
    gone = {parse_action("Rg1.0<1"), parse_action("Rg1.0<1!")}
    faults = faults_of(pipeline, [[a for a in lists[0] if a not in gone], lists[1]])
    row = lists[1].index(parse_action("Sg1.0>0"))
    assert f"rank 1, row {row}: Sg1.0>0 is received by nobody: rank 0 takes 1 messages, not 2" in faults


def test_format_faults_marks_the_row():
    pipeline = Pipeline(2, 1, (False,))
    lists = build_schedule(pipeline).lists
    damaged = [lists[0], swapped(lists[1], 1, 2)]
    simulation = simulate(pipeline, damaged, Costs.uniform(2))
    text = format_faults(simulation.faults, damaged)
    assert text.splitlines()[0] == "rank 1, row 1: F0.0 needs Rh0.0<0!, which comes later, in row 2"
    assert [line for line in text.splitlines() if "<--" in line] == ["1  Sh0.0>1   F0.0 <--"]
    with pytest.raises(AssertionError, match="F0.0 needs Rh0.0<0!"):
        assert_sound(pipeline, damaged, Costs.uniform(2))


@pytest.mark.parametrize(
    "ranks, chunks, coins, activations, loop_activations, contexts",
    [
        (4, 1, "00000000", [4, 3, 2, 1], [0] * 4, [0] * 4),
        (4, 2, "00000000", [11, 9, 7, 5], [0] * 4, [0] * 4),
        (1, 1, "11", [2], [1], [2]),
        (2, 1, "1", [1, 1], [1, 1], [1, 1]),
    ],
)
def test_peak_memory(ranks, chunks, coins, activations, loop_activations, contexts):
    pipeline = Pipeline(ranks, chunks, tuple(coin == "1" for coin in coins))
    peaks = [peak_memory(pipeline, rank, actions) for rank, actions in enumerate(build_schedule(pipeline).lists)]
    assert [peak.activations for peak in peaks] == activations
    assert [peak.loop_activations for peak in peaks] == loop_activations
    assert [peak.contexts for peak in peaks] == contexts


def test_peak_memory_counts_tensors_in_transfer_and_split_backwards():
    pipeline = Pipeline(2, 1, (True, True), split_backward=True)
    actions = parse_actions(
        "F0.0 Sh0.0>1 F1.0 Sh1.0>1 Rs0.0'<1 Sh0.0>1! Rs0.0'<1! F0.0' Sh0.0'>1 Rg0.0'<1 Sh0.0'>1! Rg0.0'<1! I0.0' Rg0.0<1 Rg0.0<1! I0.0 W0.0"
    )
    assert peak_memory(pipeline, 0, actions) == PeakMemory(activations=2, loop_activations=1, contexts=2, buffers=3)


def test_peak_memory_of_an_evaluation_keeps_contexts_only():
    pipeline = Pipeline(2, 1, (True, True, False), forward_only=True)
    peaks = [peak_memory(pipeline, rank, actions) for rank, actions in enumerate(build_schedule(pipeline).lists)]
    assert [(peak.activations, peak.contexts) for peak in peaks] == [(1, 2), (1, 2)]


@pytest.mark.parametrize(
    "pipeline, costs, bound",
    [
        # busiest rank 1: fill 10, work 2 * (10 + 20), drain 20
        (Pipeline(2, 1, (False, False)), Costs.uniform(2), 10 + 60 + 20),
        # rank 0 is twice as slow
        (Pipeline(2, 1, (False,) * 9), Costs.of_forwards((20, 10)), 9 * 60),
        # one microbatch's own path: forwards of both loops, loop 1's backward, then loop 0's
        (Pipeline(2, 1, (True,)), Costs.uniform(2), 20 + 4 + 4 + 40),
        (Pipeline(2, 1, (True,), forward_only=True), Costs.uniform(2), 24),
        # weight gradients may fill the drain
        (Pipeline(2, 1, (False,) * 4, split_backward=True), Costs.uniform(2), 10 + 4 * 30),
    ],
)
def test_lower_bound(pipeline, costs, bound):
    assert lower_bound(pipeline, costs) == bound


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Costs(((0,), (1,)), ((1,), (1,))), "a cost is 0 ticks"),
        (lambda: Costs(((1,), (1,)), ((1,), (1,)), weight_percent=100), "weight_percent is 100"),
    ],
)
def test_costs_refuse_steps_without_time(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_sends_and_their_waits_pair_off():
    pipeline = Pipeline(4, 2, (True, False) * 2)
    for actions in build_schedule(pipeline).lists:
        started = [str(a) for a in actions if a.kind in POST_KINDS]
        finished = [str(a)[:-1] for a in actions if a.kind not in POST_KINDS and a.edge]
        assert sorted(started) == sorted(finished)
        assert all(actions.index(a) < actions.index(parse_action(f"{a}!")) for a in actions if a.kind in SEND_KINDS & POST_KINDS)


@pytest.mark.parametrize("transport", Transport)
def test_transfers_of_one_queue_take_turns(transport):
    """The second activation cannot travel before the first has arrived, though both ends are there in time."""
    lists = [
        parse_actions("F0.0 Sh0.0>1 F1.0 Sh1.0>1 Sh0.0>1! Sh1.0>1!"),
        parse_actions("Rh0.0<0 Rh1.0<0 Rh1.0<0! Rh0.0<0! F0.0 F1.0"),
    ]
    pipeline = Pipeline(2, 1, (False, False), forward_only=True)
    simulation = simulate(pipeline, lists, Costs.uniform(2), transports=[transport], latency=30)
    assert simulation.faults == []
    assert [(span.start, span.finish) for span in simulation.spans[0]] == [(0, 10), (10, 20)]
    assert [(span.start, span.finish) for span in simulation.spans[1]] == [(10 + 30 + 30, 80), (80, 90)]
