"""linear_cross_entropy against plain torch on whole logits."""

import pytest
import torch
import torch.nn.functional as F

from megatron_dllm.parallel import Group, ParallelContext
from megatron_dllm.tensor_parallel import linear_cross_entropy
from tests.unit.largest_tensor import LargestTensor

TP = ParallelContext.single().tp
HIDDEN = 6


def inputs(num_tokens, vocab_size, dtype, *, loo):
    generator = torch.Generator().manual_seed(num_tokens)
    draw = {"generator": generator, "dtype": torch.float64}
    targets = torch.randint(0, vocab_size, (num_tokens,), generator=generator)
    targets[: min(2, num_tokens)] = torch.tensor([vocab_size - 1, 0])[:num_tokens]  # the borders
    weights = torch.rand(num_tokens, **draw)
    weights[2:4] = 0
    observed = bonus = None
    if loo:
        observed = torch.randint(0, vocab_size, (num_tokens,), generator=generator)
        observed[::3] = targets[::3]
        bonus = 3 * torch.rand(num_tokens, **draw)
    hidden = (3 * torch.randn(num_tokens, HIDDEN, **draw)).to(dtype).requires_grad_()
    weight = torch.randn(vocab_size, HIDDEN, **draw).to(dtype).requires_grad_()
    return hidden, weight, targets, weights, observed, bonus


def reference(hidden, weight, targets, weights, observed, bonus, softcap):
    """Logits whole, the soft cap and the loss as torch has them: (loss, per token, logits)."""
    logits = hidden @ weight.T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if observed is not None:
        logits = logits + bonus[:, None] * F.one_hot(observed, logits.shape[1])
    per_token = F.cross_entropy(logits, targets, reduction="none")
    return (weights * per_token).sum(), per_token, logits


CASES = pytest.mark.parametrize(
    "num_tokens, vocab_size, softcap, loo",
    [(7, 13, 3.0, False), (7, 13, None, False), (7, 13, 3.0, True), (11, 29, None, True), (1, 2, 30.0, True), (0, 13, 3.0, True)],
)


@CASES
@pytest.mark.parametrize("tokens_per_chunk", [1, 3, 100])
def test_linear_cross_entropy(num_tokens, vocab_size, softcap, loo, tokens_per_chunk):
    hidden, weight, targets, weights, observed, bonus = inputs(num_tokens, vocab_size, torch.float64, loo=loo)
    loss, per_token, logits = reference(hidden, weight, targets, weights, observed, bonus, softcap)
    expected = torch.autograd.grad(2.5 * loss, (hidden, weight))
    ours = linear_cross_entropy(
        hidden,
        weight,
        targets,
        weights,
        softcap=softcap,
        tp=TP,
        vocab_size=vocab_size,
        observed=observed,
        bonus=bonus,
        chunk_bytes=tokens_per_chunk * vocab_size * 8,
    )
    # A factor on the loss reaches the gradients, which are ready before it is known.
    gradients = torch.autograd.grad(2.5 * ours.loss, (hidden, weight))
    tolerance = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(ours.loss, loss, **tolerance)
    torch.testing.assert_close(ours.per_token, per_token, **tolerance)
    assert torch.equal(ours.correct, logits.argmax(1) == targets)
    for got, want in zip(gradients, expected, strict=True):
        torch.testing.assert_close(got, want, **tolerance)
    assert not ours.per_token.requires_grad and ours.correct.dtype == torch.bool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_low_precision_errs_at_most_twice_as_much_as_torch(dtype):
    hidden, weight, targets, weights, observed, bonus = inputs(37, 61, dtype, loo=True)
    exact = (hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_())
    best = [2.5 * reference(*exact, targets, weights, observed, bonus, 5.0)[0]]
    best += torch.autograd.grad(best[0], exact)
    plain = [2.5 * reference(hidden, weight, targets, weights.float(), observed, bonus.float(), 5.0)[0]]
    plain += torch.autograd.grad(plain[0], (hidden, weight))
    ours = linear_cross_entropy(
        hidden,
        weight,
        targets,
        weights.float(),
        softcap=5.0,
        tp=TP,
        vocab_size=61,
        observed=observed,
        bonus=bonus.float(),
        chunk_bytes=9 * 61 * 4,
    )
    assert ours.loss.dtype == ours.per_token.dtype == torch.float32
    mine = [2.5 * ours.loss, *torch.autograd.grad(2.5 * ours.loss, (hidden, weight))]
    for got, torch_has, want in zip(mine, plain, best, strict=True):
        # One unit of the result's own rounding beside torch's error, which is zero by luck for some scalars.
        unit = torch.finfo(got.dtype).eps * want.abs().max()
        assert (got - want).abs().max() <= 2 * (torch_has - want).abs().max() + unit


