"""Generation with a trained model: for every row the keys and values of its clean tokens, and canvases decoded against them."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...diffusion.sampler import Unrecorded
from ...transformer.block import Context
from ...transformer.gated_delta_plan import NOTHING, Runs, appended_runs
from ...transformer.token_pass import LAYER_TYPES, PassKeys, PassTokens, SequenceSplit, TokenPass, token_pass
from ...transformer.visibility import CLEAN, Visibility
from .model import DiffusionGemma


class Session(Unrecorded):
    """R rows in the middle of generation (the sampler's Denoiser).

    Full layers keep the keys of all of a row's tokens, sliding layers those of the last window - 1; linear layers the state at its end.
    A layer's context is one flat tensor, the rows one after the other; `held` says how many keys of each row it has, by layer type.

    Runs every model in every layout, eagerly; see static_session for what runs faster on one GPU.
    """

    def __init__(self, model: DiffusionGemma, num_rows: int):
        config = model.config
        self.model, self.num_rows, self.vocab_size, self.canvas_length = model, num_rows, config.vocab_size, config.canvas_length
        self.max_positions, self.dtype, self.device = config.max_position_embeddings, model.dtype, model.context.device
        self.split = SequenceSplit.of(model.context)
        self.lengths = np.zeros(num_rows, np.int64)
        self.held = {kind: np.zeros(num_rows, np.int64) for kind in LAYER_TYPES}
        self.linear = "linear" in config.layer_types
        self.contexts: dict[int, Context] | None = None
        self._decoding: tuple[tuple[int, ...], TokenPass] | None = None

    @torch.no_grad()
    def encode(self, tokens: Sequence[Tensor]) -> None:
        """Append clean tokens (int64 [n], n may be 0) to each row."""
        counts = np.array([len(row) for row in tokens], np.int64)
        if counts.sum() == 0:
            return
        self._decoding = None
        positions = np.concatenate([np.arange(n) + start for n, start in zip(counts, self.lengths, strict=True)])
        visibility, order, kept, held = {}, {}, {}, {}
        for kind in LAYER_TYPES:
            visibility[kind], order[kind] = self._appended(kind, counts)
            kept[kind], held[kind] = self._keep(kind, counts, order[kind])
        x = self.model.embed(torch.cat(list(tokens)))
        new = PassTokens(visibility, positions, num_clean=len(positions),
                         runs=appended_runs(counts, self.contexts is not None) if self.linear else None)
        appended = token_pass(self.model.config, new, device=self.device, keys=PassKeys(kept, order), split=self.split)
        _, self.contexts = self.model.run_layers(x, appended, self.contexts)
        self.held, self.lengths = held, self.lengths + counts

    def _appended(self, kind: str, counts: np.ndarray) -> tuple[Visibility, np.ndarray]:
        """Visibility of the new tokens over each row's keys, old then new, and where those stand in [context ; new tokens]."""
        old = self.held[kind]
        starts = np.cumsum(old + counts) - (old + counts)
        first = np.repeat(starts, counts)
        past = np.concatenate([start + before + 1 + np.arange(n) for start, before, n in zip(starts, old, counts, strict=True)])
        old_at, new_at = np.cumsum(old) - old, old.sum() + np.cumsum(counts) - counts
        order = np.concatenate([np.concatenate([a + np.arange(n), b + np.arange(m)])
                                for a, n, b, m in zip(old_at, old, new_at, counts, strict=True)])
        nothing = np.zeros(0, np.int64)
        return Visibility(first, past, np.full(len(first), CLEAN), nothing, len(order)), order

    def _keep(self, kind: str, counts: np.ndarray, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of [context ; new tokens] stay, row by row, and how many of each row."""
        total = self.held[kind] + counts
        keep = total if kind == "full" else np.minimum(total, self.model.config.window_size - 1)
        ends = np.cumsum(total)
        return np.concatenate([order[end - n:end] for end, n in zip(ends, keep, strict=True)]), keep

    @torch.no_grad()
    def denoise(self, canvas: Tensor, self_conditioning_logits: Tensor | None, rows: Tensor) -> Tensor:
        """Logits [A, C, V], at least fp32, of canvases [A, C] right after what the rows [A] hold, given the logits of the step before."""
        decoding = self._pass(tuple(rows.tolist()), canvas.shape[1])
        model = self.model
        x, signal = model.embed(canvas.flatten()), None
        if self_conditioning_logits is not None:
            signal = model.own(model.soft_signal_of(self_conditioning_logits.flatten(0, 1)))
        x, _ = model.run_layers(model.self_conditioning(x, signal), decoding, self.contexts)
        return model.logits(model.whole(x, decoding)).unflatten(0, canvas.shape)

    def _pass(self, rows: tuple[int, ...], length: int) -> TokenPass:
        """The canvas pass of these rows; kept until the rows or their contexts change."""
        if self._decoding is None or self._decoding[0] != rows:
            chosen = np.array(rows)
            ids = np.repeat(np.arange(len(rows)), length)
            visibility = {}
            for kind in LAYER_TYPES:
                ends = np.cumsum(self.held[kind])
                first, past = np.repeat((ends - self.held[kind])[chosen], length), np.repeat(ends[chosen], length)
                visibility[kind] = Visibility(first, past, ids, ids, int(ends[-1]))
            positions = (self.lengths[chosen][:, None] + np.arange(length)).reshape(-1)
            canvas = PassTokens(visibility, positions, num_clean=0, runs=self._canvas_runs(rows, length) if self.linear else None)
            self._decoding = rows, token_pass(self.model.config, canvas, device=self.device, split=self.split)
        return self._decoding[1]

    def _canvas_runs(self, rows: tuple[int, ...], length: int) -> Runs:
        """Each row's canvas goes on from the row's state."""
        if self.contexts is None:
            return Runs((length,) * len(rows), (NOTHING,) * len(rows))
        return Runs((length,) * len(rows), tuple(1 + row for row in rows), num_contexts=self.num_rows)
