"""Timelines of a simulated schedule: a text for the terminal, a picture for the eye. Ranks down, time to the right."""

from dataclasses import dataclass
from pathlib import Path

from megatron_dllm.pipeline.actions import Action, Kind
from megatron_dllm.pipeline.graph import Pipeline
from megatron_dllm.pipeline.simulator import Simulation, Span


@dataclass(frozen=True)
class _Look:
    """How one class of steps is drawn: its name in the legend, what fills its box in the text, matplotlib's colour map for its shades."""

    name: str
    filler: str
    colours: str


_LOOKS = {
    (Kind.FORWARD, 0): _Look("forward", ".", "Blues"),
    (Kind.FORWARD, 1): _Look("forward, loop 1", ":", "Purples"),
    (Kind.BACKWARD, 0): _Look("backward", "=", "Greens"),
    (Kind.BACKWARD, 1): _Look("backward, loop 1", "#", "Oranges"),
    (Kind.INPUT_GRADIENT, 0): _Look("input gradient", "=", "Greens"),
    (Kind.INPUT_GRADIENT, 1): _Look("input gradient, loop 1", "#", "Oranges"),
    (Kind.WEIGHT_GRADIENT, 0): _Look("weight gradient", "w", "YlOrBr"),
    (Kind.EMBEDDING_GRADIENT, 0): _Look("soft embedding's gradient", "e", "RdPu"),
}


def _look(action: Action) -> _Look:
    return _LOOKS[action.kind, action.loop]


def _used_looks(simulation: Simulation) -> dict[tuple[str, int], _Look]:
    used = {(span.action.kind, span.action.loop) for spans in simulation.spans for span in spans}
    return {key: look for key, look in _LOOKS.items() if key in used}


def summary(pipeline: Pipeline, simulation: Simulation) -> str:
    """One line: the pipeline's sizes, its time and bubble beside the lower bound."""
    stages = "1 stage" if pipeline.chunks == 1 else f"{pipeline.chunks} virtual stages"
    return (
        f"{pipeline.ranks} ranks of {stages}, {pipeline.microbatches} microbatches, {sum(pipeline.self_conditioned)} self-conditioned: "
        f"{simulation.makespan} ticks, bubble {simulation.bubble:.1%} (no schedule is below {simulation.least_bubble:.1%})"
    )


def draw_text(simulation: Simulation, *, columns: int = 150) -> str:
    """A line for each rank, at most `columns` wide. A box begins with its microbatch, if there is room; blanks are the bubble."""
    ticks_per_column = max(1, -(-simulation.makespan // columns))
    lines = [f"rank {rank}  {_text_line(spans, ticks_per_column)}" for rank, spans in enumerate(simulation.spans)]
    legend = ", ".join(f"{look.filler * 2} {look.name}" for look in _used_looks(simulation).values())
    return "\n".join([*lines, f"        {legend}; a column is {ticks_per_column} ticks"])


def _text_line(spans: list[Span], ticks_per_column: int) -> str:
    line: list[str] = []
    for action, start, finish in spans:
        first, last = start // ticks_per_column, finish // ticks_per_column
        line += " " * (first - len(line))
        label = str(action.microbatch) if len(str(action.microbatch)) < last - first else ""
        line += label + _look(action).filler * (last - first - len(label))
    return "".join(line).rstrip()


def draw_picture(pipeline: Pipeline, simulation: Simulation, path: Path | str) -> None:
    """Write a PNG: a row for each rank, a box for each step with its microbatch inside; lighter shades are later chunks."""
    # Here, so that a run that draws nothing does not load matplotlib.
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    width_inches = min(max(10.0, simulation.makespan * 0.04), 40.0)
    figure = Figure(figsize=(width_inches, 1.9 + 0.8 * pipeline.ranks), layout="constrained")
    axes = figure.add_subplot()
    points_per_tick = 0.94 * width_inches * 72 / simulation.makespan

    def shade(look: _Look, chunk: int) -> tuple[float, float, float, float]:
        return colormaps[look.colours](0.72 - 0.42 * chunk / max(pipeline.chunks - 1, 1))

    for rank, spans in enumerate(simulation.spans):
        for action, start, finish in spans:
            colour = shade(_look(action), action.chunk)
            axes.barh(rank, finish - start, left=start, height=0.86, color=colour, edgecolor="white", linewidth=0.6)
            # As large as the box allows: digits are about 0.6 of the font's size wide.
            size = min(12.0, (finish - start) * points_per_tick / (0.68 * len(str(action.microbatch))))
            dark = 0.3 * colour[0] + 0.59 * colour[1] + 0.11 * colour[2] < 0.6
            axes.text((start + finish) / 2, rank, str(action.microbatch), ha="center", va="center_baseline", fontsize=size,
                      color="white" if dark else "black")
    axes.set_yticks(range(pipeline.ranks), [f"rank {rank}" for rank in range(pipeline.ranks)])
    axes.set_ylim(pipeline.ranks - 0.5, -0.5)
    axes.set_xlim(0, simulation.makespan)
    axes.set_xlabel("ticks")
    axes.set_facecolor("#ececec")
    axes.set_title(summary(pipeline, simulation), loc="left", fontsize=11)
    patches = [
        Patch(color=shade(look, chunk), label=f"{look.name}, chunk {chunk}" if len(chunks) > 1 else look.name)
        for key, look in _used_looks(simulation).items()
        for chunks in [range(pipeline.chunks) if key[0] != Kind.EMBEDDING_GRADIENT else [pipeline.chunks - 1]]
        for chunk in chunks
    ]
    patches.append(Patch(color="#ececec", label="idle"))
    figure.legend(handles=patches, loc="outside lower left", ncols=6, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150, format="png")
