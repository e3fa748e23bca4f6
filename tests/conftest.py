"""What holds for every test: one thread, NaN in fresh memory, GPU tests skipped by name, skips on a list, a time budget per suite."""

import fnmatch
import os
import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

ALLOWED_SKIPS = Path(__file__).parent / "allowed_skips.txt"
SLOW_TESTS = Path(__file__).parent / "slow_tests.txt"
# Triton decides when it is imported whether kernels are interpreted, and several packages import it.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
torch.set_num_threads(1)  # before any test module makes its tensors: tests share few cores, and sums keep their order


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--budget",
        action="append",
        default=[],
        metavar="SUITE=SECONDS",
        help="fail, and stop, when the tests under tests/SUITE take longer than this in all (may be repeated)",
    )


def pytest_configure(config: pytest.Config) -> None:
    budgets = dict(budget.split("=") for budget in config.getoption("--budget"))
    config.pluginmanager.register(Suites({suite: float(seconds) for suite, seconds in budgets.items()}), "suites")


@pytest.fixture(autouse=True)
def same_start_for_every_test() -> Iterator[None]:
    """Seeds are 0, and `torch.empty` gives NaN, so that memory read before it is written shows."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    # Deterministic mode is what makes torch fill fresh memory; this way of setting it does not import the compiler.
    torch.set_deterministic_debug_mode("error")
    yield
    torch.set_default_dtype(torch.float32)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = set(lines_of(SLOW_TESTS))
    for item in items:
        if item.nodeid.partition("[")[0] in slow:
            item.add_marker(pytest.mark.slow)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and torch sees none")


class Suites:
    """Adds up the time of each suite and holds it to its budget; in CI, fails on a skip that allowed_skips.txt does not list."""

    def __init__(self, budgets: dict[str, float]):
        self.budgets = budgets
        self.seconds: dict[str, float] = defaultdict(float)
        self.counts: dict[str, int] = defaultdict(int)
        self.unlisted: list[str] = []
        self.session: pytest.Session | None = None

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self.session = session

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        suite = suite_of(report.nodeid)
        self.seconds[suite] += report.duration
        self.counts[suite] += report.when == "call"
        if report.skipped and not hasattr(report, "wasxfail"):
            self._note_skip(report.nodeid, report.longrepr[2])
        if suite in self.overspent():
            self.session.shouldfail = f"suite {suite} is over its budget of {self.budgets[suite]:g} s"

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._note_skip(report.nodeid, report.longrepr[2])

    def _note_skip(self, nodeid: str, reason: str) -> None:
        skip = f"{nodeid}: {reason.removeprefix('Skipped: ')}"
        if not any(fnmatch.fnmatchcase(skip, pattern) for pattern in lines_of(ALLOWED_SKIPS)):
            self.unlisted.append(skip)

    def overspent(self) -> list[str]:
        return [suite for suite, budget in self.budgets.items() if self.seconds[suite] > budget]

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.OK and (self.overspent() or self.unlisted and os.environ.get("CI")):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.budgets:
            terminalreporter.section("time of each suite")
        for suite, budget in self.budgets.items():
            over = "  OVER ITS BUDGET" if suite in self.overspent() else ""
            terminalreporter.line(f"{suite:<14}{self.counts[suite]:>6} tests {self.seconds[suite]:>7.1f} s of {budget:g} s{over}")
        for skip in self.unlisted:
            # Outside CI a machine may lack what CI has; the list is about CI.
            verdict = "failed" if os.environ.get("CI") else "would fail in CI"
            terminalreporter.line(f"{verdict}: a skip that tests/allowed_skips.txt does not list: {skip}")


def suite_of(nodeid: str) -> str:
    """The folder under tests/ that a test lies in: "tests/unit/test_a.py::test_b" gives "unit"."""
    parts = nodeid.split("::")[0].split("/")
    return parts[1] if len(parts) > 2 and parts[0] == "tests" else "."


def lines_of(path: Path) -> list[str]:
    """The lines of a list beside this file, without those that start with #."""
    return [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
