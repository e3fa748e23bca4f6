"""What deep_ep's classes do, over gloo: results are NaN until they are waited for, and HybridEP's row counts change from call to call."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

topk_idx_t = torch.int64


class Event:
    """Done when waited for."""

    def __init__(self, fill=()):
        self.fill = fill

    def current_stream_wait(self):
        for target, value in self.fill:
            target.copy_(value)
        self.fill = ()


def later(value):
    """(tensor of NaN, its pair for an Event)."""
    target = torch.full_like(value, torch.nan) if value.is_floating_point() else torch.full_like(value, -7)
    return target, (target, value)


class Config:
    """Sizes that grow with ranks and rows."""

    def get_nvl_buffer_size_hint(self, row_bytes, ranks):
        return 64 * row_bytes * ranks

    def get_rdma_buffer_size_hint(self, row_bytes, ranks):
        return 0


def exchange(group, x, send, receive):
    out = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
    return out


@dataclass(frozen=True)
class Handle:
    """is_in_rank bool [T, R]; rows sent to and received from each rank; rows that there is room for."""

    is_in_rank: torch.Tensor
    send: list
    receive: list
    room: int


class Buffer:
    """The classic buffer, of which `layouts` counts the dispatches without a handle."""

    def __init__(self, group, num_nvl_bytes=0, num_rdma_bytes=0):
        assert num_nvl_bytes > 0
        self.group, self.size, self.rank, self.layouts = group, dist.get_world_size(group), dist.get_rank(group), 0

    @staticmethod
    def capture():
        return Event()

    @staticmethod
    def get_dispatch_config(num_ranks):
        return Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx, num_experts, previous_event=None, async_finish=False, allocate_on_comm_stream=False):
        assert topk_idx.dtype == topk_idx_t and topk_idx.is_contiguous()
        rank_of = topk_idx // (num_experts // self.size)
        is_in_rank = (rank_of[:, :, None] == torch.arange(self.size)).any(1)
        return is_in_rank.sum(0), None, topk_idx.flatten().bincount(minlength=num_experts), is_in_rank, Event()

    def dispatch(self, x, handle=None, num_tokens_per_rank=None, num_tokens_per_rdma_rank=None, is_token_in_rank=None,
                 num_tokens_per_expert=None, topk_idx=None, topk_weights=None, expert_alignment=1, num_worst_tokens=0, config=None,
                 previous_event=None, async_finish=False, allocate_on_comm_stream=False):  # fmt: skip
        assert isinstance(previous_event, Event) and async_finish and x.is_contiguous()
        if handle is not None:
            assert topk_idx is None and topk_weights is None, "a handle takes neither indices nor weights"
            assert num_worst_tokens == 0, "a handle knows its room"
            rows = exchange(self.group, self._to_ranks(x, handle.is_in_rank), handle.send, handle.receive)
            received, fill = later(self._filled(rows, handle.room))
            return received, None, None, None, None, Event([fill])
        assert topk_idx.dtype == topk_idx_t and topk_weights.dtype.itemsize >= 4
        assert topk_idx.is_contiguous() and topk_weights.is_contiguous()
        self.layouts += 1
        send = num_tokens_per_rank.tolist()
        receive = exchange(self.group, torch.tensor(send), [1] * self.size, [1] * self.size).tolist()
        room = num_worst_tokens or sum(receive)
        assert sum(receive) <= room, "writes past its buffer"
        handle = Handle(is_token_in_rank, send, receive, room)
        rows, indices, weights = (
            exchange(self.group, self._to_ranks(value, is_token_in_rank), send, receive) for value in (x, topk_idx, topk_weights))
        num_local = len(num_tokens_per_expert) // self.size
        local = indices - self.rank * num_local
        absent = (local < 0) | (local >= num_local)
        local, weights = local.masked_fill(absent, -1), weights.masked_fill(absent, 0)
        counts = [] if num_worst_tokens else local[~absent].bincount(minlength=num_local).tolist()
        # Of what has not come, only the indices are written.
        local = torch.cat([local, local.new_full((room - len(local), local.shape[1]), -1)])
        (rows, a), (local, b), (weights, c) = later(self._filled(rows, room)), later(local), later(self._filled(weights, room))
        return rows, local, weights, counts, handle, Event([a, b, c])

    def combine(self, x, handle, topk_weights=None, previous_event=None, async_finish=False, allocate_on_comm_stream=False):
        assert isinstance(previous_event, Event) and async_finish and len(x) == handle.room and x.is_contiguous()
        y, fill = later(self._sum(x, handle))
        if topk_weights is None:
            return y, None, Event([fill])
        weights, other = later(self._sum(topk_weights, handle))
        return y, weights, Event([fill, other])

    def _filled(self, x, room):
        return torch.cat([x, x.new_full((room - len(x), x.shape[1]), torch.nan)])

    def _to_ranks(self, x, is_in_rank):
        return torch.cat([x[is_in_rank[:, r]] for r in range(self.size)])

    def _sum(self, rows, handle):
        back = exchange(self.group, rows[:sum(handle.receive)], handle.receive, handle.send).split(handle.send)
        y = rows.new_zeros(len(handle.is_in_rank), *rows.shape[1:])
        for r, part in enumerate(back):
            y[handle.is_in_rank[:, r]] += part
        return y


class HybridEPBuffer:
    """Rows in expert order, with a changing number of rows of NaN behind them."""

    def __init__(self, group, hidden_dim, max_num_of_tokens_per_rank, num_local_experts, use_fp8):
        self.group, self.size, self.rank, self.layouts = group, dist.get_world_size(group), dist.get_rank(group), 0
        self.num_local = num_local_experts

    def dispatch_with_permute(self, *, hidden, probs, scaling_factor, num_of_experts_per_rank, routing_map=None, handle=None,
                              num_permuted_tokens=None):  # fmt: skip
        assert (routing_map is None) == (num_permuted_tokens is not None) == (handle is not None)
        if handle is None:
            self.layouts += 1
            handle = self._gather(routing_map)
        mine = handle[0][:, self.rank * self.num_local:(self.rank + 1) * self.num_local]
        expert, token = mine.T.nonzero(as_tuple=True)
        delivered = num_permuted_tokens or len(token) + 1 + self.layouts % 3
        padding = torch.nn.functional.pad
        rows = padding(self._gather(hidden)[0][token], (0, 0, 0, delivered - len(token)), value=torch.nan)
        if probs is not None:
            probs = self._gather(probs)[0][token, expert + self.rank * self.num_local]
            probs = padding(probs, (0, delivered - len(token)), value=torch.nan)
        return rows, probs, None, mine.sum(0).to(torch.int32), handle

    def combine_with_unpermute(self, *, hidden, probs, handle):
        routing, lengths = handle
        expert, token = routing[:, self.rank * self.num_local:(self.rank + 1) * self.num_local].T.nonzero(as_tuple=True)
        y = self._share(hidden.new_zeros(len(routing), hidden.shape[1]).index_add(0, token, hidden[: len(token)]), lengths)
        if probs is None:
            return y, None
        dense = probs.new_zeros(routing.shape)
        dense[token, expert + self.rank * self.num_local] = probs[: len(token)]
        return y, self._share(dense, lengths)

    def _gather(self, x):
        """(all ranks' x, their lengths)."""
        parts = [None] * self.size
        dist.all_gather_object(parts, x.detach(), group=self.group)
        return torch.cat(parts), [len(part) for part in parts]

    def _share(self, x, lengths):
        dist.all_reduce(x, group=self.group)
        return x.split(lengths)[self.rank].clone()
