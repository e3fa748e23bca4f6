"""Loss terms: sums over scored tokens whose weights already hold the global denominators."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..transformer.rows import take_distinct
from .inputs import MTP_GROUP, Scored

NUM_GROUPS = MTP_GROUP + 1  # the autoregressive loss, the diffusion loss by tenths of the noise level, multi-token prediction


@dataclass(frozen=True)
class LossTerms:
    """total: the differentiable sum. Detached, by group [NUM_GROUPS]: weighted sums (`weighted`), plain sums of cross entropies (`sums`),
    right predictions (`correct`) and tokens (`counts`), in at least fp32."""

    total: Tensor
    weighted: Tensor
    sums: Tensor
    correct: Tensor
    counts: Tensor

    def __add__(self, other: LossTerms) -> LossTerms:
        return LossTerms(*(getattr(self, name) + getattr(other, name) for name in ("total", "weighted", "sums", "correct", "counts")))

    def detach(self) -> LossTerms:
        """The same without a graph."""
        return LossTerms(self.total.detach(), self.weighted, self.sums, self.correct, self.counts)


def loss_terms(cross_entropy: Callable, hidden: Tensor, scored: Scored) -> LossTerms:
    """The terms of one pass: `hidden` [T, H] holds every token of the pass, `scored` says which count."""
    result = cross_entropy(
        take_distinct(hidden, scored.rows), targets=scored.targets, token_weights=scored.weights, observed=scored.observed,
        bonus=scored.bonus)

    per_token = result.per_token
    counted = (scored.weights != 0).to(per_token.dtype)  # rows that fill up weigh nothing
    values = torch.stack([per_token * scored.weights.to(per_token.dtype), per_token * counted, result.correct * counted, counted])
    # One-hot product instead of an atomic add: the same sum on every run.
    one_hot = per_token.new_zeros(len(per_token), NUM_GROUPS).scatter_(1, scored.group[:, None], 1.0)
    return LossTerms(result.loss, *(values @ one_hot).unbind())
