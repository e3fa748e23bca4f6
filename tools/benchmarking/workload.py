"""What benchmarks run: a model of real or toy width with random weights, and microbatches of random tokens, without any file."""
from __future__ import annotations

import dataclasses
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from megatron_dllm.config import PRESETS, ModelConfig, ObjectiveConfig
from megatron_dllm.data_parallel import GradientBuckets, GradientSums, finalize_gradients
from megatron_dllm.diffusion.batch_plan import RowRequest, fit_example, plan_batch
from megatron_dllm.diffusion.inputs import MicrobatchInputs, PassOrder, to_device
from megatron_dllm.diffusion.passes import PassOptions, microbatch_inputs
from megatron_dllm.diffusion.random import DrawKey, Stream
from megatron_dllm.diffusion.streams import Streams, build_streams
from megatron_dllm.models.diffusion_gemma.model import DiffusionGemma
from megatron_dllm.parallel import ParallelContext, communication
from megatron_dllm.training.operations import TokenCounts, step_operations
from megatron_dllm.training.throughput import peak_of
from megatron_dllm.transformer.attention import SelfAttention
from megatron_dllm.transformer.token_pass import SequenceSplit

FIRST_TOKEN = 3  # below it stand pad, end and begin


def real_width(layers: Sequence[str]) -> ModelConfig:
    """The released model's widths with layers of these types, such as ["sliding"] * 5 + ["full"]."""
    return dataclasses.replace(PRESETS["diffusiongemma-26b-a4b"], num_layers=len(layers), layer_types=tuple(layers))


def toy_width(layers: Sequence[str]) -> ModelConfig:
    """The same layers at the toy preset's widths."""
    return dataclasses.replace(PRESETS["toy"], num_layers=len(layers), layer_types=tuple(layers))


# With routers as flat as the other weights make them, the last expert of a token counts as much as the first, and with a strong signal a
# draft's rounding is magnified: bf16 losses of two correct programs then differ by a percent.
STD = {"router": 2.0, "self_conditioning": 0.005}


class DeviceNormal:
    """Initial weights drawn on the device, fast; the same for the same name and seed, whatever the order."""

    def __init__(self, device: torch.device, seed: int = 0, std: float = 0.02):
        self.device, self.seed, self.std = device, seed, std

    def __call__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, expert: int | None = None) -> Tensor:
        key = np.random.SeedSequence([self.seed, *name.encode(), 0 if expert is None else expert + 1]).generate_state(2, np.uint32)
        generator = torch.Generator(self.device).manual_seed(int(key[0]) << 31 | int(key[1]) >> 1)
        std = next((std for part, std in STD.items() if part in name), self.std)
        return torch.empty(shape, dtype=dtype, device=self.device).normal_(std=std, generator=generator)

    def with_std(self, std: float) -> DeviceNormal:
        """The same draws, scaled."""
        return DeviceNormal(self.device, self.seed, std)


@torch.no_grad()
def calm(model: nn.Module) -> None:
    """Have each part of a layer add a tenth of the residual's size, and attention's scores spread by one instead of by head_dim^0.5.

    With norms of 1, six random layers make of bf16's rounding, and of an expert that it chooses otherwise, half a percent of the loss,
    between any two correct programs.
    """
    for block in model.layers.values():
        for norm in (block.post_attention_layernorm, block.post_feedforward_layernorm):
            norm.weight.mul_(0.1)
        if isinstance(block.attention, SelfAttention):
            block.attention.q_norm.weight.mul_(block.attention.head_dim ** -0.5)


