"""How long compute lists take: costs of the steps in whole ticks, start and finish of each, and a bound that no schedule can beat.

Whole ticks, because the order of messages is decided by comparing times: every rank must come to the same answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_dllm.pipeline.actions import Action, Kind
from megatron_dllm.pipeline.graph import Pipeline
from megatron_dllm.pipeline.layout import StageLayout


@dataclass(frozen=True)
class Costs:
    """Ticks that each virtual stage takes: `forward[loop][stage]`, `backward[loop][stage]` (both gradients), all at least 1.

    With a split backward, `weight_percent` of it is the weight gradient. `embedding_gradient` is the step E.
    """

    forward: tuple[tuple[int, ...], tuple[int, ...]]
    backward: tuple[tuple[int, ...], tuple[int, ...]]
    embedding_gradient: int = 1
    weight_percent: int = 50

    def __post_init__(self) -> None:
        ticks = [*self.forward[0], *self.forward[1], *self.backward[0], *self.backward[1], self.embedding_gradient]
        if min(ticks) < 1:
            # A step that takes no time would start and finish at once, and the order of its messages would not be defined.
            raise ValueError(f"a cost is {min(ticks)} ticks: every step takes at least 1, an empty stage's included; use finer ticks")
        if not 0 < self.weight_percent < 100:
            raise ValueError(f"weight_percent is {self.weight_percent}: it is the weight gradient's share of a backward, 1 to 99")

    @classmethod
    def of_forwards(
        cls, forwards: tuple[int, ...], *, backward_ratio: float = 2.0, loop_share: float = 0.2, embedding_gradient: int = 2
    ) -> "Costs":
        """From each stage's forward in loop 0; loop 1 takes `loop_share` of it, a backward `backward_ratio` times as long."""

        def scaled(factor: float) -> tuple[int, ...]:
            return tuple(max(1, round(ticks * factor)) for ticks in forwards)

        return cls(
            forward=(scaled(1), scaled(loop_share)),
            backward=(scaled(backward_ratio), scaled(backward_ratio * loop_share)),
            embedding_gradient=embedding_gradient,
        )

    @classmethod
    def uniform(cls, stages: int, *, loop_share: float = 0.2) -> "Costs":
        """Equal stages of 10 ticks forward and 20 backward."""
        return cls.of_forwards((10,) * stages, loop_share=loop_share)

    def of(self, pipeline: Pipeline, rank: int, action: Action) -> int:
        """Ticks of one compute step."""
        kind, stage = action.kind, pipeline.stage(rank, action.chunk)
        if kind == Kind.FORWARD:
            return self.forward[action.loop][stage]
        if kind == Kind.BACKWARD:
            return self.backward[action.loop][stage]
        if kind == Kind.EMBEDDING_GRADIENT:
            return self.embedding_gradient
        if kind == Kind.INPUT_GRADIENT:
            return self._input_gradient(stage, action.loop)
        # One step adds the weight gradients of both loops.
        return sum(self.backward[loop][stage] - self._input_gradient(stage, loop) for loop in pipeline.backward_loops(action.microbatch))

    def _input_gradient(self, stage: int, loop: int) -> int:
        return max(1, self.backward[loop][stage] * (100 - self.weight_percent) // 100)


def layout_costs(
    layout: StageLayout, *, layer: int, embedding: int, loss: int, backward_ratio: float = 2.0, loop_share: float = 0.2
) -> Costs:
    """Costs of stages that hold these parts, given the forward ticks of one layer, of the embedding and of head and loss.

    A multi-token prediction block takes a layer and a loss. The soft embedding's gradient takes as long as the head in loop 1.
    """
    ticks = {"E": embedding, "t": layer, "g": layer, "m": layer + loss, "L": loss}
    forwards = tuple(sum(ticks[letter] for letter in stage.letters) for stage in layout.stages)
    gradient = max(1, round(2 * loss * loop_share))
    return Costs.of_forwards(forwards, backward_ratio=backward_ratio, loop_share=loop_share, embedding_gradient=gradient)


@dataclass(frozen=True)
class Timing:
    """Start and finish of every step of every rank's compute list."""

    starts: list[list[int]]
    finishes: list[list[int]]

    @property
    def makespan(self) -> int:
        return max((finishes[-1] for finishes in self.finishes if finishes), default=0)


def time_compute(pipeline: Pipeline, lists: Sequence[Sequence[Action]], costs: Costs) -> Timing:
    """When each step runs if messages take no time and buffers never lack. ValueError if the lists wait for each other in a circle."""
    arrivals: list[dict[Action, int]] = [{} for _ in lists]
    timing = Timing([[] for _ in lists], [[] for _ in lists])
    active = set(range(len(lists)))
    while active:
        rank = active.pop()
        starts, finishes, actions = timing.starts[rank], timing.finishes[rank], lists[rank]
        while len(starts) < len(actions):
            action = actions[len(starts)]
            arrival = arrivals[rank].get(action)
            if arrival is None and pipeline.awaits_message(rank, action):
                break
            starts.append(max(finishes[-1] if finishes else 0, arrival or 0))
            finishes.append(starts[-1] + costs.of(pipeline, rank, action))
            for message in pipeline.outputs(rank, action):
                arrivals[message.destination][message.consumer] = finishes[-1]
                active.add(message.destination)
        active.discard(rank)
    stuck = {rank: len(timing.starts[rank]) for rank, actions in enumerate(lists) if len(timing.starts[rank]) < len(actions)}
    if stuck:
        raise ValueError("the compute lists wait for each other: " + ", ".join(f"rank {r} at {lists[r][row]}" for r, row in stuck.items()))
    return timing


def lower_bound(pipeline: Pipeline, costs: Costs) -> int:
    """Ticks that no schedule on these ranks can beat: the busiest rank with the least fill and drain, or one microbatch's own path."""
    fill = [sum(costs.forward[0][:rank]) for rank in range(pipeline.ranks)]
    bounds = []
    for rank in range(pipeline.ranks):
        actions = list(pipeline.compute_actions(rank))
        # Nothing has to follow these, so they may fill the drain.
        free = sum(costs.of(pipeline, rank, a) for a in actions if a.kind in (Kind.WEIGHT_GRADIENT, Kind.EMBEDDING_GRADIENT))
        work = sum(costs.of(pipeline, rank, a) for a in actions)
        drain = sum(costs.of(pipeline, r, Action(pipeline.backward_kind, 0, 0)) for r in range(rank)) if not pipeline.forward_only else 0
        bounds.append(fill[rank] + max(work, work - free + drain))
    return max(*bounds, *(_own_path(pipeline, costs, m) for m in range(pipeline.microbatches)))


def _own_path(pipeline: Pipeline, costs: Costs, microbatch: int) -> int:
    """Ticks that `microbatch` takes when it has all ranks to itself."""
    stages = range(pipeline.stages)
    forward = sum(sum(costs.forward[loop]) for loop in pipeline.loops(microbatch))
    if pipeline.forward_only:
        return forward

    def backward(stage: int, loop: int) -> int:
        rank, chunk = pipeline.place(stage)
        return costs.of(pipeline, rank, Action(pipeline.backward_kind, microbatch, chunk, loop))

    ends = [forward] * (pipeline.stages + 1)
    for loop in reversed(pipeline.backward_loops(microbatch)):
        for stage in reversed(stages):
            # Loop 0 of a stage comes after loop 1 of the stage and after loop 0 of the next one.
            ends[stage] = max(ends[stage], ends[stage + 1]) + backward(stage, loop)
    return ends[0]
