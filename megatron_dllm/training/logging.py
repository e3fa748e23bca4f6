"""What a run says of itself: log lines or a live display, metrics.jsonl and the trackers."""
from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ..config import LoggingConfig
from .metrics_file import MetricsFile
from .progress import LiveProgress, TimeLeft, format_duration
from .trackers import open_trackers

GIB = 1024**3

# Metrics with a place and a form of their own in the log line: name -> (label, form). Loss terms and all others stand between the two
# groups, in the order in which they come, under their own names.
Form = Callable[[float], str]
LEADING: dict[str, tuple[str, Form | None]] = {
    "consumed_samples": ("consumed samples", lambda v: f"{v:12}"),
    "iteration_ms": ("elapsed time per iteration (ms)", lambda v: f"{v:.1f}"),
    "learning_rate": ("learning rate", None),  # as the loss terms
}
TRAILING: dict[str, tuple[str, Form]] = {
    "grad_norm": ("grad norm", lambda v: f"{v:.3f}"),
    "num_zeros": ("num zeros", str),
    "slowest_rank": ("slowest rank", str),
    "slowest_rank_ms": ("its own time (ms)", lambda v: f"{v:.1f}"),
    "fastest_rank_ms": ("fastest (ms)", lambda v: f"{v:.1f}"),
    "skipped": ("number of skipped iterations", lambda v: f"{v:3}"),
    "tokens_per_second": ("tokens/s", lambda v: f"{v:.0f}"),
    "canvas_tokens_per_second": ("canvas tokens/s", lambda v: f"{v:.0f}"),
    "tflops_per_device": ("TFLOP/s per device", lambda v: f"{v:.1f}" if v >= 1 else f"{v:.2g}"),
    "hardware_tflops_per_device": ("with recompute", lambda v: f"{v:.1f}" if v >= 1 else f"{v:.2g}"),
    "mfu": ("MFU (%)", lambda v: f"{100 * v:.1f}"),
    "memory_allocated_bytes": ("memory (GiB)", lambda v: f"{v / GIB:.2f}"),
    "memory_resident_bytes": ("memory (GiB)", lambda v: f"{v / GIB:.2f}"),
    "memory_reserved_bytes": ("memory reserved (GiB)", lambda v: f"{v / GIB:.2f}"),
}
EVALUATION_PREFIX = "eval/"
ROUTING_PREFIX = "routing/"  # figures by layer: kept everywhere but in the log line


def scientific(value: float) -> str:
    return f"{value:.6E}"


def short(value: float) -> str:
    return f"{value:.4g}"


def metric_parts(metrics: Mapping[str, float | int], number: Form = scientific) -> list[tuple[str, str]]:
    """(label, value) pairs in the order of the log line; `number` writes the learning rate and the loss terms."""
    parts = [(label, (form or number)(metrics[name])) for name, (label, form) in LEADING.items() if name in metrics]
    for name, value in metrics.items():
        if name not in LEADING and name not in TRAILING and not is_noise_level(name) and not name.startswith(ROUTING_PREFIX):
            parts.append((name.replace("_", " "), str(value) if isinstance(value, int) else number(value)))
    return parts + [(label, form(metrics[name])) for name, (label, form) in TRAILING.items() if name in metrics]


def noise_level_name(term: str, low: float, high: float) -> str:
    """The metric name of a loss term over the noise levels low <= t < high, such as "diffusion_loss/t_0.25-0.50"."""
    return f"{term}/t_{low:.2f}-{high:.2f}"


def is_noise_level(name: str) -> bool:
    """Whether `noise_level_name` made the name. Such metrics are kept everywhere but in the log line, which they would fill."""
    return "/t_" in name


def log_line(iteration: int, total_iterations: int, metrics: Mapping[str, float | int], *,
             left_seconds: float, when: time.struct_time) -> str:
    """One line in Megatron-LM's form, which its users' scripts parse by the " | " between the fields."""
    width = len(str(total_iterations))
    fields = [f"iteration {iteration:{width}}/{total_iterations}"]
    fields += [f"{label}: {value}" for label, value in metric_parts(metrics)]
    fields.append(f"time left: {format_duration(left_seconds)}")
    return time.strftime("[%Y-%m-%d %H:%M:%S] ", when) + " | ".join(fields) + " |"


