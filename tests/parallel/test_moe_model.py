"""The toy model over ranks that share experts, against one process (float64): ranks whose microbatches differ in length and in coins."""

import pytest
import torch

from megatron_dllm.config import ObjectiveConfig
from megatron_dllm.diffusion.passes import PassOptions, microbatch_inputs
from megatron_dllm.diffusion.streams import build_streams
from megatron_dllm.parallel import ParallelContext, Topology, communication, create_context
from megatron_dllm.tensor_parallel import sum_shared_gradients
from megatron_dllm.transformer.token_pass import SequenceSplit
from tests.unit.toy import CONFIG, toy_model, toy_plan, toy_tokens

TOLERANCE = 1e-10


def make_inputs(plan, number, context, *, second_loop, passes="shared"):
    microbatch = plan.microbatches[0][number]
    tokens = [toy_tokens(e.index, e.fit.prompt + e.fit.response) for e in microbatch.examples]
    streams = build_streams(
        microbatch, tokens, ObjectiveConfig(), plan.denominators, vocab_size=CONFIG.vocab_size, fill_token=CONFIG.fill_token_id)
    options = PassOptions(torch.float64, split=SequenceSplit.of(context))
    return microbatch_inputs(streams, CONFIG, options, second_loop=second_loop, passes=passes)


def mixed_plan(parts):
    """Microbatches of which the first has self-conditioned rows and the last (of several) none."""
    for seed in range(100):
        plan = toy_plan(micro_batch_size=8 // parts, seed=seed)
        microbatches = plan.microbatches[0]
        if microbatches[0].self_conditioned and (parts == 1 or not microbatches[-1].self_conditioned):
            return plan
    raise AssertionError("no such draw")


def worst_difference(rank, sizes, sequence_parallel, recompute, passes="shared"):
    """(largest gradient difference to one process, by the largest gradient; its parameter; layout exchanges; MoE calls of the forward)."""
    context = create_context(Topology(**sizes), rank=rank, device=torch.device("cpu"), sequence_parallel=sequence_parallel)
    plan = mixed_plan(context.dp.size)
    reference = toy_model()
    for number in range(context.dp.size):
        reference(make_inputs(plan, number, ParallelContext.single(), second_loop=False)).total.backward()
    model, calls = toy_model(context=context, recompute=recompute), []
    for block in model.layers.values():
        block.moe.router.register_forward_hook(lambda *_: calls.append(1))
    inputs = make_inputs(plan, context.dp.rank, context, second_loop=plan.second_loop(0), passes=passes)
    terms = model(inputs)
    forwards = len(calls)
    terms.total.backward()
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    placements = {name: p.placement for name, p in model.named_parameters()}
    for name, placement in placements.items():
        gradients[name] = communication.all_reduce(gradients[name], context.edp if placement.grid == "expert" else context.dp)
    sum_shared_gradients([(gradients[name], placements[name]) for name in gradients], context.tp)
    scale, worst = max(p.grad.abs().max().item() for p in reference.parameters()), (0.0, "")
    for name, whole in reference.named_parameters():
        difference = placements[name].region(gradients[name]) - placements[name].cut(whole.grad)
        worst = max(worst, (difference.abs().max().item() / scale, name))
    return *worst, context.log.calls["layout_exchange", "ep"], forwards


CASES = {  # sizes, sequence parallel, parts that are recomputed
    "ep2": ({"world": 2, "ep": 2}, False, ()),
    "ep2, full recompute": ({"world": 2, "ep": 2}, False, ("block",)),
    "ep2, selective recompute": ({"world": 2, "ep": 2}, False, ("moe", "mlp")),
    "etp2, full recompute": ({"world": 2, "etp": 2}, False, ("block",)),
    "tp2 sp, ep2": ({"world": 2, "tp": 2, "ep": 2}, True, ("moe",)),
    "tp2, ep2": ({"world": 2, "tp": 2, "ep": 2}, False, ("block",)),
    "ep2 edp2": ({"world": 4, "ep": 2}, False, ()),
    "tp2 sp, dp2, ep2 etp2": ({"world": 4, "tp": 2, "ep": 2, "etp": 2}, True, ("block",)),
}


QUICK = ("ep2, full recompute", "tp2 sp, ep2")


@pytest.mark.parametrize("case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES])
def test_model(world, case):
    sizes, sequence_parallel, recompute = CASES[case]
    results = world.run(worst_difference, sizes, sequence_parallel, frozenset(recompute), size=sizes["world"])
    for rank, (difference, name, exchanges, forwards) in enumerate(results):
        assert difference <= TOLERANCE, f"rank {rank}, {name}: {difference:.1e}"
        assert exchanges == forwards == 2 * CONFIG.num_layers  # two loops, each layout once, whatever is recomputed


@pytest.mark.parametrize("case", ["ep2", pytest.param("tp2, ep2", marks=pytest.mark.slow)])
def test_drafts_made_beforehand(world, case):
    """The second rank has none, and makes drafts of nothing."""
    sizes, sequence_parallel, recompute = CASES[case]
    results = world.run(worst_difference, sizes, sequence_parallel, frozenset(recompute), "apart", size=sizes["world"])
    for rank, (difference, name, exchanges, forwards) in enumerate(results):
        assert difference <= TOLERANCE, f"rank {rank}, {name}: {difference:.1e}"
        assert exchanges == forwards == 2 * CONFIG.num_layers


def under_way(rank):
    """Whether tokens are on their way when each half of a layer's dense MLP runs, in two loops: forward, then backward."""
    context = create_context(Topology(world=2, ep=2), rank=rank, device=torch.device("cpu"), sequence_parallel=False)
    model, seen = toy_model(context=context), []

    def note(*_):
        seen.append(sum("all_to_all" in text for text in context.log.under_way.values()))

    def watch(module, _, output):
        note()
        output.register_hook(note)

    block = model.layers["0"]
    for linear in (block.mlp.gate_up, block.mlp.down):
        linear.register_forward_hook(watch)
    plan = mixed_plan(2)
    model(make_inputs(plan, rank, context, second_loop=plan.second_loop(0))).total.backward()
    return seen


def test_both_halves_of_the_dense_mlp_run_beside_transfers(world):
    assert world.run(under_way, size=2) == [[1] * 8] * 2
