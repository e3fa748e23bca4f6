"""megatron_dllm.context_parallel.layout and microbatch: which token is on which rank, in tables made by hand."""
import numpy as np
import pytest

from megatron_dllm.config import PRESETS, ObjectiveConfig, ParallelConfig
from megatron_dllm.context_parallel.layout import (
    ContextSplit,
    SequenceLayout,
    canvas_bounds,
    chunk_bounds,
    deal_whole_canvases,
    share_each_canvas,
    zigzag,
)
from megatron_dllm.context_parallel.microbatch import SharedMicrobatch
from megatron_dllm.parallel import ParallelContext
from tests.unit.test_visibility import layout


def lists(parts):
    return [part.tolist() for part in parts]


def test_zigzag_by_hand():
    assert lists(zigzag(8, 2)) == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert lists(zigzag(11, 2)) == [[0, 1, 8, 9, 10], [2, 3, 4, 5, 6, 7]]
    assert lists(zigzag(9, 4)) == [[0, 7, 8], [1, 6], [2, 5], [3, 4]]
    assert lists(zigzag(1, 2)) == [[0], []]
    assert lists(zigzag(3, 1)) == [[0, 1, 2]]
    assert lists(zigzag(0, 2)) == [[], []]


def test_chunk_bounds_are_near_equal():
    for length in range(30):
        sizes = np.diff(chunk_bounds(length, 8))
        assert sizes.sum() == length and sizes.max() - sizes.min() <= 1


def test_share_each_canvas_by_hand():
    ids = np.repeat([0, 1], 4)
    assert lists(share_each_canvas(ids, 2)) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert lists(share_each_canvas(np.repeat([3, 9], [5, 1]), 2)) == [[0, 1], [2, 3, 4, 5]]
    assert lists(share_each_canvas(ids[:0], 2)) == [[], []]


def test_deal_whole_canvases_by_hand():
    assert lists(deal_whole_canvases(np.repeat([0, 1, 2, 3], 2), 2)) == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert lists(deal_whole_canvases(np.repeat([5], 3), 2)) == [[0, 1, 2], []]
    assert canvas_bounds(np.array([2, 2, 4])) == [(0, 2), (2, 3)] and canvas_bounds(np.zeros(0)) == []


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("whole", [False, True])
def test_every_token_is_on_one_rank(ranks, whole):
    ids = np.repeat(np.arange(7), 5)
    placed = SequenceLayout.of(23, ids, ranks=ranks, whole_canvases=whole)
    for parts, length in ((placed.clean, 23), (placed.canvas, 35)):
        assert sorted(np.concatenate(parts).tolist()) == list(range(length))
        assert all((np.diff(part) > 0).all() for part in parts)
    if whole:
        for part in placed.canvas:
            assert all((ids[part] == number).sum() in (0, 5) for number in range(7))


def test_work_of_causal_attention_is_even():
    """Keys seen by the queries of each rank: within a few percent, where two contiguous halves would be 1 to 3."""
    seen = [(part + 1).sum() for part in zigzag(1000, 4)]
    assert max(seen) / min(seen) < 1.02


def test_second_pass_by_hand():
    """A document of 8 clean tokens with canvases of 2 at 2, 4 and 6, of which the last two are taken again."""
    visibility = layout([(8, 4)], canvas_length=2)
    split = ContextSplit(1, 2, False, {"sliding": "halo", "full": "p2p"})
    shared = SharedMicrobatch.of(visibility, split)
    assert shared.own_clean.tolist() == [2, 3, 4, 5] and shared.own_canvas.tolist() == [1]
    kept = {"full": np.arange(4), "sliding": np.array([2, 3])}
    assert shared.own_kept(kept["full"]).tolist() == [0, 1]
    shards = shared.second_pass(kept, np.array([True, True]))
    assert lists(shards["full"].held) == [[0, 1], [2, 3]] and lists(shards["sliding"].held) == [[], [0, 1]]
    assert lists(shards["full"].canvas) == [[0], [1]] and lists(shards["full"].clean) == [[], []]
    assert SharedMicrobatch.of(visibility, ContextSplit()).first_pass() is None


def test_second_pass_numbers_the_chosen_canvases_alone():
    visibility = layout([(6, 2), (4, 1)], canvas_length=2)
    shared = SharedMicrobatch.of(visibility, ContextSplit(0, 2, False, {"full": "p2p"}))
    assert lists(shared.layout.canvas) == [[0, 2], [1, 3]]
    shards = shared.second_pass({"full": np.array([6])}, np.array([False, False, True, True]))
    assert lists(shards["full"].canvas) == [[0], [1]] and lists(shards["full"].held) == [[], [0]]


def test_split_of_a_run():
    split = ContextSplit.of(
        ParallelContext.single(), ParallelConfig(cp_comm_type="a2a"), ObjectiveConfig(canvases_scored="all"), PRESETS["toy"])
    assert split == ContextSplit(0, 1, True, {"sliding": "halo", "full": "a2a"})
