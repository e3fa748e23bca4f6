"""Our sampler against transformers' generate, with the same draws injected into both: accepted sets, canvases, steps and tokens.

A tiny random DiffusionGemma of transformers is the reference (fp32; layer scalars, norms, router scales and windows that are not 1). Our
sampler runs over two denoisers: `adapter` (transformers' own modules, one row at a time, no padding: the sampler alone is tested) and
`ours` (this project's model with the same weights: the whole of generation is tested). Prompts of a batch differ in length: transformers
pads them on the left, we do not. Usage: python tools/verify.py sampler [--seed N]
"""
from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.models.diffusion_gemma.configuration_diffusion_gemma import DiffusionGemmaConfig
from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSampler, EntropyBoundSamplerConfig
from transformers.models.diffusion_gemma.modeling_diffusion_gemma import DiffusionGemmaForBlockDiffusion

from megatron_dllm.config import GenerationConfig
from megatron_dllm.diffusion.sampler import CounterDraws, Denoiser, DenoisingStep, Draws, Generation, generate, temperature

CANVAS_LENGTH = 16
PAD_ID = 0
NO_EOS = 511  # an id that no case produces; the oracle wants at least one
SEEDS_TRIED = 20
# Two implementations may round a decision differently when its two sides are closer than this: in fp32, logits of size 30 differ by some 1e-5.
NEAR_TIE = {"bound": 1e-5, "argmax": 2e-5, "sample": 1e-6, "routing": 1e-6}
SHARPNESS = 6.0  # multiplies the final norm, so that logits reach the soft cap's bend and some tokens are sure
TEXT_CONFIG = dict(
    vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    global_head_dim=32, num_global_key_value_heads=1, sliding_window=24, num_experts=8, top_k_experts=2, moe_intermediate_size=32,
    use_bidirectional_attention="vision", pad_token_id=PAD_ID)
# Small enough that a step does not amplify rounding: a random model with a strong self-conditioning signal is chaotic, and after some ten
# steps nothing could be compared.
WEIGHT_STD = {"embed_tokens": 0.15, "self_conditioning": 0.03, "router": 1.0}
VISION_CONFIG = dict(model_type="gemma4_vision", hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                     num_key_value_heads=2, head_dim=32)


def tiny_oracle(seed: int) -> DiffusionGemmaForBlockDiffusion:
    """A random DiffusionGemma in fp32 whose norms, scales and layer scalars (of both passes) all differ from 1 and from each other."""
    config = DiffusionGemmaConfig(text_config=dict(TEXT_CONFIG), vision_config=dict(VISION_CONFIG), canvas_length=CANVAS_LENGTH)
    config._attn_implementation = config.text_config._attn_implementation = "sdpa"
    config._experts_implementation = config.text_config._experts_implementation = "eager"
    torch.manual_seed(seed)
    model = DiffusionGemmaForBlockDiffusion(config).eval()
    generator = torch.Generator().manual_seed(seed + 1)

    def spread(tensor: Tensor, low: float, high: float) -> None:
        tensor.copy_(low + (high - low) * torch.rand(tensor.shape, generator=generator))

    with torch.no_grad():
        for name, parameter in model.model.decoder.named_parameters():
            if parameter.ndim > 1:
                std = next((std for part, std in WEIGHT_STD.items() if part in name), 0.05)
                parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
            elif "q_norm" in name or "k_norm" in name:
                spread(parameter, 0.3, 0.7)
            else:  # other norms, router.scale, router.per_expert_scale
                spread(parameter, 0.6, 1.4)
        for stack in (model.model.decoder, model.model.encoder.language_model):
            for layer in stack.layers:
                spread(layer.layer_scalar, 0.7, 1.3)
        model.model.decoder.norm.weight.mul_(SHARPNESS)
    return model


