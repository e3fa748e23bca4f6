"""The recipes that have golden values: tests/functional/<recipe>/config.yaml."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "functional"
KINDS = ("regular", "resume", "reshard")


@dataclass(frozen=True)
class Part:
    """How a recipe is started, beside its name. steps: it stops after so many; None: at its end."""

    environment: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """One config.yaml.

        recipe       the script, from the repository's root
        processes    how many it starts, as the environment says
        metrics      what every step must have logged
        kind         regular: one run. resume: stopped after `stop_after` steps and taken up again, held to the golden values of a run that
                     was not. reshard: taken up again as `then` says, in another layout.
        tolerances   largest relative differences to a golden file of another environment, "default" among them
        exact_only   metrics that are compared in the golden file's own environment alone: in another one they tell nothing
        verify       arguments of tools/verify.py that hold this layout to one process in float64; recording runs it
        seconds      what a run may take on a quiet machine of two cores
    """

    name: str
    recipe: str
    metrics: tuple[str, ...]
    tolerances: Mapping[str, float]
    verify: tuple[str, ...]
    kind: str = "regular"
    device: str = "cpu"
    steps: int = 20
    repeats: int = 2
    stop_after: int = 10
    seconds: float = 15.0
    environment: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    then: Part = Part()
    exact_only: tuple[str, ...] = ()

    @property
    def limits(self) -> dict[str, float | None]:
        """What holds a run of another environment to the golden file; None: not compared."""
        return {**self.tolerances, **dict.fromkeys(self.exact_only)}

    @property
    def folder(self) -> Path:
        return FOLDER / self.name

    @property
    def processes(self) -> int:
        return int(self.environment.get("PROCESSES", "1"))


def read_case(path: Path) -> Case:
    """The case of a config.yaml; ValueError names the file and what is wrong with it."""
    text = yaml.safe_load(path.read_text(encoding="utf-8"))
    known = {f.name for f in fields(Case)} - {"name"}
    if not isinstance(text, dict) or (unknown := sorted(text.keys() - known)):
        raise ValueError(f"{path}: {unknown if isinstance(text, dict) else text!r} is not known; write some of {', '.join(sorted(known))}")
    if missing := sorted({"recipe", "metrics", "tolerances", "verify"} - text.keys()):
        raise ValueError(f"{path}: {', '.join(missing)} missing; write them")
    values = dict(text)
    for name in ("metrics", "verify", "flags", "exact_only"):
        values[name] = tuple(map(str, values.get(name) or ()))
    values["environment"] = _texts(values.get("environment"))
    then = values.pop("then", None) or {}
    case = Case(name=path.parent.name, **values, then=Part(_texts(then.get("environment")), tuple(map(str, then.get("flags") or ()))))
    if case.kind not in KINDS:
        raise ValueError(f"{path}: kind {case.kind!r}: write one of {', '.join(KINDS)}")
    if "default" not in case.tolerances:
        raise ValueError(f"{path}: tolerances have no default; write one")
    if unknown := sorted(set(case.exact_only) - set(case.metrics)):
        raise ValueError(f"{path}: exact_only {', '.join(unknown)}: no such metric; write some of {', '.join(case.metrics)}")
    if case.repeats < 2:
        raise ValueError(f"{path}: repeats {case.repeats}: one run repeats nothing; write at least 2")
    if not (ROOT / case.recipe).is_file():
        raise ValueError(f"{path}: there is no recipe {case.recipe}; name a script of examples")
    return case


def _texts(values: Mapping[str, object] | None) -> dict[str, str]:
    return {str(name): str(value) for name, value in (values or {}).items()}


def read_cases(only: str = "") -> list[Case]:
    """Every case whose name has `only` in it, by name."""
    return [read_case(path) for path in sorted(FOLDER.glob("*/config.yaml")) if only in path.parent.name]
