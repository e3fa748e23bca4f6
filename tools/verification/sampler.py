"""Our sampler against transformers' generate, with the same draws injected into both: accepted sets, canvases, steps and tokens.

A tiny random DiffusionGemma of transformers is the reference (fp32; layer scalars, norms, router scales and windows that are not 1). Our
sampler runs over two denoisers: `adapter` (transformers' own modules, one row at a time, no padding: the sampler alone is tested) and
`ours` (this project's model with the same weights: the whole of generation is tested). Prompts of a batch differ in length: transformers
pads them on the left, we do not. Usage: python tools/verify.py sampler [--seed N]
"""
from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from unittest import mock

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers.models.diffusion_gemma.modeling_diffusion_gemma import DiffusionGemmaForBlockDiffusion

from megatron_dllm.config import GenerationConfig
from megatron_dllm.diffusion.sampler import CounterDraws, Denoiser, DenoisingStep, Draws, Generation, generate, temperature
from verification.oracle import (
    CANVAS_LENGTH,
    PAD_ID,
    TEXT_CONFIG,
    OracleTrace,
    TransformersDenoiser,
    oracle_generate,
    our_session,
    tiny_oracle,
)
from verification.table import Figure, print_figures

NO_EOS = TEXT_CONFIG["vocab_size"] - 1  # for cases in which no row has to end (one may, by chance)
SEEDS_TRIED = 20
# Two implementations may round a decision differently when its two sides are closer than this: in fp32, logits of size 30 differ by 1e-5.
NEAR_TIE = {"bound": 1e-5, "argmax": 2e-5, "sample": 1e-6, "routing": 1e-6}


@dataclass(frozen=True)
class Case:
    """One comparison. `ending_row`: the end-of-sequence token becomes one that this row alone commits in its first canvas.

    Bound and confidence are far looser than the release's: a random model is never as sure as a trained one.
    """

    name: str
    batch: int
    canvases: int
    entropy_bound: float = 5.0
    confidence_threshold: float = 1.0
    stability_threshold: int = 1
    max_denoising_steps: int = 48
    ending_row: int | None = None
    must_occur: tuple[str, ...] = ()

    def config(self) -> GenerationConfig:
        return GenerationConfig(
            max_new_tokens=self.canvases * CANVAS_LENGTH, max_denoising_steps=self.max_denoising_steps, entropy_bound=self.entropy_bound,
            stability_threshold=self.stability_threshold, confidence_threshold=self.confidence_threshold)

    def prompts(self, seed: int) -> list[list[int]]:
        """Lengths on both sides of the window, none alike; a single row has the longest."""
        generator = np.random.default_rng(seed)
        return [generator.integers(3, TEXT_CONFIG["vocab_size"], length).tolist() for length in (41, 5, 23)[: self.batch]]


CASES = (
    Case("the release's settings", 1, 1, entropy_bound=0.1, confidence_threshold=0.005, must_occur=("all steps",)),
    Case("one row settles", 1, 1, must_occur=("settles",)),
    Case("rows settle apart", 3, 1, must_occur=("settles", "steps differ")),
    Case("three canvases", 1, 3, max_denoising_steps=36, must_occur=("settles",)),
    Case("three rows, three canvases", 3, 3, max_denoising_steps=24, must_occur=("settles", "steps differ")),
    Case("stable for two steps", 3, 1, stability_threshold=2, must_occur=("settles", "steps differ")),
    Case("confident is enough", 3, 1, stability_threshold=0, must_occur=("settles",)),
    Case("few steps", 3, 1, max_denoising_steps=5, must_occur=("all steps",)),
    Case("one row ends", 3, 3, max_denoising_steps=24, ending_row=1, must_occur=("settles", "one ends", "padding")),
    Case("the only row ends", 1, 3, ending_row=0, must_occur=("all end early", "padding")),
)


@dataclass
class Run:
    """One run of our sampler: the result, every step, the logits read at each step."""

    generation: Generation
    history: list[DenoisingStep]
    logits: list[Tensor]


