"""The released tensors' names and shapes, and ours: one table, read by import and by export (docs/model.md section 6).

Import gives rectangles of our tensors, each from the rectangles of theirs that it needs; export gives theirs piece by piece. An
unexpected, missing or misshapen tensor is an error that names it.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...checkpoint.tensor_files import row_blocks
from ...config import ModelConfig

Offset = tuple[int, ...]
Read = Callable[[str, Offset, Offset], Tensor]  # (name, offset, extent) -> that rectangle of the tensor

# What belongs to the vision tower is carried through import and export untouched.
CARRIED_PREFIXES = ("model.encoder.vision_tower.", "model.encoder.embed_vision.")


@dataclass(frozen=True)
class Link:
    """One tensor of ours and what it is made of. `shape` is ours.

    same     theirs is ours
    parts    theirs are ours along dimension 0 (gate and up; the scalars of the two passes)
    fused    theirs is ours with dimensions 1 and 2 as one
    """

    ours: str
    theirs: tuple[str, ...]
    shape: tuple[int, ...]
    kind: Literal["same", "parts", "fused"] = "same"

    @property
    def their_shape(self) -> tuple[int, ...]:
        """Shape of each of theirs."""
        if self.kind == "parts":
            return self.shape[1:] or (1,)
        if self.kind == "fused":
            return self.shape[0], self.shape[1] * self.shape[2], *self.shape[3:]
        return self.shape

    def to_ours(self, offset: Offset, extent: Offset, read: Read) -> Tensor:
        """A rectangle of our tensor, from the rectangles of theirs that it needs."""
        if self.kind == "parts":
            rows = range(offset[0], offset[0] + extent[0])
            pieces = [read(self.theirs[row], offset[1:] or (0,), extent[1:] or (1,)) for row in rows]
            return torch.stack(pieces).reshape(tuple(extent)) if pieces else read(self.theirs[0], *[(0,) * len(self.their_shape)] * 2)
        if self.kind == "same":
            return read(self.theirs[0], offset, extent)
        width = self.shape[2]
        if extent[2] == width:
            inner = read(self.theirs[0], (offset[0], offset[1] * width, *offset[3:]), (extent[0], extent[1] * width, *extent[3:]))
        else:
            starts = [(offset[1] + part) * width + offset[2] for part in range(extent[1])]
            pieces = [read(self.theirs[0], (offset[0], start, *offset[3:]), (extent[0], *extent[2:])) for start in starts]
            inner = torch.stack(pieces, dim=1)
        return inner.reshape(tuple(extent))

    def to_theirs(self, part: int, itemsize: int, read: Read) -> Iterator[Tensor]:
        """The elements of one of theirs in order, in as many pieces as its size asks for, from rectangles of ours."""
        in_part = self.kind == "parts"
        for offset, extent in row_blocks(self.shape[1:] if in_part else self.shape, itemsize):
            yield read(self.ours, (part, *offset) if in_part else offset, (1, *extent) if in_part else extent)


def links(config: ModelConfig) -> Iterator[Link]:
    """Every tensor of the model, the embedding first, then layer by layer."""
    hidden, inner, vocabulary = config.hidden_size, config.ffn_hidden_size, config.vocab_size
    yield Link("embedding.weight", ("model.decoder.embed_tokens.weight",), (vocabulary, hidden))
    yield Link("self_conditioning.pre_norm.weight", ("model.decoder.self_conditioning.pre_norm.weight",), (hidden,))
    yield from _mlp_links("self_conditioning.mlp", "model.decoder.self_conditioning", hidden, inner)
    for layer in range(config.num_layers):
        yield from _layer_links(config, layer)
    yield Link("final_norm.weight", ("model.decoder.norm.weight",), (hidden,))


def _mlp_links(ours: str, theirs: str, hidden: int, inner: int) -> Iterator[Link]:
    yield Link(f"{ours}.gate_up.weight", (f"{theirs}.gate_proj.weight", f"{theirs}.up_proj.weight"), (2, inner, hidden), "parts")
    yield Link(f"{ours}.down.weight", (f"{theirs}.down_proj.weight",), (hidden, inner))


def _layer_links(config: ModelConfig, layer: int) -> Iterator[Link]:
    ours, theirs, hidden = f"layers.{layer}", f"model.decoder.layers.{layer}", config.hidden_size
    for norm in ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm_1",
                 "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2", "post_feedforward_layernorm"):
        yield Link(f"{ours}.{norm}.weight", (f"{theirs}.{norm}.weight",), (hidden,))
    head = config.head_dim(layer)
    queries, keys = config.num_attention_heads * head, config.kv_heads(layer) * head
    shapes = {"q_proj": (queries, hidden), "k_proj": (keys, hidden), "o_proj": (hidden, queries), "q_norm": (head,), "k_norm": (head,)}
    if not config.is_full(layer):
        shapes["v_proj"] = (keys, hidden)
    for name, shape in shapes.items():
        yield Link(f"{ours}.attention.{name}.weight", (f"{theirs}.self_attn.{name}.weight",), shape)
    yield from _mlp_links(f"{ours}.mlp", f"{theirs}.mlp", hidden, config.ffn_hidden_size)
    experts, inner = config.num_experts, config.moe_ffn_hidden_size
    yield Link(f"{ours}.moe.router.weight", (f"{theirs}.router.proj.weight",), (experts, hidden))
    yield Link(f"{ours}.moe.router.scale", (f"{theirs}.router.scale",), (hidden,))
    yield Link(f"{ours}.moe.router.per_expert_scale", (f"{theirs}.router.per_expert_scale",), (experts,))
    yield Link(f"{ours}.moe.experts.gate_up", (f"{theirs}.experts.gate_up_proj",), (experts, 2, inner, hidden), "fused")
    yield Link(f"{ours}.moe.experts.down", (f"{theirs}.experts.down_proj",), (experts, hidden, inner))
    scalars = f"model.encoder.language_model.layers.{layer}.layer_scalar", f"{theirs}.layer_scalar"
    yield Link(f"{ours}.layer_scalars", scalars, (2,), "parts")


def is_carried(name: str) -> bool:
    """Whether a tensor of theirs belongs to the vision tower."""
    return name.startswith(CARRIED_PREFIXES)


def check_names(shapes: Mapping[str, tuple[int, ...]], config: ModelConfig, where: str) -> None:
    """ValueError that names every tensor of `where` (name -> shape) that is missing, unexpected, or of another shape than the model's."""
    wanted = {name: link.their_shape for link in links(config) for name in link.theirs}
    problems = [f"missing {name} {list(shape)}" for name, shape in wanted.items() if name not in shapes]
    problems += [f"unexpected {name} {list(shape)}" for name, shape in shapes.items() if name not in wanted and not is_carried(name)]
    problems += [f"{name} is {list(shapes[name])}, the configuration says {list(shape)}"
                 for name, shape in wanted.items() if name in shapes and tuple(shapes[name]) != tuple(shape)]
    if problems:
        shown = "\n  ".join(problems[:20]) + (f"\n  ... and {len(problems) - 20} more" if len(problems) > 20 else "")
        raise ValueError(f"{where} does not hold this model; take weights and config.json from one source, or download both again:\n  "
                         f"{shown}")
