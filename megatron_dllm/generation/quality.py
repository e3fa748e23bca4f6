"""Scores of answers: exact match, a regular expression, a named function, or a function of the user's own module."""
from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..config import RunConfig
from ..data.source import ExampleSource
from ..data.sudoku import SudokuTokenizer, exact_match
from ..data.tokenizers import Tokenizer
from .text import decode_tokens


@dataclass(frozen=True)
class Answer:
    """What a model wrote after a prompt, beside what the data has there; tokens through the end token."""

    prompt: tuple[int, ...]
    generated: tuple[int, ...]
    reference: tuple[int, ...]
    tokenizer: Tokenizer

    @property
    def prompt_text(self) -> str:
        return decode_tokens(self.tokenizer, self.prompt)

    @property
    def generated_text(self) -> str:
        return decode_tokens(self.tokenizer, self.generated, skip_special_tokens=True)

    @property
    def reference_text(self) -> str:
        return decode_tokens(self.tokenizer, self.reference, skip_special_tokens=True)


Score = Callable[[Answer], bool]


def exact(answer: Answer) -> bool:
    """Whether the text is the reference, space around them aside."""
    return answer.generated_text.strip() == answer.reference_text.strip()


def sudoku(answer: Answer) -> bool:
    """Whether the answer solves the puzzle of its prompt, with nothing but an end behind it."""
    if not isinstance(answer.tokenizer, SudokuTokenizer):
        raise ValueError(f"--score sudoku needs puzzles, not the tokenizer {answer.tokenizer.name}; set --data-source sudoku")
    return bool(exact_match([answer.prompt], [answer.generated], answer.tokenizer)[0])


NAMED: Mapping[str, Score] = {"exact": exact, "sudoku": sudoku}


def regex_score(pattern: str, flag: str = "--score") -> Score:
    """With a group: whether its last match is the same in answer and reference (a final number, say). Without: whether the answer matches.

    ValueError for a pattern that is none.
    """
    try:
        compiled = re.compile(pattern, re.MULTILINE)
    except re.error as error:
        raise ValueError(f"{flag} regex:{pattern} is no regular expression: {error}; correct it, with \\ before signs meant as "
                         "such") from None

    def last_group(text: str) -> str | None:
        matches = list(compiled.finditer(text))
        return matches[-1].group(1) if matches else None

    def same_group(answer: Answer) -> bool:
        found = last_group(answer.generated_text)
        return found is not None and found == last_group(answer.reference_text)

    def matches(answer: Answer) -> bool:
        return compiled.search(answer.generated_text) is not None

    return same_group if compiled.groups else matches


def open_score(name: str, flag: str = "--score") -> Score:
    """The score that `flag` names: one of NAMED, regex:PATTERN, or module:function. ValueError for anything else."""
    if name in NAMED:
        return NAMED[name]
    kind, separator, rest = name.partition(":")
    if kind == "regex" and rest:
        return regex_score(rest, flag)
    if not separator or not rest:
        raise ValueError(f"{flag} {name}: choose {', '.join(NAMED)}, regex:PATTERN and module:function")
    try:
        found = getattr(importlib.import_module(kind), rest, None)
    except ModuleNotFoundError as error:
        raise ValueError(f"{flag} {name}: {error}; put the module's folder on PYTHONPATH") from None
    if not callable(found):
        raise ValueError(f"{flag} {name}: module {kind} has no function {rest}; name one that it has")
    return found


@dataclass(frozen=True)
class Example:
    """One example to answer, by its place in the source."""

    index: int
    prompt: tuple[int, ...]
    reference: tuple[int, ...]


def choose_examples(run: RunConfig, source: ExampleSource, count: int) -> tuple[list[Example], int]:
    """The first `count` examples whose prompt leaves the model room for a canvas, and how many before them were left out."""
    chosen, left_out = [], 0
    canvas = run.model.canvas_length
    new_tokens = -(-run.generation.max_new_tokens // canvas) * canvas
    for index, (prompt, response) in enumerate(source.lengths.tolist()):
        if prompt + min(new_tokens, response + canvas) > run.model.max_position_embeddings or response == 0:
            left_out += 1
            continue
        tokens = source.tokens(index).tolist()
        chosen.append(Example(index, tuple(tokens[:prompt]), tuple(tokens[prompt:])))
        if len(chosen) == count:
            break
    if not chosen:
        raise ValueError(f"{source.name}: no prompt leaves room in {run.model.max_position_embeddings} positions; lower --max-new-tokens")
    return chosen, left_out
