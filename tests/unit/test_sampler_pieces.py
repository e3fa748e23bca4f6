"""The pieces of the sampler: temperature, acceptance, sampling, stability, the end of a row, the default draws."""
import numpy as np
import pytest
import torch

from megatron_dllm.config import GenerationConfig
from megatron_dllm.diffusion import sampler
from megatron_dllm.diffusion.sampler import CounterDraws, Stability, accept, end_at_eos, invert_cumulative, read_logits, temperature


@pytest.mark.parametrize("step, expected", [(0, 0.8), (12, 0.7), (24, 0.6), (47, 0.4 + 0.4 / 48)])
def test_temperature_falls_from_t_max_and_stays_above_t_min(step, expected):
    assert temperature(step, GenerationConfig()) == pytest.approx(expected)


@pytest.mark.parametrize("entropy, bound, expected", [
    ([0.50, 0.01, 0.08, 0.03], 0.1, [0, 1, 1, 1]),  # before 0.08 stands 0.04, before 0.50 stands 0.12
    ([3.0, 2.0, 4.0], 0.1, [0, 1, 0]),  # the surest is always accepted
    ([0.0, 0.0, 0.0, 9.0], 0.1, [1, 1, 1, 1]),  # nothing stands before the last
    ([0.25, 0.25, 0.25, 0.25], 0.5, [1, 1, 1, 0]),  # the bound itself is allowed; equal entropies in order of position
])
def test_accept(entropy, bound, expected):
    assert accept(torch.tensor([entropy]), bound).int().tolist() == [expected]


def test_accept_decides_each_row_by_itself():
    rows = torch.tensor([[0.5, 0.01, 0.08], [0.01, 0.5, 0.6]])
    assert accept(rows, 0.05).tolist() == [[False, True, True], [True, True, False]]


@pytest.mark.parametrize("uniform, token", [(0.0, 1), (0.2499, 1), (0.25, 3), (0.9999, 3), (1 - 2.0**-32, 3)])
def test_invert_cumulative_never_takes_a_token_of_probability_zero(uniform, token):
    probabilities = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]])
    assert invert_cumulative(probabilities, torch.tensor([uniform], dtype=torch.float64)).tolist() == [token]


def test_invert_cumulative_follows_the_distribution():
    probabilities = torch.tensor([0.1, 0.2, 0.3, 0.4]).expand(10_000, 4)
    uniforms = torch.arange(10_000, dtype=torch.float64) / 10_000
    counts = torch.bincount(invert_cumulative(probabilities, uniforms), minlength=4)
    assert (counts - torch.tensor([1000, 2000, 3000, 4000])).abs().max() <= 1


def test_invert_cumulative_stays_inside_when_the_sum_is_not_one():
    """Probabilities in fp32 rarely sum to exactly 1; the largest draw must still find a token."""
    probabilities = torch.softmax(torch.randn(64, 999, generator=torch.Generator().manual_seed(0)), -1)
    uniforms = torch.full((64,), 1 - 2.0**-32, dtype=torch.float64)
    for scale in (1.0, 0.5, 1.5):
        assert invert_cumulative(probabilities * scale, uniforms).max() < 999


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_read_logits(dtype):
    generator = torch.Generator().manual_seed(1)
    logits = 4 * torch.randn(3, 5, 37, generator=generator, dtype=dtype)
    uniforms = torch.rand(3, 5, generator=generator, dtype=torch.float64)
    reading = read_logits(logits, 0.7, uniforms, torch.bfloat16)
    reference = torch.distributions.Categorical(logits=logits / 0.7)
    torch.testing.assert_close(reading.entropy, reference.entropy())
    assert torch.equal(reading.argmax, logits.argmax(-1))
    assert torch.equal(reading.logits, (logits / 0.7).bfloat16())
    ours = (reference.probs.cumsum(-1) > uniforms[..., None]).int().argmax(-1)  # the first token past the quantile
    assert torch.equal(reading.sample, ours)


