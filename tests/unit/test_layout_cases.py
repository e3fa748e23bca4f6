"""The layouts suite's own arithmetic: the covering array, what a case trains on, and figures that must not pass by mistake."""
import itertools
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from verification import layouts  # noqa: E402
from verification.layout_bf16 import LowOutcome  # noqa: E402
from verification.layout_cases import (  # noqa: E402
    GLOBAL_BATCH,
    LAYOUTS,
    OBJECTIVES,
    SUPERVISED_ROW,
    Case,
    covering_array,
    product,
)
from verification.layout_compare import Outcome, Worst  # noqa: E402
from verification.layout_table import LOW, WIDE, cells, header, line, markdown  # noqa: E402
from verification.layout_training import make_examples, make_run, narrow_excess  # noqa: E402

from megatron_dllm.config import validate  # noqa: E402
from megatron_dllm.diffusion.random import Stream  # noqa: E402
from megatron_dllm.parallel import ParallelContext  # noqa: E402
from megatron_dllm.training.batches import BatchMaker  # noqa: E402

GOOD = Outcome("case", "", 1, 1e-3, 0.0, 0.0, Worst(), Worst(), Worst(), 0.0, Worst(), (), True, {}, ())
LOW_GOOD = LowOutcome("case", "", 1, 0.01, 1.9, 1.0, Worst(3.9), 1.2, 1.1, True, {"all_reduce": 150_000, "p2p": 20}, ())


def test_every_two_values_of_two_factors_meet():
    cases = product(LAYOUTS)
    chosen = covering_array(cases)
    wanted, met = (set().union(*(itertools.combinations(case.factors, 2) for case in some)) for some in (cases, chosen))
    assert wanted == met and len(set(chosen)) == len(chosen) < len(cases) / 20


def test_names_of_layouts_differ_and_their_runs_are_valid():
    assert len({layout.name for layout in LAYOUTS}) == len(LAYOUTS)
    for layout in LAYOUTS:
        run = make_run(Case(layout, "diffusion, 5 coins", "unequal", 2, "none"), 1).with_values(data_source="sudoku")
        assert validate(run, world_size=layout.processes) == [], layout.name


def planned(objective, lengths):
    case = Case(LAYOUTS[0], objective, lengths, 1, "none").alone
    run = make_run(case, 1)
    examples = make_examples(case.reference, run)
    maker = BatchMaker(run, examples, examples, Stream.TRAIN, ParallelContext.single())
    return run, maker.batch(range(GLOBAL_BATCH), 0).plan


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_examples_fall_as_the_case_wants_them(objective):
    run, plan = planned(objective, "unequal")
    rows = plan.microbatches[0][0].rows
    assert sum(row[0].self_conditioned for row in rows) == len(OBJECTIVES[objective][1])
    totals = [row[0].fit.total for row in rows]
    assert len(set(totals)) > 8 and max(totals) > 2 * run.model.window_size and any(row[0].fit.prompt == 0 for row in rows)
    assert all(len(row) == 2 for row in planned(objective, "packed")[1].microbatches[0][0].rows)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_one_supervised_row_has_all_that_is_scored(objective):
    run, plan = planned(objective, "one supervised")
    coins = OBJECTIVES[objective][1]
    counts = np.array([sum(int(row[0].scored(k, run.objective).sum()) for k in row[0].canvases) for row in plan.microbatches[0][0].rows])
    if objective == "ar":
        counts = np.array([row[0].num_pairs(run.objective) for row in plan.microbatches[0][0].rows])
    assert (counts > 0).sum() == 1 and counts.sum() > 0
    assert run.objective.encoder_loss_weight == (1.0 if objective == "ar" else 0.0)
    # Self-conditioned rows come first in a batch.
    before = sorted(range(GLOBAL_BATCH), key=lambda row: row not in coins)
    assert int(counts.argmax()) == before.index(SUPERVISED_ROW)


@pytest.mark.parametrize("change, missed", [
    ({"loss": 2e-10}, "loss"), ({"loss": float("nan")}, "loss"), ({"norm": 1e-9}, "gradient norm"),
    ({"gradient": Worst(2e-10)}, "gradient"),
    ({"gradient": Worst(float("nan"))}, "gradient"), ({"after_sgd": Worst(2e-10)}, "parameters after SGD"),
    ({"after_adamw": Worst(2e-6)}, "parameters after AdamW"), ({"narrow_loss": 2e-6}, "fp32 loss"),
    ({"narrow_gradient": Worst(1.1)}, "fp32 gradient"), ({"same_noise": False}, "noise")])
def test_a_figure_over_its_limit_is_missed(change, missed):
    assert GOOD.missed() == []
    assert replace(GOOD, **change).missed() == [missed]


def test_narrow_excess_is_in_units_of_the_tolerance():
    reference = torch.tensor([2.0, 0.0])
    assert narrow_excess(reference + torch.tensor([2e-5, 0.0]), reference, 0.0001) == pytest.approx(1.0, rel=0.02)
    assert narrow_excess(reference + torch.tensor([0.0, 3e-7]), reference, 1.0) == pytest.approx(3.0, rel=1e-6)


@pytest.mark.parametrize("change, missed", [
    ({"loss": 2.1}, "loss"), ({"gradient": float("nan")}, "gradient"), ({"tensor": Worst(4.1)}, "gradient of a tensor"),
    ({"after_sgd": 2.1}, "masters after SGD"), ({"after_adamw": 2.1}, "masters after AdamW"), ({"same_noise": False}, "noise")])
def test_a_distance_in_bf16_over_its_limit_is_missed(change, missed):
    assert LOW_GOOD.missed() == []
    assert replace(LOW_GOOD, **change).missed() == [missed]


def test_in_bf16_every_token_goes_to_all_experts():
    case = Case(LAYOUTS[7], "diffusion, 1 coin", "packed", 2, "full")
    run = make_run(case.for_bf16, 1)
    assert run.model.moe_router_topk == run.model.num_experts and run.model.vocab_size == 67
    assert case.for_bf16.name == case.name and case.for_bf16.reference != case.reference


@pytest.mark.parametrize("columns, outcome", [(WIDE, GOOD), (LOW, LOW_GOOD)], ids=["fp64", "bf16"])
def test_tables_have_a_cell_for_every_column(columns, outcome):
    fault = replace(outcome, fault="a sum", case="dp2 · ar · unequal")
    assert line(columns, outcome).startswith("ok ") and "MISSED" in line(columns, replace(outcome, same_noise=False))
    assert line(columns, fault).startswith("MISSED planted: a sum (dp2)")
    page = markdown(columns, [cells(columns, outcome), cells(columns, fault)], ["title", "notes"]).splitlines()
    assert page[:4] == ["title", "", "notes", ""] and len(page) == 8
    assert len({row.count("|") for row in page[4:]}) == 1 and page[4].count("|") == len(columns) + 1
    assert header(columns).split()[0] == "layout"


def test_old_transformers_is_named_and_not_run(monkeypatch, capsys):
    monkeypatch.setattr(layouts.metadata, "version", lambda name: "5.17.0")
    assert layouts.against_transformers(1) == 0
    assert "NOT RUN: one process against transformers (needs transformers >= 5.23, found 5.17.0)" in capsys.readouterr().out
