"""What a rank keeps at most while it runs its list, counted in tensors of one microbatch in one chunk."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_dllm.pipeline.actions import Action, Kind
from megatron_dllm.pipeline.graph import Pipeline


@dataclass(frozen=True)
class PeakMemory:
    """Highest counts, each by itself: they need not fall on the same row."""

    activations: int
    """Forwards of loop 0 whose last gradient has not been taken."""
    loop_activations: int
    """The same for loop 1, which has the canvas tokens only. Of a joint microbatch they are put in loop 0's at once."""
    contexts: int
    """Contexts that loop 1 still reads, or whose gradient loop 0's backward has not yet taken up."""
    buffers: int
    """Tensors in transfer: being received or not yet read, computed and not yet gone."""


def peak_memory(pipeline: Pipeline, rank: int, actions: Sequence[Action]) -> PeakMemory:
    """The peaks of one rank. They do not depend on time: a rank runs its list in order."""
    kept: Counter[str] = Counter()
    peaks = dict.fromkeys(PeakMemory.__dataclass_fields__, 0)
    for action in actions:
        for name, change in _changes(pipeline, rank, action):
            kept[name] += change
            peaks[name] = max(peaks[name], kept[name])
    return PeakMemory(**peaks)


def _changes(pipeline: Pipeline, rank: int, action: Action) -> Iterator[tuple[str, int]]:
    """What `action` adds and frees, in this order."""
    kind, microbatch, _, loop = action[:4]
    if kind in (Kind.SEND, Kind.RECEIVE):
        yield "buffers", 1
    elif kind == Kind.WAIT_SEND:
        yield "buffers", -1
    elif kind in (Kind.WAIT_RECEIVE, Kind.REDUCE):
        return
    else:
        if pipeline.awaits_message(rank, action):
            yield "buffers", -1
        conditioned = pipeline.self_conditioned[microbatch]
        ends_at_once = pipeline.forward_only or pipeline.is_joint(microbatch)
        layer = "loop_activations" if loop else "activations"
        if kind == Kind.FORWARD:
            yield layer, 1
            if conditioned and not loop:
                yield "contexts", 1
            if pipeline.forward_only or loop and ends_at_once:
                yield layer, -1
                if loop:
                    yield "contexts", -1
        elif kind == Kind.WEIGHT_GRADIENT:
            yield "activations", -1
            if len(pipeline.backward_loops(microbatch)) == 2:
                yield "loop_activations", -1
        elif kind == pipeline.backward_kind:
            if conditioned and not loop and not ends_at_once:
                yield "contexts", -1
            if not pipeline.split_backward:
                yield layer, -1
