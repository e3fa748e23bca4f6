"""Every verification suite of tools/verify.py holds. QUICK ones run always, the others with tests/run.sh --all."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.verify import SUITES

ROOT = Path(__file__).parents[2]
# Under a minute each; a new suite is a full one until it is named here.
QUICK = ("parity", "sampler")


def cases() -> list:
    return [pytest.param(suite, marks=pytest.mark.slow if suite in QUICK else pytest.mark.full) for suite in SUITES]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("suite", cases())
def test_verification_suite_holds(suite):
    command = [sys.executable, str(ROOT / "tools" / "verify.py"), suite]
    # One thread, as in every test: figures come out alike, and other work on the machine does not slow it many times over.
    result = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr


def test_quick_names_suites_that_exist():
    assert set(QUICK) <= set(SUITES)
