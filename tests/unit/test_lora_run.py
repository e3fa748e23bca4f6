"""Runs that train adapters: the loss falls, the base stays bit for bit, checkpoints hold adapters alone and resume bit for bit."""
import contextlib
import io
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import pretrain_dllm
from megatron_dllm.checkpoint import store
from megatron_dllm.models.diffusion_gemma.loading import load_for_inference
from megatron_dllm.models.diffusion_gemma.lora import is_adapter
from megatron_dllm.training.metrics_file import read_metrics

FLAGS = ("--preset toy --num-layers 2 --layer-types sliding,full --vocab-size 9 --canvas-length 8 --hidden-size 32 --ffn-hidden-size 24 "
         "--moe-ffn-hidden-size 16 --num-experts 4 --data-source sudoku --sudoku-num-puzzles 20 --seq-length 34 --micro-batch-size 2 "
         "--global-batch-size 4 --log-interval 1 --device cpu --lr-decay-style constant").split()
LORA = "--lora-rank 4 --lora-alpha 8 --lora-targets attention mlp router self_conditioning experts --lr 1e-2".split()


def train(*flags: str) -> tuple[int, str]:
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(output):
        status = pretrain_dllm.main([*FLAGS, *flags])
    return status, output.getvalue()


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A toy model after a few steps."""
    folder = tmp_path_factory.mktemp("base")
    status, output = train("--train-iters", "3", "--lr", "3e-3", "--save", str(folder))
    assert status == 0, output
    return folder


@pytest.fixture(scope="module")
def adapters(base) -> Path:
    """Sixteen steps of adapters beside it."""
    folder = base.with_name("adapters")
    places = ["--save", str(folder), "--save-interval", "8", "--pretrained-checkpoint", str(base), "--save-hf", str(folder / "exported")]
    status, output = train(*LORA, "--train-iters", "16", *places)
    assert status == 0 and "adapters of rank 4, alpha 8 for attention, mlp, router" in output, output
    return folder


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(folder / "metrics.jsonl").records if "loss" in record]


def test_training_changes_the_loss_and_not_the_base(base, adapters):
    found = losses(adapters)
    assert sum(found[-3:]) / 3 < sum(found[:3]) / 3 - 0.05
    model, _ = load_for_inference(adapters, torch.device("cpu"))
    original, _ = load_for_inference(base, torch.device("cpu"))
    tensors = dict(model.named_parameters())
    assert all(torch.equal(tensors[name], tensor) for name, tensor in original.named_parameters())
    assert max(tensor.abs().max() for name, tensor in tensors.items() if name.endswith("adapter.b")) > 1e-3


def test_a_checkpoint_holds_adapters_alone(base, adapters):
    found = store.find_newest(adapters)
    names = {key.rpartition("/")[2] for key in found.shapes}
    assert names and all(map(is_adapter, names)) and found.has_optimizer
    assert found.state.base["path"] == str(base.resolve()) and len(found.state.base["fingerprint"]) == 64


def test_save_hf_writes_them_for_peft(base, adapters):
    settings = json.loads((adapters / "exported" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(base.resolve()) and settings["r"] == 4 and settings["lora_alpha"] == 8
    tensors, found = load_file(adapters / "exported" / "adapter_model.safetensors"), store.find_newest(adapters)
    ours = found.read_whole("layers.1.mlp.gate_up.adapter.b")
    for tree in ("decoder", "encoder.language_model"):
        for part, name in enumerate(("gate_proj", "up_proj")):
            assert torch.equal(tensors[f"base_model.model.model.{tree}.layers.1.mlp.{name}.lora_B.weight"], ours[part])


@pytest.mark.slow
def test_it_resumes_bit_for_bit(base, adapters, tmp_path):
    shutil.copytree(store.iteration_folder(adapters, 8), store.iteration_folder(tmp_path, 8))
    places = ["--save", str(tmp_path), "--load", str(tmp_path), "--pretrained-checkpoint", str(base)]
    status, output = train(*LORA, "--train-iters", "16", *places)
    assert status == 0 and "iteration 8" in output, output
    assert losses(tmp_path) == losses(adapters)[8:]
    left, right = store.find_newest(tmp_path), store.find_newest(adapters)
    assert left.shapes == right.shapes and all(torch.equal(left.read_whole(key), right.read_whole(key)) for key in left.shapes)


# What is changed -> the flags of the second run, and what its message says.
REFUSED = {
    "no adapters": ([], "holds adapters alone, beside .*merge-adapters"),
    "another rank": ([*LORA, "--lora-rank", "8"], "--lora-rank 4 became 8"),
    "another alpha": ([*LORA, "--lora-alpha", "2"], "--lora-alpha 8.0 became 2.0"),
    "another base": ([*LORA, "--seed", "7"], "this run's weights are others: random weights of --seed 7"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(adapters, case):
    flags, message = REFUSED[case]
    status, output = train(*flags, "--train-iters", "16", "--load", str(adapters))
    assert status != 0
    assert re.search(message, output), output


def test_a_whole_model_is_no_adapter_and_an_adapter_no_base(base, adapters):
    status, output = train(*LORA, "--train-iters", "16", "--load", str(base))
    assert status != 0 and "holds a whole model, and --lora-rank asks for adapters" in output, output
    status, output = train(*LORA, "--train-iters", "16", "--pretrained-checkpoint", str(adapters))
    assert status != 0 and "holds adapters alone; merge them" in output, output
