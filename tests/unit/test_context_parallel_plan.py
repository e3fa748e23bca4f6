"""megatron_dllm.context_parallel.plan: what is sent to whom, and that together the ranks compute exactly the mask."""
import numpy as np
import pytest
import torch

from megatron_dllm.context_parallel.layout import SequenceLayout
from megatron_dllm.context_parallel.plan import Shards, seen_by, sharded_plan
from tests.unit.test_visibility import layout

CPU = torch.device("cpu")


def shards_of(visibility, ranks, comm_type, *, whole=False):
    placed = SequenceLayout.of(visibility.num_clean_keys, visibility.canvas_keys, ranks=ranks, whole_canvases=whole)
    return [Shards(placed.clean, placed.clean, placed.canvas, whole, comm_type, rank) for rank in range(ranks)]


def plans_of(visibility, window, ranks, comm_type, *, whole=False):
    return [sharded_plan(visibility, window, shards, CPU) for shards in shards_of(visibility, ranks, comm_type, whole=whole)]


def test_seen_by_by_hand():
    """The table of the module: a query that sees keys 1 to 4 of 6."""
    visibility = layout([(1, None), (5, None)], canvas_length=1)
    query, nothing = np.array([4]), np.zeros(0, np.int64)
    for held, first, past in (([0, 4, 5], 1, 2), ([1, 2, 3], 0, 3), ([5], 0, 0), ([0], 1, 1), ([], 0, 0)):
        seen = seen_by(visibility, query, np.array(held, np.int64), nothing)
        assert (seen.first_key.item(), seen.past_key.item()) == (first, past)


def test_halo_by_hand():
    """12 tokens in chunks of 3 over 2 ranks, window 3: each chunk needs the 2 keys before it, unless it has them."""
    first, second = plans_of(layout([(12, None)], canvas_length=1), 3, 2, "halo")
    # Rank 0 has 0 1 2 and 9 10 11: it needs 7 8. Rank 1 has 3 to 8: it needs 1 2.
    assert first.stationary.send_counts == first.stationary.receive_counts == (0, 2)
    assert first.stationary.send[1].index == slice(1, 3) and second.stationary.send[0].index == slice(4, 6)


def test_a_halo_spans_chunks_and_ranks():
    """16 tokens in chunks of 2 over 4 ranks, window 6: the 5 keys before a chunk are on up to three other ranks."""
    plans = plans_of(layout([(16, None)], canvas_length=1), 6, 4, "halo")
    # Rank 3 has 6 7 8 9 and needs 1 to 5: 1 of rank 0, 2 3 of rank 1, 4 5 of rank 2.
    assert plans[3].stationary.receive_counts == (1, 2, 2, 0)
    for sender, plan in enumerate(plans):
        assert [len(rows.index.tolist() if isinstance(rows.index, torch.Tensor) else range(rows.index.start, rows.index.stop))
                for rows in plan.stationary.send] == list(plan.stationary.send_counts)
        assert [other.stationary.receive_counts[sender] for other in plans] == list(plan.stationary.send_counts)


def test_a_halo_never_crosses_a_document():
    """Documents of one chunk each: nothing is sent. One token longer, and its own keys are, no more."""
    apart = plans_of(layout([(3, None)] * 4, canvas_length=1), 100, 2, "halo")
    assert all(plan.stationary.receive_counts == (0, 0) for plan in apart)
    across = plans_of(layout([(2, None), (2, None), (8, None)], canvas_length=1), 100, 2, "halo")
    # Rank 0 has 0 1 2 and 9 10 11, rank 1 has 3 to 8; documents start at 0, 2 and 4.
    assert across[1].stationary.receive_counts == (1, 0)  # token 2, for token 3
    assert across[0].stationary.receive_counts == (0, 5)  # tokens 4 to 8, for 9 to 11


