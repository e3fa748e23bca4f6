"""The calls to torch.distributed, each counted where it is made; `collectives` puts gradients on top."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from .context import Group

# Renamed in torch 2.13, where the old names warn. TODO: use the new ones alone once torch >= 2.13 is required.
_all_gather_single = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_reduce_scatter_single = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor


@dataclass
class Pending:
    """A collective under way: `wait` returns its result, valid on the current stream."""

    result: Tensor
    works: Sequence[dist.Work] = ()
    finish: Callable[[Tensor], Tensor] | None = None
    on_wait: Callable[[], None] | None = None
    # What the call reads must live until it is done.
    keep: tuple[Tensor, ...] = field(default=(), repr=False)

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        self.works, self.keep = (), ()
        if self.on_wait is not None:
            self.on_wait()
            self.on_wait = None
        if self.finish is not None:
            self.result, self.finish = self.finish(self.result), None
        return self.result


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _counted(group: Group, kind: str, sent_bytes: int, x: Tensor) -> Callable[[], None]:
    return group.log.start(kind, group.name, sent_bytes, f"{kind} over {group.name} {group.ranks}, {tuple(x.shape)} {x.dtype}")


def start_all_reduce(x: Tensor, group: Group, op: str = "sum", *, overwrite: bool = False) -> Pending:
    """Reduce (op: sum, max or min) `x` over the group, in a copy or (contiguous) in place. Sends 2 (R - 1) / R of its bytes."""
    if _check(group).size == 1:
        return Pending(x)
    assert not overwrite or x.is_contiguous(), f"only a contiguous tensor is reduced in place, strides are {x.stride()}"
    out = x if overwrite else x.clone(memory_format=torch.contiguous_format)
    handle = group.handle
    done = _counted(group, "all_reduce", 2 * _bytes(out) * (group.size - 1) // group.size, out)
    reduce_op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[op]
    return Pending(out, (dist.all_reduce(out, op=reduce_op, group=handle, async_op=True),), on_wait=done)


def start_all_gather(x: Tensor, group: Group, counts: Sequence[int] | None = None) -> Pending:
    """Concatenate the ranks' `x` along dimension 0; `counts` [R] gives their lengths where they differ.

    Sends (R - 1) times the bytes of `x`, filled up to the longest.
    """
    if _check(group).size == 1:
        return Pending(x)
    x = x.contiguous()
    if counts is None:
        longest, finish = x.shape[0], None
    else:
        _check_counts(x, group, counts)
        longest = max(counts)
        x = _fill(x, longest)

        def finish(out: Tensor) -> Tensor:
            return torch.cat([out[r * longest : r * longest + n] for r, n in enumerate(counts)])

    out = x.new_empty(group.size * longest, *x.shape[1:])
    handle = group.handle
    done = _counted(group, "all_gather", _bytes(x) * (group.size - 1), x)
    work = _all_gather_single(out, x, group=handle, async_op=True)
    return Pending(out, (work,), finish, done, keep=(x,))


def start_all_gather_in_place(x: Tensor, group: Group) -> Pending:
    """Fill in the other ranks' pieces of `x`, R equal ones along dimension 0, of which this rank has written its own. Needs no memory.

    Sends (R - 1) times the bytes of a piece.
    """
    if _check(group).size == 1:
        return Pending(x)
    assert x.is_contiguous(), f"only a contiguous tensor is gathered in place, strides are {x.stride()}"
    own = own_slice(x, group)
    handle = group.handle
    done = _counted(group, "all_gather", _bytes(own) * (group.size - 1), own)
    return Pending(x, (_all_gather_single(x, own, group=handle, async_op=True),), on_wait=done)


def start_reduce_scatter(x: Tensor, group: Group, counts: Sequence[int] | None = None) -> Pending:
    """Sum `x` over the group; rank r gets the r-th piece of dimension 0 (equal pieces, or of lengths `counts`).

    Sends (R - 1) / R of the bytes of `x`, filled up to the longest.
    """
    if _check(group).size == 1:
        return Pending(x)
    finish = None
    if counts is None:
        if x.shape[0] % group.size:
            raise ValueError(
                f"{x.shape[0]} rows do not divide over the {group.size} ranks of {group.name}; fill them up to a multiple of {group.size}"
            )
        x = x.contiguous()
    else:
        if len(counts) != group.size or sum(counts) != x.shape[0]:
            raise ValueError(f"lengths {list(counts)} are not {group.size} pieces of {x.shape[0]} rows (group {group.name})")
        x = torch.cat([_fill(piece, max(counts)) for piece in x.split(list(counts))])

        def finish(out: Tensor) -> Tensor:
            return out[: counts[group.rank]]

    out = x.new_empty(x.shape[0] // group.size, *x.shape[1:])
    handle = group.handle
    done = _counted(group, "reduce_scatter", _bytes(x) * (group.size - 1) // group.size, x)
    work = _reduce_scatter_single(out, x, group=handle, async_op=True)
    return Pending(out, (work,), finish, done, keep=(x,))


def start_all_to_all(x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], group: Group) -> Pending:
    """Send the r-th piece of `x` (send_counts[r] rows) to rank r; the result holds what they sent, in rank order.

    Sends the bytes of all pieces but our own.
    """
    _check(group)
    if len(send_counts) != group.size or sum(send_counts) != x.shape[0] or len(receive_counts) != group.size:
        raise ValueError(
            f"send counts {list(send_counts)} and receive counts {list(receive_counts)} do not describe {x.shape[0]} rows "
            f"over the {group.size} ranks of {group.name}"
        )
    if group.size == 1:
        return Pending(x)
    x = x.contiguous()
    out = x.new_empty(sum(receive_counts), *x.shape[1:])
    row_bytes = x.element_size() * (x.numel() // x.shape[0] if x.shape[0] else 0)
    handle = group.handle
    done = _counted(group, "all_to_all", row_bytes * (sum(send_counts) - send_counts[group.rank]), x)
    work = dist.all_to_all_single(out, x, list(receive_counts), list(send_counts), group=handle, async_op=True)
    return Pending(out, (work,), on_wait=done, keep=(x,))


def all_reduce(x: Tensor, group: Group, op: str = "sum", *, overwrite: bool = False) -> Tensor:
    """`x` reduced; no gradient. See `start_all_reduce`."""
    return start_all_reduce(x, group, op, overwrite=overwrite).wait()


def all_gather(x: Tensor, group: Group, counts: Sequence[int] | None = None) -> Tensor:
    """The ranks' `x` along dimension 0; no gradient. See `start_all_gather`."""
    return start_all_gather(x, group, counts).wait()


