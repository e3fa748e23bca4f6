"""Evaluation: the losses on fixed draws, apart and by noise level, and a few generations to read."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from ..config import RunConfig
from ..data.source import ExampleSource
from ..data.tokenizers import Tokenizer
from ..diffusion.inputs import to_device
from ..diffusion.sampler import CounterDraws, generate
from ..generation.completions import EndTokens, Speed, complete
from ..generation.quality import Answer, choose_examples, open_score
from ..generation.text import decode_tokens
from ..models.diffusion_gemma.inference import Session
from ..models.diffusion_gemma.model import DiffusionGemma
from ..models.diffusion_gemma.stages import ModelPipeline
from .batches import BatchMaker
from .step import loss_metrics, sum_terms

Beat = Callable[[str], None]


def no_beat(what: str) -> None:
    """For callers that no watchdog watches."""


# Evaluations are all made with the canvas length that a schedule ends in, so that they can be compared.
END_OF_SCHEDULE = 1 << 62
ANSWERED_TOGETHER = 32  # rows


@torch.no_grad()
def evaluate(model: DiffusionGemma, maker: BatchMaker, num_rows: int, pipeline: ModelPipeline | None = None,
             beat: Beat = no_beat) -> dict[str, float]:
    """Mean losses over the first rows of the source, as one batch: the same rows and draws every time. `beat` hears of each microbatch."""
    rows = evaluation_rows(maker, num_rows)
    batch = maker.batch(rows, iteration=END_OF_SCHEDULE)
    total = None if pipeline is None else pipeline.evaluate(list(batch.microbatches()))
    for number, inputs in enumerate(batch.microbatches() if pipeline is None else ()):
        beat(f"microbatch {number} of an evaluation")
        terms = model(to_device(inputs, model.context.device))
        total = terms if total is None else total + terms
    return loss_metrics(sum_terms(total, model.context.dp_cp, model.context.pp))


def evaluation_rows(maker: BatchMaker, num_rows: int) -> range:
    """The rows to evaluate: at most one pass over the source, a whole number of microbatches on every rank."""
    slot = maker.run.training.micro_batch_size * maker.context.dp.size
    available = maker.order.rows_before(1)
    return range(max(min(num_rows, available) // slot, 1) * slot)


def check_scoring(run: RunConfig, source: ExampleSource) -> None:
    """ValueError, before any step, where the evaluations to come could answer or score nothing."""
    choose_examples(run, source, run.evaluation.eval_generations)
    open_score(run.evaluation.eval_score, "--eval-score")


@torch.no_grad()
def score_answers(model: DiffusionGemma, run: RunConfig, source: ExampleSource, tokenizer: Tokenizer,
                  beat: Beat = no_beat) -> dict[str, float]:
    """Answer the first --eval-generations prompts and score them; every rank does the same, so that experts' exchanges meet.

    right_answers: share of them; tokens_per_forward. No answer is longer than the longest reference, in whole canvases; a row stops at its
    end token, and each canvas that it keeps is encoded once.
    """
    examples, _ = choose_examples(run, source, run.evaluation.eval_generations)
    config = replace(run.generation, max_new_tokens=min(run.generation.max_new_tokens, max(len(e.reference) for e in examples)))
    ends = EndTokens(run.model.eos_token_id, run.model.pad_token_id)
    completions = []
    for completion in complete(lambda rows: Session(model, rows), [e.prompt for e in examples], config, ends, seed=run.training.seed,
                               batch_size=ANSWERED_TOGETHER):
        completions.append(completion)
        beat(f"answer {len(completions)} of an evaluation")
    score = open_score(run.evaluation.eval_score, "--eval-score")
    right = [score(Answer(e.prompt, c.tokens, e.reference, tokenizer)) for e, c in zip(examples, completions, strict=True)]
    return {"right_answers": sum(right) / len(right), "tokens_per_forward": Speed.of(completions, ends.pad_id).tokens_per_forward}


@dataclass(frozen=True)
class Sample:
    """A prompt, what the data has after it, and what the model wrote."""

    prompt: str
    reference: str
    generated: str


@torch.no_grad()
def sample_generations(model: DiffusionGemma, run: RunConfig, source: ExampleSource, tokenizer: Tokenizer, count: int) -> Iterator[Sample]:
    """Generate one canvas after each of the first `count` prompts."""
    indices = [index for index in range(len(source)) if source.lengths[index, 0] > 0][:count]
    if not indices:
        return
    prompts, references = [], []
    for index in indices:
        tokens, prompt = source.tokens(index), int(source.lengths[index, 0])
        prompts.append(tokens[:prompt].tolist())
        references.append(tokens[prompt:].tolist())
    session = Session(model, len(prompts))
    draws = CounterDraws(run.training.seed, canvas_length=session.canvas_length, vocab_size=session.vocab_size)
    config = replace(run.generation, max_new_tokens=session.canvas_length)
    result = generate(session, prompts, config, eos_ids=run.model.eos_token_id, pad_id=run.model.pad_token_id, draws=draws)
    for row, (prompt, reference) in enumerate(zip(prompts, references, strict=True)):
        written = result.tokens[row, :int(result.lengths[row])].tolist()
        yield Sample(*(decode_tokens(tokenizer, tokens) for tokens in (prompt, reference, written)))
