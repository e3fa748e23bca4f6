"""Context parallelism by Transformer Engine, as plans beside ours (--context-parallel-impl transformer_engine).

    CausalPlan   clean queries, a document at a time: causal (and sliding), keys by p2p, all_gather or a2a
    CanvasPlan   canvas queries: not causal, keys by p2p, and the exact mask as a bias that is added to the scores

Its parts want 2R chunks of a document, of one length (layout.zigzag_documents), rank r of R with chunks r and 2R - 1 - r, and in a bias the
keys in the order of chunks. What is filled up to that is cut from what comes out; its queries get no gradient, and nobody who counts sees
its keys: they stand behind a document's last token, or the bias hides them. What travels travels with its fill.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..parallel import Group
from ..transformer.visibility import Visibility

LARGEST_HEAD_DIM = 256
# Keys in multiples of a tile: with others cuDNN's backward has given NaN on sm_90 (64 modulo 128).
KEY_MULTIPLE = 128
QUERY_MULTIPLE = 64
# Finite, since a block in which all keys are hidden would otherwise give NaN; far below any score of normed queries and keys.
HIDDEN = -1e4


@dataclass(frozen=True)
class Document:
    """A document on our rank: how many of its tokens are in our early and in our late chunk, and how long every chunk is with its fill.

    With 11 tokens over 2 ranks and chunks of 3, rank 0 has tokens 0 1 2 and 9 10 (and one of fill), rank 1 has 3 4 5 and 6 7 8.
    """

    early: int
    late: int
    chunk: int

    @property
    def num_tokens(self) -> int:
        return self.early + self.late

    def filled(self, x: Tensor) -> Tensor:
        """[2 chunk, ...] from our tokens [n, ...], zeros after each of the two parts."""
        parts = x.split([self.early, self.late])
        return torch.cat([F.pad(part, (0, 0) * (x.ndim - 1) + (0, self.chunk - len(part))) for part in parts])

    def tokens(self, filled: Tensor) -> Tensor:
        """The inverse of `filled`."""
        return torch.cat([filled[:self.early], filled[self.chunk:self.chunk + self.late]])


@dataclass(frozen=True)
class CausalPlan:
    """Own clean queries over the clean keys of all ranks; each rank has the keys of its queries."""

    documents: tuple[Document, ...]
    window: int | None
    comm_type: str

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cp: Group) -> Tensor:
        """[Q, h, d] from own query [Q, h, d], key and value [Q, g, d]."""
        counts = [document.num_tokens for document in self.documents]
        outputs = []
        for document, *own in zip(self.documents, *(x.split(counts) for x in (query, key, value)), strict=True):
            out = attention(*(document.filled(x) for x in own), cp, comm_type=self.comm_type, window=self.window)
            outputs.append(document.tokens(out))
        return torch.cat(outputs)


@dataclass(frozen=True)
class CanvasPlan:
    """Own canvas queries over the keys [held ; canvas] of all ranks.

    bias: bfloat16 [queries with fill, all keys with fill]: 0 where a query sees a key, else HIDDEN.
    """

    num_keys: int
    bias: Tensor

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cp: Group) -> Tensor:
        """[Q, h, d] from own query [Q, h, d], key and value [K, g, d]."""
        queries, keys = len(self.bias), self.num_keys
        filled = [F.pad(x, (0, 0, 0, 0, 0, length - len(x))) for x, length in ((query, queries), (key, keys), (value, keys))]
        return attention(*filled, cp, comm_type="p2p", bias=self.bias.to(query.dtype))[:len(query)]


def causal_plan(places: np.ndarray, starts: np.ndarray, num_clean: int, window: int | None, comm_type: str, cp_size: int) -> CausalPlan:
    """The plan of clean tokens at `places` (int64, rising) in a stream of `num_clean`, whose documents begin at `starts`; laid out by
    `layout.zigzag_documents`."""
    documents = []
    for start, stop in documents_of(starts, num_clean):
        chunk = document_chunk(stop - start, cp_size)
        own = places[(places >= start) & (places < stop)]
        early = int((own < start + cp_size * chunk).sum())
        documents.append(Document(early, len(own) - early, chunk))
    return CausalPlan(tuple(documents), window, comm_type)


def document_chunk(length: int, cp_size: int) -> int:
    """Tokens of one of the 2R chunks of a document, with fill: 1000 tokens over 2 ranks are in chunks of 256."""
    return -(-length // (2 * cp_size * KEY_MULTIPLE)) * KEY_MULTIPLE


def documents_of(starts: np.ndarray, num_clean: int) -> list[tuple[int, int]]:
    """(start, stop) of the documents that begin at `starts` in a stream of so many tokens."""
    return list(zip(starts.tolist(), np.append(starts, num_clean)[1:].tolist(), strict=True))


def canvas_plan(seen: Sequence[Visibility], num_queries: Sequence[int], device: torch.device) -> CanvasPlan:
    """The plan of own queries that see, of the keys that rank r holds, what `seen[r]` says; `num_queries`: by rank."""
    num_keys = _filled_length(max(visibility.num_clean_keys + len(visibility.canvas_keys) for visibility in seen), KEY_MULTIPLE)
    rows = _filled_length(max(num_queries), QUERY_MULTIPLE)
    early, late = [], []
    for visibility in seen:
        mask = visibility.dense()
        filled = np.zeros((rows, num_keys), bool)
        filled[:len(mask), :mask.shape[1]] = mask
        early.append(filled[:, :num_keys // 2])
        late.insert(0, filled[:, num_keys // 2:])
    visible = torch.from_numpy(np.concatenate([*early, *late], axis=1)).to(device)
    return CanvasPlan(num_keys, torch.zeros(visible.shape, dtype=torch.bfloat16, device=device).masked_fill_(~visible, HIDDEN))


def _filled_length(length: int, multiple: int) -> int:
    return max(-(-length // multiple), 1) * multiple


def attention(query: Tensor, key: Tensor, value: Tensor, cp: Group, *, comm_type: str, window: int | None = None,
              bias: Tensor | None = None) -> Tensor:
    """[Q, h, d] of own query [Q, h, d] over the keys of all ranks, of which own key and value [K, g, d] hold two chunks; scale 1.

    Causal and, with a window, sliding; with a `bias` [Q, R K] neither. ValueError if the package is missing.
    """
    try:
        from transformer_engine.pytorch import DotProductAttention
    except ImportError as error:
        raise ValueError(f"--context-parallel-impl transformer_engine needs the package transformer_engine ({error}); install it with "
                         "tools/install_gpu.sh --te, or set --context-parallel-impl local") from error
    heads, head_dim = query.shape[1:]
    causal = bias is None
    module = DotProductAttention(
        heads, head_dim, num_gqa_groups=key.shape[1], attention_dropout=0.0, qkv_format="bshd", softmax_scale=1.0,
        attn_mask_type="causal" if causal else "no_mask", attention_type="self" if causal else "cross",
        window_size=None if window is None else (window - 1, 0), cp_group=cp.handle, cp_global_ranks=list(cp.ranks),
        cp_stream=_second_stream(query.device), cp_comm_type=comm_type)
    added = {} if causal else {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias[None, None]}
    return module(*(x[None].contiguous() for x in (query, key, value)), **added).reshape(query.shape)


@cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all calls: the allocator keeps memory apart by stream."""
    return torch.cuda.Stream(device)
