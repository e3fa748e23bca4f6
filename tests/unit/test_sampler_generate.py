"""generate(): canvases, rows that stop apart, what is encoded, errors; and a few cases against transformers."""
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_dllm.config import GenerationConfig
from megatron_dllm.diffusion import sampler
from megatron_dllm.diffusion.sampler import CounterDraws, Unrecorded, generate, read_logits, temperature

C, V, PAD, EOS = 4, 50, 0, 1
CONFIG = GenerationConfig(max_new_tokens=3 * C, max_denoising_steps=6)


class ScriptedDenoiser(Unrecorded):
    """Row r is sure of its target from step patience[r] of a canvas on; before, its best guess changes with every step.

    The target follows from the row and its number of tokens; `ends` maps a row to the number at which it has an end in second place;
    `first_logit` is how sure it then is of the first position.
    """

    vocab_size, canvas_length, max_positions, dtype, device = V, C, 40, torch.float32, torch.device("cpu")

    def __init__(self, num_rows: int, patience: Sequence[int], ends: dict[int, int] | None = None, first_logit: float = 30.0):
        self.num_rows, self.patience, self.ends, self.first_logit = num_rows, patience, ends or {}, first_logit
        self.encoded: list[list[int]] = [[] for _ in range(num_rows)]
        self.asked: list[list[int]] = []
        self.signals: list[Tensor | None] = []
        self.logits: list[Tensor] = []
        self.steps = [0] * num_rows

    def target(self, row: int) -> list[int]:
        start = 2 + (7 * row + len(self.encoded[row])) % 30
        tokens = [start + i for i in range(C)]
        if len(self.encoded[row]) == self.ends.get(row):
            tokens[1] = EOS
        return tokens

    def encode(self, tokens: Sequence[Tensor]) -> None:
        for row, new in enumerate(tokens):
            assert new.dtype == torch.long
            self.encoded[row] += new.tolist()
        self.steps = [0] * self.num_rows

    def denoise(self, canvas: Tensor, self_conditioning_logits: Tensor | None, rows: Tensor) -> Tensor:
        assert canvas.shape == (len(rows), C)
        self.asked.append(rows.tolist())
        self.signals.append(self_conditioning_logits)
        logits = torch.zeros(len(rows), C, V)
        for i, row in enumerate(rows.tolist()):
            sure = 30.0 if self.steps[row] >= self.patience[row] else 3.0 + 0.1 * self.steps[row]
            wanted = torch.tensor(self.target(row))
            logits[i, torch.arange(C), wanted if sure == 30.0 else wanted + 1 + self.steps[row] % 2] = sure
            if sure == 30.0:
                logits[i, 0, wanted[0]] = self.first_logit
            self.steps[row] += 1
        self.logits.append(logits)
        return logits


def run(denoiser, prompts, config=CONFIG, observe=None, row_keys=None):
    draws = CounterDraws(0, canvas_length=C, vocab_size=V, row_keys=row_keys)
    return generate(denoiser, prompts, config, eos_ids=(EOS,), pad_id=PAD, draws=draws, observe=observe)


def test_rows_stop_apart_and_wait_for_the_others():
    denoiser = ScriptedDenoiser(3, patience=[0, 3, 9])
    result = run(denoiser, [[5], [6, 7, 8], [9, 9]], replace(CONFIG, max_new_tokens=C))
    # Sure from the start: a second look shows that nothing moves. Sure at the fourth: the fifth shows it. Never sure: all six.
    assert result.steps.tolist() == [[2], [5], [6]]
    assert denoiser.asked == [[0, 1, 2], [0, 1, 2], [1, 2], [1, 2], [1, 2], [2]]
    # The rows that go on keep their own signals.
    torch.testing.assert_close(denoiser.signals[2], denoiser.logits[1][1:] / temperature(1, CONFIG))
    assert result.row(0) == target_of(0, 1) and result.row(1) == target_of(1, 3)


def target_of(row: int, length: int) -> list[int]:
    denoiser = ScriptedDenoiser(row + 1, patience=[0] * (row + 1))
    denoiser.encoded[row] = [0] * length
    return denoiser.target(row)


@pytest.mark.parametrize("threshold, steps", [(1e-30, 6), (0.002, 3), (0.01, 2)])
def test_a_row_stops_when_its_mean_entropy_is_under_the_threshold(threshold, steps):
    """One position in four has an entropy of 0.025 (less as the temperature falls), the others none; stability alone stops nothing."""
    denoiser = ScriptedDenoiser(1, patience=[0], first_logit=8.0)
    result = run(denoiser, [[5]], replace(CONFIG, max_new_tokens=C, confidence_threshold=threshold))
    assert result.steps.tolist() == [[steps]]


