"""static_session: a cache at fixed addresses holds what the growing one holds, and recorded steps give what they give one by one."""
from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_dllm.config import GenerationConfig
from megatron_dllm.diffusion.sampler import CounterDraws, generate
from megatron_dllm.kernels.graphs import CudaRecorder
from megatron_dllm.models.diffusion_gemma.inference import Session
from megatron_dllm.models.diffusion_gemma.model import DiffusionGemma
from megatron_dllm.models.diffusion_gemma.static_session import StaticDecoder, can_record
from megatron_dllm.parallel import ParallelContext
from megatron_dllm.tensor_parallel.initialization import Initializer
from tests.unit.toy import CONFIG, toy_model

PROMPTS = [[5, 9, 30], [7] * 20, [11, 12]]
SETTINGS = GenerationConfig(max_new_tokens=4 * CONFIG.canvas_length, max_denoising_steps=5)


class Rerun:
    """A recorder whose recordings call the function again, into the memory of their first result."""

    def __init__(self):
        self.recordings: list[RerunRecording] = []

    def warm_up(self, function):
        return function()

    def record(self, function):
        self.recordings.append(RerunRecording(function))
        return self.recordings[-1]


class RerunRecording:
    def __init__(self, function):
        self.function, self.result, self.replays = function, None, 0

    def replay(self):
        self.replays += 1
        result = self.function()
        if self.result is None:
            self.result = result
        elif isinstance(result, tuple):
            for mine, new in zip(self.result, result, strict=True):
                mine.copy_(new)


def model_on(device: torch.device, dtype: torch.dtype, config=CONFIG) -> DiffusionGemma:
    model = DiffusionGemma(config, context=ParallelContext.single(device), init=Initializer(3, 0.3), dtype=dtype)
    return model.requires_grad_(False).eval()


def generated(session, settings=SETTINGS, prompts=PROMPTS, end=1):
    draws = CounterDraws(1, canvas_length=session.canvas_length, vocab_size=session.vocab_size)
    return generate(session, prompts, settings, eos_ids=(end,), pad_id=0, draws=draws)


def appended(*lengths: int) -> list[torch.Tensor]:
    return [torch.arange(n) * 7 % 50 + 3 for n in lengths]


# Of three rows, what is encoded call by call. The window is 7, so that a ring of 6 wraps; blocks are of 4 tokens.
ENCODED = {
    "nothing": [],
    "unequal prompts": [(3, 20, 1)],
    "canvases": [(3, 20, 1), (4, 4, 4), (4, 4, 4), (4, 4, 4)],
    "rows that ended": [(3, 20, 1), (4, 0, 4), (0, 0, 4), (4, 0, 0)],
    "an empty prompt": [(5, 0, 2), (4, 4, 4), (4, 4, 4)],
    "parts of blocks": [(2, 9, 1), (3, 1, 0), (6, 11, 1), (1, 5, 30)],
}


@pytest.mark.slow
@pytest.mark.parametrize("calls, streams", [*((calls, 1) for calls in ENCODED.values()), (ENCODED["canvases"], 2)], ids=[*ENCODED, "mHC"])
def test_it_holds_what_a_growing_cache_holds(calls, streams):
    config = dataclasses.replace(CONFIG, enable_mhc_connections=streams > 1, mhc_num_residual_streams=streams)
    model = toy_model(config=config)
    fixed, growing = StaticDecoder(model, Rerun, capacity_step=8).session(3), Session(model, 3)
    generator = torch.Generator().manual_seed(2)
    for call in [None, *calls]:
        for session in (fixed, growing):
            if call is not None:
                session.encode(appended(*call))
        for rows in (torch.tensor([0, 1, 2]), torch.tensor([1]), torch.tensor([0, 2])):
            canvas = torch.randint(0, CONFIG.vocab_size, (len(rows), CONFIG.canvas_length), generator=generator)
            signal = torch.randn(*canvas.shape, CONFIG.vocab_size, generator=generator, dtype=torch.float64)
            for logits in (None, signal):
                torch.testing.assert_close(fixed.denoise(canvas, logits, rows), growing.denoise(canvas, logits, rows), rtol=0, atol=1e-11)


