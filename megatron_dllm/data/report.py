"""What was left out of a source, by reason and by name: nothing is dropped in silence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

NAMED_PER_REASON = 5


@dataclass(frozen=True)
class Origin:
    """A row of a file, counted from 1 (a line, an array element or a table row)."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class SampleError(ValueError):
    """One sample that cannot be used. `reason` is what it is counted under, `detail` what is wrong with this one."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason} ({detail})" if detail else reason)
        self.reason = reason
        self.detail = detail


@dataclass
class SkipReport:
    """Counts of skipped samples and, for each reason, the first few of them by name. `refuse` turns the first into an error."""

    refuse: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    named: dict[str, list[str]] = field(default_factory=dict)

    def skip(self, where: object, error: SampleError) -> None:
        """Count one sample. ValueError under `refuse`."""
        if self.refuse:
            raise ValueError(f"{where}: {error}; repair or remove it, or set --on-bad-sample skip") from error
        self.counts[error.reason] += 1
        names = self.named.setdefault(error.reason, [])
        if len(names) < NAMED_PER_REASON:
            names.append(f"{where}: {error.detail}" if error.detail else str(where))

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def lines(self) -> list[str]:
        """A line a reason: "3 skipped, corrupt line: a.jsonl:7: ..., ... and 1 more"."""
        result = []
        for reason, count in sorted(self.counts.items()):
            names = self.named[reason]
            more = f" and {count - len(names)} more" if count > len(names) else ""
            result.append(f"{count} skipped, {reason}: {'; '.join(names)}{more}")
        return result

    def to_json(self) -> dict[str, Any]:
        return {"counts": dict(self.counts), "named": self.named}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> SkipReport:
        return cls(counts=Counter(stored["counts"]), named={reason: list(names) for reason, names in stored["named"].items()})
