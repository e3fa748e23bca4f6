"""The whole model over cp ranks against one process, float64: loss, every gradient, leaks, bytes, planted faults."""
import dataclasses
from dataclasses import dataclass, field
from unittest import mock

import numpy as np
import pytest
import torch

from megatron_dllm.config import ObjectiveConfig
from megatron_dllm.context_parallel.layout import ContextSplit
from megatron_dllm.context_parallel.microbatch import SharedMicrobatch
from megatron_dllm.diffusion.passes import PassOptions, microbatch_inputs
from megatron_dllm.diffusion.streams import build_streams
from megatron_dllm.parallel import Topology, communication, create_context
from tests.unit.toy import CONFIG as TOY
from tests.unit.toy import LENGTHS, toy_model, toy_plan, toy_tokens

TOLERANCE = 1e-10
# A small model of both layer types; a full layer between others, as contexts have gradients of their own only below the last.
CONFIG = dataclasses.replace(
    TOY, num_layers=3, layer_types=("sliding", "full", "full"), hidden_size=32, ffn_hidden_size=24, kv_channels=8, global_kv_channels=16,
    num_experts=4, moe_ffn_hidden_size=16)
ALWAYS, NEVER, ALL = (
    ObjectiveConfig(self_conditioning_prob=1.0), ObjectiveConfig(self_conditioning_prob=0.0), ObjectiveConfig(canvases_scored="all"))


@dataclass(frozen=True)
class Case:
    """A layout and what is computed in it."""

    size: int = 2
    types: tuple[str, str] = ("halo", "p2p")
    objective: ObjectiveConfig = ObjectiveConfig()
    lengths: tuple = LENGTHS[:4]
    packed: bool = False
    micro_batch_size: int | None = None
    recompute: frozenset = frozenset()
    supervised: tuple[int, int] | None = None
    config: object = field(default=CONFIG)


def streams_of(case, number=0):
    """Streams of a microbatch; what is not `supervised` (clean tokens by place) weighs nothing."""
    plan = toy_plan(case.objective, case.lengths, packed=case.packed, micro_batch_size=case.micro_batch_size, config=case.config)
    chosen = plan.microbatches[0][number]
    tokens = [toy_tokens(e.index, e.fit.prompt + e.fit.response, case.config) for e in chosen.examples]
    streams = build_streams(
        chosen, tokens, case.objective, plan.denominators, vocab_size=case.config.vocab_size, fill_token=case.config.fill_token_id)
    if case.supervised is None:
        return streams
    weights = np.zeros_like(streams.clean.weights)
    weights[slice(*case.supervised)] = streams.clean.weights[slice(*case.supervised)]
    canvas = dataclasses.replace(streams.canvas, weights=0 * streams.canvas.weights)
    return dataclasses.replace(streams, clean=dataclasses.replace(streams.clean, weights=weights), canvas=canvas)


def inputs_of(streams, case, split=ContextSplit()):  # noqa: B008 (immutable)
    objective = case.objective
    options = PassOptions(torch.float64, objective.has_uniform_null, objective.is_leave_one_out, context_split=split)
    return microbatch_inputs(streams, case.config, options)


def split_of(case, rank):
    return ContextSplit(rank, case.size, case.objective.canvases_scored == "all", dict(zip(("sliding", "full"), case.types, strict=True)))


def context_of(case, rank):
    return create_context(Topology(world=case.size, cp=case.size), rank=rank, device=torch.device("cpu"), sequence_parallel=False)


def num_microbatches(case):
    return 1 if case.packed or case.micro_batch_size is None else len(case.lengths) // case.micro_batch_size


def model_of(case, context=None):
    return toy_model(recompute=case.recompute, config=case.config, context=context)


