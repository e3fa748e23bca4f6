"""The commands of the guides, run one after the other in a folder of their own, on a few short conversations."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.test_house_readme import commands

ROOT = Path(__file__).parents[2]
# In this order, since what one makes the next one takes.
GUIDES = ("README.md", "docs/serving.md", "docs/data.md", "docs/checkpoints.md", "docs/monitoring.md", "docs/moe.md", "docs/extending.md",
          "docs/architecture.md", "docs/context_parallel.md", "docs/parallelism.md", "docs/pipeline_mhc.md")
# Other tests run recipes and suites; weights, GPUs, a browser and another environment are not here.
NOT_HERE = re.compile(r"^(source|hf|tensorboard|sbatch|export)\b|examples/|tests/|models/|SHARE_GPU|--cuda-graph-impl|--deterministic-mode"
                      r"|(verify|benchmark|doctor)\.py|runs/(quickstart|sudoku)\b")
SHORTER = {"generate.py": " --max-denoising-steps 2 --max-new-tokens 32", "evaluate.py": " --max-denoising-steps 2"}


def here(command: str) -> str | None:
    """`command` as it is run here, with flags that shorten it; None where it needs what is not here."""
    if NOT_HERE.search(command):
        return None
    if "pretrain_dllm.py" in command:
        steps = re.search(r"--train-iters (\d+)", command)
        return command + " --device cpu" + ("" if steps and int(steps[1]) <= 20 else " --log-interval 1 --exit-interval 2")
    return command + next((words for tool, words in SHORTER.items() if tool in command), "")


@pytest.fixture
def workplace(tmp_path) -> Path:
    """A folder that looks like the repository, with the files that the guides take for granted."""
    for name in ("pretrain_dllm.py", "megatron_dllm", "tools", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    chat = [{"messages": [{"role": "user", "content": f"What is {n} plus 8?"}, {"role": "assistant", "content": f"{n + 8}."}]}
            for n in range(200)]
    pairs = [{"question": row["messages"][0]["content"], "answer": row["messages"][1]["content"]} for row in chat[:40]]
    documents = [{"content": f"A text of {n} words. " * 20} for n in range(40)]
    for name, rows in {"chat.jsonl": chat, "new.jsonl": chat[:60], "pairs.jsonl": pairs, "dump.jsonl": documents}.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "questions.txt").write_text("Why?\nHow?\n")
    (tmp_path / "template.jinja").write_text(re.search(r"```jinja\n(.*?)```", (ROOT / "docs" / "data.md").read_text(), re.DOTALL)[1])
    (tmp_path / "my_module.py").write_text("def compiles(answer):\n    return True\n")
    for folder in ("path/to/texts", "more"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "design.md").write_text((ROOT / "docs" / "design.md").read_text())
    run(tmp_path, "gzip dump.jsonl")
    return tmp_path


def run(folder: Path, command: str) -> str | None:
    """What went wrong, None if nothing did."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder), "PATH": path}
    done = subprocess.run(["bash", "-c", command], cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return f"{command}\n{done.stdout[-800:]}{done.stderr[-2000:]}" if done.returncode else None


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_commands_of_the_guides_run(workplace):
    adapters = "python pretrain_dllm.py --preset toy --data-path chat.jsonl --seq-length 128 --train-iters 2 --lora-rank 4 --save runs/lora"
    done = 0
    for guide in GUIDES:
        if guide == "docs/serving.md":  # its adapters are a recipe's
            assert run(workplace, here(adapters + " --pretrained-checkpoint runs/chat")) is None
        for command in filter(None, map(here, commands((ROOT / guide).read_text()))):
            assert (failure := run(workplace, command)) is None, f"{guide}: {failure}"
            done += 1
    assert done >= 35  # or the list of what is not here has grown


@pytest.mark.parametrize(("command", "found"), [
    ("python tools/evaluate.py --load runs/chat", "python tools/evaluate.py --load runs/chat --max-denoising-steps 2"),
    ("python pretrain_dllm.py --train-iters 20", "python pretrain_dllm.py --train-iters 20 --device cpu"),
    ("python pretrain_dllm.py --lr 1", "python pretrain_dllm.py --lr 1 --device cpu --log-interval 1 --exit-interval 2"),
    ("MODEL=models/diffusiongemma bash examples/diffusion_gemma/lora_26b.sh", None), ("hf download x", None)])
def test_here(command, found):
    assert here(command) == found


def test_run_tells_what_failed(tmp_path):
    assert run(tmp_path, "true") is None
    assert run(tmp_path, "echo why >&2; exit 3") == "echo why >&2; exit 3\nwhy\n"
