"""Linear layers and cross entropy over ranks that share them, by a stand-in for Transformer Engine, against our own."""
from functools import partial

import pytest
import torch

from megatron_dllm.parallel import Topology, create_context
from megatron_dllm.tensor_parallel import (
    ColumnParallelLinear,
    Initializer,
    RowParallelLinear,
    VocabularyParallelEmbedding,
    column_layers,
    linear_cross_entropy,
)
from megatron_dllm.transformer_engine import Engine, install
from megatron_dllm.transformer_engine.cross_entropy import engine_cross_entropy
from tests.unit.fake_transformer_engine import install_fake

CPU = torch.device("cpu")
TOKENS, HIDDEN, INNER = 10, 16, 32


def results(rank, sequence_parallel):
    """(by torch, by the stand-in) of y and the gradients of x and all weights; x is read by two layers, whose sum a third one reads."""
    context = create_context(Topology(world=2, tp=2), rank=rank, device=CPU, sequence_parallel=sequence_parallel)
    shared = {"context": context, "init": Initializer(0, 0.3), "dtype": torch.bfloat16}
    layers = torch.nn.ModuleList([
        ColumnParallelLinear("a", (INNER, HIDDEN), **shared), ColumnParallelLinear("b", (INNER, HIDDEN), **shared),
        RowParallelLinear("c", (HIDDEN, INNER), **shared)])
    draw = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(TOKENS, HIDDEN, generator=draw).bfloat16() for _ in range(2))
    if sequence_parallel:
        x, grad = (whole.chunk(2)[rank] for whole in (x, grad))
    x.requires_grad_()

    def run():
        a, b = column_layers(x, layers[:2])
        y = layers[2](a * 0.7 + b)
        return [t.detach().float() for t in (y, *torch.autograd.grad(y, (x, *layers.parameters()), grad))]

    ours = run()
    with pytest.MonkeyPatch.context() as patch:
        install(layers, Engine(install_fake(patch)))
        return ours, run()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_layers_cut_over_ranks(world, sequence_parallel):
    for ours, theirs in world.run(results, sequence_parallel, size=2):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(b, a, rtol=2**-6, atol=2**-6 * a.abs().max().item())


def losses(rank, size, vocab_size, softcap):
    """(ours, the stand-in's) of per_token, correct and the gradients, and the bytes that each sent in exchanges of the loss."""
    context = create_context(Topology(world=size, tp=size), rank=rank, device=CPU, sequence_parallel=False)
    embedding = VocabularyParallelEmbedding("e", (vocab_size, HIDDEN), context=context, init=Initializer(0, 1.0), dtype=torch.float32)
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=draw).requires_grad_()
    targets, observed = (torch.randint(0, vocab_size, (TOKENS,), generator=draw) for _ in range(2))
    targets[:2] = torch.tensor([vocab_size - 1, 0])
    weights, bonus = torch.rand(2, TOKENS, generator=draw)
    score = partial(linear_cross_entropy, hidden, embedding.weight, targets, weights, softcap=softcap, tp=context.tp, vocab_size=vocab_size,
                    observed=observed, bonus=3 * bonus, chunk_bytes=4 * 4 * len(embedding.weight))

    def run(**options):
        context.tp.log.clear()
        terms = score(**options)
        sent = context.tp.log.total("all_gather")[1]
        return [terms.per_token, terms.correct.float(), *torch.autograd.grad(terms.loss, (hidden, embedding.weight))], sent

    with pytest.MonkeyPatch.context() as patch:
        return run(), run(logit_loss=engine_cross_entropy(Engine(install_fake(patch))))


@pytest.mark.parametrize("softcap", [30.0, None])
@pytest.mark.parametrize(("size", "vocab_size"), [(2, 13), (4, 5), (2, 16)], ids=["a row of fill", "a rank of fill", "no fill"])
def test_cross_entropy_over_ranks(world, size, vocab_size, softcap):
    for (ours, sent), (theirs, their_sent) in world.run(losses, size, vocab_size, softcap, size=size):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)
        # Of each token the package's four numbers, and two of ours that say whether it is won.
        assert (sent, their_sent) == (4 * 4 * TOKENS * (size - 1), 4 * 6 * TOKENS * (size - 1))
