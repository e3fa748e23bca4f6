"""The expected embedding under a head's own softmax, over a vocabulary cut over `tp`, never holding [T, V]."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_dllm.kernels.launch import takes
from megatron_dllm.kernels.precision import accumulation_dtype
from megatron_dllm.parallel import communication
from megatron_dllm.parallel.context import Group

from .shared_gradient import GradientSum, SharedWeight
from .vocabulary import VocabularyRange, capped_logits, product, token_chunks

KEPT_BYTES = 1 << 29  # 1024 tokens of 262144 rows in 16 bits


def soft_embedding(
    hidden: Tensor,
    weight: Tensor,
    *,
    softcap: float | None,
    scale: float,
    tp: Group,
    vocab_size: int,
    chunk_bytes: int | None = None,
    shared: SharedWeight | None = None,
) -> Tensor:
    """softmax(softcap * tanh(hidden @ W.T / softcap)) @ W * scale, [T, H], equal on every rank.

        hidden  [T, H]          equal on every rank; taken as a constant
        weight  [ceil(V/R), H]  our rows of W
        scale                   rounded to the weight's dtype, as the embedding's own multiplier is

    The softmax is in fp32 at least and rounded to the weight's dtype before the second product. Only the weight that is
    averaged gets a gradient, scale * probabilities.T @ d(result); the logits count as constants. Every rank must be given
    the whole d(result). Saved: hidden, weight, two numbers a token and, where one chunk has all tokens, the probabilities in the weight's
    dtype if they take KEPT_BYTES at most, a microbatch that is under way; otherwise they are computed again in backward. `chunk_bytes`
    bounds a chunk's logits [n, v], of which two are live at once. With `shared`, the weight with a gradient sum, the gradient is added
    there.
    """
    assert hidden.dim() == 2 and hidden.dtype == weight.dtype, f"hidden {tuple(hidden.shape)} {hidden.dtype}, weight {weight.dtype}"
    head = _Head(softcap, torch.tensor(scale, dtype=weight.dtype).item(), tp, VocabularyRange.of(weight, vocab_size, tp), chunk_bytes)
    if shared is None:
        return _SoftEmbedding.apply(hidden.detach(), weight, head, None, None)
    return _SoftEmbedding.apply(hidden.detach(), shared.weight, head, shared.ticket, shared.gradient)


@dataclass(frozen=True)
class _Head:
    softcap: float | None
    scale: float
    tp: Group
    own: VocabularyRange
    chunk_bytes: int | None


class _InTorch:
    """The three steps from hidden states to probabilities. Logits are overwritten by the last."""

    @staticmethod
    def logits(hidden: Tensor, rows: Tensor, softcap: float | None) -> Tensor:
        """[n, v], as the other two want them."""
        return capped_logits(hidden, rows, softcap)

    @staticmethod
    def own_sums(logits: Tensor, softcap: float | None) -> Tensor:
        """[parts of our tokens, 2, n]: of each part the largest logit, and the sum of exp(logit - largest)."""
        n, v = logits.shape
        own = logits.new_zeros(1, 2, n)
        own[0, 0] = logits.amax(1) if v else -torch.inf
        own[0, 1] = (logits - own[0, 0].unsqueeze(1)).exp_().sum(1)
        return own

    @staticmethod
    def probabilities(logits: Tensor, largest: Tensor, factor: Tensor, softcap: float | None, dtype: torch.dtype) -> Tensor:
        """[n, v] in `dtype`: exp(logit - largest) * factor, with largest and factor [n]."""
        return logits.sub_(largest.unsqueeze(1)).exp_().mul_(factor.unsqueeze(1)).to(dtype)


class _ByKernel:
    """The same for CUDA tensors; its logits are the product before the soft cap."""

    @staticmethod
    def logits(hidden: Tensor, rows: Tensor, softcap: float | None) -> Tensor:
        return product(hidden, rows.t())

    @staticmethod
    def own_sums(logits: Tensor, softcap: float | None) -> Tensor:
        from megatron_dllm.kernels import cross_entropy as kernel  # Triton is there with CUDA alone

        nowhere = torch.full(logits.shape[:1], -1, dtype=torch.int64, device=logits.device)
        return kernel.softmax_statistics(logits, nowhere, softcap, None, None)[:, :2]

    @staticmethod
    def probabilities(logits: Tensor, largest: Tensor, factor: Tensor, softcap: float | None, dtype: torch.dtype) -> Tensor:
        from megatron_dllm.kernels import cross_entropy as kernel

        return kernel.probabilities(logits, largest, factor, softcap, dtype)


def _steps(hidden: Tensor, weight: Tensor) -> type[_InTorch] | type[_ByKernel]:
    return _ByKernel if takes(hidden, weight) else _InTorch


class _SoftEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, head, ticket, gradient):
        own_rows, steps = weight[: head.own.size], _steps(hidden, weight)
        largest, factor = (hidden.new_empty(hidden.shape[0], dtype=accumulation_dtype(weight.dtype)) for _ in range(2))
        result, kept = torch.empty_like(hidden), None
        chunks = list(token_chunks(hidden.shape[0], weight, head.chunk_bytes))
        for chunk in chunks:
            logits = steps.logits(hidden[chunk], own_rows, head.softcap)
            largest[chunk], factor[chunk] = _softmax(steps.own_sums(logits, head.softcap), head.tp)
            probabilities = steps.probabilities(logits, largest[chunk], factor[chunk], head.softcap, weight.dtype)
            torch.mm(probabilities, own_rows, out=result[chunk])
            is_small = len(chunks) == 1 and probabilities.numel() * probabilities.itemsize <= KEPT_BYTES
            if is_small and (ctx.needs_input_grad[1] or ctx.needs_input_grad[3]):
                kept = probabilities
        ctx.save_for_backward(hidden, weight, largest, factor, kept)
        ctx.head, ctx.gradient = head, gradient
        return communication.all_reduce(result, head.tp, overwrite=True).mul_(head.scale)

    @staticmethod
    @once_differentiable
    def backward(ctx, dresult):
        hidden, weight, largest, factor, kept = ctx.saved_tensors
        head = ctx.head
        own_rows, steps = weight[: head.own.size], _steps(hidden, weight)
        dresult, gradient = dresult * head.scale, ctx.gradient
        total = GradientSum() if gradient is None else gradient
        dresult = total.unscaled(dresult)
        if kept is not None:
            total.add_product(weight, kept.t(), dresult)
        for chunk in token_chunks(hidden.shape[0], weight, head.chunk_bytes, is_trained=True) if kept is None else ():
            logits = steps.logits(hidden[chunk], own_rows, head.softcap)
            probabilities = steps.probabilities(logits, largest[chunk], factor[chunk], head.softcap, weight.dtype)
            total.add_product(weight, probabilities.t(), dresult[chunk])
        if gradient is None:
            return None, total.room(weight).to(weight.dtype), None, None, None
        return None, None, None, dresult.new_zeros(0), None


def _softmax(own: Tensor, tp: Group) -> tuple[Tensor, Tensor]:
    """(largest, factor), each [n], of all of the vocabulary: exp(logit - largest) * factor is the probability. `own` as of `own_sums`."""
    largest, total = communication.all_gather(own, tp).unbind(1)
    overall = largest.amax(0)
    return overall, 1 / (total * (largest - overall).exp()).sum(0)
