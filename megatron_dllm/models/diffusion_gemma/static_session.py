"""Generation at fixed addresses: one recording of a denoising step serves all canvases of a session, and later sessions of as many rows.

What changes from step to step, lengths included, is read on the device. What a recording is made for is a number of active rows; a cache
that must grow, by steps of CAPACITY_STEP tokens, makes it void.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...diffusion.sampler import Denoiser, LogitsReading, Reader, StepInputs, read_product
from ...kernels.attention_tiles import suits_attention
from ...kernels.graphs import CudaRecorder, Recorder, Recording
from ...moe.experts import looped_linear
from ...transformer.block_pass import block_pass
from ...transformer.decode_stack import DecodeStack, suits_decode_stack
from ...transformer.key_cache import KeyCache, slots_of
from ...transformer.token_pass import LAYER_TYPES, PassKeys, PassTokens, TokenPass, token_pass
from ...transformer.visibility import CLEAN, Visibility
from .inference import Session
from .model import DiffusionGemma

CAPACITY_STEP = 1024  # tokens by which the cache of full layers grows
MakeRecorder = Callable[[], Recorder]
ALIGNMENT = 128  # slots of a row are a multiple: the attention kernels' tile


def session_maker(model: DiffusionGemma, reader: Reader = read_product) -> Callable[[int, int], Denoiser]:
    """What makes a fresh session of so many rows, with room for as many new tokens each: recorded ones where steps of the model can be.

    ValueError for a reader of another package's where they cannot."""
    if not can_record(model):
        if reader is not read_product:
            raise ValueError("logits are read by another package only on one CUDA device, in bf16, by a model without linear layers; "
                             "set --sampling-backend local")
        return lambda num_rows, max_new_tokens: Session(model, num_rows)
    return StaticDecoder(model, lambda: CudaRecorder(model.context.device), reader=reader).session


def can_record(model: DiffusionGemma) -> bool:
    """Whether steps of a model can be recorded: on a CUDA device, on one rank, and where no layer waits for the host as experts one by one
    (fp32), attention without our kernels and linear layers do."""
    context, config = model.context, model.config
    if context.device.type != "cuda" or context.world.size > 1 or "linear" in config.layer_types:
        return False
    by_kernels = all(suits_attention(config.head_dim(layer), model.dtype, context.device) for layer in range(config.num_layers))
    return by_kernels and not any(block.moe.experts.product is looped_linear for block in model.layers.values())