def our_generate(denoiser: Denoiser, prompts: list[list[int]], config: GenerationConfig, eos_ids: Sequence[int], draws: Draws) -> Run:
    history, logits, plain = [], [], denoiser.denoise

    def watched(canvas: Tensor, self_conditioning_logits: Tensor | None, rows: Tensor) -> Tensor:
        logits.append(plain(canvas, self_conditioning_logits, rows))
        return logits[-1]

    with mock.patch.object(denoiser, "denoise", watched):
        generation = generate(denoiser, prompts, config, eos_ids=eos_ids, pad_id=PAD_ID, draws=draws, observe=history.append)
    return Run(generation, history, logits)


def events(case: Case, generation: Generation) -> set[str]:
    """What happened in a run, in the words of `Case.must_occur`."""
    steps, ended = generation.steps, generation.ended
    facts = {
        "all steps": bool((steps == case.max_denoising_steps).any()),
        "settles": bool(((steps > 0) & (steps < case.max_denoising_steps)).any()),
        "steps differ": len(set(steps[:, 0].tolist())) > 1,
        "one ends": int((steps[:, 1:] == 0).all(dim=1).sum()) == 1 and case.canvases > 1,
        "all end early": bool(ended.all()) and steps.shape[1] < case.canvases,
        "padding": bool((generation.lengths < CANVAS_LENGTH).any()),
    }
    return {name for name, true in facts.items() if true}


def smallest_margins(run: Run, routing: list[float], config: GenerationConfig, draws: Draws) -> dict[str, float]:
    """How near the run came to deciding otherwise: bound (nats), argmax (logits), sample (probability), routing (probability)."""
    bound, argmax, sample = [], [], []
    for step, logits in zip(run.history, run.logits, strict=True):
        rising = step.entropy.sort(dim=-1).values
        bound.append((rising.cumsum(-1) - rising - config.entropy_bound).abs().min().item())
        tempered = logits / temperature(step.step, config)
        best = tempered.topk(2, dim=-1).values
        argmax.append((best[..., 0] - best[..., 1]).min().item())
        uniforms = draws.uniforms(step.rows, step.canvas_index, step.step)[..., None]
        sample.append((tempered.double().softmax(-1).cumsum(-1)[..., :-1] - uniforms).abs().min().item())
    return {"bound": min(bound), "argmax": min(argmax), "sample": min(sample), "routing": min(routing)}


def routing_gaps(model: DiffusionGemmaForBlockDiffusion) -> list[float]:
    """A list that each routing call of the model extends by its smallest gap between the last chosen and the first rejected expert."""
    gaps, chosen = [], TEXT_CONFIG["top_k_experts"]

    def note(module, inputs, output) -> None:
        best = output[0].topk(chosen + 1, dim=-1).values
        gaps.append((best[:, chosen - 1] - best[:, chosen]).min().item())

    for stack in (model.model.decoder, model.model.encoder.language_model):
        for layer in stack.layers:
            layer.router.register_forward_hook(note)
    return gaps


def differences(run: Run, trace: OracleTrace) -> dict[str, int]:
    """Entries that differ, by what is compared; only the steps that a row needed are compared, ours and the oracle's being counted too."""
    counts = dict.fromkeys(("accepted", "canvas", "argmax"), 0)
    for step in run.history:
        for name in counts:
            theirs = getattr(trace, name)[step.canvas_index]
            if step.step >= len(theirs):
                counts[name] += step.accepted.numel()
            else:
                counts[name] += int((getattr(step, name) != theirs[step.step][list(step.rows)]).sum())
    ours, theirs = run.generation.steps, trace.steps()
    counts["steps"] = ours.numel() if ours.shape != theirs.shape else int(((ours != theirs) & (ours > 0)).sum())
    same_shape = run.generation.tokens.shape == trace.tokens.shape
    counts["tokens"] = int((run.generation.tokens != trace.tokens).sum()) if same_shape else trace.tokens.numel()
    counts["tokens/forward"] = int((run.generation.tokens_per_forward - trace.tokens_per_forward.double()).abs().gt(1e-6).sum())
    return counts


