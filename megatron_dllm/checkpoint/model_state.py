"""A model's tensors by global name: each rank takes its own rectangles, from whatever can give rectangles of whole tensors."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from ..parallel.placement import cut_rectangle

Offset = tuple[int, ...]


class TensorSource(Protocol):
    """Whole tensors, of which any rectangle can be read without the rest: a checkpoint of ours, or a transformers directory."""

    shapes: Mapping[str, tuple[int, ...]]

    def read(self, name: str, offset: Offset, extent: Offset) -> Tensor:
        """A rectangle of a tensor."""
        ...


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, then persistent buffers, by global name."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def whole_tensors_reader(tensors: Mapping[str, Tensor]) -> Callable[[str, Offset, Offset], Tensor]:
    """`read` of a TensorSource over tensors in memory."""
    return lambda name, offset, extent: cut_rectangle(tensors[name].detach(), offset, extent)


@torch.no_grad()
def load_tensors(model: nn.Module, source: TensorSource, where: str) -> None:
    """Read the model's tensors, each rank its rectangles alone, and cast them to the parameters' dtypes.

    Tensors that this model does not hold are passed over; ValueError names what is missing or misshapen.
    """
    held = dict(named_tensors(model))
    missing = sorted(set(held) - set(source.shapes))
    if missing:
        raise ValueError(f"{where}: {', '.join(missing[:10])} missing ({len(missing)} of {len(held)} tensors)")
    for name, local in held.items():
        placement = getattr(local, "placement", None)
        shape = tuple(local.shape) if placement is None else placement.shape
        if tuple(source.shapes[name]) != shape:
            raise ValueError(f"{where}: {name} is {list(source.shapes[name])}, the model has {list(shape)}")
        if placement is None:
            local.copy_(source.read(name, (0,) * len(shape), shape))
        else:
            placement.region(local).copy_(source.read(name, placement.offset, placement.extent))


def load_whole_tensors(model: nn.Module, tensors: Iterable[tuple[str, Tensor]], where: str) -> None:
    """`load_tensors` from tensors in memory."""
    load_tensors(model, WholeTensors(dict(tensors)), where)


class WholeTensors:
    """A TensorSource of tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.read = whole_tensors_reader(tensors)
