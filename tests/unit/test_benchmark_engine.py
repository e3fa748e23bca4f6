"""benchmarking.engine at toy sizes over a stand-in for the package: nothing differs, and what does is counted."""
from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_dllm.transformer_engine import Engine
from tests.unit.fake_transformer_engine import State, install_fake

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from benchmarking import engine  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture
def package(monkeypatch):
    return Engine(install_fake(monkeypatch))


def test_toy_sizes(package, capsys):
    assert engine.run_on(CPU, package, engine.TOY, 1) == 0
    table = capsys.readouterr().out.partition("forward and backward;")[2].splitlines()
    assert len(table) == 1 + 2 + 2 + 1 and "DIFFER" not in "".join(table)
    assert min(State.attentions, State.rotations, State.losses) > 0


def test_what_differs_is_counted(package, capsys, monkeypatch):
    wrong = engine.Case("wrong", (torch.ones(3, requires_grad=True),), torch.exp, torch.sin)
    none = replace(wrong, name="none", theirs=lambda x: x * float("nan"))
    monkeypatch.setattr(engine, "cases", lambda *_: iter([wrong, none, replace(wrong, name="right", theirs=torch.exp)]))
    assert engine.run_on(CPU, package, engine.TOY, 1) == 2
    assert capsys.readouterr().out.partition("forward and backward;")[2].count("DIFFER") == 2


def test_batch_by_hand():
    """Documents of 4 and 3 tokens, a canvas of 2 after the first two of the first."""
    seen = engine.Batch((4, 3), 1).visibility(2)
    assert seen.first_key.tolist() == [0] * 4 + [4] * 3 + [0, 0] and seen.past_key.tolist() == [1, 2, 3, 4, 5, 6, 7, 2, 2]
    assert seen.canvas_id.tolist() == [-1] * 7 + [0, 0] and seen.num_clean_keys == 7
