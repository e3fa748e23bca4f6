"""megatron_dllm.diffusion.streams: what stands where, what is predicted, what it weighs."""
import dataclasses

import numpy as np
import pytest

from megatron_dllm.config import ObjectiveConfig
from megatron_dllm.config.extensions import OBJECTIVES, AddedObjective
from megatron_dllm.diffusion.batch_plan import RowRequest, fit_example, plan_batch
from megatron_dllm.diffusion.random import DrawKey, Purpose, Stream
from megatron_dllm.diffusion.streams import DropoutWords, build_streams

LENGTHS = ((5, 6), (0, 3), (9, 8))
VOCABULARY, FILL = 50, 1


def make(objective, lengths=LENGTHS, canvas_length=4):
    rows = [RowRequest([i], [DrawKey(3, Stream.TRAIN, 0, i, 0)], [fit_example(*pair, seq_length=32, canvas_length=canvas_length)], [False])
            for i, pair in enumerate(lengths)]
    plan = plan_batch(rows, objective, micro_batch_size=len(rows))
    microbatch = plan.microbatches[0][0]
    tokens = [np.arange(10, 10 + e.fit.prompt + e.fit.response, dtype=np.int32) for e in microbatch.examples]
    return microbatch.examples, build_streams(microbatch, tokens, objective, plan.denominators, vocab_size=VOCABULARY, fill_token=FILL)


def test_clean_stream_by_hand():
    (example,), streams = make(ObjectiveConfig(), lengths=((2, 3),))
    assert streams.clean.tokens.tolist() == [10, 11, 12, 13, 14, FILL]
    assert streams.clean.positions.tolist() == [0, 1, 2, 3, 4, 5]
    assert streams.clean.targets.tolist() == [11, 12, 13, 14, FILL, 0]
    assert streams.clean.weights.tolist() == [0.2] * 5 + [0.0]
    assert streams.visibility.first_key.tolist() == [0] * 10
    assert streams.visibility.past_key.tolist() == [1, 2, 3, 4, 5, 6, 2, 2, 2, 2]
    assert streams.visibility.canvas_id.tolist() == [-1] * 6 + [0] * 4
    assert streams.canvas.positions.tolist() == [2, 3, 4, 5] and streams.canvas.targets.tolist() == [12, 13, 14, FILL]


@pytest.mark.parametrize("changes", [
    {}, {"encoder_loss_normalization": "token"}, {"canvases_scored": "all"}, {"score_tokens": "corrupted"},
    {"encoder_loss_tokens": "response"}, {"encoder_loss_weight": 0.25},
    {"encoder_loss_weight": 0.25, "encoder_loss_normalization": "token"}], ids=str)
def test_weights_sum_to_the_weights_of_the_losses(changes):
    objective = dataclasses.replace(ObjectiveConfig(), **changes)
    _, streams = make(objective)
    assert streams.clean.weights.sum() == pytest.approx(objective.encoder_loss_weight, abs=1e-12)
    assert streams.canvas.weights.sum() == pytest.approx(1.0, abs=1e-12)


def test_example_mean_and_token_mean_differ():
    _, by_example = make(ObjectiveConfig())
    _, by_token = make(ObjectiveConfig(encoder_loss_normalization="token"))
    assert not np.allclose(by_example.clean.weights, by_token.clean.weights)


def test_canvas_tokens_are_replaced_where_drawn():
    examples, streams = make(ObjectiveConfig(canvases_scored="all"))
    changed = streams.canvas.tokens != streams.canvas.targets
    drawn = np.concatenate([e.corrupted(c) for e in examples for c in e.canvases])
    assert drawn.any() and not drawn.all() and not (changed & ~drawn).any()


def test_reweighted_divides_by_one_minus_t():
    examples, plain = make(ObjectiveConfig(noise_min=0.1))
    _, reweighted = make(ObjectiveConfig(noise_min=0.1, diffusion_loss="reweighted"))
    assert np.allclose(reweighted.canvas.weights * (1 - reweighted.noise_level), plain.canvas.weights)


