"""A toy model and batches for tests: every weight random, every norm, scale and scalar away from 1."""
from __future__ import annotations

import dataclasses

import numpy as np
import torch

from megatron_dllm.config import PRESETS, MoEConfig, ObjectiveConfig
from megatron_dllm.diffusion.batch_plan import BatchPlan, RowRequest, fit_example, plan_batch
from megatron_dllm.diffusion.inputs import MicrobatchInputs
from megatron_dllm.diffusion.passes import PassOptions, microbatch_inputs
from megatron_dllm.diffusion.random import DrawKey, Stream
from megatron_dllm.diffusion.streams import build_streams
from megatron_dllm.models.diffusion_gemma.model import DiffusionGemma
from megatron_dllm.parallel import ParallelContext
from megatron_dllm.tensor_parallel.initialization import Initializer
from megatron_dllm.transformer.recompute import Recompute

CONFIG = dataclasses.replace(PRESETS["toy"], num_layers=3, layer_types=("sliding", "sliding", "full"), window_size=7, canvas_length=4,
                             vocab_size=61, max_position_embeddings=256)
LENGTHS = ((5, 6), (0, 3), (9, 12), (2, 17), (1, 1), (20, 4), (3, 8), (11, 5))


def toy_model(dtype=torch.float64, *, recompute=frozenset(), config=CONFIG, seed=5, context=None,
              moe=MoEConfig()) -> DiffusionGemma:  # noqa: B008 (immutable)
    """A model whose initial values are nowhere special, on one process or in a context that does not cut weights."""
    model = DiffusionGemma(
        config, context=context or ParallelContext.single(), init=Initializer(seed, 0.15), dtype=dtype, recompute=Recompute(recompute),
        moe=moe)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.ndim == 1:
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return model


def toy_plan(objective=None, lengths=LENGTHS, *, micro_batch_size=None, config=CONFIG, seed=3, packed=False,
             seq_length=128) -> BatchPlan:
    """A plan of examples with these (prompt, response) lengths, a row each, or all in one row."""
    keys = [DrawKey(seed, Stream.TRAIN, 0, i, 0) for i in range(len(lengths))]
    fits = [fit_example(*pair, seq_length=seq_length, canvas_length=config.canvas_length) for pair in lengths]
    rows = [RowRequest([i], [key], [fit], [False]) for i, (key, fit) in enumerate(zip(keys, fits, strict=True))]
    if packed:
        rows = [RowRequest(list(range(len(lengths))), keys, fits, [False] * len(lengths))]
    return plan_batch(rows, objective or ObjectiveConfig(), micro_batch_size=micro_batch_size or len(rows))


def toy_tokens(index: int, length: int, config=CONFIG) -> np.ndarray:
    """The tokens of an example, by its index."""
    return np.random.default_rng(index).integers(3, config.vocab_size, length).astype(np.int32)


def toy_inputs(plan: BatchPlan, microbatch=0, *, objective=None, config=CONFIG, edit=None, dtype=torch.float64,
               dropout=False, passes="shared", second_loop=False, **options) -> MicrobatchInputs:
    """A microbatch of the plan as the model reads it; `edit` may change its streams first. `options`: further PassOptions."""
    objective = objective or ObjectiveConfig()
    chosen = plan.microbatches[0][microbatch]
    tokens = [toy_tokens(e.index, e.fit.prompt + e.fit.response, config) for e in chosen.examples]
    streams = build_streams(chosen, tokens, objective, plan.denominators, vocab_size=config.vocab_size, fill_token=config.fill_token_id,
                            dropout=dropout)
    options = PassOptions(dtype, objective.has_uniform_null, objective.is_leave_one_out, **options)
    return microbatch_inputs(edit(streams) if edit else streams, config, options, second_loop=second_loop, passes=passes)


def gradients(model: DiffusionGemma, plan: BatchPlan, **options) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of a whole plan on one process, summed over its microbatches."""
    model.zero_grad()
    loss = 0.0
    for number in range(len(plan.microbatches[0])):
        terms = model(toy_inputs(plan, number, **options))
        terms.total.backward()
        loss += terms.total.item()
    return loss, {name: p.grad.clone() for name, p in model.named_parameters()}