def calm_model(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> DiffusionGemma:
    """A random model of one process, calm."""
    model = DiffusionGemma(config, context=ParallelContext.single(device), init=DeviceNormal(device), dtype=dtype)
    calm(model)
    return model


@dataclass(frozen=True)
class Workload:
    """A microbatch of B rows of S tokens, half of each a prompt: its streams on the host, as the model reads it, and counted."""

    batch: int
    seq_length: int
    streams: Streams
    inputs: MicrobatchInputs
    counts: TokenCounts

    @property
    def num_tokens(self) -> int:
        """Clean tokens: what throughput counts."""
        return self.batch * self.seq_length


def synthetic(config: ModelConfig, batch: int, seq_length: int, device: torch.device, *, passes: PassOrder = "shared",
              objective: ObjectiveConfig | None = None, seed: int = 0,
              split: SequenceSplit = SequenceSplit()) -> Workload:  # noqa: B008 (immutable)
    """Random tokens and the draws of `seed`; without an objective, one canvas a row, each self-conditioned."""
    objective = objective or ObjectiveConfig(self_conditioning_prob=1.0)
    generator = np.random.default_rng(seed)
    half = seq_length // 2
    fit = fit_example(half, seq_length - half, seq_length=seq_length, canvas_length=config.canvas_length)
    rows = [RowRequest([row], [DrawKey(seed, Stream.TRAIN, 0, row, 0)], [fit], [False]) for row in range(batch)]
    plan = plan_batch(rows, objective, micro_batch_size=batch)
    tokens = [generator.integers(FIRST_TOKEN, config.vocab_size, seq_length) for _ in range(batch)]
    streams = build_streams(plan.microbatches[0][0], tokens, objective, plan.denominators, vocab_size=config.vocab_size,
                            fill_token=config.fill_token_id)
    inputs = microbatch_inputs(streams, config, PassOptions(torch.float32, split=split), passes=passes)
    return Workload(batch, seq_length, streams, to_device(inputs, device), TokenCounts.of(plan, objective))


def utilization(config: ModelConfig, workload: Workload, ms: float, device: torch.device, *, frozen: bool = False) -> float:
    """MFU: the operations that a step of so many milliseconds needs, as a share of the device's peak; nan where that is not known.

    `frozen`: adapters alone are trained.
    """
    peak = peak_of(device, peak_tflops=None)
    return math.nan if peak is None else step_operations(config, workload.counts, frozen=frozen).model / (ms * 1e9 * peak.tflops)


def gradient_dtypes(parameters: Iterable[Tensor]) -> str:
    """The dtypes of the gradients that are there, such as "bfloat16"."""
    return " ".join(sorted({str(p.grad.dtype).removeprefix("torch.") for p in parameters if p.grad is not None}))


class Gradients:
    """What a step needs of an optimizer that is never stepped: masters and moments need not fit."""

    def __init__(self, model: nn.Module, context: ParallelContext):
        trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        self.buckets, self.context = GradientBuckets(trainable, context), context
        self.sums = GradientSums(self.buckets.pieces(), context)

    def finish_gradients(self) -> None:
        """As MasterOptimizer's."""
        finalize_gradients(self.buckets, self.context)

    def grad_norm(self) -> Tensor:
        """As MasterOptimizer's."""
        return self.sums.norm()

    def drop_gradients(self) -> None:
        """As MasterOptimizer's."""
        self.buckets.zero()


def release_memory(device: torch.device) -> None:
    """Give back what is no longer referred to, also from within cycles."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Timing:
    """Milliseconds a call: median, least and most; the most GiB of device memory that were held (0 on a CPU), CUDA graphs' pools and what
    the allocator has no use for included; what the last call returned."""

    median: float
    least: float
    most: float
    peak_gib: float
    value: float


def measure(step: Callable[[], float], device: torch.device, *, warmup: int = 2, repeats: int = 5) -> Timing:
    """Time `step`, which returns a number that it read from the device, so that nothing is left running."""
    return measure_in_turn([step], device, warmup=warmup, repeats=repeats)[0]


def measure_in_turn(steps: Sequence[Callable[[], float]], device: torch.device, *, warmup: int = 2, repeats: int = 5) -> list[Timing]:
    """Time each step once after the other, `repeats` times, so that a clock that changes meanwhile changes for all of them; the memory is
    that of all together."""
    release_memory(device)
    for step in steps:
        for _ in range(warmup):
            step()
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    times: list[list[float]] = [[] for _ in steps]
    values = [0.0] * len(steps)
    for _ in range(repeats):
        for number, step in enumerate(steps):
            start = time.perf_counter()
            values[number] = step()
            if on_gpu:
                torch.cuda.synchronize(device)
            times[number].append((time.perf_counter() - start) * 1e3)
    # Not what is allocated: a graph's memory is in a pool that counts as free between replays.
    peak = torch.cuda.max_memory_reserved(device) / 2**30 if on_gpu else 0.0
    return [Timing(statistics.median(own), min(own), max(own), peak, value) for own, value in zip(times, values, strict=True)]


def measure_ranks(step: Callable[[], float], context: ParallelContext, *, prepare: Callable[[], None], warmup: int = 2,
                  repeats: int = 5) -> Timing:
    """Time `step` on all ranks of a context together, `prepare` before each call not counted: of every call the slowest rank's time, of
    memory the largest peak, from before the warm-up on."""
    on_gpu, times = context.device.type == "cuda", []
    for number in range(warmup + repeats):
        prepare()
        communication.all_reduce(torch.zeros((), device=context.device), context.world)
        if on_gpu:
            torch.cuda.synchronize(context.device)
        start = time.perf_counter()
        value = step()
        if on_gpu:
            torch.cuda.synchronize(context.device)
        if number >= warmup:
            times.append((time.perf_counter() - start) * 1e3)
    peak = torch.cuda.max_memory_allocated(context.device) / 2**30 if on_gpu else 0.0
    slowest = communication.all_reduce(torch.tensor([*times, peak], device=context.device), context.world, "max").tolist()
    return Timing(statistics.median(slowest[:-1]), min(slowest[:-1]), max(slowest[:-1]), slowest[-1], value)
