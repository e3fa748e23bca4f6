"""Vocabulary embedding, cut by vocabulary over `tp`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_dllm.parallel.collectives import scatter_sum_sequence, sum_over
from megatron_dllm.parallel.context import ParallelContext
from megatron_dllm.parallel.placement import place

from .cross_entropy import LogitLoss
from .initialization import Init, make_parameter
from .shared_gradient import SharedWeight
from .vocabulary import VocabularyRange, check_tokens


class VocabularyParallelEmbedding(nn.Module):
    """Row of W [V, H] for each token, with W cut by token over the R ranks of `tp`.

    tokens  [T]             int64, equal on every rank
    weight  [ceil(V/R), H]  our rows of W; rows past V are zero, are read by nobody and get no gradient
    result  [T, H]          equal on every rank; with sequence parallelism [T/R, H], our piece of the tokens

    The output layer has the same weight: `logit_loss` is what computes the loss of its logits (None: ours).
    """

    def __init__(self, name: str, shape: tuple[int, int], *, context: ParallelContext, init: Init, dtype: torch.dtype):
        super().__init__()
        self.tp = context.tp
        self.sequence_parallel = context.sequence_parallel
        self.vocab_size = shape[0]
        self.logit_loss: LogitLoss | None = None
        placement = place(shape, context, cut={"tp": 0}, fill=True)
        self.weight = make_parameter(name, placement, init=init, dtype=dtype, device=context.device)

    def forward(self, tokens: Tensor, shared: SharedWeight | None = None) -> Tensor:
        """The rows; `shared` is the weight with a gradient sum."""
        check_tokens(tokens, self.vocab_size, "token")
        if self.tp.size == 1:
            return self._rows(tokens, shared)
        rows, ours = VocabularyRange.of(self.weight, self.vocab_size, self.tp).locate(tokens)
        # Exactly one rank has the row and the others add zeros: the sum is exact in any dtype.
        own = self._rows(rows, shared).masked_fill(~ours.unsqueeze(1), 0)
        return scatter_sum_sequence(own, self.tp) if self.sequence_parallel else sum_over(own, self.tp)

    def _rows(self, numbers: Tensor, shared: SharedWeight | None) -> Tensor:
        return F.embedding(numbers, self.weight) if shared is None else shared.rows(numbers)
