"""--eval-generations: answers in the training layout, the same in all of them."""

import os

import pytest
from functional_tests.launching import Command

from megatron_dllm.training.metrics_file import read_metrics

# Any answer that has the digit 2 counts: a model at random gets some.
FLAGS = ("--preset", "toy", "--num-layers", "2", "--layer-types", "sliding,full", "--vocab-size", "9", "--canvas-length", "8",
         "--num-global-query-groups", "2", "--data-source", "sudoku", "--sudoku-num-puzzles", "40", "--seq-length", "34", "--device", "cpu",
         "--global-batch-size", "4", "--train-iters", "2", "--eval-interval", "1", "--eval-iters", "1", "--eval-generations", "5",
         "--eval-score", "regex:2", "--max-denoising-steps", "4", "--log-interval", "1")  # fmt: skip
LAYOUTS = {"alone": (), "tp2": ("--tensor-model-parallel-size", "2", "--sequence-parallel"), "cp2": ("--context-parallel-size", "2"),
           "ep2": ("--expert-model-parallel-size", "2")}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_answers_are_the_same_in_every_layout(launcher, tmp_path):
    found = {}
    for name, flags in LAYOUTS.items():
        processes = 1 if name == "alone" else 2
        launcher.run(Command((*FLAGS, *flags, "--save", str(tmp_path / name)), processes, {**os.environ, "OMP_NUM_THREADS": "1"}),
                     tmp_path / f"{name}.txt", 120)
        records = read_metrics(tmp_path / name / "metrics.jsonl").records
        found[name] = [(record["eval/right_answers"], record["eval/tokens_per_forward"]) for record in records if "eval/loss" in record]
    assert len(found["alone"]) == 2 and 0 < found["alone"][0][0] <= 1 and found["alone"][0][0] * 5 == round(found["alone"][0][0] * 5)
    assert all(of_layout == found["alone"] for of_layout in found.values()), found
