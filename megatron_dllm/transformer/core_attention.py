"""softmax(q k^T) v over flat tokens, scale 1: a dense oracle and two ways that hold no mask of size sequence x sequence.

    kernels/attention    16 bit on sm_90 and sm_100: tiles from the three integers a query, the same few launches for any batch
    work groups          elsewhere (`takes_attention`): SDPA on pieces of equal shape, or on a CPU plain products where all are short

Legend: Q queries, K keys [clean ; canvas], h query heads, g key and value heads (h a multiple of g), d head dimension.
"""
from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..config import ModelConfig
from ..kernels.attention_tiles import AttentionTiles, attention_tiles, takes_attention
from .attention_work import WorkGroup, work_list
from .precision import at_least_fp32
from .rows import Rows, take_distinct
from .small_attention import SmallWork, small_attention, small_work, whole_work
from .visibility import Visibility

MOST_PAIRS = 1 << 14  # of a pass's queries and keys: so few are one piece with a mask, on a CPU
# Without cuDNN's, which builds a plan for every new shape (140 ms): the canvases of a second loop are rarely as many as before.
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class AttentionPlan:
    """Who sees whom in one pass, for the layers of one type. Nothing but tensors depends on it, lengths apart.

    tiles        the kernels' lists, the window in them
    keys         where the keys of the visibility stand, clean and canvas (None: in its order)
    seen         int64 [3, Q]: first key, past key and canvas id of each query, without the window; canvas_keys int64: of each canvas key
    keeps_rows   for the backward, what attention keeps has a row a token (see joint_backward)
    """

    tiles: AttentionTiles
    keys: Rows | None
    seen: Tensor
    canvas_keys: Tensor
    num_clean_keys: int
    window: int | None
    keeps_rows: bool = False

    @cached_property
    def work(self) -> DeviceWork:
        """The work groups, made when they are first asked for: on a CUDA device that waits for the device."""
        visibility = Visibility(*self.seen.cpu().numpy(), self.canvas_keys.cpu().numpy(), self.num_clean_keys)
        on_cpu = self.seen.device.type == "cpu"
        if on_cpu and len(visibility.canvas_id) * (self.num_clean_keys + len(visibility.canvas_keys)) <= MOST_PAIRS:
            return DeviceWork((), None, whole_work(visibility.windowed(self.window).dense()))
        return DeviceWork.of(work_list(visibility, self.window, on_cpu=on_cpu), len(visibility.canvas_id), self.seen.device)

    def from_query(self, first: int) -> AttentionPlan:
        """The plan of the queries from `first` on, with all keys; on a CPU, where nobody reads tiles."""
        assert self.seen.device.type == "cpu", "the tiles are those of all queries"
        return dataclasses.replace(self, seen=self.seen[:, first:])


@dataclass(frozen=True)
class DeviceWork:
    """Work groups on the device. `order` int64 [Q] puts their outputs, joined, into query order (None: they are). `small`: the same, where
    plain products suit them."""

    groups: tuple[DeviceGroup, ...]
    order: Tensor | None
    small: SmallWork | None = None

    @classmethod
    def of(cls, work: tuple[WorkGroup, ...], num_queries: int, device: torch.device) -> DeviceWork:
        """`work` of so many queries."""
        small = small_work(work) if device.type == "cpu" else None
        if small is not None:
            return cls((), None, small)
        order = torch.cat([torch.from_numpy(group.queries.reshape(-1)) for group in work]) if work else torch.zeros(0, dtype=torch.int64)
        in_order = torch.equal(order, torch.arange(num_queries))
        return cls(tuple(_on_device(group, device) for group in work), None if in_order else torch.argsort(order).to(device))


@dataclass(frozen=True)
class DeviceGroup:
    """A WorkGroup with its indices on the device."""

    queries: Rows
    keys: Rows
    num_pieces: int
    mask: Tensor | None
    causal: bool


