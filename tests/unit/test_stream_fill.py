"""--cuda-graph-token-multiple: fill after the clean tokens changes sizes, and no loss, gradient or figure of a router."""
import dataclasses
from functools import partial

import numpy as np
import pytest
import torch

from megatron_dllm.config import MoEConfig, ObjectiveConfig
from megatron_dllm.diffusion.fill import filled_up
from megatron_dllm.models.diffusion_gemma.model import DiffusionGemma
from megatron_dllm.parallel import ParallelContext
from megatron_dllm.tensor_parallel.initialization import Initializer
from tests.unit.toy import CONFIG, LENGTHS, toy_inputs, toy_plan

ALL = dataclasses.replace(CONFIG, layer_types=("linear", "sliding", "full"), linear_num_key_heads=2, linear_num_value_heads=4,
                          linear_key_head_dim=6, linear_value_head_dim=5, linear_conv_kernel_dim=4, mtp_num_layers=1)
MULTIPLE, PAD = 50, 7
CLEAN = sum(prompt + -(-response // 4) * 4 for prompt, response in LENGTHS)


def outcome(objective: ObjectiveConfig, config, *, fill: bool):
    """Losses with their counts, gradients, and what the routers noted, of the toy's microbatch."""
    moe = MoEConfig(moe_aux_loss_coeff=0.3, moe_z_loss_coeff=0.2, moe_router_enable_expert_bias=True)
    model = DiffusionGemma(config, context=ParallelContext.single(), init=Initializer(5, 0.15), dtype=torch.float64, moe=moe)
    plan = toy_plan(objective, packed=True)
    edit = partial(filled_up, multiple=MULTIPLE, pad_token=PAD) if fill else None
    inputs = toy_inputs(plan, objective=objective, config=config, edit=edit, scored_multiple=16 if fill else 1)
    terms = model(inputs)
    terms.total.backward()
    figures = {layer: (own.load, own.num_tokens, own.entropy, own.losses) for layer, own in model.routing.drain().items()}
    loads = [block.moe.router.bias.load for block in model.layers.values()]
    gradients = [p.grad for p in model.parameters()]
    return inputs, [terms.total, terms.weighted, terms.sums, terms.correct, terms.counts], gradients, figures, loads


@pytest.mark.parametrize("loss", ["ce", "reweighted-loo"])
@pytest.mark.parametrize("config", [CONFIG, ALL], ids=["attention", "linear layers, MTP"])
def test_fill_changes_nothing_but_sizes(config, loss):
    objective = ObjectiveConfig(diffusion_loss=loss, encoder_loss_tokens="response", self_conditioning_prob=0.6)
    plain, filled = (outcome(objective, config, fill=fill) for fill in (False, True))
    assert plain[0].first_pass.num_clean == CLEAN and filled[0].first_pass.num_clean == 150 > CLEAN
    assert len(filled[0].first_scored.rows) % 16 == 0 and len(filled[0].first_scored.rows) > (filled[0].first_scored.weights > 0).sum()
    assert len(filled[0].second_scored.rows) % 4 == 0, "as many as there are to take"
    for one, other in zip(plain[1:], filled[1:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)


def test_streams():
    """Fill is one document, the last, seen by itself alone; canvases see what they saw."""
    taken = {}

    def edit(streams):
        taken["before"], taken["after"] = streams, filled_up(streams, MULTIPLE, PAD)
        return taken["after"]

    toy_inputs(toy_plan(), edit=edit)
    before, after = taken["before"], taken["after"]
    count = 150 - CLEAN
    assert after.num_fill == count and filled_up(after, MULTIPLE, PAD) is after
    assert (after.clean.tokens[CLEAN:] == PAD).all() and not after.clean.weights[CLEAN:].any()
    mask, whole = before.visibility.dense(), after.visibility.dense()
    keep = np.r_[0:CLEAN, 150:150 + len(before.canvas)]
    assert (whole[np.ix_(keep, keep)] == mask).all() and not whole[keep, CLEAN:150].any()
    assert (whole[CLEAN:150, CLEAN:150] == np.tril(np.ones((count, count), bool))).all() and not whole[CLEAN:150, :CLEAN].any()
