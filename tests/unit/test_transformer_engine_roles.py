"""Attention, rotary positions and cross entropy by Transformer Engine, over a stand-in for the package on the CPU, against ours."""
import dataclasses
from functools import partial

import numpy as np
import pytest
import torch

from megatron_dllm.config import PRESETS, MoEConfig, ObjectiveConfig, TrainingConfig, parse
from megatron_dllm.config.validation import validate
from megatron_dllm.parallel import ParallelContext
from megatron_dllm.tensor_parallel import linear_cross_entropy
from megatron_dllm.transformer import packed_attention
from megatron_dllm.transformer.core_attention import attend_dense
from megatron_dllm.transformer.norms import rms_norm
from megatron_dllm.transformer.packed_attention import packed_plan, packed_types
from megatron_dllm.transformer.rotary import inverse_frequencies, norm_and_rotate_pair, rotary_table
from megatron_dllm.transformer.visibility import CLEAN, Visibility
from megatron_dllm.transformer_engine import Engine, choices, install, load_engine
from megatron_dllm.transformer_engine import attention as engine_attention
from megatron_dllm.transformer_engine.cross_entropy import engine_cross_entropy
from megatron_dllm.transformer_engine.rotary import EngineRotary
from tests.unit.fake_transformer_engine import State, install_fake
from tests.unit.test_cross_entropy import CASES, TP, inputs
from tests.unit.toy import CONFIG, gradients, toy_inputs, toy_model, toy_plan

CPU = torch.device("cpu")
WIDE = dataclasses.replace(CONFIG, num_experts=4, moe_router_topk=4)  # every token to every expert: no near-tie decides
BOTH = {"packed": frozenset(["sliding", "full"])}
ROLES = "--transformer-impl transformer_engine --attention-backend transformer_engine --rotary-backend transformer_engine " \
        "--cross-entropy-fusion-impl te"


@pytest.fixture
def package(monkeypatch):
    return install_fake(monkeypatch)


def visibility_of(lengths: list[int], canvases: list[tuple[int, int, int]]) -> Visibility:
    """Documents of these lengths, and canvases (document, clean tokens of it that they see, tokens)."""
    bounds = np.cumsum([0, *lengths])
    first, past = np.repeat(bounds[:-1], lengths), np.arange(1, bounds[-1] + 1)
    ids = np.repeat(np.arange(len(canvases)), [size for *_, size in canvases]).astype(np.int64)
    ends = np.array([(bounds[document], bounds[document] + seen) for document, seen, _ in canvases], np.int64).reshape(-1, 2)[ids]
    return Visibility(np.concatenate([first, ends[:, 0]]), np.concatenate([past, ends[:, 1]]),
                      np.concatenate([np.full(len(past), CLEAN), ids]), ids, int(bounds[-1]))


