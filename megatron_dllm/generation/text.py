"""Between text and the tokens that a model reads and writes."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from ..data.report import SampleError
from ..data.tokenizers import Tokenizer


def raw_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of a text to continue: bos, where the tokenizer has one, as at the start of every training text; then the text."""
    return ([] if tokenizer.bos_id is None else [tokenizer.bos_id]) + tokenizer.encode(text)


def chat_prompt(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Tokens of a conversation up to where the assistant begins to speak."""
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True).ids)


def decode_tokens(tokenizer: Tokenizer, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
    """Text of model output. A model's vocabulary may be larger than its tokenizer's: what lies beyond is written as <number>."""
    pieces = []
    for known, run in groupby(tokens, lambda token: token < tokenizer.vocab_size):
        if known:
            pieces.append(tokenizer.decode(list(run), skip_special_tokens=skip_special_tokens))
        else:
            pieces += [f"<{token}>" for token in run]
    return "".join(pieces)


def has_chat_template(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer can render a conversation."""
    try:
        chat_prompt(tokenizer, [{"role": "user", "content": "?"}])
    except SampleError:  # there is a template, and it wants other messages
        return True
    except ValueError:
        return False
    return True
