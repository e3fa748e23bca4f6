"""One optimizer step: forward and backward of every microbatch, the gradient's norm, the update or its refusal."""
from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ..diffusion.inputs import NOISE_BINS, MicrobatchInputs, to_device
from ..diffusion.losses import LossTerms
from ..models.diffusion_gemma.model import DiffusionGemma
from .logging import noise_level_name
from .optimizer import MasterAdamW


@dataclass(frozen=True)
class StepResult:
    """Global losses of the step, the gradient's norm before clipping, and whether the update was made."""

    loss: float
    terms: LossTerms
    grad_norm: float

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradient can be used."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def train_step(model: DiffusionGemma, optimizer: MasterAdamW, microbatches: Iterable[MicrobatchInputs], lr: float) -> StepResult:
    """Run the step. A loss or gradient that is not finite leaves weights and moments as they were."""
    total = None
    for inputs in microbatches:
        terms = model(to_device(inputs, model.context.device))
        terms.total.backward()
        total = terms.detach() if total is None else total + terms.detach()
    norm = optimizer.grad_norm()
    result = StepResult(total.total.item(), total, norm.item())
    if result.is_finite:
        optimizer.step(lr, norm)
    else:
        optimizer.drop_gradients()
    return result


def loss_metrics(terms: LossTerms) -> dict[str, float]:
    """The losses apart: autoregressive and diffusion as they are minimised; then by noise level, plain means of the cross entropy."""
    metrics = {"loss": terms.weighted.sum().item(), "autoregressive_loss": terms.weighted[0].item()}
    if terms.counts[1:].sum() > 0:
        metrics["diffusion_loss"] = terms.weighted[1:].sum().item()
        metrics["diffusion_accuracy"] = (terms.correct[1:].sum() / terms.counts[1:].sum()).item()
        for level in range(NOISE_BINS):
            if terms.counts[1 + level] > 0:
                mean = terms.sums[1 + level] / terms.counts[1 + level]
                metrics[noise_level_name("diffusion_loss", level / NOISE_BINS, (level + 1) / NOISE_BINS)] = mean.item()
    return metrics
