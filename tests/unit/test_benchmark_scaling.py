"""The scaling suite's own arithmetic: what a row says, what counts as failed, and how its processes are started."""
import argparse
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from benchmarking import scaling  # noqa: E402
from benchmarking.scaling import CASES, KernelTimes, Result, make_run, table  # noqa: E402

from megatron_dllm.config import validate  # noqa: E402


def result(name, ms, loss=2.0, kernels=None):
    case = next(case for case in CASES if case.name == name)
    return name, Result(name, case.work(False), case.ranks, ms, 1.5, loss, kernels)


def test_table_compares_with_one_device_on_the_same_work():
    results = dict([result("one device", 100.0), result("dp2", 62.5, kernels=KernelTimes(60, 15, 6, 3)), result("tp2+sp", 100.0, loss=2.1),
                    result("one device, long", 300.0), result("cp2", 200.0)])
    header, rows, missed = table(CASES, results, toy=False)
    cells = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
    assert {name: row["efficiency"] for name, row in cells.items()} == {
        "one device": "-", "dp2": "80.0 %", "tp2+sp": "50.0 %", "ep2": "-", "one device, long": "-", "cp2": "75.0 %"}
    assert [cells["dp2"][part] for part in ("collectives", "exposed", "idle")] == ["25.0 %", "10.0 %", "5.0 %"]
    assert {name: row[""] for name, row in cells.items() if row[""]} == {"tp2+sp": "LOSS DIFFERS", "ep2": "FAILED"} and missed == 2


@pytest.mark.parametrize("toy", [True, False])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_runs_are_valid(case, toy):
    assert validate(make_run(case, toy).with_values(data_source="sudoku"), world_size=case.ranks) == []


def test_rows_that_are_run_come_back(monkeypatch):
    def parts(names, command, end):
        assert names == ["one device", "dp2"]
        assert command(1, Path("there"))[-7:] == ["1", "--results", "there", "--toy", "--rows", "one device", "dp2"]
        return [{"case": "dp2", "work": "w", "ranks": 2, "step_ms": 1, "peak_gib": 1, "loss": 1,
                 "kernels": {"span_ms": 4, "collective_ms": 3, "exposed_ms": 2, "idle_ms": 1}}]

    monkeypatch.setattr(scaling, "run_parts", parts)
    results = scaling.start_worlds(CASES[:2], argparse.Namespace(toy=True, repeats=1, seconds=60.0))
    assert results == {"dp2": Result("dp2", "w", 2, 1, 1, 1, KernelTimes(4, 3, 2, 1))}