def test_equal_logits_go_to_the_lowest_token():
    hidden, weight = torch.ones(2, HIDDEN), torch.ones(5, HIDDEN)
    ours = linear_cross_entropy(hidden, weight, torch.tensor([0, 3]), torch.ones(2), softcap=None, tp=TP, vocab_size=5)
    assert ours.correct.tolist() == [True, False]


def test_gradients_where_only_one_input_wants_them():
    hidden, weight, targets, weights, *_ = inputs(7, 13, torch.float64, loo=False)
    both = torch.autograd.grad(reference(hidden, weight, targets, weights, None, None, 3.0)[0], (hidden, weight))
    for position, frozen in ((0, (hidden, weight.detach())), (1, (hidden.detach(), weight))):
        loss = linear_cross_entropy(*frozen, targets, weights, softcap=3.0, tp=TP, vocab_size=13).loss
        torch.testing.assert_close(torch.autograd.grad(loss, (hidden, weight)[position])[0], both[position], rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, targets, weights, softcap=3.0, tp=TP, vocab_size=13).loss.requires_grad


def test_gradcheck():
    hidden, weight, targets, weights, observed, bonus = inputs(3, 5, torch.float64, loo=True)

    def loss(hidden, weight):
        return linear_cross_entropy(
            hidden, weight, targets, weights, softcap=3.0, tp=TP, vocab_size=5, observed=observed, bonus=bonus, chunk_bytes=80
        ).loss

    torch.autograd.gradcheck(loss, (hidden, weight))


def test_never_holds_all_logits():
    hidden, weight, targets, weights, *_ = inputs(96, 64, torch.float64, loo=False)
    with LargestTensor() as whole:
        reference(hidden, weight, targets, weights, None, None, 3.0)[0].backward()
    with LargestTensor() as chunked:
        linear_cross_entropy(hidden, weight, targets, weights, softcap=3.0, tp=TP, vocab_size=64, chunk_bytes=8 * 64 * 8).loss.backward()
    assert whole.numel == 96 * 64
    assert chunked.numel == 96 * HIDDEN  # hidden's gradient; a chunk's logits are 8 x 64


@pytest.mark.parametrize("token", [-1, 13])
def test_token_outside_the_vocabulary_stops(token):
    hidden, weight, targets, weights, *_ = inputs(7, 13, torch.float64, loo=False)
    targets[4] = token
    with pytest.raises(RuntimeError, match="target outside the vocabulary of 13"):
        linear_cross_entropy(hidden, weight, targets, weights, softcap=3.0, tp=TP, vocab_size=13)


def test_shard_of_the_wrong_size_is_refused():
    hidden, weight, targets, weights, *_ = inputs(7, 13, torch.float64, loo=False)
    with pytest.raises(AssertionError, match="vocabulary 13 over 2 ranks takes 7 rows a rank, not 13"):
        linear_cross_entropy(
            hidden, weight, targets, weights, softcap=3.0, tp=Group("tp", 2, 0, None, (0, 1)), vocab_size=13, sum_hidden_grad=False
        )
