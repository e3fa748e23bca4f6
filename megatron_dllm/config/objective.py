"""What is minimised."""

from dataclasses import dataclass
from typing import Literal

from megatron_dllm.config.extensions import NOISE_SCHEDULES, OBJECTIVES
from megatron_dllm.config.flags import flag


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Objective"""

    objective: Literal["block-diffusion", "ar"] = flag(
        "block-diffusion: the autoregressive loss of the clean tokens plus the denoising loss of the canvases; "
        "ar: a plain causal language model on the same layers.",
        "block-diffusion",
        further=lambda: tuple(OBJECTIVES.rows),
    )
    diffusion_loss: Literal["ce", "reweighted", "loo", "reweighted-loo"] = flag(
        "ce: cross entropy; reweighted: divided by 1 - t; loo: with log(1 + V (1 - t) / t) added to the logit of the token "
        "that is seen (arXiv 2605.22765); reweighted-loo: both.",
        "ce",
    )
    canvases_scored: Literal["one", "all"] = flag("Canvases of a response that are noised and scored.", "one")
    score_tokens: Literal["all", "corrupted"] = flag("Canvas tokens that are scored.", "all")
    score_eos_fill: Literal["all", "not-if-truncated"] = flag("Whether the fill after a cut response is scored.", "all")
    encoder_loss_weight: float = flag("Weight of the autoregressive loss of the clean tokens.", 1.0)
    encoder_loss_normalization: Literal["example", "token"] = flag("What the autoregressive loss is a mean over.", "example")
    encoder_loss_tokens: Literal["all", "response"] = flag(
        "Tokens that the autoregressive loss is taken on; all includes the prompt.", "all"
    )
    mtp_loss_scaling_factor: float = flag("Weight of the mean loss of --mtp-num-layers beside the autoregressive loss.", 0.1)
    self_conditioning_prob: float = flag("Share of the examples whose canvas is decoded twice, the second time given the first.", 0.5)
    self_conditioning_null: Literal["zero", "uniform"] = flag(
        "What stands for the first decoding where there is none: a zero vector, or the mean embedding of a uniform guess.", "zero"
    )
    noise_min: float = flag("Smallest noise level t; t is drawn from here to 1.", 1e-3)
    noise_schedule: Literal["uniform"] = flag(
        "Distribution of t: uniform, or what an --extension adds.", "uniform", further=lambda: tuple(NOISE_SCHEDULES.rows)
    )
    noise_sampling: Literal["uniform", "antithetic"] = flag(
        "uniform: each t on its own; antithetic: the examples of a batch spread over the range.", "uniform"
    )
    canvas_length_schedule: str = flag(
        "Canvas length by iteration, as 0:64,1000:256; after the last entry it stays. Without it: --canvas-length.",
        "",
        metavar="N:LENGTH,...",
    )
    freeze_router: bool = flag("Leave the router's weights as they are.", False)

    @property
    def has_canvases(self) -> bool:
        """Whether there is a diffusion loss."""
        return self.objective != "ar"

    @property
    def decodes_twice(self) -> bool:
        """Whether some canvases are, the second time given the first."""
        return self.has_canvases and self.self_conditioning_prob > 0

    @property
    def scores_all_canvases(self) -> bool:
        """Whether a response has all of its canvases in a microbatch, not one."""
        return self.has_canvases and self.canvases_scored == "all"

    @property
    def is_reweighted(self) -> bool:
        """Whether the diffusion loss is divided by 1 - t."""
        return self.diffusion_loss in ("reweighted", "reweighted-loo")

    @property
    def is_leave_one_out(self) -> bool:
        """Whether the logit of the noisy token that is seen is raised."""
        return self.diffusion_loss in ("loo", "reweighted-loo")

    @property
    def has_uniform_null(self) -> bool:
        """Whether a uniform guess stands for the first decoding where there is none."""
        return self.self_conditioning_null == "uniform"

    def canvas_lengths(self) -> tuple[tuple[int, int], ...]:
        """The schedule as (first iteration, canvas length) pairs, () without one; ValueError says which entry is wrong."""
        pairs: list[tuple[int, int]] = []
        for entry in self.canvas_length_schedule.split(",") if self.canvas_length_schedule else ():
            start, _, length = entry.partition(":")
            if not (start.strip().isdecimal() and length.strip().isdecimal() and int(length) > 0):
                raise ValueError(f"{entry!r}: write ITERATION:LENGTH")
            if (pairs and int(start) <= pairs[-1][0]) or (not pairs and int(start) != 0):
                raise ValueError(f"{entry!r}: the first entry must start at iteration 0 and each later one after the one before")
            pairs.append((int(start), int(length)))
        return tuple(pairs)

    def canvas_length_at(self, iteration: int, canvas_length: int) -> int:
        """The canvas length of `iteration` (from 0): the schedule's, or the model's `canvas_length` without one.

        1 where there are no canvases, so that nothing is filled up to whole ones.
        """
        if not self.has_canvases:
            return 1
        reached = [length for start, length in self.canvas_lengths() if start <= iteration]
        return reached[-1] if reached else canvas_length

    def longest_canvas(self, canvas_length: int) -> int:
        """The longest of all iterations, by which rows are made."""
        if not self.has_canvases:
            return 1
        return max((length for _, length in self.canvas_lengths()), default=canvas_length)
