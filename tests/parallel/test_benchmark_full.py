"""The suite full of tools/benchmark.py on two gloo ranks: adapters on a long document, beside one device."""
import argparse
import sys
from pathlib import Path

import pytest
import torch

from megatron_dllm.parallel import Topology, create_context

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from benchmarking import full  # noqa: E402


def steps(rank, _):
    """The table's lines and how many cases are missed, from rank 0."""
    base = create_context(Topology(world=2), rank=rank, device=torch.device("cpu"), sequence_parallel=False)
    arguments = argparse.Namespace(toy=True, layers=2, seq_length=32, long_length=192, repeats=1, cases=["cp2"])
    todo, contexts = full.chosen(2, arguments), {}
    results = [full.run_case(case, base, contexts, arguments) for case in todo]
    if rank:
        assert results == [None] * len(todo)
        return None
    return full.table(todo, {result.case: result for result in results}, toy=True)


@pytest.mark.slow
def test_loss_is_that_of_one_device(world):
    (lines, missed), _ = world.run(steps, None, size=2)
    assert missed == 0, lines
    assert [line.split("  ")[0] for line in lines[1:]] == ["lora long, one device", "cp2, lora, long"]
