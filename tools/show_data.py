#!/usr/bin/env python3
"""Shows training data as the model gets it: prompts, supervised canvases, fill and corruption; then counts and lengths.

Takes every flag of pretrain_dllm.py, so that a run's own command line (or @args.txt) shows that run's data, and these of its own:

    --samples N        examples to show (default: 5)
    --iteration N      of the batch that they begin with, from 0 (default: 0)
    --show SPLIT       train, valid or test (default: train)
    --html FILE        write one HTML page, too
    --prompt-chars N   longest prompt shown whole in the terminal (default: 1200)

Example:  python tools/show_data.py --preset toy --data-path chat.jsonl --seq-length 512 --html data.html
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from data_view.page import page  # noqa: E402
from data_view.samples import KINDS, Kind, Piece, SampleView, sample_views  # noqa: E402
from data_view.summary import Histogram, SplitSummary, skipped_in_making, summarise  # noqa: E402

from megatron_dllm.config import RunConfig, parse  # noqa: E402
from megatron_dllm.data.build import SPLITS, build_sources, build_tokenizer  # noqa: E402
from megatron_dllm.diffusion.random import Stream  # noqa: E402
from megatron_dllm.parallel import ParallelContext  # noqa: E402
from megatron_dllm.training.batches import BatchMaker  # noqa: E402

COLOURS: dict[Kind, str] = {
    "prompt": "dim", "response": "green", "fill": "bright_black", "kept": "cyan", "replaced": "bold red", "same": "magenta"}
BAR_WIDTH = 30


def main(argv: Sequence[str] | None = None) -> int:
    """0; 2 for a mistake in what was given."""
    own = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
                                  usage="show_data.py [flags of pretrain_dllm.py] [flags of its own]")
    own.add_argument("--samples", type=int, default=5, help=argparse.SUPPRESS)
    own.add_argument("--iteration", type=int, default=0, help=argparse.SUPPRESS)
    own.add_argument("--show", choices=SPLITS, default="train", help=argparse.SUPPRESS)
    own.add_argument("--html", type=Path, help=argparse.SUPPRESS)
    own.add_argument("--prompt-chars", type=int, default=1200, help=argparse.SUPPRESS)
    arguments, rest = own.parse_known_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        show(parse(rest), arguments, Console())
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def show(run: RunConfig, arguments: argparse.Namespace, console: Console) -> None:
    """Print the samples and the counts and write the page. ValueError for whatever is wrong with the data or the flags."""
    tokenizer = build_tokenizer(run.data, run.model.eos_token_id)
    sources = build_sources(run.data, run.model, tokenizer, seed=run.training.seed)
    chosen = getattr(sources, arguments.show)
    if chosen is None:
        raise ValueError(f"--show {arguments.show}: "
                         f"--split {run.data.split} leaves no example there; choose another part or another --split")
    train = BatchMaker.of(run, sources.train, Stream.TRAIN, ParallelContext.single())
    maker = train if arguments.show == "train" else BatchMaker.of(run, chosen, Stream.EVALUATE, ParallelContext.single())
    samples = sample_views(maker, tokenizer, first_iteration=arguments.iteration, count=arguments.samples)
    rows = {"train": train.order.rows_before(1)}
    canvas_length = run.objective.longest_canvas(run.model.canvas_length)
    summaries = [
        summarise(name, source, seq_length=run.data.seq_length, canvas_length=canvas_length, rows=rows.get(name))
        for name, source in zip(SPLITS, sources, strict=True) if source is not None]
    skipped = skipped_in_making([source for source in sources if source is not None])
    title = f"{arguments.show}: {chosen.name}"
    console.rule(Text(title))
    console.print(legend())
    for number, sample in enumerate(samples, start=1):
        console.print(sample_text(number, sample, arguments.prompt_chars))
    print_summaries(console, summaries, skipped)
    if arguments.html:
        arguments.html.write_text(page(title, samples, summaries, skipped), encoding="utf-8")
        console.print(Text(f"page: {arguments.html}"))


def legend() -> Text:
    marks = [Text(meaning, COLOURS[kind]) for kind, meaning in KINDS.items()]
    return Text(" · ").join([*marks, Text("not scored", "underline")])


def sample_text(number: int, sample: SampleView, prompt_chars: int) -> Text:
    """A sample for the terminal; replaced tokens stand in ‹ ›, so that they are seen without colour, too."""
    text = Text(f"\n{number}. {sample.origin}\n", "bold")
    text.append(f"   row {sample.row} of its batch, epoch {sample.epoch}; {'; '.join(sample.facts)}\n", "not bold dim")
    for piece in sample.prompt:
        append(text, replace(piece, text=shortened(piece.text, prompt_chars)))
    for canvas in sample.canvases:
        text.append(f"\n ┌ canvas {canvas.number + 1}{', chosen' if canvas.noisy is not None else ''} ", "not bold blue")
        text.append("─" * 40 + "\n", "not bold blue")
        for piece in canvas.clean:
            append(text, piece)
        if canvas.noisy is not None:
            text.append("\n ├ what the decoder gets\n", "not bold yellow")
            for piece in canvas.noisy:
                append(text, piece)
    return text


def append(text: Text, piece: Piece) -> None:
    shown = f"‹{piece.text}›" if piece.kind in ("replaced", "same") else piece.text
    text.append(shown, f"not bold {COLOURS[piece.kind]}{'' if piece.scored else ' underline'}")


def shortened(text: str, limit: int) -> str:
    """Both ends of a text that is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} [… {len(text) - 2 * half} characters …] {text[len(text) - half:]}"


def print_summaries(console: Console, summaries: Sequence[SplitSummary], skipped: Sequence[str]) -> None:
    table = Table("", *(summary.name for summary in summaries), box=None, title="\nCounts", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for name in dict.fromkeys(name for summary in summaries for name in summary.counts):
        table.add_row(name, *(f"{summary.counts[name]:,}" if name in summary.counts else "" for summary in summaries))
    console.print(table)
    lines = [*skipped, *(f"{summary.name}: {line}" for summary in summaries for line in summary.skipped)]
    console.print(Text("\n".join(lines) if lines else "nothing was skipped"))
    for summary in summaries:
        for histogram in summary.histograms:
            console.print(histogram_text(f"{summary.name}, {histogram.title}", histogram))


def histogram_text(title: str, histogram: Histogram) -> Text:
    labels = histogram.labels()
    width, largest = max(map(len, labels)), max(histogram.counts) or 1
    bars = [f"{label:>{width}} {count:>9,} {'█' * -(-BAR_WIDTH * count // largest)}"
            for label, count in zip(labels, histogram.counts, strict=True)]
    return Text("\n".join([f"\n{title}", *bars]))


if __name__ == "__main__":
    sys.exit(main())
