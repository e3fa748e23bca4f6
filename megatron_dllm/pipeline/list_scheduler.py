"""Compute lists for microbatches that pass the stages twice: a deterministic list scheduler over the dependency graph.

It plays the step in simulated time. A rank that is free takes the first of these that is ready:

    1. a backward of loop 1      it frees memory, and loop 0's backward waits for it on every stage
    2. a forward of loop 1       the oldest work there is: its microbatch holds contexts on every rank until it has come back
    3. the next forward of loop 0, while the rank keeps fewer activations of loop 0 than its limit
    4. a backward of loop 0
    5. a weight gradient or an embedding gradient, which nothing waits for

Up to the limit a forward comes before a backward of loop 0: that is the pairing of 1F1B, and it hides how long a microbatch is under way.
(Backward first takes 5 to 20 % longer with 2 or more chunks, and it does not give the closed forms.) The closed forms keep one
activation more than their warm-up is deep; a self-conditioned microbatch takes longer to come back and so needs a higher limit: half a
microbatch's activations for each rank brings the bubble to within 1 or 2 % of the lower bound for equal stages.
"""

import heapq
from collections import defaultdict

from megatron_dllm.pipeline.actions import Action, Kind
from megatron_dllm.pipeline.graph import Pipeline
from megatron_dllm.pipeline.schedules import check_group, visiting_order, warmup_depth
from megatron_dllm.pipeline.timing import Costs


def list_schedule(
    pipeline: Pipeline, *, group: int, costs: Costs, extra_warmup: int | None = None, kept_limit: int | None = None
) -> list[list[Action]]:
    """Compute steps of every rank. Without loops, a split backward and a kept_limit these are the closed forms.

    `extra_warmup` activations of loop 0 (one microbatch in one chunk each) are kept beyond the closed form's, see default_extra_warmup.
    `kept_limit` caps them on every rank, to save memory for time. ValueError if `group` or `kept_limit` is impossible.
    """
    check_group(ranks=pipeline.ranks, chunks=pipeline.chunks, microbatches=pipeline.microbatches, group=group)
    order = visiting_order(chunks=pipeline.chunks, microbatches=pipeline.microbatches, group=group)
    extra = default_extra_warmup(pipeline) if extra_warmup is None else extra_warmup
    limits = kept_limits(pipeline, group=group, extra_warmup=extra, kept_limit=kept_limit)
    # A rank below its limit that waits for its forward, and takes backwards in turn, follows the closed form whatever the costs. In all
    # other cases taking the backward that is there is faster, and safe: the forward may be waiting for this very backward.
    in_turn = kept_limit is None and not any(pipeline.self_conditioned) and not pipeline.split_backward
    ranks = [_Rank(pipeline, rank, order, limits[rank], in_turn) for rank in range(pipeline.ranks)]

    running: list[tuple[int, int, Action]] = []
    now = 0
    while True:
        for rank in ranks:
            if rank.running is None and (action := rank.take()) is not None:
                heapq.heappush(running, (now + costs.of(pipeline, rank.number, action), rank.number, action))
        if not running:
            break
        now = running[0][0]
        while running and running[0][0] == now:
            _, number, action = heapq.heappop(running)
            ranks[number].finish(action)
            for message in pipeline.outputs(number, action):
                ranks[message.destination].supply(message.consumer)
    for rank in ranks:
        assert not rank.unmet, f"rank {rank.number} never ran {next(iter(rank.unmet))}: a limit of {rank.limit} stops the pipeline"
    return [rank.actions for rank in ranks]


def default_extra_warmup(pipeline: Pipeline) -> int:
    """Half a microbatch's activations for each rank if any microbatch is self-conditioned; none otherwise."""
    return (pipeline.stages + 1) // 2 if any(pipeline.self_conditioned) else 0