@pytest.mark.parametrize("positions", [1, 4, 7])
def test_read_logits_does_not_depend_on_the_slices(monkeypatch, positions):
    generator = torch.Generator().manual_seed(2)
    logits, uniforms = torch.randn(2, 7, 11, generator=generator), torch.rand(2, 7, generator=generator, dtype=torch.float64)
    whole = read_logits(logits, 0.5, uniforms, torch.float32)
    monkeypatch.setattr(sampler, "READ_CHUNK_BYTES", positions * 11 * 4)
    sliced = read_logits(logits, 0.5, uniforms, torch.float32)
    assert all(torch.equal(getattr(whole, name), getattr(sliced, name)) for name in ("logits", "sample", "argmax", "entropy"))


def test_stability_wants_the_last_canvases_to_be_equal():
    same, other = torch.tensor([[1, 2], [3, 4]]), torch.tensor([[1, 2], [3, 5]])
    stability = Stability(2)
    assert [stability.update(canvas).tolist() for canvas in (same, same, same, other, other, other)] == [
        [False, False], [False, False], [True, True], [True, False], [True, False], [True, True]]


def test_stability_keeps_the_rows_that_go_on():
    stability = Stability(1)
    stability.update(torch.tensor([[1], [2], [3]]))
    stability.keep(torch.tensor([0, 2]))
    assert stability.update(torch.tensor([[1], [2]])).tolist() == [True, False]


def test_stability_of_no_steps_is_always_given():
    assert Stability(0).update(torch.tensor([[1], [2]])).tolist() == [True, True]


@pytest.mark.parametrize("canvas, expected, ended", [
    ([5, 6, 7, 8], [5, 6, 7, 8], False),
    ([5, 1, 7, 8], [5, 1, 0, 0], True),
    ([5, 106, 1, 106], [5, 106, 0, 0], True),
    ([1, 5, 5, 5], [1, 0, 0, 0], True),
    ([5, 5, 5, 1], [5, 5, 5, 1], True),
])
def test_end_at_eos(canvas, expected, ended):
    tokens, now_ended = end_at_eos(torch.tensor([canvas]), (1, 106), 0)
    assert tokens.tolist() == [expected] and now_ended.tolist() == [ended]


def draws_of(draws: CounterDraws, rows, canvas=0, step=0):
    return torch.stack([draws.initial_canvas(rows, canvas), draws.fresh_tokens(rows, canvas, step)]), draws.uniforms(rows, canvas, step)


def test_counter_draws_depend_on_the_row_and_not_on_the_batch():
    draws = CounterDraws(3, canvas_length=7, vocab_size=300)
    (together, uniforms), (alone, lone_uniforms) = draws_of(draws, [4, 0, 2]), draws_of(draws, [2])
    assert torch.equal(together[:, 2:], alone) and torch.equal(uniforms[2:], lone_uniforms)
    renamed = CounterDraws(3, canvas_length=7, vocab_size=300, row_keys=[9, 2])
    assert torch.equal(draws_of(renamed, [1])[0], alone)


def test_counter_draws_differ_by_seed_row_canvas_and_step():
    def first(seed=0, row=0, canvas=0, step=0):
        tokens, uniforms = draws_of(CounterDraws(seed, canvas_length=64, vocab_size=1000), [row], canvas, step)
        return [tokens[0], tokens[1], uniforms * 1000]

    plain = first()
    one_decision, another, same_scale = plain[0], plain[1], plain[2].long()
    assert all((a != b).float().mean() > 0.9 for a, b in ((one_decision, another), (another, same_scale), (one_decision, same_scale)))
    for other in (first(seed=1), first(row=1), first(canvas=1)):
        assert all((a != b).float().mean() > 0.9 for a, b in zip(plain, other, strict=True))
    later = first(step=1)
    assert torch.equal(plain[0], later[0]) and all((a != b).float().mean() > 0.9 for a, b in zip(plain[1:], later[1:], strict=True))


def test_counter_draws_are_uniform():
    draws = CounterDraws(0, canvas_length=20_000, vocab_size=10)
    tokens, uniforms = draws_of(draws, [0])
    assert tokens.min() == 0 and tokens.max() == 9
    assert (np.bincount(tokens[1, 0].numpy()) / 20_000 == pytest.approx(0.1, abs=0.01))
    assert 0 <= uniforms.min() and uniforms.max() < 1 and uniforms.mean().item() == pytest.approx(0.5, abs=0.01)
