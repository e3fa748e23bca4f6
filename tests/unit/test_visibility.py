"""megatron_dllm.transformer.visibility and attention_work: three integers a query, as masks typed by hand and as work lists."""
import numpy as np
import pytest

from megatron_dllm.transformer.attention_work import work_list
from megatron_dllm.transformer.visibility import CLEAN, Visibility


def layout(documents, canvas_length):
    """Visibility of documents (length, start of its canvas or None for none)."""
    first, past, ids, start, canvases = [], [], [], 0, []
    for length, canvas in documents:
        first += [start] * length
        past += range(start + 1, start + length + 1)
        if canvas is not None:
            canvases.append((start, start + canvas))
        start += length
    for number, (first_key, past_key) in enumerate(canvases):
        first += [first_key] * canvas_length
        past += [past_key] * canvas_length
        ids += [number] * canvas_length
    ids = np.array(ids, np.int64)
    return Visibility(np.array(first), np.array(past), np.concatenate([np.full(start, CLEAN), ids]), ids, start)


TWO_DOCUMENTS = layout([(4, 2), (3, 1)], canvas_length=2)


def test_dense_by_hand():
    assert TWO_DOCUMENTS.dense().astype(int).tolist() == [
        # document 0  document 1  canvas 0  canvas 1
        [1, 0, 0, 0,  0, 0, 0,    0, 0,     0, 0],
        [1, 1, 0, 0,  0, 0, 0,    0, 0,     0, 0],
        [1, 1, 1, 0,  0, 0, 0,    0, 0,     0, 0],
        [1, 1, 1, 1,  0, 0, 0,    0, 0,     0, 0],
        [0, 0, 0, 0,  1, 0, 0,    0, 0,     0, 0],
        [0, 0, 0, 0,  1, 1, 0,    0, 0,     0, 0],
        [0, 0, 0, 0,  1, 1, 1,    0, 0,     0, 0],
        [1, 1, 0, 0,  0, 0, 0,    1, 1,     0, 0],
        [1, 1, 0, 0,  0, 0, 0,    1, 1,     0, 0],
        [0, 0, 0, 0,  1, 0, 0,    0, 0,     1, 1],
        [0, 0, 0, 0,  1, 0, 0,    0, 0,     1, 1]]


def test_windowed_by_hand():
    """Window 2: a clean query sees itself and one before; a canvas sees one key before its start, all its queries alike."""
    assert TWO_DOCUMENTS.windowed(2).dense().astype(int).tolist() == [
        [1, 0, 0, 0,  0, 0, 0,    0, 0,     0, 0],
        [1, 1, 0, 0,  0, 0, 0,    0, 0,     0, 0],
        [0, 1, 1, 0,  0, 0, 0,    0, 0,     0, 0],
        [0, 0, 1, 1,  0, 0, 0,    0, 0,     0, 0],
        [0, 0, 0, 0,  1, 0, 0,    0, 0,     0, 0],
        [0, 0, 0, 0,  1, 1, 0,    0, 0,     0, 0],
        [0, 0, 0, 0,  0, 1, 1,    0, 0,     0, 0],
        [0, 1, 0, 0,  0, 0, 0,    1, 1,     0, 0],
        [0, 1, 0, 0,  0, 0, 0,    1, 1,     0, 0],
        [0, 0, 0, 0,  1, 0, 0,    0, 0,     1, 1],
        [0, 0, 0, 0,  1, 0, 0,    0, 0,     1, 1]]


def test_a_window_that_is_longer_than_a_document_ends_with_it():
    seen = TWO_DOCUMENTS.windowed(6)
    assert seen.first_key.tolist() == [0, 0, 0, 0, 4, 4, 4, 0, 0, 4, 4] and seen.past_key.tolist() == TWO_DOCUMENTS.past_key.tolist()


def test_key_intervals_by_hand():
    assert TWO_DOCUMENTS.key_intervals().tolist() == [
        [0, 1, 0, 0], [0, 2, 0, 0], [0, 3, 0, 0], [0, 4, 0, 0], [4, 5, 0, 0], [4, 6, 0, 0], [4, 7, 0, 0],
        [0, 2, 7, 9], [0, 2, 7, 9], [4, 5, 9, 11], [4, 5, 9, 11]]


