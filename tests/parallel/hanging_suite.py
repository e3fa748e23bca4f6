"""The suite full with cases that measure nothing; rank 1 hangs in those that HANG names, divided by |, and, if it has `the end`, there."""
import os
import runpy
import sys
import time
from pathlib import Path

HANG = os.environ["HANG"].split("|")
TOOLS = Path(__file__).parents[2] / "tools"
sys.path[:0] = [str(TOOLS), str(TOOLS.parent)]

from benchmarking import full  # noqa: E402
from torch import distributed as dist  # noqa: E402

from megatron_dllm.parallel.launch import launched  # noqa: E402
from megatron_dllm.training.loop import barrier  # noqa: E402


def hang_forever():
    while True:
        time.sleep(1)


def measure(case, run, context, arguments):
    if launched()[0] == 1 and case.name in HANG:
        hang_forever()
    barrier(context)  # where rank 0 then waits
    return full.Result(case.name, case.ranks, 1.0, 1.0, 1.0, 64, 0.0, 0.0, 0.0, 0.0, (2.0, 1.5), 1.0)


def destroy():
    if launched()[0] == 1 and "the end" in HANG:
        hang_forever()


full.SCRIPT, full.measure, full.END_SECONDS, dist.destroy_process_group = Path(__file__), measure, 2.0, destroy
runpy.run_path(str(TOOLS / "benchmark.py"), run_name="__main__")
