"""Linear head, soft cap and cross entropy in one, over a vocabulary cut over `tp`, never holding [T, V]."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_dllm.kernels.launch import takes
from megatron_dllm.kernels.precision import accumulation_dtype
from megatron_dllm.parallel import communication
from megatron_dllm.parallel.collectives import sum_grad_over
from megatron_dllm.parallel.context import Group

from .shared_gradient import GradientSum, SharedWeight, scale_and_round
from .vocabulary import VocabularyRange, check_tokens, product, token_chunks

HIDDEN = -1e30  # the logit of a row of fill: finite, as a rank may have no other


class LogitLoss(Protocol):
    """Cross entropy of logits at hand, in place of ours."""

    def __call__(self, logits: Tensor, targets: Tensor, weights: Tensor, tp: Group, *,
                 wants_gradient: bool) -> tuple[Tensor, Tensor | None]:
        """fp32 [n], and with `wants_gradient` the gradient [n, v] of sum(weights * it), for which it may use the room of the logits.

        Each rank of `tp` has as many of them, fp32 [n, v], in the order of the ranks. targets int64 [n], over all; weights fp32 [n].
        """


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
    chunk_bytes: int | None = None,
    sum_hidden_grad: bool = True,
    shared: SharedWeight | None = None,
    logit_loss: LogitLoss | None = None,
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
    a chunk's logits [n, v], of which up to three are live at once. With `shared`, the weight with a gradient sum, the weight's
    gradient goes there in forward, and is not saved. `logit_loss` computes the loss of a chunk's logits (None: ours).
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
    head = _Head(softcap, tp, VocabularyRange.of(weight, vocab_size, tp), chunk_bytes, logit_loss)
    # Inside forward gradients are off and needs_input_grad speaks of the inputs alone.
    wants = tuple(torch.is_grad_enabled() and x.requires_grad for x in (hidden, weight if shared is None else shared.ticket))
    ticket, gradient = (None, None) if shared is None else (shared.ticket, shared.gradient)
    weight = weight if shared is None else shared.weight
    return CrossEntropy(*_LinearCrossEntropy.apply(hidden, weight, targets, token_weights, observed, bonus, head, wants, ticket, gradient))


@dataclass(frozen=True)
class _Head:
    softcap: float | None
    tp: Group
    own: VocabularyRange
    chunk_bytes: int | None
    logit_loss: LogitLoss | None = None


@dataclass(frozen=True)
class _Chunk:
    """What is known of n tokens: `product` [n, v] = hidden @ W.T, and per token the constants that the loss is made of. For a LogitLoss v
    counts the rows of fill too."""

    product: Tensor
    targets: Tensor
    token_weights: Tensor
    observed: Tensor | None
    bonus: Tensor | None


@dataclass(frozen=True)
class _Scores:
    """Over all of the vocabulary, by token: the cross entropy, whether it is won, the largest logit, the sum of exp(logit - largest); the
    last two are for our own gradient."""

    per_token: Tensor
    correct: Tensor
    largest: Tensor | None = None
    sum_exp: Tensor | None = None

    @classmethod
    def of(cls, own: Tensor, tp: Group) -> _Scores:
        """From this rank's [parts, 4, n], parts of the vocabulary with the lowest tokens first, by one exchange: of each part the largest
        logit, the sum of exp(logit - largest), the logit at the target or 0, and whether the first of the largest is at the target."""
        largest, total, at_target, best = communication.all_gather(own, tp).unbind(1)
        overall, correct = _won(largest, best)
        sum_exp = (total * (largest - overall).exp()).sum(0)
        return cls(sum_exp.log() + overall - at_target.sum(0), correct, overall, sum_exp)


def _won(largest: Tensor, best: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit [n] of all parts, and whether it is at the target; both given as [parts, n], see `_Scores.of`."""
    overall, winner = largest.max(0)  # the first of equal parts, which has the lower tokens
    return overall, best.gather(0, winner.unsqueeze(0)).squeeze(0) > 0


