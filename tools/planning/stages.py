"""How long the ranks of a pipeline wait for each other where its stages take the device's time, not the host's.

The trainer's schedule is made as always, for a head as long as a layer, and played with the times of this run: a layer moves its weights in
both passes, whatever their tokens; the last stage has the head and draws the drafts' soft embedding, the first the self-conditioning.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from megatron_dllm.config import RunConfig
from megatron_dllm.models.diffusion_gemma.stages import EMBEDDING_TICKS, LAYER_TICKS, LOSS_TICKS
from megatron_dllm.pipeline import Pipeline, Schedule, StageLayout, build_schedule
from megatron_dllm.pipeline.schedules import legal_groups
from megatron_dllm.pipeline.simulator import simulate
from megatron_dllm.pipeline.timing import Costs, layout_costs
from megatron_dllm.training import forecast as memory
from megatron_dllm.training.operations import Operations, StepOperations
from planning import layout_time as timing

TICKS_PER_MS = 1000
MOST_MICROBATCHES = memory.SIMULATED_MICROBATCHES
LAYER = ("projections", "attention", "mlp", "router", "experts")
FORWARD_BYTES = 2  # of what is moved for a weight: it is read once in each pass


@dataclass(frozen=True)
class Loops:
    """Milliseconds of a part's forward and backward in both loops: (first, second)."""

    forward: tuple[float, float] = (0.0, 0.0)
    backward: tuple[float, float] = (0.0, 0.0)

    @classmethod
    def sum(cls, parts: Iterable[Loops]) -> Loops:
        """Of all the parts."""
        forwards, backwards = zip(*((part.forward, part.backward) for part in parts), strict=True)
        return cls(tuple(map(sum, zip(*forwards, strict=True))), tuple(map(sum, zip(*backwards, strict=True))))


def bubble(run: RunConfig, counted: StepOperations, predicted: memory.Forecast, *, gpus: int, gpu: str, beside_ms: float,
           gpus_per_node: int, canvases: int = 1) -> float:
    """Share of the pipeline's time in which a rank waits for others. counted: operations on all GPUs; beside_ms: what a layer takes of a
    microbatch beside computing, for exchanges; canvases: of a row."""
    training, layout = run.training, memory.model_layout(run)
    microbatches = training.global_batch_size // (training.micro_batch_size * run.parallel.data_parallel_size(gpus))
    layer, embedding, head, gradient = _parts(run, counted, predicted, layout.ranks / gpus / microbatches, gpu, beside_ms,
                                              microbatches, canvases)
    few = microbatches
    while few > MOST_MICROBATCHES and few % 2 == 0:
        few //= 2
    is_joint = training.draft_pass == "joint"
    times = [Loops.sum([Loops(), *[layer] * len(stage.layers), *[embedding] * stage.has_embedding, *[head] * stage.has_loss])
             for stage in layout.stages]
    backwards = [(sum(t.backward), 0.0) if is_joint else t.backward for t in times]
    costs = Costs(*(tuple(tuple(_ticks(of[loop]) for of in sides) for loop in (0, 1))
                    for sides in ([t.forward for t in times], backwards)), embedding_gradient=_ticks(gradient))
    conditioned = round(few * run.objective.self_conditioning_prob) if run.objective.has_canvases else 0
    if timing.Fill.of(run, canvases).has_one_form and run.objective.decodes_twice:
        conditioned = few
    schedule = _schedule(layout, tuple(m < conditioned for m in range(few)), is_joint, run.lora.lora_rank is None)
    edge = timing.edge_ms(run, predicted.tokens, gpus_per_node) / 2 + timing.NCCL_MS
    played = simulate(schedule.pipeline, schedule.lists, costs, latency=_ticks(edge))
    waiting = played.makespan * layout.ranks - played.work
    return waiting / (waiting + played.work * microbatches / few)


@cache
def _schedule(layout: StageLayout, coins: tuple[bool, ...], is_joint: bool, embedding_trained: bool) -> Schedule:
    """As the trainer makes it."""
    pipeline = Pipeline(layout.ranks, layout.chunks, coins, embedding_trained=embedding_trained, joint=coins if is_joint else ())
    group = (legal_groups(ranks=layout.ranks, chunks=layout.chunks, microbatches=len(coins)) or [None])[0]
    return build_schedule(pipeline, group=group,
                          costs=layout_costs(layout, layer=LAYER_TICKS, embedding=EMBEDDING_TICKS, loss=LOSS_TICKS))


def _ticks(ms: float) -> int:
    return max(1, round(ms * TICKS_PER_MS))


def _parts(run: RunConfig, counted: StepOperations, predicted: memory.Forecast, share: float, gpu: str,
           beside_ms: float, microbatches: int, canvases: int) -> tuple[Loops, Loops, Loops, float]:
    """(a layer, what stands before the first, head with the drafts' soft embedding, the latter's gradient) of a microbatch on the ranks of
    its stage, which compute `share` of all operations between them."""
    model, factor = run.model, timing.streams_factor(run)
    tokens = timing.token_counts(run, run.training.micro_batch_size, canvases=canvases)
    clean, canvas = int(tokens.clean.sum()), int(tokens.canvas.sum())
    drafted = int(tokens.canvas[tokens.self_conditioned].sum())
    second, of_head = drafted / (clean + canvas), drafted / max(tokens.encoder_targets + tokens.decoder_targets, 1)

    def ms(operations: Operations, *parts: str) -> float:
        return timing.operations_ms({part: operations.get(part, 0.0) for part in parts}, gpu) * share * factor

    def moved(elements: memory.Elements) -> Loops:
        """Weights are read in both passes, if there are two; the backward moves the rest."""
        loops = memory.num_passes(run)
        total = timing.moved_ms(elements, run, microbatches) * factor
        forward = sum(elements.values()) * FORWARD_BYTES / timing.COPY_TB_PER_S / 1e9 * factor
        ahead = (forward, forward if loops == 2 else 0.0)
        return Loops(ahead, tuple((total - sum(ahead)) * part / sum(ahead) for part in ahead))

    def split(forward: float, backward: float, again: float) -> Loops:
        """By the loops' shares of what has a gradient."""
        return Loops((forward * (1 - again), forward * again), (backward * (1 - again), backward * again))

    held = predicted.elements.parts
    kinds = model.layer_kinds
    a_layer = moved(sum((held[kind] for kind in kinds), memory.Elements()))
    per_layer = [a_layer, split(ms(counted.forward, *LAYER), ms(counted.backward, *LAYER) + ms(counted.repeated, *LAYER), second),
                 Loops((ms(counted.draft, *LAYER), 0.0))]
    summed = Loops.sum(per_layer)
    loops, n = memory.num_passes(run), len(kinds)
    beside = tuple(beside_ms / 2 / loops * (loop < loops) for loop in (0, 1))
    layer = Loops.sum([Loops(tuple(x / n for x in summed.forward), tuple(x / n for x in summed.backward)), Loops(beside, beside)])
    entry = Loops((0.0, ms(counted.forward, "self_conditioning")), (0.0, ms(counted.backward, "self_conditioning")))
    head = Loops.sum([moved(held["embedding"]), split(ms(counted.forward, "head"), ms(counted.backward, "head"), of_head),
                      Loops((ms(counted.draft, "head") + ms(counted.forward, "soft_embedding"), 0.0))])
    return layer, entry, head, ms(counted.backward, "soft_embedding") + ms(counted.repeated, "soft_embedding")
