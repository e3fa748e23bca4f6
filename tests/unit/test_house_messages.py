"""Every error that a user can meet says what to do: its text has a verb of remedy, or a name that stands for one."""
import ast
import re
from pathlib import Path

import pytest

from megatron_dllm.models.diffusion_gemma.loading import StoredModel

ROOT = Path(__file__).resolve().parents[2]
FILES = [file for folder in ("megatron_dllm", "tools") for file in sorted((ROOT / folder).rglob("*.py"))]
VERBS = re.compile(
    r"\b(add|call|choose|close|convert|copy|correct|delete|download|drop|export|fetch|fill|give|install|instead|keep|leave|lower|make|merge|"
    r"move|name|pass|prepare|put|raise|record|remove|repair|resume|runs?|set|shorten|show|start|take|train|try|use|write)\b")
REMEDIES = {"AGAIN", "no_model_in", "REMAKE", "REMEDY", "remedy", "instead"}
# Our own mistakes, which no flag mends: values that the checks, the kernels' callers or the file formats have ruled out before.
INTERNAL = {
    "checkpoint/shards.py", "data/sudoku.py", "data/sudoku_puzzles.py", "data/tokenizers.py",
    "generation/drawing.py", "parallel/communication.py", "parallel/context.py", "parallel/placement.py",
    "parallel/topology.py", "pipeline/actions.py", "pipeline/graph.py", "pipeline/timing.py",
    "benchmarking/context_attention.py", "checkup/trials.py", "functional_tests/golden.py"}


def unhelpful(source: str) -> list[int]:
    """Lines that raise a ValueError, or a Refusal, whose own words name no remedy; texts made by a call are left to what makes them."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and ast.unparse(node.exc.func) in ("ValueError", "Refusal")):
            continue
        words = " ".join(part.value for part in ast.walk(node.exc) if isinstance(part, ast.Constant) and isinstance(part.value, str))
        names = {part.id for part in ast.walk(node.exc) if isinstance(part, ast.Name)}
        literal = isinstance(node.exc.args[0], ast.Constant | ast.JoinedStr)
        if literal and words.strip(" :") and not VERBS.search(words) and not names & REMEDIES:
            lines.append(node.lineno)
    return lines


def test_unhelpful():
    assert unhelpful('raise ValueError(f"{path} is missing")\nraise ValueError(f"{path} is missing; copy it again")') == [1]
    assert unhelpful('raise ValueError(f"x: {REMEDY}")\nraise ValueError(report(x))\nraise KeyError("x")') == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: "/".join(file.parts[-2:]))
def test_errors_say_what_to_do(file):
    if "/".join(file.parts[-2:]) not in INTERNAL:
        assert not unhelpful(file.read_text(encoding="utf-8")), "say what to set, give or do instead"


def test_exemptions_are_needed():
    found = {"/".join(file.parts[-2:]): file for file in FILES}
    assert [name for name in INTERNAL if not unhelpful(found[name].read_text(encoding="utf-8"))] == []


def test_a_folder_without_a_model_says_where_one_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wanted = {"runs": "name runs/chat", "runs/chat/logs": "name runs/chat",
              "google/model": "hf download google/model --local-dir models/model", "nowhere": "name a folder that has one of them"}
    (tmp_path / "runs/chat/iter_0000001").mkdir(parents=True)
    (tmp_path / "runs/chat/logs").mkdir()
    (tmp_path / "runs/chat/iter_0000001/complete.json").touch()
    for path, remedy in wanted.items():
        with pytest.raises(ValueError, match=f"{path} holds neither .*; .*{remedy}"):
            StoredModel.open(path)
