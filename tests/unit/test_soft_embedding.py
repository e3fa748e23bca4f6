"""soft_embedding against plain torch on whole logits."""

import pytest
import torch

from megatron_dllm.parallel import ParallelContext
from megatron_dllm.tensor_parallel import soft_embedding
from tests.unit.largest_tensor import LargestTensor
from tests.unit.launch_count import LaunchCounter

TP = ParallelContext.single().tp
HIDDEN = 6


def inputs(num_tokens, vocab_size, dtype):
    generator = torch.Generator().manual_seed(num_tokens)
    draw = {"generator": generator, "dtype": torch.float64}
    hidden = (2 * torch.randn(num_tokens, HIDDEN, **draw)).to(dtype).requires_grad_()
    weight = torch.randn(vocab_size, HIDDEN, **draw).to(dtype).requires_grad_()
    return hidden, weight, torch.randn(num_tokens, HIDDEN, **draw).to(dtype)


def reference(hidden, weight, softcap, scale):
    """The draft's logits are constants; the embedding that they average is not."""
    logits = (hidden @ weight.T).detach()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    probabilities = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32)).to(weight.dtype)
    return probabilities @ weight * torch.tensor(scale, dtype=weight.dtype)


@pytest.mark.parametrize("num_tokens, vocab_size, softcap", [(7, 13, 3.0), (7, 13, None), (11, 29, 30.0), (1, 2, 3.0), (0, 13, 3.0)])
@pytest.mark.parametrize("tokens_per_chunk", [1, 3, 100])
def test_soft_embedding(num_tokens, vocab_size, softcap, tokens_per_chunk):
    hidden, weight, upstream = inputs(num_tokens, vocab_size, torch.float64)
    expected = reference(hidden, weight, softcap, 2.7)
    chunk_bytes = tokens_per_chunk * vocab_size * 8
    ours = soft_embedding(hidden, weight, softcap=softcap, scale=2.7, tp=TP, vocab_size=vocab_size, chunk_bytes=chunk_bytes)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    got, want = (torch.autograd.grad(y, weight, upstream)[0] for y in (ours, expected))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_logits_are_constants():
    hidden, weight, upstream = inputs(5, 7, torch.float64)
    ours = soft_embedding(hidden, weight, softcap=3.0, scale=2.0, tp=TP, vocab_size=7)
    assert torch.autograd.grad(ours, hidden, upstream, allow_unused=True)[0] is None
    # The function is linear in the weight that it averages: had the logits a gradient, this would not be its slope.
    probabilities = (3 * torch.tanh(hidden @ weight.T / 3)).softmax(-1).detach()
    ours = soft_embedding(hidden, weight, softcap=3.0, scale=2.0, tp=TP, vocab_size=7)
    torch.testing.assert_close(torch.autograd.grad(ours, weight, upstream)[0], 2 * probabilities.T @ upstream, rtol=1e-12, atol=1e-12)
    assert not soft_embedding(hidden, weight.detach(), softcap=3.0, scale=2.0, tp=TP, vocab_size=7).requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_low_precision_errs_at_most_twice_as_much_as_torch(dtype):
    hidden, weight, upstream = inputs(37, 61, dtype)
    scale = torch.tensor(53.066, dtype=dtype).item()  # the multiplier is rounded first: 53.0 in bf16
    exact = [hidden.detach().double(), weight.detach().double().requires_grad_()]
    best = [reference(*exact, 5.0, scale)]
    best += torch.autograd.grad(best[0], exact[1], upstream.double())
    plain = [reference(hidden, weight, 5.0, 53.066)]
    plain += torch.autograd.grad(plain[0], weight, upstream)
    ours = [soft_embedding(hidden, weight, softcap=5.0, scale=53.066, tp=TP, vocab_size=61, chunk_bytes=9 * 61 * 4)]
    ours += torch.autograd.grad(ours[0], weight, upstream)
    for got, torch_has, want in zip(ours, plain, best, strict=True):
        assert got.dtype == dtype
        assert (got - want).abs().max() <= 2 * (torch_has - want).abs().max()


def test_never_holds_all_logits():
    hidden, weight, upstream = inputs(96, 64, torch.float64)
    with LargestTensor() as whole:
        reference(hidden, weight, 3.0, 2.0).backward(upstream)
    with LargestTensor() as chunked:
        soft_embedding(hidden, weight, softcap=3.0, scale=2.0, tp=TP, vocab_size=64, chunk_bytes=8 * 64 * 8).backward(upstream)
    assert whole.numel == 96 * 64
    assert chunked.numel == 96 * HIDDEN


def test_probabilities_are_kept_where_one_chunk_has_all_tokens():
    hidden, weight, upstream = inputs(7, 61, torch.float64)
    found = []
    for chunk_bytes in (None, 6 * 61 * 8):
        with LaunchCounter() as counter:
            y = soft_embedding(hidden, weight, softcap=3.0, scale=2.0, tp=TP, vocab_size=61, chunk_bytes=chunk_bytes)
            results = y.detach(), *torch.autograd.grad(y, weight, upstream)
        found.append((results, sum(number for name, number in counter.launches.items() if "mm" in name)))
    (kept, few), (again, many) = found
    assert (few, many) == (3, 8)
    for ours, want in zip(kept, again, strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-12, atol=1e-12)
