"""Attention over tokens that 2 and 4 ranks share, against the dense oracle on one process (float64); bytes; planted faults."""
import dataclasses
from dataclasses import dataclass
from unittest import mock

import numpy as np
import pytest
import torch

from megatron_dllm.context_parallel import plan as plan_module
from megatron_dllm.context_parallel.layout import SequenceLayout
from megatron_dllm.context_parallel.plan import Shards, sharded_plan
from megatron_dllm.parallel import Topology, communication, create_context
from megatron_dllm.transformer.core_attention import attend_dense
from tests.unit.test_core_attention import random_inputs
from tests.unit.test_visibility import layout
from tools.verification.canvas_traffic import Traffic, traffic_figures, traffic_of_rank

CPU = torch.device("cpu")
TOLERANCE = 1e-12
LOST = "a key at the border of a chunk is lost"
CROSSES = "a document's first token sees the document before it"


@dataclass(frozen=True)
class Case:
    """A first pass, or with `kept` a second one of the first canvas alone over what it sees; with `num_fill` rows of fill."""

    documents: tuple
    window: int | None
    comm_type: str
    whole: bool = False
    kept: bool = False
    num_fill: int = 0
    heads: int = 4
    groups: int = 2
    dim: int = 6


def problem_of(case, ranks, rank):
    """(visibility of all queries and keys of the pass, shards)."""
    visibility = layout(case.documents, canvas_length=5)
    placed = SequenceLayout.of(visibility.num_clean_keys, visibility.canvas_keys, ranks=ranks, whole_canvases=case.whole)
    held, clean, canvas = placed.clean, placed.clean, placed.canvas
    if case.kept:
        chosen = visibility.canvas_id == 0
        kept = visibility.windowed(case.window).kept_keys(chosen)
        held = tuple(np.flatnonzero(np.isin(kept, part)) for part in held)
        clean, canvas = tuple(part[:0] for part in clean), tuple(part[visibility.canvas_keys[part] == 0] for part in canvas)
        visibility = visibility.against_kept(chosen, kept)
    return visibility, Shards(held, clean, canvas, case.whole, case.comm_type, rank)


def fault_in(name):
    """Plans that are wrong in one way."""
    plain = plan_module.seen_by
    if name == LOST:
        def seen_by(visibility, queries, held, canvas):
            seen = plain(visibility, queries, held, canvas)
            at_end = (seen.past_key == seen.num_clean_keys) & (seen.past_key > seen.first_key + 1)
            return dataclasses.replace(seen, past_key=seen.past_key - at_end)
    else:
        def seen_by(visibility, queries, held, canvas):
            return plain(dataclasses.replace(visibility, first_key=np.maximum(visibility.first_key - 1, 0)), queries, held, canvas)
    return mock.patch.object(plan_module, "seen_by", seen_by)


def attend_here(case, rank, cp, inputs, upstream):
    """((out, dq, dk, dv) of our rows, the same of the oracle)."""
    visibility, shards = problem_of(case, cp.size, rank)
    plan = sharded_plan(visibility, case.window, shards, CPU)
    num_clean = len(visibility.canvas_id) - len(visibility.canvas_keys)
    queries = torch.from_numpy(np.concatenate([shards.clean[rank], num_clean + shards.canvas[rank]]))
    keys = torch.from_numpy(np.concatenate([shards.held[rank], visibility.num_clean_keys + shards.canvas[rank]]))
    fill = torch.ones(case.num_fill, case.heads, case.dim, dtype=torch.float64)
    own = [torch.cat([x.detach()[rows], fill[:, :x.shape[1]]]).requires_grad_()
           for x, rows in zip(inputs, (queries, keys, keys), strict=True)]
    out = plan.attend(*own, cp)
    found = [out, *torch.autograd.grad(out, own, torch.cat([upstream[queries], fill]))]
    if case.num_fill:
        assert not found[0][-case.num_fill:].any() and not found[1][-case.num_fill:].any()
    expected = attend_dense(*inputs, visibility.windowed(case.window))
    wanted = [expected, *torch.autograd.grad(expected, inputs, upstream)]
    return [x[:len(rows)] for x, rows in zip(found, (queries, queries, keys, keys), strict=True)], [
        x[rows] for x, rows in zip(wanted, (queries, queries, keys, keys), strict=True)]


def worst_differences(rank, size, cases, fault=None):
    """Of each case, the largest difference of out or of any gradient on this rank."""
    context = create_context(Topology(world=size, cp=size), rank=rank, device=CPU, sequence_parallel=False)
    worst = {}
    for name, case in cases.items():
        visibility, _ = problem_of(case, size, rank)
        inputs = random_inputs(visibility, heads=case.heads, groups=case.groups, dim=case.dim, dtype=torch.float64)
        upstream = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        if fault is None:
            found, wanted = attend_here(case, rank, context.cp, inputs, upstream)
        else:
            with fault_in(fault):
                found, wanted = attend_here(case, rank, context.cp, inputs, upstream)
        differences = [(a - b).abs().max().item() for a, b in zip(found, wanted, strict=True) if a.numel()]
        worst[name] = max(differences, default=0.0)
    return worst


