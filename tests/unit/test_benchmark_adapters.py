"""benchmarking.adapters: both sides on one frozen base, and what it takes for a row or a check to count as missed."""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from benchmarking import adapters  # noqa: E402
from benchmarking.workload import Timing  # noqa: E402


def suite(*flags: str) -> adapters.Suite:
    parser = argparse.ArgumentParser()
    adapters.add_arguments(parser)
    return adapters.Suite(parser.parse_args(["--toy", "--layers", "2", "--seq-length", "64", "--repeats", "1", *flags]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # the names of transformers 5.17, which the GPU machines have
def test_toy_rows_beside_peft(monkeypatch, capsys):
    monkeypatch.setattr(adapters, "ROWS", (adapters.Row(1, True), adapters.Row(1, False, aim=1e9), adapters.Row(4, False)))
    run = suite()

    def fails(row, *others):
        if row.batch == 4:
            raise RuntimeError("no room")
        return Timing(1.0, 1.0, 1.0, 0.0, 1.0)

    monkeypatch.setattr(run, "_ours", fails)
    assert run.run() == 2, capsys.readouterr().out
    printed = capsys.readouterr().out
    assert printed.count("ok    ") == 4 and "MISSED" not in printed and "no room" in printed
    assert len(run.lines) == 1 and "ratio missed" in run.lines[0]


def test_a_changed_base_is_seen():
    run = suite("--no-peer")
    model = adapters.calm_model(run.config, torch.device("cpu"), torch.float32)
    before = adapters._bits(model)
    with torch.no_grad():
        model.layers["0"].attention.q_proj.weight[0, 0] += 1e-6
    assert adapters._bits(model) != before


@pytest.mark.slow
def test_rows_that_come_too_late_are_left_out(capsys):
    run = suite("--no-peer", "--limit", "0")
    assert run.run() == 0 and run.lines == [] and "no time left for 1 x 64, eager" in capsys.readouterr().out
