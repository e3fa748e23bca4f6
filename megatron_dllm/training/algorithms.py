"""What steps the masters: AdamW of our own, of torch, Transformer Engine or apex (--optimizer-backend), each in a few launches."""
from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..config import OptimizerConfig
from ..kernels.launch import takes

if TYPE_CHECKING:
    from .kernel_adamw import KernelAdamW

# Module of each package's FusedAdam. Both keep the moments by torch's names, and the number of steps in the parameter group.
PACKAGES = {"te": "transformer_engine.pytorch.optimizers", "apex": "apex.optimizers"}


@dataclass(frozen=True)
class Algorithm:
    """make: parameter groups of torch's form (params, weight_decay) and the settings -> what steps them.

    counts_in_groups  the number of steps is an int of each group; otherwise a tensor of each parameter's state
    divides           fp32 gradients are divided by its attribute `grad_scale`, a tensor or None, while they are read for the update
    writes_copies     it gives the masters' new values to the tensors (or None) that each group has as "copies"
    skips             a `grad_scale` that is not a number has it update nothing, and its `take_back` uncounts such a step
    """

    make: Callable[[list[dict], OptimizerConfig], torch.optim.Optimizer | KernelAdamW]
    counts_in_groups: bool = False
    divides: bool = False
    writes_copies: bool = False
    skips: bool = False


def _torch_adamw(groups: list[dict], config: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps, fused=True)


def _kernel_adamw(groups: list[dict], config: OptimizerConfig) -> KernelAdamW:
    from .kernel_adamw import KernelAdamW  # Triton is there with CUDA alone

    return KernelAdamW(groups, lr=config.lr, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps)


def _package_adamw(backend: str, groups: list[dict], config: OptimizerConfig) -> torch.optim.Optimizer:
    try:
        package = importlib.import_module(PACKAGES[backend])
    except ImportError as error:
        raise ValueError(
            f"--optimizer-backend {backend} needs {PACKAGES[backend]} ({error}); install it with tools/install_gpu.sh --{backend}, or set "
            "--optimizer-backend torch") from error
    return package.FusedAdam(
        groups, lr=config.lr, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps, adam_w_mode=True, bias_correction=True)


def _sgd(groups: list[dict], config: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=config.lr)


adamw = Algorithm(_torch_adamw, divides=True)
sgd = Algorithm(_sgd)  # plain gradient descent: for comparisons, since it does not hide the gradient's size
by_kernel = Algorithm(_kernel_adamw, counts_in_groups=True, divides=True, writes_copies=True, skips=True)
BACKENDS = {"local": by_kernel, "torch": adamw,
            **{name: Algorithm(partial(_package_adamw, name), counts_in_groups=True) for name in PACKAGES}}


def algorithm_of(backend: str, trained: Sequence[Tensor]) -> Algorithm:
    """Of --optimizer-backend for these parameters, whose masters are in fp32 at least. `local` is the kernel for fp32 masters on a CUDA
    device, and torch's AdamW for others: the same on ranks that step none of the pieces of parameters which they share."""
    if backend == "local" and not (trained and takes(*trained)):
        return adamw
    return BACKENDS[backend]
