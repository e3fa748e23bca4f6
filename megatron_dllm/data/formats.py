"""From the columns of a row to a conversation or a plain text: OpenAI messages, ShareGPT, prompt + completion, Alpaca, text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .report import SampleError

Row = Mapping[str, Any]
Message = dict[str, Any]

# Our name of each column; --data-columns maps them to the names in the files.
SHARED_COLUMNS = ("system", "tools", "truncated", "finish_reason")
SHAREGPT_ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "model": "assistant",
    "bot": "assistant", "chatgpt": "assistant", "function_call": "assistant", "tool": "tool", "function": "tool",
    "observation": "tool", "function_response": "tool",
}


@dataclass(frozen=True)
class Conversation:
    """Messages in the OpenAI form, tool definitions, and whether the last answer was cut short where it was made."""

    messages: list[Message]
    tools: list[Any] | None
    truncated: bool


@dataclass(frozen=True)
class PlainText:
    """A document without turns."""

    text: str
    truncated: bool


@dataclass(frozen=True)
class Format:
    """A kind of row: the columns that must be there, those it also reads, and what makes messages of them (None: plain text)."""

    name: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    to_messages: Callable[[Row], list[Message]] | None

    def read(self, row: Row) -> Conversation | PlainText:
        """The sample in a row whose columns have our names. SampleError when it holds none that can be learned from."""
        for column in self.required:
            if row.get(column) is None:
                raise SampleError("missing column", f"no {column!r} in this row")
        if not isinstance(row.get("truncated", False), bool):
            raise SampleError("malformed column", f"'truncated' must be true or false, not {row['truncated']!r}")
        truncated = row.get("truncated", False) or row.get("finish_reason") == "length"
        if self.to_messages is None:
            return PlainText(_text(row[self.required[0]], self.required[0]), truncated)
        messages = [_normal(message) for message in self.to_messages(row)]
        if row.get("system") and messages and messages[0]["role"] not in ("system", "developer"):
            messages.insert(0, {"role": "system", "content": _text(row["system"], "system")})
        return Conversation(messages, _parsed_list(row["tools"], "tools") if row.get("tools") else None, truncated)


def _openai(row: Row) -> list[Message]:
    return _parsed_list(row["messages"], "messages")


def _sharegpt(row: Row) -> list[Message]:
    turns = _parsed_list(row["conversations"], "conversations")
    if all(isinstance(turn, Mapping) and "role" in turn for turn in turns):
        return turns  # messages under ShareGPT's column name
    messages = []
    for turn in turns:
        if not isinstance(turn, Mapping) or not isinstance(turn.get("from"), str) or not isinstance(turn.get("value"), str):
            raise SampleError("malformed conversation", "each turn needs the texts 'from' and 'value'")
        if turn["from"] not in SHAREGPT_ROLES:
            raise SampleError("unknown role", f"{turn['from']!r} is not one of {', '.join(SHAREGPT_ROLES)}")
        messages.append({"role": SHAREGPT_ROLES[turn["from"]], "content": turn["value"]})
    return messages


def _prompt_completion(row: Row) -> list[Message]:
    prompt, completion = row["prompt"], row["completion"]
    before = prompt if isinstance(prompt, list) else [{"role": "user", "content": _text(prompt, "prompt")}]
    after = completion if isinstance(completion, list) else [{"role": "assistant", "content": _text(completion, "completion")}]
    return [*before, *after]


def _alpaca(row: Row) -> list[Message]:
    parts = [_text(row["instruction"], "instruction")]
    if row.get("input"):
        parts.append(_text(row["input"], "input"))
    return [{"role": "user", "content": "\n\n".join(parts)}, {"role": "assistant", "content": _text(row["output"], "output")}]


FORMATS = (
    Format("OpenAI messages", ("messages",), SHARED_COLUMNS, _openai),
    Format("ShareGPT conversations", ("conversations",), SHARED_COLUMNS, _sharegpt),
    Format("prompt and completion", ("prompt", "completion"), SHARED_COLUMNS, _prompt_completion),
    Format("Alpaca", ("instruction", "output"), ("input", *SHARED_COLUMNS), _alpaca),
    Format("plain text", ("text",), ("truncated", "finish_reason"), None),
)
COLUMNS = tuple(dict.fromkeys(column for form in FORMATS for column in (*form.required, *form.optional)))


def parse_columns(renames: Sequence[str]) -> dict[str, str]:
    """{ours: theirs} from items "ours=theirs". ValueError for an item of another shape or a column that no format has."""
    result = {}
    for item in renames:
        ours, separator, theirs = item.partition("=")
        if not separator or not theirs or ours not in COLUMNS:
            raise ValueError(f"--data-columns {item}: write OURS=THEIRS, with OURS one of {', '.join(COLUMNS)}")
        if ours in result:
            raise ValueError(f"--data-columns names {ours} twice: {result[ours]} and {theirs}; keep one")
        result[ours] = theirs
    return result


def rename(row: Row, columns: Mapping[str, str]) -> Row:
    """The row with our names for its columns; a column of the same name that was not chosen is hidden."""
    if not columns:
        return row
    kept = {name: value for name, value in row.items() if name not in columns and name not in columns.values()}
    return kept | {ours: row[theirs] for ours, theirs in columns.items() if theirs in row}


def recognise(row: Row) -> Format | None:
    """The first format all of whose required columns the row has (our names)."""
    return next((form for form in FORMATS if all(row.get(column) is not None for column in form.required)), None)


def unused_columns(form: Format, row: Row) -> set[str]:
    return set(row).difference(form.required, form.optional)


def _text(value: Any, column: str) -> str:
    if not isinstance(value, str):
        raise SampleError("malformed column", f"{column!r} must be text, not {type(value).__name__}")
    return value


def _parsed_list(value: Any, column: str) -> list[Any]:
    """A list as it is, or one that was stored as JSON text (usual for tools, whose schemas have no common shape)."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise SampleError("malformed column", f"{column!r} is text but not JSON: {error}") from error
    if not isinstance(value, list) or not value:
        raise SampleError("malformed column", f"{column!r} must be a list with something in it")
    return value


def _normal(message: Any) -> Message:
    """A message as templates expect it: null fields gone, content of text parts joined, arguments of calls as objects."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise SampleError("malformed conversation", "each message needs a text 'role'")
    result = {key: value for key, value in message.items() if value is not None}
    if isinstance(result.get("content"), list):
        result["content"] = "".join(_part_text(part) for part in result["content"])
    elif not isinstance(result.get("content", ""), str):
        raise SampleError("malformed conversation", f"content must be text, not {type(result['content']).__name__}")
    result.setdefault("content", "")  # templates add to it
    if result.get("tool_calls"):
        result["tool_calls"] = [_normal_call(call) for call in result["tool_calls"]]
    return result


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise SampleError("content that is not text", f"a part of type {kind!r}")


def _normal_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise SampleError("malformed conversation", "each tool call needs a function with a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):  # OpenAI stores the arguments as JSON text, templates expect the object
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError as error:
            raise SampleError("malformed conversation", f"arguments of {function['name']!r} are not JSON: {error}") from error
    return {**call, "function": {**function, "arguments": arguments}}
