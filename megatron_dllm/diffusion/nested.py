"""The tensors of nested values (dataclasses, tuples, lists, dictionaries): put through a function, listed; what is left without them."""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable

from torch import Tensor

PLAIN = (int, float, bool, str, type(None))


@functools.cache
def _fields(kind: type) -> tuple[str, ...] | None:
    """The names of a dataclass's fields; None for other types. A step asks for them some hundred times."""
    return tuple(field.name for field in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else None


def map_tensors(value, function: Callable[[Tensor], Tensor]):
    """`value` with every tensor in it put through the function, always in the same order; a dataclass is made anew by its constructor."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(item, function) for item in value)
    if isinstance(value, dict):
        return {key: map_tensors(item, function) for key, item in value.items()}
    names = _fields(type(value))
    return value if names is None else type(value)(**{name: map_tensors(getattr(value, name), function) for name in names})


def tensors_of(value) -> list[Tensor]:
    """The tensors in the order of `map_tensors`."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, (tuple, list)):
        for item in value:
            _collect(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, found)
    else:
        for name in _fields(type(value)) or ():
            _collect(getattr(value, name), found)


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
    names = _fields(type(value))
    if names is not None:
        return type(value).__name__, *(form_of(getattr(value, name)) for name in names)
    if isinstance(value, slice):
        return "slice", value.start, value.stop, value.step
    if isinstance(value, PLAIN):
        return value
    raise TypeError(f"{type(value).__name__} in nested inputs: expected dataclasses, tuples, dictionaries, tensors, slices, numbers")
