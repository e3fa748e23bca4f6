"""What must hold of the model as a whole on one process (docs/design.md section 9): leaks, denominators, packing, recompute, repeats."""
import dataclasses

import numpy as np
import pytest
import torch

from megatron_dllm.config import ObjectiveConfig
from tests.unit.toy import CONFIG, LENGTHS, gradients, toy_inputs, toy_model, toy_plan

MODEL = toy_model()
MHC = dataclasses.replace(CONFIG, enable_mhc_connections=True, mhc_num_residual_streams=3)
LINEAR = dataclasses.replace(CONFIG, layer_types=("linear", "sliding", "full"), linear_num_key_heads=2, linear_num_value_heads=4,
                             linear_key_head_dim=6, linear_value_head_dim=5)
MODELS = {"plain": MODEL, "mhc": toy_model(config=MHC), "linear": toy_model(config=LINEAR)}
ALWAYS, NEVER = ObjectiveConfig(self_conditioning_prob=1.0), ObjectiveConfig(self_conditioning_prob=0.0)


def close(one, other, tolerance=1e-12):
    assert one[0] == pytest.approx(other[0], rel=tolerance)
    norm = torch.cat([g.flatten() for g in other[1].values()]).norm()
    for name, gradient in one[1].items():
        assert (gradient - other[1][name]).abs().max() <= tolerance * norm, name


@torch.no_grad()
def states(plan, objective, *, change=None, model=MODEL):
    """Final hidden states of the clean tokens, and of the canvas tokens in the loop that scores them; `change` alters one clean token."""
    def edit(streams):
        if change is None:
            return streams
        tokens = streams.clean.tokens.copy()
        tokens[change] = 3 + (tokens[change] - 2) % (CONFIG.vocab_size - 3)
        return dataclasses.replace(streams, clean=dataclasses.replace(streams.clean, tokens=tokens))

    inputs = toy_inputs(plan, objective=objective, edit=edit, config=model.config)
    clean, canvas = model.embed(inputs.clean.tokens), model.self_conditioning(model.embed(inputs.canvas.tokens), None)
    hidden, contexts = model.run_layers(torch.cat([clean, canvas]), inputs.first_pass)
    decoded = hidden[len(clean):]
    if inputs.second_pass is not None:
        signal = model.soft_signal(hidden[inputs.draft_rows])
        decoded, _ = model.run_layers(model.self_conditioning(model.embed(inputs.second_tokens), signal), inputs.second_pass, contexts)
    return hidden[:len(clean)], decoded


def differs(one, other):
    """Rows that moved by more than rounding: a token that is routed elsewhere changes the blocks of its experts' products."""
    return ((one - other).abs().amax(1) > 1e-10).numpy()


@pytest.mark.parametrize(("kind", "packed", "objective"), [
    ("plain", False, NEVER), ("plain", True, NEVER), ("plain", False, ALWAYS), ("plain", True, ALWAYS), ("mhc", True, ALWAYS),
    ("linear", True, ALWAYS)],
    ids=["rows, one loop", "packed, one loop", "rows, two loops", "packed, two loops", "mhc", "linear"])
def test_clean_tokens_reach_only_what_may_see_them(kind, packed, objective):
    """Every clean token is changed once: earlier states and other documents stay; its own canvas moves just if the token is before it."""
    plan, model = toy_plan(objective, LENGTHS[:4], packed=packed), MODELS[kind]
    clean, decoded = states(plan, objective, model=model)
    start = 0
    for number, example in enumerate(plan.microbatches[0][0].examples):
        canvas = np.arange(number * CONFIG.canvas_length, (number + 1) * CONFIG.canvas_length)
        stop = start + example.fit.total
        for offset in range(example.fit.total):
            changed, moved = states(plan, objective, change=start + offset, model=model)
            at = start + offset
            touched = np.flatnonzero(differs(changed, clean))
            assert at in touched and touched.min() == at and touched.max() < stop
            reached = np.flatnonzero(differs(moved, decoded))
            before = offset < example.canvas_start(example.canvases[0])
            assert np.array_equal(reached, canvas if before else []), (number, offset)
        start = stop


def test_a_sliding_layer_sees_its_window_and_no_more():
    config = dataclasses.replace(CONFIG, num_layers=1, layer_types=("sliding",))
    model = toy_model(config=config)
    plan = toy_plan(NEVER, ((2, 40),))
    inputs = toy_inputs(plan, objective=NEVER, config=config)
    x = torch.randn(inputs.first_pass.num_clean + inputs.first_pass.num_canvas, CONFIG.hidden_size, dtype=torch.float64,
                    generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before, _ = model.run_layers(x, inputs.first_pass)
        x[10] += 1
        after, _ = model.run_layers(x, inputs.first_pass)
    moved = np.flatnonzero(differs(before, after)[:inputs.first_pass.num_clean]).tolist()
    assert moved == list(range(10, 10 + CONFIG.window_size))


@pytest.mark.parametrize("changes", [
    {}, {"encoder_loss_normalization": "token"}, {"canvases_scored": "all"}, {"score_tokens": "corrupted"}, {"diffusion_loss": "loo"},
    {"diffusion_loss": "reweighted-loo", "noise_min": 0.05}, {"self_conditioning_null": "uniform"},
    {"noise_sampling": "antithetic"}], ids=str)
def test_accumulation_does_not_change_the_gradient(changes):
    """1 x 8, 2 x 4, 4 x 2 and 8 x 1, unequal lengths, coins mixed."""
    objective = dataclasses.replace(ObjectiveConfig(), **changes)
    whole = gradients(MODEL, toy_plan(objective), objective=objective)
    for size in (4, 2, 1):
        close(gradients(MODEL, toy_plan(objective, micro_batch_size=size), objective=objective), whole)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS.keys() - {"plain"})
