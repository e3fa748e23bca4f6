"""Multi-token prediction: its loss and gradients written out a document at a time, what it may see, and its part in metrics."""
import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron_dllm.config import ObjectiveConfig, parse
from megatron_dllm.diffusion.inputs import MTP_GROUP
from megatron_dllm.models.diffusion_gemma.build import build_model
from megatron_dllm.parallel import ParallelContext
from megatron_dllm.tensor_parallel import Constant
from megatron_dllm.training.step import loss_metrics
from megatron_dllm.transformer.mtp import with_mtp_layers
from megatron_dllm.transformer.token_pass import LAYER_TYPES, PassTokens, token_pass
from megatron_dllm.transformer.visibility import CLEAN, Visibility
from tests.unit.toy import CONFIG, gradients, toy_inputs, toy_model, toy_plan, toy_tokens

DEPTH, SCALE = 2, 0.1
MTP = dataclasses.replace(CONFIG, num_layers=2, layer_types=("sliding", "full"), mtp_num_layers=DEPTH)
BY_TOKEN = ObjectiveConfig(encoder_loss_normalization="token", self_conditioning_prob=0.0)
LENGTHS = ((5, 6), (0, 3), (1, 1), (9, 12))
CPU = torch.device("cpu")


def document_pass(config, length):
    alone = Visibility(np.zeros(length, np.int64), np.arange(1, length + 1), np.full(length, CLEAN), np.zeros(0, np.int64), length)
    return token_pass(config, PassTokens(dict.fromkeys(LAYER_TYPES, alone), np.arange(length), num_clean=length), device=CPU)


def written_out(model, hidden, texts):
    """Sum over documents, depths and pairs, over the number of next-token pairs of all documents."""
    config, total, start = model.config, 0.0, 0
    num_pairs = sum(len(text) - 1 for text in texts)
    for text in texts:
        length, states = len(text), hidden[start:start + len(text)]
        for depth, module in enumerate(model.mtp):
            ahead = depth + 1
            follows = torch.cat([text[ahead:], torch.full((min(ahead, length),), config.pad_token_id)])
            embedded = F.embedding(follows, model.embedding.weight) * config.hidden_size ** 0.5
            both = torch.cat([module.hidden_norm(states), module.embedding_norm(embedded)], 1)
            x = (both @ module.projection.T).repeat(1, config.num_residual_streams)
            x, _ = module.block(x, document_pass(config, length), None)
            states = module.final_norm(x.unflatten(1, (config.num_residual_streams, -1)).mean(1))
            logits = torch.tanh(states @ model.embedding.weight.T / config.final_logit_softcapping) * config.final_logit_softcapping
            count = max(length - ahead - 1, 0)
            total = total + F.cross_entropy(logits[:count], text[ahead + 1:], reduction="sum") if count else total
        start += length
    return SCALE / len(model.mtp) * total / num_pairs


@pytest.mark.parametrize("config", [MTP, dataclasses.replace(MTP, enable_mhc_connections=True, mhc_num_residual_streams=2)],
                         ids=["plain", "mhc"])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_loss_and_gradients_are_those_written_out(config, packed):
    model, plan = toy_model(config=config), toy_plan(BY_TOKEN, LENGTHS, packed=packed)
    inputs = toy_inputs(plan, objective=BY_TOKEN, config=config)
    texts = inputs.clean.tokens.split([example.fit.total for example in plan.microbatches[0][0].examples])
    hidden = model.run_layers(model.enter(inputs), inputs.first_pass)[0]
    expected = written_out(model, hidden, texts)
    terms = model(inputs)
    assert terms.weighted[MTP_GROUP].item() == pytest.approx(expected.item(), rel=1e-12)
    assert terms.total.item() == pytest.approx(terms.weighted.sum().item(), rel=1e-12)
    rest = model(dataclasses.replace(inputs, further=None))
    parameters = [p for p in model.parameters() if p.requires_grad]
    ours, theirs, without = (torch.autograd.grad(loss, parameters, allow_unused=True) for loss in (terms.total, expected, rest.total))
    zeros = [torch.zeros_like(p) for p in parameters]
    norm = torch.cat([g.flatten() for g in ours if g is not None]).norm()
    for one, two, three, zero in zip(ours, theirs, without, zeros, strict=True):
        one, two, three = (zero if g is None else g for g in (one, two, three))
        assert (one - (two + three)).abs().max() <= 1e-12 * norm
    assert sum(g is not None and bool(g.any()) for g in theirs) > len(list(model.mtp.parameters()))


