"""What the benchmarks count as sent: our own calls once, and those of others."""
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_dllm.context_parallel.transfers import start_shift
from megatron_dllm.parallel import Topology, communication, create_context

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from benchmarking.exchanges import counted  # noqa: E402


def sent_by_each(rank, size):
    """Bytes of our calls, then of those of a package (this file), then of neither."""
    cp = create_context(Topology(world=size, cp=size), rank=rank, device=torch.device("cpu"), sequence_parallel=False).cp
    x, found = torch.ones(6, dtype=torch.float32), []
    with counted(cp) as count:
        start_shift(x, cp, 1, (6,)).wait()
        counts = [4, 2] if rank == 0 else [2, 4]
        communication.exchange(x, counts, counts, cp)
        found.append(count())
        passes = [(dist.isend, x), (dist.irecv, torch.empty(6))]
        for work in dist.batch_isend_irecv([dist.P2POp(function, tensor, cp.ranks[1 - rank], cp.handle) for function, tensor in passes]):
            work.wait()
        found.append(count())
        dist.all_to_all_single(torch.empty(6), x, group=cp.handle)
        found.append(count())
    return found


@pytest.mark.slow
def test_every_call_counts_once(world):
    assert world.run(sent_by_each, 2, size=2) == [[24 + 8, 56, 68], [24 + 8, 56, 68]]
