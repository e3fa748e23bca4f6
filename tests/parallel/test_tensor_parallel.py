"""A small network of all tensor-parallel layers, cut over 2 and 4 ranks, against the same network on one process (float64)."""

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from megatron_dllm.parallel import ParallelContext, Topology, create_context, gather_sequence, place, split_sequence, sum_over
from megatron_dllm.tensor_parallel import (
    ColumnParallelLinear,
    Initializer,
    RowParallelLinear,
    VocabularyParallelEmbedding,
    column_linear,
    linear_cross_entropy,
    local_heads,
    make_parameter,
    row_linear,
    soft_embedding,
    sum_shared_gradients,
)

HIDDEN, FFN, HEADS, HEAD_DIM, SOFTCAP = 6, 8, 4, 3, 3.0
DTYPE = torch.float64
TOLERANCE = 1e-12


@dataclass(frozen=True)
class Shape:
    """What differs between the cases."""

    num_tokens: int = 8
    kv_heads: int = 2
    vocab_size: int = 13
    loo: bool = True
    softcap: float | None = SOFTCAP


def normalize(x, weight):
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


class Network(nn.Module):
    """Embedding plus a soft embedding of itself, attention, gated MLP, tied head: every way in which a weight is cut or shared.

    Norms see a piece of the sequence under sequence parallelism; q and k norms see some of the heads in any case.
    """

    def __init__(self, context: ParallelContext, shape: Shape):
        super().__init__()
        self.context, self.shape = context, shape
        self.heads = local_heads(HEADS, shape.kv_heads, context.tp)
        arguments = {"context": context, "init": Initializer(5, 0.7), "dtype": DTYPE}

        def parameter(name, size, *, partial):
            placement = place(size, context, partial_over_tp=partial)
            return make_parameter(name, placement, init=arguments["init"], dtype=DTYPE, device=context.device)

        kv_width, copies = shape.kv_heads * HEAD_DIM, self.heads.kv_copies
        self.embedding = VocabularyParallelEmbedding("embedding", (shape.vocab_size, HIDDEN), **arguments)
        self.norm = parameter("norm", (HIDDEN,), partial=context.sequence_parallel)
        self.mlp_norm = parameter("mlp_norm", (HIDDEN,), partial=context.sequence_parallel)
        self.q_norm = parameter("q_norm", (HEAD_DIM,), partial=True)
        self.k_norm = parameter("k_norm", (HEAD_DIM,), partial=True)
        self.q_proj = ColumnParallelLinear("q", (HEADS * HEAD_DIM, HIDDEN), **arguments)
        self.k_proj = ColumnParallelLinear("k", (kv_width, HIDDEN), **arguments, copies=copies)
        self.v_proj = ColumnParallelLinear("v", (kv_width, HIDDEN), **arguments, copies=copies)
        self.o_proj = RowParallelLinear("o", (HIDDEN, HEADS * HEAD_DIM), **arguments)
        self.gate_up = ColumnParallelLinear("gate_up", (2, FFN, HIDDEN), **arguments)
        self.down = RowParallelLinear("down", (HIDDEN, FFN), **arguments)

    def attention(self, x):
        tp, sequence_parallel = self.context.tp, self.context.sequence_parallel
        weights = (self.q_proj.weight, self.k_proj.weight, self.v_proj.weight)
        q, k, v = (y.unflatten(1, (-1, HEAD_DIM)) for y in column_linear(x, weights, tp=tp, sequence_parallel=sequence_parallel))
        repeats = self.heads.num_query // self.heads.num_kv
        q, k = normalize(q, self.q_norm), normalize(k, self.k_norm).repeat_interleave(repeats, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", scores, v.repeat_interleave(repeats, 1)).flatten(1)
        return row_linear(mixed, self.o_proj.weight, tp=tp, sequence_parallel=sequence_parallel)

    def forward(self, tokens, targets, token_weights, observed, bonus, *, sum_hidden_grad):
        tp, vocab_size, softcap = self.context.tp, self.shape.vocab_size, self.shape.softcap
        whole = (lambda x: gather_sequence(x, tp)) if self.context.sequence_parallel else (lambda x: x)
        own = (lambda x: split_sequence(x, tp)) if self.context.sequence_parallel else (lambda x: x)
        chunk_bytes = 3 * self.embedding.weight.shape[0] * 8  # three tokens a chunk
        weight = self.embedding.weight
        x = self.embedding(tokens)
        draft = whole(x.detach())
        x = x + own(soft_embedding(draft, weight, softcap=softcap, scale=0.3, tp=tp, vocab_size=vocab_size, chunk_bytes=chunk_bytes))
        x = x + self.attention(normalize(x, self.norm))
        gate, up = self.gate_up(normalize(x, self.mlp_norm)).unbind(1)
        x = x + self.down(torch.sigmoid(gate) * up)
        return linear_cross_entropy(
            whole(x),
            weight,
            targets,
            token_weights,
            softcap=softcap,
            tp=tp,
            vocab_size=vocab_size,
            observed=observed if self.shape.loo else None,
            bonus=bonus if self.shape.loo else None,
            chunk_bytes=chunk_bytes,
            sum_hidden_grad=sum_hidden_grad,
        )


def step(context, shape, *, forget=""):
    """(network, loss terms) after a backward; `forget` leaves a reduction out."""
    network = Network(context, shape)
    draw = torch.Generator().manual_seed(1)
    tokens, targets, observed = (torch.randint(0, shape.vocab_size, (shape.num_tokens,), generator=draw) for _ in range(3))
    tokens[:2], targets[:2] = torch.tensor([shape.vocab_size - 1, 0]), torch.tensor([0, shape.vocab_size - 1])
    observed[2] = targets[2]
    token_weights, bonus = (torch.rand(shape.num_tokens, generator=draw, dtype=DTYPE) for _ in range(2))
    sum_hidden_grad = not context.sequence_parallel and forget != "hidden"
    terms = network(tokens, targets, token_weights, observed, 3 * bonus, sum_hidden_grad=sum_hidden_grad)
    (1.7 * terms.loss).backward()
    gradients = [(parameter.grad, parameter.placement) for parameter in network.parameters()]
    if forget == "copies":
        gradients = [(g, dataclasses.replace(p, copies=1)) for g, p in gradients]
    if forget == "partial":
        gradients = [(g, dataclasses.replace(p, partial_over_tp=False)) for g, p in gradients]
    sum_shared_gradients(gradients, context.tp)
    return network, terms


def worst_differences(rank, size, sequence_parallel, shape, forget=""):
    """Largest difference of loss terms and of each gradient between one process and ours, relative to the gradient's largest."""
    context = create_context(Topology(world=size, tp=size), rank=rank, device=torch.device("cpu"), sequence_parallel=sequence_parallel)
    ours, terms = step(context, shape, forget=forget)
    alone, expected = step(ParallelContext.single(), shape)
    assert torch.equal(terms.correct, expected.correct)
    differences = {
        "loss": (terms.loss - expected.loss).abs().item(),
        "per_token": (terms.per_token - expected.per_token).abs().max().item(),
    }
    for (name, parameter), (_, whole) in zip(ours.named_parameters(), alone.named_parameters(), strict=True):
        placement = parameter.placement
        assert torch.equal(placement.region(parameter), placement.cut(whole)), f"initial weights of {name}"
        region = placement.region(parameter.grad)
        difference = (region - placement.cut(whole.grad)).abs().max().item() if region.numel() else 0.0
        differences[name] = difference / whole.grad.abs().max().item()
        # What is not the region is fill: it stays zero, and so does its gradient.
        assert parameter.detach().count_nonzero() == placement.region(parameter).detach().count_nonzero()
        assert parameter.grad.count_nonzero() == region.count_nonzero()
    again, _ = step(context, shape, forget=forget)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours.parameters(), again.parameters(), strict=True)), "repeats differ"
    return differences


