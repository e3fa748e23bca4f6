"""megatron_dllm.diffusion.passes: which rows of a first pass have a gradient, and under which noise level a token is scored."""
import dataclasses

import numpy as np
import pytest

from megatron_dllm.config import ObjectiveConfig
from megatron_dllm.diffusion.inputs import NOISE_BINS
from tests.unit.toy import toy_inputs, toy_plan


@pytest.mark.parametrize("share, are_live", [(0.0, True), (0.5, True), (1.0, False)], ids=["no draft", "some", "drafts alone"])
def test_canvases_of_a_first_pass_have_no_gradient_where_all_are_drafts(share, are_live):
    objective = ObjectiveConfig(self_conditioning_prob=share)
    plan = toy_plan(objective)
    coins = {example.self_conditioned for example in plan.microbatches[0][0].examples}
    assert len(coins) == (2 if share == 0.5 else 1)
    first = toy_inputs(plan, objective=objective).first_pass
    live = first.num_clean + (first.num_canvas if are_live else 0)
    for num_live in (first.num_own_live, first.routed.num_live):
        assert live == (first.num_tokens if num_live is None else num_live)


@pytest.mark.parametrize("level, tenth", [(0.0, 0), (0.3499, 3), (0.9999, 9), (1.0, 9)])
def test_tokens_are_scored_by_tenths_of_the_noise_level(level, tenth):
    """A noise schedule of a user's own may reach 1."""
    def noised(streams):
        return dataclasses.replace(streams, noise_level=np.full(len(streams.canvas), level))

    inputs = toy_inputs(toy_plan(), edit=noised)
    groups = {*inputs.first_scored.group.tolist(), *inputs.second_scored.group.tolist()}
    assert groups == {0, 1 + tenth} and tenth < NOISE_BINS
