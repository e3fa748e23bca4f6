"""The tensors of nested values (dataclasses, tuples, lists, dictionaries): put through a function, listed; what is left without them."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable

from torch import Tensor

PLAIN = (int, float, bool, str, type(None))


def map_tensors(value, function: Callable[[Tensor], Tensor]):
    """`value` with every tensor in it put through the function, always in the same order; a dataclass is made anew by its constructor."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(item, function) for item in value)
    if isinstance(value, dict):
        return {key: map_tensors(item, function) for key, item in value.items()}
    if dataclasses.is_dataclass(value):
        return type(value)(**{field.name: map_tensors(getattr(value, field.name), function) for field in dataclasses.fields(value)})
    return value


def tensors_of(value) -> list[Tensor]:
    """The tensors in the order of `map_tensors`."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, note)
    return found


def form_of(value) -> Hashable:
    """All that is not the numbers in the tensors: equal for two values of which one may stand for the other in recorded device work.

    TypeError for what is neither nested nor plain, whose part in that work nobody knows.
    """
    if isinstance(value, Tensor):
        return "tensor", tuple(value.shape), value.dtype
    if isinstance(value, (tuple, list)):
        return type(value).__name__, *map(form_of, value)
    if isinstance(value, dict):
        return "dict", *((key, form_of(item)) for key, item in value.items())
    if dataclasses.is_dataclass(value):
        return type(value).__name__, *(form_of(getattr(value, field.name)) for field in dataclasses.fields(value))
    if isinstance(value, slice):
        return "slice", value.start, value.stop, value.step
    if isinstance(value, PLAIN):
        return value
    raise TypeError(f"{type(value).__name__} in nested inputs: expected dataclasses, tuples, dictionaries, tensors, slices, numbers")