def numbers(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


class TestPlan:
    def test_by_hand(self):
        """The picture of packed_attention.py: P0 P1 a b | Q0 c and the canvases x y after P1, z after Q0."""
        plan = packed_plan(visibility_of([4, 2], [(0, 2, 2), (1, 1, 1)]), None, CPU)
        clean, canvas = plan.parts
        assert clean.causal and clean.num_queries == 6 and clean.query_starts.tolist() == clean.key_starts.tolist() == [0, 4, 6]
        assert not canvas.causal and canvas.num_queries == 3 and canvas.query_starts.tolist() == [0, 2, 3]
        assert canvas.keys.index.tolist() == [0, 1, 6, 7, 4, 8] and canvas.key_starts.tolist() == [0, 4, 6]
        assert (canvas.longest_query, canvas.longest_key) == (128, 128) and canvas.query_starts.dtype == torch.int32

    def test_a_window_cuts_the_keys_of_a_canvas(self):
        """One of 3 leaves it the last two before it."""
        clean, canvas = packed_plan(visibility_of([5], [(0, 4, 2)]), 3, CPU).parts
        assert clean.window == 3 and canvas.window is None and canvas.keys.index.tolist() == [2, 3, 5, 6]

    def test_documents_without_their_first_tokens(self):
        seen = visibility_of([5], [])
        later = Visibility(seen.first_key[2:], seen.past_key[2:], seen.canvas_id[2:], seen.canvas_keys, 5)
        with pytest.raises(AssertionError, match="whole documents"):
            packed_plan(later, None, CPU)

    def test_which_layers(self):
        chosen, released = TrainingConfig(attention_backend="transformer_engine"), PRESETS["diffusiongemma-26b-a4b"]
        assert packed_types(chosen, released) == {"sliding"} and packed_types(chosen, CONFIG) == {"sliding", "full"}
        assert packed_types(TrainingConfig(), CONFIG) == set()


@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize(("lengths", "canvases"), [
    ([4, 2], [(0, 2, 2), (1, 1, 1)]), ([1, 150, 1], [(1, 149, 5), (1, 20, 5), (2, 1, 3)]), ([7], []), ([3, 1], [(0, 0, 4)])])
def test_attention(package, lengths, canvases, window):
    """Keys may stand in another order, and rows of fill follow."""
    visibility = visibility_of(lengths, canvases)
    num_clean, num_keys = visibility.num_clean_keys, visibility.num_clean_keys + len(visibility.canvas_keys)
    query, key, value = (numbers(rows, heads, 8, seed=rows + heads, dtype=torch.float32)
                         for rows, heads in ((len(visibility.canvas_id) + 2, 4), (num_keys + 2, 2), (num_keys + 2, 2)))
    order = np.random.default_rng(0).permutation(num_clean)
    out = packed_plan(visibility, window, CPU, order).attend(query, key, value)
    assert not out[-2:].any() and State.attentions == 1 + bool(canvases)
    places = torch.from_numpy(np.concatenate([order, np.arange(num_clean, num_keys)]))
    wanted = attend_dense(query[:-2], key[places], value[places], visibility.windowed(window))
    torch.testing.assert_close(out[:-2], wanted)
    grad = numbers(*wanted.shape, seed=9, dtype=torch.float32)
    for got, want in zip(torch.autograd.grad(out[:-2], (query, key, value), grad), torch.autograd.grad(wanted, (query, key, value), grad),
                         strict=True):
        torch.testing.assert_close(got, want)


def test_attention_of_no_query(package):
    nothing = numbers(0, 4, 8)
    assert packed_plan(visibility_of([], []), 3, CPU).attend(nothing, nothing, nothing) is nothing and not State.attentions


def test_what_the_package_has_no_kernel_for_is_refused(package):
    wide = numbers(4, 2, 512)
    with pytest.raises(ValueError, match=r"queries \(4, 2, 512\) .* would hold all scores; set --attention-backend local"):
        packed_plan(visibility_of([4], []), None, CPU).attend(wide, wide, wide)


def test_a_package_that_hides_what_it_takes_without_a_kernel_is_refused(package, monkeypatch):
    init = package.DotProductAttention.__init__

    def without(self, *sizes, **options):
        init(self, *sizes, **options)
        del self.unfused_attention

    monkeypatch.setattr(package.DotProductAttention, "__init__", without)
    with pytest.raises(ValueError, match="would hold all scores; set --attention-backend local"):
        engine_attention._attention.__wrapped__(package, 4, 2, 16, True, None)


@pytest.mark.parametrize(("head_dim", "fraction"), [(16, 1.0), (32, 0.25)])
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_rotary(package, head_dim, fraction, tokens):
    positions = 5 + 3 * torch.arange(tokens)
    table = rotary_table(positions, inverse_frequencies(head_dim, 1e4, fraction, CPU))
    tensors = [numbers(tokens, heads, head_dim, seed=heads, dtype=torch.float32) for heads in (4, 2)] + [
        numbers(head_dim, seed=seed, dtype=torch.float32) for seed in (3, 4)]
    results = [turn(*tensors, table, 1e-5) for turn in (EngineRotary(rms_norm), norm_and_rotate_pair)]
    torch.testing.assert_close(results[0], results[1])
    assert State.rotations == (2 if tokens else 0)
    grads = [torch.autograd.grad(sum((y * y.detach().cos()).sum() for y in pair), tensors) for pair in results]
    torch.testing.assert_close(grads[0], grads[1])


@CASES
@pytest.mark.parametrize("tokens_per_chunk", [1, 3, 100])
def test_cross_entropy(package, num_tokens, vocab_size, softcap, loo, tokens_per_chunk):
    hidden, weight, targets, weights, observed, bonus = inputs(num_tokens, vocab_size, torch.float32, loo=loo)
    run = partial(linear_cross_entropy, hidden, weight, targets, weights.float(), softcap=softcap, tp=TP, vocab_size=vocab_size,
                  observed=observed, bonus=bonus, chunk_bytes=tokens_per_chunk * vocab_size * 4)
    found, wanted = run(logit_loss=engine_cross_entropy(Engine(package))), run()
    assert State.losses == -(-num_tokens // tokens_per_chunk) and torch.equal(found.correct, wanted.correct)
    torch.testing.assert_close((found.loss, found.per_token), (wanted.loss, wanted.per_token))
    grads = [torch.autograd.grad(2.5 * terms.loss, (hidden, weight)) for terms in (found, wanted)]
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(run(logit_loss=engine_cross_entropy(Engine(package))).per_token, wanted.per_token)


OBJECTIVES = {"drafts": ObjectiveConfig(), "all canvases, leave one out": ObjectiveConfig(canvases_scored="all", diffusion_loss="loo")}


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_a_model_computes_the_same(package, objective):
    """bf16: as far from float64 as our own layers are."""
    plan = toy_plan(objective, config=WIDE)
    exact_loss, exact = gradients(toy_model(config=WIDE), plan, config=WIDE, objective=objective)

    def distance(engine: Engine | None, **options):
        model = toy_model(torch.bfloat16, config=WIDE)
        if engine is not None:
            install(model, engine)
        loss, found = gradients(model, plan, config=WIDE, objective=objective, dtype=torch.float32, **options)
        squared = sum((found[name].double() - exact[name]).square().sum() for name in exact)
        return abs(loss - exact_loss), (squared / sum(g.square().sum() for g in exact.values())).sqrt()

    (loss, gradient), (own_loss, own_gradient) = distance(Engine(package, rotary=True, cross_entropy=True), **BOTH), distance(None)
    assert loss <= 2 * own_loss + 2.0**-9 * exact_loss and gradient <= 2 * own_gradient
    assert State.attentions >= 3 and State.rotations >= 6 and State.losses


def test_every_pass_has_the_plan():
    """Drafts beforehand and multi-token prediction too."""
    config = dataclasses.replace(WIDE, mtp_num_layers=1)
    always = ObjectiveConfig(self_conditioning_prob=1.0)
    for order in ("shared", "apart"):
        made = toy_inputs(toy_plan(always, config=config), objective=always, config=config, passes=order, packed=frozenset(["full"]))
        for token_pass in (made.first_pass, made.draft.token_pass if order == "apart" else made.second_pass, made.further.token_pass):
            plans = {kind: isinstance(token_pass.layers[kind].attention, packed_attention.PackedPlan) for kind in ("full", "sliding")}
            assert plans == {"full": True, "sliding": False}


def parsed(words: str):
    return parse(f"--preset diffusiongemma-26b-a4b --train-iters 1 --data-source sudoku --bf16 {words}".split())


def problems(words: str) -> list[str]:
    return [str(problem) for problem in validate(parsed(words), world_size=2)]


class TestFlags:
    def test_roles_reach_the_engine_and_the_table(self, package):
        run = parsed(ROLES)
        assert load_engine(run.training, MoEConfig(), torch.device("cuda")) == Engine(package, rotary=True, cross_entropy=True)
        rows = {row.part: row.taken for row in choices(run)}
        assert [rows[part] for part in ("attention, sliding, head 256", "attention, full, head 512", "rotary", "cross entropy")] == [
            "Transformer Engine", "ours", "Transformer Engine", "Transformer Engine"]
        assert {row.taken for row in choices(parsed("--transformer-impl transformer_engine")) if row.part in (
            "attention, sliding, head 256", "rotary", "cross entropy")} == {"ours"}

    @pytest.mark.parametrize(("words", "why", "remedy"), [
        ("--attention-backend transformer_engine", "--transformer-impl transformer_engine", "--transformer-impl transformer_engine"),
        (f"{ROLES} --context-parallel-size 2", "whole sequences", f"{ROLES} --context-parallel-size 2 --attention-backend local"),
        (f"{ROLES} --kv-channels 512", "no layer has such", f"{ROLES} --kv-channels 512 --attention-backend local"),
        (f"{ROLES} --deterministic-mode", "square of the sequences", f"{ROLES} --deterministic-mode --attention-backend local")])
    def test_refusals(self, words, why, remedy):
        assert any("attention-backend" in text and why in text for text in problems(words)), problems(words)
        mended = words + " --transformer-impl transformer_engine" if remedy == why else remedy
        assert not any("attention-backend" in text for text in problems(mended)), problems(mended)


def test_an_older_package_is_refused(package):
    package.parallel_cross_entropy = lambda inp, target: None
    with pytest.raises(ValueError, match="install that one, or set --cross-entropy-fusion-impl native"):
        engine_cross_entropy(Engine(package))


def test_a_single_rank_sends_nothing(package):
    context = ParallelContext.single()
    logits, targets = numbers(3, 7, dtype=torch.float32).detach(), torch.tensor([0, 6, 3])
    loss, gradient = engine_cross_entropy(Engine(package))(logits.clone(), targets, torch.ones(3), context.tp, wants_gradient=True)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, targets, reduction="none"))
    assert gradient.shape == (3, 7) and context.tp.log.total() == (0, 0)
