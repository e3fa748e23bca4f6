"""CUDA graphs: forward and backward of a whole microbatch as one launch, for microbatches whose form has come before; in a pipeline those
of all of a step's microbatches, with the messages between them.

A step of few tokens is bound by the host, which starts some thousand kernels one by one. Recorded once, they are started again together
("replayed"), on the same memory: so inputs are copied to where the recording read them, gradients go to the buckets as recorded, and what
the microbatch gives is copied away from where it was written. Everything that is not a number in a device tensor is part of the recording;
`form_of` a microbatch is what decides which recording fits. What the host notes meanwhile (routing, what recomputes replayed, what was
sent) is part of the result, and noted again with each replay.

Ranks that exchange within a microbatch must all call, all record or all replay it, and replay what was recorded together: NCCL asks for
it. So a recording belongs to the forms of all of them, which they tell each other each step. The last unit of a step may be recorded with
the sums of gradients over data-parallel ranks, which then run beside its backward: such a recording belongs to the forms of every rank, and
where these do not come again, units are replayed without.

Legend: a *unit* is what is recorded as one, a microbatch or the tuple of a step's microbatches.
"""
from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..data_parallel.finalize import finalize_gradients
from ..diffusion.inputs import MicrobatchInputs, to_device
from ..diffusion.losses import LossTerms
from ..diffusion.nested import form_of, map_tensors, tensors_of
from ..kernels.graphs import CudaRecorder, Recorder, Recording
from ..kernels.launch import has_large_shared_memory
from ..models.diffusion_gemma.model import DiffusionGemma
from ..models.diffusion_gemma.stages import ModelPipeline
from ..moe.balance import RoutingFigures
from ..moe.replay import ReplayNotes
from ..parallel import Group, ParallelContext, Sent, communication
from ..pipeline.progress import Progress
from .optimizer import MasterOptimizer

ALIGNMENT = 256  # bytes: kernels are compiled for aligned pointers, and those of an allocator are
MOST_MET = 100_000
QUEUES = 32  # as many as CUDA has

Unit = MicrobatchInputs | tuple[MicrobatchInputs, ...]


@dataclass(frozen=True)
class MicrobatchNotes:
    """What is noted beside the losses: by layer routers' figures and, where a bias follows it, their experts' load; what recomputes
    replayed; what was sent to other ranks."""

    figures: dict[str, RoutingFigures]
    loads: dict[str, Tensor]
    replays: ReplayNotes
    sent: Sent


@dataclass(frozen=True)
class MicrobatchResult:
    """Losses and notes."""

    terms: LossTerms
    notes: MicrobatchNotes


class StaticInputs:
    """A unit at fixed addresses on a device: all its tensors lie in one buffer, so that they come from the host in one copy."""

    def __init__(self, like: Unit, device: torch.device):
        sources = tensors_of(like)
        self.places, self.num_bytes = [], 0
        for tensor in sources:
            self.places.append(self.num_bytes)
            self.num_bytes += -(-tensor.numel() * tensor.itemsize // ALIGNMENT) * ALIGNMENT
        self.buffer = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        self.tensors = self._views(self.buffer, sources)
        remaining = iter(self.tensors)
        self.inputs: Unit = map_tensors(like, lambda _: next(remaining))

    def _views(self, buffer: Tensor, like: list[Tensor]) -> list[Tensor]:
        return [buffer[start:start + tensor.numel() * tensor.itemsize].view(tensor.dtype).view(tensor.shape)
                for start, tensor in zip(self.places, like, strict=True)]

    def load(self, inputs: Unit) -> None:
        """Take over the numbers of `inputs`, of the same form, on the host or on the device."""
        sources = tensors_of(inputs)
        if all(tensor.device == self.buffer.device for tensor in sources):
            copy_by_dtype(self.tensors, sources)
            return
        # A fresh staging buffer each time: the copy from the last one may not be over.
        staging = torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=self.buffer.is_cuda)
        for target, tensor in zip(self._views(staging, sources), sources, strict=True):
            target.copy_(tensor)
        self.buffer.copy_(staging, non_blocking=True)


def on_device(inputs: Unit, device: torch.device) -> Unit:
    """`inputs` on the device; to a CUDA device they go in one copy from pinned memory, for which the host does not wait.

    Copies from other memory would each wait for all the work that was given to the device before.
    """
    if device.type != "cuda" or all(tensor.device == device for tensor in tensors_of(inputs)):
        return to_device(inputs, device)
    static = StaticInputs(inputs, device)
    static.load(inputs)
    return static.inputs


