"""The learning rate as a pure function of the step. The weight decay is the same number throughout, so it has no schedule."""
from __future__ import annotations

import math
from dataclasses import dataclass

from ..config import OptimizerConfig, format_problems, problems_of


@dataclass(frozen=True)
class LearningRateSchedule:
    """Linear warm-up from 0, then one decay style down to min_lr; the same values as Megatron-LM's OptimizerParamScheduler.

    All lengths are in one unit, which is also the unit of `at`: updates or consumed samples. `warmup` may be a fraction of a step, as it is
    when a fraction of the decay is asked for.
    """

    max_lr: float
    min_lr: float
    style: str
    warmup: float
    decay: int
    wsd_decay: int = 0
    wsd_style: str = "exponential"

    @classmethod
    def from_config(cls, config: OptimizerConfig, train_iters: int) -> LearningRateSchedule:
        """The schedule in updates. --lr-decay-iters defaults to the whole run; --lr-warmup-fraction is a fraction of --lr-decay-iters.

        ValueError where its parts do not fit into the steps, whose number may depend on the data.
        """
        if problems := problems_of(config, {"train_iters": train_iters}):
            raise ValueError(format_problems(problems))
        decay = config.lr_decay_iters or train_iters
        warmup = config.lr_warmup_iters or (config.lr_warmup_fraction or 0) * decay
        return cls(
            max_lr=config.lr, min_lr=config.min_lr, style=config.lr_decay_style, warmup=warmup, decay=decay,
            wsd_decay=config.lr_wsd_decay_iters or 0, wsd_style=config.lr_wsd_decay_style)

    def at(self, step: int) -> float:
        """The learning rate of the update before which `step` updates (or samples) were done: 0 for the first of a run.

        With a warm-up the first update has learning rate 0 and the peak stands at step = warmup, as in Megatron-LM. min_lr is reached at
        step = decay, which lies one past the last update of a run as long as the decay, and is kept beyond.
        """
        if self.warmup > 0 and step <= self.warmup:
            return self.max_lr * step / self.warmup
        if self.style == "constant":
            return self.max_lr
        if step > self.decay:
            return self.min_lr
        if self.style == "inverse-square-root":
            return max(self.min_lr, self.max_lr * math.sqrt(max(self.warmup, 1) / max(step, 1)))
        return self.min_lr + self._share(step) * (self.max_lr - self.min_lr)

    def _share(self, step: int) -> float:
        """How much of max_lr - min_lr is left: 1 at the end of the warm-up, 0 at step = decay."""
        if self.style != "WSD":
            done = (step - self.warmup) / (self.decay - self.warmup)
            return 1 - done if self.style == "linear" else _half_cosine(done)
        done = max(0, step - (self.decay - self.wsd_decay)) / self.wsd_decay
        match self.wsd_style:
            case "linear":
                return 1 - done
            case "cosine":
                return _half_cosine(done)
            case "exponential":
                return 2 * 0.5**done - 1
            case "minus_sqrt":
                return 1 - math.sqrt(done)
        raise AssertionError(f"{self.wsd_style} has no formula")


def _half_cosine(done: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * done))
