"""tools/verify.py graphs by processes of a CPU: layouts whose units are recorded, by a recorder that calls them again.

A response is one canvas, so that all microbatches attend alike: on a CPU attention is cut by their lengths, which a recording does not see
change.
"""
import sys
from pathlib import Path

import pytest
import torch

from megatron_dllm.parallel import Topology, create_context
from tests.unit.test_training_graphs import Rerun

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from verification import graphs  # noqa: E402

CASES = {case.name: case for case in graphs.CASES}


def compare(rank, name):
    """The figures of a case."""
    case = CASES[name]
    base = create_context(Topology(world=case.ranks), rank=rank, device=torch.device("cpu"), sequence_parallel=False)

    def recorder(optimizer):
        made = Rerun()
        made.untouched = tuple(bucket.gradients for bucket in optimizer.buckets.buckets)
        return made

    return graphs.compare(case, base, recorder, response=graphs.CANVAS, steps=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dp2, auxiliary loss", "tp2+sp ep2", "cp2", "pp2 vpp2, MTP, mHC"])
def test_replayed_steps_are_ordinary_steps(world, name):
    for figures in world.run(compare, name, size=CASES[name].ranks, timeout=120):
        assert all(figure.holds for figure in figures), figures