@dataclass
class GraphCounts:
    """Units since the last report: replayed, recorded, run as ordinary calls; and recordings held in all."""

    replayed: int = 0
    recorded: int = 0
    eager: int = 0
    held: int = 0


@dataclass(eq=False)
class Recordings:
    """Recordings of one function by the key of its units, `limit` at most, and the hashes of keys that have come: a long run meets more
    forms than memory should hold."""

    run: Callable[[Any], MicrobatchResult]
    limit: int
    held: dict[Hashable, tuple[StaticInputs, Recording]] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    met: set[int] = field(default_factory=set)  # forms of all ranks that have come, and may not have been run

    @property
    def is_full(self) -> bool:
        """Whether no more are taken."""
        return len(self.held) >= self.limit

    def wants(self, key: Hashable, forms: Hashable) -> bool:
        """Whether a unit of this key is to be run here: it is held, or may be and these forms have come before."""
        if key in self.held or self.is_full:
            return key in self.held
        if len(self.met) >= MOST_MET:  # on every rank at once, since all have met the same
            self.met.clear()
        has_met = hash(forms) in self.met
        self.met.add(hash(forms))
        return has_met


class GraphedMicrobatches:
    """Runs forward and backward of units: a form that is new as an ordinary call, one that comes again by its recording.

    run       forward and backward of inputs on the device; the gradients are left where the same address is meant each time
    run_last  the same for the last unit of a step, with the gradients' sums over all ranks; None: they are the caller's (`has_summed`)
    state     what else decides on the work of `run_last`: a number that goes into its form
    progress  is told where the host stands
    note      takes what a unit gave beside its losses
    limit     recordings of either held at most; further forms stay ordinary calls
    peers     with whom `run` exchanges anything; they have as many units. everyone: with whom `run_last` does
    message   told of every recording
    """

    def __init__(self, run: Callable[[Any], MicrobatchResult], note: Callable[[MicrobatchNotes], None], recorder: Recorder, *,
                 device: torch.device, limit: int, peers: Sequence[Group] = (), message: Callable[[str], None] = lambda text: None,
                 run_last: Callable[[Any], MicrobatchResult] | None = None, everyone: Sequence[Group] = (),
                 state: Callable[[], int] = lambda: 0, progress: Progress | None = None):
        self.note, self.recorder, self.device = note, recorder, device
        self.peers, self.everyone, self.message, self.state = peers, everyone, message, state
        self.progress = Progress() if progress is None else progress
        # What ranks tell each other waits for nothing that the device was given before.
        self._aside = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.has_summed = False  # whether the gradients of the last `each` have been summed over the ranks
        self._any, self._last = Recordings(run, limit), None if run_last is None else Recordings(run_last, limit)
        self._counts, self._num_eager = GraphCounts(), 0

    def __call__(self, inputs: Unit) -> LossTerms:
        """The losses of one unit, as `each` gives them."""
        return self.each([inputs])[0]

    def each(self, units: Sequence[Unit]) -> list[LossTerms]:
        """The losses of each unit of a step, whose gradients are added to the buckets' when the device gets there."""
        forms = [form_of(inputs) for inputs in units]
        keys = self._joint(forms, self.peers)
        results = [self._one(self._any, key, inputs) for key, inputs in zip(keys[:-1], units[:-1], strict=True)]
        last = self._any
        if self._last is not None:
            # After the others, which may change the state. Every rank holds as many of these recordings, so that all of them agree.
            of_all, key = self._joint([forms[-1], (forms[-1], self.state())], self.everyone)
            if self._last.wants(key, of_all):
                keys[-1], last = key, self._last
        self.has_summed = last is self._last
        return [*results, self._one(last, keys[-1], units[-1])]

    def _joint(self, forms: Sequence[Hashable], groups: Sequence[Group]) -> list[Hashable]:
        with torch.cuda.stream(self._aside):
            return joint_forms(forms, groups, self.device)

    def _one(self, recordings: Recordings, key: Hashable, inputs: Unit) -> LossTerms:
        if key not in recordings.held:
            if recordings.is_full or hash(key) not in recordings.seen:
                return self._eager(recordings, key, inputs)
            self._record(recordings, key, inputs)
        static, recording = recordings.held[key]
        static.load(inputs)
        self.progress.begin("the start of a recording, of which the host sees no more")
        recording.replay()
        self.progress.end()
        self._counts.replayed += 1
        result = copied(recording.result)
        self.note(result.notes)
        return result.terms

    def _eager(self, recordings: Recordings, key: Hashable, inputs: Unit) -> LossTerms:
        self._counts.eager, self._num_eager = self._counts.eager + 1, self._num_eager + 1
        if not recordings.is_full:
            recordings.seen.add(hash(key))
        if self._num_eager & (self._num_eager - 1) == 0:  # 1, 2, 4, 8, ...: often enough to be seen, never a flood
            what = "steps" if isinstance(inputs, tuple) else "microbatches"
            self.message(f"{self._num_eager} {what} without a CUDA graph until now, {self._which(recordings)} held: the first of each "
                         "form, and those of forms beyond the limit")
        there = on_device(inputs, self.device)
        result = self.recorder.warm_up(lambda: recordings.run(there))
        self.note(result.notes)
        return result.terms

    def _record(self, recordings: Recordings, key: Hashable, inputs: Unit) -> None:
        static = StaticInputs(inputs, self.device)
        static.load(inputs)
        recordings.held[key] = static, self.recorder.record(lambda: recordings.run(static.inputs))
        self._counts.recorded += 1
        self.message(f"CUDA graph {self._which(recordings)}: {describe(inputs)}, {static.num_bytes / 2 ** 20:.1f} MiB of inputs")

    def _which(self, recordings: Recordings) -> str:
        what = " with the gradients' sums" if recordings is self._last else ""
        return f"{len(recordings.held)} of at most {recordings.limit}{what} (--cuda-graph-limit)"

    def drain(self) -> GraphCounts:
        """The counts since the last call."""
        counts, self._counts = self._counts, GraphCounts()
        counts.held = len(self._any.held) + (0 if self._last is None else len(self._last.held))
        return counts


