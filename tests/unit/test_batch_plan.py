"""megatron_dllm.diffusion.batch_plan: cutting, draws, slots and denominators."""
import dataclasses

import numpy as np
import pytest

from megatron_dllm.config import ObjectiveConfig
from megatron_dllm.config.extensions import NOISE_SCHEDULES
from megatron_dllm.diffusion.batch_plan import NOISE_RANGE, RowRequest, fit_example, plan_batch
from megatron_dllm.diffusion.random import DrawKey, Stream

OBJECTIVE = ObjectiveConfig()


def request(sample, prompt, response, *, canvas_length=4, truncated=False, seed=1):
    fit = fit_example(prompt, response, seq_length=64, canvas_length=canvas_length)
    return RowRequest([sample], [DrawKey(seed, Stream.TRAIN, 0, sample, 0)], [fit], [truncated])


def examples(plan):
    return [example for rank in plan.microbatches for microbatch in rank for example in microbatch.examples]


@pytest.mark.parametrize(("prompt", "response", "seq_length", "expected"), [
    (3, 8, 16, (3, 8, 2, 11)),     # two whole canvases
    (3, 5, 16, (3, 5, 2, 11)),     # the last one is filled
    (0, 1, 16, (0, 1, 1, 4)),      # no prompt
    (3, 30, 16, (3, 12, 3, 15)),   # cut after the last whole canvas: no fill follows
    (12, 30, 16, (12, 4, 1, 16)),  # just one fits
    (13, 4, 16, None),             # no room for one
    (16, 4, 16, None), (20, 4, 16, None), (3, 0, 16, None)])
def test_fit_example(prompt, response, seq_length, expected):
    fit = fit_example(prompt, response, seq_length=seq_length, canvas_length=4)
    assert expected == (fit and (fit.prompt, fit.response, fit.num_canvases, fit.total))


def test_denominators_of_lengths_11_5_and_2():
    """Prompts 9, 4 and 1 with one-token responses in canvases of 2: totals 11, 6 and 3, hence 10, 5 and 2 pairs; 3 canvases of 2."""
    rows = [request(i, *lengths, canvas_length=2) for i, lengths in enumerate([(9, 1), (4, 1), (1, 1)])]
    by_example = plan_batch(rows, OBJECTIVE, micro_batch_size=3)
    by_token = plan_batch(rows, dataclasses.replace(OBJECTIVE, encoder_loss_normalization="token"), micro_batch_size=3)
    response = plan_batch(rows, dataclasses.replace(OBJECTIVE, encoder_loss_normalization="token", encoder_loss_tokens="response"),
                          micro_batch_size=3)
    assert dataclasses.astuple(by_example.denominators) == (3, 6, 26)
    assert dataclasses.astuple(by_token.denominators) == (17, 6, 26)
    assert dataclasses.astuple(response.denominators) == (6, 6, 26)


def test_an_example_without_a_pair_leaves_the_denominator():
    rows = [request(0, 0, 1, canvas_length=1), request(1, 3, 1, canvas_length=1)]
    assert plan_batch(rows, OBJECTIVE, micro_batch_size=2).denominators.encoder == 1


@pytest.mark.parametrize(("score", "fill", "truncated", "count"), [
    ("all", "all", False, 8), ("all", "not-if-truncated", False, 8), ("all", "not-if-truncated", True, 5)])
def test_scored_tokens(score, fill, truncated, count):
    objective = dataclasses.replace(OBJECTIVE, canvases_scored="all", score_tokens=score, score_eos_fill=fill)
    plan = plan_batch([request(0, 3, 5, truncated=truncated)], objective, micro_batch_size=1)
    assert plan.denominators.decoder == count


def test_in_a_packed_row_each_example_has_its_own_mark_of_truncation():
    pairs, cut = ((3, 5), (3, 8), (3, 2)), (False, True, True)
    rows = [request(i, *pair) for i, pair in enumerate(pairs)]
    packed = RowRequest([0, 1, 2], [row.keys[0] for row in rows], [row.fits[0] for row in rows], cut)
    objective = dataclasses.replace(OBJECTIVE, canvases_scored="all", score_eos_fill="not-if-truncated")
    plan = plan_batch([packed], objective, micro_batch_size=1)
    assert [e.scored_fill for e in examples(plan)] == [True, False, False]
    assert plan.denominators.decoder == 8 + 8 + 2


