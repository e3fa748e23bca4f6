"""From dataclass fields to command-line flags and back: the machinery, which knows no particular flag."""

import argparse
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any


def flag(
    help: str,
    default: Any = MISSING,
    *,
    metavar: str | None = None,
    read: Callable[[str], Any] | None = None,
    write: Callable[[Any], str] | None = None,
    further: Callable[[], tuple[str, ...]] = tuple,
) -> Any:
    """A dataclass field that is also a flag: `help` is its --help text; without `default` the field must be given.

    The annotation decides the rest: int, float, str, bool, Literal[...] (choices), tuple[X, ...] (several values), X | None.
    `read` and `write` replace the conversion from and to one command-line word. `further`: choices beside those of the annotation, asked
    for when a parser is built.
    """
    metadata = {"help": help, "metavar": metavar, "read": read, "write": write, "further": further}
    return field(metadata=metadata) if default is MISSING else field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Flag:
    """What the command line needs to know of one field."""

    field: str
    name: str
    help: str
    default: Any  # MISSING where the field has none
    kind: type  # of one value: bool, int, float or str
    several: bool
    choices: tuple[Any, ...] | None
    metavar: str | None
    read: Callable[[str], Any] | None
    write: Callable[[Any], str] | None

    @classmethod
    def of(cls, spec: Field, annotation: Any) -> "Flag":
        """The flag of a dataclass field; an annotation or default that the command line cannot express is our mistake."""
        value_type, several, choices = annotation, False, None
        if typing.get_origin(value_type) in (typing.Union, types.UnionType):
            (value_type,) = [a for a in typing.get_args(value_type) if a is not types.NoneType]
            assert spec.default is None, f"{spec.name}: a field that may be None must default to None, or None has no spelling"
        if typing.get_origin(value_type) is tuple:
            value_type, ellipsis = typing.get_args(value_type)
            assert ellipsis is ..., f"{spec.name}: only tuple[X, ...] makes a flag"
            several = spec.metadata["read"] is None
        if typing.get_origin(value_type) is typing.Literal:
            choices = (*typing.get_args(value_type), *spec.metadata["further"]())
            value_type = type(choices[0])
        if spec.metadata["read"]:
            choices = None  # of the parts, which `read` checks
        assert value_type in (bool, int, float, str), f"{spec.name}: no flag for {annotation}"
        return cls(spec.name, flag_name(spec.name), spec.metadata["help"], spec.default, value_type, several, choices,
                   spec.metadata["metavar"], spec.metadata["read"], spec.metadata["write"])  # fmt: skip

    def convert(self, word: str) -> Any:
        """One command-line word as a value; argparse shows the text of an ArgumentTypeError, not that of a ValueError."""
        try:
            return (self.read or self.kind)(word)
        except ValueError as error:
            what = {int: "a whole number", float: "a number"}
            raise argparse.ArgumentTypeError(str(error) if self.read else f"{word!r} is not {what[self.kind]}") from None

    def add_to(self, group: argparse._ArgumentGroup) -> None:
        """Adds the argument; its default is left out, so that only what was given appears in the namespace."""
        if self.kind is bool:
            group.add_argument(self.name, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=self.help_text())
            return
        metavar = self.metavar or {int: "N", float: "X", str: "TEXT"}[self.kind]
        group.add_argument(
            self.name,
            type=self.convert,
            choices=self.choices,
            action=_StoreTuple if self.several else "store",
            nargs="*" if self.several else None,
            metavar=None if self.choices else metavar,
            default=argparse.SUPPRESS,
            help=self.help_text(),
        )

    def help_text(self) -> str:
        if self.default in (MISSING, None, (), ""):
            return self.help.replace("%", "%%")
        return f"{self.help} (default: {self.describe(self.default)})".replace("%", "%%")

    def describe(self, value: Any) -> str:
        """A value as a reader of --help or of an error should see it."""
        if value is None or value == () or value == "":
            return "none"
        if isinstance(value, bool):
            return "on" if value else "off"
        return " ".join(self.words(value))

    def words(self, value: Any) -> list[str]:
        """The command-line words of `value`, without the flag's name."""
        if self.write:
            return [self.write(value)]
        return [repr(v) if self.kind is float else str(v) for v in (value if self.several else (value,))]

    def to_command_line(self, value: Any) -> list[str]:
        """The words that give `value`; None is said by leaving the flag out."""
        if value is None:
            return []
        if self.kind is bool:
            return [self.name if value else "--no-" + self.name[2:]]
        words = self.words(value)
        if not self.several:
            return [f"{self.name}={words[0]}"] if words[0].startswith(("-", "@")) else [self.name, *words]
        for word in words:
            if word.startswith("@") or (word.startswith("-") and self.kind is str):
                raise ValueError(f"{self.name}: {word!r} would be read as a flag or an argument file; write it as ./{word}")
        return [self.name, *words]


class _StoreTuple(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, tuple(values))


class Parser(argparse.ArgumentParser):
    """argparse that raises ValueError where it would print its usage and exit."""

    @property
    def known_flags(self) -> list[str]:
        """Every long flag, the --no- forms included."""
        return [name for name in self._option_string_actions if name.startswith("--")]

    def error(self, message: str) -> typing.NoReturn:
        if message.startswith("unrecognized arguments"):
            message += " (no flag takes them; a switch is given as --name or --no-name, without a value)"
        raise ValueError(message)


class HelpFormatter(argparse.HelpFormatter):
    """Help in two columns, wide enough for the longest flags, and no usage line that lists every flag."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=38, width=120)

    def _split_lines(self, text: str, width: int) -> list[str]:
        """Unlike argparse's own, breaks no flag at its hyphens, and keeps the lines of a text that has several."""
        return [line for part in text.splitlines() for line in textwrap.wrap(" ".join(part.split()), width, break_on_hyphens=False)]


def build_parser(groups: Iterable[type], *, description: str) -> Parser:
    """A parser of all the flags of the config dataclasses `groups`, a help section for each, titled by its docstring."""
    parser = Parser(usage="%(prog)s [FLAGS] [@FILE]", description=description, allow_abbrev=False, formatter_class=HelpFormatter)
    for config_class in groups:
        group = parser.add_argument_group(config_class.__doc__)
        for item in flags_of(config_class):
            item.add_to(group)
    return parser


def words_of(config: Any) -> list[str]:
    """The command-line words that give every value of a config dataclass."""
    return [word for item in flags_of(type(config)) for word in item.to_command_line(getattr(config, item.field))]


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def flags_of(config_class: type) -> Iterator[Flag]:
    """The flags of a config dataclass, in the order of its fields."""
    annotations = typing.get_type_hints(config_class)
    for spec in fields(config_class):
        if "help" in spec.metadata:
            yield Flag.of(spec, annotations[spec.name])
