"""The expected embedding under a head's own softmax, over a vocabulary cut over `tp`, never holding [T, V]."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_dllm.parallel import communication
from megatron_dllm.parallel.context import Group

from .vocabulary import CHUNK_BYTES, VocabularyRange, add_product_, at_least_fp32, capped_logits, token_chunks


def soft_embedding(
    hidden: Tensor,
    weight: Tensor,
    *,
    softcap: float | None,
    scale: float,
    tp: Group,
    vocab_size: int,
    chunk_bytes: int = CHUNK_BYTES,
) -> Tensor:
    """softmax(softcap * tanh(hidden @ W.T / softcap)) @ W * scale, [T, H], equal on every rank.

        hidden  [T, H]          equal on every rank; taken as a constant
        weight  [ceil(V/R), H]  our rows of W
        scale                   rounded to the weight's dtype, as the embedding's own multiplier is

    The softmax is in fp32 at least and rounded to the weight's dtype before the second product. Only the weight that is
    averaged gets a gradient, scale * probabilities.T @ d(result); the logits count as constants. Every rank must be given
    the whole d(result). Saved: hidden, weight and two numbers a token; the probabilities are computed again in backward.
    `chunk_bytes` bounds a chunk's logits [n, v], of which two are live at once.
    """
    assert hidden.dim() == 2 and hidden.dtype == weight.dtype, f"hidden {tuple(hidden.shape)} {hidden.dtype}, weight {weight.dtype}"
    head = _Head(softcap, torch.tensor(scale, dtype=weight.dtype).item(), tp, VocabularyRange.of(weight, vocab_size, tp), chunk_bytes)
    return _SoftEmbedding.apply(hidden.detach(), weight, head)


@dataclass(frozen=True)
class _Head:
    softcap: float | None
    scale: float
    tp: Group
    own: VocabularyRange
    chunk_bytes: int


def _own_softmax(logits: Tensor, tp: Group) -> tuple[Tensor, Tensor]:
    """(own largest logit [n, 1], factor [n, 1]): exp(logits - largest) * factor are the probabilities of our tokens."""
    n, v = logits.shape
    own = logits.new_zeros(2, n)
    own[0] = logits.amax(1) if v else -torch.inf
    own[1] = (logits - own[0].unsqueeze(1)).exp_().sum(1)
    largest, total = communication.all_gather(own, tp).view(tp.size, 2, n).unbind(1)
    overall = largest.amax(0)
    sum_exp = (total * (largest - overall).exp()).sum(0)
    return own[0].unsqueeze(1), ((own[0] - overall).exp() / sum_exp).unsqueeze(1)


class _SoftEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, head):
        own_rows = weight[: head.own.size]
        shape = (hidden.shape[0], 1)
        largest, factor = (hidden.new_empty(shape, dtype=at_least_fp32(weight)) for _ in range(2))
        result = torch.empty_like(hidden)
        for chunk in token_chunks(hidden.shape[0], weight, head.chunk_bytes):
            logits = capped_logits(hidden[chunk], own_rows, head.softcap)
            largest[chunk], factor[chunk] = _own_softmax(logits, head.tp)
            probabilities = logits.sub_(largest[chunk]).exp_().mul_(factor[chunk]).to(weight.dtype)
            torch.mm(probabilities, own_rows, out=result[chunk])
        ctx.save_for_backward(hidden, weight, largest, factor)
        ctx.head = head
        return communication.all_reduce(result, head.tp, overwrite=True).mul_(head.scale)

    @staticmethod
    @once_differentiable
    def backward(ctx, dresult):
        hidden, weight, largest, factor = ctx.saved_tensors
        head = ctx.head
        own_rows = weight[: head.own.size]
        dresult = dresult * head.scale
        dweight = torch.zeros_like(weight, dtype=at_least_fp32(weight))
        for chunk in token_chunks(hidden.shape[0], weight, head.chunk_bytes):
            logits = capped_logits(hidden[chunk], own_rows, head.softcap)
            probabilities = logits.sub_(largest[chunk]).exp_().mul_(factor[chunk]).to(weight.dtype)
            add_product_(dweight[: head.own.size], probabilities.t(), dresult[chunk])
        return None, dweight.to(weight.dtype), None
