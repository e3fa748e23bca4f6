"""Training a toy for a few steps by the project's own path: batches, model, buckets, optimizer; on one process it is the reference."""
from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dllm.config import ModelConfig, ObjectiveConfig, OptimizerConfig, RunConfig
from megatron_dllm.context_parallel.layout import SequenceLayout
from megatron_dllm.data.order import Row
from megatron_dllm.diffusion.batch_plan import PlannedExample, RowRequest, fit_example, plan_batch
from megatron_dllm.diffusion.inputs import MicrobatchInputs
from megatron_dllm.diffusion.random import DrawKey, Stream
from megatron_dllm.models.diffusion_gemma.build import UNSET, build_model
from megatron_dllm.models.diffusion_gemma.model import DiffusionGemma
from megatron_dllm.parallel import ParallelContext
from megatron_dllm.tensor_parallel import Initializer
from megatron_dllm.training.algorithms import Algorithm, adamw, sgd
from megatron_dllm.training.batches import Batch, BatchMaker
from megatron_dllm.training.optimizer import MasterOptimizer
from megatron_dllm.training.step import forward_backward
from verification.layout_cases import GLOBAL_BATCH, OBJECTIVES, RECOMPUTE, SUPERVISED_ROW, TOY, Case, Reference

STEPS = 3
SEQ_LENGTH = 64
BUCKET_ELEMENTS = 20_000  # several buckets in so small a model
LEARNING_RATE = {sgd: 1e-2, adamw: 1e-3}
PROMPTS, RESPONSES = (11, 0, 5, 3, 29, 17, 1), (13, 22, 2, 31, 9, 1, 16, 7)  # lengths that the rows take in turn
# Seeds that cannot be measured are passed over: where two routing probabilities are closer than LEAST_GAP rounding decides, and where
# fp32 on one process is off fp64 by more than LARGEST_ROUNDING of fp32's tolerance, two sums of it may differ by the tolerance itself.
LEAST_GAP, LARGEST_ROUNDING, SEEDS_TRIED = 1e-6, 0.4, 50
# A tensor whose gradient is smaller than this share of the whole is measured against the share.
SMALLEST_SHARE = 1e-6
WEIGHT_STD = {"embedding": 0.5, "router": 0.5, "": 0.1}  # by part of the name, the first that fits


class Examples:
    """The examples of three global batches (an ExampleSource): row n has one, or two when packed.

    Sample numbers are searched, so that the coins and, of "one supervised", the corruption fall as the case wants them.
    """

    name = "layouts"

    def __init__(self, reference: Reference, model: ModelConfig, objective: ObjectiveConfig, seed: int):
        self.seed, self.vocab_size = seed, model.vocab_size
        self.per_row = 2 if reference.lengths == "packed" else 1
        coins = OBJECTIVES[reference.objective][1]
        lengths, keys, sample = [], [], 0
        for index in range(STEPS * GLOBAL_BATCH * self.per_row):
            row, place = divmod(index, self.per_row)
            row %= GLOBAL_BATCH
            supervised = reference.lengths != "one supervised" or row == SUPERVISED_ROW
            prompt, response = PROMPTS[index % len(PROMPTS)], RESPONSES[index % len(RESPONSES)]
            if self.per_row == 2:
                prompt, response = prompt // 2, response // 2 + 1
            if not supervised and not objective.has_canvases:
                prompt, response = 0, 1  # no pair
            coin = row in coins and place == 0
            sample = _search(sample + 1, (prompt, response), model, objective, seed, coin=coin, supervised=supervised)
            lengths.append((prompt, response))
            keys.append((sample, 0))
        self.lengths, self.keys = np.array(lengths, np.int32), np.array(keys, np.int64)
        self.truncated = np.zeros(len(keys), bool)

    def __len__(self) -> int:
        return len(self.keys)

    def tokens(self, index: int) -> np.ndarray:
        return np.random.default_rng((self.seed, index)).integers(3, self.vocab_size, self.lengths[index].sum(), np.int32)

    def describe(self, index: int) -> str:
        return f"example {index}"

    def row(self, n: int) -> Row:
        """The order is that of the examples."""
        return Row(0, tuple(range(n * self.per_row, (n + 1) * self.per_row)))

    def rows_before(self, epoch: int) -> int:
        return epoch * len(self) // self.per_row


def _search(start: int, lengths: tuple[int, int], model: ModelConfig, objective: ObjectiveConfig, seed: int, *, coin: bool,
            supervised: bool) -> int:
    canvas_length = model.canvas_length if objective.has_canvases else 1
    fit = fit_example(*lengths, seq_length=SEQ_LENGTH, canvas_length=canvas_length)
    for sample in range(start, start + 10_000):
        key = DrawKey(seed, Stream.TRAIN, 0, sample, 0)
        plan = plan_batch([RowRequest([0], [key], [fit], [False])], objective, micro_batch_size=1)
        example = plan.microbatches[0][0].examples[0]
        if example.self_conditioned == coin and (not objective.has_canvases or (plan.denominators.decoder > 0) == supervised):
            return sample
    raise AssertionError(f"no sample after {start} with coin {coin}, supervised {supervised}")


