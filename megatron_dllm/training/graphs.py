"""CUDA graphs: forward and backward of a whole microbatch as one launch, for microbatches whose form has come before.

A step of few tokens is bound by the host, which starts some thousand kernels one by one. Recorded once, they are started again together
("replayed"), on the same memory: so inputs are copied to where the recording read them, gradients go to the buckets as recorded, and what
the microbatch gives is copied away from where it was written. Everything that is not a number in a device tensor is part of the recording;
`form_of` a microbatch is what decides which recording fits. What the host notes meanwhile (routing, what recomputes replayed, what was
sent) is part of the result, and noted again with each replay.

Ranks that exchange within a microbatch must all call, all record or all replay it, and replay what was recorded together: NCCL asks for
it. So a recording belongs to the forms of all of them, which they tell each other once a step.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..diffusion.inputs import MicrobatchInputs, to_device
from ..diffusion.losses import LossTerms
from ..diffusion.nested import form_of, map_tensors, tensors_of
from ..kernels.graphs import CudaRecorder, Recorder, Recording
from ..kernels.launch import has_large_shared_memory
from ..models.diffusion_gemma.model import DiffusionGemma
from ..moe.balance import RoutingFigures
from ..moe.replay import ReplayNotes
from ..parallel import Group, Sent, communication

ALIGNMENT = 256  # bytes: kernels are compiled for aligned pointers, and those of an allocator are


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
    """A microbatch at fixed addresses on a device: all its tensors lie in one buffer, so that they come from the host in one copy."""

    def __init__(self, like: MicrobatchInputs, device: torch.device):
        sources = tensors_of(like)
        self.places, self.num_bytes = [], 0
        for tensor in sources:
            self.places.append(self.num_bytes)
            self.num_bytes += -(-tensor.numel() * tensor.itemsize // ALIGNMENT) * ALIGNMENT
        self.buffer = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        self.tensors = self._views(self.buffer, sources)
        remaining = iter(self.tensors)
        self.inputs: MicrobatchInputs = map_tensors(like, lambda _: next(remaining))

    def _views(self, buffer: Tensor, like: list[Tensor]) -> list[Tensor]:
        return [buffer[start:start + tensor.numel() * tensor.itemsize].view(tensor.dtype).view(tensor.shape)
                for start, tensor in zip(self.places, like, strict=True)]

    def load(self, inputs: MicrobatchInputs) -> None:
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


def on_device(inputs: MicrobatchInputs, device: torch.device) -> MicrobatchInputs:
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
    """Microbatches since the last report: replayed, recorded, run as ordinary calls; and recordings held in all."""

    replayed: int = 0
    recorded: int = 0
    eager: int = 0
    held: int = 0


class GraphedMicrobatches:
    """Runs forward and backward of microbatches: a form that is new as an ordinary call, one that comes again by its recording.

    run      forward and backward of inputs on the device; the gradients are left where the same address is meant each time
    note     takes what a microbatch gave beside its losses
    limit    recordings held at most; further forms stay ordinary calls
    peers    with whom `run` exchanges anything; they have as many microbatches
    message  told of every recording
    """

    def __init__(self, run: Callable[[MicrobatchInputs], MicrobatchResult], note: Callable[[MicrobatchNotes], None], recorder: Recorder, *,
                 device: torch.device, limit: int, peers: Sequence[Group] = (), message: Callable[[str], None] = lambda text: None):
        self.run, self.note, self.recorder, self.device = run, note, recorder, device
        self.limit, self.peers, self.message = limit, peers, message
        self._seen: set[int] = set()  # hashes: a long run meets more forms than memory should hold
        self._held: dict[Hashable, tuple[StaticInputs, Recording]] = {}
        self._counts, self._num_eager = GraphCounts(), 0

    def __call__(self, inputs: MicrobatchInputs) -> LossTerms:
        """The losses of one microbatch, as `each` gives them."""
        return self.each([inputs])[0]

    def each(self, microbatches: Sequence[MicrobatchInputs]) -> list[LossTerms]:
        """The losses of each microbatch, whose gradients are added to the buckets' when the device gets there."""
        keys = joint_forms([form_of(inputs) for inputs in microbatches], self.peers, self.device)
        return [self._one(key, inputs) for key, inputs in zip(keys, microbatches, strict=True)]

    def _one(self, key: Hashable, inputs: MicrobatchInputs) -> LossTerms:
        if key not in self._held:
            if len(self._held) >= self.limit or hash(key) not in self._seen:
                return self._eager(key, inputs)
            self._record(key, inputs)
        static, recording = self._held[key]
        static.load(inputs)
        recording.replay()
        self._counts.replayed += 1
        result = copied(recording.result)
        self.note(result.notes)
        return result.terms

    def _eager(self, key: Hashable, inputs: MicrobatchInputs) -> LossTerms:
        self._counts.eager, self._num_eager = self._counts.eager + 1, self._num_eager + 1
        if len(self._held) < self.limit:
            self._seen.add(hash(key))
        if self._num_eager & (self._num_eager - 1) == 0:  # 1, 2, 4, 8, ...: often enough to be seen, never a flood
            self.message(f"{self._num_eager} microbatches without a CUDA graph until now, {len(self._held)} graphs held (of at most "
                         f"{self.limit}, --cuda-graph-limit): the first of each form, and those of forms beyond the limit")
        there = on_device(inputs, self.device)
        result = self.recorder.warm_up(lambda: self.run(there))
        self.note(result.notes)
        return result.terms

    def _record(self, key: Hashable, inputs: MicrobatchInputs) -> None:
        static = StaticInputs(inputs, self.device)
        static.load(inputs)
        self._held[key] = static, self.recorder.record(lambda: self.run(static.inputs))
        self._counts.recorded += 1
        drafts = [] if inputs.draft is None else [inputs.draft.token_pass]
        passes = [*drafts, inputs.first_pass, *([] if inputs.second_pass is None else [inputs.second_pass])]
        self.message(f"CUDA graph {len(self._held)} of at most {self.limit} (--cuda-graph-limit): passes of "
                     f"{' and '.join(str(p.num_tokens) for p in passes)} tokens, {static.num_bytes / 2 ** 20:.1f} MiB of inputs")

    def drain(self) -> GraphCounts:
        """The counts since the last call."""
        counts, self._counts = self._counts, GraphCounts()
        counts.held = len(self._held)
        return counts


