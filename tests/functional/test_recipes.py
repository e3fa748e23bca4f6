"""Each recipe at toy scale, once, held to its golden values (tools/functional.py)."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import functional  # noqa: E402
from functional_tests.cases import ROOT, Part, read_cases  # noqa: E402
from functional_tests.fingerprint import changed, fingerprint  # noqa: E402
from functional_tests.golden import Golden, compare, take_steps  # noqa: E402
from functional_tests.launching import RunFailed, ask  # noqa: E402
from functional_tests.running import environment_of  # noqa: E402

from megatron_dllm.training.metrics_file import read_metrics  # noqa: E402


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", [case for case in read_cases() if case.device == "cpu"], ids=lambda case: case.name)
def test_recipe_matches_its_golden_values(case, launcher, capsys):
    held = functional.attempt(case, lambda case: functional.run_case(case, 1, launcher))
    output = capsys.readouterr().out
    print(output)
    assert held, output


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_recipe_that_is_started_as_a_user_does_computes_the_same(tmp_path):
    """The others fork their ranks from one process (functional_tests/server.py); this one goes through the recipe and torchrun."""
    (case,) = read_cases("ar_pretrain")
    environment = environment_of(case, case.then, tmp_path)
    result = subprocess.run(["bash", str(ROOT / case.recipe), *case.flags, "--log-num-zeros-in-grad", "--exit-interval", "2"],
                            env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    ours = take_steps(read_metrics(tmp_path / "metrics.jsonl").records, case.metrics)
    golden = Golden.read(case.folder / f"golden_cpu_x{case.processes}.json")
    others = changed(fingerprint("cpu", environment), golden.fingerprint)
    first = {step: golden.steps[step] for step in (1, 2)}
    assert not compare(ours, first, metrics=case.metrics, num_steps=2, tolerances=case.limits if others else None)


@pytest.mark.slow
def test_recipe_that_fails_says_why(launcher, tmp_path):
    environment = environment_of(read_cases("ar_pretrain")[0], Part(), tmp_path)
    command = ask("examples/diffusion_gemma/ar_pretrain.sh", ["--lr", "nothing"], environment, tmp_path)
    with pytest.raises(RunFailed, match="(?s)status .*--lr.*nothing"):
        launcher.run(command, tmp_path / "output.txt", 60)
