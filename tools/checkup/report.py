"""Rows of a report, in sections: a verdict and its cells; printed as plain text, or as Markdown without a path of the machine."""
from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

OK, FAILED, MISSING, ABSENT, NOTE, TAKEN, REFUSED = "ok", "FAILED", "MISSING", "absent", "-", "taken", "refused"
FAULTS = (FAILED, MISSING)  # the verdicts for which the doctor ends with 1: a check that failed, a package that is needed
PATH = re.compile(r"""(?<![\w.~/])/(?:[^\s/:,;'"()]+/)+([^\s/:,;'"()]*)""")


@dataclass(frozen=True)
class Row:
    """verdict: ok, FAILED, MISSING (needed), absent (optional), - (nothing to judge); of flags taken or refused."""

    verdict: str
    cells: tuple[str, ...]


@dataclass(frozen=True)
class Section:
    """A table; `columns` are the titles of the cells."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]

    @property
    def faults(self) -> list[Row]:
        return [row for row in self.rows if row.verdict in FAULTS]


@dataclass(frozen=True)
class Outcome:
    """What a function returned, or what it raised."""

    value: Any
    error: BaseException | None

    @property
    def first_line(self) -> str:
        """The error's kind and the first line of its text."""
        text = str(self.error).strip()
        return f"{type(self.error).__name__}: {text.splitlines()[0] if text else 'without a text'}"


def outcome_of(function: Callable[[], Any]) -> Outcome:
    """Whatever the function raises is a result here: a report goes on after a broken part, and tells it."""
    with ThreadPoolExecutor(1) as executor:
        future = executor.submit(function)
        error = future.exception()
    return Outcome(None if error else future.result(), error)


def as_text(sections: Sequence[Section]) -> str:
    """Columns side by side; the last one is as long as it needs to be."""
    return "\n\n".join("\n".join([f"== {section.title}", *_lines(section)]) for section in sections)


def _lines(section: Section) -> list[str]:
    table = [("", *section.columns), *((row.verdict, *row.cells) for row in section.rows)]
    widths = [max(len(line[n]) for line in table) for n in range(len(table[0]) - 1)]
    return ["  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[-1]]).rstrip() for line in table]


def as_markdown(title: str, sections: Sequence[Section], last: str) -> str:
    """The same for docs/: of a path only its last name is kept."""
    parts = [f"# {title}"]
    for section in sections:
        table = [("", *section.columns), *((row.verdict, *row.cells) for row in section.rows)]
        lines = ["| " + " | ".join(without_paths(cell).replace("|", "\\|") for cell in line) + " |" for line in table]
        parts.append(f"## {section.title}\n\n" + "\n".join([lines[0], "|" + " --- |" * len(table[0]), *lines[1:]]))
    return "\n\n".join([*parts, without_paths(last)]) + "\n"


def without_paths(text: str) -> str:
    """`text` where of each absolute path the last name is left."""
    return PATH.sub(r"\1", text)


def verdict_line(sections: Sequence[Section]) -> str:
    """How many rows are faults, and which."""
    faults = [f"{row.cells[0]}{f' ({row.cells[1]})' if len(row.cells) > 2 else ''}" for section in sections for row in section.faults]
    judged = sum(row.verdict in (OK, *FAULTS) for section in sections for row in section.rows)
    if faults:
        return f"{len(faults)} of {judged} that are needed or could be tried are wrong: {', '.join(faults)}"
    return f"all {judged} that are needed or could be tried are right"
