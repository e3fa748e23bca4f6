"""The sampler: turns prompts into text, one canvas after another, each by a few denoising steps (entropy-bounded acceptance).

    A active rows, C canvas positions, V vocabulary

For each canvas: start from uniform random tokens; at each step read the model's logits, accept the positions whose summed entropy stays
under a bound, draw all others anew; stop a row once its most likely canvas has stopped changing and the model is sure of it; commit that
most likely canvas. Sources: DiffusionGemma report (arXiv:2608.00146) and, for the entropy bound, arXiv:2505.24857.
Knows no model and no process: whatever offers the two calls of `Denoiser` can be sampled from.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_dllm.config import GenerationConfig, format_problems, problems_of
from megatron_dllm.diffusion.random import Stream, words
from megatron_dllm.kernels.copies import HostCopy, upload
from megatron_dllm.kernels.launch import takes

# Softmax, logarithm and running sums of a [positions, V] slice are live at once; at V = 262144 a slice of this size holds 128 positions.
READ_CHUNK_BYTES = 128 * 2**20
# A row whose mean entropy was so many times the one under which it may settle hardly settles at the next step.
FAR = 50


class Denoiser(Protocol):
    """A batch of R rows in the middle of generation: the model, and for every row what its clean tokens left behind (keys and values).

    `dtype` is that of the weights: the sampler hands logits back in it, as the released sampler does. `runs_ahead`: whether
    denoise_and_read returns before the device is done, so that a step may be asked for before the host has looked at the one before.
    """

    num_rows: int
    vocab_size: int
    canvas_length: int
    max_positions: int
    dtype: torch.dtype
    device: torch.device
    runs_ahead: bool

    def encode(self, tokens: Sequence[Tensor]) -> None:
        """Append clean tokens to each row: `tokens` has R entries, int64 [n] on `device`; n may differ, and 0 leaves a row as it is."""
        ...

    def denoise(self, canvas: Tensor, self_conditioning_logits: Tensor | None, rows: Tensor) -> Tensor:
        """Logits [A, C, V] (fp32, or fp64 of an fp64 model) of the canvases of the rows listed in `rows`.

        canvas                    int64 [A, C]       stands right after everything encoded for its row so far
        self_conditioning_logits  dtype [A, C, V]    None: no signal (the first step of a canvas)
        rows                      int64 [A]          rising; rows that have finished are not asked for again
        """
        ...

    def prepare(self, inputs: StepInputs) -> None:
        """Have these ready for the next step; what is prepared again replaces what was. Queued before the host waits for the step under
        way, so that the device does not wait for the host in its turn."""
        ...

    def denoise_and_read(self) -> LogitsReading:
        """read_logits of `denoise` for what was prepared last. The reading's logits may be overwritten by the next call."""
        ...


