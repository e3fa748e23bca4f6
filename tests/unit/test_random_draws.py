"""megatron_dllm.diffusion.random: draws are functions of their key and position alone."""
import numpy as np
import pytest

from megatron_dllm.diffusion.random import DrawKey, Purpose, Stream, words

KEY = DrawKey(seed=7, stream=Stream.TRAIN, epoch=2, sample=11, unit=3)


@pytest.mark.parametrize(("start", "count"), [(0, 1), (1, 5), (3, 4), (4, 9), (17, 1), (1000, 3), (5, 0)])
def test_words_at_a_position_do_not_depend_on_where_reading_starts(start, count):
    assert np.array_equal(words((1, 2, 3), start, count), words((1, 2, 3), 0, start + count)[start:])


@pytest.mark.parametrize("other", [
    DrawKey(8, Stream.TRAIN, 2, 11, 3), DrawKey(7, Stream.EVALUATE, 2, 11, 3), DrawKey(7, Stream.TRAIN, 3, 11, 3),
    DrawKey(7, Stream.TRAIN, 2, 12, 3), DrawKey(7, Stream.TRAIN, 2, 11, 4)], ids=["seed", "stream", "epoch", "sample", "unit"])
def test_every_part_of_the_key_changes_the_draws(other):
    mine, theirs = (key.uint32(Purpose.CORRUPTION, 0, 64) for key in (KEY, other))
    assert not np.array_equal(mine, theirs)


def test_purposes_are_drawn_apart():
    drawn = [tuple(KEY.uint32(purpose, 0, 8)) for purpose in Purpose]
    assert len(set(drawn)) == len(Purpose)


def test_below_is_uniform_and_in_range():
    drawn = KEY.below(7, Purpose.REPLACEMENT, 0, 70_000)
    assert drawn.min() == 0 and drawn.max() == 6
    # 10000 expected of each; five standard deviations are 463.
    assert np.abs(np.bincount(drawn) - 10_000).max() < 463


def test_uint32_fits_32_bits():
    drawn = KEY.uint32(Purpose.NOISE_LEVEL, 0, 10_000)
    assert drawn.max() < 2**32 and drawn.max() > 0.99 * 2**32
