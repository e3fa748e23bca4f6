"""Point-to-point transfers of one pipeline rank, started in the order of its action list and waited for by name.

Two ranks match their messages by order alone, so whoever starts transfers must follow the list (transfers.transfer_order): nothing here
reorders. A buffer is held from the start of its transfer until its handle has completed.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from ..parallel import Group
from ..parallel.communication import Pending
from .actions import SEND_KINDS, STARTED_BY, Action
from .edges import EdgeShape


@dataclass(frozen=True)
class Post:
    """A transfer to start: for a send `tensor` is what goes, for a receive the empty buffer that it comes into."""

    action: Action
    tensor: Tensor

    @property
    def is_send(self) -> bool:
        return self.action.kind in SEND_KINDS


@dataclass
class PointToPoint:
    """The transfers of this rank of `group`. `batched`: those of one `start` call are issued as one operation, else one by one."""

    group: Group
    batched: bool = True
    under_way: dict[Action, Pending] = field(default_factory=dict)
    _sent_here: deque[Tensor] = field(default_factory=deque)
    _awaited_here: deque[Action] = field(default_factory=deque)

    def start(self, posts: Sequence[Post]) -> None:
        """Start transfers, in this order. Tensors without elements are not sent: both ends know."""
        remote = []
        for post in posts:
            assert post.action not in self.under_way, f"{post.action} is under way already"
            assert post.tensor.is_contiguous(), f"{post.action} needs a contiguous buffer"
            if post.action.peer == self.group.rank:
                self._hand_over(post)
            elif post.tensor.numel() == 0:
                self.under_way[post.action] = Pending(post.tensor)
            else:
                remote.append(post)
        if self.batched and len(remote) > 1:
            self._start_batch(remote)
        else:
            for post in remote:
                self._start_one(post)

    def wait(self, action: Action) -> Tensor:
        """Complete the transfer that `action` waits for; the tensor that was sent, or that has come."""
        started = action._replace(kind=STARTED_BY[action.kind])
        assert started in self.under_way, f"{action}: nothing was started"
        return self.under_way.pop(started).wait()

    def close(self) -> None:
        """Every transfer of a step must have been waited for."""
        left = [str(action) for action in self.under_way]
        assert not left and not self._sent_here and not self._awaited_here, f"transfers that nobody waited for: {' '.join(left)}"

    def _hand_over(self, post: Post) -> None:
        """A message to ourselves: the n-th one sent is the n-th one received."""
        if post.is_send:
            self.under_way[post.action] = Pending(post.tensor)
            self._sent_here.append(post.tensor)
        else:
            self._awaited_here.append(post.action)
        while self._sent_here and self._awaited_here:
            self.under_way[self._awaited_here.popleft()] = Pending(self._sent_here.popleft())

    def _start_one(self, post: Post) -> None:
        function = dist.isend if post.is_send else dist.irecv
        done = self._count(post)
        work = function(post.tensor, self.group.ranks[post.action.peer], group=self.group.handle)
        self.under_way[post.action] = Pending(post.tensor, (work,), on_wait=done)

    def _start_batch(self, posts: Sequence[Post]) -> None:
        endings = [self._count(post) for post in posts]
        works = dist.batch_isend_irecv([
            dist.P2POp(dist.isend if post.is_send else dist.irecv, post.tensor, self.group.ranks[post.action.peer], self.group.handle)
            for post in posts])
        # One handle for all of them, or one for each.
        each = [works] * len(posts) if len(works) != len(posts) else [(work,) for work in works]
        for post, handles, done in zip(posts, each, endings, strict=True):
            self.under_way[post.action] = Pending(post.tensor, handles, on_wait=done)

    def _count(self, post: Post) -> Callable[[], None]:
        tensor, kind = post.tensor, "send" if post.is_send else "receive"
        sent_bytes = tensor.numel() * tensor.element_size() if post.is_send else 0
        peer = self.group.ranks[post.action.peer]
        return self.group.log.start(kind, self.group.name, sent_bytes, f"{post.action} ({kind}, rank {peer}), {tuple(tensor.shape)}")


def empty_buffer(shape: EdgeShape, device: torch.device) -> Tensor:
    """What a message of this shape comes into."""
    return torch.empty(shape.tokens, shape.width, dtype=getattr(torch, shape.dtype), device=device)


def sum_between(x: Tensor, peer: int, group: Group) -> None:
    """x of this rank and of rank `peer` of the group, added up in place on both, bit for bit alike."""
    assert peer != group.rank and x.is_contiguous()
    other = torch.empty_like(x)
    done = group.log.start("send", group.name, x.numel() * x.element_size(), f"sum with rank {group.ranks[peer]}, {tuple(x.shape)}")
    pairs = ((dist.isend, x), (dist.irecv, other))
    for work in dist.batch_isend_irecv([dist.P2POp(function, tensor, group.ranks[peer], group.handle) for function, tensor in pairs]):
        work.wait()
    done()
    x.add_(other)