def describe(inputs: Unit) -> str:
    """The tokens of each pass; of a step those that its microbatches have in all."""
    if isinstance(inputs, tuple):
        tokens = [sum(p.num_tokens for p in (m.first_pass, m.second_pass) if p is not None) for m in inputs]
        return f"a step of {len(inputs)} microbatches with passes of {sum(tokens)} tokens in all"
    drafts = [] if inputs.draft is None else [inputs.draft.token_pass]
    passes = [*drafts, inputs.first_pass, *([] if inputs.second_pass is None else [inputs.second_pass])]
    return f"passes of {' and '.join(str(p.num_tokens) for p in passes)} tokens"


def joint_forms(forms: Sequence[Hashable], peers: Sequence[Group], device: torch.device) -> list[Hashable]:
    """For each unit its form and, where there are peers, the forms that they have for theirs, by hashes; equal for two units on one rank
    where it is on all. Collective; the host waits for it, so it is called once for all units of a step."""
    if all(group.size == 1 for group in peers):
        return list(forms)
    hashes = torch.tensor([hash(form) for form in forms], device=device)[None]
    for group in peers:
        hashes = communication.all_gather(hashes, group)
    return [(form, of_all) for form, of_all in zip(forms, map(tuple, hashes.T.tolist()), strict=True)]


def copied(result: Any) -> Any:
    """`result` with its tensors copied to memory of their own, a launch a dtype."""
    sources = tensors_of(result)
    copies = [torch.empty_like(tensor) for tensor in sources]
    copy_by_dtype(copies, sources)
    remaining = iter(copies)
    return map_tensors(result, lambda _: next(remaining))