def test_key_intervals_of_canvases_without_their_keys():
    """A rank of context parallelism may have the queries of a canvas and not its keys."""
    some = Visibility(np.array([0, 1, 2]), np.array([2, 2, 5]), np.array([3, 7, CLEAN]), np.array([3, 3]), 5)
    assert some.key_intervals().tolist() == [[0, 2, 5, 7], [1, 2, 0, 0], [2, 5, 0, 0]]
    with pytest.raises(AssertionError, match="stand apart"):
        Visibility(np.zeros(1), np.ones(1), np.array([3]), np.array([3, 7, 3]), 5).key_intervals()


def covered(groups, visibility):
    """The mask that a work list computes; every query must be in exactly one piece."""
    mask, seen = np.zeros_like(visibility.dense()), np.zeros(len(visibility.canvas_id), int)
    for group in groups:
        for queries, keys in zip(group.queries, group.keys, strict=True):
            inner = np.ones((len(queries), len(keys)), bool) if group.mask is None else group.mask
            if group.causal:
                inner = np.tril(np.ones((len(queries), len(keys)), bool))
            mask[np.ix_(queries, keys)] = inner
            seen[queries] += 1
    assert (seen == 1).all()
    return mask


DOCUMENTS = {
    "one": [(7, 3)], "unequal": [(5, 0), (1, None), (200, 77), (64, 64), (65, 1)], "equal": [(33, 17), (33, 17), (33, 5)],
    "no canvas": [(9, None), (130, None)], "canvas first": [(4, 0)], "one token": [(1, 0)]}


@pytest.mark.parametrize("window", [None, 1, 2, 7, 64, 1000])
@pytest.mark.parametrize("documents", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize("on_cpu", [False, True])
def test_work_list_covers_exactly_the_mask(documents, window, on_cpu):
    visibility = layout(documents, canvas_length=5)
    assert np.array_equal(covered(work_list(visibility, window, on_cpu=on_cpu), visibility), visibility.windowed(window).dense())


@pytest.mark.parametrize("window", [None, 3, 70])
@pytest.mark.parametrize(("before", "new"), [(0, 5), (4, 1), (11, 200), (2, 66)])
def test_work_list_after_a_context(before, new, window):
    """New clean tokens after keys that are at hand: query i sees before + i + 1 keys, of those the last `window`."""
    count = np.arange(new)
    visibility = Visibility(np.zeros(new, np.int64), before + 1 + count, np.full(new, CLEAN), np.zeros(0, np.int64), before + new)
    assert np.array_equal(covered(work_list(visibility, window), visibility), visibility.windowed(window).dense())


def test_masks_of_a_work_list_do_not_grow_with_the_sequence():
    largest = [max(group.mask.size for group in work_list(layout([(length, None)], 1), 100) if group.mask is not None)
               for length in (1000, 4000)]
    assert largest[0] == largest[1]


@pytest.mark.parametrize("window", [None, 1, 2, 3, 40])
@pytest.mark.parametrize("documents", [DOCUMENTS["unequal"], DOCUMENTS["equal"]], ids=["unequal", "equal"])
def test_kept_keys_serve_a_second_loop(documents, window):
    """With only the kept keys at hand, chosen canvases see the same keys as before."""
    visibility = layout(documents, canvas_length=5)
    chosen = (visibility.canvas_id >= 1)
    kept = visibility.windowed(window).kept_keys(chosen)
    again = visibility.against_kept(chosen, kept)
    columns = np.concatenate([kept, visibility.num_clean_keys + np.flatnonzero(visibility.canvas_keys >= 1)])
    expected = visibility.windowed(window).dense()[chosen][:, columns]
    assert np.array_equal(again.windowed(window).dense(), expected) and expected[:, :len(kept)].any(0).all()
    assert expected.sum() == visibility.windowed(window).dense()[chosen].sum()
