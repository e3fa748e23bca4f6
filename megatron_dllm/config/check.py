"""The form of a check, and the table that the files of checks fill: which settings it reads, and the rule that they must keep."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Fault:
    """What is wrong, what to set instead, and, where that is mechanical, field values that mend it (None: leave the flag out)."""

    why: str
    remedy: str
    fix: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """`rule` takes the values of `fields`, in that order, each already within its own range."""

    fields: tuple[str, ...]
    rule: Callable[..., Fault | None]
    name: str


CHECKS: list[Check] = []


def check(*fields: str) -> Callable[[Callable[..., Fault | None]], Callable[..., Fault | None]]:
    """Enters the function below into CHECKS as the rule over `fields`; "world_size" is the number of processes."""

    def enter(rule: Callable[..., Fault | None]) -> Callable[..., Fault | None]:
        CHECKS.append(Check(fields, rule, rule.__name__))
        return rule

    return enter


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def listed(numbers: list[int]) -> str:
    """Numbers to choose from, the middle left out where they are many."""
    shown = [str(n) for n in numbers]
    return ", ".join(shown if len(shown) <= 8 else [*shown[:4], "...", *shown[-3:]])