def test_a_halo_does_not_grow_with_the_sequence():
    received = [sum(plans_of(layout([(length, None)], canvas_length=1), 7, 2, "halo")[0].stationary.receive_counts) for length in (64, 640)]
    assert received == [6, 6]


def mask_of_blocks(plan, queries, clean_keys, canvas_keys, shape):
    """bool: which (query, key) pairs a PartialPlan meets, in the numbers of the whole; every pair at most once."""
    mask = np.zeros(shape, int)
    keys = np.concatenate([clean_keys, canvas_keys])
    for block in plan.blocks:
        rows = queries[block.queries]
        inner = np.ones((len(rows), block.clean.stop - block.clean.start), int)
        if block.masked:
            inner = (~plan.hidden(block)).numpy().astype(int)
        mask[np.ix_(rows, keys[block.clean])] += inner
        mask[np.ix_(rows, keys[block.canvas])] += 1
    return mask


DOCUMENTS = {"one": [(13, 5)], "several": [(5, 0), (1, None), (20, 7), (6, 6), (9, 1)], "short": [(2, 1)]}


@pytest.mark.parametrize("whole", [False, True], ids=["shared", "whole"])
@pytest.mark.parametrize("comm_type", ["p2p", "all_gather"])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("documents", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_ranks_together_compute_exactly_the_mask(documents, window, comm_type, whole, ranks):
    visibility = layout(documents, canvas_length=5)
    expected = visibility.windowed(window).dense().astype(int)
    num_clean, total = visibility.num_clean_keys, np.zeros_like(expected)
    everyone = shards_of(visibility, ranks, comm_type, whole=whole)
    plans = [sharded_plan(visibility, window, shards, CPU) for shards in everyone]
    for rank, (shards, plan) in enumerate(zip(everyone, plans, strict=True)):
        canvas = num_clean + shards.canvas[rank]
        queries = np.concatenate([shards.clean[rank], canvas]) if whole else shards.clean[rank]
        seen_canvas = canvas if whole else canvas[:0]
        if comm_type == "p2p":
            total += mask_of_blocks(plan.stationary.own, queries, shards.held[rank], seen_canvas, expected.shape)
            for distance, meeting in enumerate(plan.stationary.meetings, start=1):
                other = (rank - distance) % ranks
                sending = plans[other].stationary.meetings[distance - 1]
                received = shards.held[other][sending.send.index]
                assert len(received) == sending.num_sent == meeting.num_received
                total += mask_of_blocks(meeting.partial, queries, received, canvas[:0], expected.shape)
        else:
            total += mask_of_blocks(plan.stationary.partial, queries, np.arange(num_clean), seen_canvas, expected.shape)
        if not whole:
            all_canvas = num_clean + np.concatenate(shards.canvas)
            total += mask_of_blocks(plan.replicated.partial, all_canvas, shards.held[rank], canvas, expected.shape)
    assert np.array_equal(total, expected)


def test_no_queries_means_no_exchange():
    """Streams without clean queries, without canvases, without anything."""
    nothing = np.zeros(0, np.int64)
    causal = plans_of(layout([(9, None)], canvas_length=1), None, 2, "p2p")[0]
    assert causal.replicated is None and causal.stationary is not None
    visibility = layout([(9, 3)], canvas_length=2)
    only_canvas = visibility.against_kept(visibility.canvas_id == 0, np.arange(3))
    parts = (np.array([0]), np.array([1]))
    alone = sharded_plan(only_canvas, None, Shards((np.array([0]), np.array([1, 2])), (nothing, nothing), parts, False, "p2p", 0), CPU)
    assert alone.stationary is None and alone.num_replicated == 1 and alone.num_keys == 2
    empty = sharded_plan(layout([], 1), None, Shards((nothing,) * 2, (nothing,) * 2, (nothing,) * 2, False, "p2p", 0), CPU)
    x = torch.zeros(0, 2, 3, requires_grad=True)
    assert empty.attend(x, x, x, None) is x
