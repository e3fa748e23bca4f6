"""tools/verify.py graphs by processes of a CPU: layouts whose units are recorded, by a recorder that calls them again.

A response is one canvas, so that all microbatches attend alike: on a CPU attention is cut by their lengths, which a recording does not see
change.
"""
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron_dllm.parallel import Topology, create_context
from tests.unit.test_training_graphs import Rerun

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from verification import graphs  # noqa: E402

COINS = ("--self-conditioning-prob", "0.5")
CASES = {case.name: case for case in graphs.CASES}
UNLIKE = {name: graphs.Case(name, 2, (*COINS, *flags)) for name, flags in {
    "dp2, distributed optimizer": ("--use-distributed-optimizer",), "dp2, auxiliary loss": ("--moe-aux-loss-coeff", "0.1"),
    "pp2": (*graphs.PP2, "Ett|ttL")}.items()}


SLOW = "pp2"  # the others are left to the longest run


def compare(rank, case, **options):
    """The figures of a case."""
    base = create_context(Topology(world=case.ranks), rank=rank, device=torch.device("cpu"), sequence_parallel=False)

    def recorder(optimizer):
        made = Rerun()
        made.untouched = tuple(bucket.gradients for bucket in optimizer.buckets.buckets)
        return made

    return graphs.compare(replace(case, response=graphs.CANVAS), base, recorder, **options)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name == SLOW else pytest.mark.full) for name in (
    SLOW, "pp2 vpp2, MTP, mHC", "pp2 vpp2, MTP, mHC, two backwards", "dp2, auxiliary loss", "tp2+sp ep2", "cp2")])
def test_replayed_steps_are_ordinary_steps(world, name):
    for figures in world.run(partial(compare, case=CASES[name], steps=3), size=CASES[name].ranks, timeout=120):
        assert all(figure.holds for figure in figures), figures


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.full if name == "pp2" else pytest.mark.slow) for name in UNLIKE])
def test_ranks_agree_where_forms_are_unlike_and_few_are_held(world, name):
    for steps, parameters, _ in world.run(partial(compare, case=UNLIKE[name], steps=5, limit=1), size=2, timeout=120):
        assert steps.holds and parameters.holds, (steps, parameters)