class AheadDenoiser(ScriptedDenoiser):
    runs_ahead = True


@pytest.mark.parametrize("far, asked", [
    (sampler.FAR, [[0, 1, 2], [0, 1, 2], [1, 2], [1, 2], [1, 2], [2]]), (0, [[0, 1, 2]] * 3 + [[1, 2]] * 3)], ids=["seldom", "always"])
def test_steps_that_run_ahead_change_nothing(monkeypatch, far, asked):
    """Asked for before the host looks, rows that settle go through one more step, which counts for nothing."""
    monkeypatch.setattr(sampler, "FAR", far)
    prompts, config = [[5], [6, 7, 8], [9, 9]], replace(CONFIG, max_new_tokens=2 * C)
    denoiser, seen = AheadDenoiser(3, patience=[0, 3, 9]), []
    got, want = run(denoiser, prompts, config, seen.append), run(ScriptedDenoiser(3, patience=[0, 3, 9]), prompts, config)
    assert torch.equal(got.tokens, want.tokens) and got.steps.tolist() == want.steps.tolist() == [[2, 2], [5, 5], [6, 6]]
    assert denoiser.asked == asked * 2
    assert [step.rows for step in seen[:6]] == [(0, 1, 2), (0, 1, 2), (1, 2), (1, 2), (1, 2), (2,)]


def test_the_best_guess_is_committed_when_the_steps_run_out():
    steps = []
    result = run(ScriptedDenoiser(1, patience=[9]), [[5]], replace(CONFIG, max_new_tokens=C), observe=steps.append)
    assert torch.equal(result.tokens, steps[-1].argmax) and not torch.equal(result.tokens, steps[-1].canvas)


def test_every_committed_token_is_encoded_once_and_ended_rows_no_more():
    denoiser = ScriptedDenoiser(2, patience=[0, 1], ends={1: 3})
    result = run(denoiser, [[5], [6, 7, 8]])
    assert result.tokens.shape == (2, 3 * C)
    assert denoiser.encoded[0] == [5] + result.row(0)[: 2 * C] and denoiser.encoded[1] == [6, 7, 8]
    assert result.steps.tolist() == [[2, 2, 2], [3, 0, 0]]
    assert result.row(1) == [denoiser.target(1)[0], EOS] and result.tokens[1, 2:].eq(PAD).all()
    assert result.ended.tolist() == [False, True] and result.lengths.tolist() == [3 * C, 2]


def test_generation_stops_when_all_rows_have_ended():
    denoiser = ScriptedDenoiser(2, patience=[0, 0], ends={0: 1 + C, 1: 3})
    result = run(denoiser, [[5], [6, 7, 8]])
    assert result.tokens.shape == (2, 2 * C) and result.ended.all() and result.lengths.tolist() == [C + 2, 2]


def test_counts():
    result = run(ScriptedDenoiser(2, patience=[0, 1], ends={1: 3}), [[5], [6, 7, 8]])
    assert result.forwards.tolist() == [6, 3]
    assert result.tokens_per_forward.tolist() == [3 * C / 6, 2 / 3]
    assert result.effective_steps.tolist() == [2, 3]


def test_max_new_tokens_is_rounded_up_to_whole_canvases():
    result = run(ScriptedDenoiser(1, patience=[0]), [[5]], replace(CONFIG, max_new_tokens=C + 1))
    assert result.tokens.shape == (1, 2 * C)


def test_self_conditioning_starts_anew_with_each_canvas_and_is_the_tempered_logits():
    denoiser = ScriptedDenoiser(1, patience=[0])
    run(denoiser, [[5]], replace(CONFIG, max_new_tokens=2 * C))
    assert [signal is None for signal in denoiser.signals] == [True, False, True, False]
    assert denoiser.signals[1].max() == pytest.approx(30.0 / 0.8)


@pytest.mark.parametrize("patience", [[2, 4, 0], [1, 1, 9]])
def test_a_row_does_not_depend_on_its_batch(patience):
    """The same row alone, under its own key, gives the same canvases step by step."""
    prompts, together = [[5], [6, 7, 8], [9, 9]], []
    result = run(ScriptedDenoiser(3, patience), prompts, observe=together.append)
    alone = []
    single = ScriptedDenoiser(1, [patience[1]])
    single.target = lambda row: target_of(1, len(single.encoded[0]))
    lone = run(single, prompts[1:2], observe=alone.append, row_keys=[1])
    assert torch.equal(lone.tokens[0], result.tokens[1])
    seen = [step.canvas[step.rows.index(1)] for step in together if 1 in step.rows]
    assert len(seen) == len(alone) and all(torch.equal(a, b.canvas[0]) for a, b in zip(seen, alone, strict=True))