def test_leave_one_out_bonus():
    _, streams = make(ObjectiveConfig(diffusion_loss="loo"))
    assert np.allclose(np.expm1(streams.observed_bonus), VOCABULARY * (1 - streams.noise_level) / streams.noise_level)
    assert not make(ObjectiveConfig())[1].observed_bonus.any()


def test_an_objective_of_a_users_own_weighs_what_would_be_scored(monkeypatch):
    monkeypatch.setitem(OBJECTIVES.rows, "rising", AddedObjective(lambda example, canvas, objective: np.arange(4) + 1.0))
    settings = {"score_tokens": "corrupted", "diffusion_loss": "reweighted", "noise_min": 0.1}
    _, plain = make(ObjectiveConfig(**settings))
    _, weighed = make(ObjectiveConfig(objective="rising", **settings))
    assert 0 < (plain.canvas.weights > 0).sum() < len(plain.canvas)
    assert np.array_equal(weighed.canvas.weights, plain.canvas.weights * np.tile([1.0, 2, 3, 4], 3))


def test_dropout_words_are_those_of_documents_and_positions():
    """A canvas that is decoded without its draft's signal has the words of a first decoding, however often it is decoded."""
    fit = fit_example(5, 8, seq_length=32, canvas_length=4)
    rows = [RowRequest([i], [DrawKey(3, Stream.TRAIN, 0, i, 0)], [fit], [False]) for i in range(6)]
    plan = plan_batch(rows, ObjectiveConfig(canvases_scored="all"), micro_batch_size=6)
    examples = plan.microbatches[0][0].examples
    assert len({e.self_conditioned for e in examples}) == 2

    def of(purpose, start, count):
        return [word for e in examples for word in e.key.words(purpose, start, count).view(np.int64).tolist()]

    second = [word for e in examples for word in e.key.words(
        Purpose.DROPOUT_SECOND if e.self_conditioned else Purpose.DROPOUT_CANVAS, 5, 8).view(np.int64).tolist()]
    for microbatch in (plan.microbatches[0][0], plan.with_every_draft().microbatches[0][0]):
        words = DropoutWords.of(microbatch)
        assert words.clean.tolist() == of(Purpose.DROPOUT_CLEAN, 0, 13) and words.canvas.tolist() == of(Purpose.DROPOUT_CANVAS, 5, 8)
        assert words.second.tolist() == second


def test_packed_examples_stand_apart():
    """Two examples in one row are laid out as two rows are: positions restart and no key is shared."""
    objective = ObjectiveConfig()
    fits = [fit_example(*pair, seq_length=32, canvas_length=4) for pair in LENGTHS]
    keys = [DrawKey(3, Stream.TRAIN, 0, i, 0) for i in range(3)]
    packed = plan_batch([RowRequest([0, 1, 2], keys, fits, [False] * 3)], objective, micro_batch_size=1).microbatches[0][0]
    tokens = [np.arange(10, 10 + e.fit.prompt + e.fit.response, dtype=np.int32) for e in packed.examples]
    examples, apart = make(objective)
    order = [e.index for e in packed.examples]
    assert order == [0, 1, 2] and sorted(e.index for e in examples) == order
    plan = plan_batch([RowRequest([0, 1, 2], keys, fits, [False] * 3)], objective, micro_batch_size=1)
    together = build_streams(packed, tokens, objective, plan.denominators, vocab_size=VOCABULARY, fill_token=FILL)
    assert len(together.clean) == len(apart.clean) and sorted(together.canvas.tokens) == sorted(apart.canvas.tokens)
    assert together.clean.weights.sum() == pytest.approx(1.0)
    starts = np.flatnonzero(together.clean.positions == 0)
    # Each token of either stream sees keys from its own example's first on.
    totals, canvases = [e.fit.total for e in packed.examples], [4 * len(e.canvases) for e in packed.examples]
    assert starts.tolist() == [0, totals[0], totals[0] + totals[1]]
    assert together.visibility.first_key.tolist() == [*np.repeat(starts, totals), *np.repeat(starts, canvases)]
