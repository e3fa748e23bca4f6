"""Gradients in contiguous buckets, each summed over its data-parallel ranks by one call while the backward goes on.

    parameter's grid   summed over
    dense              dp_cp
    expert             edp

Sums and accumulation over microbatches are in fp32 at least, whatever the parameters' dtype. With `sharded` (the distributed optimizer) a
bucket is reduce-scattered: rank r of R has the sum of the r-th of R equal ranges alone, steps it, and the parameters are gathered again.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..kernels.launch import takes
from ..parallel import Group, MainGradient, ParallelContext, communication
from ..parallel.communication import Pending
from ..parallel.placement import Placement
from ..transformer.precision import accumulation_dtype

if TYPE_CHECKING:
    from ..kernels.add_gradients import FreshBuffers

# A bucket closes when it has so many elements: small enough for several on the way in one backward, large enough for full bandwidth.
BUCKET_ELEMENTS = 40_000_000
# Parameters, and ranks' ranges, begin at multiples of so many elements: kernels read 16 bytes at once, of 16 bits as well.
ALIGNMENT = 8


@dataclass(frozen=True)
class Piece:
    """The part of a parameter's gradient whose sum this rank has: elements start to stop of it (flat), as a view into its bucket."""

    name: str
    parameter: nn.Parameter
    start: int
    stop: int
    gradient: Tensor
    counted: bool  # whether this rank is the one in the world that counts these elements (norm, zeros)
    main_gradient: MainGradient | None = None  # where the gradient is this alone, and nothing of another rank is added

    @property
    def placement(self) -> Placement:
        return self.parameter.placement

    @property
    def values(self) -> Tensor:
        """The same elements of the parameter, as a view."""
        return self.parameter.detach().view(-1)[self.start:self.stop]

    def cut(self, whole: Tensor) -> Tensor:
        """The same elements of a whole tensor, flat; fill is zero."""
        local = torch.zeros(self.placement.local_shape, dtype=whole.dtype, device=whole.device)
        self.placement.region(local).copy_(self.placement.cut(whole))
        return local.view(-1)[self.start:self.stop]

    @property
    def num_fill(self) -> int:
        """How many of the elements are fill, which belongs to no real parameter (it stands at the end of dimension 0)."""
        placement = self.placement
        assert placement.extent[1:] == placement.local_shape[1:], f"{self.name}: fill outside dimension 0"
        real = placement.extent[0] * (self.parameter.numel() // max(placement.local_shape[0], 1))
        return self.stop - max(self.start, min(real, self.stop))


@dataclass(eq=False)
class Bucket:
    """Some parameters of one grid and dtype.

        gradients  [n] fp32 at least; n is a multiple of the group's size
        weights    [n] of which the parameters are views, when sharded; else None
        places     start of each parameter in both; what is between them stays zero
    """

    group: Group
    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    places: tuple[int, ...]
    gradients: Tensor
    weights: Tensor | None
    missing: int = 0  # gradients that the last backward has still to give
    pending: Pending | None = field(default=None, repr=False)
    gathering: Pending | None = field(default=None, repr=False)
    main_gradients: list[MainGradient] = field(default_factory=list, repr=False)  # of its parameters, where these are of 16 bits

    @property
    def own(self) -> slice:
        """The range whose sum this rank has."""
        if self.weights is None:
            return slice(0, len(self.gradients))
        length = len(self.gradients) // self.group.size
        return slice(self.group.rank * length, (self.group.rank + 1) * length)

    def gradient(self, number: int) -> Tensor:
        """The gradient of a parameter, in its shape, as a view."""
        parameter, start = self.parameters[number], self.places[number]
        return self.gradients[start:start + parameter.numel()].view(parameter.shape)

    def start_anew(self) -> None:
        """Forget what has been accumulated. Kernels that add to a gradient are told, and no zeros are written for them."""
        by_kernels = [gradient for gradient in self.main_gradients if gradient.is_used]
        for gradient in by_kernels:
            gradient.drop_parts()
        if by_kernels:
            flags = [gradient.is_fresh for gradient in by_kernels]
            torch._foreach_zero_(flags)
            torch._foreach_add_(flags, 1)
            others = [gradient.total for gradient in self.main_gradients if not gradient.is_used]
            if others:
                torch._foreach_zero_(others)
        else:
            self.gradients.zero_()

    def start_sum(self) -> None:
        """Begin to sum what is settled over the group; `finish_sum` must follow."""
        if self.weights is None:
            self.pending = communication.start_all_reduce(self.gradients, self.group, overwrite=True)
        else:
            self.pending = communication.start_reduce_scatter(self.gradients, self.group)

    def finish_sum(self) -> None:
        result = self.pending.wait()
        self.pending = None
        if self.weights is not None and self.group.size > 1:
            self.gradients[self.own].copy_(result)

    def start_gather(self) -> None:
        """Begin to give all ranks the weights of all ranges, if sharded; `finish_gather` must follow before they are read."""
        if self.weights is not None and self.group.size > 1:
            self.gathering = communication.start_all_gather_in_place(self.weights, self.group)

    def finish_gather(self) -> None:
        """Wait for it, if it is under way (on a GPU the stream waits, not the host)."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    def pieces(self) -> Iterator[Piece]:
        """The parameters' parts in our own range."""
        own = self.own
        for number, (name, parameter, place) in enumerate(zip(self.names, self.parameters, self.places, strict=True)):
            start, stop = max(own.start, place), min(own.stop, place + parameter.numel())
            if start < stop:
                placement = parameter.placement
                counted = placement.first and (self.weights is not None or self.group.rank == 0)
                is_alone = self.group.size == 1 and not placement.partial_over_tp and placement.copies == 1 and placement.tied_to is None
                main_gradient = self.main_gradients[number] if is_alone and self.main_gradients else None
                yield Piece(name, parameter, start - place, stop - place, self.gradients[start:stop], counted, main_gradient)


class GradientBuckets:
    """The gradients of a model's trainable parameters, from the first backward of a step to the optimizer.

    Parameters go into buckets from the last to the first, since their gradients come in this order. Buckets are summed in one order on
    every rank, whatever order their gradients came in: a rank without self-conditioned rows has no gradient for some parameters at all.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], context: ParallelContext, *, sharded: bool = False,
                 bucket_elements: int = BUCKET_ELEMENTS):
        self.buckets: list[Bucket] = []
        self._hooks: list[RemovableHandle] = []
        self._last = False
        self._started = 0
        self._awaited: list[Bucket] = []
        self._fresh: dict[tuple[int, ...], FreshBuffers] = {}  # by the main gradients that they are of
        for members in _deal(list(parameters), bucket_elements):
            bucket = _make_bucket(members, context, sharded)
            self.buckets.append(bucket)
            for number, parameter in enumerate(bucket.parameters):
                self._attach(bucket, parameter, bucket.gradient(number))

    def _attach(self, bucket: Bucket, parameter: nn.Parameter, total: Tensor) -> None:
        """Have every backward add the parameter's gradient to `total`, by itself or by the kernels that use `main_gradient`."""
        is_wide = parameter.dtype == total.dtype
        parameter.grad = total if is_wide else None

        def note_added() -> None:
            if self._last:
                bucket.missing -= 1
                self._start_complete()

        def accumulate(source: nn.Parameter) -> None:
            if source.grad is not total:  # 16 bits, or somebody has dropped the gradient
                (total if is_wide else source.main_gradient.open()).add_(source.grad)
                source.grad = total if is_wide else None
            note_added()

        self._hooks.append(parameter.register_post_accumulate_grad_hook(accumulate))
        if not is_wide:
            parameter.main_gradient = MainGradient(total, note_added)
            bucket.main_gradients.append(parameter.main_gradient)

    def release(self) -> None:
        """Add up no more gradients. Python does not see the cycles through hooks: with them, model and buckets are never freed."""
        for hook in self._hooks:
            hook.remove()
        for bucket in self.buckets:
            for main_gradient in bucket.main_gradients:
                main_gradient.release()

    def last_microbatch(self) -> None:
        """The next backward is the step's last: a bucket whose gradients are complete is summed while it goes on."""
        self._last, self._started = True, 0
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)

    def _start_complete(self) -> None:
        while self._started < len(self.buckets) and self.buckets[self._started].missing == 0:
            self._settle(self.buckets[self._started].main_gradients)
            self.buckets[self._started].start_sum()
            self._started += 1

    def finish(self) -> None:
        """Sum what is not yet on its way (parameters that nothing reached have a gradient of zero), and wait for all."""
        assert self._last, "last_microbatch() comes before the last backward"
        remaining = self.buckets[self._started:]
        self._settle([gradient for bucket in remaining for gradient in bucket.main_gradients])
        for bucket in remaining:
            bucket.start_sum()
        for bucket in self.buckets:
            bucket.finish_sum()
        self._last = False

    def _settle(self, gradients: Sequence[MainGradient]) -> None:
        """`MainGradient.settle` of all, on CUDA by one launch."""
        used = [gradient for gradient in gradients if gradient.is_used]
        if not used or not all(takes(gradient.total) and gradient.total.dtype == torch.float32 for gradient in used):
            for gradient in used:
                gradient.settle()
            return
        from ..kernels.add_gradients import FreshBuffers  # Triton is there with CUDA alone

        names = tuple(map(id, used))
        if names not in self._fresh and torch.cuda.is_current_stream_capturing():
            for gradient in used:  # a table would come from the host, which a recording cannot wait for
                gradient.settle()
            return
        if names not in self._fresh:
            self._fresh[names] = FreshBuffers([gradient.buffers for gradient in used])
        self._fresh[names].clear()

    def zero(self) -> None:
        """Forget what has been accumulated."""
        for bucket in self.buckets:
            bucket.start_anew()

    def scale(self, factor: Tensor) -> None:
        """Multiply every gradient that this rank has the sum of."""
        for bucket in self.buckets:
            bucket.gradients[bucket.own].mul_(factor)
            for gradient in bucket.main_gradients:
                if gradient.squares is not None:
                    gradient.squares.mul_(factor.square())

    def pieces(self) -> Iterator[Piece]:
        """What this rank has the sum of, and steps."""
        for bucket in self.buckets:
            yield from bucket.pieces()

    def gather_parameters(self) -> None:
        """After each rank has changed its own pieces: give all of them to all, in the order in which a forward needs them.

        What `gather_beside_forward` has modules wait for is then still under way.
        """
        for bucket in reversed(self.buckets):
            bucket.start_gather()
        for bucket in self.buckets:
            if bucket not in self._awaited:
                bucket.finish_gather()

    def finish_gathers(self) -> None:
        """Wait for all parameters: before anything but a forward through the modules reads them."""
        for bucket in self.buckets:
            bucket.finish_gather()

    def gather_beside_forward(self, modules: Iterable[nn.Module]) -> None:
        """Let `gather_parameters` go on while the next forward runs: each of the modules, given in the order of the forward, waits for its
        own parameters when it is called, and for those of the module after it, whose first norm it may make.

        A bucket with a parameter of none of them is waited for at once.
        """
        modules, inside = list(modules), set()
        for module, following in zip(modules, [*modules[1:], None], strict=True):
            own = set(module.parameters())
            inside |= own
            needed = own if following is None else own | set(following.parameters())
            waited = [bucket for bucket in self.buckets if needed & set(bucket.parameters)]
            module.register_forward_pre_hook(partial(_finish_gathers, waited))
        self._awaited = [bucket for bucket in self.buckets if inside.issuperset(bucket.parameters)]

    def whole(self, values: Mapping[str, Tensor]) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        """(name, parameter, tensor of its local shape) from flat values of our pieces by name; gathered over the group if sharded."""
        for bucket in self.buckets:
            pieces = list(bucket.pieces())
            dtype = values[pieces[0].name].dtype if pieces else bucket.gradients.dtype
            flat = torch.zeros_like(bucket.gradients, dtype=dtype)
            for piece in pieces:
                start = bucket.places[bucket.names.index(piece.name)] + piece.start
                flat[start:start + piece.stop - piece.start] = values[piece.name]
            if bucket.weights is not None:
                flat = communication.all_gather(flat[bucket.own], bucket.group)
            for name, parameter, start in zip(bucket.names, bucket.parameters, bucket.places, strict=True):
                yield name, parameter, flat[start:start + parameter.numel()].view(parameter.shape)


