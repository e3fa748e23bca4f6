#!/usr/bin/env python3
"""Draws the curves of one run, or of several over each other, as one PNG.

    python tools/plot_run.py runs/a
    python tools/plot_run.py runs/a runs/b --smooth 0.9 --log-x --reference "byte unigram entropy=3.12" --output compare.png
    python tools/plot_run.py runs/a --experts

A run is its directory (metrics.jsonl and args.txt) or a metrics file. Several runs are labelled by the flags in which they differ.
"""
from __future__ import annotations

import argparse
import math
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from megatron_dllm.config.arguments_file import split_arguments
from megatron_dllm.training.logging import EVALUATION_PREFIX, LEADING, TRAILING, is_noise_level
from megatron_dllm.training.metrics_file import Record, read_metrics

# Flags that name places differ between any two runs and say nothing of either.
PLACES = {"--save", "--load", "--run-dir", "--tensorboard-dir", "--wandb-exp-name", "--save-hf", "--memory-snapshot-path"}
MAX_LABEL_FLAGS = 4
# Distinct for the colour-blind too (Okabe and Ito 2008), the darkest first.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
TITLES = {
    "loss": "Loss (weighted sum)", "grad_norm": "Gradient norm", "tokens_per_second": "Tokens per second",
    "mfu": "MFU", "tflops_per_device": "TFLOP/s per device", "iteration_ms": "Time per iteration (ms)"}
DEFAULT_OTHERS = ("learning_rate", "grad_norm", "tokens_per_second", "mfu")
ROUTING = re.compile(r"routing/(?P<layer>[^/]+)/(?P<stream>[^/]+)/(?P<figure>[^/]+)")
# What --experts draws, a row of panels each: figure of a router, its title, its least value (the most is the largest seen).
EXPERT_FIGURES = (("entropy", "Router entropy (nats)", 0.0), ("max_over_mean_load", "Busiest expert's load over the mean", 1.0),
                  ("idle_experts", "Experts without a token", 0.0))
NOISE_LEVEL = re.compile(r"(?P<term>.+)/t_(?P<low>[\d.]+)-(?P<high>[\d.]+)")


@dataclass(frozen=True)
class Run:
    """flags: the words of args.txt by flag, each as one text; None without an args.txt."""

    name: str
    records: tuple[Record, ...]
    flags: dict[str, str] | None

    def names(self) -> list[str]:
        """Every metric of the run, in the order of first appearance."""
        return list(dict.fromkeys(name for record in self.records for name in record if name != "iteration"))

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(iterations, values) of a metric, float64 [N] each; empty when the run does not have it."""
        points = [(record["iteration"], record[name]) for record in self.records if name in record]
        return np.array([x for x, _ in points], float), np.array([y for _, y in points], float)


@dataclass(frozen=True)
class Reference:
    """A horizontal line. metric: the panel that it belongs to, None: that of every loss term."""

    metric: str | None
    label: str
    value: float


@dataclass(frozen=True)
class Style:
    """What the flags say of the drawing. smooth: weight of the past in the moving average, 0 to below 1."""

    log_x: bool = False
    log_y: bool = False
    smooth: float = 0.0
    references: tuple[Reference, ...] = field(default=())


def load_run(path: Path) -> Run:
    """The run of a directory or metrics file; says on stderr what of it is missing. ValueError when there are no metrics at all."""
    folder, file = (path.parent, path) if path.is_file() else (path, path / "metrics.jsonl")
    if not file.exists():
        raise ValueError(f"{path}: no metrics.jsonl there; give the directory of a run that has logged, or its metrics file")
    read = read_metrics(file)
    if read.torn_line is not None:
        print(f"{file}: the last line is cut short and left out", file=sys.stderr)
    arguments = folder / "args.txt"
    flags = read_flags(arguments) if arguments.exists() else None
    name = folder.resolve().name if file.name == "metrics.jsonl" else f"{folder.resolve().name}/{file.name}"
    return Run(name, read.records, flags)


def read_flags(path: Path) -> dict[str, str]:
    """The flags of an args.txt with their words; a flag without any is "on", and --no-x is --x "off".

    Words only, not values: the files of older versions, and of runs whose checkpoint is gone, can be compared too.
    """
    flags: dict[str, list[str]] = {}
    current = ""
    for word in split_arguments(path.read_text(encoding="utf-8"), str(path)):
        if word.startswith("--"):
            current, _, value = word.partition("=")
            flags[current] = [value] if value else []
        elif current:
            flags[current].append(word)
    return {
        name if words or not name.startswith("--no-") else "--" + name.removeprefix("--no-"):
        " ".join(words) or ("off" if name.startswith("--no-") else "on") for name, words in flags.items()}


def run_labels(runs: Sequence[Run]) -> list[str]:
    """A distinct label for each run: the flags that differ, the run's name where they do not tell it or there are none to compare."""
    if any(run.flags is None for run in runs) or len(runs) == 1:
        return _distinct([run.name for run in runs])
    names = dict.fromkeys(name for run in runs for name in run.flags)
    differing = [name for name in names if name not in PLACES and len({run.flags.get(name) for run in runs}) > 1]
    labels = [
        ", ".join(f"{name.removeprefix('--')} {run.flags.get(name, 'none')}" for name in differing[:MAX_LABEL_FLAGS]) for run in runs]
    return _distinct([label if label and labels.count(label) == 1 else f"{label} ({run.name})" if label else run.name
                      for label, run in zip(labels, runs, strict=True)])


