"""Low-rank adapters of a model: which of its layers get them, and what then stays as it is.

The stack is shared by both passes, and so are its adapters. Everything else is frozen: held once, in the compute dtype, without master,
gradient or state.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch

from ...config import LoRAConfig
from ...moe.adapters import ExpertAdapter, RouterAdapter
from ...moe.experts import Experts
from ...moe.router import Router
from ...tensor_parallel import ColumnParallelLinear, RowParallelLinear
from ...tensor_parallel.adapters import ColumnAdapter, LowRank, RowAdapter
from ...tensor_parallel.initialization import Init
from ...transformer.attention import SelfAttention
from ...transformer.precision import freeze
from .model import DiffusionGemma

# Target -> the names of its modules, whole. Linear layers, which transformers has no place for, are not among them.
TARGETS = {
    "attention": r"layers\.\d+\.attention\.[qkvo]_proj",
    "mlp": r"layers\.\d+\.mlp\.(gate_up|down)",
    "router": r"layers\.\d+\.moe\.router",
    "self_conditioning": r"self_conditioning\.mlp\.(gate_up|down)",
    "experts": r"layers\.\d+\.moe\.experts",
}


def add_adapters(model: DiffusionGemma, config: LoRAConfig, init: Init) -> None:
    """Freeze the model, and put adapters, which are trained, beside the layers of the targets.

    ValueError for a target of which a whole model has no layer.
    """
    freeze(model, model.dtype)
    common = LowRank(config.lora_rank, config.lora_alpha, init, model.context, model.dtype, config.lora_dropout)
    linear = tuple(f"layers.{layer}.attention." for layer in model.config.linear_layers)
    for target in config.lora_targets:
        found = [(name, module) for name, module in model.named_modules()
                 if re.fullmatch(TARGETS[target], name) and not name.startswith(linear)]
        if not found and model.context.pp.size == 1:
            raise ValueError(f"--lora-targets {target}: the model has no such layers (layer types {', '.join(model.config.layer_types)}); "
                             "leave the target out")
        for name, module in found:
            ADD[type(module)](name, module, common)
    for module in model.modules():
        if isinstance(module, SelfAttention):
            _lay_together([layer for layer in (module.q_proj, module.k_proj, module.v_proj) if layer is not None])


def is_adapter(name: str) -> bool:
    """Whether a parameter's global name is that of an adapter."""
    return re.search(r"adapter\.[ab]$", name) is not None


def is_base(name: str) -> bool:
    """Whether a tensor's global name is that of what adapters stand beside."""
    return not is_adapter(name)


def _lay_together(layers: Sequence[ColumnParallelLinear]) -> None:
    """Have the frozen weights of layers with one input and adapters lie one after the other: they then make one product."""
    if any(layer.factors is None for layer in layers):
        return
    weights = [layer.weight for layer in layers]
    whole = torch.cat([weight.detach() for weight in weights])
    for weight, part in zip(weights, whole.split([len(weight) for weight in weights]), strict=True):
        weight.data = part


def _add_to_column(name: str, linear: ColumnParallelLinear, common: LowRank) -> None:
    linear.adapter = adapter = ColumnAdapter(f"{name}.adapter", linear, common)
    linear.factors = common.factors(adapter.a, adapter.b)


def _add_to_row(name: str, linear: RowParallelLinear, common: LowRank) -> None:
    linear.adapter = adapter = RowAdapter(f"{name}.adapter", linear, common)
    linear.factors = common.factors(adapter.a, adapter.b)


def _add_to_router(name: str, router: Router, common: LowRank) -> None:
    router.adapter = RouterAdapter(f"{name}.adapter", router, common)


def _add_to_experts(name: str, experts: Experts, common: LowRank) -> None:
    experts.gate_up_adapter = ExpertAdapter(f"{name}.gate_up_adapter", experts, "gate_up", common)
    experts.down_adapter = ExpertAdapter(f"{name}.down_adapter", experts, "down", common)


ADD: dict[type, Callable[..., None]] = {
    ColumnParallelLinear: _add_to_column, RowParallelLinear: _add_to_row, Router: _add_to_router, Experts: _add_to_experts}
