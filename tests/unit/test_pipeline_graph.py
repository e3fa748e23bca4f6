"""The dependency graph, for one microbatch with and without loop 1."""

import pytest

from megatron_dllm.pipeline.actions import format_actions, parse_action
from megatron_dllm.pipeline.graph import Pipeline

MESSAGES = {  # (ranks, chunks, self-conditioned): all messages as "what a rank sends -> what the other receives"
    (1, 1, False): [],
    (1, 1, True): ["0:Ss0.0>0 0:Rs0.0'<0", "0:Sd0.0'>0 0:Rd0.0<0"],
    (2, 1, False): ["0:Sh0.0>1 1:Rh0.0<0", "1:Sg0.0>0 0:Rg0.0<1"],
    (2, 1, True): [
        "0:Sh0.0>1 1:Rh0.0<0",
        "1:Ss0.0>0 0:Rs0.0'<1",
        "0:Sh0.0'>1 1:Rh0.0'<0",
        "1:Sg0.0'>0 0:Rg0.0'<1",
        "0:Sd0.0'>1 1:Rd0.0<0",
        "1:Sg0.0>0 0:Rg0.0<1",
    ],
    (2, 2, False): [
        "0:Sh0.0>1 1:Rh0.0<0",
        "1:Sh0.0>0 0:Rh0.1<1",  # wrap-around: the last rank's chunk 0 to the first rank's chunk 1
        "0:Sh0.1>1 1:Rh0.1<0",
        "1:Sg0.1>0 0:Rg0.1<1",
        "0:Sg0.1>1 1:Rg0.0<0",
        "1:Sg0.0>0 0:Rg0.0<1",
    ],
    (1, 2, True): [
        "0:Sh0.0>0 0:Rh0.1<0",
        "0:Ss0.1>0 0:Rs0.0'<0",
        "0:Sh0.0'>0 0:Rh0.1'<0",
        "0:Sg0.1'>0 0:Rg0.0'<0",
        "0:Sd0.0'>0 0:Rd0.1<0",
        "0:Sg0.1>0 0:Rg0.0<0",
    ],
}


def messages_of(pipeline):
    return [m for rank in range(pipeline.ranks) for action in pipeline.compute_actions(rank) for m in pipeline.outputs(rank, action)]


@pytest.mark.parametrize("sizes", MESSAGES)
def test_outputs(sizes):
    ranks, chunks, conditioned = sizes
    found = [f"{m.source}:{m.send} {m.destination}:{m.receive}" for m in messages_of(Pipeline(ranks, chunks, (conditioned,)))]
    assert sorted(found) == sorted(MESSAGES[sizes])


@pytest.mark.parametrize("sizes", MESSAGES)
def test_awaits_message_agrees_with_outputs(sizes):
    ranks, chunks, conditioned = sizes
    pipeline = Pipeline(ranks, chunks, (conditioned,))
    consumers = [(m.destination, m.consumer) for m in messages_of(pipeline)]
    assert len(set(consumers)) == len(consumers)
    waiting = {(rank, a) for rank in range(ranks) for a in pipeline.compute_actions(rank) if pipeline.awaits_message(rank, a)}
    assert waiting == set(consumers)


@pytest.mark.parametrize(
    "options, rank, actions",
    [
        (dict(), 0, "B0.0 B0.0' B1.0 F0.0 F0.0' F1.0"),
        (dict(), 1, "B0.0 B0.0' B1.0 E0.0 F0.0 F0.0' F1.0"),
        (dict(embedding_trained=False), 1, "B0.0 B0.0' B1.0 F0.0 F0.0' F1.0"),
        (dict(forward_only=True), 1, "F0.0 F0.0' F1.0"),
        (dict(split_backward=True), 0, "F0.0 F0.0' F1.0 I0.0 I0.0' I1.0 W0.0 W1.0"),
    ],
)
def test_compute_actions(options, rank, actions):
    pipeline = Pipeline(2, 1, (True, False), **options)
    assert format_actions(sorted(pipeline.compute_actions(rank), key=str)) == actions


@pytest.mark.parametrize(
    "token, inputs",
    [("F0.0", ""), ("F0.0'", "F0.0"), ("B0.0'", "F0.0'"), ("B0.0", "F0.0 B0.0'"), ("B1.0", "F1.0"), ("E0.0", "F0.0")],
)
def test_local_inputs(token, inputs):
    pipeline = Pipeline(2, 1, (True, False))
    assert format_actions(pipeline.local_inputs(parse_action(token))) == inputs


def test_local_inputs_of_a_split_backward():
    pipeline = Pipeline(2, 1, (True,), split_backward=True)
    assert format_actions(pipeline.local_inputs(parse_action("I0.0"))) == "F0.0 I0.0'"
    assert format_actions(pipeline.local_inputs(parse_action("W0.0"))) == "I0.0"


def test_a_frozen_embedding_needs_no_gradient_message():
    found = [str(m.send) for m in messages_of(Pipeline(2, 1, (True,), embedding_trained=False))]
    assert "Ss0.0>0" in found and "Sd0.0'>1" not in found


@pytest.mark.parametrize(
    "sizes, words", [((0, 1, (False,)), "ranks is 0"), ((1, 0, (False,)), "chunks is 0"), ((1, 1, ()), "microbatches is 0")]
)
def test_pipeline_refuses_nothing_at_all(sizes, words):
    with pytest.raises(ValueError, match=words):
        Pipeline(*sizes)


def test_pipeline_refuses_to_split_a_backward_that_is_not_there():
    with pytest.raises(ValueError, match="forward_only and split_backward are both on"):
        Pipeline(2, 1, (False,), forward_only=True, split_backward=True)