DOCUMENTS = {"one": ((41, 30),), "several": ((5, 0), (1, None), (40, 27), (16, 16), (15, 1)), "short": ((2, 1),)}
TYPES = {"sliding": ("halo", "p2p", "all_gather", "a2a"), "full": ("p2p", "all_gather", "a2a")}
CASES = {
    f"{name}, {kind} {comm_type}{', whole' * whole}{', kept' * kept}":
        Case(documents, 7 if kind == "sliding" else None, comm_type, whole=whole, kept=kept, num_fill=3 * (comm_type == "p2p"))
    for name, documents in DOCUMENTS.items() for kind, types in TYPES.items() for comm_type in types
    for whole in (False, True) for kept in (False, True)}
CASES |= {
    "one token": Case(((1, None),), 7, "halo"), "one token, p2p": Case(((1, None),), None, "p2p"),
    "window of one": Case(((9, 4),), 1, "halo"), "window beyond everything": Case(((9, 4), (30, 20)), 100, "halo"),
    "no canvas": Case(((9, None), (30, None)), None, "p2p"),
    "one key head": Case(DOCUMENTS["several"], None, "a2a", groups=1),
    "as many key heads": Case(DOCUMENTS["several"], None, "a2a", groups=4),
    "odd heads": Case(DOCUMENTS["several"], 7, "p2p", heads=3, groups=3, dim=5)}


@pytest.mark.parametrize("size", [2, 4])
def test_attention_equals_the_oracle(world, size):
    assert len(CASES) > 90
    for rank, worst in enumerate(world.run(worst_differences, size, CASES, size=size)):
        wrong = {name: difference for name, difference in worst.items() if not difference <= TOLERANCE}
        assert not wrong, f"rank {rank}: {wrong}"


@pytest.mark.parametrize(("fault", "kind", "documents"), [
    (LOST, kind, DOCUMENTS["one"]) for kind in TYPES] + [(CROSSES, kind, DOCUMENTS["several"]) for kind in TYPES])
def test_a_planted_fault_is_seen(world, fault, kind, documents):
    """With every way of communicating."""
    window = 7 if kind == "sliding" else None
    cases = {comm_type: Case(documents, window, comm_type) for comm_type in TYPES[kind]}
    results = world.run(worst_differences, 2, cases, fault, size=2)
    for comm_type in cases:
        assert max(worst[comm_type] for worst in results) > 1e-3, comm_type


@pytest.mark.parametrize("size", [2, 4])
def test_a_canvas_sends_bytes_by_its_own_length(world, size):
    """Twice the canvas, twice the bytes; four times the sequence, not one byte more. The clean stream grows with the sequence."""
    for rows in world.run(traffic_of_rank, size, size=size):
        print(*rows, sep="\n")
        assert all(figure.holds for figure in traffic_figures(rows)) and rows[0].canvas_bytes > 0
        by_size = {(row.clean_tokens, row.canvas_tokens): row for row in rows}
        assert by_size[1024, 16].canvas_bytes == by_size[256, 16].canvas_bytes == by_size[256, 32].canvas_bytes // 2
        assert by_size[1024, 16].clean_bytes == 4 * by_size[256, 16].clean_bytes > 0


def test_traffic_figures_see_a_canvas_that_grows_with_the_sequence():
    figures = traffic_figures([Traffic(256, 16, 1000, 5), Traffic(1024, 16, 1001, 20), Traffic(256, 32, 2000, 5)])
    assert [figure.holds for figure in figures] == [False, True]


def pairs_traffic(rank, size):
    """(calls, bytes) of the shifts of a forward, then with its backward."""
    context = create_context(Topology(world=size, cp=size), rank=rank, device=CPU, sequence_parallel=False)
    visibility, shards = problem_of(Case(((40, None),), None, "p2p"), size, rank)
    plan = sharded_plan(visibility, None, shards, CPU)
    inputs = [torch.randn(10, heads, 8, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2)]
    out = plan.attend(*inputs, context.cp)
    forward = context.cp.log.total("send")
    out.sum().backward()
    assert communication.all_reduce(torch.ones(()), context.cp).item() == size
    return forward, context.cp.log.total("send")


def test_pairs_send_what_is_reached_and_no_more(world):
    """Rank r has chunks r and 7 - r; the late one is seen by the ranks before it alone. A ring would send both on, three times."""
    chunk = 5 * 4 * 8 * 2  # tokens, key and value heads, dimension, bytes
    results = world.run(pairs_traffic, 4, size=4)
    for rank, (forward, both) in enumerate(results):
        assert forward == (3, (3 + rank) * chunk)
        # The same once more, and home go the gradients of what has come: early chunks of three ranks, late ones of those after ours.
        assert both == (3 + 3 + 3, (2 * (3 + rank) + 3 + 3 - rank) * chunk)
    assert sum(both[1] for _, both in results) == 0.75 * 4 * 3 * 3 * 2 * chunk
