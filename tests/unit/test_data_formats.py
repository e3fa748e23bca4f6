import json

import pytest

from megatron_dllm.data.formats import Conversation, PlainText, parse_columns, recognise, rename, unused_columns
from megatron_dllm.data.report import SampleError

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
TOOL = {"type": "function", "function": {"name": "f"}}

ROWS = {
    "OpenAI messages": {"messages": [USER, ANSWER]},
    "ShareGPT conversations": {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    "ShareGPT conversations, messages in it": {"conversations": [USER, ANSWER]},
    "prompt and completion": {"prompt": "q", "completion": "a"},
    "prompt and completion, messages": {"prompt": [USER], "completion": [ANSWER]},
    "Alpaca": {"instruction": "q", "input": "", "output": "a"},
}


@pytest.mark.parametrize("case", ROWS)
def test_read_gives_messages(case):
    row = ROWS[case]
    form = recognise(row)
    assert form.name == case.split(",")[0]
    assert form.read(row) == Conversation([USER, ANSWER], None, False)
    with_system = form.read({**row, "system": "s", "tools": json.dumps([TOOL]), "finish_reason": "length"})
    assert with_system == Conversation([{"role": "system", "content": "s"}, USER, ANSWER], [TOOL], True)


def test_read_joins_instruction_and_input():
    row = {"instruction": "add", "input": "1 2", "output": "3"}
    assert recognise(row).read(row).messages[0]["content"] == "add\n\n1 2"


def test_read_plain_text():
    assert recognise({"text": "x", "id": 1}).read({"text": "x", "truncated": True}) == PlainText("x", True)


def test_read_normalises_messages():
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "q"}, "!"], "name": None},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}]}]
    read = recognise({"messages": messages}).read({"messages": json.dumps(messages)})
    assert read.messages == [
        {"role": "user", "content": "q!"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}]


@pytest.mark.parametrize(("row", "reason"), [
    ({"messages": []}, "malformed column"),
    ({"messages": "{"}, "malformed column"),
    ({"messages": ["x"]}, "malformed conversation"),
    ({"messages": [{"role": "user", "content": 3}]}, "malformed conversation"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]}, "content that is not text"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"name": "f"}]}]}, "malformed conversation"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, "malformed conversation"),
    ({"messages": [USER], "truncated": "no"}, "malformed column"),
    ({"conversations": [{"from": "alien", "value": "x"}]}, "unknown role"),
    ({"conversations": [{"from": "gpt"}]}, "malformed conversation"),
    ({"prompt": "q", "completion": 7}, "malformed column"),
    ({"text": 3}, "malformed column"),
])
def test_read_names_what_is_wrong_with_a_row(row, reason):
    with pytest.raises(SampleError) as caught:
        recognise(row).read(row)
    assert caught.value.reason == reason


def test_read_names_a_column_that_one_row_lacks():
    with pytest.raises(SampleError, match="missing column.*'output'"):
        recognise(ROWS["Alpaca"]).read({"instruction": "x", "output": None})


def test_recognise_prefers_messages_and_knows_nothing_else():
    assert recognise({"text": "x", **ROWS["Alpaca"], "messages": [USER]}).name == "OpenAI messages"
    assert recognise({"question": "x"}) is None
    assert unused_columns(recognise(ROWS["Alpaca"]), {**ROWS["Alpaca"], "b": 1, "a": 2}) == {"a", "b"}


def test_parse_columns_and_rename():
    columns = parse_columns(["messages=dialogue", "tools=functions"])
    row = {"dialogue": [USER, ANSWER], "messages": "old", "functions": [TOOL], "id": 1}
    assert rename(row, columns) == {"messages": [USER, ANSWER], "tools": [TOOL], "id": 1}
    assert rename({"prompt": "a", "completion": "b"}, parse_columns(["prompt=completion", "completion=prompt"])) == {
        "prompt": "b", "completion": "a"}
    assert rename(row, {}) is row


@pytest.mark.parametrize("items", [["messages"], ["messages="], ["dialogue=messages"], ["text=a", "text=b"]])
def test_parse_columns_refuses(items):
    with pytest.raises(ValueError, match="--data-columns"):
        parse_columns(items)
