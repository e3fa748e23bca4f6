"""What a rank sends for attention, counted in the calls: ours by our log, those of other packages at torch.distributed."""
from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from megatron_dllm.parallel import Group

# Bytes that leave this rank, of R, by the call's own arguments; as parallel.communication counts them.
CALLS: dict[str, Callable[..., int]] = {
    "batch_isend_irecv": lambda ranks, operations: sum(_bytes(one.tensor) for one in operations if one.op is dist.isend),
    "all_to_all_single": lambda ranks, out, x, *args, **options: _bytes(x) * (ranks - 1) // ranks,
    "all_gather_into_tensor": lambda ranks, out, x, *args, **options: _bytes(x) * (ranks - 1),
    "reduce_scatter_tensor": lambda ranks, out, x, *args, **options: _bytes(out) * (ranks - 1),
}


@contextmanager
def counted(group: Group) -> Iterator[Callable[[], int]]:
    """While it holds, what is sent over `group` is counted, by Transformer Engine too, if it sends over no other; gives what tells the
    bytes until then."""
    if group.size == 1:
        yield lambda: 0
        return
    by_others = 0

    def counting(function: Callable, bytes_of: Callable[..., int]) -> Callable:
        def call(*args, **options):
            nonlocal by_others
            if not sys._getframe(1).f_globals["__name__"].startswith("megatron_dllm."):  # ours are in the log
                by_others += bytes_of(group.size, *args, **options)
            return function(*args, **options)
        return call

    before = group.log.total(group_name=group.name)[1]
    with ExitStack() as stack:
        # Single sends cannot be replaced: a batch wants torch's own functions in it.
        stack.enter_context(mock.patch.dict(os.environ, NVTE_BATCH_MHA_P2P_COMM="1"))
        for name, bytes_of in CALLS.items():
            stack.enter_context(mock.patch.object(dist, name, counting(getattr(dist, name), bytes_of)))
        yield lambda: by_others + group.log.total(group_name=group.name)[1] - before


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