def _distinct(labels: Sequence[str]) -> list[str]:
    return [label if labels.count(label) == 1 else f"{label} #{place + 1}" for place, label in enumerate(labels)]


def is_loss(name: str) -> bool:
    return "loss" in name.rpartition("/")[2] and not is_noise_level(name)


def panel_names(runs: Sequence[Run]) -> list[str]:
    """The metrics that are drawn unasked, training names only: losses, what only evaluation has, learning rate, norm, speed."""
    known = list(dict.fromkeys(name.removeprefix(EVALUATION_PREFIX) for run in runs for name in run.names()))
    own_place = set(LEADING) | set(TRAILING)
    evaluated = [
        name for name in known if not is_loss(name) and not is_noise_level(name) and name not in own_place
        and any(EVALUATION_PREFIX + name in run.names() for run in runs)]
    return [name for name in known if is_loss(name)] + evaluated + [name for name in DEFAULT_OTHERS if name in known]


def noise_terms(runs: Iterable[Run]) -> dict[str, list[tuple[float, float, str]]]:
    """By loss term: (low, high, metric name) of each noise level, rising. Where evaluation has measured a term, on the same draws each
    time, the term is "eval/..." and the figures of single training steps are left out."""
    terms: dict[str, dict[str, tuple[float, float, str]]] = {}
    for name in dict.fromkeys(name for run in runs for name in run.names()):
        if match := NOISE_LEVEL.fullmatch(name):
            terms.setdefault(match["term"], {})[name] = (float(match["low"]), float(match["high"]), name)
    return {term: sorted(levels.values()) for term, levels in terms.items() if EVALUATION_PREFIX + term not in terms}


def smoothed(values: np.ndarray, weight: float) -> np.ndarray:
    """The exponential moving average of float64 [N], without the bias of its start; values that are not finite stay and count nowhere."""
    average, total, result = 0.0, 0.0, np.empty_like(values)
    for place, value in enumerate(values):
        if math.isfinite(value):
            average, total = weight * average + (1 - weight) * value, weight * total + (1 - weight)
            result[place] = average / total
        else:
            result[place] = value
    return result


def title_of(name: str) -> str:
    """A panel's title: "Diffusion loss" for diffusion_loss."""
    evaluated = name.startswith(EVALUATION_PREFIX)
    plain = name.removeprefix(EVALUATION_PREFIX)
    title = TITLES.get(plain, plain.replace("_", " ").replace("/", ", ").capitalize())
    return f"{title}, evaluation" if evaluated else title


