"""One contradiction among settings, and how a list of them is printed."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Problem:
    """Settings that cannot work together: the flags with their values (as shown), the rule that they break, and what to set instead.

    `fix` gives field values that make the problem go away, where that is mechanical (None: leave the flag out).
    """

    flags: Mapping[str, Any]
    why: str
    remedy: str
    fix: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        settings = ", ".join(f"{name} {value}" for name, value in self.flags.items())
        return f"{settings}: {self.why}; {self.remedy}."


def format_problems(problems: Iterable[Problem]) -> str:
    """All of them as a text for the user, one a line."""
    lines = [str(problem) for problem in problems]
    count = "1 setting cannot work" if len(lines) == 1 else f"{len(lines)} settings cannot work"
    return "\n".join([f"{count}:", *(f"  {line}" for line in lines)])
