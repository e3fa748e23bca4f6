"""Tokenizers behind one interface: a built-in byte tokenizer (nothing to download) and any `transformers` tokenizer directory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Message = Mapping[str, Any]


@dataclass(frozen=True)
class ChatTokens:
    """A rendered conversation. `assistant_mask` marks the tokens in generation tags; None: the template has no such tags."""

    ids: list[int]
    assistant_mask: list[bool] | None


class Tokenizer(Protocol):
    """Text to ids and back.

    `vocab_size` is one more than the largest id that can be produced. `eos_ids`: every id that ends a turn or a text, the filler first.
    `fingerprint` changes whenever the ids of some text or conversation could change.
    """

    name: str
    vocab_size: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    pad_id: int | None
    fingerprint: str

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; nothing is added in front or behind."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...

    def is_special(self, token_id: int) -> bool:
        """Whether the id stands for no text of its own (bos, end of turn, ...)."""
        ...

    def apply_chat_template(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, add_generation_prompt: bool = False
    ) -> ChatTokens: ...


class ByteTokenizer:
    """UTF-8 bytes at ids 8..263; ids 0..7 are special. A turn is <role> bytes <eos>; text that looks like a special
    token stays text.
    """

    SPECIALS = ("<pad>", "<eos>", "<bos>", "<system>", "<user>", "<assistant>", "<tool>", "<unused>")
    OFFSET = len(SPECIALS)
    ROLES = {"system": 3, "developer": 3, "user": 4, "assistant": 5, "tool": 6}

    name = "byte"
    vocab_size = OFFSET + 256
    pad_id: int | None = 0
    eos_ids: tuple[int, ...] = (1,)
    bos_id: int | None = 2
    fingerprint = "byte-1"

    def encode(self, text: str) -> list[int]:
        return [self.OFFSET + byte for byte in text.encode("utf-8")]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of the ids; bytes that are not UTF-8 become U+FFFD. ValueError for an id outside the vocabulary."""
        pieces, run = [], bytearray()
        for token in map(int, ids):
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"token id {token} is outside the byte tokenizer's vocabulary of {self.vocab_size}")
            if token >= self.OFFSET:
                run.append(token - self.OFFSET)
            elif not skip_special_tokens:
                pieces += [run.decode("utf-8", errors="replace"), self.SPECIALS[token]]
                run.clear()
        return "".join(pieces) + run.decode("utf-8", errors="replace")

    def is_special(self, token_id: int) -> bool:
        return token_id < self.OFFSET

    def apply_chat_template(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, add_generation_prompt: bool = False
    ) -> ChatTokens:
        """<bos>, then <role> content <eos> for each message; an assistant's content and <eos> are inside the generation span."""
        ids, mask = [self.bos_id], [False]
        if tools:
            definitions = [self.ROLES["system"], *self.encode(json.dumps(list(tools), sort_keys=True)), self.eos_ids[0]]
            ids += definitions
            mask += [False] * len(definitions)
        for message in messages:
            role = message["role"]
            if role not in self.ROLES:
                raise ValueError(f"role {role!r} is unknown to the byte tokenizer; it knows {sorted(self.ROLES)}")
            body = [*self.encode(_plain_content(message)), self.eos_ids[0]]
            ids += [self.ROLES[role], *body]
            mask += [False] + [role == "assistant"] * len(body)
        if add_generation_prompt:
            ids.append(self.ROLES["assistant"])
            mask.append(False)
        return ChatTokens(ids, mask)


def _plain_content(message: Message) -> str:
    """Content as one string: text parts are joined; tool calls, which have no form of their own here, are written as JSON."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part if isinstance(part, str) else part["text"] for part in content)
    calls = message.get("tool_calls")
    return (content or "") + (json.dumps(list(calls), sort_keys=True) if calls else "")