class RunLogger:
    """Writes a run's metrics and messages. Only rank 0 writes; on every other rank each call returns at once and no file is made.

    run_dir            gets metrics.jsonl and generations.jsonl; None: the run keeps no files
    resumed_iteration  the last finished iteration of the checkpoint that the run continues, 0 for a new run: what an interrupted run logged
                       after it is removed from metrics.jsonl and hidden in TensorBoard
    arguments          the run's flags, shown in TensorBoard and Weights & Biases
    """

    def __init__(self, run_dir: Path | None, config: LoggingConfig, *, rank: int, total_iterations: int, resumed_iteration: int = 0,
                 arguments: Sequence[str] = (), console: Console | None = None):
        self._writes = rank == 0
        self._total = total_iterations
        self._time_left = TimeLeft(total_iterations)
        if not self._writes:
            return
        if run_dir is not None:
            run_dir.mkdir(parents=True, exist_ok=True)
        self._console = console or Console()
        self._trackers = open_trackers(run_dir, config, resumed_iteration=resumed_iteration, arguments=arguments)
        self._files = {
            name: MetricsFile(run_dir / f"{name}.jsonl", resumed_iteration=resumed_iteration)
            for name in ("metrics", "generations") if run_dir is not None}
        terminal = self._console.is_terminal and not self._console.is_dumb_terminal
        self._live = LiveProgress(
            self._console, total_iterations=total_iterations, iteration=resumed_iteration, time_left=self._time_left) if terminal else None
        self._last_line, self._refusal = "", ""
        for file in self._files.values():
            if file.moved_to is not None:
                self.message(f"{file.path} held the records of an earlier run: kept as {file.moved_to.name}")

    def __enter__(self) -> RunLogger:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def advance(self, iteration: int) -> None:
        """Move the live bar; cheap, for the iterations that are not logged. `iteration` is the number of finished ones."""
        if self._writes:
            self._time_left.note(iteration)
            if self._live is not None:
                self._live.advance(iteration)

    def log(self, iteration: int, metrics: Mapping[str, float | int]) -> None:
        """Write one training record: to metrics.jsonl, the trackers, and as a log line or in the live display.

        metrics: plain numbers by name. The names in LEADING and TRAILING have a place of their own, `loss` draws the live curve, and loss
        terms go by any other name.
        """
        if not self._writes:
            return
        self._record(iteration, metrics)
        self.advance(iteration)
        self._last_line = log_line(
            iteration, self._total, metrics, left_seconds=self._time_left.seconds(), when=time.localtime())
        if self._live is None:
            self.message(self._last_line)
        else:
            self._live.show(metric_parts(metrics, short), metrics.get("loss"))

    def log_evaluation(self, iteration: int, metrics: Mapping[str, float | int]) -> None:
        """Write one evaluation record, its names prefixed "eval/", and one line, noise levels included."""
        if not self._writes:
            return
        self._record(iteration, {EVALUATION_PREFIX + name: value for name, value in metrics.items()})
        shown = [f"{label}: {value}" for label, value in metric_parts(metrics)]
        for name, value in metrics.items():
            if is_noise_level(name):
                shown.append(f"{name.rpartition('/')[2].replace('_', ' ')}: {value:.4f}")
        self.message(f"evaluation at iteration {iteration} | " + " | ".join(shown) + " |")

    def log_generation(self, iteration: int, prompt: str, text: str) -> None:
        """Write one generated sample: to generations.jsonl, TensorBoard, and below a heading."""
        if not self._writes:
            return
        self._append("generations", {"iteration": iteration, "prompt": prompt, "text": text})
        for tracker in self._trackers:
            tracker.text(iteration, "generation", f"{prompt}{text}")
        self.message(f"generation at iteration {iteration}, prompt {prompt!r}:\n{printable(text)}")

    def message(self, text: str) -> None:
        """Print text; on a terminal it scrolls above the live display."""
        if self._writes:
            # A character that the output cannot hold (a generated one, in a Latin-1 locale) must not end a training run.
            encoding = self._console.encoding
            shown = text.encode(encoding, "backslashreplace").decode(encoding)
            # soft_wrap: a log line stays one line in a file or a pipe, however long.
            self._console.print(Text(shown), soft_wrap=True)

    def close(self) -> None:
        """End the live display (its last record stays as a log line) and close every file."""
        if not self._writes:
            return
        if self._live is not None:
            self._live.close()
            if self._last_line:
                self.message(self._last_line)
        for resource in (*self._files.values(), *self._trackers):
            try:
                resource.close()
            except OSError as error:
                self.message(f"{error}: its last records are lost")

    def _record(self, iteration: int, metrics: Mapping[str, float | int]) -> None:
        self._append("metrics", {"iteration": iteration, **metrics})
        for tracker in self._trackers:
            tracker.scalars(iteration, metrics)

    def _append(self, name: str, record: Mapping[str, float | int | str]) -> None:
        """A disk that is full must not end the training; what it refuses is said once, and written when there is room."""
        if name not in self._files:
            return
        try:
            self._files[name].append(record)
        except OSError as error:
            if self._refusal != str(error):
                self._refusal = str(error)
                self.message(f"{error}: the run goes on, and writes the records once it can")


def printable(text: str) -> str:
    """The text with control characters, which a model of bytes may well generate, shown as "·": they would move the terminal's cursor."""
    return "".join(c if c.isprintable() or c in "\n\t" else "·" for c in text)
