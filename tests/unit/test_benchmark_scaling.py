"""The scaling suite's own arithmetic: what a row says, what counts as failed, and what a row that fails leaves."""
import argparse
import sys
import time
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


def test_a_row_that_ends_its_processes_leaves_the_others(monkeypatch, capsys):
    ended = []

    def processes(command, end):
        part = int(command[command.index("--part") + 1])
        ended.append(part)
        if part == 0:
            Path(command[command.index("--results") + 1]).write_text(
                '[{"case": "one device", "work": "w", "ranks": 1, "step_ms": 1, "peak_gib": 1, "loss": 1, "kernels": null}]')
        return 1

    monkeypatch.setattr(scaling, "run_until", processes)
    results = scaling.start_worlds(CASES[:3], argparse.Namespace(toy=True, repeats=1, seconds=60.0))
    assert list(results) == ["one device"] and ended == [0, 2]
    assert capsys.readouterr().out.count("FAILED") == 2


def test_processes_are_told_to_end_in_time():
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert scaling.run_until(sleeper, time.monotonic() + 0.2) is None
    assert scaling.run_until([sys.executable, "-c", "raise SystemExit(3)"], time.monotonic() + 60) == 3
