"""Attention alone over a long document that several ranks share: ours and Transformer Engine's, time and bytes, forward and backward."""
from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_dllm.config import ModelConfig, RunConfig
from megatron_dllm.context_parallel.plan import Attending, ShardedPlan
from megatron_dllm.data.order import Order
from megatron_dllm.data.source import ExampleSource
from megatron_dllm.diffusion.inputs import to_device
from megatron_dllm.diffusion.random import Stream
from megatron_dllm.parallel import ParallelContext
from megatron_dllm.training.batches import BatchMaker

from .exchanges import counted
from .workload import measure_ranks

IMPLS = {"local": "ours", "transformer_engine": "Transformer Engine"}


@dataclass(frozen=True)
class Part:
    """Of one layer: own queries and keys, and what attends."""

    name: str
    attending: Attending
    num_queries: int
    num_keys: int
    layer: int


def attention_rows(run: RunConfig, impls: Sequence[str], source: ExampleSource, order: Order, context: ParallelContext) -> Iterator[str]:
    """A line for each layer type, way and part, as soon as it is measured; every rank calls it."""
    narrow = dataclasses.replace(run.model, global_kv_channels=run.model.kv_channels)
    yield f"{'layer':<18} {'queries':<8} {'whose':<18} {'ms':>9} {'MiB sent':>9}"
    for kind in ("full", "sliding"):
        for impl in impls:
            yield from layer_rows(dataclasses.replace(run, model=narrow), kind, impl, source, order, context)
    yield from layer_rows(run, "full", "local", source, order, context)


def layer_rows(run: RunConfig, kind: str, impl: str, source: ExampleSource, order: Order, context: ParallelContext) -> Iterator[str]:
    """Those of a layer type, one way."""
    parallel = dataclasses.replace(
        run.parallel, context_parallel_impl=impl, cp_comm_type_sliding="halo" if impl == "local" else "all_gather")
    maker = BatchMaker(dataclasses.replace(run, parallel=parallel), source, order, Stream.TRAIN, context)
    microbatch = next(maker.batch([0], 0).microbatches())
    plan = to_device(microbatch.first_pass.layers[kind].attention, context.device)
    for part in parts_of(plan, run.model, kind):
        head = f"{kind + ', ' + str(run.model.head_dim(part.layer)):<18} {part.name:<8} {IMPLS[impl]:<18}"
        try:
            ms, sent = measure_part(part, run, context)
        except (RuntimeError, ValueError, AssertionError) as error:
            yield f"{head} FAILED {type(error).__name__}: {str(error)[:300]}"
        else:
            yield f"{head} {ms:9.2f} {sent / 2**20:9.2f}"


def parts_of(plan: ShardedPlan, config: ModelConfig, kind: str) -> tuple[Part, Part]:
    """Clean queries, and those of the canvas."""
    layer = config.layer_types.index(kind)
    return (Part("clean", plan.stationary, plan.num_stationary, plan.num_held, layer),
            Part("canvas", plan.replicated, plan.num_replicated, plan.num_keys, layer))


def measure_part(part: Part, run: RunConfig, context: ParallelContext) -> tuple[float, int]:
    """(milliseconds of forward and backward, bytes that this rank sends in them)."""
    config, dtype = run.model, torch.bfloat16 if run.training.bf16 else torch.float32
    generator = torch.Generator(context.device).manual_seed(context.cp.rank)

    def random(rows: int, heads: int) -> Tensor:
        values = torch.randn(rows, heads, config.head_dim(part.layer), device=context.device, dtype=dtype, generator=generator)
        return values.mul_(config.head_dim(part.layer) ** -0.25).requires_grad_()

    query = random(part.num_queries, config.num_attention_heads)
    key, value = (random(part.num_keys, config.kv_heads(part.layer)) for _ in range(2))
    upstream = torch.ones_like(query)
    found = []

    def step() -> float:
        with counted(context.cp) as count:
            out = part.attending.attend(query, key, value, context.cp)
            torch.autograd.grad(out, (query, key, value), upstream)
            found.append(count())
        return out[:1].sum().item()

    timing = measure_ranks(step, context, prepare=lambda: None, warmup=1, repeats=3)
    if not torch.isfinite(torch.tensor(timing.value)):
        raise ValueError(f"the output is {timing.value}")
    return timing.median, found[-1]
