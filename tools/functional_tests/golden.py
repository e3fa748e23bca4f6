"""Golden values: what a run logged, step by step, exactly, and how another run is held to it.

A float is kept as hexadecimal text ("0x1.8p+3"), so that nothing is rounded, and a count as an integer.
"""
from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from functional_tests.fingerprint import changed

Value = float | int
Steps = dict[int, dict[str, Value]]  # step -> metric -> value
# Metrics that a step has or has not, as its draws fall: kept where they are, and then part of the comparison as any other.
OPTIONAL_MARK = "/t_"


@dataclass(frozen=True)
class Golden:
    """fingerprint: of the environment (fingerprint.py). verified_by: the command that held the layout to one process, or why there was
    none."""

    fingerprint: Mapping[str, str]
    verified_by: str
    steps: Steps

    def write(self, path: Path) -> None:
        text = {"fingerprint": dict(self.fingerprint), "verified_by": self.verified_by, "steps": steps_text(self.steps)}
        path.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Golden:
        """ValueError for a file that is none."""
        try:
            text = json.loads(path.read_text(encoding="utf-8"))
            return cls(text["fingerprint"], text["verified_by"], steps_of(text["steps"]))
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is no golden file ({type(error).__name__}: {error}); record it anew") from error


def partial_path(golden: Path) -> Path:
    """Where the runs lie that a golden file is being made from; the name is none of a golden file."""
    return golden.with_name(f"partial_{golden.name.removeprefix('golden_')}")


def write_partial(path: Path, fingerprint: Mapping[str, str], runs: Mapping[str, Steps]) -> None:
    """Every run that is done, by what it is."""
    text = {"partial": "these runs were not all that a golden file needs, or differ", "fingerprint": dict(fingerprint),
            "runs": {name: steps_text(steps) for name, steps in runs.items()}}
    path.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")


def read_partial(path: Path, fingerprint: Mapping[str, str]) -> dict[str, Steps]:
    """Those runs; ValueError, with why, where they cannot be gone on from: there are none, or they are of another environment or code."""
    if not path.is_file():
        raise ValueError(f"there is no {path.name}")
    text = json.loads(path.read_text(encoding="utf-8"))
    if others := changed(fingerprint, text["fingerprint"]):
        raise ValueError(f"{path.name} is of another environment: {'; '.join(others)}")
    return {name: steps_of(steps) for name, steps in text["runs"].items()}


def steps_of(text: Mapping[str, Mapping[str, str | int]]) -> Steps:
    return {int(step): {name: from_text(value) for name, value in metrics.items()} for step, metrics in text.items()}


def steps_text(steps: Steps) -> dict[str, dict[str, str | int]]:
    return {str(step): {name: to_text(value) for name, value in metrics.items()} for step, metrics in steps.items()}


def to_text(value: Value) -> str | int:
    return value if isinstance(value, int) else value.hex()


def from_text(value: str | int) -> Value:
    return value if isinstance(value, int) else float.fromhex(value)


def take_steps(records: Sequence[Mapping[str, Value | str]], metrics: Sequence[str]) -> Steps:
    """Of a run's records (metrics.jsonl) the chosen metrics, and those of OPTIONAL_MARK under any of them."""
    steps: Steps = {}
    for record in records:
        kept = {name: value for name, value in record.items() if name.partition(OPTIONAL_MARK)[0] in metrics}
        if kept:
            steps.setdefault(int(record["iteration"]), {}).update(kept)
    return steps


@dataclass(frozen=True)
class Difference:
    """step None: of the whole run. ours and golden are None for a fault that is no difference of two values."""

    step: int | None
    metric: str
    what: str
    ours: Value | None = None
    golden: Value | None = None

    @property
    def size(self) -> float:
        """Relative to the golden value; infinite where a value is missing."""
        return math.inf if self.ours is None or self.golden is None else relative(self.ours, self.golden)