def kept_limits(pipeline: Pipeline, *, group: int, extra_warmup: int, kept_limit: int | None) -> list[int]:
    """Activations of loop 0 that each rank may keep. ValueError if a cap would stop the pipeline."""
    needed = (pipeline.chunks - 1) * group + 1 if pipeline.chunks > 1 else 1
    if kept_limit is not None and kept_limit < needed:
        raise ValueError(
            f"a limit of {kept_limit} kept activations stops a pipeline of {pipeline.chunks} virtual stages a rank in groups of {group}: "
            f"a microbatch comes to its last chunk after (chunks - 1) * group forwards; set the limit to at least {needed}"
        )
    depths = [
        warmup_depth(rank, ranks=pipeline.ranks, chunks=pipeline.chunks, group=group, extra=extra_warmup) for rank in range(pipeline.ranks)
    ]
    return [depth + 1 if kept_limit is None else min(depth + 1, kept_limit) for depth in depths]


class _Rank:
    """One rank in the simulated run: what it has done, what is ready, what it keeps."""

    def __init__(self, pipeline: Pipeline, number: int, order: list[tuple[int, int]], limit: int, in_turn: bool):
        self.pipeline, self.number, self.limit, self.in_turn = pipeline, number, limit, in_turn
        self.actions: list[Action] = []
        self.running: Action | None = None
        self.kept = 0
        self.forwards = [Action(Kind.FORWARD, m, c) for m, c in reversed(order)]
        self.backwards = [Action(pipeline.backward_kind, m, pipeline.chunks - 1 - c) for m, c in reversed(order)]
        # Among ready steps of one class, the one that the closed form would take first.
        in_order = (self.forwards[::-1], self.backwards[::-1])
        self.turns = {(a.kind, a.microbatch, a.chunk): turn for steps in in_order for turn, a in enumerate(steps)}
        self.unmet: dict[Action, int] = {}
        self.readers: dict[Action, list[Action]] = defaultdict(list)
        self.ready: dict[tuple[str, int], list[tuple[int, Action]]] = defaultdict(list)
        self.ready_forwards: set[Action] = set()
        for action in pipeline.compute_actions(number):
            inputs = pipeline.local_inputs(action)
            self.unmet[action] = len(inputs) + pipeline.awaits_message(number, action)
            for step in inputs:
                self.readers[step].append(action)
            if not self.unmet[action]:
                self._make_ready(action)

    def supply(self, action: Action) -> None:
        """One input of `action` is there."""
        self.unmet[action] -= 1
        if not self.unmet[action]:
            self._make_ready(action)

    def finish(self, action: Action) -> None:
        self.running = None
        if action == self.pipeline.last_use(action.microbatch, action.chunk):
            self.kept -= 1
        for reader in self.readers.pop(action, ()):
            self.supply(reader)

    def take(self) -> Action | None:
        """Start the step that the rules above choose; None if the rank has to wait."""
        action = self._choose()
        if action is not None:
            self.running = action
            self.actions.append(action)
            del self.unmet[action]
        return action

    def _make_ready(self, action: Action) -> None:
        if action.kind == Kind.FORWARD and action.loop == 0:
            self.ready_forwards.add(action)
            return
        free = action.kind in (Kind.WEIGHT_GRADIENT, Kind.EMBEDDING_GRADIENT)
        turn = action.microbatch if free else self.turns[action.kind, action.microbatch, action.chunk]
        heapq.heappush(self.ready["free" if free else action.kind, action.loop], (turn, action))

    def _choose(self) -> Action | None:
        backward = self.pipeline.backward_kind
        for kind in (backward, Kind.FORWARD):
            if self.ready[kind, 1]:
                return heapq.heappop(self.ready[kind, 1])[1]
        if self.forwards and self.kept < self.limit:
            if self.forwards[-1] in self.ready_forwards:
                return self._start_forward()
            if self.in_turn:
                return None
        heap = self.ready[backward, 0]
        if heap and not self.in_turn:
            return heapq.heappop(heap)[1]
        if heap and heap[0][1] == self.backwards[-1]:
            self.backwards.pop()
            return heapq.heappop(heap)[1]
        return heapq.heappop(self.ready["free", 0])[1] if self.ready["free", 0] else None

    def _start_forward(self) -> Action:
        action = self.forwards.pop()
        if self.pipeline.last_use(action.microbatch, action.chunk) is not None:
            self.kept += 1
        return action
