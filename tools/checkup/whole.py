"""A trial of everything together: loss and gradients of the toy model on this device, against the same model in float64 on the CPU."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from megatron_dllm.config import PRESETS, ObjectiveConfig
from megatron_dllm.diffusion.batch_plan import RowRequest, fit_example, plan_batch
from megatron_dllm.diffusion.inputs import to_device
from megatron_dllm.diffusion.passes import PassOptions, microbatch_inputs
from megatron_dllm.diffusion.random import DrawKey, Stream
from megatron_dllm.diffusion.streams import build_streams
from megatron_dllm.models.diffusion_gemma.model import DiffusionGemma
from megatron_dllm.parallel import ParallelContext
from megatron_dllm.tensor_parallel import Initializer
from megatron_dllm.transformer.recompute import Recompute

from .trials import TOLERANCES, Trial, relative

LENGTHS = ((5, 20), (0, 9), (40, 12))  # of prompt and response


ROUNDING = 2.0**-24  # of fp32
FACTOR = 10  # rounding comes in at every operation, not in the weights alone


def trials(device: torch.device) -> Iterator[Trial]:
    """In fp32: in bf16 a token's expert may be another, which is no error."""
    where = f"fp32 on {device.type}"
    compared = Compared(device)
    yield Trial("toy model, loss", where, lambda: (compared.loss_error, TOLERANCES[torch.float32]))
    yield Trial("toy model, gradients", where, lambda: (compared.gradient_error, FACTOR * compared.conditioning))


@dataclass(frozen=True)
class Compared:
    """The device against float64; and how far the gradients in float64 go when the weights are moved by a rounding of fp32."""

    device: torch.device

    @cached_property
    def exact(self) -> tuple[Tensor, Tensor]:
        return loss_and_gradients(torch.device("cpu"), torch.float64)

    @cached_property
    def ours(self) -> tuple[Tensor, Tensor]:
        return loss_and_gradients(self.device, torch.float32)

    @property
    def loss_error(self) -> float:
        return relative(self.ours[0], self.exact[0])

    @property
    def gradient_error(self) -> float:
        """Of all as one vector."""
        return relative(self.ours[1], self.exact[1])

    @property
    def conditioning(self) -> float:
        return relative(loss_and_gradients(torch.device("cpu"), torch.float64, moved=ROUNDING)[1], self.exact[1])


def loss_and_gradients(device: torch.device, dtype: torch.dtype, *, moved: float = 0.0) -> tuple[Tensor, Tensor]:
    """The loss, and every parameter's gradient, one after the other, on the CPU; weights are off by normal numbers times `moved`."""
    config, objective = PRESETS["toy"], ObjectiveConfig()
    model = DiffusionGemma(config, context=ParallelContext.single(device), init=Initializer(5, 0.15), dtype=dtype,
                           recompute=Recompute(frozenset()))
    draw = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for parameter in model.parameters() if moved else ():
            parameter.mul_(1 + moved * torch.randn(parameter.shape, generator=draw).to(parameter))
    keys = [DrawKey(4, Stream.TRAIN, 0, n, 0) for n in range(len(LENGTHS))]
    fits = [fit_example(*lengths, seq_length=64, canvas_length=config.canvas_length) for lengths in LENGTHS]
    rows = [RowRequest([n], [key], [fit], [False]) for n, (key, fit) in enumerate(zip(keys, fits, strict=True))]
    plan = plan_batch(rows, objective, micro_batch_size=len(rows))
    microbatch = plan.microbatches[0][0]
    tokens = [np.random.default_rng(n).integers(3, config.vocab_size, sum(lengths)).astype(np.int32) for n, lengths in enumerate(LENGTHS)]
    streams = build_streams(microbatch, tokens, objective, plan.denominators, vocab_size=config.vocab_size, fill_token=config.fill_token_id)
    inputs = microbatch_inputs(streams, config, PassOptions(dtype, objective.has_uniform_null, objective.is_leave_one_out))
    total = model(to_device(inputs, device)).total
    total.backward()
    return total.detach().cpu().view(1), torch.cat([p.grad.flatten().cpu().double() for p in model.parameters() if p.grad is not None])
