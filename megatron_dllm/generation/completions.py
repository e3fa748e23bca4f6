"""Prompts to completions, a batch at a time; what comes out for a prompt depends on neither the batch nor its size."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..config import GenerationConfig
from ..diffusion.sampler import CounterDraws, Denoiser, Observer, check_prompts, generate


@dataclass(frozen=True)
class EndTokens:
    """Ids that end a text, and the one that fills what follows."""

    eos_ids: tuple[int, ...]
    pad_id: int


@dataclass(frozen=True)
class Completion:
    """One prompt's answer. `tokens` go through the first end token; `steps` are the denoising steps of each canvas."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    steps: tuple[int, ...]
    ended: bool

    @property
    def num_forwards(self) -> int:
        return sum(self.steps)


def complete(
    make_denoiser: Callable[[int], Denoiser],
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    ends: EndTokens,
    *,
    seed: int,
    batch_size: int,
    observe: Callable[[int], Observer | None] | None = None,
) -> Iterator[Completion]:
    """The completions of all prompts, in order. `make_denoiser(n)` gives a fresh one for n rows.

    `observe(first)` is asked, at each batch, for what shall see its steps; `first` is the place of the batch's row 0 among the prompts.
    ValueError, before anything is generated, for a prompt that does not fit.
    """
    for first in range(0, len(prompts), batch_size):
        batch = prompts[first : first + batch_size]
        denoiser = make_denoiser(len(batch))
        if first == 0:
            check_prompts(denoiser, prompts, config)
        draws = CounterDraws(
            seed, canvas_length=denoiser.canvas_length, vocab_size=denoiser.vocab_size, row_keys=range(first, first + len(batch)))
        result = generate(denoiser, batch, config, eos_ids=ends.eos_ids, pad_id=ends.pad_id, draws=draws,
                          observe=None if observe is None else observe(first))
        for row, prompt in enumerate(batch):
            steps = tuple(n for n in result.steps[row].tolist() if n)
            yield Completion(tuple(prompt), tuple(result.row(row)), steps, bool(result.ended[row]))


@dataclass(frozen=True)
class Speed:
    """How many tokens a forward of the model gave, over many completions; NaN of none."""

    num_tokens: int
    num_forwards: int
    num_canvases: int

    @classmethod
    def of(cls, completions: Sequence[Completion], pad_id: int) -> Speed:
        """Counts tokens through each end, padding left out."""
        return cls(sum(token != pad_id for one in completions for token in one.tokens), sum(one.num_forwards for one in completions),
                   sum(len(one.steps) for one in completions))

    @property
    def tokens_per_forward(self) -> float:
        return self.num_tokens / self.num_forwards if self.num_forwards else float("nan")

    @property
    def effective_steps(self) -> float:
        """Mean denoising steps of a canvas."""
        return self.num_forwards / self.num_canvases if self.num_canvases else float("nan")