def _finish_gathers(buckets: Sequence[Bucket], *_: object) -> None:
    for bucket in buckets:
        bucket.finish_gather()


def _deal(parameters: Sequence[tuple[str, nn.Parameter]], bucket_elements: int) -> list[list[tuple[str, nn.Parameter]]]:
    """Parameters from last to first, each with the neighbours of its kind (grid and dtype) until a bucket is full.

    A tied one has a bucket of its own, whose ranges are then the same wherever the parameter is.
    """
    closed: list[list[tuple[str, nn.Parameter]]] = []
    opened: dict[tuple[str, torch.dtype, str | None], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in reversed(parameters):
        kind = parameter.placement.grid, parameter.dtype, parameter.placement.tied_to
        members = opened.setdefault(kind, [])
        members.append((name, parameter))
        if sum(p.numel() for _, p in members) >= bucket_elements:
            closed.append(opened.pop(kind))
    return closed + list(opened.values())


def _make_bucket(members: Sequence[tuple[str, nn.Parameter]], context: ParallelContext, sharded: bool) -> Bucket:
    names, parameters = zip(*members, strict=True)
    first = parameters[0]
    group = context.dp_cp if first.placement.grid == "dense" else context.edp
    places, total = [], 0
    for parameter in parameters:
        places.append(total)
        total += parameter.numel() + -parameter.numel() % ALIGNMENT
    total += -total % (group.size * ALIGNMENT)
    weights = None
    if sharded:
        weights = torch.zeros(total, dtype=first.dtype, device=first.device)
        for parameter, start in zip(parameters, places, strict=True):
            view = weights[start:start + parameter.numel()].view(parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view
    gradients = torch.zeros(total, dtype=accumulation_dtype(first.dtype), device=first.device)
    return Bucket(group, names, parameters, tuple(places), gradients, weights)