def attention_plan(visibility: Visibility, window: int | None, device: torch.device, key_order: np.ndarray | None = None, *,
                   num_live: int | None = None, keeps_rows: bool = False, one_form: bool = False) -> AttentionPlan:
    """The plan of one layer type for one pass; made once, used by every layer of that type.

    `key_order` int64 [num_clean_keys] says where the clean keys stand, if not in the visibility's own order. Only
    the first `num_live` queries (None: all) have a gradient that is not zero. one_form: see attention_tiles.
    """
    num_clean, num_keys = visibility.num_clean_keys, visibility.num_clean_keys + len(visibility.canvas_keys)
    in_order = key_order is None or np.array_equal(key_order, np.arange(num_clean))
    places = None if in_order else np.concatenate([key_order, np.arange(num_clean, num_keys)])
    seen = np.stack([visibility.first_key, visibility.past_key, visibility.canvas_id])
    return AttentionPlan(
        attention_tiles(visibility.windowed(window).key_intervals(), num_keys, device, num_live=num_live, one_form=one_form),
        None if places is None else Rows.of(places, device), torch.from_numpy(seen).to(device),
        torch.from_numpy(visibility.canvas_keys).to(device), num_clean, window, keeps_rows)


def _on_device(group: WorkGroup, device: torch.device) -> DeviceGroup:
    mask = None if group.mask is None else torch.from_numpy(group.mask).to(device)
    return DeviceGroup(Rows.of(group.queries, device), Rows.of(group.keys, device), len(group.queries), mask, group.causal)


def attention_backends(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> dict[str, str]:
    """What computes `attend` in layers of each type, for people to read: "attention, full, head 512" and its backend."""
    backends = {}
    for kind in dict.fromkeys(kind for kind in config.layer_types if kind != "linear"):
        size = config.head_dim(config.layer_types.index(kind))
        probe = torch.empty(1, 1, size, device=device, dtype=dtype)
        backends[f"attention, {kind}, head {size}"] = "Triton kernels" if takes_attention(probe, probe, probe) else "work groups by torch"
    return backends


def attend(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan) -> Tensor:
    """[Q, h, d] from query [Q, h, d], key and value [K, g, d]: memory linear in the sequence. Rows after the plan's are fill: zero."""
    num_queries = plan.seen.shape[1]
    if num_queries == 0:
        return query
    if plan.keys is not None:
        key, value = plan.keys.take(key), plan.keys.take(value)
    if takes_attention(query, key, value):
        from ..kernels.attention import attention  # Triton is there with CUDA alone

        return attention(query, key, value, plan.tiles)
    num_fill = query.shape[0] - num_queries
    if plan.work.small is not None:
        in_order = small_attention(query[:num_queries] if num_fill else query, key, value, plan.work.small, keeps_rows=plan.keeps_rows)
    else:
        assert not plan.keeps_rows, "pieces of SDPA keep no rows: draft_pass.py lets no such pass be joined"
        outputs = [_attend_group(query, key, value, group) for group in plan.work.groups]
        merged = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        in_order = merged if plan.work.order is None else take_distinct(merged, plan.work.order)
    return F.pad(in_order, (0, 0, 0, 0, 0, num_fill)) if num_fill else in_order


def _attend_group(query: Tensor, key: Tensor, value: Tensor, group: DeviceGroup) -> Tensor:
    heads = query.shape[1]
    q = _pieces(query, group.queries, group.num_pieces, heads)
    k, v = (_pieces(x, group.keys, group.num_pieces, heads) for x in (key, value))
    with sdpa_kernel(BACKENDS):
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask, is_causal=group.causal, scale=1.0)
    return out.transpose(1, 2).reshape(-1, heads, query.shape[-1])


def _pieces(x: Tensor, rows: Rows, count: int, heads: int) -> Tensor:
    """[count, heads, length, d]; fewer key heads are repeated, since grouped kernels fall back to a quadratic one at large d."""
    chosen = rows.take(x).unflatten(0, (count, -1)).transpose(1, 2)
    return chosen if x.shape[1] == heads else chosen.repeat_interleave(heads // x.shape[1], dim=1)


def attend_dense(query: Tensor, key: Tensor, value: Tensor, visibility: Visibility) -> Tensor:
    """The oracle of `attend`: the same from the mask as a whole, in at least fp32. `visibility` is the layer's own, window included."""
    mask = torch.from_numpy(visibility.dense()).to(query.device)
    repeats = query.shape[1] // key.shape[1]
    q, k, v = (at_least_fp32(x) for x in (query, key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)))
    scores = torch.einsum("qhd,khd->hqk", q, k).masked_fill(~mask, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(query.dtype)

