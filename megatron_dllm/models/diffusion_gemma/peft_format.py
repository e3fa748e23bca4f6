"""Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors, by transformers' names, for PeftModel.from_pretrained.

transformers runs the shared stack as two trees of modules whose weights are tied, and PEFT adapts each tree: both get a copy of every
adapter. PEFT can therefore load them, and cannot merge them (it would add each one twice to the same weight): tools/checkpoint.py
merge-adapters does. Experts' weights are parameters, not modules (target_parameters): the wrapper of gate_up_proj lies inside that of
down_proj, and the experts' matrices are stacked, A [E * rank, D] and B [F, rank * E].
"""
from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ...config import LoRAConfig, ModelConfig
from .huggingface import Link, links
from .lora import TARGETS

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
DECODER, ENCODER = "model.decoder.layers.", "model.encoder.language_model.layers."
STACK = r"model\.(decoder|encoder\.language_model)\.layers\.\d+\."
# Target -> the names of transformers' modules, whole.
MODULES = {
    "attention": STACK + r"self_attn\.[qkvo]_proj",
    "mlp": STACK + r"mlp\.(gate|up|down)_proj",
    "router": STACK + r"router\.proj",
    "self_conditioning": r"model\.decoder\.self_conditioning\.(gate|up|down)_proj",
}
PARAMETERS = {"experts": ("experts.gate_up_proj", "experts.down_proj")}
# Where the adapter of an experts' weight lies, by the weight's name in transformers.
WRAPPED = {"gate_up_proj": "base_layer", "down_proj": ""}

ReadWhole = Callable[[str], Tensor]  # a whole tensor of ours by name


def adapted(config: ModelConfig, lora: LoRAConfig) -> Iterator[tuple[Link, str]]:
    """The weights that have adapters, and the names of these without their ending .a or .b."""
    for link in links(config):
        module, _, parameter = link.ours.rpartition(".")
        for target in lora.lora_targets:
            if not re.fullmatch(TARGETS[target], module):
                continue
            if target == "experts":
                yield link, f"{link.ours}_adapter"
            elif parameter == "weight":  # a router has others beside it
                yield link, f"{module}.adapter"


def adapter_names(config: ModelConfig, lora: LoRAConfig) -> list[str]:
    """Our tensors in the order in which `write_adapters` reads them: where reading gathers over ranks, the others must follow."""
    return [f"{name}.{part}" for _, name in adapted(config, lora) for part in "ab"]


def adapter_tensors(config: ModelConfig, lora: LoRAConfig, read: ReadWhole) -> Iterator[tuple[str, Tensor]]:
    """(PEFT's name, tensor) of every adapter, in both trees."""
    for link, name in adapted(config, lora):
        a, b = read(f"{name}.a"), read(f"{name}.b")
        for module, low, high in _to_theirs(link, a, b):
            for tree in (module, module.replace(DECODER, ENCODER)) if module.startswith(DECODER) else (module,):
                yield f"base_model.model.{tree}.lora_A.weight", low
                yield f"base_model.model.{tree}.lora_B.weight", high


def _to_theirs(link: Link, a: Tensor, b: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(module, A, B) of transformers' modules that our weight is."""
    module, _, which = link.theirs[0].rpartition(".")
    if which in WRAPPED and module.endswith(".experts"):
        stacked = b.flatten(1, -2).permute(1, 2, 0)  # [F, rank, E]
        yield f"{module}.{WRAPPED[which]}".removesuffix("."), a.flatten(0, 1), stacked.flatten(1)
    elif link.kind == "parts":
        for theirs, low, high in zip(link.theirs, a, b, strict=True):
            yield theirs.removesuffix(".weight"), low, high
    else:
        yield module, a, b


def adapter_settings(lora: LoRAConfig, base: str) -> dict:
    """adapter_config.json. `base`: the model that PEFT loads where it is not given one."""
    modules = "|".join(MODULES[target] for target in lora.lora_targets if target in MODULES)
    return {
        "peft_type": "LORA", "task_type": None, "base_model_name_or_path": base or None, "r": lora.lora_rank,
        # PEFT wants a whole number where it is one.
        "lora_alpha": int(lora.lora_alpha) if lora.lora_alpha == int(lora.lora_alpha) else lora.lora_alpha,
        "lora_dropout": lora.lora_dropout, "bias": "none", "use_rslora": False, "fan_in_fan_out": False, "inference_mode": True,
        "target_modules": modules or [],
        "target_parameters": [name for target in lora.lora_targets for name in PARAMETERS.get(target, ())] or None}


def write_adapters(path: Path, config: ModelConfig, lora: LoRAConfig, base: str, read: ReadWhole) -> None:
    """Write the directory. It appears under its name only when whole; ValueError when the name is taken."""
    if path.exists() and any(path.iterdir() if path.is_dir() else [path]):
        raise ValueError(f"{path} exists and is not empty: choose another directory, or remove it")
    # A copy of each, since the two trees' are one tensor of ours, which a file of safetensors may not hold twice.
    tensors = {name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
               for name, tensor in adapter_tensors(config, lora, read)}
    draft = path.with_name(path.name + ".partial")
    draft.mkdir(parents=True, exist_ok=True)
    save_file(tensors, draft / WEIGHTS, metadata={"format": "pt"})
    (draft / CONFIG).write_text(json.dumps(adapter_settings(lora, base), indent=2) + "\n", encoding="utf-8")
    if path.exists():
        path.rmdir()
    draft.rename(path)


def with_adapter(rectangle: Tensor, offset: tuple[int, ...], a: Tensor, b: Tensor, scale: float) -> Tensor:
    """A rectangle of a weight of ours from `offset`, with scale * B A added, in fp32 at least; a and b are the whole adapter.

    Their dimensions but the last two are the weight's own leading ones (parts, experts); those that A lacks share it.
    """
    places = [slice(start, start + size) for start, size in zip(offset, rectangle.shape, strict=True)]
    shared = b.dim() - a.dim()
    low = a[(*places[:a.dim() - 2], slice(None), places[-1])]
    low = low.reshape(*low.shape[:-2], *[1] * shared, *low.shape[-2:])
    wide = torch.promote_types(rectangle.dtype, torch.float32)
    return rectangle.to(wide) + (b[tuple(places[:-1])].to(wide) @ low.to(wide)) * scale