@dataclass(frozen=True)
class Prepared:
    """A case with the first seed whose run decides nothing by less than rounding; `margins` as in `smallest_margins`.

    `run` is the sampler's over the adapter.
    """

    case: Case
    seed: int
    model: DiffusionGemmaForBlockDiffusion
    prompts: list[list[int]]
    eos_ids: list[int]
    draws: Draws
    run: Run
    margins: dict[str, float]


def prepare(case: Case, first_seed: int) -> Prepared:
    """Try seeds from `first_seed` on; one is passed over, before the oracle is asked, for a near tie or if an event does not occur."""
    tried = []
    for seed in range(first_seed, first_seed + SEEDS_TRIED):
        model, prompts, config = tiny_oracle(seed), case.prompts(seed), case.config()
        draws = CounterDraws(seed, canvas_length=CANVAS_LENGTH, vocab_size=TEXT_CONFIG["vocab_size"])
        gaps = routing_gaps(model)
        eos_ids = [NO_EOS]
        run = our_generate(TransformersDenoiser(model, case.batch), prompts, config, eos_ids, draws)
        if case.ending_row is not None:
            eos_ids = eos_of_row(run.generation, case.ending_row) + [NO_EOS]
            run = our_generate(TransformersDenoiser(model, case.batch), prompts, config, eos_ids, draws)
        margins = smallest_margins(run, gaps, config, draws)
        missing = set(case.must_occur) - events(case, run.generation)
        if not missing and all(margins[name] >= NEAR_TIE[name] for name in margins):
            return Prepared(case, seed, model, prompts, eos_ids, draws, run, margins)
        tried.append(f"seed {seed}: " + (f"did not occur: {sorted(missing)}" if missing else f"near tie: {margins}"))
    raise AssertionError(f"case {case.name!r}: no usable seed\n" + "\n".join(tried))


def eos_of_row(generation: Generation, row: int) -> list[int]:
    """A token that `row` commits inside its first canvas and no other row ever commits; empty when there is none."""
    first = generation.tokens[row, : CANVAS_LENGTH - 1].tolist()
    others = {token for other in range(len(generation.tokens)) if other != row for token in generation.row(other)}
    return [token for token in first if token not in others and token != PAD_ID][:1]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, help="First seed of models, prompts and draws.")


def run(arguments: argparse.Namespace) -> int:
    """Compare all cases, print them and the figures; the number of missed figures."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    print(f"transformers {transformers.__version__}, torch {torch.__version__}; closest: how near a decision came to falling otherwise")
    print(f"{'case':<27} {'denoiser':<9}seed  {'steps of each row':<30} decisions differ  closest {' '.join(NEAR_TIE)}")
    figures = []
    for case in CASES:
        prepared = prepare(case, arguments.seed)
        trace = oracle_generate(prepared.model, prepared.prompts, case.config(), prepared.eos_ids, prepared.draws)
        ours = our_generate(
            our_session(prepared.model, case.batch), prepared.prompts, case.config(), prepared.eos_ids, prepared.draws)
        figures += [compare_case(prepared, trace, name, run) for name, run in (("adapter", prepared.run), ("ours", ours))]
    return print_figures("sampler", figures)


def compare_case(prepared: Prepared, trace: OracleTrace, name: str, ours: Run) -> Figure:
    """Print the line of a case and denoiser, and give the number of differences as a figure."""
    case = prepared.case
    found = differences(ours, trace)
    compared = sum(3 * step.accepted.numel() for step in ours.history) + ours.generation.tokens.numel()
    steps = " ".join(",".join(map(str, row)) for row in ours.generation.steps.tolist())
    margins = " ".join(f"{value:.0e}" for value in prepared.margins.values())
    print(f"{case.name:<27} {name:<9}{prepared.seed:>4}  {steps:<30} {compared:>9} {sum(found.values()):>6}  {margins}", flush=True)
    note = ", ".join(f"{what} {count}" for what, count in found.items() if count) or ", ".join(case.must_occur)
    return Figure(f"{case.name}, {name}: decisions that differ", sum(found.values()), 0, note)
