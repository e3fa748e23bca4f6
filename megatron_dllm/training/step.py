"""One optimizer step: forward and backward of every microbatch, the gradient's sum over ranks and its norm, the update or its refusal."""
from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..diffusion.inputs import MTP_GROUP, NOISE_BINS, MicrobatchInputs
from ..diffusion.losses import LossTerms
from ..kernels.copies import HostCopy
from ..models.diffusion_gemma.model import DiffusionGemma
from ..models.diffusion_gemma.stages import ModelPipeline
from ..moe.replay import ReplayReport
from ..parallel import Group, communication
from .graphs import GraphedMicrobatches, on_device
from .logging import noise_level_name
from .optimizer import MasterOptimizer


@dataclass(frozen=True)
class StepResult:
    """Losses of the global batch, the gradient's norm before clipping, and whether the update was made: the same on every rank.

    replay: what this rank's recomputes took over from their forwards (None: nothing is recomputed).
    num_zeros: elements of the whole gradient that are exactly zero (None: not counted).
    """

    loss: float
    terms: LossTerms
    grad_norm: float
    replay: ReplayReport | None = None
    num_zeros: int | None = None

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradient can be used."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def train_step(model: DiffusionGemma, optimizer: MasterOptimizer, microbatches: Sequence[MicrobatchInputs], lr: float, *,
               pipeline: ModelPipeline | None = None, graphs: GraphedMicrobatches | None = None, count_zeros: bool = False,
               after_backward: Callable[[], None] = lambda: None) -> StepResult:
    """Run the step on this rank's microbatches, through the `pipeline` that the model is a part of, if it is, and by CUDA graphs, if given.

    after_backward: called before the gradients' sums are waited for.

    A loss or gradient that is not finite leaves weights and moments as they were.

    ReplayError, before the update, if what MoE layers recorded for their recompute has changed.
    """
    total = forward_backward(model, optimizer, microbatches, pipeline, graphs, after_backward)
    norm = optimizer.grad_norm()  # before anything waits for the device
    replay = None
    if model.recompute.parts:
        replay = model.recompute.monitor.report()
        replay.check(model.context)
    num_zeros = optimizer.num_zeros() if count_zeros else None
    numbers, is_ahead = HostCopy(torch.stack([total.total.double(), norm.double()])), optimizer.algorithm.skips
    if is_ahead:  # the device need not wait until the host has seen the numbers
        optimizer.step(lr, norm, only_if=total.total.isfinite() & norm.isfinite())
    loss, grad_norm = numbers.wait()[0].tolist()
    result = StepResult(loss, total, grad_norm, replay, num_zeros)
    if is_ahead and not result.is_finite:
        optimizer.take_back()
    elif not is_ahead and result.is_finite:
        optimizer.step(lr, norm)
    elif not is_ahead:
        optimizer.drop_gradients()
    for block in model.layers.values():
        if block.moe.router.bias is not None:
            block.moe.router.bias.end_step(model.context, update=result.is_finite)
    return result


def forward_backward(model: DiffusionGemma, optimizer: MasterOptimizer, microbatches: Sequence[MicrobatchInputs],
                     pipeline: ModelPipeline | None = None, graphs: GraphedMicrobatches | None = None,
                     after_backward: Callable[[], None] = lambda: None) -> LossTerms:
    """The global batch's losses; finished gradients are left in the optimizer's buckets."""
    if graphs is not None:
        total = functools.reduce(operator.add, graphs.each(microbatches if pipeline is None else [tuple(microbatches)]))
        if not graphs.has_summed:  # a recording serves every microbatch, so that none of them was the last
            optimizer.buckets.last_microbatch()
    elif pipeline is not None:
        total = pipeline.train(microbatches)
        # A parameter has several backwards a microbatch here (two loops, head and embedding), so that none of them is the last.
        optimizer.buckets.last_microbatch()
    else:
        total = _one_after_the_other(model, optimizer, microbatches)
    after_backward()
    if graphs is None or not graphs.has_summed:
        optimizer.finish_gradients()
    return sum_terms(total, model.context.dp_cp, model.context.pp)


def _one_after_the_other(model: DiffusionGemma, optimizer: MasterOptimizer, microbatches: Sequence[MicrobatchInputs]) -> LossTerms:
    total = None
    for number, inputs in enumerate(microbatches):
        terms = model(on_device(inputs, model.context.device))
        if number == len(microbatches) - 1:
            optimizer.buckets.last_microbatch()
        terms.total.backward()
        total = terms.detach() if total is None else total + terms.detach()
    return total


def sum_terms(terms: LossTerms, *groups: Group) -> LossTerms:
    """The terms summed over one group after the other, in fp64: counts stay exact."""
    names = [field.name for field in dataclasses.fields(LossTerms)]
    parts = [getattr(terms, name).double().reshape(-1) for name in names]
    summed = functools.reduce(communication.all_reduce, groups, torch.cat(parts)).split([len(part) for part in parts])
    return LossTerms(**{name: part.view(getattr(terms, name).shape) for name, part in zip(names, summed, strict=True)})


def replay_metrics(report: ReplayReport | None) -> dict[str, float]:
    """MoE dispatches of the step's recomputes on this rank: those that followed their forward, and those made anew."""
    return {} if report is None else {"replayed_dispatches": report.hits, "repeated_dispatches": report.misses}


def loss_metrics(terms: LossTerms) -> dict[str, float]:
    """The losses apart: autoregressive and diffusion as they are minimised; then by noise level, plain means of the cross entropy."""
    metrics = {"loss": terms.weighted.sum().item(), "autoregressive_loss": terms.weighted[0].item()}
    if terms.counts[MTP_GROUP] > 0:
        metrics["mtp_loss"] = terms.weighted[MTP_GROUP].item()
    diffusion = slice(1, 1 + NOISE_BINS)
    if terms.counts[diffusion].sum() > 0:
        metrics["diffusion_loss"] = terms.weighted[diffusion].sum().item()
        metrics["diffusion_accuracy"] = (terms.correct[diffusion].sum() / terms.counts[diffusion].sum()).item()
        for level in range(NOISE_BINS):
            if terms.counts[1 + level] > 0:
                mean = terms.sums[1 + level] / terms.counts[1 + level]
                metrics[noise_level_name("diffusion_loss", level / NOISE_BINS, (level + 1) / NOISE_BINS)] = mean.item()
    return metrics
