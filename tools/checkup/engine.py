"""Transformer Engine tried on small cases, in bf16 and FP8, against float64."""
from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_dllm.config import MoEConfig, TrainingConfig
from megatron_dllm.kernels import reference
from megatron_dllm.moe.experts import looped_linear
from megatron_dllm.parallel import ParallelContext
from megatron_dllm.tensor_parallel import linear_cross_entropy
from megatron_dllm.transformer.core_attention import attend_dense
from megatron_dllm.transformer.packed_attention import packed_plan
from megatron_dllm.transformer.rotary import inverse_frequencies, norm_and_rotate_pair, rotary_table
from megatron_dllm.transformer_engine import Engine, load_engine
from megatron_dllm.transformer_engine.cross_entropy import engine_cross_entropy
from megatron_dllm.transformer_engine.experts import grouped_product
from megatron_dllm.transformer_engine.linear import EngineLinear
from megatron_dllm.transformer_engine.norms import engine_rms_norm
from megatron_dllm.transformer_engine.rotary import EngineRotary

from .layers import NO_CUDA, attention_inputs, visibility
from .trials import Trial, compared, numbers

TOKENS, HIDDEN, INNER = 37, 128, 256
COUNTS = (17, 0, 20)  # rows of three experts
FP8_TOLERANCE = 0.15  # of the largest number: e4m3 rounds to 4 bits, gradients' e5m2 to 3
KINDS = {"bfloat16": TrainingConfig(), "FP8 tensorwise": TrainingConfig(fp8_format="hybrid"),
         "FP8 blockwise": TrainingConfig(fp8_format="hybrid", fp8_recipe="blockwise")}


def trials(device: torch.device) -> Iterator[Trial]:
    """Norms, attention, rotary, cross entropy, linear layers and experts."""
    absent = NO_CUDA if device.type != "cuda" else None if find_spec("transformer_engine") else "transformer_engine is not installed"

    def norm() -> tuple[float, float]:
        engine_of(TrainingConfig(), device)
        inputs = numbers(TOKENS, HIDDEN, device=device, dtype=torch.bfloat16), numbers(HIDDEN, device=device, dtype=torch.bfloat16)
        return compared(partial(engine_rms_norm(), eps=1e-6), partial(reference.rms_norm, eps=1e-6), inputs)

    for role, measure in (("RMSNorm", norm), ("attention, sliding, head 256", partial(attention_errors, device)),
                          ("rotary, full, head 512", partial(rotary_errors, device)), ("cross entropy", partial(loss_errors, device))):
        yield Trial(role, "Transformer Engine, bfloat16", measure, absent, optional=True)
    for kind, training in KINDS.items():
        for role, measure in (("linear layer", linear_errors), ("experts' product", grouped_errors)):
            yield Trial(role, f"Transformer Engine, {kind}", partial(measure, training, device), absent, optional=True)


def engine_of(training: TrainingConfig, device: torch.device) -> Engine:
    return load_engine(training, MoEConfig(moe_grouped_gemm_backend="transformer_engine"), device)


def attention_errors(device: torch.device) -> tuple[float, float]:
    """(error, allowed) of clean tokens and canvases together."""
    engine_of(TrainingConfig(), device)
    seen, window = visibility(), 24
    plan = packed_plan(seen, window, device)
    oracle = partial(attend_dense, visibility=seen.windowed(window))
    return compared(plan.attend, oracle, attention_inputs(seen, 256, torch.bfloat16, device))


def rotary_errors(device: torch.device) -> tuple[float, float]:
    """The same of queries and keys at far positions, whose first pairs alone turn."""
    engine_of(TrainingConfig(), device)
    size = 512
    table = rotary_table(1000 * torch.arange(TOKENS, device=device), inverse_frequencies(size, 1e6, 0.25, device))
    shapes = (TOKENS, 4, size), (TOKENS, 2, size), (size,), (size,)
    inputs = [numbers(*shape, device=device, dtype=torch.bfloat16, seed=n) for n, shape in enumerate(shapes)]
    turn = EngineRotary(engine_rms_norm())
    return compared(lambda *x: turn(*x, table, 1e-6), lambda *x: norm_and_rotate_pair(*x, table, 1e-6), inputs)


def loss_errors(device: torch.device) -> tuple[float, float]:
    """The same of capped logits, to the hidden states and the weight."""
    vocabulary, draw = 5000, torch.Generator().manual_seed(3)
    targets, weights = torch.randint(0, vocabulary, (TOKENS,), generator=draw).to(device), torch.rand(TOKENS, generator=draw).to(device)
    score = partial(linear_cross_entropy, targets=targets, token_weights=weights, softcap=30.0, tp=ParallelContext.single(device).tp,
                    vocab_size=vocabulary)
    logit_loss = engine_cross_entropy(engine_of(TrainingConfig(), device))
    inputs = _inputs(device, TOKENS, vocabulary, HIDDEN)
    return compared(lambda *x: score(*x, logit_loss=logit_loss).loss, lambda *x: score(*x).loss, inputs)


def linear_errors(training: TrainingConfig, device: torch.device) -> tuple[float, float]:
    """(error, allowed) of a linear layer whose tokens FP8 must fill up."""
    error, allowed = compared(EngineLinear(engine_of(training, device), HIDDEN, INNER), F.linear, _inputs(device, TOKENS, INNER, HIDDEN))
    return error, FP8_TOLERANCE if training.fp8_format else allowed


def grouped_errors(training: TrainingConfig, device: torch.device) -> tuple[float, float]:
    """The same of three experts, one of them without rows."""
    counts = torch.tensor(COUNTS, device=device)
    product = grouped_product(engine_of(training, device), len(COUNTS), [(INNER, HIDDEN)], device)
    error, allowed = compared(lambda x, w: product(x, w, counts), lambda x, w: looped_linear(x, w, counts),
                              _inputs(device, sum(COUNTS), len(COUNTS), INNER, HIDDEN))
    return error, FP8_TOLERANCE if training.fp8_format else allowed


def _inputs(device: torch.device, tokens: int, *shape: int) -> list[Tensor]:
    return [numbers(*size, device=device, dtype=torch.bfloat16) for size in ((tokens, shape[-1]), shape)]