class Reader(Protocol):
    """What reads a step's logits at fixed addresses: read_product, or what is asked for instead."""

    def __call__(self, product: Tensor, softcap: float | None, temperature: Tensor, uniforms: Tensor, *,
                 kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See read_product. The device alone must know what it is given, so that a recording serves every step."""
        ...


@dataclass(frozen=True)
class StepInputs:
    """What a step reads: canvas, logits (those of the step before) and rows as in Denoiser.denoise; uniforms float64 [A, C]."""

    canvas: Tensor
    logits: Tensor | None
    rows: Tensor
    temperature: float
    uniforms: Tensor

    def keep(self, rows: Tensor) -> StepInputs:
        """Those of the rows at the indices `rows` alone; there are logits."""
        return StepInputs(self.canvas[rows], self.logits[rows], self.rows[rows], self.temperature, self.uniforms[rows])


class Unrecorded:
    """The last two calls of a Denoiser that has nothing better than the first."""

    runs_ahead = False
    inputs: StepInputs

    def prepare(self, inputs: StepInputs) -> None:
        self.inputs = inputs

    def denoise_and_read(self: Denoiser) -> LogitsReading:
        inputs = self.inputs
        logits = self.denoise(inputs.canvas, inputs.logits, inputs.rows)
        return read_logits(logits, inputs.temperature, inputs.uniforms, self.dtype)


class Draws(Protocol):
    """Every random decision of the sampler. `rows` are indices into the batch, `step` counts up from 0; tensors may be on any device."""

    def initial_canvas(self, rows: Sequence[int], canvas: int) -> Tensor:
        """int64 [A, C], uniform over the vocabulary."""
        ...

    def uniforms(self, rows: Sequence[int], canvas: int, step: int) -> Tensor:
        """float64 [A, C] in [0, 1): picks each position's sample by the inverse of the cumulative distribution."""
        ...

    def fresh_tokens(self, rows: Sequence[int], canvas: int, step: int) -> Tensor:
        """int64 [A, C], uniform over the vocabulary: what positions that were not accepted become."""
        ...


class CounterDraws:
    """The default draws: pure functions of (seed, row key, canvas, step, position), so a row does not depend on the batch around it.

    `row_keys` names the rows of the batch for good (the prompt's index in its file, say); without it row r has key r.
    """

    def __init__(self, seed: int, *, canvas_length: int, vocab_size: int, row_keys: Sequence[int] | None = None):
        self.seed, self.canvas_length, self.vocab_size, self.row_keys = seed, canvas_length, vocab_size, row_keys

    def initial_canvas(self, rows: Sequence[int], canvas: int) -> Tensor:
        return self._tokens(rows, canvas, block=0)

    def uniforms(self, rows: Sequence[int], canvas: int, step: int) -> Tensor:
        return torch.from_numpy(self._uint32(rows, canvas, block=1 + 2 * step) / 2.0**32)

    def fresh_tokens(self, rows: Sequence[int], canvas: int, step: int) -> Tensor:
        return self._tokens(rows, canvas, block=2 + 2 * step)

    def _tokens(self, rows: Sequence[int], canvas: int, *, block: int) -> Tensor:
        return torch.from_numpy(((self._uint32(rows, canvas, block) * np.uint64(self.vocab_size)) >> np.uint64(32)).astype(np.int64))

    def _uint32(self, rows: Sequence[int], canvas: int, block: int) -> np.ndarray:
        """uint64 [A, C] below 2^32. A canvas's sequence of words is dealt out in blocks of C: start, then two for every step."""
        keys = rows if self.row_keys is None else [self.row_keys[row] for row in rows]
        count = self.canvas_length
        drawn = [words((self.seed, int(Stream.GENERATE), key, canvas), block * count, count) for key in keys]
        return np.stack(drawn) >> np.uint64(32)


@dataclass(frozen=True)
class DenoisingStep:
    """What one step did to the rows still denoising; tensors on the CPU. For drawing and for tests.

        rows [A] · canvas, accepted, argmax, entropy [A, C]: the canvas after the step (accepted positions hold their sample, the others
        fresh noise), where it was accepted, the most likely tokens, and the entropy of each position in nats
        settled [A]: rows that stop here with `argmax` as their canvas
    """

    canvas_index: int
    step: int
    rows: tuple[int, ...]
    canvas: Tensor
    accepted: Tensor
    argmax: Tensor
    entropy: Tensor
    settled: Tensor


Observer = Callable[[DenoisingStep], None]


@dataclass(frozen=True)
class Generation:
    """What came out, R rows and K canvases (fewer than asked for when every row ended early).

        tokens   int64 [R, K * C]  generated tokens without the prompt; padding after a row's first end-of-sequence token
        lengths  int64 [R]         tokens up to that end (included), else K * C
        steps    int64 [R, K]      denoising steps of each row's canvases; 0 where the row had ended before
        ended    bool  [R]         whether the row produced an end-of-sequence token
    """

    tokens: Tensor
    lengths: Tensor
    steps: Tensor
    ended: Tensor
    pad_id: int

    @property
    def forwards(self) -> Tensor:
        """int64 [R]: canvas forwards each row needed (those it waited through are not counted)."""
        return self.steps.sum(dim=1)

    @property
    def tokens_per_forward(self) -> Tensor:
        """float64 [R]: generated tokens that are not padding, over the row's canvas forwards."""
        return (self.tokens != self.pad_id).sum(dim=1).double() / self.forwards

    @property
    def effective_steps(self) -> Tensor:
        """float64 [R]: mean denoising steps of the canvases that the row denoised."""
        return self.forwards.double() / (self.steps > 0).sum(dim=1)

    def row(self, index: int) -> list[int]:
        """The row's tokens through its end, without padding."""
        return self.tokens[index, : self.lengths[index]].tolist()


@torch.no_grad()
def generate(
    denoiser: Denoiser,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    *,
    eos_ids: Sequence[int],
    pad_id: int,
    draws: Draws,
    observe: Observer | None = None,
) -> Generation:
    """Continue every prompt by ceil(max_new_tokens / C) whole canvases, or fewer where a row ends before.

    `denoiser` must be fresh (nothing encoded). ValueError for prompts that do not fit it and for settings that make no sense. `observe`
    sees every step as it happens.
    """
    if len(prompts) != denoiser.num_rows:
        raise ValueError(f"{len(prompts)} prompts for a denoiser of {denoiser.num_rows} rows; make it for as many rows as prompts")
    if problems := problems_of(config):
        raise ValueError(format_problems(problems))
    check_prompts(denoiser, prompts, config)
    num_canvases = math.ceil(config.max_new_tokens / denoiser.canvas_length)
    pending = [torch.tensor(prompt, dtype=torch.long, device=denoiser.device) for prompt in prompts]
    ended = torch.zeros(len(prompts), dtype=torch.bool)
    canvases, steps = [], []
    for canvas_index in range(num_canvases):
        denoiser.encode(pending)
        active = (~ended).nonzero()[:, 0]
        settled, taken = _denoise_canvas(denoiser, active, canvas_index, config, draws, observe)
        tokens = torch.full((len(prompts), denoiser.canvas_length), pad_id)
        tokens[active], now_ended = end_at_eos(settled, eos_ids, pad_id)
        canvases.append(tokens)
        steps.append(torch.zeros(len(prompts), dtype=torch.long).index_copy(0, active, taken))
        ended[active] = now_ended
        if ended.all():
            break
        pending = [canvas[:0] if over else canvas for canvas, over in zip(tokens.to(denoiser.device), ended.tolist(), strict=True)]
    return _result(torch.cat(canvases, dim=1), torch.stack(steps, dim=1), ended, eos_ids, pad_id)


def check_prompts(denoiser: Denoiser, prompts: Sequence[Sequence[int]], config: GenerationConfig) -> None:
    """ValueError for the first prompt that, with its new canvases, is longer than the model allows, or has a token it does not know."""
    num_canvases = math.ceil(config.max_new_tokens / denoiser.canvas_length)
    new_tokens = num_canvases * denoiser.canvas_length
    for row, prompt in enumerate(prompts):
        if len(prompt) + new_tokens > denoiser.max_positions:
            raise ValueError(
                f"prompt {row} has {len(prompt)} tokens and {num_canvases} canvases of {denoiser.canvas_length} follow it, but the model"
                f" allows {denoiser.max_positions} positions; shorten the prompt to {max(denoiser.max_positions - new_tokens, 0)} tokens"
                " or lower --max-new-tokens")
        outside = [token for token in prompt if not 0 <= token < denoiser.vocab_size]
        if outside:
            raise ValueError(f"prompt {row} has token {outside[0]}, outside the model's vocabulary of {denoiser.vocab_size};"
                             " use the tokenizer that the model was trained with")


def _denoise_canvas(
    denoiser: Denoiser, active: Tensor, canvas_index: int, config: GenerationConfig, draws: Draws, observe: Observer | None
) -> tuple[Tensor, Tensor]:
    """The committed canvases [A, C] of the `active` rows and the steps [A] that each took; both on the CPU.

    Rows that settle are dropped from the batch, so the others never pay for them. Where a step that is hardly the last of any row is under
    way, the next one is asked for before the host looks at it; a row that settles all the same goes through that one for nothing.
    """
    device = denoiser.device
    rows, moved_rows = active.tolist(), upload(active, device)
    committed = torch.empty(len(rows), denoiser.canvas_length, dtype=torch.long)
    taken = torch.empty(len(rows), dtype=torch.long)
    slots = torch.arange(len(rows))  # where each row still denoising stands in `committed`
    stability, least = Stability(config.stability_threshold), 0.0
    canvas, uniforms = (upload(x, device) for x in (draws.initial_canvas(rows, canvas_index), draws.uniforms(rows, canvas_index, 0)))
    denoiser.prepare(StepInputs(canvas, None, moved_rows, temperature(0, config), uniforms))
    reading = denoiser.denoise_and_read()
    for step in range(config.max_denoising_steps):
        last = step == config.max_denoising_steps - 1
        # Drawn while the device works.
        fresh = upload(draws.fresh_tokens(rows, canvas_index, step), device)
        accepted = accept(reading.entropy, config.entropy_bound)
        canvas, spread = torch.where(accepted, reading.sample, fresh), reading.entropy.mean(dim=-1)
        fetched = HostCopy(stability.update(reading.argmax) & (spread < config.confidence_threshold), spread)
        ahead = None
        if not last:
            uniforms = upload(draws.uniforms(rows, canvas_index, step + 1), device)
            inputs = StepInputs(canvas, reading.logits, moved_rows, temperature(step + 1, config), uniforms)
            denoiser.prepare(inputs)
            if denoiser.runs_ahead and (step < config.stability_threshold or least >= FAR * config.confidence_threshold):
                ahead = denoiser.denoise_and_read()
        settled, spread = fetched.wait()
        done = torch.ones_like(settled) if last else settled
        if observe is not None:
            observe(DenoisingStep(canvas_index, step, tuple(rows), canvas.cpu(), accepted.cpu(), reading.argmax.cpu(),
                                  reading.entropy.cpu(), done))
        if done.any():
            committed[slots[done]], taken[slots[done]] = reading.argmax.cpu()[done], step + 1
            if done.all():
                break
            going = (~done).nonzero()[:, 0]
            kept = upload(going, device)
            slots, rows, moved_rows = slots[going], [rows[i] for i in going.tolist()], moved_rows[kept]
            stability.keep(kept)
            if ahead is None:
                denoiser.prepare(inputs.keep(kept))
            else:
                ahead = ahead.keep(kept)
        least = spread[~done].min().item()
        reading = denoiser.denoise_and_read() if ahead is None else ahead
    return committed, taken


def temperature(step: int, config: GenerationConfig) -> float:
    """Temperature of the step that comes after `step` others: falls linearly from t_max; the last of N has t_min + (t_max - t_min) / N."""
    remaining = config.max_denoising_steps - step
    return config.t_min + (config.t_max - config.t_min) * (remaining / config.max_denoising_steps)


@dataclass(frozen=True)
class LogitsReading:
    """What the sampler takes from one forward: logits [A, C, V] after temperature, sample, argmax and entropy [A, C]."""

    logits: Tensor
    sample: Tensor
    argmax: Tensor
    entropy: Tensor

    def keep(self, rows: Tensor) -> LogitsReading:
        """That of the rows at the indices `rows` alone."""
        return LogitsReading(self.logits[rows], self.sample[rows], self.argmax[rows], self.entropy[rows])


def read_logits(logits: Tensor, temperature: float | Tensor, uniforms: Tensor, dtype: torch.dtype) -> LogitsReading:
    """Temper `logits` [A, C, V] (kept in `dtype` for self-conditioning) and read off sample, argmax and entropy.

    Works on slices of positions, so that nothing of size [A, C, V] is made but the kept logits.
    """
    num_positions, vocab_size, shape = uniforms.numel(), logits.shape[-1], uniforms.shape
    if takes(logits):
        from megatron_dllm.kernels import sampling as kernel  # Triton is there with CUDA alone

        kept, sample, argmax, entropy = kernel.read_logits(
            logits.reshape(num_positions, vocab_size), temperature, uniforms.reshape(num_positions), dtype)
        return LogitsReading(kept.view(logits.shape), sample.view(shape), argmax.view(shape), entropy.view(shape))
    flat, flat_uniforms = logits.reshape(num_positions, vocab_size), uniforms.reshape(num_positions)
    kept = torch.empty_like(flat, dtype=dtype)
    sample, argmax = (torch.empty(num_positions, dtype=torch.long, device=logits.device) for _ in range(2))
    entropy = torch.empty(num_positions, dtype=logits.dtype, device=logits.device)
    chunk = max(1, READ_CHUNK_BYTES // (vocab_size * logits.element_size()))
    for start in range(0, num_positions, chunk):
        part = slice(start, start + chunk)
        scaled = flat[part] / temperature
        kept[part] = scaled
        argmax[part] = scaled.argmax(dim=-1)
        log_probabilities = torch.log_softmax(scaled, dim=-1)
        probabilities = log_probabilities.exp()
        entropy[part] = -(probabilities * log_probabilities).sum(dim=-1)
        sample[part] = invert_cumulative(probabilities, flat_uniforms[part])
    return LogitsReading(kept.view(logits.shape), sample.view(shape), argmax.view(shape), entropy.view(shape))


def read_product(product: Tensor, softcap: float | None, temperature: Tensor, uniforms: Tensor, *,
                 kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(sample, argmax, entropy) [N] of the logits softcap * tanh(product / softcap), without a cap `product` itself, [N, V].

    temperature [] is read on the device; `kept` [N, V] gets the logits over it.
    """
    if takes(product):
        from megatron_dllm.kernels import sampling as kernel  # Triton is there with CUDA alone

        return kernel.read_product(product, softcap, temperature, uniforms, kept)
    logits = product.to(torch.promote_types(product.dtype, torch.float32))
    reading = read_logits(logits if softcap is None else torch.tanh(logits / softcap) * softcap, temperature, uniforms, kept.dtype)
    kept.copy_(reading.logits)
    return reading.sample, reading.argmax, reading.entropy


def invert_cumulative(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """int64 [n]: for each row of `probabilities` [n, V] the token at quantile `uniforms` [n] in [0, 1); never one of probability zero."""
    cumulative = probabilities.cumsum(dim=-1)
    total = cumulative[:, -1]
    # Rounding may lift u * total to the total itself, past every token; stay one step below it.
    target = torch.minimum((uniforms.double() * total.double()).to(total.dtype), torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]


def accept(entropy: Tensor, bound: float) -> Tensor:
    """bool [A, C]: in order of rising entropy, the positions for which the entropies *before* them sum to `bound` at most.

    At least one position (the surest) is always accepted. Example, bound 0.1:

        entropy   0.50  0.01  0.08  0.03
        accepted     0     1     1     1        0.01 + 0.03 = 0.04 stands before 0.08; 0.12 before 0.50
    """
    rising, order = torch.sort(entropy, dim=-1, stable=True)
    chosen = rising.cumsum(dim=-1) - rising <= bound
    return torch.zeros_like(chosen).scatter(-1, order, chosen)


class Stability:
    """Tells which rows have had the same most likely canvas for the last `threshold` steps, the present one excluded."""

    def __init__(self, threshold: int):
        self.threshold = threshold
        self.history: list[Tensor] = []  # at most `threshold` canvases [A, C], the oldest first

    def update(self, argmax: Tensor) -> Tensor:
        """bool [A]: whether `argmax` [A, C] equals all of the last `threshold` canvases; then remember it."""
        if self.threshold == 0:
            return torch.ones(argmax.shape[0], dtype=torch.bool, device=argmax.device)
        stable = torch.full((argmax.shape[0],), len(self.history) == self.threshold, device=argmax.device)
        for earlier in self.history:
            stable &= (earlier == argmax).all(dim=-1)
        self.history = [*self.history, argmax][-self.threshold :]
        return stable

    def keep(self, rows: Tensor) -> None:
        """Forget all rows but those at the indices `rows`."""
        self.history = [canvas[rows] for canvas in self.history]


def end_at_eos(canvas: Tensor, eos_ids: Sequence[int], pad_id: int) -> tuple[Tensor, Tensor]:
    """`canvas` [A, C] with padding after each row's first end-of-sequence token, and whether the row has one (bool [A])."""
    is_eos = torch.isin(canvas, torch.tensor(list(eos_ids), dtype=canvas.dtype))
    after = is_eos.cumsum(dim=-1) - is_eos.long() > 0
    return canvas.masked_fill(after, pad_id), is_eos.any(dim=-1)


def _result(tokens: Tensor, steps: Tensor, ended: Tensor, eos_ids: Sequence[int], pad_id: int) -> Generation:
    is_eos = torch.isin(tokens, torch.tensor(list(eos_ids), dtype=tokens.dtype))
    # Of a row that ended, only its end may be left: padding that is itself an end-of-sequence token comes later.
    lengths = torch.where(ended, is_eos.long().argmax(dim=1) + 1, tokens.shape[1])
    return Generation(tokens, lengths, steps, ended, pad_id)