def make_run(case: Case, seed: int) -> RunConfig:
    """The run of a case, as flags would give it."""
    objective = replace(OBJECTIVES[case.objective][0], **case.layout.objective)
    if case.lengths == "one supervised" and objective.has_canvases:
        objective = replace(objective, encoder_loss_weight=0.0, score_tokens="corrupted")
    run = RunConfig(
        model=replace(TOY, **case.layout.model), parallel=case.layout.parallel, objective=objective, training=RECOMPUTE[case.recompute],
        optimizer=OptimizerConfig(weight_decay=0.1, clip_grad=0.5))
    slots = case.layout.data_parallel_size * case.accumulation
    engine = case.layout.transformer_impl
    return run.with_values(
        transformer_impl=engine, moe_grouped_gemm_backend=engine,
        seed=seed, seq_length=SEQ_LENGTH, global_batch_size=GLOBAL_BATCH, micro_batch_size=GLOBAL_BATCH // slots, train_iters=STEPS)


def fill_weights(model: DiffusionGemma, seed: int) -> None:
    """Random weights by name, norms and scalars too: none of them is 1, so that a wrong shard or scalar shows.

    They are numbers of bf16, whatever the model's dtype, so that runs in all dtypes start alike.
    """
    draw = Initializer(seed, 1.0)

    def fill(target: Tensor, name: str, whole: Tensor) -> None:
        if whole.ndim > 1:
            whole = whole * next(std for part, std in WEIGHT_STD.items() if part in name)
        else:
            whole = (1 + 0.2 * whole.clamp(-2, 2)) * (0.4 if "q_norm" in name or "k_norm" in name else 1.0)
        target.copy_(whole.to(torch.bfloat16))

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            placement = parameter.placement
            fill(placement.region(parameter), name, placement.cut(draw(name, placement.shape, torch.float32)))
        for name, buffer in model.named_buffers():
            fill(buffer, name, draw(name, tuple(buffer.shape), torch.float32))


@dataclass
class Trainer:
    """One run of a case on this process."""

    case: Case
    context: ParallelContext
    dtype: torch.dtype
    seed: int
    algorithm: Algorithm
    examples: Examples
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    noise: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        run = make_run(self.case, self.seed)
        self.model = build_model(run, self.context, init=UNSET, dtype=self.dtype)
        fill_weights(self.model, self.seed)
        self.optimizer = MasterOptimizer(
            self.model, run.optimizer, self.context, distributed=run.parallel.use_distributed_optimizer, algorithm=self.algorithm,
            bucket_elements=BUCKET_ELEMENTS)
        if run.parallel.overlap_param_gather:
            self.optimizer.gather_beside_forward(self.model.layers.values())
        loss_dtype = torch.promote_types(self.dtype, torch.float32)
        self.maker = BatchMaker(run, self.examples, self.examples, Stream.TRAIN, self.context, loss_dtype)

    def gradients(self) -> float:
        """Forward and backward of the next batch; the gradient's norm. Finished gradients stay in the buckets."""
        step = len(self.losses)
        batch = self.maker.batch(range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH), step)
        inputs = tuple(batch.microbatches())
        self.noise |= noise_digests(batch, inputs, self.context)
        self.losses.append(forward_backward(self.model, self.optimizer, inputs).total.item())
        self.norms.append(self.optimizer.grad_norm().item())
        return self.norms[-1]

    def take_gradients(self, other: Trainer) -> None:
        """Have the first step's gradients from a run of the same case, dtype and weights, instead of computing them again."""
        assert not self.losses and (self.case, self.dtype, self.seed) == (other.case, other.dtype, other.seed)
        for ours, theirs in zip(self.optimizer.buckets.buckets, other.optimizer.buckets.buckets, strict=True):
            ours.gradients.copy_(theirs.gradients)
        self.losses.append(other.losses[0])
        self.norms.append(other.norms[0])

    def update(self) -> None:
        self.optimizer.step(LEARNING_RATE[self.algorithm], torch.tensor(self.norms[-1], dtype=torch.float64))


def noise_digests(batch: Batch, inputs: tuple[MicrobatchInputs, ...], context: ParallelContext) -> dict[int, str]:
    """By sample number, a digest of all that is random about an example: what the model reads of its canvases, its level and its coin."""
    digests = {}
    for microbatch, of_microbatch in zip(batch.plan.microbatches[context.dp.rank], inputs, strict=True):
        examples = microbatch.examples
        lengths = [len(example.canvases) * example.fit.canvas_length for example in examples]
        canvas, start = _whole_canvas(of_microbatch.canvas.tokens.numpy(), examples, batch, context), 0
        for example, length in zip(examples, lengths, strict=True):
            text = canvas[start:start + length].tobytes() + repr((example.noise, example.canvases, example.self_conditioned)).encode()
            digests[example.key.sample] = hashlib.sha256(text).hexdigest()
            start += length
        assert start == len(canvas), f"canvases of {start} tokens, {len(canvas)} in the microbatch"
    return digests


