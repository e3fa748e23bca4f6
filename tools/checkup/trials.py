"""What a trial is: an implementation on a small case, outputs and gradients, against its oracle in float64 on the same numbers."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .report import ABSENT, FAILED, NOTE, OK, Row, Section, outcome_of

Function = Callable[..., Tensor | tuple[Tensor, ...]]
# Of the largest number: sums in fp32 in another order; in bf16 a few roundings of 2^-9 each (the loop over experts has four).
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Trial:
    """`measure` gives the largest error, of the largest number of each result, and what is allowed.

    absent  why it is not tried here, or None; `optional`: it belongs to a package that is not needed
    """

    role: str
    implementation: str
    measure: Callable[[], tuple[float, float]]
    absent: str | None = None
    optional: bool = False

    def row(self) -> Row:
        """Run it; whatever it raises makes it a failed one, with the first line of its text."""
        if self.absent is not None:
            return Row(ABSENT if self.optional else NOTE, (self.role, self.implementation, "", self.absent))
        outcome = outcome_of(self.measure)
        if outcome.error:
            return Row(FAILED, (self.role, self.implementation, "", outcome.first_line))
        error, allowed = outcome.value
        return Row(OK if error <= allowed else FAILED, (self.role, self.implementation, f"{error:.1e}", f"at most {allowed:.0e}"))


def trials_section(title: str, trials: Iterable[Trial], device: torch.device) -> Section:
    """Run the trials one after the other. A device that an earlier one has broken is told as such, and nothing more is tried on it."""
    rows, broken = [], None
    for trial in trials:
        if broken and trial.absent is None:
            rows.append(Row(FAILED, (trial.role, trial.implementation, "", f"not tried: the device is lost since {broken}")))
            continue
        rows.append(trial.row())
        if device.type == "cuda" and broken is None and outcome_of(torch.cuda.synchronize).error:
            broken = f"{trial.role}, {trial.implementation}"
    return Section(title, ("part", "implementation", "error", "allowed"), tuple(rows))


def numbers(*shape: int, device: torch.device, dtype: torch.dtype, seed: int = 0, grad: bool = True) -> Tensor:
    """Normal numbers, the same on every device, rounded to `dtype`."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return drawn.to(device, dtype).requires_grad_(grad)


def compared(function: Function, oracle: Function, inputs: Iterable[Tensor]) -> tuple[float, float]:
    """(error, allowed) of outputs and of the gradients of the inputs that ask for one."""
    inputs = list(inputs)
    dtype = next(x.dtype for x in inputs if x.is_floating_point())
    exact = [x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in inputs]
    worst = 0.0
    for got, want in zip(_results(function, inputs), _results(oracle, exact), strict=True):
        if got.shape != want.shape:
            raise ValueError(f"a result of shape {tuple(got.shape)} where the oracle has {tuple(want.shape)}")
        worst = max(worst, relative(got, want))
    return worst, TOLERANCES[dtype]


def relative(got: Tensor, want: Tensor) -> float:
    """The largest |got - want| of the largest |want|; infinite where a number is none."""
    if not bool(torch.isfinite(got).all()):
        return float("inf")
    return float((got.double() - want.double()).abs().max() / want.double().abs().max().clamp(min=1e-30))


def _results(function: Function, inputs: list[Tensor]) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    outputs = function(*leaves)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    trained = [x for x in leaves if x.requires_grad]
    if not trained:
        return outputs
    directions = [numbers(*y.shape, device=y.device, dtype=torch.float32, seed=9 + n, grad=False).to(torch.bfloat16).to(y.dtype)
                  for n, y in enumerate(outputs)]
    return [y.detach() for y in outputs] + list(torch.autograd.grad(outputs, trained, directions))