def test_accumulation_with_other_layers(kind):
    model, config = MODELS[kind], MODELS[kind].config
    close(gradients(model, toy_plan(micro_batch_size=2), config=config), gradients(model, toy_plan(), config=config))


@pytest.mark.parametrize("kind", MODELS)
def test_packing_does_not_change_the_gradient(kind):
    model, config = MODELS[kind], MODELS[kind].config
    close(gradients(model, toy_plan(packed=True), config=config), gradients(model, toy_plan(), config=config))


def test_the_causal_objective_is_the_first_loss_alone():
    config = dataclasses.replace(CONFIG, canvas_length=1)
    causal, both = ObjectiveConfig(objective="ar"), NEVER
    alone = MODEL(toy_inputs(toy_plan(causal, config=config), objective=causal, config=config))
    together = MODEL(toy_inputs(toy_plan(both, config=config), objective=both, config=config))
    assert alone.total.item() == pytest.approx(together.weighted[0].item(), rel=1e-12)


@pytest.mark.parametrize(("part", "exact"), [("block", True), ("core_attn", True), ("mlp", True), ("moe", False)])
def test_recompute_does_not_change_the_gradient(part, exact):
    """Bit for bit, except that the experts' part adds up its input's gradient in another order."""
    kept, again = gradients(MODEL, toy_plan()), gradients(toy_model(recompute=frozenset([part])), toy_plan())
    close(again, kept, 1e-15)
    assert kept[0] == again[0] and (not exact or all(torch.equal(g, again[1][name]) for name, g in kept[1].items()))


def test_recompute_keeps_less():
    def kept_bytes(parts):
        seen = {}

        def pack(tensor):
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        model = toy_model(recompute=frozenset(parts))
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(toy_inputs(toy_plan()))
        return sum(seen.values())

    nothing, selective, full = kept_bytes(()), kept_bytes(("mlp", "moe")), kept_bytes(("block",))
    assert full < selective < nothing


def test_repeats_are_bit_equal():
    first = gradients(MODEL, toy_plan(), dtype=torch.float32)
    for _ in range(2):
        again = gradients(MODEL, toy_plan(), dtype=torch.float32)
        assert first[0] == again[0] and all(torch.equal(g, again[1][name]) for name, g in first[1].items())


@pytest.mark.parametrize(("probability", "kind"), [(0.0, "plain"), (0.5, "plain"), (1.0, "plain"), (1.0, "mhc"), (1.0, "linear")])
def test_gradients_are_finite_and_reach_every_parameter(probability, kind):
    """But those of self-conditioning where there is none."""
    objective = ObjectiveConfig(self_conditioning_prob=probability)
    model = toy_model(config=MODELS[kind].config)
    for number in range(len(toy_plan(objective).microbatches[0])):
        model(toy_inputs(toy_plan(objective), number, objective=objective, config=model.config)).total.backward()
    silent = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    conditioning = {name for name, _ in model.named_parameters() if name.startswith("self_conditioning")}
    assert silent == (conditioning if probability == 0.0 else set())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_embeddings_are_scaled_by_what_the_compute_dtype_makes_of_the_scale(dtype):
    """48^0.5 is 6.9282, in bf16 6.9375 (and the released model's 53.066 is 53.0)."""
    model = toy_model(dtype, config=dataclasses.replace(CONFIG, num_layers=1, layer_types=("full",), hidden_size=48))
    tokens = torch.arange(CONFIG.vocab_size)
    assert torch.equal(model.embed(tokens), model.embedding.weight * torch.tensor(48**0.5, dtype=dtype))
    assert model.embedding_scale == (6.9375 if dtype == torch.bfloat16 else pytest.approx(48**0.5, rel=1e-7))


def test_a_uniform_null_is_the_signal_of_a_uniform_guess():
    model = toy_model(config=dataclasses.replace(CONFIG, num_layers=1, layer_types=("full",)))
    alike = torch.zeros(1, CONFIG.vocab_size, dtype=torch.float64)
    torch.testing.assert_close(model.null_signal(), model.soft_signal_of(alike), rtol=1e-12, atol=1e-13)
    hidden = torch.zeros(1, CONFIG.hidden_size, dtype=torch.float64)
    torch.testing.assert_close(model.null_signal(), model.soft_signal(hidden), rtol=1e-12, atol=1e-13)
