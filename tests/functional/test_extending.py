"""The worked examples of docs/extending.md: as one module, trained for ten steps under three layouts and on one process."""

import os
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from functional_tests.cases import ROOT  # noqa: E402
from functional_tests.launching import Command, Launcher, RunFailed  # noqa: E402

from megatron_dllm.training.metrics_file import read_metrics  # noqa: E402

LAYOUTS = {
    "tp2": ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    "cp2": ("--context-parallel-size", "2"),
    "pp2": ("--pipeline-model-parallel-size", "2"),
}
FLAGS = ("--extension", "my_extension", "--data-source", "sums", "--noise-schedule", "cosine", "--objective", "early", "--preset", "toy",
         "--layer-types", "sliding,normed", "--num-layers", "2", "--num-global-query-groups", "2", "--seq-length", "48", "--device", "cpu",
         "--global-batch-size", "2", "--train-iters", "10", "--lr", "3e-3", "--log-interval", "1")  # fmt: skip


def module() -> str:
    """The Python blocks of the document, one after the other."""
    text = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    return "\n".join(re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_worked_examples_train_under_every_layout(tmp_path):
    (tmp_path / "my_extension.py").write_text(module(), encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)}

    def losses(name: str, flags: tuple[str, ...], processes: int) -> list[float]:
        folder = tmp_path / name
        launcher.run(Command((*FLAGS, *flags, "--save", str(folder)), processes, environment), tmp_path / f"{name}.txt", 120)
        assert "--extension my_extension" in (folder / "args.txt").read_text()
        return [record["loss"] for record in read_metrics(folder / "metrics.jsonl").records]

    with Launcher() as launcher:
        alone = losses("alone", (), 1)
        assert len(alone) == 10 and alone[-1] < 0.9 * alone[0]
        for name, flags in LAYOUTS.items():
            assert losses(name, flags, 2) == pytest.approx(alone, rel=1e-4), name
        # Each part has a say: without one of them the loss, which repeats bit for bit, is another.
        for flag, ours in (("--noise-schedule", "uniform"), ("--objective", "block-diffusion"), ("--layer-types", "sliding,full")):
            assert losses(f"without{flag}", (flag, ours, "--exit-interval", "1"), 1)[0] != alone[0], flag
        assert losses("with all", ("--exit-interval", "1"), 1)[0] == alone[0]
        with pytest.raises(RunFailed, match="--extension no_such_module: No module named"):
            launcher.run(Command((*FLAGS, "--extension", "no_such_module"), 1, environment), tmp_path / "failed.txt", 60)