def joint_forms(forms: Sequence[Hashable], peers: Sequence[Group], device: torch.device) -> list[Hashable]:
    """For each microbatch its form and, where there are peers, the forms that they have for theirs, by hashes; equal for two microbatches
    on one rank where it is on all. Collective; the host waits for it, so it is called once for all microbatches of a step."""
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


def forward_backward_of(model: DiffusionGemma) -> Callable[[MicrobatchInputs], MicrobatchResult]:
    """The function that runs a microbatch and gives what it made, its notes taken out of the model."""

    def run(inputs: MicrobatchInputs) -> MicrobatchResult:
        before = drain(model)
        terms = model(inputs)
        terms.total.backward()
        result = MicrobatchResult(terms.detach(), drain(model))
        note(model, before)
        return result

    return run


def graphed(model: DiffusionGemma, *, limit: int, message: Callable[[str], None]) -> GraphedMicrobatches:
    """A model's microbatches by CUDA graphs. ValueError where there is no CUDA device, or one on which attention waits for the host."""
    device = model.context.device
    if device.type != "cuda":
        raise ValueError(f"--cuda-graph-impl local records CUDA graphs, and the device is {device}; set --cuda-graph-impl none")
    if not has_large_shared_memory(device):
        raise ValueError("--cuda-graph-impl local: without the kernels for sm_90 and sm_100, attention is cut by the lengths of the batch, "
                         "which the host reads; set --cuda-graph-impl none")
    return GraphedMicrobatches(forward_backward_of(model), lambda notes: note(model, notes), CudaRecorder(device), device=device,
                               limit=limit, peers=(model.context.ep, model.context.etp), message=message)


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
