"""The learning rate at the borders of each style, against values worked out by hand."""
from __future__ import annotations

import math
from dataclasses import replace

import pytest

from megatron_dllm.config import OptimizerConfig
from megatron_dllm.config.run import FLAGS
from megatron_dllm.training.schedules import LearningRateSchedule

DECAY_STYLES, WSD_DECAY_STYLES = (FLAGS[name][1].choices for name in ("lr_decay_style", "lr_wsd_decay_style"))


def schedule(style: str, **changes) -> LearningRateSchedule:
    """Peak 1, floor 0.2, four steps of warm-up, decay over at step 12."""
    return LearningRateSchedule(**{"max_lr": 1.0, "min_lr": 0.2, "style": style, "warmup": 4, "decay": 12} | changes)


# 0.2 + 0.8 * share, the share of step 6 being that of 2 done in 8.
AT_STEP_6 = {"constant": 1.0, "linear": 0.8, "cosine": 0.2 + 0.8 * 0.5 * (1 + math.sqrt(0.5)), "inverse-square-root": math.sqrt(4 / 6)}
AT_STEP_12 = {"constant": 1.0, "linear": 0.2, "cosine": 0.2, "inverse-square-root": math.sqrt(4 / 12)}
BEYOND = {"constant": 1.0, "linear": 0.2, "cosine": 0.2, "inverse-square-root": 0.2}


@pytest.mark.parametrize("style", AT_STEP_6)
def test_at_borders(style):
    lr = schedule(style).at
    assert [lr(step) for step in (0, 1, 3, 4)] == [0.0, 0.25, 0.75, 1.0]
    assert lr(6) == pytest.approx(AT_STEP_6[style], rel=1e-15)
    assert lr(12) == pytest.approx(AT_STEP_12[style], rel=1e-15)
    assert lr(13) == lr(10**9) == BEYOND[style]


def test_at_first_decay_step():
    assert schedule("linear").at(5) == pytest.approx(0.2 + 0.8 * 7 / 8, rel=1e-15)
    assert schedule("cosine").at(5) == pytest.approx(0.2 + 0.4 * (1 + math.cos(math.pi / 8)), rel=1e-15)


def test_at_without_warmup_starts_at_peak():
    for style in DECAY_STYLES:
        lr = schedule(style, warmup=0, wsd_decay=3).at
        assert lr(0) == 1.0
    assert schedule("inverse-square-root", warmup=0).at(9) == pytest.approx(1 / 3, rel=1e-15)


def test_inverse_square_root_stops_at_min_lr():
    assert schedule("inverse-square-root", warmup=1, decay=1000).at(400) == 0.2
    assert schedule("inverse-square-root", warmup=1, decay=1000, min_lr=0.0).at(400) == pytest.approx(0.05, rel=1e-15)


# The tail is the last four steps: 8 is the last at the peak, 9 is a quarter and 10 half of the way down, 12 is the floor.
WSD_TAIL = {
    "linear": (0.2 + 0.8 * 0.75, 0.6),
    "cosine": (0.2 + 0.4 * (1 + math.sqrt(0.5)), 0.6),
    "exponential": (0.2 + 0.8 * (2 * 0.5**0.25 - 1), 0.2 + 0.8 * (math.sqrt(2) - 1)),
    "minus_sqrt": (0.2 + 0.8 * 0.5, 0.2 + 0.8 * (1 - math.sqrt(0.5)))}


@pytest.mark.parametrize("wsd_style", WSD_DECAY_STYLES)
def test_wsd_at_borders(wsd_style):
    lr = schedule("WSD", wsd_decay=4, wsd_style=wsd_style).at
    assert [lr(step) for step in (0, 2, 4, 7, 8)] == [0.0, 0.5, 1.0, 1.0, 1.0]
    assert [lr(9), lr(10)] == pytest.approx(WSD_TAIL[wsd_style], rel=1e-15)
    assert lr(11) > 0.2 + 1e-3
    assert lr(12) == pytest.approx(0.2, rel=1e-15)
    assert lr(13) == 0.2


def test_fractional_warmup_reaches_its_peak_between_steps():
    lr = schedule("linear", warmup=2.5, decay=10, min_lr=0.0).at
    assert lr(2) == pytest.approx(0.8, rel=1e-15)
    assert lr(3) == pytest.approx(1 - 0.5 / 7.5, rel=1e-15)


CONFIGS = {
    "decay defaults to the run": ({"lr_decay_iters": None, "lr_warmup_iters": 10}, (10, 200)),
    "own decay length": ({"lr_decay_iters": 50, "lr_warmup_iters": 10}, (10, 50)),
    "fraction of the decay": ({"lr_decay_iters": 50, "lr_warmup_fraction": 0.1}, (5, 50)),
    "no warm-up": ({}, (0, 200)),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_from_config(case):
    flags, (warmup, decay) = CONFIGS[case]
    made = LearningRateSchedule.from_config(OptimizerConfig(lr=3e-4, min_lr=3e-5, lr_decay_style="linear", **flags), train_iters=200)
    assert made == LearningRateSchedule(
        max_lr=3e-4, min_lr=3e-5, style="linear", warmup=warmup, decay=decay, wsd_decay=0, wsd_style=OptimizerConfig().lr_wsd_decay_style)
    assert made.at(decay) == pytest.approx(3e-5, rel=1e-15)


def test_from_config_wsd():
    config = OptimizerConfig(lr=1.0, lr_decay_style="WSD", lr_wsd_decay_iters=20, lr_wsd_decay_style="linear")
    lr = LearningRateSchedule.from_config(config, train_iters=100).at
    assert (lr(80), lr(90), lr(100)) == (1.0, 0.5, 0.0)


# Settings that do not fit into 12 steps, words of the message, and the remedy that it names. The rules are those of validate().
WSD = {"lr_decay_style": "WSD", "lr_warmup_iters": 4}
WRONG = {
    "min above max": ({"min_lr": 2.0}, "set --min-lr to at most 1.0", {"min_lr": 1.0}),
    "negative min": ({"min_lr": -0.1}, "--min-lr -0.1", {"min_lr": 0.0}),
    "warm-up as long as the decay": ({"lr_warmup_iters": 12}, "set --lr-warmup-iters to at most 11", {"lr_warmup_iters": 11}),
    "no tail": (WSD, "set --lr-wsd-decay-iters", {"lr_wsd_decay_iters": 1}),
    "tail into the warm-up": (WSD | {"lr_wsd_decay_iters": 9}, "set --lr-warmup-iters to at most 3", {"lr_warmup_iters": 3}),
    "tail into a fractional warm-up": ({"lr_decay_style": "WSD", "lr_wsd_decay_iters": 9, "lr_warmup_fraction": 0.3},
                                       "a warm-up of 4 steps leaves less than 9 of 12", {"lr_wsd_decay_iters": 8}),
    "tail beyond the run": (WSD | {"lr_wsd_decay_iters": 13}, "below 12", {"lr_wsd_decay_iters": 8}),
}


@pytest.mark.parametrize("case", WRONG)
def test_from_config_refuses(case):
    wrong, message, remedy = WRONG[case]
    with pytest.raises(ValueError, match=message):
        LearningRateSchedule.from_config(replace(OptimizerConfig(lr=1.0, lr_decay_style="linear"), **wrong), train_iters=12)
    LearningRateSchedule.from_config(replace(OptimizerConfig(lr=1.0, lr_decay_style="linear"), **wrong | remedy), train_iters=12)
