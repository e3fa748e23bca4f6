"""Building a model: at random from a configuration, or from the weights of a directory."""
from __future__ import annotations

from pathlib import Path

import torch

from ...checkpoint.model_state import load_tensors
from ...config import ModelConfig, RunConfig
from ...parallel import ParallelContext
from ...tensor_parallel.fused_gradient import fuse_gradients, weight_gradients
from ...tensor_parallel.initialization import Constant, DeviceInitializer, Init, Initializer
from ...transformer.gated_delta_fla import use_fla
from ...transformer.precision import freeze
from ...transformer.recompute import Recompute
from ...transformer_engine import install, load_engine
from .lora import add_adapters
from .model import DiffusionGemma
from .stages import model_layout
from .transformers_directory import TransformersDirectory

UNSET = Constant(0.0)  # for weights that are loaded right after


def build_model(run: RunConfig, context: ParallelContext, *, init: Init | None = None, dtype: torch.dtype | None = None) -> DiffusionGemma:
    """The model of a run, or this rank's part of it, with initial weights; frozen parts ask for no gradient and are held in the compute
    dtype. With --pretrained-checkpoint, whose weights replace them, none are drawn but the adapters'."""
    part = model_layout(run).part(context.pp.rank) if context.pp.size > 1 else None
    is_loaded = init is None and run.checkpoint.pretrained_checkpoint is not None
    init = init or initializer(run, context.device)
    model = DiffusionGemma(
        run.model, context=context, init=UNSET if is_loaded else init,
        dtype=dtype or (torch.bfloat16 if run.training.bf16 else torch.float32),
        recompute=Recompute.from_config(run.training, run.moe), moe=run.moe, part=part)
    if run.training.gdn_kernel_backend == "fla":
        use_fla(model, context.device)
    if run.lora.lora_rank is not None:
        add_adapters(model, run.lora, init)
    elif run.objective.freeze_router:
        for block in (*model.layers.values(), *(depth.block for depth in model.mtp)):
            freeze(block.moe.router, model.dtype)
    if run.training.transformer_impl == "transformer_engine":
        install(model, load_engine(run.training, run.moe, context.device))
    if run.training.gradient_accumulation_fusion:
        fuse_gradients(model, weight_gradients(context.device))
    return model


def initializer(run: RunConfig, device: torch.device) -> Init:
    """What draws a run's initial weights."""
    if run.training.use_cpu_initialization or device.type == "cpu":
        return Initializer(run.training.seed, run.model.init_method_std)
    return DeviceInitializer(run.training.seed, run.model.init_method_std, device)


def empty_model(config: ModelConfig, context: ParallelContext, dtype: torch.dtype) -> DiffusionGemma:
    """A model whose weights are about to be loaded, for inference."""
    return DiffusionGemma(config, context=context, init=UNSET, dtype=dtype).requires_grad_(False).eval()


def load_transformers(path: str | Path, context: ParallelContext, dtype: torch.dtype) -> DiffusionGemma:
    """The model of a transformers directory, for inference."""
    source = TransformersDirectory.open(path)
    model = empty_model(source.config, context, dtype)
    load_tensors(model, source, str(path))
    return model
