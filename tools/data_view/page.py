"""Samples and counts as one HTML page that needs no other file."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from .samples import KINDS, Piece, SampleView
from .summary import Histogram, SplitSummary

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em; }
h1, h2 { line-height: 1.2; }
article { border: 1px solid #8886; border-radius: 6px; padding: .6em 1em; margin: 1em 0; }
article h3 { margin: 0; font-size: 1em; }
.facts { color: #777; margin: .2em 0 .6em; }
pre { font: 13px/1.6 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
pre { margin: .2em 0; max-height: 30em; overflow: auto; }
.canvas { border-left: 4px solid #2a8; padding-left: .6em; margin: .5em 0; }
.canvas.chosen { border-left-color: #d60; }
.label { font-size: .8em; color: #777; }
.prompt { color: #888; } .response { background: #2a83; } .fill { background: #8883; color: #888; }
.kept { background: #38f2; } .replaced { background: #e43; color: #fff; border-radius: 3px; margin: 0 1px; }
.same { background: #e435; border-radius: 3px; margin: 0 1px; } .unscored { text-decoration: underline dotted #888; }
table { border-collapse: collapse; } td, th { padding: .1em .8em; text-align: right; } td:first-child, th:first-child { text-align: left; }
.bar { display: inline-block; height: .8em; background: #38f; }
.columns { display: flex; flex-wrap: wrap; gap: 2em; }
""".strip()


def page(title: str, samples: Sequence[SampleView], summaries: Sequence[SplitSummary], skipped: Sequence[str]) -> str:
    """The whole page; every text from the data is escaped."""
    legend = " ".join(f'<span class="{kind}">{escape(meaning)}</span>' for kind, meaning in KINDS.items())
    body = [
        f"<h1>{escape(title)}</h1>", f'<p>{legend} <span class="unscored">not scored</span></p>', "<h2>Samples</h2>",
        *(_sample(number, sample) for number, sample in enumerate(samples, start=1)),
        "<h2>Counts</h2>", _table(summaries), _left_out(summaries, skipped), "<h2>Lengths</h2>",
        *(_lengths(summary) for summary in summaries)]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title>\n<style>\n{STYLE}\n</style>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(body) + "\n</body></html>\n"


def _sample(number: int, sample: SampleView) -> str:
    parts = [f"<h3>{number}. {escape(sample.origin)}</h3>",
             f'<p class="facts">row {sample.row} of its batch, epoch {sample.epoch}; {escape("; ".join(sample.facts))}</p>',
             _pieces(sample.prompt)]
    for canvas in sample.canvases:
        chosen = canvas.noisy is not None
        parts.append(f'<div class="canvas{" chosen" if chosen else ""}"><span class="label">canvas {canvas.number + 1}'
                     f'{", chosen" if chosen else ""}</span>{_pieces(canvas.clean)}')
        if canvas.noisy is not None:
            parts.append(f'<span class="label">what the decoder gets</span>{_pieces(canvas.noisy)}')
        parts.append("</div>")
    return f"<article>{''.join(parts)}</article>"


def _pieces(pieces: Sequence[Piece]) -> str:
    spans = (f'<span class="{piece.kind}{"" if piece.scored else " unscored"}">{escape(piece.text)}</span>' for piece in pieces)
    return f"<pre>{''.join(spans)}</pre>"


def _table(summaries: Sequence[SplitSummary]) -> str:
    names = list(dict.fromkeys(name for summary in summaries for name in summary.counts))
    head = "".join(f"<th>{escape(summary.name)}</th>" for summary in summaries)
    rows = "".join(
        f"<tr><td>{escape(name)}</td>" + "".join(f"<td>{summary.counts[name]:,}</td>" if name in summary.counts else "<td></td>"
                                                 for summary in summaries) + "</tr>" for name in names)
    return f"<table><tr><th></th>{head}</tr>{rows}</table>"


def _left_out(summaries: Sequence[SplitSummary], skipped: Sequence[str]) -> str:
    lines = [*skipped, *(f"{summary.name}: {line}" for summary in summaries for line in summary.skipped)]
    if not lines:
        return "<p>Nothing was skipped.</p>"
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _lengths(summary: SplitSummary) -> str:
    return f'<h3>{escape(summary.name)}</h3><div class="columns">{"".join(map(_histogram, summary.histograms))}</div>'


def _histogram(histogram: Histogram) -> str:
    largest = max(histogram.counts, default=0) or 1
    rows = "".join(
        f'<tr><td>{label}</td><td>{count:,}</td><td style="text-align:left"><span class="bar" style="width:{12 * count / largest:.2f}em">'
        "</span></td></tr>" for label, count in zip(histogram.labels(), histogram.counts, strict=True))
    return f"<div><p>{escape(histogram.title)}</p><table>{rows}</table></div>"
