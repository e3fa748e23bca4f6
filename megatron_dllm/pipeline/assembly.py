"""From the wishes of a run to the action lists that its ranks execute."""

from dataclasses import dataclass

from megatron_dllm.pipeline.actions import Action, format_table
from megatron_dllm.pipeline.graph import Pipeline
from megatron_dllm.pipeline.list_scheduler import list_schedule
from megatron_dllm.pipeline.schedules import interleaved_1f1b, no_pipeline, one_f_one_b
from megatron_dllm.pipeline.timing import Costs
from megatron_dllm.pipeline.transfers import add_reductions, add_transfers


@dataclass(frozen=True)
class Schedule:
    """One step of a pipeline: `lists[rank]` is what the executor of that rank runs, top to bottom."""

    pipeline: Pipeline
    costs: Costs
    lists: list[list[Action]]

    def __str__(self) -> str:
        return format_table(self.lists)


def build_schedule(
    pipeline: Pipeline,
    *,
    group: int | None = None,
    costs: Costs | None = None,
    extra_warmup: int | None = None,
    kept_limit: int | None = None,
    overlap: bool = True,
) -> Schedule:
    """The schedule of one step, equal on every rank for equal arguments.

    `group` microbatches pass a chunk before the next chunk starts (default: as many as ranks; without meaning for one chunk). `costs` are
    the stages' ticks (default: equal stages). The others are explained in list_schedule and add_transfers. ValueError says what is illegal.
    """
    group = pipeline.ranks if group is None else group
    costs = Costs.uniform(pipeline.stages) if costs is None else costs
    compute = compute_lists(pipeline, group=group, costs=costs, extra_warmup=extra_warmup, kept_limit=kept_limit)
    return Schedule(pipeline, costs, add_reductions(pipeline, add_transfers(pipeline, compute, costs, overlap=overlap)))


def compute_lists(
    pipeline: Pipeline, *, group: int, costs: Costs, extra_warmup: int | None = None, kept_limit: int | None = None
) -> list[list[Action]]:
    """Compute steps of every rank: the closed form if there is one, else the list scheduler's."""
    if any(pipeline.self_conditioned) or pipeline.split_backward or pipeline.forward_only or kept_limit is not None:
        return list_schedule(pipeline, group=group, costs=costs, extra_warmup=extra_warmup, kept_limit=kept_limit)
    ranks, chunks, microbatches, extra = pipeline.ranks, pipeline.chunks, pipeline.microbatches, extra_warmup or 0
    if pipeline.stages == 1:
        return [no_pipeline(microbatches=microbatches)]
    if chunks == 1:
        return [one_f_one_b(rank, ranks=ranks, microbatches=microbatches, extra_warmup=extra) for rank in range(ranks)]
    return [
        interleaved_1f1b(rank, ranks=ranks, chunks=chunks, microbatches=microbatches, group=group, extra_warmup=extra)
        for rank in range(ranks)
    ]