class TransformersDenoiser:
    """`Denoiser` over transformers' own modules: a cache for each row, rows run one by one."""

    def __init__(self, model: DiffusionGemmaForBlockDiffusion, num_rows: int):
        self.model, self.num_rows = model, num_rows
        self.vocab_size = model.config.text_config.vocab_size
        self.canvas_length = model.config.canvas_length
        self.max_positions = model.config.text_config.max_position_embeddings
        self.dtype, self.device = model.dtype, model.device
        self.caches = [DynamicCache(config=model.config.text_config) for _ in range(num_rows)]

    def encode(self, tokens: Sequence[Tensor]) -> None:
        for cache, row_tokens in zip(self.caches, tokens, strict=True):
            if len(row_tokens):
                self.model.model.encoder.language_model(input_ids=row_tokens[None], cache=cache)

    def denoise(self, canvas: Tensor, self_conditioning_logits: Tensor | None, rows: Tensor) -> Tensor:
        signals = [None] * len(rows) if self_conditioning_logits is None else self_conditioning_logits.split(1)
        outputs = [self.model(decoder_input_ids=ids, self_conditioning_logits=signal, cache=self.caches[row])
                   for ids, signal, row in zip(canvas.split(1), signals, rows.tolist(), strict=True)]
        return torch.cat([output.logits for output in outputs])


@dataclass
class OracleTrace:
    """What transformers' generate did: for each canvas, for each step, tensors of the whole batch."""

    accepted: list[list[Tensor]] = field(default_factory=list)
    canvas: list[list[Tensor]] = field(default_factory=list)
    argmax: list[list[Tensor]] = field(default_factory=list)
    finished: list[list[Tensor]] = field(default_factory=list)
    tokens: Tensor | None = None
    tokens_per_forward: Tensor | None = None

    def steps(self) -> Tensor:
        """int64 [R, K]: the step at which each row's canvas finished, or all of them (rows that ended earlier go on in the oracle)."""
        return torch.stack([torch.stack(canvas).logical_not().sum(dim=0).add(1).clamp(max=len(canvas)) for canvas in self.finished], dim=1)


class InjectedSampler(EntropyBoundSampler):
    """transformers' sampler with our draws in place of torch.randint; notes what was accepted."""

    def __init__(self, model: DiffusionGemmaForBlockDiffusion, config: GenerationConfig, draws: Draws, rows: Sequence[int]):
        super().__init__(EntropyBoundSamplerConfig(config.entropy_bound), model.config.canvas_length, model.config.text_config.vocab_size,
                         config.max_denoising_steps)
        self.draws, self.rows, self.trace = draws, rows, OracleTrace()
        self.canvas_index, self.step = -1, 0

    def initialize_canvas(self, batch_size, device):
        if self.trace.accepted and self.step < len(self.trace.accepted[-1]):  # called from renoise_canvas
            self.step += 1
            return self.draws.fresh_tokens(self.rows, self.canvas_index, self.step - 1)
        self.canvas_index, self.step = self.canvas_index + 1, 0
        for steps in (self.trace.accepted, self.trace.canvas, self.trace.argmax, self.trace.finished):
            steps.append([])
        return self.draws.initial_canvas(self.rows, self.canvas_index)

    def accept_canvas(self, current_canvas, denoiser_canvas, logits, cur_step):
        accepted = super().accept_canvas(current_canvas, denoiser_canvas, logits, cur_step)
        self.trace.accepted[-1].append(self.accepted_token_mask.clone())
        return accepted

    def multinomial(self, probabilities: Tensor, num_samples: int) -> Tensor:
        """Replaces torch.multinomial: inverse cumulative in float64 by numpy, apart from ours."""
        uniforms = self.draws.uniforms(self.rows, self.canvas_index, self.step).flatten().numpy()
        cumulative = np.cumsum(probabilities.double().numpy(), axis=-1)
        picks = [np.searchsorted(row, u * row[-1], side="right") for row, u in zip(cumulative, uniforms, strict=True)]
        return torch.tensor(picks)[:, None]


