"""A model's tensors by global name: each rank takes its own rectangles, from whatever can give rectangles of whole tensors."""
from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from ..parallel.placement import cut_rectangle
from .storage import MODEL, kind_of

Offset = tuple[int, ...]
FINGERPRINT_NUMBERS = 256  # of each tensor


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


def every_tensor(name: str) -> bool:
    """True: a choice of tensors by name that leaves none out."""
    return True


REMEDY = "name a checkpoint of this model, or set the flags of the model (--preset, --model-config) that the weights belong to"


@torch.no_grad()
def load_tensors(model: nn.Module, source: TensorSource, where: str, *, wanted: Callable[[str], bool] = every_tensor) -> None:
    """Read the model's tensors, or the `wanted` ones, each rank its rectangles alone, and cast them to the parameters' dtypes.

    Tensors that this model does not hold are passed over; ValueError names what is missing or misshapen.
    """
    held = {name: tensor for name, tensor in named_tensors(model) if wanted(name)}
    missing = sorted(set(held) - set(source.shapes))
    if missing:
        raise ValueError(f"{where}: {', '.join(missing[:10])} missing ({len(missing)} of {len(held)} tensors); {REMEDY}")
    for name, local in held.items():
        placement = getattr(local, "placement", None)
        shape = tuple(local.shape) if placement is None else placement.shape
        if tuple(source.shapes[name]) != shape:
            raise ValueError(f"{where}: {name} is {list(source.shapes[name])}, the model has {list(shape)}; {REMEDY}")
        if placement is None:
            local.copy_(source.read(name, (0,) * len(shape), shape))
        else:
            placement.region(local).copy_(source.read(name, placement.offset, placement.extent))


def fingerprint(source: TensorSource, dtype: torch.dtype) -> str:
    """Tells weights from others: SHA-256 of each tensor's name, shape and first numbers, as held in `dtype`.

    Equal for the same model in a checkpoint of ours and in a transformers directory, whatever their dtypes, and under every layout. Weights
    that have been trained since differ in some of these numbers.
    """
    digest = hashlib.sha256()
    for name, shape in sorted((name, tuple(shape)) for name, shape in source.shapes.items() if kind_of(name) == MODEL):
        extent = (*[1] * (len(shape) - 1), min(shape[-1], FINGERPRINT_NUMBERS)) if shape else ()
        numbers = source.read(name, (0,) * len(shape), extent).to(dtype).double()
        digest.update(f"{name} {list(shape)} ".encode())
        digest.update(numbers.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def load_whole_tensors(model: nn.Module, tensors: Iterable[tuple[str, Tensor]], where: str) -> None:
    """`load_tensors` from tensors in memory."""
    load_tensors(model, WholeTensors(dict(tensors)), where)


class WholeTensors:
    """A TensorSource of tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.read = whole_tensors_reader(tensors)
