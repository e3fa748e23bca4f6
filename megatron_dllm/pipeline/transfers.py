"""Adds sends, receives, waits and reductions to compute lists.

All messages of all ranks are put into one order (transfer_order). Every rank starts its ends of them, sends and receives alike, in that
order, so two ranks always match: where one sends (to next, to previous), the other receives (from previous, from next), also when both
neighbours are the same rank. And nothing can wait in a circle, whichever way the transport serialises the transfers of a rank: all that an
end of a message comes after in its rank's list are ends, and waits for, messages that are earlier in the order.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from megatron_dllm.pipeline.actions import COMPUTE_KINDS, POST_KINDS, Action, Kind
from megatron_dllm.pipeline.graph import Message, Pipeline
from megatron_dllm.pipeline.timing import Costs, time_compute


def transfer_order(ready: int, message: Message) -> tuple[int, str, int, int, int, int]:
    """The sort key that orders all transfers of a step; `ready` is the tick at which the message exists."""
    # Messages that exist at the same tick are ordered by what they are, so that both ranks come to one order.
    _, microbatch, chunk, loop, _, _ = message.producer
    return ready, message.edge, microbatch, loop, chunk, message.source


def add_transfers(pipeline: Pipeline, lists: Sequence[Sequence[Action]], costs: Costs, *, overlap: bool = True) -> list[list[Action]]:
    """Compute lists with the transfers that they need; ValueError if the lists wait for each other in a circle.

    `overlap`: a receive starts before the compute step during which its message comes to exist, and at least one compute step before the
    one that needs it, if the order allows; so the message travels while the rank computes. Without: it starts at the first row after the
    message exists, and the rank waits for it at once. Transfers with no other action between them form a batch. A send is waited for at
    least one compute step after both ends have started.
    """
    timing = time_compute(pipeline, lists, costs)
    steps = [_Steps(actions) for actions in lists]
    rows = [{action: row for row, action in enumerate(actions)} for actions in lists]
    exists = {
        message: timing.finishes[rank][row]
        for rank, actions in enumerate(lists)
        for row, action in enumerate(actions)
        for message in pipeline.outputs(rank, action)
    }
    latest_posts = [0] * pipeline.ranks
    for message in sorted(exists, key=lambda message: transfer_order(exists[message], message)):
        tick, source, destination = exists[message], message.source, message.destination
        starts, finishes = timing.starts[destination], timing.finishes[destination]
        needed = rows[destination][message.consumer]
        sent = latest_posts[source] = rows[source][message.producer] + 1
        if overlap:
            # The rank's own order stands above an early start.
            received = max(min(bisect_right(finishes, tick), needed - 1), latest_posts[destination])
        else:
            received = bisect_left(starts, tick)
        latest_posts[destination] = received
        steps[source].posts[sent].append(message.send)
        # In a batch of its own, if the message comes later than what this row waits for.
        later = tick > starts[received]
        (steps[destination].early_posts if later else steps[destination].posts)[received].append(message.receive)
        steps[destination].receive_waits[needed if overlap else received].append(message.wait_receive)
        # Both ends have started when the later of the two ranks has come to its row.
        met = max(tick, finishes[received - 1] if received else 0)
        released = max(sent + 1, bisect_left(timing.finishes[source], met) + 1)
        steps[source].send_waits[min(released, len(lists[source]))].append(message.wait_send)
    return [rank_steps.flatten() for rank_steps in steps]


class _Steps:
    """What stands before each row of a compute list, and after the last row."""

    def __init__(self, compute: Sequence[Action]):
        self.compute = compute
        self.send_waits, self.posts, self.receive_waits, self.early_posts = (
            [[] for _ in range(len(compute) + 1)] for _ in range(4)
        )

    def flatten(self) -> list[Action]:
        """For each row: waits for sends, transfers that start, waits for receives, receives that start early, the compute step."""
        actions: list[Action] = []
        for row, step in enumerate(self.compute):
            actions += [*self.send_waits[row], *self.posts[row], *self.receive_waits[row], *self.early_posts[row], step]
        # After the last step the waits for sends include those that have only just started.
        return [*actions, *self.posts[-1], *self.send_waits[-1]]


def add_reductions(pipeline: Pipeline, lists: Sequence[Sequence[Action]]) -> list[list[Action]]:
    """Lists with the reduction of each chunk's gradients after the step that completes them, and after the sends that follow it."""
    if pipeline.forward_only:
        return [list(actions) for actions in lists]
    gradient_kinds = COMPUTE_KINDS - {Kind.FORWARD}
    result = []
    for actions in lists:
        last_rows = {action.chunk: row for row, action in enumerate(actions) if action.kind in gradient_kinds}
        reductions: dict[int, list[Action]] = {}
        for chunk, row in last_rows.items():
            # The upstream rank waits for these sends; nobody waits for the reduction before the step ends.
            while row + 1 < len(actions) and actions[row + 1].kind in POST_KINDS:
                row += 1
            reductions.setdefault(row, []).append(Action(Kind.REDUCE, None, chunk))
        result.append([a for row, action in enumerate(actions) for a in [action, *sorted(reductions.get(row, ()))]])
    return result