def oracle_generate(
    model: DiffusionGemmaForBlockDiffusion, prompts: Sequence[Sequence[int]], config: GenerationConfig, eos_ids: Sequence[int], draws: Draws
) -> OracleTrace:
    """Run transformers' generate on left-padded prompts with `draws` injected; everything it did, step by step."""
    longest = max(map(len, prompts))
    input_ids = torch.tensor([[PAD_ID] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    attention_mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    sampler = InjectedSampler(model, config, draws, range(len(prompts)))
    trace, plain_step = sampler.trace, model._denoising_step

    def traced_step(**inputs):
        result = plain_step(**inputs)
        canvas, argmax, _, finished = result
        for steps, value in ((trace.canvas, canvas), (trace.argmax, argmax), (trace.finished, finished)):
            steps[-1].append(value.clone())
        return result

    with (mock.patch.object(model, "_prepare_sampler", lambda _: sampler), mock.patch.object(model, "_denoising_step", traced_step),
          mock.patch("torch.multinomial", sampler.multinomial)):
        output = model.generate(
            input_ids, attention_mask=attention_mask, max_new_tokens=config.max_new_tokens, max_denoising_steps=config.max_denoising_steps,
            t_min=config.t_min, t_max=config.t_max, stability_threshold=config.stability_threshold, eos_token_id=list(eos_ids),
            confidence_threshold=config.confidence_threshold, pad_token_id=PAD_ID)
    trace.tokens, trace.tokens_per_forward = output.sequences[:, longest:], output.tokens_per_forward
    return trace


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
    Case("three canvases", 1, 3, must_occur=("settles",)),
    Case("three rows, three canvases", 3, 3, must_occur=("settles", "steps differ")),
    Case("stable for two steps", 3, 1, stability_threshold=2, must_occur=("settles", "steps differ")),
    Case("confident is enough", 3, 1, stability_threshold=0, must_occur=("settles",)),
    Case("few steps", 3, 1, max_denoising_steps=5, must_occur=("all steps",)),
    Case("one row ends", 3, 3, ending_row=1, must_occur=("settles", "one ends", "padding")),
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
    """A case with the first seed whose run decides nothing by less than rounding; `margins` as in `smallest_margins`."""

    case: Case
    seed: int
    model: DiffusionGemmaForBlockDiffusion
    prompts: list[list[int]]
    eos_ids: list[int]
    draws: Draws
    run: Run
    margins: dict[str, float]


def prepare(case: Case, first_seed: int) -> Prepared:
    """Try seeds from `first_seed` on; one is passed over, before the oracle is asked, for a near tie or when the case's events do not occur."""
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


DENOISERS: dict[str, Callable[[DiffusionGemmaForBlockDiffusion, int], Denoiser]] = {"adapter": TransformersDenoiser}


def run(arguments: Sequence[str]) -> int:
    """Compare all cases, print a table and the figures; 0 when nothing differs."""
    parser = argparse.ArgumentParser(prog="verify.py sampler", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="first seed of models, prompts and draws (default 0)")
    seed = parser.parse_args(arguments).seed
    print(f"{'case':<27} {'denoiser':<9} rows canvases seed  {'steps of each row':<42} decisions differ  closest (bound argmax sample routing)")
    decisions, wrong = 0, 0
    for case in CASES:
        prepared = prepare(case, seed)
        trace = oracle_generate(prepared.model, prepared.prompts, case.config(), prepared.eos_ids, prepared.draws)
        for name, build in DENOISERS.items():
            ours = our_generate(build(prepared.model, case.batch), prepared.prompts, case.config(), prepared.eos_ids, prepared.draws)
            found = differences(ours, trace)
            compared = sum(3 * step.accepted.numel() for step in ours.history) + ours.generation.tokens.numel()
            decisions, wrong = decisions + compared, wrong + sum(found.values())
            steps = " ".join(",".join(map(str, row)) for row in ours.generation.steps.tolist())
            margins = " ".join(f"{value:.0e}" for value in prepared.margins.values())
            print(f"{case.name:<27} {name:<9} {case.batch:>4} {case.canvases:>8} {prepared.seed:>4}  {steps:<42} {compared:>9} "
                  f"{sum(found.values()):>6}  {margins}")
            if any(found.values()):
                print("    differ:", ", ".join(f"{what} {count}" for what, count in found.items() if count))
    print(f"sampler: {len(CASES)} cases x {len(DENOISERS)} denoisers, {decisions} accepted sets, tokens and steps compared with transformers, "
          f"{wrong} differ (0 allowed)")
    return 1 if wrong else 0
