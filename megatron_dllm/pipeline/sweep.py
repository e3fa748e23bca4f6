"""Checks every schedule in a range of sizes: the proof that the generators, the transfers and the simulator agree beyond typed examples."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_dllm.pipeline.actions import Action
from megatron_dllm.pipeline.assembly import build_schedule, compute_lists
from megatron_dllm.pipeline.edges import EdgeShape, EdgeShapes
from megatron_dllm.pipeline.graph import Pipeline
from megatron_dllm.pipeline.list_scheduler import list_schedule
from megatron_dllm.pipeline.schedules import check_group, legal_groups
from megatron_dllm.pipeline.simulator import assert_sound
from megatron_dllm.pipeline.timing import Costs


@dataclass(frozen=True)
class Case:
    """One schedule of the sweep. `coins` says which microbatches are self-conditioned: none, some (drawn from the sizes) or all."""

    ranks: int
    chunks: int
    microbatches: int
    group: int
    coins: str
    overlap: bool = True
    embedding_trained: bool = True
    is_joint: bool = False

    def __str__(self) -> str:
        kind = ", one backward" * self.is_joint
        return f"P{self.ranks} V{self.chunks} M{self.microbatches} group {self.group}, {self.coins} self-conditioned{kind}"

    @property
    def pipeline(self) -> Pipeline:
        draws = random.Random(f"{self.ranks} {self.chunks} {self.microbatches} {self.group}")
        some = [draws.random() < 0.5 for _ in range(self.microbatches)]
        coins = {"none": [False] * self.microbatches, "some": some, "all": [True] * self.microbatches}[self.coins]
        return Pipeline(self.ranks, self.chunks, tuple(coins), embedding_trained=self.embedding_trained,
                        joint=tuple(coins) if self.is_joint else ())


@dataclass(frozen=True)
class Outcome:
    """What the simulator says of a sound schedule."""

    case: Case
    actions: int
    bubble: float
    least_bubble: float
    time_over_bound: float


def cases(*, max_ranks: int, max_chunks: int, max_microbatches: int) -> Iterator[Case]:
    """All legal sizes up to these, each with every kind of coins; those of the smallest group also without overlap and with E frozen, and
    with one backward for both loops."""
    for ranks, chunks, microbatches in _sizes(max_ranks, max_chunks, max_microbatches):
        groups = legal_groups(ranks=ranks, chunks=chunks, microbatches=microbatches)
        for group in groups:
            for coins in ("none", "some", "all"):
                yield Case(ranks, chunks, microbatches, group, coins)
        if groups:
            yield Case(ranks, chunks, microbatches, groups[0], "some", overlap=False, embedding_trained=False)
            yield Case(ranks, chunks, microbatches, groups[0], "some", is_joint=True)


def count_refusals(*, max_ranks: int, max_chunks: int, max_microbatches: int) -> int:
    """How many group sizes the rule refuses in that range. AssertionError if it lets through one that legal_groups does not list."""
    refused = 0
    for ranks, chunks, microbatches in _sizes(max_ranks, max_chunks, max_microbatches):
        if chunks == 1:
            continue
        for group in set(range(microbatches + 2)) - set(legal_groups(ranks=ranks, chunks=chunks, microbatches=microbatches)):
            try:
                check_group(ranks=ranks, chunks=chunks, microbatches=microbatches, group=group)
            except ValueError:
                refused += 1
            else:
                raise AssertionError(f"{microbatches} microbatches in groups of {group} over {ranks} x {chunks} stages were not refused")
    return refused


def check_case(case: Case) -> Outcome:
    """Build and simulate one schedule. AssertionError, with the place in its table, if anything is wrong with it."""
    pipeline = case.pipeline
    costs = Costs.uniform(pipeline.stages)
    schedule = build_schedule(pipeline, group=case.group, costs=costs, overlap=case.overlap)
    shapes = EdgeShapes(64, tuple((40 + m, 16 * coin) for m, coin in enumerate(pipeline.self_conditioned)), mhc_num_residual_streams=4)

    def shape_of(rank: int, action: Action) -> EdgeShape:
        return shapes.of(action)

    simulation = assert_sound(pipeline, schedule.lists, costs, shape_of=shape_of)
    assert simulation.makespan >= simulation.lower_bound, f"{case}: {simulation.makespan} ticks beat the bound of {simulation.lower_bound}"
    if not any(pipeline.self_conditioned):
        closed_forms = compute_lists(pipeline, group=case.group, costs=costs)
        assert list_schedule(pipeline, group=case.group, costs=costs) == closed_forms, f"{case}: the list scheduler leaves the closed form"
        assert simulation.makespan == simulation.lower_bound, f"{case}: the closed form idles more than equal stages need"
    return Outcome(
        case,
        sum(map(len, schedule.lists)),
        simulation.bubble,
        simulation.least_bubble,
        simulation.makespan / simulation.lower_bound,
    )


def most_microbatches(ranks: int, max_microbatches: int) -> int:
    """Two full groups for every pipeline, also where that is more than `max_microbatches`."""
    return max(max_microbatches, 2 * ranks)


def _sizes(max_ranks: int, max_chunks: int, max_microbatches: int) -> Iterator[tuple[int, int, int]]:
    for ranks in range(1, max_ranks + 1):
        for chunks in range(1, max_chunks + 1):
            for microbatches in range(1, most_microbatches(ranks, max_microbatches) + 1):
                yield ranks, chunks, microbatches
