"""tools/generate.py and tools/evaluate.py on a tiny random model, as their command lines are given."""
import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from megatron_dllm.checkpoint.model_state import named_tensors, whole_tensors_reader
from megatron_dllm.checkpoint.save import save
from megatron_dllm.checkpoint.store import TrainingState
from megatron_dllm.config import parse, to_arguments_text
from megatron_dllm.models.diffusion_gemma.build import build_model
from megatron_dllm.models.diffusion_gemma.transformers_export import Export
from megatron_dllm.parallel import ParallelContext

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--preset", "toy", "--num-layers", "2", "--hidden-size", "16", "--ffn-hidden-size", "16", "--moe-ffn-hidden-size", "8",
        "--canvas-length", "16", "--window-size", "24", "--train-iters", "1", "--max-denoising-steps", "3"]


def tool(name: str):
    spec = importlib.util.spec_from_file_location(f"tool_{name}", ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def save_run(folder: Path, *flags: str) -> str:
    """A run's folder with one checkpoint of an untrained model."""
    torch.set_num_threads(1)
    run = parse([*TINY, *flags])
    model = build_model(run, ParallelContext.single())
    tensors = {name: tensor.detach() for name, tensor in named_tensors(model)}
    save(folder, TrainingState(1, 8, 1), model=tensors, optimizer={}, arguments=to_arguments_text(run))
    return str(folder)


@pytest.fixture(scope="module")
def sudoku_run(tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("sudoku run"), "--vocab-size", "9", "--data-source", "sudoku", "--sudoku-num-puzzles", "20",
                    "--seq-length", "34")


@pytest.fixture(scope="module")
def chat_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat run")
    rows = [{"messages": [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": f"{i}" * 20}]} for i in range(12)]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return save_run(folder, "--data-path", str(folder / "chat.jsonl"), "--split", "50,50,0", "--seq-length", "128")


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_generate_answers_prompts_in_any_batch_alike(chat_run, tmp_path, capsys):
    generate = tool("generate")
    rows = []
    for size in (1, 3):
        out = tmp_path / f"{size}.jsonl"
        assert generate.main(["--load", chat_run, "--prompt", "a", "bcd", "é", "--max-new-tokens", "20", "--batch-size", str(size),
                              "--output", str(out)]) == 0
        rows.append(lines(out))
    assert rows[0] == rows[1] and [row["prompt"] for row in rows[0]] == ["a", "bcd", "é"]
    assert all(row["steps"] == [3, 3][: len(row["steps"])] for row in rows[0])
    captured = capsys.readouterr()
    assert "sampler: --max-new-tokens 20 --max-denoising-steps 3" in captured.err  # the second is the run's own
    assert "> bcd" in captured.out and "messages to the chat template" in captured.err
    assert captured.out.splitlines()[-1].startswith("3 answers, ")


def test_generate_draws_the_first_prompt(chat_run, tmp_path, capsys):
    gif = tmp_path / "with a space.gif"
    assert tool("generate").main(["--load", chat_run, "--raw", "--prompt", "a", "b", "--max-new-tokens", "16", "--max-denoising-steps", "3",
                                  "--show-steps", "--gif", str(gif)]) == 0
    with Image.open(gif) as image:
        assert image.n_frames == 3
    assert "canvas 1" in capsys.readouterr().out


def test_generate_reads_prompt_files(chat_run, tmp_path, capsys, monkeypatch):
    generate = tool("generate")
    (tmp_path / "p.jsonl").write_text('{"prompt": "one"}\n\n{"messages": [{"role": "user", "content": "two"}]}\n')
    (tmp_path / "p.txt").write_text("three\nfour\n")
    common = ["--load", chat_run, "--max-new-tokens", "16", "--max-denoising-steps", "1", "--prompt-file"]
    assert generate.main([*common, str(tmp_path / "p.jsonl")]) == 0 and generate.main([*common, str(tmp_path / "p.txt")]) == 0
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("> ")]
    assert shown == ["> one", "> two", "> three", "> four"]


@pytest.mark.parametrize("flags, message", [
    (["--prompt", "a" * 4090], "4094 tokens and 16 canvases of 16 follow it, but the model allows 4096 positions"),
    (["--prompt-file", "{folder}/bad.jsonl"], "bad.jsonl:2 is not valid JSON"),
    (["--prompt-file", "{folder}/none.txt"], "none.txt"),
    (["--prompt", "a", "--max-denoising-steps", "0"], "--max-denoising-steps 0: must be at least 1"),
    (["--prompt", "a", "--t-min", "0"], "--t-min 0.0: must be above 0"),
    (["--prompt", "a", "--t-min", "0.9"], "--t-min 0.9, --t-max 0.8: the temperature cannot rise"),
])
def test_generate_refuses(chat_run, tmp_path, capsys, flags, message):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "one"}\n{"prompt": \n')
    assert tool("generate").main(["--load", chat_run, *(flag.format(folder=tmp_path) for flag in flags)]) == 2
    assert message in capsys.readouterr().err


def test_generate_has_no_flags_of_training(chat_run, capsys):
    with pytest.raises(SystemExit) as status:
        tool("generate").main(["--load", chat_run, "--prompt", "a", "--eval-generations", "5"])
    assert status.value.code == 2 and "--eval-generations" in capsys.readouterr().err


def test_generate_checks_all_prompts_before_it_generates(chat_run, capsys):
    assert tool("generate").main(["--load", chat_run, "--prompt", "a", "a" * 4090, "--batch-size", "1"]) == 2
    captured = capsys.readouterr()
    assert "prompt 1 has 4094 tokens" in captured.err and not captured.out


def test_generate_names_a_folder_without_a_model(tmp_path, capsys):
    assert tool("generate").main(["--load", str(tmp_path), "--prompt", "a"]) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_generate_converses(chat_run, monkeypatch, capsys):
    generate, seen = tool("generate"), []
    typed = iter(["hello", "again", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(typed))
    plain = generate.chat_prompt
    monkeypatch.setattr(generate, "chat_prompt", lambda tokenizer, messages: seen.append(list(messages)) or plain(tokenizer, messages))
    assert generate.main(["--load", chat_run, "--interactive", "--max-new-tokens", "16", "--max-denoising-steps", "1"]) == 0
    assert [[m["role"] for m in messages] for messages in seen] == [["user"], ["user", "assistant", "user"]]


def test_evaluate_sudoku(sudoku_run, tmp_path, capsys):
    output, answers = tmp_path / "result.json", tmp_path / "answers.jsonl"
    status = tool("evaluate").main(["--load", sudoku_run, "--on", "test", "--generate", "5", "--losses", "16", "--score", "sudoku",
                                    "--score", "exact", "--at-least", "0.9", "--output", str(output), "--answers", str(answers)])
    assert status == 1 and "MISSED: sudoku" in capsys.readouterr().out  # the model is untrained
    result = json.loads(output.read_text())
    assert 0.5 < result["losses"]["diffusion_loss"] / math.log(9) < 3
    assert any("0.9" in name for name in result["losses"])  # by noise level
    generation = result["generation"]
    assert generation["examples"] == 5 and generation["effective_steps"] == 3 and generation["scores"]["sudoku"]["right"] == 0
    rows = lines(answers)
    assert len(rows) == 5 and rows[0]["steps"] == [3] and rows[0]["sudoku"] is False and len(rows[0]["reference"]) == 16


def test_evaluate_chat_with_other_sampler_flags(chat_run, tmp_path):
    output = tmp_path / "result.json"
    status = tool("evaluate").main(["--load", chat_run, "--generate", "4", "--losses", "0", "--score", "regex:.", "--max-denoising-steps",
                                    "2", "--output", str(output)])
    result = json.loads(output.read_text())
    assert status == 0 and "losses" not in result and result["generation"]["effective_steps"] == 2


def test_evaluate_measures_one_process_at_the_full_canvas_length(chat_run):
    evaluate = tool("evaluate")
    arguments, flags = evaluate.parse(["--load", chat_run, "--batch-size", "3", "--canvas-length-schedule", "0:8,10:16"])
    run = evaluate.configure(evaluate.StoredModel.open(chat_run), arguments, flags)
    assert run.objective.canvas_length_schedule == "" and run.training.micro_batch_size == 3 and run.model.canvas_length == 16


@pytest.mark.parametrize("flags, message", [
    (["--on", "test"], "leaves no example there"),
    (["--window-size", "25"], "--window-size"),
    (["--score", "nothing"], "choose exact, sudoku"),
    (["--no-such-flag"], "--no-such-flag"),
])
def test_evaluate_refuses(chat_run, capsys, flags, message):
    assert tool("evaluate").main(["--load", chat_run, *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def transformers_folder(tmp_path_factory):
    pytest.importorskip("transformers", minversion="5.23", reason="the model needs transformers >= 5.23")
    from tests.unit.small_tokenizers import save_tokenizer

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("export") / "model"
    run = parse([*TINY, "--eos-token-id", "4"])
    tensors = {name: tensor.detach() for name, tensor in named_tensors(build_model(run, ParallelContext.single()))}
    Export(run.model, whole_tensors_reader(tensors), lambda name: torch.float32, generation=run.generation).write(folder)
    save_tokenizer(folder)
    return folder


def test_generate_from_a_transformers_folder(transformers_folder, tmp_path, capsys):
    out = tmp_path / "answers.jsonl"
    assert tool("generate").main(["--load", str(transformers_folder), "--prompt", "a", "--max-new-tokens", "16",
                                  "--output", str(out)]) == 0
    assert "messages to the chat template" in capsys.readouterr().err
    assert lines(out)[0]["steps"] == [3]  # as its generation_config.json says


def test_evaluate_a_transformers_folder(transformers_folder, tmp_path):
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"prompt": f"q{i}", "completion": "yes" * i}) + "\n" for i in range(1, 9)))
    output = tmp_path / "result.json"
    assert tool("evaluate").main(["--load", str(transformers_folder), "--data-path", str(tmp_path / "data.jsonl"), "--split", "50,50,0",
                                  "--seq-length", "64", "--losses", "4", "--generate", "2", "--batch-size", "2", "--no-bf16",
                                  "--output", str(output)]) == 0
    result = json.loads(output.read_text())
    assert result["generation"]["examples"] == 2 and result["generation"]["effective_steps"] == 3
    assert 0.5 < result["losses"]["autoregressive_loss"] / math.log(512) < 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["generate", "evaluate"])
def test_tools_run_from_any_folder(name, tmp_path):
    done = subprocess.run([sys.executable, str(ROOT / "tools" / f"{name}.py"), "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "--load" in done.stdout