def _whole_canvas(own: np.ndarray, examples: Sequence[PlannedExample], batch: Batch, context: ParallelContext) -> np.ndarray:
    """The canvas tokens of a microbatch from those that each context-parallel rank's model reads."""
    if context.cp.size == 1:
        return own
    parts: list = [None] * context.cp.size
    dist.all_gather_object(parts, own, group=context.cp.handle)
    lengths = [example.fit.canvas_length for example in examples for _ in example.canvases]
    places = SequenceLayout.of(
        sum(example.fit.total for example in examples), np.repeat(np.arange(len(lengths)), lengths), ranks=context.cp.size,
        whole_canvases=batch.maker.run.objective.canvases_scored == "all").canvas
    whole = np.full(sum(lengths), -1)
    for place, part in zip(places, parts, strict=True):
        whole[place] = part
    return whole


@dataclass(frozen=True)
class FirstStep:
    """Loss, gradient norm and gradients (whole, by parameter name) of a first step."""

    loss: float
    norm: float
    gradients: Mapping[str, Tensor]


@dataclass(frozen=True)
class Trace:
    """What one process computed in fp64, tensors whole, by parameter name; `narrow`: its first step in fp32, where that was asked for."""

    seed: int
    routing_gap: float
    noise: Mapping[int, str]
    losses: tuple[float, ...]
    norms: tuple[float, ...]
    gradients: Mapping[str, Tensor]
    after_sgd: Mapping[str, Tensor]
    after_adamw: Mapping[str, Tensor]
    narrow: FirstStep | None


def reference_trace(case: Case, first_seed: int, device: torch.device, *, with_fp32: bool) -> Trace:
    """Train on this process alone. Seeds that cannot be measured (LEAST_GAP) are passed over, by rule: the next one is taken."""
    alone = ParallelContext.single(device)
    plain = case.alone
    for seed in range(first_seed, first_seed + SEEDS_TRIED):
        examples = make_examples(plain.reference, make_run(plain, seed))
        wide = Trainer(plain, alone, torch.float64, seed, sgd, examples)
        gaps, gradients = record_gaps(wide.model), first_gradients(wide)
        narrow = first_step(Trainer(plain, alone, torch.float32, seed, sgd, examples)) if with_fp32 else None
        if min(gaps) < LEAST_GAP or narrow is not None and LARGEST_ROUNDING < max(
                narrow_excess(narrow.gradients[name], gradients[name], wide.norms[0]) for name in gradients):
            continue
        adamw_run = second_run(wide)
        wide.update()
        finish(wide)
        if min(gaps) < LEAST_GAP:
            continue
        adamw_run.update()
        finish(adamw_run)
        return Trace(
            seed, min(gaps), wide.noise, tuple(wide.losses), tuple(wide.norms), gradients, parameters(wide), parameters(adamw_run),
            narrow)
    raise AssertionError(f"no seed that can be measured in {SEEDS_TRIED} from {first_seed}")


@functools.lru_cache
def make_examples(reference: Reference, run: RunConfig) -> Examples:
    """The examples that a reference and its cases train on."""
    return Examples(reference, run.model, run.objective, run.training.seed)


def narrow_excess(ours: Tensor, reference: Tensor, norm: float) -> float:
    """The largest |d| in units of fp32's tolerance, 1e-5 |ref| + 1e-7 |g| (docs/design.md section 3, rule 6); `norm` is |g|."""
    return largest((ours - reference).abs() / (1e-5 * reference.abs() + 1e-7 * norm))


def largest(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def second_run(first: Trainer) -> Trainer:
    """The same under AdamW, before its first update: the first step's gradients are those of `first`, which its update will drop."""
    run = Trainer(first.case, first.context, first.dtype, first.seed, adamw, first.examples)
    run.take_gradients(first)
    return run


def finish(run: Trainer) -> None:
    """The steps that are left."""
    while len(run.losses) < STEPS:
        run.gradients()
        run.update()
    run.optimizer.finish_gathers()


def first_step(run: Trainer) -> FirstStep:
    """Of one process."""
    gradients = first_gradients(run)
    return FirstStep(run.losses[0], run.norms[0], gradients)


def first_gradients(run: Trainer) -> dict[str, Tensor]:
    """Of one process, whose pieces are whole parameters."""
    run.gradients()
    return {piece.name: piece.gradient.view(piece.parameter.shape).cpu().clone() for piece in run.optimizer.buckets.pieces()}


def parameters(run: Trainer) -> dict[str, Tensor]:
    """This process's parameters."""
    return {name: parameter.detach().cpu().clone() for name, parameter in run.model.named_parameters()}


def record_gaps(model: DiffusionGemma) -> list[float]:
    """A list that gets, for every routing, the smallest difference between the k-th and the next probability (infinite without a next)."""
    gaps: list[float] = [math.inf]

    def record(module, _, routing) -> None:
        if len(routing.probabilities) and routing.probabilities.shape[1] > module.topk:
            top = routing.probabilities.detach().topk(module.topk + 1).values
            gaps.append((top[:, -2] - top[:, -1]).min().item())

    for block in model.layers.values():
        block.moe.router.register_forward_hook(record)
    return gaps
