"""training.mistakes: an error that this package wrote for people, and one that says nothing without its traceback."""
import json
import math
from types import SimpleNamespace

import pytest
import torch

import pretrain_dllm
from megatron_dllm.data.sudoku import SudokuTokenizer, exact_match
from megatron_dllm.data.tokenizers import open_tokenizer
from megatron_dllm.models.diffusion_gemma.transformers_directory import read_json
from megatron_dllm.training.mistakes import is_told

ERRORS = {  # -> what raises it, with a folder in which config.json is not JSON, and whether its text is all that is to be said
    "one line": (lambda folder: SudokuTokenizer(5), True),
    "several lines": (lambda folder: open_tokenizer("ByteTokenizer", "a folder"), True),
    "in place of another": (lambda folder: read_json(folder / "config.json"), True),
    "another library": (lambda folder: json.loads((folder / "config.json").read_text()), False),
    "an extension": (lambda folder: math.sqrt(-1.0), False),
    "a line of ours that raises nothing": (lambda folder: exact_match([[1]], [], SudokuTokenizer(4)), False)}


@pytest.mark.parametrize("case", ERRORS)
def test_is_told(case, tmp_path):
    (tmp_path / "config.json").write_text("no JSON")
    make, told = ERRORS[case]
    with pytest.raises(ValueError) as caught:
        make(tmp_path)
    assert is_told(caught.value) is told


def test_a_mistake_in_an_extension_is_shown_where_it_is(tmp_path, monkeypatch, capsys):
    (tmp_path / "an_extension_that_fails.py").write_text("float('fast')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="could not convert") as caught:
        pretrain_dllm.main(["--extension", "an_extension_that_fails", "--preset", "toy"])
    assert caught.traceback[-1].path.name == "an_extension_that_fails.py" and "error:" not in capsys.readouterr().err


@pytest.mark.parametrize(("environment", "text"), [
    ({"SHARE_GPU": "yes"}, "SHARE_GPU='yes': set 1, or leave it out"),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1"}, "RANK and WORLD_SIZE are set, as torchrun")])
def test_a_mistake_in_the_launch_is_told(environment, text, monkeypatch, capsys):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert pretrain_dllm.main(["--preset", "toy"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {text}")


@pytest.mark.parametrize(("setting", "device", "ranks", "shared"), [
    ("1", "cuda", 2, True), ("0", "cuda", 2, False), ("1", "cuda", 1, False), ("1", "cpu", 2, False)])
def test_the_first_line_says_who_else_computes_there(setting, device, ranks, shared, monkeypatch):
    monkeypatch.setenv("SHARE_GPU", setting)
    line = pretrain_dllm.device_line(SimpleNamespace(device=torch.device(device), world=SimpleNamespace(size=ranks)))
    assert line.startswith(f"device: {device}, torch ") and ("all ranks of a host share it" in line) is shared
