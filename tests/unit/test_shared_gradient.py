"""tensor_parallel.shared_gradient: one sum for all uses of a matrix gives the gradient that autograd adds up use by use."""
from __future__ import annotations

import pytest
import torch

from megatron_dllm.data_parallel.buckets import GradientBuckets
from megatron_dllm.parallel import ParallelContext
from megatron_dllm.tensor_parallel import Initializer, SharedWeight, VocabularyParallelEmbedding, linear_cross_entropy, soft_embedding

V, H = 13, 5
CONTEXT = ParallelContext.single()


def embedding(dtype=torch.float64):
    return VocabularyParallelEmbedding("embedding.weight", (V, H), context=CONTEXT, init=Initializer(3, 0.7), dtype=dtype)


def total_loss(layer: VocabularyParallelEmbedding, shared: SharedWeight | None, factor: float = 1.0, first: float = 1.0) -> torch.Tensor:
    """Two reads of rows, a loss, a soft embedding of that, another loss: as in the model. Numbers that come twice are read."""
    common = {"softcap": 3.0, "tp": CONTEXT.tp, "vocab_size": V, "shared": shared, "chunk_bytes": 3 * V * 4}

    def loss(hidden: torch.Tensor, seed: int) -> torch.Tensor:
        targets = torch.randint(V, (len(hidden),), generator=torch.Generator().manual_seed(seed))
        return linear_cross_entropy(hidden, layer.weight, targets, torch.linspace(0.1, 1, len(hidden)), **common).loss

    hidden = layer(torch.tensor([1, 5, 5, 12, 0, 1, 7]), shared).tanh()
    signal = soft_embedding(hidden[2:6].detach(), layer.weight, scale=1.7, **common)
    again = (layer(torch.tensor([3, 5, 3, 9]), shared) * signal).sin()
    return (first * loss(hidden, 1) + loss(again, 2)) * factor


@pytest.mark.parametrize("factor", [1.0, -0.37])
def test_the_sum_is_the_gradient(factor):
    plain, layer = embedding(), embedding()
    total_loss(plain, None, factor).backward()
    shared = SharedWeight.of(layer.weight)
    total = total_loss(layer, shared, factor)
    total.backward()
    torch.testing.assert_close(layer.weight.grad, plain.weight.grad, rtol=1e-12, atol=1e-14)
    assert plain.weight.grad.abs().max() > 0.1
    assert shared.gradient.total is None, "the sum is let go after the backward"


def test_bf16_is_rounded_once():
    exact, plain, layer = embedding(), embedding(torch.bfloat16), embedding(torch.bfloat16)
    with torch.no_grad():
        exact.weight.copy_(layer.weight)
    total_loss(exact, None).backward()
    total_loss(plain, None).backward()
    total_loss(layer, SharedWeight.of(layer.weight)).backward()
    ours, theirs = ((x.weight.grad - exact.weight.grad).norm() for x in (layer, plain))
    assert layer.weight.grad.dtype == torch.bfloat16 and ours < theirs


def test_the_sum_goes_into_the_buffer():
    exact, layer = embedding(), embedding(torch.bfloat16)
    buckets = GradientBuckets([("embedding.weight", layer.weight)], CONTEXT)
    with torch.no_grad():
        exact.weight.copy_(layer.weight)
    for number in (1, 2):
        buckets.last_microbatch()
        total_loss(exact, None, factor=0.5).backward()
        total_loss(layer, SharedWeight.of(layer.weight), factor=0.5).backward()
        assert buckets.buckets[0].missing == 0, "nobody was told of the gradient"
        ours = buckets.buckets[0].gradient(0)
        assert ours.dtype == torch.float32 and layer.weight.grad is None
        error = (ours - exact.weight.grad).norm() / exact.weight.grad.norm()
        assert error < 2e-2, f"after {number} backwards"
    # Beside others it goes through autograd, which rounds it.
    total_loss(layer, SharedWeight.of(layer.weight, has_others=True), factor=-1.0).backward()
    assert ours.norm() < 2e-2 * exact.weight.grad.norm()
    ours.fill_(float("nan"))
    buckets.zero()
    assert ours.isnan().all(), "nothing is written: the next sum takes its place"
    total_loss(layer, SharedWeight.of(layer.weight)).backward()
    assert (ours - exact.weight.grad).norm() < 2e-2 * exact.weight.grad.norm()  # twice a half
    buckets.zero()
    buckets.last_microbatch()
    buckets.finish()
    assert not ours.any(), "a step without any use has a gradient of zero"


def test_a_frozen_matrix_and_no_gradient_at_all():
    layer = embedding()
    layer.weight.requires_grad_(False)
    shared = SharedWeight.of(layer.weight)
    assert not total_loss(layer, shared).requires_grad and shared.gradient.total is None
    layer.weight.requires_grad_(True)
    with torch.no_grad():
        shared = SharedWeight.of(layer.weight)
        total_loss(layer, shared)
    assert shared.gradient.total is None


def test_losses_of_different_gradients_are_refused():
    layer = embedding()
    with pytest.raises(RuntimeError, match="losses that share a gradient sum have different gradients"):
        total_loss(layer, SharedWeight.of(layer.weight), first=2.0).backward()
