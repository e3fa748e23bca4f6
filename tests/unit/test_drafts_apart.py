"""Drafts made beforehand: the losses, gradients and figures of drafts made beside the clean tokens."""
import dataclasses

import numpy as np
import pytest
import torch

from megatron_dllm.config import PRESETS, LoRAConfig, ObjectiveConfig, parse
from megatron_dllm.diffusion import passes as passes_module
from megatron_dllm.diffusion.fill import filled_up
from megatron_dllm.diffusion.nested import form_of
from megatron_dllm.models.diffusion_gemma.lora import add_adapters
from megatron_dllm.tensor_parallel.initialization import Initializer
from megatron_dllm.training import draft_pass
from megatron_dllm.training.draft_pass import PassSizes, Share, apart_costs_less, apart_costs_less_on_cpu, order_of_passes
from tests.unit.toy import CONFIG, LENGTHS, toy_inputs, toy_model, toy_plan

LINEAR = dataclasses.replace(CONFIG, num_layers=2, layer_types=("linear", "full"))
MTP = dataclasses.replace(CONFIG, num_layers=2, layer_types=("sliding", "full"), mtp_num_layers=2)
LAST_SLIDES = dataclasses.replace(CONFIG, num_layers=2, layer_types=("full", "sliding"))
MHC = dataclasses.replace(CONFIG, enable_mhc_connections=True, mhc_num_residual_streams=2)
SOME, ALL, NONE = (ObjectiveConfig(self_conditioning_prob=share) for share in (0.5, 1.0, 0.0))
UNIFORM = dataclasses.replace(SOME, self_conditioning_null="uniform", canvases_scored="all", diffusion_loss="reweighted-loo")
CASES = {
    "some": (CONFIG, SOME, {}), "all": (CONFIG, ALL, {}), "packed": (CONFIG, SOME, {"packed": True}),
    "all canvases, uniform null": (CONFIG, UNIFORM, {"packed": True}), "linear layers": (LINEAR, SOME, {"lengths": LENGTHS[:4]}),
    "mtp": (MTP, SOME, {}), "a last layer that slides": (LAST_SLIDES, SOME, {}),
    "mhc": (MHC, ALL, {}), "one row": (CONFIG, ALL, {"lengths": LENGTHS[2:3]})}
SEED = 3  # of a plan in which five of eight examples have a draft
MULTIPLE = 2  # that the kept clean tokens are filled up to: with the real one all of a toy's would be kept


@pytest.fixture(autouse=True)
def few_are_kept(monkeypatch):
    monkeypatch.setattr(passes_module, "KEPT_MULTIPLE", MULTIPLE)


def plan_of(objective, lengths=LENGTHS, **options):
    return toy_plan(objective, lengths, seed=SEED, **options)


