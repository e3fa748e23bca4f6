"""tools.benchmarking.moe: its cases and lines; what runs is tried in tests/parallel."""

import math

from megatron_dllm.training.step import StepResult
from tools.benchmarking import moe


def test_cases_have_names_of_their_own_and_the_best_come_first():
    assert len(moe.BY_NAME) == len(moe.CASES)
    assert [str(case) for case in moe.CASES[:2]] == ["deepep, replay, graph", "deepep, no recompute, graph"]
    assert all(case.bounded for case in moe.CASES if case.graphed) and not any(case.runs_anywhere for case in moe.CASES if case.graphed)
    assert {str(case) for case in moe.PROFILED} <= set(moe.BY_NAME)


def test_a_line_says_that_a_graph_has_no_forward_of_its_own():
    result = StepResult(loss=2.0, terms=None, grad_norm=1.0)

    def line(case, forward):
        steps = tuple(moe.TimedStep((time, forward, time / 2, time / 4), result, 16) for time in (900.0, 200.0, 100.0, 300.0))
        return moe.Measured(steps, warmup=1, tokens=2048, peak_gib=60.0).text(case)

    graphed, plain = line(moe.CASES[0], math.nan), line(moe.Case("deepep"), 40.0)
    assert len(graphed) == len(plain)
    assert graphed.removeprefix(str(moe.CASES[0])).split() == [
        "200.0", "100.0", "300.0", "-", "100.0", "50.0", "10240", "60.0", "16", "-", "-", "2.000000", "2.000000"]
    assert plain.removeprefix("deepep, replay").split()[3] == "40.0"