def draw_metric(axes: Axes, runs: Sequence[Run], name: str, style: Style) -> None:
    """One metric of all runs: training as a line (faint under its average when smoothed), evaluation as points joined by dashes."""
    for colour, run in zip(_colours(len(runs)), runs, strict=True):
        x, y = run.series(name)
        if style.smooth and len(y) > 2 and name != "learning_rate":  # the schedule has no noise to smooth
            axes.plot(x, y, color=colour, alpha=0.25, linewidth=0.8)
            axes.plot(x, smoothed(y, style.smooth), color=colour, linewidth=1.6)
        else:
            axes.plot(x, y, color=colour, linewidth=1.4, marker="." if len(y) < 3 else None)
        _mark_non_finite(axes, x, y)
        axes.plot(*run.series(EVALUATION_PREFIX + name), color=colour, linestyle="--", linewidth=1, marker="o", markersize=4,
                  markerfacecolor="white")
    if any(len(run.series(EVALUATION_PREFIX + name)[0]) and len(run.series(name)[0]) for run in runs):
        axes.plot([], [], color="grey", linewidth=1.4, label="training")
        axes.plot([], [], color="grey", linestyle="--", marker="o", markersize=4, markerfacecolor="white", label="evaluation")
    terms = [other for other in {term for run in runs for term in run.names()} if is_loss(other)]
    for reference in style.references:
        # A plain reference is of one term: the weighted sum is another quantity, unless it is all there is.
        of_all = reference.metric is None and is_loss(name) and (name != "loss" or len(terms) == 1)
        if of_all or reference.metric == name:
            axes.axhline(reference.value, color="#444444", linestyle=":", linewidth=1.4, label=f"{reference.label} ({reference.value:.4g})")
    axes.set_title(title_of(name))
    finish_axes(axes, style)


def draw_noise_levels(axes: Axes, runs: Sequence[Run], term: str, levels: Sequence[tuple[float, float, str]], style: Style) -> None:
    """A loss term by noise level: over the iterations for one run, the newest figure against t for several."""
    if len(runs) == 1:
        shades = colormaps["viridis"](np.linspace(0, 0.9, len(levels)))
        for shade, (low, high, name) in zip(shades, levels, strict=True):
            x, y = runs[0].series(name)
            axes.plot(x, smoothed(y, style.smooth), color=shade, linewidth=1.4, marker="." if len(y) < 3 else None,
                      label=f"t {low:g} to {high:g}")
            _mark_non_finite(axes, x, y)
        axes.set_title(f"{title_of(term)} by noise level t")
        finish_axes(axes, style)
        return
    for colour, run in zip(_colours(len(runs)), runs, strict=True):
        newest = [((low + high) / 2, values[-1]) for low, high, name in levels if len(values := run.series(name)[1])]
        axes.plot([t for t, _ in newest], [value for _, value in newest], color=colour, marker="o", markersize=4, linewidth=1.4)
    axes.set_title(f"{title_of(term)} by noise level t, newest")
    finish_axes(axes, Style(log_y=style.log_y), x_label="noise level t")


def _mark_non_finite(axes: Axes, x: np.ndarray, y: np.ndarray) -> None:
    """A red cross at the lower edge for each value that no curve can show."""
    bad = x[~np.isfinite(y)]
    if len(bad):
        axes.plot(bad, np.full(len(bad), 0.03), "x", color="#CC0000", transform=axes.get_xaxis_transform(), label=f"{len(bad)} not finite")


def finish_axes(axes: Axes, style: Style, x_label: str = "iteration") -> None:
    """Scales, labels, grid and legend; a panel without curves stays linear, as a log axis would complain."""
    positive_x, positive_y = np.isfinite(axes.dataLim.minpos)  # infinite without a positive value
    if style.log_x and positive_x:
        axes.set_xscale("log")
    elif x_label == "iteration":
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if style.log_y and positive_y:
        axes.set_yscale("log")
    axes.set_xlabel(x_label)
    axes.grid(True, color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8, frameon=False)


def _colours(count: int) -> list[object]:
    """A colour for each of `count` runs: the named ones, or even steps of a colour map when they are not enough."""
    return list(COLOURS[:count]) if count <= len(COLOURS) else list(colormaps["turbo"](np.linspace(0.02, 0.95, count)))


