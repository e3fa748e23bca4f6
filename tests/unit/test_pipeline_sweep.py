"""A reduced sweep over all legal sizes; `tools/plan.py pipeline --sweep` runs the whole one."""

import pytest

from megatron_dllm.pipeline import sweep
from megatron_dllm.pipeline.sweep import Case, cases, check_case, count_refusals

LIMITS = dict(max_ranks=4, max_chunks=3, max_microbatches=6)


def test_every_schedule_of_a_reduced_sweep_is_sound():
    outcomes = [check_case(case) for case in cases(**LIMITS)]
    # One chunk takes any number of microbatches (up to 8 on 4 ranks); 2 and 3 chunks take 21, 10, 5 and 6 groups on 1 to 4 ranks, counted
    # by hand. Each has three kinds of coins, and the smallest group of 6, 5, 4 and 5 numbers of microbatches two cases more.
    assert len(outcomes) == 5 * (6 + 6 + 6 + 8) + 2 * (3 * (21 + 10 + 5 + 6) + 2 * (6 + 5 + 4 + 5))


@pytest.mark.parametrize("case", [Case(8, 1, 16, 1, "some"), Case(7, 2, 14, 7, "all"), Case(8, 4, 8, 8, "some", overlap=False)], ids=str)
def test_some_large_schedules_are_sound(case):
    outcome = check_case(case)
    assert outcome.least_bubble <= outcome.bubble < 1
    assert 1 <= outcome.time_over_bound < 1.2


def test_count_refusals():
    # Groups of 0 to M + 1, for M = 1 to 4: 3 + 4 + 5 + 6, and on 3 ranks up to M = 6. Legal are 10, 4 and 5 of them on 1, 2 and 3 ranks.
    assert count_refusals(max_ranks=3, max_chunks=2, max_microbatches=4) == (18 - 10) + (18 - 4) + (18 + 7 + 8 - 5)


def test_the_sweep_sees_a_wrong_order_of_transfers(monkeypatch):
    """A transfer pass whose receives stand in another order than the sends."""
    from megatron_dllm.pipeline import assembly
    from megatron_dllm.pipeline.actions import Kind

    def reversed_receives(pipeline, lists, costs, *, overlap=True):
        result = assembly_add_transfers(pipeline, lists, costs, overlap=overlap)
        rows = [row for row, action in enumerate(result[1]) if action.kind == Kind.RECEIVE]
        result[1][rows[0]], result[1][rows[1]] = result[1][rows[1]], result[1][rows[0]]
        return result

    assembly_add_transfers = assembly.add_transfers
    case = Case(2, 2, 2, 2, "all")
    assert sweep.check_case(case).case == case
    monkeypatch.setattr(assembly, "add_transfers", reversed_receives)
    with pytest.raises(AssertionError, match="sends and receives are not in one order"):
        sweep.check_case(case)
