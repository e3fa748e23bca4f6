"""benchmarking.toy: how the sides take turns, what is counted, and when a row holds."""
from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from benchmarking import toy  # noqa: E402


def line(ours, theirs, loss=2.5, aim=2.0):
    turns = toy.Turns(ours, theirs, ours, [2 * ms for ms in theirs])
    return toy.Line(toy.Row("x", 1, 64, "apart", aim), turns, toy.Side(loss, 7, 3), toy.Side(2.5, 9, 4))


def test_the_ratio_is_that_of_neighbours():
    """A machine that becomes three times slower half way moves neither side's share."""
    measured = line([1.0, 1.0, 3.0, 3.0], [2.0, 2.2, 6.0, 6.6])
    assert measured.turns.ratios == pytest.approx([2.0, 2.2, 2.0, 2.2]) and measured.turns.clock_ratio == pytest.approx(4.2)
    assert measured.holds and "2.10  2.00-2.20   4.20" in measured.text()


def test_a_row_holds_where_it_is_fast_enough_and_losses_agree():
    fast, slow = [1.0] * 4, [0.9] * 4
    assert line(fast, [2.0] * 4).holds and not line(fast, [1.99] * 4).holds and "missed" in line(fast, slow).text()
    assert not line(fast, [9.0] * 4, loss=2.6).holds and "losses differ" in line(fast, [9.0] * 4, loss=2.6).text()


def test_steps_take_turns():
    calls = []
    turns = toy.in_turn(lambda: calls.append("ours") or 0.0, lambda: calls.append("theirs") or 0.0, 4)
    assert calls == ["ours", "theirs"] * (toy.WARMUP + 4)
    assert [len(times) for times in dataclasses.astuple(turns)] == [4] * 4


def test_what_is_counted():
    x = torch.ones(3, requires_grad=True)
    assert toy.nodes((x * 2 + x).sum()) == 4  # sum, add, multiplication, and what gathers the gradient

    def step():
        x.grad = None
        (x * 2).sum().backward()

    assert toy.operations(step) == 6  # product, sum, the first gradient, its expansion, the product's, taken over