def reduce_scatter(x: Tensor, group: Group, counts: Sequence[int] | None = None) -> Tensor:
    """Our piece of the sum; no gradient. See `start_reduce_scatter`."""
    return start_reduce_scatter(x, group, counts).wait()


def exchange(x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], group: Group) -> Tensor:
    """What the ranks sent us; no gradient. See `start_all_to_all`."""
    return start_all_to_all(x, send_counts, receive_counts, group).wait()


def own_slice(x: Tensor, group: Group, counts: Sequence[int] | None = None) -> Tensor:
    """This rank's piece of dimension 0 of a tensor that every rank of the group holds whole."""
    if counts is None:
        if x.shape[0] % _check(group).size:
            raise ValueError(
                f"{x.shape[0]} rows do not divide over the {group.size} ranks of {group.name}; fill them up to a multiple of {group.size}"
            )
        length = x.shape[0] // group.size
        return x.narrow(0, group.rank * length, length)
    return x.narrow(0, sum(counts[: group.rank]), counts[group.rank])


def _check(group: Group) -> Group:
    if not isinstance(group, Group):
        raise TypeError(f"expected a Group, got {group!r}; a collective over one rank takes Group.single(name), never None")
    return group


def _check_counts(x: Tensor, group: Group, counts: Sequence[int]) -> None:
    if len(counts) != group.size or counts[group.rank] != x.shape[0]:
        raise ValueError(f"lengths {list(counts)} do not fit rank {group.rank} of {group.size} ({group.name}) with {x.shape[0]} rows")


def _fill(x: Tensor, length: int) -> Tensor:
    """`x` with zero rows up to `length`."""
    if x.shape[0] == length:
        return x.contiguous()
    return torch.cat([x, x.new_zeros(length - x.shape[0], *x.shape[1:])])
