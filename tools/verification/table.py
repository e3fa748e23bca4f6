"""The table that every suite prints: a figure a line, its limit, and whether it holds."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """A measured value that must not exceed its limit (NaN never holds)."""

    name: str
    value: float
    limit: float
    note: str

    @property
    def holds(self) -> bool:
        return self.value <= self.limit


def print_figures(suite: str, figures: Sequence[Figure]) -> int:
    """Print the figures and a last line that counts them; the number of missed ones."""
    width = max(len(figure.name) for figure in figures)
    for figure in figures:
        verdict = "ok    " if figure.holds else "MISSED"
        print(f"{verdict}  {figure.name:{width}}  {figure.value:11.4g}  limit {figure.limit:9.3g}  {figure.note}")
    missed = sum(not figure.holds for figure in figures)
    print(f"{suite}: {len(figures) - missed} of {len(figures)} figures hold")
    return missed