@pytest.mark.parametrize("settings", [
    SETTINGS, dataclasses.replace(SETTINGS, confidence_threshold=4.0, stability_threshold=0, max_denoising_steps=3)],
    ids=["all steps", "rows settle"])
def test_replayed_steps_give_the_same_tokens(settings):
    model, recorder = model_on(torch.device("cpu"), torch.float64), Rerun()
    decoder = StaticDecoder(model, lambda: recorder)
    want = generated(Session(model, len(PROMPTS)), settings)
    for got in (generated(StaticDecoder(model, None).session(len(PROMPTS)), settings), generated(decoder.session(len(PROMPTS)), settings)):
        assert torch.equal(got.tokens, want.tokens) and torch.equal(got.steps, want.steps)
    assert sum(recording.replays for recording in recorder.recordings) > 0


def test_recordings_serve_later_canvases_and_sessions():
    model, recorder = model_on(torch.device("cpu"), torch.float64), Rerun()
    decoder = StaticDecoder(model, lambda: recorder)
    never = CONFIG.vocab_size  # an end that no row reaches
    first = generated(decoder.session(3, SETTINGS.max_new_tokens), end=never)
    count = len(recorder.recordings)
    assert count == 2, "one of the step and one of a committed canvas"
    assert torch.equal(generated(decoder.session(3, SETTINGS.max_new_tokens), end=never).tokens, first.tokens)
    other = [[8, 8], [4], [9, 3, 5, 6]]
    want = generated(Session(model, 3), prompts=other, end=never)
    assert torch.equal(generated(decoder.session(3), prompts=other, end=never).tokens, want.tokens)
    assert len(recorder.recordings) == count
    # Of four canvases the step of the first alone ran before it was recorded; of committed ones too.
    assert [r.replays for r in recorder.recordings] == [3 * 4 * SETTINGS.max_denoising_steps - 1, 3 * 3 - 1]


def test_growing_keeps_what_is_held_and_records_anew():
    model, recorders = model_on(torch.device("cpu"), torch.float64), []

    def made():
        recorders.append(Rerun())
        return recorders[-1]

    decoder = StaticDecoder(model, made, capacity_step=8)
    # 20 tokens and a canvas take 24, two more canvases 32.
    assert torch.equal(generated(decoder.session(3)).tokens, generated(Session(model, 3)).tokens)
    assert decoder.workspace(3, 1).capacity == 40
    assert len(recorders) == 3 and all(recorder.recordings for recorder in recorders), "one for each size"
    larger = StaticDecoder(model, None, capacity_step=8).session(3, SETTINGS.max_new_tokens)
    larger.encode(appended(3, 20, 1))
    assert larger.decoder.workspace(3, 1).capacity == 40, "room for all canvases from the start"


def test_an_older_session_is_refused():
    decoder = StaticDecoder(model_on(torch.device("cpu"), torch.float64), None)
    older, others = decoder.session(2), decoder.session(1)
    older.encode(appended(2, 3))
    others.encode(appended(2))
    decoder.session(2).encode(appended(2, 2))
    with pytest.raises(AssertionError, match="this session ended"):
        older.encode(appended(4, 4))


@pytest.mark.gpu
@pytest.mark.parametrize("length", [4, 128])
def test_cuda_graphs_give_the_same_tokens(length):
    """At 128 the full layers take the wide kernels."""
    config = dataclasses.replace(CONFIG, canvas_length=length, global_kv_channels=512, max_position_embeddings=4096)
    model = model_on(torch.device("cuda"), torch.bfloat16, config)
    assert can_record(model)
    settings = dataclasses.replace(SETTINGS, max_new_tokens=3 * length)
    recorded, eager = StaticDecoder(model, lambda: CudaRecorder(model.context.device), 2 * length), StaticDecoder(model, None)
    want = generated(eager.session(len(PROMPTS)), settings)
    for _ in range(2):
        got = generated(recorded.session(len(PROMPTS)), settings)
        assert torch.equal(got.tokens, want.tokens) and torch.equal(got.steps, want.steps)


@pytest.mark.gpu
def test_a_model_that_reads_on_the_host_is_not_recorded():
    assert not can_record(model_on(torch.device("cuda"), torch.float32))
