"""Microbatches filled up to one form (--cuda-graph-canvas-multiple): the loss and gradients that they have without."""
import dataclasses

import pytest
import torch

from megatron_dllm.config import ObjectiveConfig
from megatron_dllm.diffusion.fill import filled_up, filled_up_canvases
from megatron_dllm.diffusion.nested import form_of
from megatron_dllm.moe.balance import FILL
from tests.unit.toy import CONFIG, LENGTHS, toy_inputs, toy_model, toy_plan

TOKENS, CANVASES, SEED = 128, 6, 6
OBJECTIVES = {
    "plain": ObjectiveConfig(), "uniform null": ObjectiveConfig(self_conditioning_null="uniform"),
    "corrupted alone": ObjectiveConfig(score_tokens="corrupted"), "leave one out": ObjectiveConfig(diffusion_loss="loo"),
    "all canvases": ObjectiveConfig(canvases_scored="all"), "no drafts": ObjectiveConfig(self_conditioning_prob=0.0),
}


def one_form(plan, objective, *, canvases=CANVASES, **options):
    """The inputs of the plan's only microbatch, filled up."""
    drafted = objective.self_conditioning_prob > 0

    def fill(streams):
        streams = filled_up(streams, TOKENS, CONFIG.pad_token_id)
        return filled_up_canvases(streams, canvases, CONFIG.canvas_length, CONFIG.pad_token_id, drafted=drafted)

    return toy_inputs(plan.with_every_draft() if drafted else plan, objective=objective, edit=fill, one_form=True, **options)


def run(model, inputs):
    """(loss, gradients, the reported sums)."""
    model.zero_grad()
    terms = model(inputs)
    terms.total.backward()
    return terms, {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def hold_together(config, objective, lengths=LENGTHS[2:6], *, passes="shared", canvases=CANVASES, **options):
    """Losses and gradients with and without what is filled up."""
    plan, model = toy_plan(objective, lengths, seed=SEED), toy_model(config=config)
    coins = [example.self_conditioned for example in plan.microbatches[0][0].examples]
    assert any(coins) == (objective.self_conditioning_prob > 0) and not all(coins)
    terms, expected = run(model, toy_inputs(plan, objective=objective, config=config, **options))
    filled, found = run(model, one_form(plan, objective, config=config, passes=passes, canvases=canvases, **options))
    assert abs(filled.total - terms.total) <= 1e-12 * abs(terms.total)
    torch.testing.assert_close(filled.counts, terms.counts)
    torch.testing.assert_close(filled.weighted, terms.weighted)
    largest = max(gradient.abs().max() for gradient in expected.values())
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() <= 1e-11 * largest, name


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_losses_and_gradients_are_the_same(objective):
    hold_together(CONFIG, objective, canvases=16 if objective.canvases_scored == "all" else CANVASES)


@pytest.mark.parametrize("objective", [OBJECTIVES["plain"], OBJECTIVES["uniform null"]], ids=["plain", "uniform null"])
def test_joint_passes_are_the_same(objective):
    hold_together(CONFIG, objective, passes="joint")


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"mtp_num_layers": 1}, {"enable_mhc_connections": True, "mhc_num_residual_streams": 2}],
                         ids=["MTP", "mHC"])
def test_further_losses_and_streams_are_the_same(change):
    hold_together(dataclasses.replace(CONFIG, **change), OBJECTIVES["plain"])


def test_microbatches_of_other_documents_and_coins_have_one_form():
    plans = [toy_plan(None, LENGTHS[start:start + count], seed=seed) for start, count, seed in ((0, 3, 1), (2, 1, 2), (3, 4, 3), (1, 5, 4))]
    coins = [tuple(example.self_conditioned for example in plan.microbatches[0][0].examples) for plan in plans]
    assert len(set(coins)) > 2 and any(map(any, coins)) and not all(map(all, coins))
    assert len({form_of(one_form(plan, ObjectiveConfig())) for plan in plans}) == 1
    # Without it all are others.
    assert len({form_of(toy_inputs(plan)) for plan in plans}) == 4


def test_further_losses_have_one_form():
    config = dataclasses.replace(CONFIG, mtp_num_layers=2)
    plans = [toy_plan(None, LENGTHS[start:start + count]) for start, count in ((0, 3), (3, 4))]
    assert len({form_of(one_form(plan, ObjectiveConfig(), config=config)) for plan in plans}) == 1


def test_routers_leave_out_what_is_filled_in():
    objective = OBJECTIVES["plain"]
    plan = toy_plan(objective, LENGTHS[2:6], seed=SEED)
    inputs, plain = one_form(plan, objective), toy_inputs(plan, objective=objective)
    routed = (inputs.first_pass.routed, inputs.second_pass.routed)
    assert sum(int((part.stream == FILL).sum()) for part in routed) == TOKENS - len(plain.clean.tokens) + 2 * 2 * CONFIG.canvas_length
    shares = [sum(part.share.sum() for part in (m.first_pass.routed, m.second_pass and m.second_pass.routed) if part is not None)
              for m in (inputs, plain)]
    torch.testing.assert_close(*shares)


def test_a_draft_that_no_coin_asked_for_is_seen_if_it_is_used():
    objective = OBJECTIVES["plain"]
    plan, model = toy_plan(objective, LENGTHS[2:6], seed=SEED), toy_model()
    coins = [example.self_conditioned for example in plan.microbatches[0][0].examples]
    assert not all(coins)
    inputs = one_form(plan, objective)
    used = model(dataclasses.replace(inputs, left_out=None)).total
    assert abs(used - model(inputs).total) > 1e-6
