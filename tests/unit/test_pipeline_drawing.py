"""Timelines, and the command that draws them."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megatron_dllm.pipeline.assembly import build_schedule
from megatron_dllm.pipeline.drawing import draw_picture, draw_text, summary
from megatron_dllm.pipeline.graph import Pipeline
from megatron_dllm.pipeline.simulator import simulate

PLAN = Path(__file__).parents[2] / "tools" / "plan.py"


def simulated(*sizes, **options):
    pipeline = Pipeline(*sizes, **options)
    schedule = build_schedule(pipeline)
    return pipeline, simulate(pipeline, schedule.lists, schedule.costs)


@pytest.fixture
def plan(monkeypatch):
    """Runs tools/plan.py in this process; returns its exit status."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["plan.py", *map(str, arguments)])
        spec = importlib.util.spec_from_file_location("plan", PLAN)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.main()

    return run


def test_draw_text():
    _, simulation = simulated(2, 1, (False, True))
    assert draw_text(simulation, columns=1000).splitlines()[:2] == [
        "rank 0  0.........1.........          1:                  0===================1###  1===================",
        "rank 1            0.........1.........0===================1:1###1===================1e",
    ]


def test_draw_text_keeps_to_its_width():
    _, simulation = simulated(4, 2, (True, False) * 4)
    for columns in (40, 100, 200):
        *lines, legend = draw_text(simulation, columns=columns).splitlines()
        assert max(map(len, lines)) <= columns + len("rank 0  ")
        assert lines[0].startswith("rank 0  0." if columns == 200 else "rank 0  ..")  # a box of one column has no room for a number
        assert "## backward, loop 1" in legend


def test_summary():
    assert summary(*simulated(4, 2, (False,) * 8)) == (
        "4 ranks of 2 virtual stages, 8 microbatches, 0 self-conditioned: 570 ticks, bubble 15.8% (no schedule is below 15.8%)"
    )


def test_draw_picture(tmp_path):
    """Every rank has forwards and backwards of both loops in its row, in colours that differ, and idle time in grey."""
    pipeline, simulation = simulated(3, 1, (True, False, True))
    draw_picture(pipeline, simulation, tmp_path / "timeline.png")
    image = np.asarray(Image.open(tmp_path / "timeline.png").convert("RGB")).astype(int)
    idle = (image == 0xEC).all(axis=2)
    rows = np.flatnonzero(idle.mean(axis=1) > 0.05)
    left, right = np.flatnonzero(idle.any(axis=0))[[0, -1]]
    thirds = np.array_split(image[rows[0] : rows[-1] + 1, left : right + 1], 3)
    for third in thirds:
        colours, counts = np.unique(third.reshape(-1, 3), axis=0, return_counts=True)
        boxes = colours[(counts > 0.004 * third.shape[0] * third.shape[1]) & (np.ptp(colours, axis=1) > 20)]
        assert len(boxes) >= 4, boxes


def test_plan_pipeline(plan, capsys, tmp_path):
    status = plan(
        "pipeline", "--pipeline-model-parallel-size", 2, "--num-virtual-stages-per-pipeline-rank", 2, "--num-microbatches", 4,
        "--self-conditioned", "1,3", "--mhc-num-residual-streams", 4, "--table", "--picture", tmp_path / "timeline.png",
    )  # fmt: skip
    printed = capsys.readouterr().out
    assert status == 0
    assert "between stages 11264 values a token, soft embedding 2816" in printed
    assert "2 ranks of 2 virtual stages, 4 microbatches, 2 self-conditioned" in printed
    assert "Ss1.1>0" in printed
    assert "rank 1: 5 activations of loop 0" in printed
    assert (tmp_path / "timeline.png").stat().st_size > 10_000


def test_plan_pipeline_with_a_layout(plan, capsys):
    assert plan("pipeline", "--pipeline-model-parallel-size", 2, "--pipeline-model-parallel-layout", "Ett|||gmL") == 0
    printed = capsys.readouterr().out
    assert "  rank 0: Ett  (empty)\n  rank 1: (empty)  gmL\n" in printed
    assert plan("pipeline", "--num-layers", 6, "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split") == 0
    assert "layout Et|tt|tt|tL" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--pipeline-model-parallel-layout", "Ett|tt"], "the layout ends before the loss (L)"),
        (["--num-layers", 30], "30 layers do not divide over 4 pipeline ranks"),
        (["--num-layers", 4, "--pipeline-model-parallel-layout", "E|t|t|L"], "are both given"),
        (["--num-virtual-stages-per-pipeline-rank", 2, "--num-microbatches", 6], "the last group has only 2"),
        (["--self-conditioned", "0,8"], "'8' is not one of the 8 microbatches"),
        (["--kept-limit", 0], "set the limit to at least 1"),
        (["--num-microbatches", 0], "microbatches is 0"),
    ],
)
def test_plan_pipeline_refuses(plan, capsys, arguments, words):
    assert plan("pipeline", *arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ") and words in printed.err


def test_plan_pipeline_sweep(plan, capsys, monkeypatch, tmp_path):
    plan("pipeline", "--num-microbatches", 1)  # puts tools/ on the path
    monkeypatch.setitem(sys.modules["planning.pipeline"].SIZES, "quick", (2, 2, 4))
    picture = tmp_path / "new" / "example.png"
    assert plan("pipeline", "--sweep", "--quick", "--processes", 1, "--picture", picture) == 0
    *_, last = capsys.readouterr().out.splitlines()
    # 3 kinds of coins, one case without overlap and one with one backward for both loops; 4 numbers of microbatches on 1 chunk, 10 and
    # 4 groups (4 and 3 numbers) on 2 chunks
    assert last.startswith(f"checked {5 * (4 + 4) + 3 * (10 + 4) + 2 * (4 + 3)} schedules (")
    assert "0 bad; 22 illegal group sizes refused" in last
    assert picture.exists()
