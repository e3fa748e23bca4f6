"""A model's tensors by global name: taken from any source that gives whole tensors, each rank keeping its rectangles."""
from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, then persistent buffers, by global name."""
    yield from model.named_parameters()
    yield from model.named_buffers()


@torch.no_grad()
def load_whole_tensors(model: nn.Module, tensors: Iterable[tuple[str, Tensor]], where: str) -> None:
    """Copy whole tensors into the model, each cut to this rank's rectangle and cast to the parameter's dtype.

    Tensors of layers that this model does not hold are passed over; ValueError names what is missing or misshapen.
    """
    held = dict(named_tensors(model))
    missing = set(held)
    for name, whole in tensors:
        if name not in held:
            continue
        local = held[name]
        placement = getattr(local, "placement", None)
        target, source = (local, whole) if placement is None else (placement.region(local), _cut(placement, whole, name, where))
        if target.shape != source.shape:
            raise ValueError(f"{where}: {name} is {list(source.shape)}, the model has {list(target.shape)}")
        target.copy_(source)
        missing.discard(name)
    if missing:
        raise ValueError(f"{where}: {', '.join(sorted(missing)[:10])} missing ({len(missing)} of {len(held)} tensors)")


def _cut(placement, whole: Tensor, name: str, where: str) -> Tensor:
    if tuple(whole.shape) != placement.shape:
        raise ValueError(f"{where}: {name} is {list(whole.shape)}, the model has {list(placement.shape)}")
    return placement.cut(whole)