def results(model, inputs):
    """Loss terms, gradients of all that is trained, and every layer's figures."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    terms = model(inputs)
    grads = torch.autograd.grad(terms.total, list(trained.values()), allow_unused=True)
    return terms.detach(), dict(zip(trained, grads, strict=True)), model.routing.drain()


def agree(model, shared, apart):
    """Both orders give one result; that of the second."""
    assert shared.second_pass is not None and apart.second_pass is None and apart.draft is not None
    wanted, found = results(model, shared), results(model, apart)
    for name in ("total", "weighted", "sums", "correct", "counts"):
        torch.testing.assert_close(getattr(found[0], name), getattr(wanted[0], name), rtol=1e-12, atol=1e-12)
    scale = torch.stack([g.norm() for g in wanted[1].values() if g is not None]).norm()
    for name, want in wanted[1].items():
        if want is None:  # a parameter that the microbatch does not use
            assert found[1][name] is None
            continue
        assert (found[1][name] - want).norm() <= 1e-10 * want.norm() + 1e-13 * scale, name
    assert found[2].keys() == wanted[2].keys()
    for layer, want in wanted[2].items():
        assert torch.equal(found[2][layer].load, want.load) and torch.equal(found[2][layer].num_tokens, want.num_tokens)
        torch.testing.assert_close(found[2][layer].entropy, want.entropy, rtol=1e-12, atol=0)
        torch.testing.assert_close(found[2][layer].losses, want.losses, rtol=1e-12, atol=1e-15)
    return found


SLOW = ("linear layers",)


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.slow) if case in SLOW else case for case in CASES])
def test_both_orders_agree(case):
    config, objective, options = CASES[case]
    plan = plan_of(objective, config=config, **options)
    given = {"objective": objective, "config": config}
    model = toy_model(config=config)
    shared, apart = toy_inputs(plan, **given), toy_inputs(plan, passes="apart", **given)
    found = agree(model, shared, apart)
    drafts = next(iter(found[2].values())).num_tokens[1]
    assert drafts == len(shared.draft_rows) > 0 and (objective is ALL or apart.draft.rows is not None)
    # Without its signal a canvas has another loss.
    blind = model(dataclasses.replace(apart, draft=None)).total
    assert (blind - found[0].total).abs() > 1e-6 * blind.abs()


def test_of_clean_tokens_those_before_canvases_are_drafted_on():
    plan = plan_of(ALL)
    apart = toy_inputs(plan, objective=ALL, passes="apart")
    seen = sum(example.canvas_start(example.canvases[0]) for example in plan.microbatches[0][0].examples)
    assert seen <= apart.draft.token_pass.num_clean < seen + MULTIPLE < len(apart.clean.tokens)


def test_in_the_last_layer_clean_tokens_are_keys_and_values_alone():
    """On a CPU: what a draft does not read is not computed."""
    apart, model, routed = toy_inputs(plan_of(ALL), objective=ALL, passes="apart"), toy_model(), []
    for block in model.layers.values():
        block.moe.router.register_forward_pre_hook(lambda _, inputs: routed.append(len(inputs[0])))
    model(apart)
    drafted = apart.draft.token_pass
    assert routed[:len(model.layers)] == [drafted.num_tokens] * (len(model.layers) - 1) + [drafted.num_canvas]


def test_without_drafts_nothing_is_apart():
    plan = plan_of(NONE)
    assert form_of(toy_inputs(plan, objective=NONE)) == form_of(toy_inputs(plan, objective=NONE, passes="apart"))


def test_a_loop_for_others_alone():
    """Ranks that share experts make drafts of nothing where only others have some."""
    plan = plan_of(NONE)
    empty = toy_inputs(plan, objective=NONE, passes="apart", second_loop=True)
    assert empty.draft.token_pass.num_tokens == 0
    model = toy_model()
    torch.testing.assert_close(model(empty).total, model(toy_inputs(plan, objective=NONE)).total, rtol=1e-12, atol=0)


@pytest.mark.parametrize("part", ["block", "moe"])
def test_recompute_and_fill(part):
    plan = plan_of(SOME)
    filled = {"objective": SOME, "edit": lambda streams: filled_up(streams, 16, CONFIG.pad_token_id)}
    model = toy_model(recompute=frozenset([part]))
    agree(model, toy_inputs(plan, **filled), toy_inputs(plan, passes="apart", **filled))
    report = model.recompute.monitor.report()
    assert report.hits > 0 and report.misses == 0 and not report.corrupted


def test_dropout_draws_are_the_same():
    plan = plan_of(SOME)
    model = toy_model()
    add_adapters(model, LoRAConfig(lora_rank=2, lora_dropout=0.5, lora_targets=("attention", "mlp")), Initializer(3, 0.2))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("adapter.b"):
                parameter.fill_(0.1)
    model.train()
    found = [toy_inputs(plan, objective=SOME, dropout=True, passes=passes) for passes in ("shared", "apart")]
    agree(model, *found)
    words = [np.asarray(inputs.draft.token_pass.draws.every if inputs.draft else inputs.second_pass.draws.every) for inputs in found]
    assert not np.array_equal(*words)  # drafts and canvases have draws of their own


def sizes(rows, clean, seen, canvas=256, drafted=None):
    return PassSizes(rows * clean, np.full(rows if drafted is None else drafted, seen), rows * canvas,
                     canvas * (rows if drafted is None else drafted), clean, canvas)


@pytest.mark.parametrize("rows, clean, seen, share, apart", [
    (1, 1024, 512, Share(), True), (1, 1024, 768, Share(), True), (4, 1024, 512, Share(), False), (1, 4096, 2048, Share(), False),
    (1, 1024, 768, Share(experts=1 / 8), False), (1, 128, 64, Share(experts=1 / 2), True)])
def test_apart_costs_less_where_weights_are_most(rows, clean, seen, share, apart):
    for layers in (("sliding", "full"), ("sliding",) * 6):
        model = dataclasses.replace(PRESETS["diffusiongemma-26b-a4b"], num_layers=len(layers), layer_types=layers)
        assert apart_costs_less(model, sizes(rows, clean, seen), share) == apart
        assert not apart_costs_less(model, sizes(rows, clean, seen, drafted=0), share)


@pytest.mark.parametrize("rows, clean, seen, canvas, apart", [
    (1, 64, 64, 16, True), (64, 34, 17, 16, True), (16, 128, 64, 32, True), (1, 2048, 2032, 16, False), (64, 128, 112, 16, False)])
def test_on_a_cpu_apart_costs_less_where_little_is_seen(rows, clean, seen, canvas, apart):
    assert apart_costs_less_on_cpu(PRESETS["toy"], sizes(rows, clean, seen, canvas)) == apart
    assert not apart_costs_less_on_cpu(PRESETS["toy"], sizes(rows, clean, seen, canvas, drafted=0))


def test_pass_sizes():
    examples = plan_of(SOME).microbatches[0][0]
    found, given = PassSizes.of(examples), toy_inputs(plan_of(SOME), objective=SOME)
    drafted = [e for e in examples.examples if e.self_conditioned]
    assert (found.clean, found.canvas, found.drafts) == (len(given.clean.tokens), len(given.canvas.tokens), len(given.draft_rows))
    assert found.seen.tolist() == [e.canvas_start(e.canvases[0]) for e in drafted] and 0 < found.drafts < found.canvas


@pytest.mark.parametrize("pipelines, order", [(1, "joint"), (2, "shared")])
def test_a_long_text_without_a_draft_has_a_second_loop_over_a_pipeline(pipelines, order):
    """Its copy of the pipeline joins loops because another's does, and a CPU's attention keeps no rows of long texts."""
    plan, other = toy_plan(ALL, ((12, 20),)), toy_plan(ObjectiveConfig(self_conditioning_prob=0.0), ((900, 300),), seq_length=2048)
    plan = dataclasses.replace(plan, microbatches=(*plan.microbatches, *other.microbatches))
    words = f"--preset toy --train-iters 1 --data-source sudoku --draft-pass joint --pipeline-model-parallel-size {pipelines}"
    assert draft_pass.order_of_passes(parse(words.split()), plan, 0, on_gpu=False, can_join=True) == order


@pytest.mark.parametrize("flags, kind, order", [
    ("", "cuda", "joint"), ("", "cpu", "apart"), ("--recompute-granularity full", "cuda", "apart"),
    ("--tensor-model-parallel-size 2", "cuda", "apart"), ("--moe-token-dispatcher-type allgather", "cuda", "apart"),
    ("--lora-rank 2 --lora-dropout 0.5", "cuda", "apart"), ("--moe-z-loss-coeff 0.01", "cuda", "apart"),
    ("--no-moe-grouped-gemm", "cuda", "apart"), ("--lora-rank 2 --lora-targets experts", "cuda", "apart"),
    ("--moe-router-topk 1", "cuda", "apart"),
    ("--draft-pass shared", "cuda", "shared"), ("--draft-pass shared", "cpu", "shared"), ("--draft-pass apart", "cpu", "apart"),
    ("--draft-pass joint", "cpu", "joint"), ("--moe-aux-loss-coeff 0.01", "cuda", "shared"), ("--moe-aux-loss-coeff 0.01", "cpu", "shared"),
    ("--context-parallel-size 2", "cpu", "shared"), ("--tensor-model-parallel-size 2 --sequence-parallel", "cuda", "shared"),
    ("--context-parallel-size 2", "cuda", "shared"), ("--self-conditioning-prob 0", "cuda", "shared")])
def test_order_of_passes(flags, kind, order, monkeypatch):
    # One canvas of 4 tokens after few: on a GPU weights are most of it, on a CPU starting operations.
    monkeypatch.setattr(draft_pass, "suits_attention", lambda *given: True)  # as on an H200
    device = torch.device(kind)
    words = ["--bf16", "--train-iters", "1", "--data-source", "sudoku", "--preset", "toy", "--self-conditioning-prob", "1", *flags.split()]
    run = parse(words)
    plan = plan_of(run.objective, LENGTHS[2:3])
    assert order_of_passes(run, plan, 0, on_gpu=kind == "cuda", can_join=draft_pass.may_be_joint(run, device)) == order


@pytest.mark.parametrize("flags, device, line", [
    ("", "cpu", ["apart or shared, by what they cost"]), ("", "cuda", ["joint"]), ("--context-parallel-size 2", "cuda", ["shared"]),
    ("--draft-pass shared", "cpu", []), ("--self-conditioning-prob 0", "cpu", [])])
def test_the_log_says_what_is_taken(flags, device, line, monkeypatch):
    monkeypatch.setattr(draft_pass, "suits_attention", lambda *given: True)
    words = "--bf16 --train-iters 1 --data-source sudoku --preset toy --self-conditioning-prob 1"
    found = draft_pass.choice_of_passes(parse(f"{words} {flags}".split()), torch.device(device))
    assert found == [f"canvases that are decoded twice: --draft-pass {taken}" for taken in line]
