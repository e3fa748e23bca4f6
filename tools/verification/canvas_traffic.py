"""What the attention of a canvas sends under context parallelism, counted in the calls: by the canvas's length, not by the sequence's."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_dllm.context_parallel.layout import SequenceLayout
from megatron_dllm.context_parallel.plan import Shards, sharded_plan
from megatron_dllm.parallel import ParallelContext, Topology, create_context
from megatron_dllm.transformer.visibility import CLEAN, Visibility
from tests.parallel.world import World

from .table import Figure

HEADS, KEY_HEADS, HEAD_DIM = 4, 2, 8
SIZES = ((256, 16), (1024, 16), (256, 32), (1024, 32))  # clean tokens, canvas tokens


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends in a full layer, forward and backward: for a canvas at the end, and for the clean tokens (p2p)."""

    clean_tokens: int
    canvas_tokens: int
    canvas_bytes: int
    clean_bytes: int

    def __str__(self) -> str:
        return (f"{self.clean_tokens} clean tokens, canvas of {self.canvas_tokens}: {self.canvas_bytes:,} bytes for the canvas, "
                f"{self.clean_bytes:,} for the clean tokens")


def canvas_traffic(context: ParallelContext, sizes: Sequence[tuple[int, int]] = SIZES) -> list[Traffic]:
    """One layer's attention for each of the sizes. Every rank of cp calls it."""
    return [_traffic(context, clean, canvas) for clean, canvas in sizes]


def measure(ranks: int) -> list[Traffic]:
    """Rank 0's traffic over so many gloo processes, started for it."""
    world = World(ranks)
    try:
        return world.run(traffic_of_rank, ranks)[0]
    finally:
        world.close()


def traffic_of_rank(rank: int, ranks: int) -> list[Traffic]:
    """On each process of a world of as many."""
    return canvas_traffic(create_context(Topology(world=ranks, cp=ranks), rank=rank, device=torch.device("cpu"), sequence_parallel=False))


def _traffic(context: ParallelContext, clean_tokens: int, canvas_tokens: int) -> Traffic:
    cp, ids, place = context.cp, np.zeros(canvas_tokens, np.int64), np.arange(clean_tokens)
    visibility = Visibility(
        np.zeros(clean_tokens + canvas_tokens, np.int64), np.concatenate([place + 1, ids + clean_tokens]),
        np.concatenate([np.full(clean_tokens, CLEAN), ids]), ids, clean_tokens)
    layout = SequenceLayout.of(clean_tokens, ids, ranks=cp.size, whole_canvases=False)
    plan = sharded_plan(visibility, None, Shards(layout.clean, layout.clean, layout.canvas, False, "p2p", cp.rank), context.device)

    def random(rows: int, heads: int) -> torch.Tensor:
        return torch.randn(rows, heads, HEAD_DIM, device=context.device, requires_grad=True)

    key, value = random(plan.num_keys, KEY_HEADS), random(plan.num_keys, KEY_HEADS)
    sent = []
    for part, queries, keys in (
            (plan.replicated, plan.num_replicated, plan.num_keys), (plan.stationary, plan.num_stationary, plan.num_held)):
        before = cp.log.total(group_name="cp")[1]
        part.attend(random(queries, HEADS), key[:keys], value[:keys], cp).sum().backward()
        sent.append(cp.log.total(group_name="cp")[1] - before)
    return Traffic(clean_tokens, canvas_tokens, *sent)


def traffic_figures(traffic: Sequence[Traffic]) -> list[Figure]:
    """How far a canvas's bytes are from what its length alone gives: the first row's, in proportion to the canvas."""
    base = traffic[0]
    figures = []
    for row in traffic[1:]:
        expected = base.canvas_bytes * row.canvas_tokens / base.canvas_tokens
        figures.append(Figure(
            f"canvas bytes, {row.clean_tokens} clean tokens, canvas of {row.canvas_tokens}", abs(row.canvas_bytes - expected), 0,
            f"{row.canvas_bytes:,} bytes where {base.clean_tokens} and {base.canvas_tokens} tokens take {base.canvas_bytes:,}; "
            f"clean tokens {row.clean_bytes:,} and {base.clean_bytes:,}"))
    return figures
