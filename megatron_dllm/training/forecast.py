"""What a GPU of a layout will hold, in bytes by kind: weights, gradients, optimizer, activations, buffers.

Weights, gradients and optimizer state are counted from the model that would be built (on torch's meta device, so nothing is allocated);
activations and buffers by formula, whose factor comes from measurements (see ACTIVATION_FACTOR).
"""
from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import torch
from torch import Tensor

from ..config import DataConfig, ModelConfig, MoEConfig, ParallelConfig, RunConfig, TrainingConfig
from ..models.diffusion_gemma.build import build_model
from ..models.diffusion_gemma.stages import LAYER_TICKS, LOSS_TICKS, model_layout
from ..parallel import ParallelContext
from ..pipeline import Pipeline, StageLayout, build_schedule
from ..pipeline.schedules import legal_groups
from ..pipeline.simulator import simulate
from ..pipeline.timing import layout_costs

KINDS = ("weights", "gradients", "optimizer", "activations", "buffers")
# Activations measured over activations counted, by CUDA graphs on one H200 (docs/performance.md): 6 layers, all trained, grew by 214 KiB a
# token and layer from batch 1 x 1024 to 4 x 1024 and by 155 to 1 x 32768, where 229 are counted; 30 layers beside adapters, whose frozen
# products keep no inputs, by 154.
ACTIVATION_FACTOR, FROZEN_ACTIVATION_FACTOR = 1.0, 0.7
# CUDA's context and NCCL's buffers, which torch does not count: an assumption.
RUNTIME_BYTES = 1.5 * 2**30
# Bubbles are simulated up to so many microbatches; beyond, the fill is spread over more of them.
SIMULATED_MICROBATCHES = 16

# (grid, trained, bytes of an element) -> elements on one rank
Elements = Counter


@dataclass(frozen=True)
class ModelElements:
    """One rank's parameters by part: "embedding", "self_conditioning", "final_norm", "mtp", and a layer of each type."""

    parts: Mapping[str, Elements]

    def of_stage(self, letters: str, types: tuple[str, ...]) -> Elements:
        """What a rank holds whose stages have these letters (E, t, g, m, L) and these layers' types; both E and L hold the embedding."""
        held = Elements()
        for part, has in (("embedding", "E" in letters or "L" in letters or "m" in letters), ("self_conditioning", "E" in letters),
                          ("final_norm", "L" in letters), ("mtp", "m" in letters)):
            if has:
                held += self.parts[part]
        for kind in types:
            held += self.parts[kind]
        return held


@dataclass(frozen=True)
class Cut:
    """A whole parameter and how ranks cut it. least: elements of the tp dimension that no cut goes below (one key head)."""

    part: str
    grid: str
    trained: bool
    element_bytes: int
    shape: tuple[int, ...]
    axes: tuple[tuple[str, int], ...]
    least: int

    def elements(self, sizes: Mapping[str, int]) -> int:
        """On one rank of axes of these sizes."""
        local = list(self.shape)
        for axis, dim in self.axes:
            local[dim] = -(-local[dim] // sizes[axis])
            if axis == "tp":
                local[dim] = max(local[dim], self.least)
        return math.prod(local)


def model_elements(run: RunConfig) -> ModelElements:
    """The parameters of rank 0 by part."""
    types = tuple(dict.fromkeys(run.model.layer_kinds))
    # Dispatchers have no parameters, and some cannot be built for one process.
    plain = replace(run, parallel=ParallelConfig(), model=replace(run.model, num_layers=len(types), layer_types=types),
                    training=TrainingConfig(bf16=run.training.bf16), data=DataConfig(), moe=MoEConfig())
    parallel = run.parallel
    sizes = {"tp": parallel.tensor_model_parallel_size, "ep": parallel.expert_model_parallel_size,
             "etp": parallel.expert_tensor_parallel_size}
    parts: dict[str, Elements] = {name: Elements() for name in ("embedding", "self_conditioning", "final_norm", "mtp", *types)}
    for cut in _cuts(plain, types):
        parts[cut.part][cut.grid, cut.trained, cut.element_bytes] += cut.elements(sizes)
    return ModelElements(parts)


class Unfilled:
    """Initial weights without memory, of which the shape alone is wanted."""

    def __call__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, expert: int | None = None) -> Tensor:
        """Weights of `shape` on torch's meta device."""
        return torch.empty(shape, dtype=dtype, device="meta")

    def with_std(self, std: float) -> Unfilled:
        """Itself."""
        return self


