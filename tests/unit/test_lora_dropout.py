"""The dropout of adapters: its share, what its draws depend on, and that they come again in a recompute."""
import numpy as np
import pytest
import torch

from megatron_dllm.config import LoRAConfig, ObjectiveConfig
from megatron_dllm.diffusion.passes import PassOptions, microbatch_inputs
from megatron_dllm.diffusion.streams import DropoutWords, build_streams
from megatron_dllm.models.diffusion_gemma.lora import add_adapters
from megatron_dllm.tensor_parallel.dropout import Dropout
from megatron_dllm.tensor_parallel.initialization import Initializer
from tests.unit.toy import CONFIG, toy_model, toy_plan, toy_tokens

CPU = torch.device("cpu")


def kept(name="a", rate=0.25, *, seed=0, first=0, count=200) -> torch.Tensor:
    words = torch.from_numpy(np.random.default_rng(seed).integers(-2**63, 2**63 - 1, 500))
    return Dropout(name, rate, 200, first=first, count=count, device=CPU)(torch.ones(500, count, dtype=torch.float64), words)


def test_share_and_scale():
    out = kept()
    assert set(out.unique().tolist()) == {0.0, 1 / 0.75}
    # 100,000 draws: five standard deviations are 0.007.
    assert abs((out == 0).double().mean().item() - 0.25) < 0.007
    for of_each in ((out == 0).double().mean(0), (out == 0).double().mean(1)):
        assert 0.1 < of_each.min() and of_each.max() < 0.42


def test_draws_differ_by_module_feature_and_token_and_not_by_shard():
    whole = kept()
    for other in (kept("b"), kept(seed=1), whole.roll(1, 0), whole.roll(1, 1)):
        agree = (whole == other).double().mean().item()
        assert abs(agree - (0.75**2 + 0.25**2)) < 0.01
    assert torch.equal(kept(first=60, count=40), whole[:, 60:100])


def test_none_in_evaluation_and_refused_without_draws():
    dropout, x = Dropout("a", 0.5, 4, first=0, count=4, device=CPU), torch.ones(3, 4)
    with pytest.raises(AssertionError, match="wants the batch's draws"):
        dropout(x, None)
    assert dropout.eval()(x, None) is x


def test_words_are_those_of_documents_wherever_they_lie():
    # All of this seed's examples have a draft, so that no plan deals them in another order.
    apart, packed = (DropoutWords.of(toy_plan(packed=packed, seed=4).microbatches[0][0]) for packed in (False, True))
    assert np.array_equal(apart.clean, packed.clean)
    other = DropoutWords.of(toy_plan(seed=9).microbatches[0][0])
    assert not np.any(apart.clean == other.clean)
    assert len(apart.canvas) == len(apart.second) > 0 and not np.any(apart.canvas == apart.second)
    assert len(np.unique(np.concatenate([apart.clean, apart.canvas, apart.second]))) == len(apart.clean) + 2 * len(apart.canvas)


def gradients(recompute=frozenset(), rate=0.3) -> dict[str, torch.Tensor]:
    plan = toy_plan(seed=1)
    chosen, objective = plan.microbatches[0][0], ObjectiveConfig()
    tokens = [toy_tokens(e.index, e.fit.prompt + e.fit.response) for e in chosen.examples]
    streams = build_streams(chosen, tokens, objective, plan.denominators, vocab_size=CONFIG.vocab_size, fill_token=CONFIG.fill_token_id,
                            dropout=True)
    model = toy_model(recompute=frozenset(recompute))
    add_adapters(model, LoRAConfig(lora_rank=3, lora_dropout=rate), Initializer(3, 0.1))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("adapter.b"):
                parameter.fill_(0.1)
    model(microbatch_inputs(streams, CONFIG, PassOptions(torch.float64))).total.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("recompute", [("block",), ("mlp", "moe")], ids=["full", "selective"])
def test_a_recompute_drops_the_same(recompute):
    plain, again = gradients(), gradients(recompute)
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient, rtol=1e-12, atol=1e-14)
    without = gradients(rate=0.0)
    assert max((without[name] - plain[name]).abs().max() for name in plain) > 1e-4
