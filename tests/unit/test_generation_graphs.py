"""inference.Session with a recorder: the steps of a canvas are replayed, and give what they give one by one, bit for bit."""
from __future__ import annotations

import pytest
import torch

from megatron_dllm.config import GenerationConfig
from megatron_dllm.diffusion.sampler import CounterDraws, generate
from megatron_dllm.kernels.graphs import Recording
from megatron_dllm.models.diffusion_gemma.inference import Session, step_recorder
from megatron_dllm.models.diffusion_gemma.model import DiffusionGemma
from megatron_dllm.parallel import ParallelContext
from megatron_dllm.tensor_parallel.initialization import Initializer
from tests.unit.toy import CONFIG

PROMPTS = [[5, 9, 30], [7] * 20, [11, 12]]
SETTINGS = GenerationConfig(max_new_tokens=2 * CONFIG.canvas_length, max_denoising_steps=5)


class Rerun:
    """Recordings that call the function again, into the memory of the first result."""

    def __init__(self):
        self.replays = 0

    def warm_up(self, function):
        return function()

    def record(self, function):
        result = function()

        def replay():
            self.replays += 1
            result.copy_(function())

        return Recording(replay, result)


def model_on(device: torch.device, dtype: torch.dtype) -> DiffusionGemma:
    model = DiffusionGemma(CONFIG, context=ParallelContext.single(device), init=Initializer(3, 0.3), dtype=dtype)
    return model.requires_grad_(False).eval()


def generated(model: DiffusionGemma, recorder) -> torch.Tensor:
    session = Session(model, len(PROMPTS), recorder)
    draws = CounterDraws(1, canvas_length=CONFIG.canvas_length, vocab_size=CONFIG.vocab_size)
    return generate(session, PROMPTS, SETTINGS, eos_ids=(1,), pad_id=0, draws=draws).tokens


def test_replayed_steps_give_the_same_tokens():
    model, recorder = model_on(torch.device("cpu"), torch.float32), Rerun()
    assert torch.equal(generated(model, recorder), generated(model, None))
    assert recorder.replays >= 2 * (SETTINGS.max_denoising_steps - 2)  # both canvases, from the third step on


@pytest.mark.gpu
def test_cuda_graphs_give_the_same_tokens():
    model = model_on(torch.device("cuda"), torch.bfloat16)
    recorder = step_recorder(model)
    assert recorder is not None
    assert torch.equal(generated(model, recorder), generated(model, None))


@pytest.mark.gpu
def test_a_model_that_reads_on_the_host_is_not_recorded():
    assert step_recorder(model_on(torch.device("cuda"), torch.float32)) is None