def test_scored_corrupted_tokens_are_the_replaced_ones():
    objective = dataclasses.replace(OBJECTIVE, canvases_scored="all", score_tokens="corrupted")
    plan = plan_batch([request(i, 3, 40) for i in range(16)], objective, micro_batch_size=16)
    replaced = sum(int(e.corrupted(c).sum()) for e in examples(plan) for c in e.canvases)
    assert 0 < replaced == plan.denominators.decoder < 16 * 40


def test_corruption_follows_the_noise_level():
    plan = plan_batch([request(i, 0, 60) for i in range(400)], dataclasses.replace(OBJECTIVE, canvases_scored="all"), micro_batch_size=400)
    drawn = examples(plan)
    levels = np.array([e.noise_level for e in drawn])
    shares = np.array([np.mean([e.corrupted(c).mean() for c in e.canvases]) for e in drawn])
    assert levels.min() >= 1e-3 - 2**-32 and levels.max() < 1
    # A share of 60 draws has a standard deviation of at most 0.065.
    assert np.abs(shares - levels).max() < 0.33 and np.abs((shares - levels).mean()) < 0.02


def test_canvases_and_coins_are_drawn_evenly():
    drawn = examples(plan_batch([request(i, 4, 12) for i in range(900)], OBJECTIVE, micro_batch_size=900))
    # 300 of each canvas and 450 heads are expected; five standard deviations are 71 and 75.
    assert np.abs(np.bincount([e.canvases[0] for e in drawn], minlength=3) - 300).max() < 71
    assert abs(sum(e.self_conditioned for e in drawn) - 450) < 75


def test_antithetic_levels_cover_the_range():
    objective = dataclasses.replace(OBJECTIVE, noise_sampling="antithetic")
    plan = plan_batch([request(i, 4, 12) for i in range(8)], objective, micro_batch_size=8)
    levels = sorted(example.noise_level for example in examples(plan))
    assert [int(8 * (level - 1e-3) / (1 - 1e-3)) for level in levels] == list(range(8))


def test_reweighted_levels_stay_away_from_one():
    objective = dataclasses.replace(OBJECTIVE, diffusion_loss="reweighted", noise_min=0.25)
    levels = [e.noise / NOISE_RANGE for e in examples(plan_batch([request(i, 4, 12) for i in range(200)], objective, micro_batch_size=200))]
    assert max(levels) == 0.75 and min(levels) >= 0.25


@pytest.mark.parametrize(("level", "expected"), [(0.0, 0.25), (0.5, 0.5), (2.0, 1.0)], ids=["below", "inside", "above"])
def test_a_schedule_of_a_users_own_is_held_to_the_range(level, expected, monkeypatch):
    monkeypatch.setitem(NOISE_SCHEDULES.rows, "flat", lambda drawn: level)
    objective = dataclasses.replace(OBJECTIVE, noise_schedule="flat", noise_min=0.25)
    assert [e.noise_level for e in examples(plan_batch([request(0, 4, 12)], objective, micro_batch_size=1))] == [expected]


@pytest.mark.parametrize(("micro", "ranks"), [(1, 1), (2, 2), (4, 2), (1, 4)])
def test_self_conditioned_rows_share_microbatch_numbers(micro, ranks):
    plan = plan_batch([request(i, 4, 12, seed=12) for i in range(16)], OBJECTIVE, micro_batch_size=micro, data_parallel_size=ranks)
    # Nine, which no number of slots divides: in the last ones that have any, some ranks have none.
    conditioned = sum(e.self_conditioned for e in examples(plan))
    second = sum(plan.second_loop(m) for m in range(len(plan.microbatches[0])))
    assert conditioned == 9 and second == -(-conditioned // (micro * ranks))
    drafted = plan.with_every_draft()
    assert all(microbatch.self_conditioned for rank in drafted.microbatches for microbatch in rank)


def test_slots_hold_every_row_once_and_draws_do_not_depend_on_them():
    rows = [request(i, 4 + i, 12) for i in range(8)]
    one = {e.index: e for e in examples(plan_batch(rows, OBJECTIVE, micro_batch_size=8))}
    many = examples(plan_batch(rows, OBJECTIVE, micro_batch_size=1, data_parallel_size=4))
    assert sorted(e.index for e in many) == list(range(8)) and all(one[e.index] == e for e in many)


def test_rows_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="3 rows do not divide into slots of 2"):
        plan_batch([request(i, 4, 12) for i in range(3)], OBJECTIVE, micro_batch_size=2)


def test_the_causal_objective_has_no_canvas():
    plan = plan_batch([request(0, 4, 12, canvas_length=1)], dataclasses.replace(OBJECTIVE, objective="ar"), micro_batch_size=1)
    assert examples(plan)[0].canvases == () and dataclasses.astuple(plan.denominators) == (1, 0, 16)