def test_observe_sees_accepted_samples_and_fresh_noise():
    steps, denoiser = [], ScriptedDenoiser(2, patience=[0, 9])
    run(denoiser, [[5], [6]], replace(CONFIG, max_new_tokens=C), observe=steps.append)
    draws = CounterDraws(0, canvas_length=C, vocab_size=V)
    assert [step.rows for step in steps] == [(0, 1)] * 2 + [(1,)] * 4
    assert steps[0].accepted[0].all() and torch.equal(steps[0].canvas[0], steps[0].argmax[0])  # sure: the sample is the best guess
    assert not steps[0].accepted[1].all()
    sample = read_logits(denoiser.logits[0], temperature(0, CONFIG), draws.uniforms([0, 1], 0, 0), torch.float32).sample
    rejected = ~steps[0].accepted[1]
    assert torch.equal(steps[0].canvas[1][~rejected], sample[1][~rejected]) and not torch.equal(sample[1], steps[0].argmax[1])
    assert torch.equal(steps[0].canvas[1][rejected], draws.fresh_tokens([1], 0, 0)[0][rejected])
    assert [step.settled.tolist() for step in steps[:2]] == [[False, False], [True, False]] and steps[-1].settled.all()


@pytest.mark.parametrize("setting, message", [
    ({"max_denoising_steps": 0}, "--max-denoising-steps 0: must be at least 1"),
    ({"t_max": 0.3}, "--t-max 0.3: the temperature cannot rise over the steps; set --t-min to at most 0.3"),
    ({"t_min": 0.0}, "--t-min 0.0: must be above 0"),
    ({"entropy_bound": float("nan")}, "--entropy-bound nan"),
])
def test_settings_out_of_range_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        run(ScriptedDenoiser(1, patience=[0]), [[5]], replace(CONFIG, **setting))


@pytest.mark.parametrize("prompts, message", [
    ([[5] * 29], "29 tokens and 3 canvases of 4 .* 40 positions; shorten the prompt to 28"),
    ([[5, V]], f"token {V}, outside the model's vocabulary of {V}"),
    ([[5], [5]], "2 prompts for a denoiser of 1 rows"),
])
def test_prompts_that_do_not_fit_are_refused_before_anything_runs(prompts, message):
    denoiser = ScriptedDenoiser(1, patience=[0])
    with pytest.raises(ValueError, match=message):
        run(denoiser, prompts)
    assert denoiser.encoded == [[]]
    run(denoiser, [[5] * 28])  # the remedy


# The oracle's generate imports torch's compiler, which meets a deprecated decorator of torch's own.
from_transformers = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")


@pytest.fixture
def suite(monkeypatch):
    """The verification suite of the sampler, and transformers with it."""
    transformers = pytest.importorskip("transformers", minversion="5.23", reason="the reference needs transformers >= 5.23")
    torch.set_num_threads(1)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "tools"))
    transformers.utils.logging.disable_progress_bar()
    from verification import sampler as suite

    return suite


@pytest.mark.slow
@from_transformers
@pytest.mark.parametrize("case_name", ["few steps", "confident is enough"])
def test_generate_decides_as_transformers_does(suite, case_name):
    prepared, trace = prepared_case(suite, case_name)
    assert not any(suite.differences(prepared.run, trace).values())
    # Other draws: the comparison must notice.
    other = suite.CounterDraws(prepared.seed + 1, canvas_length=suite.CANVAS_LENGTH, vocab_size=512)
    denoiser = suite.TransformersDenoiser(prepared.model, prepared.case.batch)
    again = suite.our_generate(denoiser, prepared.prompts, prepared.case.config(), prepared.eos_ids, other)
    found = suite.differences(again, trace)
    assert found["canvas"] > 0 and found["tokens"] > 0


@pytest.mark.slow
@from_transformers
def test_generate_with_our_model_decides_as_transformers_does(suite):
    prepared, trace = prepared_case(suite, "few steps")
    session = suite.our_session(prepared.model, prepared.case.batch)
    ours = suite.our_generate(session, prepared.prompts, prepared.case.config(), prepared.eos_ids, prepared.draws)
    assert not any(suite.differences(ours, trace).values())


def prepared_case(suite, name: str):
    (case,) = [case for case in suite.CASES if case.name == name]
    prepared = suite.prepare(case, 0)
    return prepared, suite.oracle_generate(prepared.model, prepared.prompts, case.config(), prepared.eos_ids, prepared.draws)
