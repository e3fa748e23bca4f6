"""The suite that runs the others counts those that missed or failed, and goes on after them."""
import argparse
import subprocess

import pytest
import torch

from tools.benchmarking import h200


def test_run(monkeypatch, capsys):
    commands, statuses = [], {"training": 0, "adapters": 1, "generation": 0, "kernels": -9}

    def run(command, check):
        commands.append(command[3:])
        return argparse.Namespace(returncode=statuses[command[3]])

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(subprocess, "run", run)
    assert h200.run(argparse.Namespace(only=h200.SUITES, nemo=True)) == 2
    assert commands == [["training", "--nemo"], ["adapters"], ["generation"], ["kernels"]]
    verdicts = [line.split(" s   ")[1] for line in capsys.readouterr().out.splitlines()[-4:]]
    assert [verdict[:7] for verdict in verdicts] == ["every a", "an aim ", "every a", "FAILED"]


def test_needs_a_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        h200.run(argparse.Namespace(only=h200.SUITES, nemo=False))


def test_cost_of_streams(capsys):
    from tools.benchmarking.training import H200_ROWS, Line, Timing, _mhc_costs_too_much

    plain, streams = H200_ROWS[0], next(row for row in H200_ROWS if row.streams > 1)

    def cost(milliseconds):
        lines = [Line(row, Timing(median=time, least=time, most=time, peak_gib=1.0, value=1.0), torch.bfloat16, 0.5, "")
                 for row, time in ((plain, 100.0), (streams, milliseconds))]
        return _mhc_costs_too_much(lines)

    assert not cost(104.9) and cost(105.1)
    assert "adds 5.1% to the step, aim 5% missed" in capsys.readouterr().out