class Workspace:
    """What is at fixed addresses for R rows: the caches, the inputs of a step, and what was recorded on them. One session at a time has it.

        held           int64 [R]         tokens of each row in the caches
        rows, counts   int64 [R]         rows that are active, and tokens of their blocks that are no fill
        tokens         int64 [R C]       canvases, or clean tokens
        signal         [R C, V]          the logits of the step before, which those of this step replace
        has_signal     fp32 []           0 at a canvas's first step, then 1
        temperature    float64 []
        uniforms       float64 [R C]
    """

    def __init__(self, model: DiffusionGemma, num_rows: int, capacity: int, make_recorder: MakeRecorder | None, stack: DecodeStack | None,
                 reader: Reader):
        config, device = model.config, model.context.device
        self.model, self.num_rows, self.capacity, self.stack, self.make_recorder = model, num_rows, capacity, stack, make_recorder
        self.reader = reader
        # One of our own: a pool of memory whose graphs are all gone, as when a workspace grows, takes no new ones.
        self.recorder = None if make_recorder is None else make_recorder()
        self.length, width = config.canvas_length, num_rows * config.canvas_length
        self.held, self.rows, self.counts = (torch.zeros(num_rows, dtype=torch.int64, device=device) for _ in range(3))
        self.tokens = torch.zeros(width, dtype=torch.int64, device=device)
        # Finite from the start: it is multiplied by 0 where there is no signal.
        self.signal = torch.zeros(width, config.vocab_size, dtype=model.dtype, device=device)
        self.has_signal, self.temperature = torch.zeros((), device=device), torch.ones((), dtype=torch.float64, device=device)
        self.uniforms = torch.zeros(width, dtype=torch.float64, device=device)
        ring = config.window_size - 1
        self.ring = {"sliding": ring, "full": capacity}
        self.slots = {"sliding": _aligned(ring + self.length + 1), "full": capacity}
        self.caches: dict[int, KeyCache] = {}
        for layer, block in model.layers.items():
            attention = block.attention
            shape = (num_rows, self.slots[block.kind], attention.k_proj.weight.shape[0] // attention.head_dim, attention.head_dim)
            key, value = (torch.zeros(shape, dtype=model.dtype, device=device) for _ in range(2))
            self.caches[int(layer)] = KeyCache(key, value)
        self.owner: StaticSession | None = None
        self._recordings: dict[tuple[str, int], Recording] = {}
        self._met: set[tuple[str, int]] = set()

    def run(self, name: str, count: int, function: Callable[[int], Any]) -> Any:
        """function(count): as it is the first time, from then on from a recording; then the results are there until the next call."""
        key = name, count
        if self.recorder is None:
            return function(count)
        if key not in self._recordings:
            if key not in self._met:
                self._met.add(key)
                return self.recorder.warm_up(lambda: function(count))
            self._recordings[key] = self.recorder.record(lambda: function(count))
        self._recordings[key].replay()
        return self._recordings[key].result

    def denoise_and_read(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """sample, argmax and entropy [count C] of the first `count` canvases in `tokens`; their logits over the temperature to `signal`."""
        num, model = count * self.length, self.model
        product = F.linear(self.hidden(count), model.embedding.weight)
        return self.reader(
            product, model.config.final_logit_softcapping, self.temperature, self.uniforms[:num], kept=self.signal[:num])

    def hidden(self, count: int) -> Tensor:
        """Final hidden states [count C, H] of the first canvases in `tokens`, given `signal`."""
        model, num = self.model, count * self.length
        signal = model.soft_signal_of(self.signal[:num]) * self.has_signal
        x = model.self_conditioning(model.embed(self.tokens[:num]), signal)
        return self.run_layers(x, self._pass(count, is_clean=False))

    def run_layers(self, x: Tensor, blocks: TokenPass) -> Tensor:
        """Final hidden states, normed, of what the blocks enter the stack as."""
        return self.model.run_layers(x, blocks, self.caches)[0] if self.stack is None else self.stack(x, blocks, self.caches)

    def append(self, count: int) -> None:
        """Put the first `count` blocks of clean `tokens` in the caches; they are not counted in `held` yet."""
        self.run_layers(self.model.embed(self.tokens[:count * self.length]), self._pass(count, is_clean=True))

    def _pass(self, count: int, *, is_clean: bool) -> TokenPass:
        return block_pass(self.model.config, self.rows[:count], self.held, self.counts[:count], self.slots, self.model.dtype,
                          length=self.length, is_clean=is_clean)

    def fill(self, tokens: Sequence[Tensor]) -> None:
        """Put the first tokens of each row (int64 [n], n may be 0) in the caches, which are empty."""
        config, device = self.model.config, self.model.context.device
        counts = np.array([len(row) for row in tokens], np.int64)
        starts = np.cumsum(counts) - counts
        positions = np.concatenate([np.arange(n) for n in counts])
        first, row = np.repeat(starts, counts), np.repeat(np.arange(self.num_rows), counts)
        nothing, visibility, kept, places = np.zeros(0, np.int64), {}, {}, {}
        for kind in LAYER_TYPES:
            visibility[kind] = Visibility(first, first + positions + 1, np.full(len(first), CLEAN), nothing, len(first))
            stays = positions >= np.repeat(counts, counts) - self.ring[kind]
            kept[kind] = np.flatnonzero(stays)
            places[kind] = slots_of(*(torch.from_numpy(x[stays]).to(device) for x in (row, positions)), self.slots[kind], self.ring[kind])
        clean = token_pass(config, PassTokens(visibility, positions, num_clean=len(positions)), device=device, keys=PassKeys(kept))
        _, contexts = self.model.run_layers(self.model.embed(torch.cat(list(tokens))), clean)
        for layer, cache in self.caches.items():
            cache.put(places[self.model.layers[str(layer)].kind], contexts[layer].key, contexts[layer].value)
        self.held.copy_(torch.from_numpy(counts))

    def grown(self, capacity: int) -> Workspace:
        """One with room for `capacity` tokens a row that holds the same; nothing is recorded on it."""
        larger = Workspace(self.model, self.num_rows, capacity, self.make_recorder, self.stack, self.reader)
        for layer, cache in self.caches.items():
            larger.caches[layer].key[:, :cache.key.shape[1]] = cache.key
            larger.caches[layer].value[:, :cache.key.shape[1]] = cache.value
        larger.held.copy_(self.held)
        return larger


def _aligned(slots: int) -> int:
    return -(-slots // ALIGNMENT) * ALIGNMENT


class StaticDecoder:
    """Makes sessions of one model on one rank, one after the other, which share memory and recordings.

    Each workspace has a recorder made for it, which must not do the work while it records (CUDA graphs do not): a step replaces what it
    reads. Without `make_recorder` nothing is recorded. The model must have no linear layers. Caches grow by `capacity_step` tokens.
    """

    def __init__(self, model: DiffusionGemma, make_recorder: MakeRecorder | None, capacity_step: int = CAPACITY_STEP,
                 reader: Reader = read_product):
        assert "linear" not in model.config.layer_types and model.context.world.size == 1
        self.model, self.make_recorder, self.capacity_step, self.reader = model, make_recorder, capacity_step, reader
        blocks = list(model.layers.values())
        self.stack = DecodeStack(blocks, model.final_norm.weight) if suits_decode_stack(blocks, model.config, model.dtype) else None
        self._workspaces: dict[int, Workspace] = {}

    def session(self, num_rows: int, max_new_tokens: int = 0) -> StaticSession:
        """A fresh session of so many rows, with room for as many new tokens after the prompts; it grows beyond that by itself. It ends
        when the next one of as many rows is made."""
        return StaticSession(self, num_rows, max_new_tokens)

    def workspace(self, num_rows: int, capacity: int) -> Workspace:
        """The one for so many rows with room for `capacity` tokens in each; what it held is kept where it must grow."""
        found = self._workspaces.get(num_rows)
        if found is None or found.capacity < capacity:
            rounded = -(-capacity // self.capacity_step) * self.capacity_step
            self._workspaces[num_rows] = found.grown(rounded) if found is not None else Workspace(
                self.model, num_rows, rounded, self.make_recorder, self.stack, self.reader)
        return self._workspaces[num_rows]


class StaticSession:
    """R rows in the middle of generation at fixed addresses (the sampler's Denoiser)."""

    def __init__(self, decoder: StaticDecoder, num_rows: int, max_new_tokens: int):
        config = decoder.model.config
        self.decoder, self.num_rows, self.vocab_size, self.canvas_length = decoder, num_rows, config.vocab_size, config.canvas_length
        self.max_positions, self.dtype, self.device = config.max_position_embeddings, decoder.model.dtype, decoder.model.context.device
        self.runs_ahead = self.device.type == "cuda" and decoder.make_recorder is not None
        self.new_tokens = -(-max_new_tokens // self.canvas_length) * self.canvas_length
        self.lengths = np.zeros(num_rows, np.int64)
        self._space: Workspace | None = None
        self._prepared = 0  # rows of the step that is prepared

    @torch.no_grad()
    def encode(self, tokens: Sequence[Tensor]) -> None:
        """Append clean tokens (int64 [n], n may be 0) to each row."""
        counts = np.array([len(row) for row in tokens], np.int64)
        if counts.sum() == 0:
            return
        is_first = not self.lengths.any()
        # A canvas stands after what is held, even if no more is to come.
        room = max(self.new_tokens if is_first else 0, self.canvas_length)
        space = self._workspace(int((self.lengths + counts).max()) + room)
        if is_first:
            space.fill(tokens)
        else:
            for start in range(0, int(counts.max()), self.canvas_length):
                parts = [row[start:start + self.canvas_length] for row in tokens]
                self._append({row: part for row, part in enumerate(parts) if len(part)})
        self.lengths = self.lengths + counts

    def _append(self, parts: dict[int, Tensor]) -> None:
        """A block of clean tokens to some rows, filled up to the length of a canvas."""
        space, count, length = self._space, len(parts), self.canvas_length
        for place, part in enumerate(parts.values()):
            space.tokens[place * length:place * length + len(part)] = part
        space.rows[:count].copy_(torch.tensor(list(parts)))
        space.counts[:count].copy_(torch.tensor([len(part) for part in parts.values()]))
        space.run("append", count, space.append)
        space.held.index_add_(0, space.rows[:count], space.counts[:count])

    @torch.no_grad()
    def denoise(self, canvas: Tensor, self_conditioning_logits: Tensor | None, rows: Tensor) -> Tensor:
        """Logits [A, C, V], at least fp32, of canvases [A, C] right after what the rows [A] hold, given the logits of the step before."""
        space = self._place(canvas, self_conditioning_logits, rows)
        return space.model.logits(space.hidden(len(rows))).unflatten(0, canvas.shape)

    def prepare(self, inputs: StepInputs) -> None:
        """See Denoiser."""
        space = self._place(inputs.canvas, inputs.logits, inputs.rows)
        space.temperature.fill_(inputs.temperature)
        space.uniforms[:inputs.uniforms.numel()].copy_(inputs.uniforms.flatten())
        self._prepared = len(inputs.rows)

    @torch.no_grad()
    def denoise_and_read(self) -> LogitsReading:
        """See Denoiser; the reading's logits are there until the next call."""
        space, shape = self._space, (self._prepared, self.canvas_length)
        read = space.run("denoise", self._prepared, space.denoise_and_read)
        # Out of the recording's own memory.
        sample, argmax, entropy = (x.clone().view(shape) for x in read)
        return LogitsReading(space.signal[:shape[0] * shape[1]].unflatten(0, shape), sample, argmax, entropy)

    def _place(self, canvas: Tensor, logits: Tensor | None, rows: Tensor) -> Workspace:
        """The workspace with the inputs of a step in it."""
        space, num = self._workspace(int(self.lengths.max()) + self.canvas_length), canvas.numel()
        space.rows[:len(rows)].copy_(rows)
        space.tokens[:num].copy_(canvas.flatten())
        space.has_signal.fill_(logits is not None)
        if logits is not None and logits.data_ptr() != space.signal.data_ptr():
            space.signal[:num].copy_(logits.flatten(0, 1))
        return space

    def _workspace(self, capacity: int) -> Workspace:
        """Ours, taken when it is first asked for, and grown where it must be."""
        space = self._space
        assert space is None or space.owner is self, "this session ended when the same decoder made another one of as many rows"
        if space is None or space.capacity < capacity:
            self._space = self.decoder.workspace(self.num_rows, capacity)
            self._space.owner = self
        if space is None:
            self._space.held.zero_()
        return self._space
