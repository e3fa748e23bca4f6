"""Each recipe at toy scale, once, held to its golden values (tools/functional.py)."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import functional  # noqa: E402
from functional_tests.cases import read_cases  # noqa: E402


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", [case for case in read_cases() if case.device == "cpu"], ids=lambda case: case.name)
def test_recipe_matches_its_golden_values(case, capsys):
    held = functional.attempt(case, lambda case: functional.run_case(case, 1))
    output = capsys.readouterr().out
    print(output)
    assert held, output