def gradients_of(model, case, split=ContextSplit()):  # noqa: B008 (immutable)
    """(loss, gradients) of our tokens."""
    loss = 0.0
    for number in range(num_microbatches(case)):
        terms = model(inputs_of(streams_of(case, number), case, split))
        terms.total.backward()
        loss += terms.total.item()
    return loss, {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def differences_from_one_process(rank, cases):
    """Of each case, (what differs most, by how much): the loss, or elements of a gradient relative to the whole gradient's norm.

    The ranks' losses and gradients are added up, as the data-parallel code does. Rank 0 alone knows; the others return nothing.
    """
    found = {}
    for name, case in cases.items():
        context = context_of(case, rank)
        loss, gradients = gradients_of(model_of(case, context), case, split_of(case, rank))
        flat = [torch.tensor([loss], dtype=torch.float64), *(g.flatten() for g in gradients.values())]
        summed = communication.all_reduce(torch.cat(flat), context.cp)
        if rank == 0:
            expected_loss, expected = gradients_of(model_of(case), case)
            norm = torch.cat([g.flatten() for g in expected.values()]).norm()
            parts = summed[1:].split([g.numel() for g in gradients.values()])
            differences = {name: ((part - expected[name].flatten()).abs().max() / norm).item()
                           for name, part in zip(gradients, parts, strict=True)}
            differences["loss"] = abs(summed[0].item() - expected_loss) / abs(expected_loss)
            worst = max(differences, key=differences.get)
            found[name] = worst, differences[worst]
    return found


CONDITIONED_ALL = dataclasses.replace(ALL, self_conditioning_prob=1.0)
CAUSAL = {"objective": ObjectiveConfig(objective="ar"), "config": dataclasses.replace(CONFIG, canvas_length=1)}
CASES = {
    "cp2": Case(),
    "cp2 all_gather": Case(types=("halo", "all_gather")),
    "cp2 a2a": Case(types=("a2a", "a2a")),
    "cp2 p2p everywhere": Case(types=("p2p", "p2p"), objective=ALWAYS),
    "cp2 odd lengths": Case(lengths=((5, 6), (0, 3), (2, 17)), objective=ALWAYS),
    "cp2 packed": Case(lengths=LENGTHS, packed=True),
    "cp2 accumulation": Case(lengths=LENGTHS, micro_batch_size=2),
    "cp2 all canvases": Case(objective=ALL),
    "cp2 all canvases, a2a": Case(objective=CONDITIONED_ALL, types=("a2a", "a2a")),
    "cp2 causal": Case(**CAUSAL),
    "cp2 recompute block": Case(recompute=frozenset(["block"])),
    "cp2 recompute core_attn": Case(recompute=frozenset(["core_attn"]), types=("halo", "all_gather")),
    "cp2 one whole canvas, recompute core_attn": Case(objective=CONDITIONED_ALL, lengths=((5, 3),), recompute=frozenset(["core_attn"])),
    "cp2 supervision on rank 0": Case(supervised=(0, 2), objective=ALWAYS, lengths=((9, 12),)),
    "cp2 leave one out": Case(objective=ObjectiveConfig(diffusion_loss="loo", self_conditioning_null="uniform")),
    "cp4": Case(size=4, objective=ALWAYS),
    "cp4 a2a, key heads shared": Case(size=4, types=("a2a", "a2a")),
    "cp4 window over many chunks": Case(size=4, config=dataclasses.replace(CONFIG, window_size=30), lengths=((20, 9), (7, 12))),
    "cp4 fewer tokens than chunks": Case(size=4, lengths=((1, 3),), objective=ALWAYS),
    "cp4 packed, short window": Case(size=4, lengths=LENGTHS, packed=True, config=dataclasses.replace(CONFIG, window_size=3)),
    "cp4 all canvases": Case(size=4, objective=CONDITIONED_ALL),
    "cp4 all canvases of one document": Case(size=4, objective=ALL, lengths=((3, 30),)),
    "cp4 causal, recompute block": Case(size=4, recompute=frozenset(["block"]), **CAUSAL),
    "cp4 supervision on rank 3": Case(size=4, supervised=(10, 12), objective=NEVER, lengths=((9, 12),)),
}


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_every_layout_computes_what_one_process_computes(world, size):
    cases = {name: case for name, case in CASES.items() if case.size == size}
    worst = world.run(differences_from_one_process, cases, size=size, timeout=200)[0]
    assert worst.keys() == cases.keys()
    wrong = {name: found for name, found in worst.items() if not found[1] <= TOLERANCE}
    assert not wrong


def half_the_context(rank, case):
    """`differences_from_one_process` with a second loop that misses the keys that rank 1 has kept."""
    def forget(self, kept):
        return plain(self, kept)[:0] if rank == 1 else plain(self, kept)

    def second_pass(self, kept, again):
        shards = plain_second(self, kept, again)
        return {kind: dataclasses.replace(s, held=(s.held[0], s.held[1][:0])) for kind, s in shards.items()}

    plain, plain_second = SharedMicrobatch.own_kept, SharedMicrobatch.second_pass
    with mock.patch.object(SharedMicrobatch, "own_kept", forget), mock.patch.object(SharedMicrobatch, "second_pass", second_pass):
        context = context_of(case, rank)
        loss, _ = gradients_of(model_of(case, context), case, split_of(case, rank))
    return loss


def test_a_second_loop_without_one_ranks_keys_is_seen(world):
    case = Case(objective=ALWAYS)
    losses = [sum(world.run(function, case, size=2)) for function in (half_the_context, loss_of)]
    assert abs(losses[0] - losses[1]) > 1e-4


def loss_of(rank, case):
    return gradients_of(model_of(case, context_of(case, rank)), case, split_of(case, rank))[0]


def repeats(rank, case):
    """Whether two runs are equal bit for bit."""
    one, other = (gradients_of(model_of(case, context_of(case, rank)), case, split_of(case, rank)) for _ in range(2))
    return one[0] == other[0] and all(torch.equal(gradient, other[1][name]) for name, gradient in one[1].items())


def test_repeats_are_bit_equal(world):
    assert all(world.run(repeats, Case(size=4, types=("halo", "p2p"))))


@torch.no_grad()
def states(model, streams, case, split):
    """Final hidden states of our clean tokens, and of our canvas tokens in the loop that scores them (every canvas is self-conditioned)."""
    inputs = inputs_of(streams, case, split)
    x = model.embed(torch.cat([inputs.clean.tokens, inputs.canvas.tokens]))
    hidden, contexts = model.run_layers(model.enter_canvas(x, inputs), inputs.first_pass)
    signal = model.soft_signal(hidden[inputs.draft_rows])
    decoded, _ = model.run_layers(model.self_conditioning(model.embed(inputs.second_tokens), signal), inputs.second_pass, contexts)
    return hidden[:len(inputs.clean.tokens)], decoded


def reach(rank, case):
    """By clean token: the places in the streams of our clean and of our canvas tokens whose states move when it is changed."""
    model, streams, split = model_of(case, context_of(case, rank)), streams_of(case), split_of(case, rank)
    shared = SharedMicrobatch.of(streams.visibility, split)
    clean, decoded = states(model, streams, case, split)
    moved = []
    for place in range(len(streams.clean)):
        tokens = streams.clean.tokens.copy()
        tokens[place] = 3 + (tokens[place] - 2) % (case.config.vocab_size - 3)
        changed = dataclasses.replace(streams, clean=dataclasses.replace(streams.clean, tokens=tokens))
        found = states(model, changed, case, split)
        moved.append([own[((a - b).abs().amax(1) > 1e-10).numpy()]
                      for own, a, b in zip((shared.own_clean, shared.own_canvas), (clean, decoded), found, strict=True)])
    return moved


@pytest.mark.slow
@pytest.mark.parametrize("case", [
    Case(lengths=((5, 6), (2, 9)), packed=True, objective=ALWAYS),
    Case(size=4, lengths=((5, 6), (2, 9)), objective=CONDITIONED_ALL)], ids=["cp2 packed", "cp4 all canvases"])
def test_clean_tokens_reach_only_what_may_see_them(world, case):
    """A changed clean token moves itself, later tokens of its document, and the canvases after it: all of these and nothing else."""
    plan = toy_plan(case.objective, case.lengths, packed=case.packed, config=case.config)
    examples = plan.microbatches[0][0].examples
    results = world.run(reach, case, size=case.size, timeout=100)
    start, first_canvas, length = 0, 0, case.config.canvas_length
    for example in examples:
        stop = start + example.fit.total
        for place in range(start, stop):
            touched, decoded = (np.sort(np.concatenate([moved[place][which] for moved in results])) for which in (0, 1))
            assert place in touched and touched.min() == place and touched.max() < stop
            after = [number for number, canvas in enumerate(example.canvases) if place - start < example.canvas_start(canvas)]
            expected = [first_canvas + number * length + offset for number in after for offset in range(length)]
            assert decoded.tolist() == expected, (place, decoded, expected)
        start, first_canvas = stop, first_canvas + len(example.canvases) * length


def traffic_of_second_loop(rank, size, lengths):
    """Bytes that this rank sends in a model's second loop, forward, and in its first, by (prompt, canvas length)."""
    counted = {}
    for prompt, canvas in lengths:
        config = dataclasses.replace(CONFIG, canvas_length=canvas, max_position_embeddings=1024)
        case = Case(size=size, objective=ALWAYS, lengths=((prompt, canvas),), config=config)
        context = context_of(case, rank)
        model, inputs = model_of(case, context), inputs_of(streams_of(case), case, split_of(case, rank))
        with torch.no_grad():
            hidden, contexts = model.run_layers(
                model.enter_canvas(model.embed(torch.cat([inputs.clean.tokens, inputs.canvas.tokens])), inputs), inputs.first_pass)
            first = context.cp.log.total(group_name="cp")[1]
            model.run_layers(hidden[inputs.draft_rows], inputs.second_pass, contexts)
        counted[prompt, canvas] = first, context.cp.log.total(group_name="cp")[1] - first
    return counted


def test_a_second_loop_sends_bytes_by_its_canvas(world):
    """Three layers' queries and results, over contexts that stay where they are."""
    for counted in world.run(traffic_of_second_loop, 2, ((14, 8), (112, 8), (14, 16)), size=2):
        for (prompt, canvas), (first, second) in counted.items():
            print(f"prompt {prompt}, canvas {canvas}: {first} bytes in the first loop, {second} in the second")
        assert counted[112, 8][1] == counted[14, 8][1] > 0 and counted[14, 16][1] == 2 * counted[14, 8][1]
        # Of the clean tokens too, of which a rank sends at least its early chunk.
        assert counted[112, 8][0] > counted[14, 8][0]
