"""The optimizer over fp32 masters: what each trainable parameter is stepped in, the norm of its whole gradient, clipping, the update.

A parameter of 16 bits has an fp32 master; the parameter itself is the copy that is computed with. A parameter of 32 or 64 bits is its own
master. Gradients are added up and summed over ranks by data_parallel's buckets. With `distributed` (--use-distributed-optimizer) each
data-parallel rank holds masters and moments of its share of every bucket alone, steps them, and the parameters are gathered.
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.shards import Shard
from ..config import OptimizerConfig
from ..data_parallel import GradientBuckets, GradientSums, Piece, finalize_gradients
from ..data_parallel.buckets import BUCKET_ELEMENTS
from ..parallel import ParallelContext
from ..parallel.gathering import gather_whole
from .algorithms import Algorithm, algorithm_of

STATES = ("exp_avg", "exp_avg_sq")  # the moments, by torch's names, which are also those of checkpoints


@dataclass(frozen=True)
class Held:
    """A piece of a trainable parameter that this rank steps, and its master, flat: a view of the parameter where that is precise enough."""

    piece: Piece
    master: Tensor

    @property
    def name(self) -> str:
        return self.piece.name

    @property
    def is_copied(self) -> bool:
        """Whether the parameter is a 16-bit copy of its master."""
        return self.master.dtype != self.piece.parameter.dtype


class MasterOptimizer:
    """Matrices decay, vectors and scalars (norms, scales) do not. Without an `algorithm`, that of --optimizer-backend steps them."""

    def __init__(self, model: nn.Module, config: OptimizerConfig, context: ParallelContext, *, distributed: bool = False,
                 algorithm: Algorithm | None = None, bucket_elements: int = BUCKET_ELEMENTS):
        self.clip_grad, self.context = config.clip_grad, context
        trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        # A stage of a pipeline may be without: one that only embeds, beside adapters.
        if not trainable and context.pp.size == 1:
            raise ValueError("nothing is trainable: every parameter is frozen; leave --freeze-router out, or name what adapters adapt "
                             "(--lora-targets)")
        self.parameters = dict(trainable)
        self.buckets = GradientBuckets(trainable, context, sharded=distributed, bucket_elements=bucket_elements)
        self.held = tuple(_hold(piece) for piece in self.buckets.pieces())
        self.sums = GradientSums(self.buckets.pieces(), context)
        self.algorithm = algorithm or algorithm_of(config.optimizer_backend, [parameter for _, parameter in trainable])
        self.torch = self.algorithm.make([self._group(True, config.weight_decay), self._group(False, 0.0)], config)
        self.num_steps = 0  # updates done so far

    def _group(self, decayed: bool, weight_decay: float) -> dict[str, Any]:
        chosen = [h for h in self.held if (h.piece.parameter.ndim > 1) == decayed]
        group = {"params": [h.master for h in chosen], "weight_decay": weight_decay}
        if self.algorithm.writes_copies:
            group["copies"] = [h.piece.values if h.is_copied else None for h in chosen]
        return group

    @property
    def num_trained(self) -> int:
        """Elements of this rank's trainable parameters."""
        return sum(parameter.numel() for parameter in self.parameters.values())

    def finish_gradients(self) -> None:
        """Complete the gradients after the last backward; every rank calls it."""
        finalize_gradients(self.buckets, self.context)

    def grad_norm(self) -> Tensor:
        """L2 norm of the whole finished gradient, fp64, the same on every rank."""
        return self.sums.norm()

    def num_zeros(self) -> int:
        """Elements of the whole finished gradient that are exactly zero."""
        return self.sums.num_zeros()

    @torch.no_grad()
    def step(self, lr: float, grad_norm: Tensor, *, only_if: Tensor | None = None) -> None:
        """Clip to --clip-grad, update the masters at this learning rate, refresh the copies, drop the gradients.

        only_if: bool [] on the device, whether the masters are to change, for an algorithm that `skips`: nobody has to wait for it. Where
        it was false, `take_back` must follow.
        """
        factor = (self.clip_grad / (grad_norm + 1e-6)).clamp(max=1.0) if self.clip_grad > 0 else None
        if only_if is not None:
            assert self.algorithm.skips
            divisor = torch.ones_like(grad_norm) if factor is None else factor.reciprocal()
            self.torch.grad_scale = divisor.masked_fill(~only_if, math.nan).float()
        elif factor is not None:
            self._clip(factor)
        elif self.algorithm.divides:
            self.torch.grad_scale = None  # that of a step before
        for group in self.torch.param_groups:
            group["lr"] = lr
        self.torch.step()
        self.num_steps += 1
        if self.algorithm.writes_copies:
            self.buckets.gather_parameters()
        else:
            self.refresh_parameters()
        self.drop_gradients()

    def take_back(self) -> None:
        """Uncount the last step, which was to change nothing."""
        self.num_steps -= 1
        self.torch.take_back()

    def _clip(self, factor: Tensor) -> None:
        """Multiply the gradients by `factor`: within the update where it can, which spares reading and writing all of them once more."""
        if self.algorithm.divides and all(h.master.dtype == torch.float32 for h in self.held):
            self.torch.grad_scale = factor.reciprocal().float()
        else:
            self.buckets.scale(factor)

    def drop_gradients(self) -> None:
        """Forget what has been accumulated (after a step, or instead of one)."""
        self.buckets.zero()

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Take the masters from the parameters, after weights were loaded into the model."""
        for h in self.held:
            if h.is_copied:
                h.master.copy_(h.piece.values)

    def masters(self) -> Iterator[tuple[str, Tensor]]:
        """(name, whole master) of every trainable parameter, gathered one by one; every rank must go through all of them."""
        yield from self._whole({h.name: h.master for h in self.held})

    def states(self) -> Iterator[tuple[str, str, Tensor]]:
        """(name, state, whole tensor) of every moment, gathered as `masters`; none before the first step."""
        if not self.has_moments:
            return
        for state in STATES:
            for name, whole in self._whole({h.name: self.torch.state[h.master][state] for h in self.held}):
                yield name, state, whole

    def _whole(self, values: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for name, parameter, local in self.buckets.whole(values):
            yield name, gather_whole(local, parameter.placement, self.context)

    @property
    def has_moments(self) -> bool:
        """Whether this rank's pieces have moments: after the first step, and not of every algorithm."""
        return any(STATES[0] in state for state in self.torch.state.values())

    def shards(self) -> Iterator[Shard]:
        """What this rank holds of masters and, after the first step, of moments, as a checkpoint has them: read from it and loaded into."""
        has_moments = self.has_moments
        for h in self.held:
            yield Shard.flat_range(h.name, h.master, h.piece.start, h.piece.placement)
            for state in STATES if has_moments else ():
                yield Shard.flat_range(f"{state}/{h.name}", self.torch.state[h.master][state], h.piece.start, h.piece.placement)

    def make_moments(self, num_steps: int) -> None:
        """Moments of zero, as after this many updates, for a checkpoint to be loaded into; none for 0."""
        self.num_steps = num_steps
        if not num_steps:
            return
        for group in self.torch.param_groups if self.algorithm.counts_in_groups else ():
            group["step"] = num_steps
        for h in self.held:
            state = {state: torch.zeros_like(h.master) for state in STATES}
            if not self.algorithm.counts_in_groups:
                state["step"] = torch.tensor(float(num_steps), device=h.master.device)
            self.torch.state[h.master] = state

    def gather_beside_forward(self, modules: Iterable[nn.Module]) -> None:
        """Let the gathers after a step go on while the next forward runs through these modules; see `finish_gathers`."""
        self.buckets.gather_beside_forward(modules)

    def finish_gathers(self) -> None:
        """Wait for the parameters: before anything but a forward reads them."""
        self.buckets.finish_gathers()

    @torch.no_grad()
    def refresh_parameters(self) -> None:
        """Give the parameters their masters' values, on every rank."""
        copied = [h for h in self.held if h.is_copied]
        if copied:
            torch._foreach_copy_([h.piece.values for h in copied], [h.master for h in copied])
        self.buckets.gather_parameters()


def _hold(piece: Piece) -> Held:
    gradient = piece.gradient
    master = piece.values if piece.values.dtype == gradient.dtype else piece.values.to(gradient.dtype)
    master.grad = gradient
    return Held(piece, master)
