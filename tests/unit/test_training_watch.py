"""What a run notices by itself: gradient norms that leap, and the rank that the others wait for."""
import math

import pytest

from megatron_dllm.parallel import ParallelContext
from megatron_dllm.training.norm_spikes import LEAST, WINDOW, NormSpikes
from megatron_dllm.training.rank_times import RankTimes, slowest_and_fastest


def noted(norms, multiple=10.0):
    spikes = NormSpikes(multiple)
    return {iteration: text for iteration, norm in enumerate(norms, 1) if (text := spikes.note(iteration, norm))}


def test_a_norm_over_the_multiple_of_the_median_is_named_with_its_iteration():
    found = noted([2.0] * LEAST + [19.9, 21.0, 2.0, float("nan"), float("inf"), 22.0])
    assert list(found) == [LEAST + 2, LEAST + 6]
    assert found[LEAST + 2] == (
        f"iteration {LEAST + 2}: gradient norm 21 is 10.5 times the median 2 of the last {LEAST + 1} (--log-grad-norm-spike 10)")


@pytest.mark.parametrize("norms, multiple", [([1.0] * (LEAST - 1) + [1e6], 10.0), ([1.0] * LEAST + [1e6], 0.0)], ids=["too few", "off"])
def test_nothing_is_judged(norms, multiple):
    assert noted(norms, multiple) == {}


def test_the_median_is_that_of_the_last_norms():
    assert list(noted([1.0] * WINDOW + [9.0] * WINDOW + [89.0, 91.0])) == [2 * WINDOW + 2]
    assert "is 0" in noted([0.0] * LEAST + [1.0])[LEAST + 1]


def test_one_process_has_no_slowest_rank():
    ranks = RankTimes(ParallelContext.single())
    ranks.restart()
    ranks.after_backward()
    assert ranks.drain() == {}


def test_slowest_and_fastest_of_the_ranks():
    assert slowest_and_fastest([3.0, 7.0, 1.0, 7.0]) == {"slowest_rank": 1, "slowest_rank_ms": 7.0, "fastest_rank_ms": 1.0}
    assert math.isclose(slowest_and_fastest([2.5])["fastest_rank_ms"], 2.5)
