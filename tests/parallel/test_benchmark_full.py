"""The suite full of tools/benchmark.py on two gloo ranks: adapters on a long document, beside one device; what it does where it hangs."""
import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megatron_dllm.parallel import Topology, create_context

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from benchmarking import full  # noqa: E402


def steps(rank, _):
    """The table's lines and how many cases are missed, from rank 0."""
    base = create_context(Topology(world=2), rank=rank, device=torch.device("cpu"), sequence_parallel=False)
    arguments = argparse.Namespace(toy=True, device="cpu", layers=2, seq_length=32, long_length=192, repeats=1, cases=["cp2"])
    todo, contexts = full.chosen(2, arguments), {}
    results = [full.run_case(case, base, contexts, arguments) for case in todo]
    if rank:
        assert results == [None] * len(todo)
        return None
    return full.table(todo, {result.case: result for result in results}, toy=True, device="cpu")


@pytest.mark.slow
def test_loss_is_that_of_one_device(world):
    (lines, missed), _ = world.run(steps, None, size=2)
    assert missed == 0, lines
    assert [line.split("  ")[0] for line in lines[1:]] == ["lora long, one device", "cp2, lora, long"]


def suite(hang, *, seconds, case_seconds):
    """(what the suite prints, seconds that it took) with two ranks and four cases that measure nothing."""
    start = time.monotonic()
    command = [sys.executable, str(Path(__file__).with_name("hanging_suite.py")), "--suite", "full", "--toy", "--processes", "2",
               "--cases", "cp2", "mHC 4", "--seconds", str(seconds), "--case-seconds", str(case_seconds)]
    done = subprocess.run(command, env={**os.environ, "HANG": hang}, capture_output=True, text=True, timeout=280)
    return done.stdout, time.monotonic() - start


@pytest.mark.full
def test_what_hangs_is_told_with_every_ranks_stack_and_others_go_on():
    output, _ = suite("cp2, lora, long|the end", seconds=240, case_seconds=6)
    of_case, of_end = output[output.index("FAILED cp2, lora, long"):].split("all ran, but their processes did not end by themselves")
    assert "rank 0:\n" in of_case and "in barrier" in of_case and "rank 1:\n" in of_case and "in hang_forever" in of_case
    assert "rank 1:\n" in of_end and "in hang_forever" in of_end and "in destroy" in of_end
    table = output.splitlines()[-5:]
    assert [line.split("  ")[0] for line in table[1:]] == ["lora long, one device", "mhc, one device", "cp2, lora, long", "pp2 vpp2, mHC 4"]
    assert [line.endswith("NOT MEASURED") for line in table] == [False, False, False, True, False] and table[-1].endswith("ok")


@pytest.mark.slow
def test_it_ends_in_time_with_its_table():
    output, took = suite("cp2, lora, long", seconds=18, case_seconds=200)
    assert took < 20.0
    assert "the time is over, in " in output and output.splitlines()[-1].endswith("NOT MEASURED")
