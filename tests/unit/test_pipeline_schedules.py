"""Closed forms against lists typed by hand, and the rule for microbatch groups."""

import re

import pytest

from megatron_dllm.pipeline.actions import format_actions, parse_actions
from megatron_dllm.pipeline.graph import Pipeline
from megatron_dllm.pipeline.schedules import check_group, interleaved_1f1b, legal_groups, no_pipeline, one_f_one_b
from megatron_dllm.pipeline.timing import Costs, time_compute

ONE_F_ONE_B_P4_M6 = [
    "F0.0 F1.0 F2.0 F3.0 B0.0 F4.0 B1.0 F5.0 B2.0 B3.0 B4.0 B5.0",
    "F0.0 F1.0 F2.0 B0.0 F3.0 B1.0 F4.0 B2.0 F5.0 B3.0 B4.0 B5.0",
    "F0.0 F1.0 B0.0 F2.0 B1.0 F3.0 B2.0 F4.0 B3.0 F5.0 B4.0 B5.0",
    "F0.0 B0.0 F1.0 B1.0 F2.0 B2.0 F3.0 B3.0 F4.0 B4.0 F5.0 B5.0",
]

INTERLEAVED = {  # (ranks, chunks, microbatches, group): the list of each rank
    (2, 2, 2, 2): [
        "F0.0 F1.0 F0.1 F1.1 B0.1 B1.1 B0.0 B1.0",
        "F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 B0.0 B1.0",
    ],
    (2, 3, 4, 2): [
        "F0.0 F1.0 F0.1 F1.1 F0.2 F1.2 F2.0 B0.2 F3.0 B1.2 F2.1 B0.1 F3.1 B1.1 F2.2 B0.0 F3.2 B1.0 B2.2 B3.2 B2.1 B3.1 B2.0 B3.0",
        "F0.0 F1.0 F0.1 F1.1 F0.2 B0.2 F1.2 B1.2 F2.0 B0.1 F3.0 B1.1 F2.1 B0.0 F3.1 B1.0 F2.2 B2.2 F3.2 B3.2 B2.1 B3.1 B2.0 B3.0",
    ],
    (4, 2, 8, 4): [
        "F0.0 F1.0 F2.0 F3.0 F0.1 F1.1 F2.1 F3.1 F4.0 F5.0 F6.0 B0.1 F7.0 B1.1 F4.1 B2.1 F5.1 B3.1 F6.1 B0.0 F7.1 B1.0 "
        "B2.0 B3.0 B4.1 B5.1 B6.1 B7.1 B4.0 B5.0 B6.0 B7.0",
        "F0.0 F1.0 F2.0 F3.0 F0.1 F1.1 F2.1 F3.1 F4.0 B0.1 F5.0 B1.1 F6.0 B2.1 F7.0 B3.1 F4.1 B0.0 F5.1 B1.0 F6.1 B2.0 "
        "F7.1 B3.0 B4.1 B5.1 B6.1 B7.1 B4.0 B5.0 B6.0 B7.0",
        "F0.0 F1.0 F2.0 F3.0 F0.1 F1.1 F2.1 B0.1 F3.1 B1.1 F4.0 B2.1 F5.0 B3.1 F6.0 B0.0 F7.0 B1.0 F4.1 B2.0 F5.1 B3.0 "
        "F6.1 B4.1 F7.1 B5.1 B6.1 B7.1 B4.0 B5.0 B6.0 B7.0",
        "F0.0 F1.0 F2.0 F3.0 F0.1 B0.1 F1.1 B1.1 F2.1 B2.1 F3.1 B3.1 F4.0 B0.0 F5.0 B1.0 F6.0 B2.0 F7.0 B3.0 F4.1 B4.1 "
        "F5.1 B5.1 F6.1 B6.1 F7.1 B7.1 B4.0 B5.0 B6.0 B7.0",
    ],
    # a last group of another size, and groups larger than the pipeline
    (2, 2, 5, 3): [
        "F0.0 F1.0 F2.0 F0.1 F1.1 F2.1 B0.1 F3.0 B1.1 F4.0 B2.1 F3.1 B0.0 F4.1 B1.0 B2.0 B3.1 B4.1 B3.0 B4.0",
        "F0.0 F1.0 F2.0 F0.1 B0.1 F1.1 B1.1 F2.1 B2.1 F3.0 B0.0 F4.0 B1.0 F3.1 B2.0 F4.1 B3.1 B4.1 B3.0 B4.0",
    ],
}


def test_no_pipeline():
    assert format_actions(no_pipeline(microbatches=3)) == "F0.0 B0.0 F1.0 B1.0 F2.0 B2.0"


