"""Tokens of actions, and what a table of lists looks like."""

import pytest

from megatron_dllm.pipeline.actions import Action, Edge, Kind, format_actions, format_table, parse_action, parse_actions

TOKENS = {
    "F3.1": Action(Kind.FORWARD, 3, 1),
    "F12.0'": Action(Kind.FORWARD, 12, 0, 1),
    "B0.2'": Action(Kind.BACKWARD, 0, 2, 1),
    "I3.1": Action(Kind.INPUT_GRADIENT, 3, 1),
    "W3.1": Action(Kind.WEIGHT_GRADIENT, 3, 1),
    "E3.1": Action(Kind.EMBEDDING_GRADIENT, 3, 1),
    "Sh3.1>2": Action(Kind.SEND, 3, 1, 0, Edge.HIDDEN, 2),
    "Sh3.1'>2!": Action(Kind.WAIT_SEND, 3, 1, 1, Edge.HIDDEN, 2),
    "Rg10.1<12": Action(Kind.RECEIVE, 10, 1, 0, Edge.GRADIENT, 12),
    "Rs3.0'<7!": Action(Kind.WAIT_RECEIVE, 3, 0, 1, Edge.SOFT_EMBEDDING, 7),
    "Rd3.1<0": Action(Kind.RECEIVE, 3, 1, 0, Edge.SOFT_EMBEDDING_GRADIENT, 0),
    "G.1": Action(Kind.REDUCE, None, 1),
}


@pytest.mark.parametrize("token", TOKENS)
def test_action_prints_as_its_token(token):
    assert str(TOKENS[token]) == token


@pytest.mark.parametrize("token", TOKENS)
def test_parse_action_reads_a_token_back(token):
    assert parse_action(token) == TOKENS[token]


@pytest.mark.parametrize(
    "token",
    ["", "F3", "F3.1''", "X3.1", "F3.1>2", "Sh3.1", "Sh3.1<2", "Rg3.1>2", "Sx3.1>2", "G3.1", "F-1.0", "F3.1!", "Sh3.1>2!!", "F3.1 "],
)
def test_parse_action_refuses_what_is_no_action(token):
    with pytest.raises(ValueError, match="is no action"):
        parse_action(token)


def test_parse_actions_and_format_actions_are_inverse():
    text = " ".join(TOKENS)
    assert format_actions(parse_actions(text)) == text


def test_format_table_puts_ranks_across_and_marks_a_row():
    table = format_table([parse_actions("F0.0 B0.0"), parse_actions("F0.0 Sg0.0>0 G.0")], marked={1: 1})
    assert table.splitlines() == [
        "   rank 0  rank 1",
        "0  F0.0    F0.0",
        "1  B0.0    Sg0.0>0 <--",
        "2          G.0",
    ]