@lru_cache
def _cuts(run: RunConfig, types: tuple[str, ...]) -> tuple[Cut, ...]:
    """Every parameter of a model that has one layer of each type."""
    context = replace(ParallelContext.single(), device=torch.device("meta"))
    model, cuts = build_model(run, context, init=Unfilled()), []
    for name, parameter in model.named_parameters():
        head, _, rest = name.partition(".")
        kind = types[int(rest.partition(".")[0])] if head == "layers" else "full"
        size = run.model.global_kv_channels if kind == "full" else run.model.kv_channels
        placement = parameter.placement
        cuts.append(Cut(
            kind if head == "layers" else head, placement.grid, parameter.requires_grad, parameter.element_size(), placement.shape,
            tuple((axis, dim) for axis, dim in placement.axes.items() if dim is not None),
            size if re.search("[kv]_proj", name) and kind != "linear" else 1))
    return tuple(cuts)


def state_bytes(elements: Elements, run: RunConfig, dp: int, edp: int) -> dict[str, float]:
    """Weights, gradients and optimizer: gradients and states in fp32, a master where a weight has 16 bits."""
    total = dict.fromkeys(KINDS[:3], 0.0)
    for (grid, trained, size), count in elements.items():
        total["weights"] += count * size
        if trained:
            shares = (dp if grid == "dense" else edp) if run.parallel.use_distributed_optimizer else 1
            total["gradients"] += count * 4
            total["optimizer"] += count * (8 + (4 if size < 4 else 0)) / shares
    return total


def layer_elements_per_token(model: ModelConfig, kind: str, parallel: ParallelConfig) -> dict[str, float]:
    """16-bit values that one layer keeps for one token's backward, on one rank, by what recomputes them ("core_attn", "mlp", "moe",
    "mhc"), and "other", which is kept always but under full recompute."""
    tp, hidden = parallel.tensor_model_parallel_size, model.hidden_size
    shared = hidden / (tp if parallel.sequence_parallel else 1)  # a token's row outside the matrices
    if kind == "linear":
        keys = model.linear_num_key_heads * model.linear_key_head_dim
        values = model.linear_num_value_heads * model.linear_value_head_dim
        projected, core = (2 * keys + 3 * values) / tp, (4 * keys + 4 * values) / tp
    else:
        full = kind == "full"
        size, groups = (model.global_kv_channels, model.num_global_query_groups) if full else (model.kv_channels, model.num_query_groups)
        heads, groups = model.num_attention_heads / tp, max(groups / tp, 1)
        projected = size * (heads + (1 if full else 2) * groups)
        core = size * (2 * heads + 2 * groups)  # rotated queries and keys, values, what comes out
    ffn, inner = model.ffn_hidden_size / tp, model.moe_ffn_hidden_size / parallel.expert_tensor_parallel_size
    routed = model.moe_router_topk
    return {
        "other": 8 * shared + projected, "core_attn": core, "mlp": 2 * shared + 3 * ffn,
        # With or without sequence parallelism a rank sends 1/tp of the tokens to experts.
        "moe": (routed * (2 * hidden + 3 * inner) + 2 * model.num_experts) / tp,
        "mhc": (2 * model.num_residual_streams * shared) if model.enable_mhc_connections else 0.0}