CASES = {
    "tp2": (2, False, Shape(num_tokens=7)),
    "tp2 sp": (2, True, Shape()),
    "tp2 no cap, no bonus": (2, False, Shape(softcap=None, loo=False)),
    "tp4, 2 KV heads": (4, False, Shape(num_tokens=5)),
    "tp4 sp, 2 KV heads": (4, True, Shape()),
    "tp4, 1 KV head": (4, False, Shape(kv_heads=1)),
    "tp2, 1 KV head": (2, True, Shape(kv_heads=1)),
    "tp4, 4 KV heads": (4, True, Shape(kv_heads=4)),
    "tp4, one rank without vocabulary": (4, False, Shape(num_tokens=7, vocab_size=5)),
    "tp4 sp, two ranks without vocabulary": (4, True, Shape(vocab_size=2)),
    "tp4 sp, vocabulary that divides": (4, True, Shape(vocab_size=16)),
}


@pytest.mark.parametrize("size, sequence_parallel, shape", CASES.values(), ids=CASES)
def test_network(world, size, sequence_parallel, shape):
    for rank, differences in enumerate(world.run(worst_differences, size, sequence_parallel, shape, size=size)):
        assert len(differences) == 2 + 11
        for name, difference in differences.items():
            assert difference <= TOLERANCE, f"rank {rank}, {name}: {difference:.1e}"


