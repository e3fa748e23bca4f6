"""What all command lines of tools/ have in common: no abbreviated flags, and status 2 for a user's mistake, told in a line."""
import ast
import importlib
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
TOOLS = sorted((ROOT / "tools").glob("*.py"))


def parsers(file: Path) -> list[ast.Call]:
    calls = [node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    return [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr in ("ArgumentParser", "add_parser")]


@pytest.mark.parametrize("file", [file for file in TOOLS if parsers(file)], ids=lambda file: file.stem)
def test_flags_are_not_abbreviated(file):
    for call in parsers(file):
        (said,) = [word.value for word in call.keywords if word.arg == "allow_abbrev"] or [None]
        assert said is not None and not ast.literal_eval(said), f"{file.name}:{call.lineno} needs allow_abbrev=False"


MISTAKES = {
    "a suite of benchmarks without a device": ("benchmark", ["--suite", "training"], "error: the suite training needs a CUDA device"),
    "a suite of benchmarks, wrong number": ("benchmark", ["--suite", "cpu", "--repeats", "1"], "--repeats 1: quartiles want 2 at least"),
    "a suite of checks without a world": ("verify", ["transport"], "needs a world of 2 or 4 processes, not 1: start it by torchrun"),
    "an abbreviated flag of a suite": ("verify", ["transport", "--dev", "cpu"], "--dev"),
    "kernels without a device": ("benchmark_kernels", [], "a CUDA device"),
    "puzzles that do not exist": ("sudoku", ["--clues", "9", "5", "--num-workers", "1"], "error: "),
    "data that are not there": ("show_data", ["--preset", "toy", "--data-path", "missing.jsonl"], "error: missing.jsonl: no such file"),
    "text that is not there": ("preprocess_data", ["--input", "missing", "--output-prefix", "out"], "error: missing: no such file"),
    "a plan without a duration": ("plan", ["layouts", "--num-gpus", "1", "--given", "--", "--preset", "toy"], "nothing says how long"),
    "no model": ("generate", ["--load", "missing", "--prompt", "a"], "error: missing holds neither"),
    "no model to measure": ("evaluate", ["--load", "missing"], "error: missing holds neither"),
    "no model to convert": ("convert", ["--load", "missing", "--save", "out"], "error: missing holds neither"),
    "no checkpoint": ("checkpoint", ["list", "missing"], "error: "),
    "no run": ("plot_run", ["missing"], "missing"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_ends_with_status_2(case, monkeypatch, tmp_path, capsys):
    name, words, message = MISTAKES[case]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
    monkeypatch.chdir(tmp_path)
    try:
        status = importlib.import_module(f"tools.{name}").main()
    except SystemExit as ending:
        status = ending.code
    error = capsys.readouterr().err
    assert status == 2 and message in error and "Traceback" not in error
    assert not list(tmp_path.iterdir())
