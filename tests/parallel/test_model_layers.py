"""Hyper-connections, gated delta nets and multi-token prediction over ranks of tp and cp, against one process (float64)."""

import dataclasses

import pytest
import torch

from megatron_dllm.config import ObjectiveConfig, ParallelConfig
from megatron_dllm.context_parallel.layout import ContextSplit
from megatron_dllm.diffusion.passes import PassOptions, microbatch_inputs
from megatron_dllm.diffusion.streams import build_streams
from megatron_dllm.parallel import ParallelContext, Topology, communication, create_context
from megatron_dllm.tensor_parallel import sum_shared_gradients
from megatron_dllm.transformer.gated_delta_fla import FlaGatedDelta
from megatron_dllm.transformer.gated_delta_net import GatedDeltaNet
from megatron_dllm.transformer.token_pass import SequenceSplit
from tests.unit.fake_fla import by_tokens
from tests.unit.toy import CONFIG, toy_model, toy_plan, toy_tokens

TOLERANCE = 1e-10
OBJECTIVE = ObjectiveConfig(self_conditioning_null="uniform")  # the null that reads the embedding, on all ranks
EVERYTHING = dataclasses.replace(
    CONFIG, layer_types=("linear", "sliding", "full"), linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=6,
    linear_value_head_dim=5, enable_mhc_connections=True, mhc_num_residual_streams=2, mtp_num_layers=2)
CASES = {  # sizes of the world, sequence parallel, parts that are recomputed, whether gated delta nets call fla's function
    "tp2": ({"tp": 2}, False, ("mhc", "core_attn"), False),
    "tp2 sp": ({"tp": 2}, True, ("mhc",), False),
    "cp2": ({"cp": 2}, False, ("core_attn",), False),
    "tp2 fla": ({"tp": 2}, False, (), True),
    "cp2 fla": ({"cp": 2}, False, ("core_attn",), True),
}


def gradients_of(model, config, context):
    """The plan's loss and our own gradients of it. Lengths that no number of ranks divides, coins mixed."""
    plan, parallel = toy_plan(OBJECTIVE, packed=True), ParallelConfig(context_parallel_size=context.cp.size)
    chosen = plan.microbatches[0][0]
    tokens = [toy_tokens(e.index, e.fit.prompt + e.fit.response) for e in chosen.examples]
    assert len({example.self_conditioned for example in chosen.examples}) == 2
    streams = build_streams(chosen, tokens, OBJECTIVE, plan.denominators, vocab_size=config.vocab_size,
                            fill_token=config.fill_token_id)
    options = PassOptions(torch.float64, uniform_null=True, split=SequenceSplit.of(context),
                          context_split=ContextSplit.of(context, parallel, OBJECTIVE, config))
    inputs = microbatch_inputs(streams, config, options)
    terms = model(inputs)
    terms.total.backward()
    return terms.total.detach(), {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def worst_difference(rank, case):
    """(difference of the losses; largest of gradients by the largest gradient; its parameter)."""
    (sizes, sequence_parallel, recompute, fla), config = CASES[case], EVERYTHING
    context = create_context(Topology(world=2, **sizes), rank=rank, device=torch.device("cpu"), sequence_parallel=sequence_parallel)
    reference = toy_model(config=config)
    expected, wholes = gradients_of(reference, config, ParallelContext.single())
    model = toy_model(config=config, context=context, recompute=frozenset(recompute))
    if fla:
        for module in model.modules():
            if isinstance(module, GatedDeltaNet):
                module.rule = FlaGatedDelta(by_tokens)
    placements = {name: p.placement for name, p in model.named_parameters()}
    with torch.no_grad():
        for (name, own), whole in zip(model.named_parameters(), reference.parameters(), strict=True):
            placements[name].region(own).copy_(placements[name].cut(whole))
        for own, whole in zip(model.buffers(), reference.buffers(), strict=True):
            own.copy_(whole)
    loss, gradients = gradients_of(model, config, context)
    loss = communication.all_reduce(loss, context.cp)
    gradients = {name: communication.all_reduce(gradient, context.edp if placements[name].grid == "expert" else context.dp_cp)
                 for name, gradient in gradients.items()}
    sum_shared_gradients([(gradients[name], placements[name]) for name in gradients], context.tp)
    scale, worst = max(g.abs().max().item() for g in wholes.values()), (0.0, "")
    for name, placement in placements.items():
        difference = placement.region(gradients[name]) - placement.cut(wholes[name])
        worst = max(worst, (difference.abs().max().item() / scale, name))
    return abs(loss - expected).item(), *worst


@pytest.mark.parametrize("case", CASES)
def test_model(world, case):
    for rank, (loss, difference, name) in enumerate(world.run(worst_difference, case, size=2)):
        assert loss <= TOLERANCE, f"rank {rank}: {loss:.1e}"
        assert difference <= TOLERANCE, f"rank {rank}, {name}: {difference:.1e}"


def signals_of(rank):
    """The soft embedding of logits at hand, as generation has them, from a rank's rows of the embedding, and from all of them."""
    context = create_context(Topology(world=2, tp=2), rank=rank, device=torch.device("cpu"), sequence_parallel=False)
    config = dataclasses.replace(CONFIG, num_layers=1, layer_types=("full",))
    model, reference = toy_model(config=config, context=context), toy_model(config=config)
    embedding = model.embedding.weight
    with torch.no_grad():
        embedding.placement.region(embedding).copy_(embedding.placement.cut(reference.embedding.weight))
        logits = torch.randn(5, CONFIG.vocab_size, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        return (model.soft_signal_of(logits) - reference.soft_signal_of(logits)).abs().max().item()


def test_signals_of_generation_are_of_the_whole_vocabulary(world):
    assert max(world.run(signals_of, size=2)) <= TOLERANCE