def draw(runs: Sequence[Run], names: Sequence[str], style: Style, title: str | None = None) -> Figure:
    """The figure: a panel for each metric and each loss term with noise levels, and a legend of the runs when there are several."""
    by_noise = noise_terms(runs)
    count = len(names) + len(by_noise)
    columns = min(count, 2 if count <= 4 else 3)
    rows = math.ceil(count / columns)
    labels = [textwrap.fill(label, 60 * columns // 2) for label in run_labels(runs)]
    figure = Figure(figsize=(5.2 * columns, 3.4 * rows + (0.3 * len(runs) if rows * columns == count else 0) + 0.4), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, name in zip(panels, names, strict=False):
        draw_metric(axes, runs, name, style)
        if name == "mfu":
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g} %"))
    for axes, (term, levels) in zip(panels[len(names):], by_noise.items(), strict=False):
        draw_noise_levels(axes, runs, term, levels, style)
    for axes in panels[count:]:
        axes.set_axis_off()
    last = max((record["iteration"] for run in runs for record in run.records), default=0)
    figure.suptitle(title or (f"{labels[0]}, {last} iterations" if len(runs) == 1 else f"{len(runs)} runs"), fontweight="bold")
    if len(runs) > 1:
        handles = [panels[0].plot([], [], color=colour, linewidth=2)[0] for colour in _colours(len(runs))]
        if len(panels) > count:  # an empty place of the grid has room for the legend
            panels[count].legend(handles, labels, loc="center left", frameon=False)
        else:
            figure.legend(handles, labels, loc="outside lower center", frameon=False)
    return figure


@dataclass(frozen=True)
class LayerMap:
    """A figure of every layer's router over a run, for one kind of token: values float64 [layers, iterations], NaN where not logged."""

    layers: tuple[str, ...]
    iterations: tuple[int, ...]
    values: np.ndarray


def layer_maps(run: Run) -> dict[tuple[str, str], LayerMap]:
    """By (figure, kind of token). ValueError for a run without any."""
    names = [(match, name) for name in run.names() if (match := ROUTING.fullmatch(name))]
    if not names:
        raise ValueError(f"{run.name}: no metric of a router is in it; they are logged while a model with experts trains: give such a run")
    layers = tuple(dict.fromkeys(match["layer"] for match, _ in names))
    records = [record for record in run.records if any(name in record for _, name in names)]
    iterations = tuple(record["iteration"] for record in records)
    maps: dict[tuple[str, str], LayerMap] = {}
    for match, name in names:
        key = match["figure"], match["stream"]
        of = maps.setdefault(key, LayerMap(layers, iterations, np.full((len(layers), len(records)), math.nan)))
        of.values[layers.index(match["layer"])] = [record.get(name, math.nan) for record in records]
    return maps


def draw_experts(run: Run, title: str | None = None) -> Figure:
    """A panel for each figure and kind of token: layers downwards, iterations to the right, one scale of colours for each figure."""
    maps = layer_maps(run)
    streams = list(dict.fromkeys(stream for _, stream in maps))
    one = next(iter(maps.values()))
    height = 1.2 + 0.16 * max(len(one.layers), 8)
    figure = Figure(figsize=(4.6 * len(streams) + 0.8, len(EXPERT_FIGURES) * height + 0.4), layout="constrained")
    panels = figure.subplots(len(EXPERT_FIGURES), len(streams), squeeze=False)
    for row, (name, label, least) in zip(panels, EXPERT_FIGURES, strict=True):
        most = max((np.nanmax(of.values) for (figured, _), of in maps.items() if figured == name), default=least)
        for axes, stream in zip(row, streams, strict=True):
            of = maps.get((name, stream))
            if of is None:
                axes.set_axis_off()
                continue
            mesh = draw_layer_map(axes, of, least, max(most, least + 1e-9))
            axes.set_title(f"{label}, {stream}", fontsize=10)
        figure.colorbar(mesh, ax=list(row), fraction=0.03)
    figure.suptitle(title or f"{run.name}, experts", fontweight="bold")
    return figure


def draw_layer_map(axes: Axes, of: LayerMap, least: float, most: float) -> QuadMesh:
    """The layers' values as colours; the first layer on top. Columns are as wide as one another, whatever lies between their iterations."""
    mesh = axes.pcolormesh(np.ma.masked_invalid(of.values), vmin=least, vmax=most, cmap="viridis")
    axes.invert_yaxis()
    for axis, names in ((axes.yaxis, [layer.removeprefix("layers.") for layer in of.layers]), (axes.xaxis, of.iterations)):
        step = math.ceil(len(names) / (10 if axis is axes.yaxis else 5))
        axis.set_ticks(np.arange(0, len(names), step) + 0.5, [str(name) for name in names[::step]])
    axes.set_ylabel("layer")
    axes.set_xlabel("iteration")
    return mesh


def read_reference(text: str, metrics: Iterable[str]) -> Reference:
    """The line that "label=value" or "metric:label=value" describes."""
    label, separator, value = text.rpartition("=")
    metric, colon, rest = label.partition(":")
    if not separator or not label.strip():
        raise ValueError(f"--reference {text!r}: give it as \"label=value\" or \"metric:label=value\"")
    try:
        number = float(value)
    except ValueError:
        raise ValueError(f"--reference {text!r}: {value!r} is not a number; give it as \"label=value\"") from None
    return Reference(metric, rest, number) if colon and metric in metrics else Reference(None, label, number)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="Directory of a run, or a metrics file.")
    parser.add_argument("--output", type=Path, metavar="FILE", help="PNG to write (default: curves.png in the run, or here for several).")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--metrics", nargs="+", metavar="NAME", help="Metrics to draw (default: losses, evaluation, rate, norm, speed).")
    what.add_argument("--experts", action="store_true",
                      help="Draw how every layer's experts are used by each kind of token, into experts.png; of one run, as it is.")
    parser.add_argument("--smooth", type=float, default=0.0, metavar="WEIGHT", help="Moving average: weight of the past, such as 0.9.")
    parser.add_argument("--log-x", action="store_true", help="Iterations on a logarithmic axis.")
    parser.add_argument("--log-y", action="store_true", help="Values on a logarithmic axis.")
    parser.add_argument("--reference", action="append", default=[], metavar="LABEL=VALUE",
                        help="Horizontal line in the panel of each loss term, or of one metric as METRIC:LABEL=VALUE; losses are in nats.")
    parser.add_argument("--title", help="Title of the picture.")
    return parser.parse_args(argv)


def plot(arguments: argparse.Namespace) -> Path:
    """Write the picture and return its path. ValueError for what the user can mend."""
    if not 0 <= arguments.smooth < 1:
        raise ValueError(f"--smooth {arguments.smooth}: the weight of the past must be at least 0 and below 1; try 0.9")
    runs = []
    for path in arguments.runs:
        run = load_run(path)
        if run.records:
            runs.append(run)
        else:
            print(f"{path}: no records yet, left out", file=sys.stderr)
    if not runs:
        raise ValueError("none of the runs has a record yet; log at least one (--log-interval) before plotting")
    if arguments.experts:
        return plot_experts(arguments, runs)
    if len(runs) > 1:
        for run in runs:
            if run.flags is None:
                print(f"{run.name}: no args.txt, so the runs are labelled by their names", file=sys.stderr)
    known = list(dict.fromkeys(name.removeprefix(EVALUATION_PREFIX) for run in runs for name in run.names()))
    names = arguments.metrics or panel_names(runs)
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--metrics {' '.join(unknown)}: no run has it; the metrics are {', '.join(known)}")
    if not names and not noise_terms(runs):
        raise ValueError(f"the runs have no loss, rate, norm or speed; choose with --metrics from {', '.join(known) or 'none'}")
    references = tuple(read_reference(text, known) for text in arguments.reference)
    style = Style(log_x=arguments.log_x, log_y=arguments.log_y, smooth=arguments.smooth, references=references)
    return save(draw(runs, names, style, arguments.title), arguments, "curves.png")


def plot_experts(arguments: argparse.Namespace, runs: Sequence[Run]) -> Path:
    """Write the picture of --experts."""
    if len(arguments.runs) > 1:
        raise ValueError(f"--experts is of one run, and there are {len(arguments.runs)}; give one")
    if arguments.smooth or arguments.log_x or arguments.log_y or arguments.reference:
        raise ValueError("--experts draws colours, not curves; leave out --smooth, --log-x, --log-y and --reference")
    return save(draw_experts(runs[0], arguments.title), arguments, "experts.png")


def save(figure: Figure, arguments: argparse.Namespace, name: str) -> Path:
    """Write to --output, or under this name into the run, or here for several."""
    one = arguments.runs[0]
    output = arguments.output or (Path(name) if len(arguments.runs) > 1 else (one.parent if one.is_file() else one) / name)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)
    return output


def main(argv: Sequence[str] | None = None) -> int:
    try:
        print(f"wrote {plot(parse_arguments(argv))}")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
