"""What is said when a device is out of memory: kinds measured beside predicted, and flags that save."""

import re

import pytest
import torch

from megatron_dllm.config import parse, validate
from megatron_dllm.parallel import ParallelContext
from megatron_dllm.training import loop
from megatron_dllm.training.forecast import forecast
from megatron_dllm.training.loop import Trainer, TrainingFailed
from megatron_dllm.training.out_of_memory import advice, changes, state_bytes

TOY = ("--preset toy --num-layers 2 --layer-types sliding,full --vocab-size 9 --canvas-length 16 --data-source sudoku --seq-length 34 "
       "--sudoku-num-puzzles 40 --train-iters 3 --device cpu --bf16 --micro-batch-size 4 --global-batch-size 8").split()  # fmt: skip
BIG = ("--preset diffusiongemma-26b-a4b --bf16 --data-path chat.jsonl --packing --micro-batch-size 4 --global-batch-size 64 "
       "--train-iters 10 --expert-model-parallel-size 8").split()


def run_out(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 139.81 GiB.\nSee the documentation.")


def figures(text: str) -> dict[str, list[str]]:
    """Cells of the table by kind."""
    return {match[1].strip(): match[2].split() for match in re.finditer(r"^(weights|gradients|optimizer|activations and buffers|in all)"
                                                                        r"((?: +[\d.-]+){2})$", text, re.MULTILINE)}


def test_a_step_without_memory_says_what_would_save(monkeypatch):
    monkeypatch.setattr(loop, "train_step", run_out)
    trainer = Trainer.build(parse(TOY), ParallelContext.single())
    with pytest.raises(TrainingFailed) as caught:
        trainer.fit()
    text = str(caught.value)
    assert "out of memory on cpu, rank 0: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 139.81 GiB.\n" in text
    assert figures(text).keys() == {"weights", "gradients", "optimizer", "activations and buffers", "in all"}
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_building_without_memory_has_predictions_alone(monkeypatch):
    monkeypatch.setattr(loop, "MasterOptimizer", run_out)
    with pytest.raises(TrainingFailed) as caught:
        Trainer.build(parse(TOY), ParallelContext.single())
    assert figures(str(caught.value))["weights"][0] == "-"


@pytest.mark.parametrize("flags", [["--bf16"], ["--no-bf16"], ["--bf16", "--freeze-router"], ["--bf16", "--lora-rank", "4"]], ids=" ".join)
def test_states_are_measured_as_they_are_predicted(flags):
    trainer = Trainer.build(parse([*TOY, *flags]), ParallelContext.single())
    trainer.optimizer.make_moments(1)
    measured, predicted = state_bytes(trainer.model, trainer.optimizer), forecast(trainer.run, 1).fullest
    for kind, size in measured.items():
        # Buckets are padded, and a step's number has a tensor of its own.
        assert size == pytest.approx(predicted[kind], rel=0.02), kind


def test_advice_is_legal_and_the_best_of_all():
    run = parse(BIG)
    lines = list(advice(run, 8))
    assert len(lines) == 4 and "predicted" in lines[0]
    sizes = [float(re.search(r"([\d.]+) GiB of", line)[1]) for line in lines[1:]]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] > 1
    before = sum(forecast(run, 8).fullest.values())
    legal = [run.with_values(**change) for change in changes(run) if not validate(run.with_values(**change), world_size=8)]
    assert sizes[0] == pytest.approx(max(before - sum(forecast(other, 8).fullest.values()) for other in legal) / 2**30, abs=0.01)
    assert all(not validate(parse([*BIG, *line.split(" GiB")[0].split()[:-1]]), world_size=8) for line in lines[1:])
