"""tools/benchmarking/generation: a peer that takes too long, or does not run, is told from one that is slower."""
from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from benchmarking.generation import _at_most, _said, _why  # noqa: E402


def busy() -> None:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        pass


def test_what_takes_too_long_is_stopped():
    start = time.monotonic()
    with pytest.raises(TimeoutError), _at_most(0.05):
        busy()
    assert time.monotonic() - start < 10
    with _at_most(0.05):
        pass
    time.sleep(0.1)  # nothing is left to go off


def test_a_line_says_why_it_has_no_figure():
    def inside_a_compiler() -> None:
        try:
            with _at_most(0.01):
                busy()
        except TimeoutError as error:
            raise RuntimeError("the backend failed\nat some node") from error

    with pytest.raises(RuntimeError) as caught:
        inside_a_compiler()
    assert _why(caught.value, 7).startswith("not done in the 7 s")
    assert _why(RuntimeError("out of memory\nand more"), 7) == "RuntimeError: out of memory"


def test_compilations_are_said(capsys, monkeypatch):
    monkeypatch.setattr("benchmarking.generation.EVERY", 0.01)
    function = torch.compile(lambda x: x + 1, backend="eager")
    with _said("a row"):
        function(torch.ones(2))
        time.sleep(0.05)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("a row a compilation begins after 0 s") and any("still at it" in line for line in lines)
    assert sum("is done" in line for line in lines) == 1
    torch.compiler.reset()
    function(torch.ones(2))
    assert not capsys.readouterr().out  # nothing is left that speaks
