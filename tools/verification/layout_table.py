"""The layouts suite's tables, one for fp64 (with fp32 beside it) and one for bf16: as lines of a terminal and in Markdown."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from verification.layout_bf16 import LowOutcome
from verification.layout_compare import Outcome

CASE = "layout · objective · lengths · accumulation · recompute"
AnyOutcome = Outcome | LowOutcome


@dataclass(frozen=True)
class Column:
    """A figure of every outcome; `width` negative: to the left."""

    title: str
    width: int
    text: Callable[[AnyOutcome], str]


def verdict(outcome: AnyOutcome) -> str:
    """What became of a case, or of a planted fault."""
    if outcome.fault:
        return "found" if outcome.missed() else "MISSED"
    return "MISSED" if outcome.missed() else "ok"


def case_name(outcome: AnyOutcome) -> str:
    return f"planted: {outcome.fault} ({outcome.case.split(' · ')[0]})" if outcome.fault else outcome.case


def bytes_sent(sent: Mapping[str, int]) -> str:
    return " ".join(f"{kind} {count / 1e6:.2f}M" if count >= 1e5 else f"{kind} {count / 1e3:.1f}k" for kind, count in sent.items())


FIRST = (Column("", -6, verdict), Column(CASE, -104, case_name))
LAST = (Column("bytes sent by rank 0", -1, lambda o: bytes_sent(o.sent_bytes)),)
WIDE = (
    *FIRST, Column("loss", 8, lambda o: f"{o.loss:.1e}"), Column("gradient", 9, lambda o: f"{o.gradient.value:.1e}"),
    Column("worst parameter", -48, lambda o: o.gradient.name), Column("SGD", 8, lambda o: f"{o.after_sgd.value:.1e}"),
    Column("AdamW/lr", 9, lambda o: f"{o.after_adamw.value:.1e}"), Column("fp32 loss", 10, lambda o: f"{o.narrow_loss:.1e}"),
    Column("fp32 grad", 10, lambda o: f"{o.narrow_gradient.value:.2g}"), Column("gap", 8, lambda o: f"{o.routing_gap:.1e}"), *LAST)
LOW = (
    *FIRST, Column("own error", 10, lambda o: f"{o.own_error:.1e}"), Column("loss", 6, lambda o: f"{o.loss:.2f}"),
    Column("gradient", 9, lambda o: f"{o.gradient:.2f}"), Column("worst tensor", 13, lambda o: f"{o.tensor.value:.2f}"),
    Column("its name", -48, lambda o: o.tensor.name), Column("SGD", 6, lambda o: f"{o.after_sgd:.2f}"),
    Column("AdamW", 6, lambda o: f"{o.after_adamw:.2f}"), *LAST)


def header(columns: Sequence[Column]) -> str:
    return " ".join(_placed(column.title, column.width) for column in columns).rstrip()


def line(columns: Sequence[Column], outcome: AnyOutcome) -> str:
    """One row; what is over its limit is named at the end."""
    missed = outcome.missed()
    text = " ".join(_placed(column.text(outcome), column.width) for column in columns).rstrip()
    return text + (f"  [{', '.join(missed)}]" if missed else "")


def cells(columns: Sequence[Column], outcome: AnyOutcome) -> list[str]:
    return [column.text(outcome) for column in columns]


def markdown(columns: Sequence[Column], rows: Sequence[Sequence[str]], heading: Sequence[str]) -> str:
    """A page: paragraphs, then the table of `cells`."""
    top = [[column.title or "verdict" for column in columns], ["---" if column.width < 0 else "---:" for column in columns]]
    return "\n\n".join(heading) + "\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in [*top, *rows]) + "\n"


def _placed(text: str, width: int) -> str:
    return f"{text:{-width}}" if width < 0 else f"{text:>{width}}"