def relative(ours: Value, golden: Value) -> float:
    """|ours - golden| / |golden|; a NaN counts as infinite."""
    if not (math.isfinite(ours) and math.isfinite(golden)):
        return math.inf
    return 0.0 if ours == golden else abs(ours - golden) / max(abs(golden), 1e-300)


def compare(ours: Steps, golden: Steps, *, metrics: Sequence[str], num_steps: int,
            tolerances: Mapping[str, float | None] | None) -> list[Difference]:
    """Everything that is wrong with `ours`, empty if nothing is, by step.

    metrics     each step must have all of them
    num_steps   the run must have the steps 1 to num_steps and no others
    tolerances  None: every value must equal the golden one bit for bit; else the largest relative difference, by metric ("default" for
                those that it does not name), None of a metric that need only be there and finite
    """
    wrong: list[Difference] = []
    expected = set(range(1, num_steps + 1))
    for name, steps in (("ours", ours), ("the golden file", golden)):
        wrong += [Difference(step, "", f"step {step} is missing in {name}") for step in sorted(expected - steps.keys())]
        wrong += [Difference(step, "", f"{name} has a step {step}, beyond {num_steps}") for step in sorted(steps.keys() - expected)]
    for step in sorted(expected & ours.keys() & golden.keys()):
        wrong += _compare_step(step, ours[step], golden[step], metrics, tolerances)
    return sorted(wrong, key=lambda difference: difference.step or 0)


def _compare_step(step: int, ours: Mapping[str, Value], golden: Mapping[str, Value], metrics: Sequence[str],
                  tolerances: Mapping[str, float | None] | None) -> list[Difference]:
    wrong = []
    for name in sorted({*metrics, *ours, *golden}):
        missing = [side for side, values in (("ours", ours), ("the golden file", golden)) if name not in values]
        if missing:
            wrong.append(Difference(step, name, f"{name} is missing in {' and '.join(missing)}"))
            continue
        a, b = ours[name], golden[name]
        if not (math.isfinite(a) and math.isfinite(b)):
            wrong.append(Difference(step, name, "not finite", a, b))
            continue
        if tolerances is None:
            # Types too: an integer that became a float is another metric. -0.0 is not 0.0.
            if to_text(a) != to_text(b):
                wrong.append(Difference(step, name, "not bit-equal", a, b))
            continue
        limit = tolerances.get(name.partition(OPTIONAL_MARK)[0], tolerances["default"])
        if limit is not None and relative(a, b) > limit:
            wrong.append(Difference(step, name, f"further apart than {limit:g}", a, b))
    return wrong


def explain(wrong: Sequence[Difference], ours: Steps, golden: Steps) -> str:
    """What a person needs: how many, the first step that differs, the largest difference, and both series of that metric."""
    first, largest = wrong[0], max(wrong, key=lambda difference: difference.size)
    lines = [f"{len(wrong)} differences. The first: {_describe(first)}", f"The largest: {_describe(largest)}"]
    metric = (first.metric or largest.metric or next(iter(next(iter(golden.values()), {})), ""))
    if metric:
        lines.append(f"{metric:>12}  {'golden':>26} {'ours':>26}")
        for step in sorted(ours.keys() | golden.keys()):
            a, b = golden.get(step, {}).get(metric), ours.get(step, {}).get(metric)
            mark = "" if a is not None and b is not None and to_text(a) == to_text(b) else "  <"
            lines.append(f"{step:>12}  {_shown(a):>26} {_shown(b):>26}{mark}")
    return "\n".join(lines)


def _describe(difference: Difference) -> str:
    where = "" if difference.step is None else f"step {difference.step}: "
    if difference.ours is None or difference.golden is None:
        return f"{where}{difference.what}"
    return (f"{where}{difference.metric} {difference.ours!r}, golden {difference.golden!r} (relative {difference.size:.3g}): "
            f"{difference.what}")


def _shown(value: Value | None) -> str:
    return "-" if value is None else str(to_text(value))
