"""The live display of a run on a terminal: a bar with rate and time left, and the newest metrics under it."""
from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as `width` or fewer block characters, lowest to highest; non-finite ones show as "×".

    More values than `width` are averaged in equal groups, so the line always covers the whole run.
    """
    if len(values) > width:
        edges = [i * len(values) // width for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
    finite = [v for v in values if math.isfinite(v)]
    low, high = min(finite, default=0), max(finite, default=0)
    top = len(BLOCKS) - 1
    scale = top / (high - low) if high > low else 0
    return "".join(BLOCKS[round((v - low) * scale)] if math.isfinite(v) else "×" for v in values)


def format_duration(seconds: float) -> str:
    """h:mm:ss, with days before it from one day on; "?" when not finite."""
    if not math.isfinite(seconds):
        return "?"
    minutes, second = divmod(int(round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return (f"{days}d " if days else "") + f"{hour}:{minute:02}:{second:02}"


class TimeLeft:
    """How long the rest of the run takes at its recent pace, evaluations and saves included.

    The pace is that of the last `window` notes, so slow first iterations (compilation, caches) soon leave it.
    """

    def __init__(self, total_iterations: int, *, window: int = 100, clock: Callable[[], float] = time.monotonic):
        self._total = total_iterations
        self._clock = clock
        self._notes: deque[tuple[int, float]] = deque(maxlen=window)

    def note(self, iteration: int) -> None:
        """Iterations up to this one are finished now. A second note of the same iteration changes nothing."""
        if not self._notes or self._notes[-1][0] != iteration:
            self._notes.append((iteration, self._clock()))

    def iterations_per_second(self) -> float:
        """NaN before two notes of different iterations."""
        if len(self._notes) < 2:
            return math.nan
        (first, since), (last, now) = self._notes[0], self._notes[-1]
        return (last - first) / (now - since) if last > first and now > since else math.nan

    def seconds(self) -> float:
        """Seconds to the last iteration; NaN while no pace is known."""
        if not self._notes:
            return math.nan
        return (self._total - self._notes[-1][0]) / self.iterations_per_second()


class LiveProgress:
    """Draws at the bottom of the terminal while it is open; what others print to stdout or stderr scrolls above it."""

    def __init__(self, console: Console, *, total_iterations: int, iteration: int, time_left: TimeLeft):
        self._console = console
        self._time_left = time_left
        self._metrics: Text | Columns = Text("waiting for the first iteration", style="dim")
        self._history: list[float] = []
        self._bar = Progress(
            TextColumn("[bold]iteration {task.completed:.0f}/{task.total:.0f}"), BarColumn(bar_width=None),
            TextColumn("{task.percentage:3.0f}%  {task.fields[rate]}  [cyan]{task.fields[left]} left"), console=console, expand=True)
        self._task = self._bar.add_task("train", total=total_iterations, completed=iteration, rate="", left="?")
        self._live = Live(self._render(), console=console, refresh_per_second=4)
        self._live.start()

    def _render(self) -> Group:
        drawn = len(self._history) > 1 and not self._console.options.ascii_only
        history = Text(sparkline(self._history, 60), style="green") if drawn else Text()
        return Group(self._bar, self._metrics, history)

    def advance(self, iteration: int) -> None:
        rate = self._time_left.iterations_per_second()
        text = "" if math.isnan(rate) else f"{rate:.2f} it/s" if rate >= 1 else f"{1 / rate:.2f} s/it"
        self._bar.update(self._task, completed=iteration, rate=text, left=format_duration(self._time_left.seconds()))

    def show(self, parts: Sequence[tuple[str, str]], loss: float | None) -> None:
        """parts: (label, value) pairs of the newest record. loss: the next point of the small curve."""
        self._metrics = Columns([Text.assemble((f"{label} ", "dim"), value.strip()) for label, value in parts], padding=(0, 3))
        if loss is not None:
            self._history.append(loss)
        self._live.update(self._render())

    def close(self) -> None:
        self._live.stop()