def activation_bytes(run: RunConfig, kind: str) -> float:
    """What one layer keeps for one token with gradient, recompute considered; with full recompute its input and its keys and values."""
    model, parallel, training = run.model, run.parallel, run.training
    size = 2 if training.bf16 else 4
    kept = layer_elements_per_token(model, kind, parallel)
    if training.recompute_granularity == "full":
        entry = model.hidden_size * model.num_residual_streams
        entry /= parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
        context = 0.0 if kind == "linear" else 2 * model.kv_channels * model.num_query_groups / parallel.tensor_model_parallel_size
        return size * (entry + context)
    modules = training.recompute_modules if training.recompute_granularity == "selective" else ()
    factor = ACTIVATION_FACTOR if run.lora.lora_rank is None else FROZEN_ACTIVATION_FACTOR
    return factor * size * sum(count for part, count in kept.items() if part not in modules)


def room_bytes(run: RunConfig, tokens: float) -> float:
    """What one layer keeps for the experts' rows that may come and do not: --moe-max-tokens-per-rank makes room for the most in every pass.
    tokens: of a microbatch on one rank, with gradient. A row keeps the experts' input, first product and result."""
    model, parallel, bound = run.model, run.parallel, run.moe.moe_max_tokens_per_rank
    ranks = parallel.expert_model_parallel_size * parallel.expert_tensor_parallel_size
    if bound is None or ranks == 1:
        return 0.0
    choices = min(model.moe_router_topk, model.num_experts // parallel.expert_model_parallel_size)
    come = tokens / parallel.tensor_model_parallel_size * model.moe_router_topk
    values = 2 * model.hidden_size + 2 * model.moe_ffn_hidden_size / parallel.expert_tensor_parallel_size
    return max(num_passes(run) * ranks * bound * choices - come, 0.0) * values * (2 if run.training.bf16 else 4)


def recorded_bytes(run: RunConfig) -> float:
    """What one layer's dispatches hold in a recording. Memory that deepep's stream has used is not used again within it: of each pass the
    tokens that there is room for, as they come, go back, and with their gradients, and the first two again where experts are."""
    bound, ranks = run.moe.moe_max_tokens_per_rank, run.parallel.expert_model_parallel_size
    if run.training.cuda_graph_impl == "none" or run.moe.dispatcher != "deepep" or bound is None:
        return 0.0
    times = 4 if keeps_experts(run.training) else 6
    return num_passes(run) * times * ranks * bound * run.model.hidden_size * (2 if run.training.bf16 else 4)


def num_passes(run: RunConfig) -> int:
    """Passes of a microbatch with gradient: of clean tokens and drafts, and of canvases that have one."""
    return 2 if run.objective.decodes_twice else 1


def keeps_experts(training: TrainingConfig) -> bool:
    """Whether what experts keep for the backward is kept, and not computed again."""
    return training.recompute_granularity is None or (training.recompute_granularity == "selective"
                                                      and "moe" not in training.recompute_modules)


def buffer_bytes(run: RunConfig, elements: Elements, tokens: float) -> float:
    """What comes and goes: one layer computed again, the head's gradient in fp32 twice, the largest 16-bit gradients, the runtime."""
    model, parallel = run.model, run.parallel
    vocabulary = model.vocab_size / parallel.tensor_model_parallel_size * model.hidden_size
    again = 0.0
    if run.training.recompute_granularity is not None:
        plain = replace(run, training=replace(run.training, recompute_granularity=None, recompute_modules=()))
        again = tokens * max(activation_bytes(plain, kind) for kind in set(model.layer_kinds))
        again += 0.0 if keeps_experts(run.training) else room_bytes(run, tokens)
    frozen_embedding = not any(trained and grid == "dense" and size for (grid, trained, size) in elements)
    return RUNTIME_BYTES + again + (0 if frozen_embedding else 2 * 4 * vocabulary)


@dataclass(frozen=True)
class Forecast:
    """held: of each pipeline rank, bytes by kind. bubble: share of a step in which a rank waits for others. tokens: of a microbatch on
    one rank, with gradient."""

    elements: ModelElements
    held: tuple[Mapping[str, float], ...]
    bubble: float
    tokens: float

    @property
    def fullest(self) -> Mapping[str, float]:
        return max(self.held, key=lambda kinds: sum(kinds.values()))


def forecast(run: RunConfig, world_size: int, canvases_per_row: int = 1) -> Forecast:
    """Of a legal run; `canvases_per_row`: that a row carries, where rows are packed."""
    parallel, training = run.parallel, run.training
    layout = model_layout(run) if parallel.pipeline_model_parallel_size > 1 else None
    elements, dp = model_elements(run), parallel.data_parallel_size(world_size) * parallel.context_parallel_size
    edp = world_size // (parallel.expert_tensor_parallel_size * parallel.expert_model_parallel_size * parallel.pipeline_model_parallel_size)
    microbatches = training.global_batch_size // (training.micro_batch_size * parallel.data_parallel_size(world_size))
    tokens = tokens_with_gradient(run, training.micro_batch_size, canvases_per_row) / parallel.context_parallel_size
    bubble, in_flight = pipeline_shape(layout, microbatches, canvases_per_row > 0 and run.objective.has_canvases)
    held = []
    for rank, microbatches_kept in enumerate(in_flight):
        letters, types = stage_of(run, layout, rank)
        own = elements.of_stage(letters, types)
        room = room_bytes(run, tokens) if keeps_experts(training) else 0.0
        activations = microbatches_kept * sum(tokens * activation_bytes(run, kind) + room for kind in types)
        buffers = buffer_bytes(run, own, tokens)
        if training.cuda_graph_impl != "none" and world_size > 1 and microbatches > 1 and layout is None:
            # The last microbatch has a recording of its own, with the gradients' sums, and is called beside that of the others first.
            buffers += activations + buffers - RUNTIME_BYTES
        buffers += recorded_bytes(run) * len(types)
        held.append(state_bytes(own, run, dp, edp) | {"activations": activations, "buffers": buffers})
    return Forecast(elements, tuple(held), bubble, tokens)


def stage_of(run: RunConfig, layout: StageLayout | None, rank: int) -> tuple[str, tuple[str, ...]]:
    """The letters and the layers' types that a pipeline rank has."""
    if layout is None:
        return "E" + "m" * run.model.mtp_num_layers + "L", run.model.layer_kinds
    part = layout.part(rank)
    return part.letters, tuple(run.model.layer_kinds[layer] for layer in part.layers)


def tokens_with_gradient(run: RunConfig, rows: float, canvases: int) -> float:
    canvas = run.model.canvas_length * canvases if run.objective.has_canvases else 0
    return rows * (run.data.seq_length + canvas)


def pipeline_shape(layout: StageLayout | None, microbatches: int, diffusion: bool) -> tuple[float, tuple[float, ...]]:
    """The bubble, and for each rank how many microbatches' activations of all its layers it keeps at most."""
    return (0.0, (1.0,)) if layout is None else _simulated(layout, microbatches, diffusion)


@cache
def _simulated(layout: StageLayout, microbatches: int, diffusion: bool) -> tuple[float, tuple[float, ...]]:
    few = microbatches
    while few > SIMULATED_MICROBATCHES and few % 2 == 0:
        few //= 2
    pipeline = Pipeline(layout.ranks, layout.chunks, tuple(diffusion and m % 2 == 0 for m in range(few)))
    group = (legal_groups(ranks=layout.ranks, chunks=layout.chunks, microbatches=few) or [None])[0]
    costs = layout_costs(layout, layer=LAYER_TICKS, embedding=1, loss=LOSS_TICKS)
    schedule = build_schedule(pipeline, group=group, costs=costs)
    simulation = simulate(pipeline, schedule.lists, costs)
    waiting = simulation.makespan * layout.ranks - simulation.work
    bubble = waiting / (waiting + simulation.work * microbatches / few)
    return bubble, tuple(peak.activations / layout.chunks for peak in simulation.peaks)
