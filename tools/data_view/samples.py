"""Planned examples as pieces of text: what the model gets, before any colour."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Literal

import numpy as np

from megatron_dllm.data.tokenizers import Tokenizer
from megatron_dllm.diffusion.batch_plan import Denominators, Microbatch, PlannedExample
from megatron_dllm.diffusion.streams import build_streams
from megatron_dllm.training.batches import BatchMaker

Kind = Literal["prompt", "response", "fill", "kept", "replaced", "same"]
KINDS: dict[Kind, str] = {
    "prompt": "prompt: read only",
    "response": "response: supervised",
    "fill": "end-of-sequence fill of the last canvas",
    "kept": "canvas token that is left as it is",
    "replaced": "canvas token replaced by a random one",
    "same": "replaced, by chance by itself",
}


@dataclass(frozen=True)
class Piece:
    """Neighbouring tokens of one kind; `scored`: they enter the loss of the part they stand in."""

    text: str
    kind: Kind
    scored: bool
    num_tokens: int


@dataclass(frozen=True)
class CanvasView:
    """One canvas of a response: its clean tokens and, if it was chosen, what the decoder is given in their place."""

    number: int
    clean: tuple[Piece, ...]
    noisy: tuple[Piece, ...] | None


@dataclass(frozen=True)
class SampleView:
    """One example of a batch. `row` counts the rows of the batch; examples with the same number were packed together."""

    origin: str
    row: int
    epoch: int
    facts: tuple[str, ...]
    prompt: tuple[Piece, ...]
    canvases: tuple[CanvasView, ...]


def sample_views(maker: BatchMaker, tokenizer: Tokenizer, *, first_iteration: int, count: int) -> list[SampleView]:
    """The first `count` examples of the global batches from `first_iteration` (from 0) on, in the order in which they are run."""
    return list(islice(_all_views(maker, tokenizer, first_iteration), count))


def _all_views(maker: BatchMaker, tokenizer: Tokenizer, iteration: int) -> Iterator[SampleView]:
    size = maker.run.training.global_batch_size
    while True:
        plan = maker.batch(range(iteration * size, (iteration + 1) * size), iteration).plan
        rows = [row for rank in plan.microbatches for microbatch in rank for row in microbatch.rows]
        for number, row in enumerate(rows):
            for example in row:
                yield sample_view(example, maker, tokenizer, plan.denominators, row=number)
        iteration += 1


def sample_view(example: PlannedExample, maker: BatchMaker, tokenizer: Tokenizer, denominators: Denominators, *, row: int) -> SampleView:
    """One example as it enters the model, by the same function that makes the model's streams."""
    model, objective, source = maker.run.model, maker.run.objective, maker.source
    streams = build_streams(Microbatch(((example,),)), [source.tokens(example.index)], objective, denominators,
                            vocab_size=model.vocab_size, fill_token=model.fill_token_id)
    clean = streams.clean.tokens
    # The weight of a clean token is that of predicting the next one; show it on the token that is predicted.
    predicted = np.concatenate([[False], streams.clean.weights[:-1] > 0])
    fit = example.fit
    length = fit.canvas_length
    canvases = []
    for number in range(fit.num_canvases) if example.canvases else ():
        start = fit.prompt + number * length
        filled = np.arange(start, start + length) >= fit.prompt + fit.response
        kinds = np.where(filled, "fill", "response")
        noisy = None
        if number in example.canvases:
            place = slice(example.canvases.index(number) * length, (example.canvases.index(number) + 1) * length)
            tokens, scored = streams.canvas.tokens[place], streams.canvas.weights[place] > 0
            noisy = pieces(tokens, _noise_kinds(example.corrupted(number), tokens, clean[start:start + length]), scored, tokenizer)
        canvases.append(CanvasView(number, pieces(clean[start:start + length], kinds, predicted[start:start + length], tokenizer), noisy))
    if not example.canvases:  # the plain causal objective: the whole response in one
        rest = clean[fit.prompt:]
        canvases.append(CanvasView(0, pieces(rest, np.full(len(rest), "response"), predicted[fit.prompt:], tokenizer), None))
    prompt = pieces(clean[:fit.prompt], np.full(fit.prompt, "prompt"), predicted[:fit.prompt], tokenizer)
    facts = _facts(example, int(source.lengths[example.index, 1]), int(predicted.sum()), len(clean))
    return SampleView(source.describe(example.index), row, example.key.epoch, facts, prompt, tuple(canvases))


def pieces(tokens: np.ndarray, kinds: Sequence[str], scored: Sequence[bool], tokenizer: Tokenizer) -> tuple[Piece, ...]:
    """Neighbours of equal kind and score joined. Random tokens are spelled one by one, since together they are no text."""
    result = []
    for (kind, is_scored), group in groupby(zip(map(int, tokens), map(str, kinds), map(bool, scored), strict=True), lambda item: item[1:]):
        ids = [token for token, _, _ in group]
        if kind in ("replaced", "same"):
            result += [Piece(spell([token], tokenizer), kind, is_scored, 1) for token in ids]
        elif kind == "fill":
            result.append(Piece(f"{spell(ids[:1], tokenizer)}×{len(ids)}", kind, is_scored, len(ids)))
        else:
            result.append(Piece(spell(ids, tokenizer), kind, is_scored, len(ids)))
    return tuple(result)


def spell(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """Text of the ids with special tokens, line ends and control characters to be seen; an id that the tokenizer lacks as <id>."""
    parts = []
    for known, group in groupby(ids, lambda token: token < tokenizer.vocab_size):
        group = list(group)
        parts.append(visible(tokenizer.decode(group)) if known else "".join(f"<{token}>" for token in group))
    return "".join(parts)


def visible(text: str) -> str:
    """Line ends as ↵ (before the line end), tabs as →, and other characters that a terminal would obey as escapes."""
    return "".join(
        "↵\n" if c == "\n" else "→" if c == "\t" else c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _noise_kinds(corrupted: np.ndarray, tokens: np.ndarray, clean: np.ndarray) -> np.ndarray:
    return np.where(corrupted, np.where(tokens == clean, "same", "replaced"), "kept")


def _facts(example: PlannedExample, whole_response: int, num_predicted: int, num_clean: int) -> tuple[str, ...]:
    fit = example.fit
    cut = f" (cut from {whole_response})" if fit.response < whole_response else ""
    facts = [f"{fit.prompt} prompt + {fit.response} response tokens{cut}"]
    if example.canvases:
        chosen = ", ".join(str(canvas + 1) for canvas in example.canvases)
        facts += [f"{fit.num_canvases} canvases of {fit.canvas_length}, chosen: {chosen}", f"noise level t = {example.noise_level:.3f}",
                  "self-conditioned" if example.self_conditioned else "not self-conditioned"]
    return (*facts, f"autoregressive loss on {num_predicted} of {num_clean} tokens")
