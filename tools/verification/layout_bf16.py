"""One case in bf16: how far the layout is from float64, in units of how far one process in bf16 is.

bf16 rounds at other places in every layout, so that nothing can be equal. What must hold: a layout adds no error of its own. For each
figure d(layout) = |layout - float64| and d(alone) = |one process in bf16 - float64|, 2-norms over the same elements, the gate is
d(layout) <= LIMIT d(alone), and TENSOR_LIMIT d(alone) for each tensor by itself. All three start from the same weights (rounded to bf16),
batches and draws.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dllm.data_parallel import Piece
from megatron_dllm.parallel import ParallelContext
from megatron_dllm.training.algorithms import sgd
from verification.layout_cases import Case
from verification.layout_compare import Worst, explain, worst_of
from verification.layout_training import SMALLEST_SHARE, Trace, Trainer, finish, first_gradients, make_examples, make_run, second_run

# Twice the error of plain computation in the same dtype: two roundings at other places may add up, a missing sum is far beyond.
LIMIT = 2.0
# Some tensors have few elements (the experts' scales: 4), or their gradient is made from one row (the self-conditioning MLP's, of the
# signal that all rows share): their distances are a few roundings, whose luck does not average out. A sum left out is at 8 and more.
TENSOR_LIMIT = 4.0
LOSS_FLOOR = 2.0**-9  # of the loss, half a unit of bf16's last place: below it one process is exact by chance


@dataclass(frozen=True)
class LowTrace:
    """What one process computed in bf16: gradients of the first step, masters after three; tensors are whole, by parameter name."""

    exact: Trace
    losses: tuple[float, ...]
    gradients: Mapping[str, Tensor]
    after_sgd: Mapping[str, Tensor]
    after_adamw: Mapping[str, Tensor]

    @property
    def gradient_error(self) -> float:
        """|g - g64| / |g64| over the whole gradient."""
        return _norm(self.gradients[name] - exact for name, exact in self.exact.gradients.items()) / self.exact.norms[0]


@dataclass(frozen=True)
class LowOutcome:
    """The figures of one case, over all ranks, in units of one process's distance; `own_error`: that distance, of the gradient."""

    case: str
    fault: str
    seed: int
    own_error: float
    loss: float
    gradient: float
    tensor: Worst
    after_sgd: float
    after_adamw: float
    same_noise: bool
    sent_bytes: Mapping[str, int]
    explanations: tuple[str, ...]

    def missed(self) -> list[str]:
        """The figures that are over the limit; NaN is over it."""
        figures = {"loss": self.loss, "gradient": self.gradient, "gradient of a tensor": self.tensor.value * LIMIT / TENSOR_LIMIT,
                   "masters after SGD": self.after_sgd, "masters after AdamW": self.after_adamw}
        return [name for name, value in figures.items() if not value <= LIMIT] + ([] if self.same_noise else ["noise"])


def low_trace(case: Case, exact: Trace, device: torch.device) -> LowTrace:
    """One process in bf16, on the seed of the float64 run."""
    plain = case.alone
    examples = make_examples(plain.reference, make_run(plain, exact.seed))
    run = Trainer(plain, ParallelContext.single(device), torch.bfloat16, exact.seed, sgd, examples)
    gradients = first_gradients(run)
    adamw_run = second_run(run)
    run.update()
    finish(run)
    adamw_run.update()
    finish(adamw_run)
    return LowTrace(exact, tuple(run.losses), gradients, _whole_masters(run), _whole_masters(adamw_run))


def compare_low(case: Case, trace: LowTrace, context: ParallelContext, fault: str) -> LowOutcome:
    """Train `case` in bf16 on all ranks and compare; every rank gets the outcome."""
    world, exact = context.world, trace.exact
    run = Trainer(case, context, torch.bfloat16, exact.seed, sgd, make_examples(case.reference, make_run(case.alone, exact.seed)))
    context.log.clear()
    run.gradients()
    gradient, tensor, explanations = _gradients(list(run.optimizer.buckets.pieces()), trace, context)
    adamw_run = second_run(run)
    run.update()
    finish(run)
    sent = {kind: sent_bytes for kind, (_, sent_bytes) in context.log.by_kind().items()}
    adamw_run.update()
    finish(adamw_run)
    own = (Worst(gradient), tensor, Worst(_masters(run, trace.after_sgd, exact.after_sgd)),
           Worst(_masters(adamw_run, trace.after_adamw, exact.after_adamw)))
    gathered: list = [None] * world.size
    dist.all_gather_object(gathered, (own, explanations, run.noise))
    worst = [worst_of(ranks[0][place] for ranks in gathered) for place in range(len(own))]
    noise = {sample: digest for ranks in gathered for sample, digest in ranks[2].items()}
    return LowOutcome(
        case.name, fault, exact.seed, trace.gradient_error, _losses(run.losses, trace), worst[0].value, worst[1], worst[2].value,
        worst[3].value, noise == exact.noise, sent, tuple(text for ranks in gathered for text in ranks[1]))


def _losses(ours: Sequence[float], trace: LowTrace) -> float:
    """Over the steps: the largest distance in units of the largest of one process."""
    exact = trace.exact.losses
    unit = max(max(abs(a - b), LOSS_FLOOR * abs(b)) for a, b in zip(trace.losses, exact, strict=True))
    return max(abs(a - b) for a, b in zip(ours, exact, strict=True)) / unit


def _gradients(pieces: Sequence[Piece], trace: LowTrace, context: ParallelContext) -> tuple[float, Worst, list[str]]:
    """Over all that this rank has: the distance as a whole, the worst piece, and an explanation for each piece that is off.

    A piece's unit is at least the error of the whole gradient on one process, relative to its size: few elements may be exact by chance.
    """
    share, norm = trace.gradient_error, trace.exact.norms[0]
    ours_squared = alone_squared = 0.0
    worst, explanations = Worst(), []
    for piece in pieces:
        exact, alone = (piece.cut(of[piece.name]).double() for of in (trace.exact.gradients, trace.gradients))
        ours = piece.gradient.cpu().double()
        distance, own = (ours - exact).norm().item(), (alone - exact).norm().item()
        ours_squared, alone_squared = ours_squared + distance**2, alone_squared + own**2
        ratio = distance / max(own, share * exact.norm().item(), share * SMALLEST_SHARE * norm)
        if ratio > worst.value or ratio != ratio:
            worst = Worst(ratio, piece.name, context.world.rank)
        if not ratio <= TENSOR_LIMIT:
            explanations.append(explain(piece, ours, exact, distance / max(exact.norm().item(), 1e-300), context))
    return _ratio(ours_squared, alone_squared), worst, explanations


def _masters(run: Trainer, alone: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """The distance of this rank's masters, all together."""
    ours_squared = alone_squared = 0.0
    for held in run.optimizer.held:
        reference = held.piece.cut(exact[held.name])
        ours_squared += (held.master.cpu().double() - reference).square().sum().item()
        alone_squared += (held.piece.cut(alone[held.name]).double() - reference).square().sum().item()
    return _ratio(ours_squared, alone_squared)


def _ratio(ours_squared: float, alone_squared: float) -> float:
    return (ours_squared / alone_squared) ** 0.5 if ours_squared else 0.0


def _whole_masters(run: Trainer) -> dict[str, Tensor]:
    """Of one process, whose pieces are whole parameters."""
    return {held.name: held.master.view(held.piece.parameter.shape).cpu().clone() for held in run.optimizer.held}


def _norm(parts: Iterator[Tensor]) -> float:
    return sum(part.double().square().sum().item() for part in parts) ** 0.5
