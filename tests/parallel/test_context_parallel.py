"""The whole model over cp ranks against one process, float64: loss, every gradient, leaks, bytes, planted faults."""
import dataclasses
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from megatron_dllm.config import ObjectiveConfig
from megatron_dllm.context_parallel.layout import ContextSplit
from megatron_dllm.diffusion.inputs import microbatch_inputs
from megatron_dllm.diffusion.streams import build_streams
from megatron_dllm.parallel import Topology, communication, create_context
from tests.unit.toy import CONFIG, LENGTHS, toy_model, toy_plan, toy_tokens

TOLERANCE = 1e-10
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
    return microbatch_inputs(
        streams, case.config, dtype=torch.float64, uniform_null=objective.self_conditioning_null == "uniform",
        leave_one_out="loo" in objective.diffusion_loss, context_split=split)


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


def worst_difference(rank, case, repeat=False):
    """Largest difference of the loss and of any gradient element between the ranks' sum and one process, relative to the whole gradient."""
    context = context_of(case, rank)
    loss, found = gradients_of(model_of(case, context), case, split_of(case, rank))
    if repeat:
        again = gradients_of(model_of(case, context), case, split_of(case, rank))
        assert again[0] == loss and all(torch.equal(g, again[1][name]) for name, g in found.items()), "repeats differ"
    expected_loss, expected = gradients_of(model_of(case), case)
    norm = torch.cat([g.flatten() for g in expected.values()]).norm()
    total = communication.all_reduce(torch.tensor(loss, dtype=torch.float64), context.cp).item()
    differences = {"loss": abs(total - expected_loss) / abs(expected_loss)}
    for name, gradient in found.items():
        differences[name] = ((communication.all_reduce(gradient, context.cp) - expected[name]).abs().max() / norm).item()
    assert norm > 0
    return differences


SHORT = dataclasses.replace(CONFIG, canvas_length=4, window_size=3)
WIDE = dataclasses.replace(CONFIG, window_size=30)
CASES = {
    "cp2 p2p": Case(),
    "cp2 all_gather": Case(types=("halo", "all_gather")),
    "cp2 a2a": Case(types=("a2a", "a2a")),
    "cp2 all_gather everywhere": Case(types=("all_gather", "all_gather"), objective=ALWAYS),
    "cp2 p2p everywhere": Case(types=("p2p", "p2p"), objective=ALWAYS),
    "cp4 p2p": Case(size=4, objective=ALWAYS),
    "cp4 all_gather": Case(size=4, types=("halo", "all_gather")),
    "cp4 a2a, key heads shared": Case(size=4, types=("a2a", "a2a")),
    "cp4 window over many chunks": Case(size=4, config=WIDE, lengths=((20, 9), (7, 12))),
    "cp2 odd lengths": Case(lengths=((5, 6), (0, 3), (2, 17)), objective=ALWAYS),
    "cp4 fewer tokens than chunks": Case(size=4, lengths=((1, 3),), objective=ALWAYS),
    "cp2 packed": Case(lengths=LENGTHS, packed=True),
    "cp4 packed, short window": Case(size=4, lengths=LENGTHS, packed=True, config=SHORT),
    "cp2 accumulation": Case(lengths=LENGTHS, micro_batch_size=2),
    "cp2 all canvases": Case(objective=ALL),
    "cp2 all canvases, conditioned, all_gather": Case(
        objective=dataclasses.replace(ALL, self_conditioning_prob=1.0), types=("halo", "all_gather")),
    "cp2 all canvases, conditioned, a2a": Case(objective=dataclasses.replace(ALL, self_conditioning_prob=1.0), types=("a2a", "a2a")),
    "cp4 all canvases, conditioned, p2p": Case(size=4, objective=dataclasses.replace(ALL, self_conditioning_prob=1.0)),
    "cp4 all canvases of one document": Case(size=4, objective=ALL, lengths=((3, 30),)),
    "cp2 causal": Case(objective=ObjectiveConfig(objective="ar"), config=dataclasses.replace(CONFIG, canvas_length=1)),
    "cp4 causal": Case(size=4, objective=ObjectiveConfig(objective="ar"), config=dataclasses.replace(CONFIG, canvas_length=1)),
    "cp2 recompute block": Case(recompute=frozenset(["block"])),
    "cp2 recompute core_attn": Case(recompute=frozenset(["core_attn"]), types=("halo", "all_gather")),
    "cp2 supervision on rank 0": Case(supervised=(0, 2), objective=ALWAYS, lengths=((9, 12),)),
    "cp4 supervision on rank 3": Case(size=4, supervised=(10, 12), objective=NEVER, lengths=((9, 12),)),
    "cp2 leave one out": Case(objective=ObjectiveConfig(diffusion_loss="loo", self_conditioning_null="uniform")),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_layout_computes_what_one_process_computes(world, case):
    for rank, differences in enumerate(world.run(worst_difference, case, case.size == 4, size=case.size)):
        name = max(differences, key=differences.get)
        assert differences[name] <= TOLERANCE, f"rank {rank}: {name} differs by {differences[name]:.1e}"