def test_a_depth_sees_its_tokens_and_no_other_document():
    """Depth d at place i depends on tokens up to i + d + 1 of its document."""
    model, plan = toy_model(config=MTP), toy_plan(BY_TOKEN, LENGTHS, packed=True)

    @torch.no_grad()
    def states(change):
        def edit(streams):
            tokens = streams.clean.tokens.copy()
            tokens[change] = 3 + (tokens[change] - 2) % (CONFIG.vocab_size - 3)
            return dataclasses.replace(streams, clean=dataclasses.replace(streams.clean, tokens=tokens))

        inputs = toy_inputs(plan, objective=BY_TOKEN, config=MTP, edit=edit if change is not None else None)
        hidden = model.run_layers(model.enter(inputs), inputs.first_pass)[0][:inputs.first_pass.num_clean]
        results = []
        for depth, tokens in zip(model.mtp, inputs.further.tokens, strict=True):
            hidden = depth(hidden, model.embed(tokens), inputs.further.token_pass)
            results.append(hidden)
        return results

    before, start = states(None), 0
    for example in plan.microbatches[0][0].examples:
        for offset in range(0, example.fit.total, 3):
            for depth, (one, other) in enumerate(zip(states(start + offset), before, strict=True)):
                moved = np.flatnonzero((one - other).abs().amax(1).numpy() > 1e-10)
                assert moved.min() == start + max(offset - depth - 1, 0) and moved.max() < start + example.fit.total
        start += example.fit.total


def test_canvas_tokens_are_refused():
    model, inputs = toy_model(config=MTP), toy_inputs(toy_plan(BY_TOKEN), objective=BY_TOKEN, config=MTP)
    x = torch.zeros(inputs.first_pass.num_tokens, CONFIG.hidden_size, dtype=torch.float64)
    with pytest.raises(ValueError, match=f"the pass has {inputs.first_pass.num_canvas} canvas tokens"):
        model.mtp[0](x, x, inputs.first_pass)


@pytest.mark.slow
def test_accumulation_does_not_change_the_gradient():
    """The denominators are those of the whole batch, whatever a microbatch holds."""
    model = toy_model(config=MTP)
    whole, apart = (gradients(model, toy_plan(micro_batch_size=size), config=MTP) for size in (8, 1))
    assert apart[0] == pytest.approx(whole[0], rel=1e-12)
    norm = torch.cat([g.flatten() for g in whole[1].values()]).norm()
    assert all((apart[1][name] - g).abs().max() <= 1e-12 * norm for name, g in whole[1].items())


@pytest.mark.parametrize("parts", [("block",), ("mhc", "mlp")], ids=str)
def test_recompute_changes_no_bit(parts):
    config = dataclasses.replace(MTP, enable_mhc_connections="mhc" in parts, mhc_num_residual_streams=2)
    results = [gradients(toy_model(config=config, recompute=frozenset(chosen)), toy_plan(), config=config) for chosen in ((), parts)]
    assert results[0][0] == results[1][0] and all(torch.equal(g, results[1][1][name]) for name, g in results[0][1].items())


def test_metrics_show_it_apart():
    config = dataclasses.replace(CONFIG, mtp_num_layers=1)
    model, inputs = toy_model(config=config), toy_inputs(toy_plan(), config=config)
    with_it, without = (loss_metrics(model(x).detach()) for x in (inputs, dataclasses.replace(inputs, further=None)))
    assert with_it.keys() - without.keys() == {"mtp_loss"}
    assert with_it["loss"] == pytest.approx(without["loss"] + with_it["mtp_loss"])
    assert all(with_it[name] == value for name, value in without.items() if name != "loss")


def test_tokens_and_weights_of_each_depth():
    """One document of tokens a b c d e: depth 0 reads b c d e and predicts c d e, depth 1 reads c d e and predicts d e."""
    plan = toy_plan(BY_TOKEN, ((4, 1), (1, 3)), packed=True)
    inputs = toy_inputs(plan, objective=BY_TOKEN, config=MTP)
    first = [example.fit.total for example in plan.microbatches[0][0].examples][0]
    text, pad = inputs.clean.tokens[:first].tolist(), CONFIG.pad_token_id
    assert text[:4] == toy_tokens(0, 5)[:4].tolist()
    for depth, (tokens, scored) in enumerate(zip(inputs.further.tokens, inputs.further.scored, strict=True)):
        ahead = depth + 1
        assert tokens[:first].tolist() == text[ahead:] + [pad] * ahead
        own = scored.rows < first
        assert scored.rows[own].tolist() == list(range(first - ahead - 1))
        assert scored.targets[own].tolist() == text[ahead + 1:]
        assert set(scored.weights.tolist()) == {SCALE / DEPTH / plan.denominators.encoder}
        assert set(scored.group.tolist()) == {MTP_GROUP}


def test_blocks_are_full_layers_whatever_the_last_layer_is():
    config = with_mtp_layers(dataclasses.replace(MTP, layer_types=("full",) * (MTP.num_layers - 1) + ("sliding",), mtp_num_layers=2))
    assert config.num_layers == MTP.num_layers + 2 and config.layer_types[-3:] == ("sliding", "full", "full")


def test_routers_of_its_layers_are_frozen_with_the_others():
    run = parse(["--preset", "toy", "--num-layers", "2", "--layer-types", "sliding,full", "--mtp-num-layers", "2", "--freeze-router",
                 "--data-path", "none", "--train-iters", "1"])
    model = build_model(run, ParallelContext.single("cpu"), init=Constant(0.0))
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if ".router." in name} and any(name.startswith("mtp") for name in frozen)
