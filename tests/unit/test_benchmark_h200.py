"""The suite that runs the others counts those that missed or failed, and goes on after them."""
import argparse
import subprocess

import pytest
import torch

from tools.benchmarking import h200, training
from tools.benchmarking.workload import Timing, toy_width
from tools.refusal import Refusal


def test_run(monkeypatch, capsys):
    commands, statuses = [], {"training": 0, "adapters": 1, "generation": 0, "kernels": -9}

    def run(command, check):
        commands.append(command[3:])
        return argparse.Namespace(returncode=statuses[command[3]])

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(subprocess, "run", run)
    assert h200.run(argparse.Namespace(only=h200.SUITES, nemo=True)) == 2
    assert commands == [["training", "--nemo"], ["adapters"], ["generation", *h200.SUITES["generation"]], ["kernels"]]
    verdicts = [line.split(" s   ")[1] for line in capsys.readouterr().out.splitlines()[-4:]]
    assert [verdict[:7] for verdict in verdicts] == ["every a", "an aim ", "every a", "FAILED"]


def test_needs_a_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Refusal, match="needs a CUDA device"):
        h200.run(argparse.Namespace(only=h200.SUITES, nemo=False))


def test_cost_of_streams(capsys, monkeypatch):
    """Streams are timed in turn with the same step without them, and judged by the least ratio that is allowed."""
    row, calls = training.Row("streams", 2, 64, streams=4), []

    def measure_in_turn(steps, device, *, warmup, repeats):
        values = [step() for step in steps]
        calls.append(repeats)
        return [Timing(median=median, least=median, most=median, peak_gib=1.0, value=value)
                for median, value in zip((105.1, 100.0), values, strict=True)]

    monkeypatch.setattr(training, "measure_in_turn", measure_in_turn)
    arguments = argparse.Namespace(repeats=2, kernels=0, draft_pass="shared")
    (line,) = training._run_row(row, toy_width(["sliding", "full"]), torch.device("cpu"), torch.bfloat16, arguments)
    assert calls == [6] and line.agrees and not line.holds
    assert "adds 5.1% to the step (aim 5%)" in capsys.readouterr().out