@pytest.mark.parametrize(
    "forget, size, sequence_parallel, seen_in",
    [
        ("copies", 4, False, {"k_proj.weight", "v_proj.weight"}),
        ("partial", 4, True, {"norm", "mlp_norm", "q_norm", "k_norm"}),
        ("partial", 2, False, {"q_norm", "k_norm"}),
        ("hidden", 2, False, {"down.weight", "gate_up.weight", "norm", "embedding.weight"}),
    ],
)
def test_a_reduction_left_out_is_seen(world, forget, size, sequence_parallel, seen_in):
    results = world.run(worst_differences, size, sequence_parallel, Shape(), forget, size=size)
    seen = {name for differences in results for name, difference in differences.items() if difference > 1e-3}
    assert seen_in <= seen
    if forget != "hidden":  # that one spoils all that lies before it
        assert seen == seen_in


def no_tokens(rank, size):
    """Losses and soft embeddings of no tokens at all: zero, with zero gradients, and nobody waits for anybody."""
    context = create_context(Topology(world=size, tp=size), rank=rank, device=torch.device("cpu"), sequence_parallel=False)
    embedding = VocabularyParallelEmbedding("e", (13, HIDDEN), context=context, init=Initializer(0, 1.0), dtype=DTYPE)
    hidden = torch.zeros(0, HIDDEN, dtype=DTYPE, requires_grad=True)
    nothing = torch.zeros(0, dtype=torch.int64)
    terms = linear_cross_entropy(hidden, embedding.weight, nothing, torch.zeros(0), softcap=SOFTCAP, tp=context.tp, vocab_size=13)
    soft = soft_embedding(hidden, embedding.weight, softcap=SOFTCAP, scale=1.0, tp=context.tp, vocab_size=13)
    (terms.loss + soft.sum() + embedding(nothing).sum()).backward()
    assert terms.loss.item() == 0 and terms.per_token.shape == (0,) and soft.shape == (0, HIDDEN)
    assert hidden.grad.shape == (0, HIDDEN) and not embedding.weight.grad.any()
    assert sum_over(torch.ones(1), context.tp).item() == size


def test_no_tokens(world):
    world.run(no_tokens, 2, size=2)


def count_exchanges(rank):
    """Calls over tp of q, k, v from one gathered sequence, and of the loss."""
    context = create_context(Topology(world=2, tp=2), rank=rank, device=torch.device("cpu"), sequence_parallel=True)
    network = Network(context, Shape(kv_heads=4))
    x = torch.randn(4, HIDDEN, dtype=DTYPE, requires_grad=True)
    weights = (network.q_proj.weight, network.k_proj.weight, network.v_proj.weight)
    outputs = column_linear(x, weights, tp=context.tp, sequence_parallel=True)
    forward = context.log.by_kind()
    sum(y.sum() for y in outputs).backward()
    both = context.log.by_kind()
    context.log.clear()
    tokens = torch.zeros(9, dtype=torch.int64)
    hidden = torch.randn(9, HIDDEN, dtype=DTYPE)
    chunk_bytes = 3 * network.embedding.weight.shape[0] * 8
    linear_cross_entropy(
        hidden, network.embedding.weight, tokens, torch.ones(9), softcap=None, tp=context.tp, vocab_size=13, chunk_bytes=chunk_bytes
    )
    return forward, both, context.log.by_kind()


def test_exchanges_are_as_few_as_documented(world):
    piece = 4 * HIDDEN * 8
    for forward, both, loss in world.run(count_exchanges, size=2):
        assert forward == {"all_gather": (1, piece)}
        # Backward gathers the tokens again and scatters the sum of all three input gradients (half of twice the rows).
        assert both == {"all_gather": (2, 2 * piece), "reduce_scatter": (1, piece)}
        # Four numbers a token, three chunks.
        assert loss == {"all_gather": (3, 9 * 4 * 8)}
