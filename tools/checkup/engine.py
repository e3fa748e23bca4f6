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
from megatron_dllm.transformer_engine import Engine, load_engine
from megatron_dllm.transformer_engine.experts import grouped_product
from megatron_dllm.transformer_engine.linear import EngineLinear
from megatron_dllm.transformer_engine.norms import engine_rms_norm

from .layers import NO_CUDA
from .trials import Trial, compared, numbers

TOKENS, HIDDEN, INNER = 37, 128, 256
COUNTS = (17, 0, 20)  # rows of three experts
FP8_TOLERANCE = 0.15  # of the largest number: e4m3 rounds to 4 bits, gradients' e5m2 to 3
KINDS = {"bfloat16": TrainingConfig(), "FP8 tensorwise": TrainingConfig(fp8_format="hybrid"),
         "FP8 blockwise": TrainingConfig(fp8_format="hybrid", fp8_recipe="blockwise")}


def trials(device: torch.device) -> Iterator[Trial]:
    """Norms, linear layers and experts."""
    absent = NO_CUDA if device.type != "cuda" else None if find_spec("transformer_engine") else "transformer_engine is not installed"

    def norm() -> tuple[float, float]:
        engine_of(TrainingConfig(), device)
        inputs = numbers(TOKENS, HIDDEN, device=device, dtype=torch.bfloat16), numbers(HIDDEN, device=device, dtype=torch.bfloat16)
        return compared(partial(engine_rms_norm(), eps=1e-6), partial(reference.rms_norm, eps=1e-6), inputs)

    yield Trial("RMSNorm", "Transformer Engine, bfloat16", norm, absent, optional=True)
    for kind, training in KINDS.items():
        for role, measure in (("linear layer", linear_errors), ("experts' product", grouped_errors)):
            yield Trial(role, f"Transformer Engine, {kind}", partial(measure, training, device), absent, optional=True)


def engine_of(training: TrainingConfig, device: torch.device) -> Engine:
    return load_engine(training, MoEConfig(moe_grouped_gemm_backend="transformer_engine"), device)


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
