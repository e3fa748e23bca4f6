"""The package itself: found, or refused with what to do about it."""
from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import ModuleType

import torch

from ..config import MoEConfig, TrainingConfig

PACKAGE = "transformer_engine.pytorch"
REMEDY = "or set --transformer-impl local"


@dataclass(frozen=True)
class Engine:
    """What layers need of the package.

        package        transformer_engine.pytorch
        recipe         how FP8 products are scaled; None: they are in bf16
        grouped        whether experts go through its GroupedLinear
        rotary         whether it turns queries and keys
        cross_entropy  whether it computes the loss of a chunk's logits

    Attention is not here: a pass carries the plan of whoever computes it (transformer/packed_attention.py).
    """

    package: ModuleType
    recipe: object | None = None
    grouped: bool = False
    rotary: bool = False
    cross_entropy: bool = False

    def precision(self) -> AbstractContextManager:
        """What a module of the package is called in. Around each call alone: a recompute in the backward is then in it too."""
        if self.recipe is None:
            return nullcontext()
        return self.package.autocast(enabled=True, recipe=self.recipe)


def load_engine(training: TrainingConfig, moe: MoEConfig, device: torch.device) -> Engine:
    """Import the package and make the recipe; ValueError, with the remedy, where it is not there or cannot run on `device`."""
    if device.type != "cuda":
        raise ValueError(f"--transformer-impl transformer_engine: its kernels run on CUDA, and this run is on {device}; set --device cuda, "
                         f"{REMEDY}")
    try:
        package = importlib.import_module(PACKAGE)
    except (ImportError, OSError) as error:  # OSError: a library that it loads is not there
        raise ValueError(f"--transformer-impl transformer_engine needs {PACKAGE} ({error}); install it with tools/install_gpu.sh --te, "
                         f"{REMEDY}") from error
    roles = {"grouped": moe.moe_grouped_gemm_backend == "transformer_engine", "rotary": training.rotary_backend == "transformer_engine",
             "cross_entropy": training.cross_entropy_fusion_impl == "te"}
    if training.fp8_format is None:
        return Engine(package, **roles)
    by_blocks = training.fp8_recipe == "blockwise"
    available, why = (package.is_fp8_block_scaling_available if by_blocks else package.is_fp8_available)(return_reason=True)
    if not available:
        raise ValueError(f"--fp8-format {training.fp8_format} --fp8-recipe {training.fp8_recipe}: {why.rstrip('.')}; "
                         "leave --fp8-format out")
    recipes = importlib.import_module("transformer_engine.common.recipe")
    number_format = {"e4m3": recipes.Format.E4M3, "hybrid": recipes.Format.HYBRID}[training.fp8_format]
    make = recipes.Float8BlockScaling if by_blocks else recipes.Float8CurrentScaling
    return Engine(package, make(fp8_format=number_format), **roles)
