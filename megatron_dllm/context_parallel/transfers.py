"""The exchanges of context parallelism that are no plain collective, counted like those of `parallel.communication`."""
from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ..parallel import Group
from ..parallel.communication import Pending


def start_shift(x: Tensor, group: Group, distance: int, shape: tuple[int, ...]) -> Pending:
    """Send `x` to the rank so many places after ours (in a circle), and receive from the one as far before us a tensor of `shape`. Counted
    as "send", the bytes of `x`.

    Every rank starts its shifts in the same order, as two ranks match them by that order alone. Empty tensors are not sent.
    """
    x, received = x.contiguous(), x.new_empty(shape)
    following, previous = (group.ranks[(group.rank + step) % group.size] for step in (distance, -distance))
    operations = [dist.P2POp(dist.isend, x, following, group.handle)] if x.numel() else []
    operations += [dist.P2POp(dist.irecv, received, previous, group.handle)] if received.numel() else []
    sent = x.numel() * x.element_size()
    done = group.log.start("send", group.name, sent, f"send to rank {following} of {group.name} {group.ranks}, {tuple(x.shape)} {x.dtype}")
    return Pending(received, tuple(dist.batch_isend_irecv(operations)) if operations else (), on_wait=done, keep=(x,))


def stacked(key: Tensor, value: Tensor) -> Tensor:
    """[K, 2g, d]: keys and values of a token side by side, for one exchange of both."""
    return torch.cat([key, value], dim=1)


def unstacked(both: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `stacked`, as views."""
    key, value = both.chunk(2, dim=1)
    return key, value