@pytest.mark.parametrize("rank", range(4))
def test_one_f_one_b(rank):
    assert format_actions(one_f_one_b(rank, ranks=4, microbatches=6)) == ONE_F_ONE_B_P4_M6[rank]


def test_one_f_one_b_with_fewer_microbatches_than_ranks():
    assert format_actions(one_f_one_b(0, ranks=4, microbatches=2)) == "F0.0 F1.0 B0.0 B1.0"
    assert format_actions(one_f_one_b(3, ranks=4, microbatches=2)) == "F0.0 B0.0 F1.0 B1.0"


@pytest.mark.parametrize("sizes, rank", [(sizes, rank) for sizes in INTERLEAVED for rank in range(sizes[0])])
def test_interleaved_1f1b(sizes, rank):
    ranks, chunks, microbatches, group = sizes
    actions = interleaved_1f1b(rank, ranks=ranks, chunks=chunks, microbatches=microbatches, group=group)
    assert format_actions(actions) == INTERLEAVED[sizes][rank]


def test_extra_warmup_runs_more_forwards_first():
    assert format_actions(one_f_one_b(1, ranks=2, microbatches=3, extra_warmup=1)) == "F0.0 F1.0 B0.0 F2.0 B1.0 B2.0"
    actions = interleaved_1f1b(1, ranks=2, chunks=2, microbatches=2, group=2, extra_warmup=1)
    assert format_actions(actions) == "F0.0 F1.0 F0.1 F1.1 B0.1 B1.1 B0.0 B1.0"


@pytest.mark.parametrize("group, words", [(3, "3 is not in the range 4 to 10"), (11, "11 is not in the range 4 to 10"),
                                          (0, "0 is not in the range"), (9, "the last group has only 1"), (8, "the last group has only 2")])
def test_check_group_refuses_small_groups_and_names_those_that_work(group, words):
    with pytest.raises(ValueError, match=words) as refusal:
        check_group(ranks=4, chunks=2, microbatches=10, group=group)
    legal = re.search(r"--microbatch-group-size-per-virtual-pipeline-stage to one of \[([\d, ]+)\]", str(refusal.value))
    assert [int(word) for word in legal[1].split(",")] == [5, 6, 10] == legal_groups(ranks=4, chunks=2, microbatches=10)
    for fitting in (5, 6, 10):
        check_group(ranks=4, chunks=2, microbatches=10, group=fitting)


def test_check_group_asks_for_more_microbatches_where_no_group_works():
    with pytest.raises(ValueError, match="give each pipeline at least 4 microbatches"):
        check_group(ranks=4, chunks=2, microbatches=3, group=3)
    check_group(ranks=4, chunks=2, microbatches=4, group=4)


def test_the_rule_for_groups_keeps_deadlocks_out():
    """Five microbatches in groups of 4 leave a group of 1 on four ranks: lists made by the same formula would wait for each other."""
    order = [(m, c) for group in ((0, 1, 2, 3), (4,)) for c in range(3) for m in group]
    forwards = [f"F{m}.{c}" for m, c in order]
    backwards = [f"B{m}.{2 - c}" for m, c in order]
    lists = []
    for rank in range(4):
        warmup = min(2 * (3 - rank) + 2 * 4, len(order))
        pairs = [token for pair in zip(forwards[warmup:], backwards, strict=False) for token in pair]
        lists.append(parse_actions(" ".join(forwards[:warmup] + pairs + backwards[len(order) - warmup :])))
    with pytest.raises(ValueError, match="the compute lists wait for each other"):
        time_compute(Pipeline(4, 3, (False,) * 5), lists, Costs.uniform(12))
    assert 4 not in legal_groups(ranks=4, chunks=3, microbatches=5)


@pytest.mark.parametrize("ranks, chunks, microbatches, group", [(4, 1, 8, 1), (4, 2, 8, 4), (3, 3, 10, 5), (2, 4, 6, 3), (1, 3, 2, 1)])
def test_closed_forms_leave_the_bubble_of_the_paper(ranks, chunks, microbatches, group):
    """(M * V + P - 1) * (F + B) ticks in all (arXiv 2104.04473, section 2.2)."""
    pipeline = Pipeline(ranks, chunks, (False,) * microbatches)
    if chunks == 1:
        lists = [one_f_one_b(rank, ranks=ranks, microbatches=microbatches) for rank in range(ranks)]
    else:
        sizes = dict(ranks=ranks, chunks=chunks, microbatches=microbatches, group=group)
        lists = [interleaved_1f1b(rank, **sizes) for rank in range(ranks)]
    assert time_compute(pipeline, lists, Costs.uniform(pipeline.stages)).makespan == (microbatches * chunks + ranks - 1) * (10 + 20)