def copy_by_dtype(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, of one shape and dtype with it: a launch a dtype, where tensors of several would be one each."""
    of_dtype = defaultdict(list)
    for pair in zip(targets, sources, strict=True):
        of_dtype[pair[1].dtype].append(pair)
    for pairs in of_dtype.values():
        torch._foreach_copy_(*map(list, zip(*pairs, strict=True)))


def forward_backward_of(model: DiffusionGemma, pipeline: ModelPipeline | None = None,
                        optimizer: MasterOptimizer | None = None) -> Callable[[Any], MicrobatchResult]:
    """The function that runs a unit, a microbatch or through a pipeline all of a step's, and gives what it made, its notes taken out of the
    model. With the `optimizer` it is the last unit of a step, whose gradients are summed over all ranks."""

    def run(inputs: Unit) -> MicrobatchResult:
        before = drain(model)
        if pipeline is not None:
            terms = pipeline.train(inputs)
        else:
            terms = model(inputs)
            if optimizer is not None:
                optimizer.buckets.last_microbatch()
            terms.total.backward()
        if optimizer is not None:
            if pipeline is not None:  # a parameter has several backwards a microbatch there, so that none of them is the last
                optimizer.buckets.last_microbatch()
            finalize_gradients(optimizer.buckets, model.context)
        result = MicrobatchResult(terms.detach(), drain(model))
        note(model, before)
        return result

    return run


def graphed(model: DiffusionGemma, *, limit: int, message: Callable[[str], None], pipeline: ModelPipeline | None = None,
            optimizer: MasterOptimizer | None = None, sums_load: bool = False) -> GraphedMicrobatches:
    """A model's microbatches by CUDA graphs, or a step's as one through the `pipeline` that it is a part of; over several ranks with the
    sums of the gradients that the `optimizer` steps by. `sums_load`: an auxiliary loss has data-parallel ranks exchange their experts' load
    within a microbatch. ValueError where there is no CUDA device, one on which attention waits for the host, or where a pipeline's
    transfers share hardware queues with its work."""
    context = model.context
    device = context.device
    if device.type != "cuda":
        raise ValueError(f"--cuda-graph-impl local records CUDA graphs, and the device is {device}; set --cuda-graph-impl none")
    if not has_large_shared_memory(device):
        raise ValueError("--cuda-graph-impl local: without the kernels for sm_90 and sm_100, attention is cut by the lengths of the batch, "
                         "which the host reads; set --cuda-graph-impl none")
    if pipeline is not None:
        check_queues(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"))
    return graphs_of(model, CudaRecorder(device), limit=limit, message=message, pipeline=pipeline, optimizer=optimizer, sums_load=sums_load)


def check_queues(setting: str | None) -> None:
    """ValueError unless CUDA_DEVICE_MAX_CONNECTIONS, as it is set, gives a recorded pipeline's transfers queues of their own."""
    if setting is None or int(setting) < QUEUES:
        raise ValueError(f"--cuda-graph-impl local over a pipeline: with CUDA_DEVICE_MAX_CONNECTIONS={setting or 'not set'} work may stand "
                         f"behind transfers that wait for it; export CUDA_DEVICE_MAX_CONNECTIONS={QUEUES}, or set --cuda-graph-impl none")


def graphs_of(model: DiffusionGemma, recorder: Recorder, *, limit: int, message: Callable[[str], None] = lambda text: None,
              pipeline: ModelPipeline | None = None, optimizer: MasterOptimizer | None = None,
              sums_load: bool = False) -> GraphedMicrobatches:
    """As `graphed`, by any recorder."""
    context = model.context
    within = groups_within(context, sums_load=sums_load)
    has_sums = optimizer is not None and context.world.size > 1
    return GraphedMicrobatches(
        forward_backward_of(model, pipeline), lambda notes: note(model, notes), recorder, device=context.device, limit=limit, peers=within,
        message=message, run_last=forward_backward_of(model, pipeline, optimizer) if has_sums else None,
        everyone=(context.world,), state=lambda: gradients_used(optimizer),
        progress=None if pipeline is None else pipeline.executor.progress)


def gradients_used(optimizer: MasterOptimizer) -> int:
    """How many gradients kernels have ever added to. The sums clear those of them that still count as zeros, which nobody else does: a
    recording that was made before another was used would leave that one as it was."""
    return sum(gradient.is_used for bucket in optimizer.buckets.buckets for gradient in bucket.main_gradients)


def groups_within(context: ParallelContext, *, sums_load: bool) -> tuple[Group, ...]:
    """Groups that, gathered over one after the other, tell each rank of all that exchange something within a unit, directly or by others.

    Gathered so, grids that do not nest (tp 3 and ep 2) would tell each rank of others.
    """
    dense, expert = context.tp.size * context.cp.size, context.ep.size * context.etp.size
    if sums_load or dense % expert and expert % dense:
        return (context.world,)
    return context.ep, context.etp, context.tp, context.cp, context.pp


def drain(model: DiffusionGemma) -> MicrobatchNotes:
    """What was noted since the last call, taken out of the model."""
    loads = {}
    for number, block in model.layers.items():
        bias = block.moe.router.bias
        if bias is not None and bias.load is not None:
            loads[number], bias.load = bias.load, None
    return MicrobatchNotes(model.routing.drain(), loads, model.recompute.monitor.drain(), model.context.log.drain())


def note(model: DiffusionGemma, notes: MicrobatchNotes) -> None:
    """Add what a `drain` gave to what the model has noted."""
    for layer, figures in notes.figures.items():
        model.routing.note(layer, figures)
    for number, load in notes.loads.items():
        bias = model.layers[number].moe.router.bias
        bias.load = load if bias.load is None else bias.load + load
    model.recompute.monitor.note(notes.replays)
    model.context.log.add(notes.sent)
