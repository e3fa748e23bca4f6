"""Counts and length histograms of the sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_dllm.data.fitting import fit_report, fitted_lengths, num_cut
from megatron_dllm.data.source import ExampleSource
from megatron_dllm.data.token_file import TokenFile
from megatron_dllm.data.views import BlendedSource, SourceRange


@dataclass(frozen=True)
class Histogram:
    """counts[i] values lie in edges[i] to edges[i + 1] - 1."""

    title: str
    edges: tuple[int, ...]
    counts: tuple[int, ...]

    def labels(self) -> list[str]:
        return [f"{low}" if high - low == 1 else f"{low}–{high - 1}" for low, high in zip(self.edges, self.edges[1:], strict=False)]


@dataclass(frozen=True)
class SplitSummary:
    """The counts of one split by name, in the order in which they are shown, what was left out, and the histograms."""

    name: str
    counts: dict[str, int]
    skipped: tuple[str, ...]
    histograms: tuple[Histogram, ...]


def summarise(name: str, source: ExampleSource, *, seq_length: int, canvas_length: int, rows: int | None = None) -> SplitSummary:
    """Counts of a split as it is trained on: examples that do not fit are left out of tokens and canvases. `rows`: of one epoch."""
    fitted = fitted_lengths(source.lengths, seq_length=seq_length, canvas_length=canvas_length)
    fits = fitted > 0
    prompt, response = np.asarray(source.lengths, np.int64)[fits].T
    canvas_tokens = fitted[fits] - prompt
    kept = np.minimum(response, canvas_tokens)
    canvases = canvas_tokens // canvas_length
    report = fit_report(source, seq_length=seq_length, canvas_length=canvas_length)
    counts = {
        "examples": len(source), "examples that fit": int(fits.sum()),
        "responses cut": num_cut(source, seq_length=seq_length, canvas_length=canvas_length),
        "responses marked as cut short": int(np.sum(source.truncated)),
        "prompt tokens": int(prompt.sum()), "response tokens": int(kept.sum()), "fill tokens": int((canvas_tokens - kept).sum()),
        "canvases": int(canvases.sum())}
    if rows is not None:
        counts |= {"rows an epoch": rows, "percent of a row that is filled": round(100 * int(fitted.sum()) / (rows * seq_length))}
    histograms = (
        histogram("prompt tokens", source.lengths[:, 0]), histogram("response tokens, before any cut", source.lengths[:, 1]),
        histogram("canvases", canvases))
    return SplitSummary(name, counts, tuple(report.lines()), histograms)


def skipped_in_making(sources: Sequence[ExampleSource]) -> list[str]:
    """What was left out when the token files behind these sources were made; a file is told of once."""
    files: dict[str, TokenFile] = {}
    for source in sources:
        for part in source.parts if isinstance(source, BlendedSource) else (source,):
            whole = part.source if isinstance(part, SourceRange) else part
            if isinstance(whole, TokenFile):
                files[whole.name] = whole
    return [f"{name}: {line}" for name, file in files.items() for line in file.skipped.lines()]


def histogram(title: str, values: np.ndarray, max_bars: int = 16) -> Histogram:
    """Bars of equal width while few are enough, of doubling width beyond that."""
    largest = int(values.max()) if len(values) else 0
    if largest < max_bars:
        edges = list(range(largest + 2))
    else:
        edges = [0, *(2**power for power in range(largest.bit_length() + 1))]
    counts, _ = np.histogram(values, bins=np.array(edges) - 0.5)
    first = next((i for i, count in enumerate(counts) if count), 0)
    return Histogram(title, tuple(edges[first:]), tuple(counts.tolist()[first:]))
