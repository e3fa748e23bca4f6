"""Linear head, soft cap and cross entropy in one, over a vocabulary cut over `tp`, never holding [T, V]."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_dllm.parallel import communication
from megatron_dllm.parallel.collectives import sum_grad_over
from megatron_dllm.parallel.context import Group

from .vocabulary import CHUNK_BYTES, VocabularyRange, add_product_, at_least_fp32, capped_logits, check_tokens, token_chunks


@dataclass(frozen=True)
class CrossEntropy:
    """Result of `linear_cross_entropy`.

    loss       scalar: sum of token_weights * per_token, with gradient
    per_token  [T], fp32 at least: the cross entropy of each token, detached
    correct    [T], bool: whether the target has the largest logit, bonus included (of equal ones the lowest token wins)
    """

    loss: Tensor
    per_token: Tensor
    correct: Tensor


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    token_weights: Tensor,
    *,
    softcap: float | None,
    tp: Group,
    vocab_size: int,
    observed: Tensor | None = None,
    bonus: Tensor | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    sum_hidden_grad: bool = True,
) -> CrossEntropy:
    """Weighted cross entropy of softcap * tanh(hidden @ W.T / softcap), logits and softmax in fp32 at least.

        hidden         [T, H]          equal on every rank
        weight         [ceil(V/R), H]  our rows of W
        targets        [T]             int64 in [0, V)
        token_weights  [T]             fp32 at least, a constant
        observed       [T]             int64: `bonus` [T] is added to this token's logit after the soft cap (leave-one-out)

    The gradient of `hidden` is summed over `tp`; with sum_hidden_grad=False it stays this rank's share, for a hidden that
    comes from `gather_sequence`, whose reduce-scatter does the sum. The gradients are computed in forward, a chunk at a
    time, unless they are off; saved: theirs, [T, H] in hidden's dtype and [v, H] in fp32 at least. `chunk_bytes` bounds
    a chunk's logits [n, v], of which up to three are live at once.
    """
    assert hidden.dim() == 2 and targets.shape == token_weights.shape == hidden.shape[:1], (
        f"hidden {tuple(hidden.shape)}, targets {tuple(targets.shape)}, token_weights {tuple(token_weights.shape)}"
    )
    assert hidden.dtype == weight.dtype, f"hidden is {hidden.dtype}, weight {weight.dtype}"
    assert (observed is None) == (bonus is None), "observed and bonus come together"
    check_tokens(targets, vocab_size, "target")
    if observed is not None:
        check_tokens(observed, vocab_size, "observed token")
    if sum_hidden_grad:
        hidden = sum_grad_over(hidden, tp)
    head = _Head(softcap, tp, VocabularyRange.of(weight, vocab_size, tp), chunk_bytes)
    # Inside forward gradients are off and needs_input_grad speaks of the inputs alone.
    wants = tuple(torch.is_grad_enabled() and x.requires_grad for x in (hidden, weight))
    return CrossEntropy(*_LinearCrossEntropy.apply(hidden, weight, targets, token_weights, observed, bonus, head, wants))


@dataclass(frozen=True)
class _Head:
    softcap: float | None
    tp: Group
    own: VocabularyRange
    chunk_bytes: int


@dataclass(frozen=True)
class _Chunk:
    """The softmax of n tokens: `exp` [n, v] = exp(logits - own largest); times `scale` [n, 1] it is the probability."""

    exp: Tensor
    scale: Tensor
    per_token: Tensor
    correct: Tensor


def _softmax(logits: Tensor, targets: Tensor, head: _Head) -> _Chunk:
    """Softmax and cross entropy over all of the vocabulary, by one exchange of four numbers a token."""
    n, v = logits.shape
    rows, ours = head.own.locate(targets)
    if v:
        largest = logits.amax(1)
        exp = (logits - largest.unsqueeze(1)).exp_()
        at_target = logits.gather(1, rows.unsqueeze(1)).squeeze(1).where(ours, 0)
        best = (logits.argmax(1) == rows) & ours
        own = torch.stack([largest, exp.sum(1), at_target, best.to(logits.dtype)])
    else:  # a rank whose share of the vocabulary is fill alone
        exp = logits
        own = logits.new_zeros(4, n)
        own[0] = -torch.inf
    largest, total, at_target, best = communication.all_gather(own, head.tp).view(head.tp.size, 4, n).unbind(1)
    overall, winner = largest.max(0)  # the first of equal ranks, which has the lower tokens
    sum_exp = (total * (largest - overall).exp()).sum(0)
    scale = (own[0] - overall).exp() / sum_exp
    return _Chunk(
        exp=exp,
        scale=scale.unsqueeze(1),
        per_token=sum_exp.log() + overall - at_target.sum(0),
        correct=best.gather(0, winner.unsqueeze(0)).squeeze(0) > 0,
    )


def _logit_gradient(chunk: _Chunk, logits: Tensor, targets: Tensor, token_weights: Tensor, head: _Head) -> Tensor:
    """Gradient [n, v] at the product, before the soft cap. Overwrites `chunk.exp` and `logits` (after the cap, no bonus)."""
    rows, ours = head.own.locate(targets)
    grad = chunk.exp.mul_(chunk.scale)
    grad.scatter_add_(1, rows.unsqueeze(1), -ours.to(grad.dtype).unsqueeze(1))
    grad.mul_(token_weights.unsqueeze(1))
    if head.softcap is not None:
        # d/dx [c tanh(x / c)] = 1 - tanh^2
        grad.mul_(logits.div_(head.softcap).square_().neg_().add_(1))
    return grad


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, token_weights, observed, bonus, head, wants):
        wants_hidden, wants_weight = wants
        dtype = at_least_fp32(weight)
        own_rows = weight[: head.own.size]
        per_token = hidden.new_empty(hidden.shape[0], dtype=dtype)
        correct = hidden.new_empty(hidden.shape[0], dtype=torch.bool)
        dhidden = torch.zeros_like(hidden) if wants_hidden else None
        dweight = torch.zeros_like(weight, dtype=dtype) if wants_weight else None
        for chunk in token_chunks(hidden.shape[0], weight, head.chunk_bytes):
            logits = capped_logits(hidden[chunk], own_rows, head.softcap)
            if observed is not None and head.own.size:
                rows, ours = head.own.locate(observed[chunk])
                rows = rows.unsqueeze(1)
                without_bonus = logits.gather(1, rows)
                logits.scatter_add_(1, rows, (bonus[chunk].to(dtype) * ours).unsqueeze(1))
            softmax = _softmax(logits, targets[chunk], head)
            per_token[chunk], correct[chunk] = softmax.per_token, softmax.correct
            if not (wants_hidden or wants_weight) or not head.own.size:
                continue
            if observed is not None:
                logits.scatter_(1, rows, without_bonus)
            grad = _logit_gradient(softmax, logits, targets[chunk], token_weights[chunk].to(dtype), head).to(weight.dtype)
            if wants_hidden:
                torch.mm(grad, own_rows, out=dhidden[chunk])
            if wants_weight:
                add_product_(dweight[: head.own.size], grad.t(), hidden[chunk])
        ctx.save_for_backward(dhidden, dweight)
        ctx.dtype = weight.dtype
        ctx.mark_non_differentiable(per_token, correct)
        return (per_token * token_weights).sum(), per_token, correct

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss, *_):
        dhidden, dweight = ctx.saved_tensors
        if dhidden is not None:
            dhidden = dhidden * dloss
        if dweight is not None:
            # One pass over a matrix of the vocabulary's size: scale and round.
            dweight = torch.mul(dweight, dloss, out=torch.empty_like(dweight, dtype=ctx.dtype))
        return dhidden, dweight, None, None, None, None, None, None
