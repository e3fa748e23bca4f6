"""Tables that modules of a user's own add rows to, and the flag that imports those modules. See docs/extending.md."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from megatron_dllm.config.flags import flag

Row = TypeVar("Row")
FLAG = "--extension"


@dataclass(frozen=True, kw_only=True)
class ExtensionConfig:
    """Extensions"""

    extension: tuple[str, ...] = flag(
        "Python modules of your own that are imported first: what they add with megatron_dllm.extending is then known to the other flags.",
        (),
        metavar="MODULE",
    )


@dataclass(frozen=True)
class Table(Generic[Row]):
    """The values of a flag: ours, and by name what extensions have added."""

    flag: str
    ours: tuple[str, ...]
    rows: dict[str, Row] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.ours, *self.rows)

    def add(self, name: str, row: Row) -> None:
        """ValueError for a name that is taken or that a flag cannot spell."""
        if not re.fullmatch(r"[a-z][a-z0-9_-]*", name):
            raise ValueError(f"{name!r} cannot be a value of {self.flag}: write lower-case letters, digits, - and _, a letter first")
        if name in self.names:
            raise ValueError(f"{self.flag} {name} is taken; {self.flag} has {', '.join(self.names)}: choose another name")
        self.rows[name] = row


@dataclass(frozen=True)
class AddedSource:
    """tokenizer(data config) -> Tokenizer; sources(data config, seed) -> Sources (train, valid, test)."""

    tokenizer: Callable[[Any], Any]
    sources: Callable[[Any, int], Any]


@dataclass(frozen=True)
class AddedLayer:
    """build: a class made and called as SelfAttention is; like: the layer type whose inputs and context it takes."""

    build: Callable[..., Any]
    like: Literal["sliding", "full"]


@dataclass(frozen=True)
class AddedObjective:
    """weights(planned example, canvas number, objective config) -> float64 [canvas length], which multiply those of the diffusion loss."""

    weights: Callable[[Any, int, Any], Any]


DATA_SOURCES: Table[AddedSource] = Table("--data-source", ("auto", "chat", "indexed", "sudoku"))
LAYER_TYPES: Table[AddedLayer] = Table("--layer-types", ("sliding", "full", "linear"))
NOISE_SCHEDULES: Table[Callable[[float], float]] = Table("--noise-schedule", ("uniform",))
OBJECTIVES: Table[AddedObjective] = Table("--objective", ("block-diffusion", "ar"))


def layer_kind(name: str) -> str:
    """The layer type of ours that a layer type is, or is like."""
    return LAYER_TYPES.rows[name].like if name in LAYER_TYPES.rows else name


def import_extensions(words: Sequence[str]) -> None:
    """Import the modules that command-line words name; ValueError for one that cannot be."""
    for place, word in enumerate(words):
        if word == FLAG:
            for name in words[place + 1:]:
                if name.startswith("-"):
                    break
                _import(name)
        elif word.startswith(f"{FLAG}="):
            _import(word.partition("=")[2])


def _import(name: str) -> None:
    if not all(map(str.isidentifier, name.split("."))):
        raise ValueError(f"{FLAG} {name}: this is no module's name; write it as import does, such as my_package.my_module")
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"{FLAG} {name}: {error}; name a module as import does, and have its folder in PYTHONPATH") from error
