"""tests/conftest.py itself, on a small tree of tests with planted faults."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import SLOW_TESTS, lines_of, suite_of

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest
import torch

@pytest.mark.gpu
def test_gpu():
    assert torch.cuda.is_available()

def test_fresh_memory_is_nan():
    assert torch.empty(5).isnan().all() and torch.get_num_threads() == 1

@pytest.mark.parametrize("again", [1, 2])
def test_draws_start_alike(again):
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(0)))
"""
SLEEPS = "import time\n\ndef test_sleeps():\n    time.sleep(0.2)\n"
SKIPS = 'import pytest\n\ndef test_skips():\n    pytest.skip("of a reason")\n'


def run(folder: Path, *arguments: str, ci: bool, **files: str) -> subprocess.CompletedProcess:
    """Runs pytest with our conftest on tests/SUITE/test_NAME.py, given as SUITE_NAME=text."""
    (folder / "tests").mkdir()
    for name in ("conftest.py", "allowed_skips.txt", "slow_tests.txt"):
        shutil.copy(ROOT / "tests" / name, folder / "tests" / name)
    shutil.copy(ROOT / "pyproject.toml", folder)
    for name, text in files.items():
        suite, _, rest = name.partition("_")
        (folder / "tests" / suite).mkdir(exist_ok=True)
        (folder / "tests" / suite / f"test_{rest}.py").write_text(text)
    environment = {name: value for name, value in os.environ.items() if name != "CI"} | ({"CI": "true"} if ci else {})
    environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)


@pytest.mark.slow
def test_gpu_tests_are_skipped_and_a_listed_skip_passes_in_ci(tmp_path):
    result = run(tmp_path, "--budget", "unit=60", ci=True, unit_a=TESTS)
    assert result.returncode == 0, result.stdout
    assert "3 passed, 1 skipped" in result.stdout and "needs a CUDA device, and torch sees none" in result.stdout
    assert "s of 60 s" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("ci", [True, False])
def test_a_skip_that_is_not_listed_fails_in_ci(tmp_path, ci):
    result = run(tmp_path, ci=ci, unit_a=SLEEPS, unit_b=SKIPS)
    assert result.returncode == (1 if ci else 0), result.stdout
    assert "does not list: tests/unit/test_b.py::test_skips: of a reason" in result.stdout


@pytest.mark.slow
def test_a_suite_over_its_budget_fails_and_stops(tmp_path):
    result = run(tmp_path, "--budget", "unit=0.1", "--budget", "parallel=60", ci=False, parallel_a=SLEEPS, unit_b=SLEEPS, unit_c=SLEEPS)
    assert result.returncode == 1
    assert "suite unit is over its budget of 0.1 s" in result.stdout
    assert "OVER ITS BUDGET" in result.stdout and "2 passed" in result.stdout


@pytest.mark.parametrize(
    ("nodeid", "suite"),
    [
        ("tests/unit/test_a.py::test_b[x/y]", "unit"),
        ("tests/functional/toy/test_a.py::test_b", "functional"),
        ("tests/test_a.py::test_b", "."),
    ],
)
def test_suite_of(nodeid, suite):
    assert suite_of(nodeid) == suite


def test_slow_tests_are_there():
    for line in lines_of(SLOW_TESTS):
        file, _, name = line.partition("::")
        assert f"\ndef {name}(" in (ROOT / file).read_text(), f"tests/slow_tests.txt: {line} is no test; correct or drop the line"