def _shifted_logits_(product: Tensor, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """What a softmax may be made of, [n, v], from `product`, which is overwritten: the logits, or with a cap c these plus c, and s beside
    them: c tanh(x / c) = 2 c s - c with s = sigmoid(2 x / c). A CPU's sigmoid takes a sixth of the time of its tanh. In fp32 a logit is
    off by up to 4e-6 at c = 30, where tanh's error is relative: so is a token's loss (gradients are as exact), and logits that are
    nearer than that count as equal."""
    if softcap is None:
        return product, None
    sigmoid = product.mul_(2 / softcap).sigmoid_()
    return sigmoid * (2 * softcap), sigmoid


def _score_in_torch(chunk: _Chunk, head: _Head, gradient_dtype: torch.dtype | None) -> tuple[_Scores, Tensor | None]:
    """Scores, and with a dtype the gradient [n, v] at `product`, which is overwritten. Logits: `_shifted_logits_`."""
    logits, sigmoid = _shifted_logits_(chunk.product, head.softcap)
    if chunk.observed is not None and head.own.size:
        seen, seen_here = head.own.locate(chunk.observed)
        seen = seen.unsqueeze(1)
        logits.scatter_add_(1, seen, (chunk.bonus.to(logits.dtype) * seen_here).unsqueeze(1))
    rows, ours = head.own.locate(chunk.targets)
    if head.own.size:
        largest = logits.amax(1)
        at_target = logits.gather(1, rows.unsqueeze(1)).squeeze(1)
        best = _is_first_of_largest(logits, rows, (at_target == largest) & ours)
        probabilities = torch.softmax(logits, 1, out=logits)
        sum_exp = probabilities.amax(1).reciprocal_()  # of exp(logit - largest)
        own = torch.stack([largest, sum_exp, at_target.where(ours, 0), best.to(logits.dtype)])
    else:  # a rank whose share of the vocabulary is fill alone
        own = logits.new_zeros(4, len(logits))
        own[0] = -torch.inf
    scores = _Scores.of(own.unsqueeze(0), head.tp)
    if gradient_dtype is None or not head.own.size:
        return scores, None
    # d/dx [c tanh(x / c)] = 1 - tanh^2 = 4 s (1 - s)
    weights = chunk.token_weights if sigmoid is None else chunk.token_weights * 4
    grad = probabilities.mul_(((own[0] - scores.largest).exp() * sum_exp / scores.sum_exp * weights).unsqueeze(1))
    grad.scatter_add_(1, rows.unsqueeze(1), -(ours * weights).unsqueeze(1))
    if sigmoid is not None:
        torch.ops.aten.sigmoid_backward.grad_input(grad, sigmoid, grad_input=grad)
    return scores, grad.to(gradient_dtype)


def _is_first_of_largest(logits: Tensor, rows: Tensor, is_largest: Tensor) -> Tensor:
    """bool [n]: whether the logit at `rows` [n], known to be one of the largest or not, is the first of them. On a CPU argmax takes longer
    than the exponentials, and is asked of no token in vain."""
    if logits.is_cuda:
        return (logits.argmax(1) == rows) & is_largest
    tokens = is_largest.nonzero().squeeze(1)
    firsts = logits.index_select(0, tokens).argmax(1) == rows.index_select(0, tokens)
    return is_largest.index_copy(0, tokens, firsts)


def _score_by_kernel(chunk: _Chunk, head: _Head, gradient_dtype: torch.dtype | None) -> tuple[_Scores, Tensor | None]:
    """The same, with one read of `product` for the scores and one for the gradient."""
    from megatron_dllm.kernels import cross_entropy as kernel  # Triton is there with CUDA alone

    def here(tokens: Tensor) -> Tensor:
        rows, ours = head.own.locate(tokens)
        return rows.where(ours, -1)

    targets, observed = here(chunk.targets), None if chunk.observed is None else here(chunk.observed)
    scores = _Scores.of(kernel.softmax_statistics(chunk.product, targets, head.softcap, observed, chunk.bonus), head.tp)
    if gradient_dtype is None or not head.own.size:
        return scores, None
    constants = (targets, chunk.token_weights, scores.largest, 1 / scores.sum_exp)
    return scores, kernel.logit_gradient(chunk.product, *constants, head.softcap, observed, chunk.bonus, gradient_dtype)


def _score_by_loss(chunk: _Chunk, head: _Head, gradient_dtype: torch.dtype | None, *, loss: LogitLoss) -> tuple[_Scores, Tensor | None]:
    """The same by a loss of logits, which are held beside `product`: that becomes the factor of the soft cap in their gradient."""
    capped = chunk.product if head.softcap is None else chunk.product.div_(head.softcap).tanh_()
    logits = capped if head.softcap is None else capped * head.softcap
    logits[:, head.own.size:] = HIDDEN
    rows, ours = head.own.locate(chunk.targets)
    if chunk.observed is not None:
        seen, seen_here = head.own.locate(chunk.observed)
        logits.scatter_add_(1, seen.unsqueeze(1), (chunk.bonus.to(logits.dtype) * seen_here).unsqueeze(1))
    largest, at = logits.max(1)
    best = ((at == rows) & ours).to(logits.dtype)
    _, correct = _won(*communication.all_gather(torch.stack([largest, best]).unsqueeze(0), head.tp).unbind(1))
    per_token, grad = loss(logits, chunk.targets, chunk.token_weights, head.tp, wants_gradient=gradient_dtype is not None)
    scores = _Scores(per_token, correct)
    if grad is None or not head.own.size:
        return scores, None
    if head.softcap is not None:
        grad.mul_(capped.square_().neg_().add_(1))
    return scores, grad[:, :head.own.size].to(gradient_dtype)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, token_weights, observed, bonus, head, wants, ticket, gradient):
        wants_hidden, wants_weight = wants
        dtype = accumulation_dtype(weight.dtype)
        own_rows = weight[: head.own.size]
        per_token = hidden.new_empty(hidden.shape[0], dtype=dtype)
        correct = hidden.new_empty(hidden.shape[0], dtype=torch.bool)
        dhidden = torch.zeros_like(hidden) if wants_hidden else None
        weight_sum = GradientSum() if gradient is None else gradient
        score, rows = _score_by_kernel if takes(hidden, weight) else _score_in_torch, own_rows
        if head.logit_loss is not None:
            score, rows = partial(_score_by_loss, loss=head.logit_loss), weight
        gradient_dtype = weight.dtype if wants_hidden or wants_weight else None
        for part in token_chunks(hidden.shape[0], weight, head.chunk_bytes, is_trained=wants_weight):
            chunk = _Chunk(product(hidden[part], rows.t()), targets[part], token_weights[part].to(dtype),
                           *(None if x is None else x[part] for x in (observed, bonus)))
            scores, grad = score(chunk, head, gradient_dtype)
            per_token[part], correct[part] = scores.per_token, scores.correct
            if grad is None:
                continue
            if wants_hidden:
                torch.mm(grad, own_rows, out=dhidden[part])
            if wants_weight:
                weight_sum.add_product(weight, grad.t(), hidden[part])
        ctx.save_for_backward(dhidden, weight_sum.room(weight) if wants_weight and gradient is None else None)
        ctx.dtype, ctx.gradient = weight.dtype, gradient if wants_weight else None
        ctx.mark_non_differentiable(per_token, correct)
        return (per_token * token_weights).sum(), per_token, correct

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss, *_):
        dhidden, dweight = ctx.saved_tensors
        if dhidden is not None:
            dhidden = dhidden * dloss
        if dweight is not None:
            dweight = scale_and_round(dweight, dloss, ctx.dtype)
        dticket = None
        if ctx.gradient is not None:
            ctx.gradient.set_scale(dloss)
            dticket = dloss.new_zeros(0, dtype=ctx.dtype)
        return dhidden, dweight, None, None, None, None, None, None, dticket, None
