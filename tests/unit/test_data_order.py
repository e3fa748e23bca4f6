from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from megatron_dllm.data.order import BlendedOrder, Packing, Row, RowOrder, permutation
from megatron_dllm.data.packing import pack_rows


def next_fit(lengths, capacity, max_canvases, canvases):
    """The plain loop that pack_rows must agree with."""
    rows, tokens, decoded = [], 0, 0
    for place, (length, count) in enumerate(zip(lengths, canvases, strict=True)):
        if rows and tokens + length <= capacity and decoded + count <= max_canvases:
            rows[-1].append(place)
            tokens, decoded = tokens + length, decoded + count
        else:
            rows.append([place])
            tokens, decoded = length, count
    return rows


def test_pack_rows_typed_by_hand():
    assert pack_rows(np.array([3, 4, 2, 5]), 8, 2).tolist() == [0, 2, 4]
    assert pack_rows(np.array([3, 4, 2, 5]), 9, 9).tolist() == [0, 3, 4]
    assert pack_rows(np.array([8, 8]), 8, 2).tolist() == [0, 1, 2]
    assert pack_rows(np.array([1, 1, 1, 1]), 8, 3, np.array([1, 2, 1, 3])).tolist() == [0, 2, 3, 4]
    assert pack_rows(np.array([], np.int64), 8, 2).tolist() == [0]


def test_pack_rows_is_next_fit():
    random = np.random.default_rng(1)
    for capacity, limit in ((40, 3), (17, 100), (400, 7), (16, 4)):
        lengths, canvases = random.integers(1, 17, 301), random.integers(1, 4, 301)
        offsets = pack_rows(lengths, capacity, limit, canvases)
        rows = [list(range(a, b)) for a, b in zip(offsets[:-1], offsets[1:], strict=True)]
        assert rows == next_fit(lengths, capacity, limit, canvases)


def test_pack_rows_refuses_what_no_row_holds():
    with pytest.raises(ValueError, match="example 1 needs 9 of the 8 tokens of a row; raise --seq-length"):
        pack_rows(np.array([3, 9]), 8, 2)
    with pytest.raises(ValueError, match="needs 3 of the 2 canvases of a row; raise --max-canvases-per-row"):
        pack_rows(np.array([3, 4]), 8, 2, np.array([1, 3]))


def test_permutation_is_fixed_by_its_key_alone():
    # Written down once: a run that is resumed under another numpy must go on in the same order.
    assert permutation(7, seed=1234, epoch=0).tolist() == [3, 0, 5, 4, 1, 2, 6]
    others = [permutation(97, seed=s, epoch=e, source=p).tolist() for s, e, p in ((1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1))]
    assert len({tuple(other) for other in others}) == 4


LENGTHS = np.array([5, 0, 9, 4, 7, 0, 6, 6, 3, 8, 5])


def orders():
    yield RowOrder(LENGTHS, seed=3)
    yield RowOrder(LENGTHS, seed=3, packing=Packing(16, 2))
    yield RowOrder(LENGTHS, seed=3, packing=Packing(20, 4), canvases=np.where(LENGTHS > 6, 2, 1))


@pytest.mark.parametrize("which", range(3))
def test_row_gives_each_example_once_an_epoch_and_epochs_differ(which):
    order = list(orders())[which]
    epochs = [[], [], []]
    for n in range(order.rows_before(3)):
        row = order.row(n)
        epochs[row.epoch] += row.indices
    assert all(sorted(epoch) == np.flatnonzero(LENGTHS).tolist() for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert order.row(order.rows_before(3)).epoch == 3


@pytest.mark.parametrize("which", range(3))
def test_row_needs_only_its_number(which):
    """A new order asked for row n first, or for rows backwards, gives what one that went through all of them gave."""
    straight = list(orders())[which]
    rows = [straight.row(n) for n in range(40)]
    for n in (0, 1, 9, 23, 39):
        assert list(orders())[which].row(n) == rows[n]
    backwards = list(orders())[which]
    assert [backwards.row(n) for n in reversed(range(40))] == rows[::-1]


def test_row_keeps_the_limits_of_packing():
    canvases = np.where(LENGTHS > 6, 2, 1)
    order = RowOrder(LENGTHS, seed=3, packing=Packing(20, 4), canvases=canvases)
    rows = [list(order.row(n).indices) for n in range(30)]
    assert all(LENGTHS[row].sum() <= 20 and canvases[row].sum() <= 4 for row in rows)
    assert max(map(len, rows)) > 1


def test_row_without_shuffling_keeps_the_order_of_the_source():
    order = RowOrder(LENGTHS, seed=3, shuffle=False)
    assert [order.row(n) for n in (0, 1, 8, 9)] == [Row(0, (0,)), Row(0, (2,)), Row(0, (10,)), Row(1, (0,))]


def test_row_order_refuses_when_nothing_fits():
    with pytest.raises(ValueError, match="no example is left"):
        RowOrder(np.zeros(3, np.int64), seed=0)


@pytest.mark.parametrize("weights", [[0.3, 0.7], [1, 1, 1], [0.01, 5, 2.5, 0.1], [4]])
def test_place_follows_the_due_times(weights):
    orders = [RowOrder(np.ones(5), seed=0, source=i) for i in range(len(weights))]
    blend = BlendedOrder(orders, weights, [5] * len(weights))
    shares = [Fraction(str(w)) / sum(Fraction(str(w)) for w in weights) for w in weights]
    count = 400
    due = sorted(((k + Fraction(1, 2)) / share, i, k) for i, share in enumerate(shares) for k in range(count))[:count]
    assert [blend.place(n) for n in range(count)] == [(i, k) for _, i, k in due]
    far = 10**9
    nearby = Counter(blend.place(n)[0] for n in range(far, far + 1000))
    assert all(abs(nearby[i] - 1000 * share) <= len(weights) for i, share in enumerate(shares))


def test_blended_row_counts_indices_through_all_sources():
    parts = [RowOrder(np.ones(3), seed=5, source=0), RowOrder(np.ones(4), seed=5, source=1)]
    blend = BlendedOrder(parts, [1, 3], [3, 4])
    for n in range(50):
        source, within = blend.place(n)
        row = parts[source].row(within)
        assert blend.row(n) == Row(row.epoch, tuple(index + (0, 3)[source] for index in row.indices))
    first = [blend.row(n).indices[0] for n in range(16)]
    assert sum(index < 3 for index in first) == 4
