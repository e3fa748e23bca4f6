"""What every source of training examples offers, wherever its tokens come from (chat rows, indexed text, generated puzzles)."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np


@runtime_checkable
class ExampleSource(Protocol):
    """An indexed set of examples; N = len(source).

    An *example* is one document or one supervised turn: a prompt (may be empty) followed by a response. Lengths and keys are known for all
    examples without reading a token, so that a batch can be planned alike on every rank.

        lengths    int32 [N, 2]   (prompt tokens, response tokens), before any cut to the sequence length
        truncated  bool  [N]      the source says that the response was cut short, so an end after it would be a lie
        keys       int64 [N, 2]   (sample index, turn or document): unique in the source; keys of the random draws
    """

    name: str
    lengths: np.ndarray
    truncated: np.ndarray
    keys: np.ndarray

    def __len__(self) -> int: ...

    def tokens(self, index: int) -> np.ndarray:
        """Prompt and response of one example, int32 [prompt + response]. IndexError outside 0..N-1."""
        ...

    def describe(self, index: int) -> str:
        """Where the example comes from, for messages: "chat.jsonl:17 turn 2"."""
        ...
