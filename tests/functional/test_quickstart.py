"""examples/quickstart.sh, whole but with few training steps, at a path with a space and from another directory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def quickstart(run: Path, *flags: str) -> subprocess.CompletedProcess:
    # The environment that runs the tests has every package, so nothing is installed.
    environment = {**os.environ, "VIRTUAL_ENV": sys.prefix, "RUN": str(run), "OMP_NUM_THREADS": "1"}
    command = ["bash", str(ROOT / "examples" / "quickstart.sh"), *flags]
    return subprocess.run(command, cwd="/", env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_quickstart_makes_what_it_says_and_runs_again(tmp_path):
    run = tmp_path / "my run"
    for steps in (12, 11):
        result = quickstart(run, "--train-iters", str(steps), "--eval-interval", "10")
        assert result.returncode == 0, result.stdout + result.stderr
        for name in ("loss.png", "canvas.gif", "train/args.txt", "transformers/model.safetensors", "data/python.bin"):
            assert (run / name).stat().st_size > 0
            assert str(run) in result.stdout and name.split("/")[0] in result.stdout
        assert json.loads((run / "train" / "status.json").read_text())["state"] == "finished"
        assert f"Loss after {steps} steps" in result.stdout and "does not make sense of language" in result.stdout


def test_quickstart_leaves_a_directory_alone_that_is_not_its_own(tmp_path):
    (tmp_path / "train").mkdir()
    result = quickstart(tmp_path)
    assert result.returncode == 2 and "is there already and is not a quickstart's" in result.stderr
    assert (tmp_path / "train").exists()
