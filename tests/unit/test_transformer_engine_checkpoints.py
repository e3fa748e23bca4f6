"""A run that Transformer Engine computes goes on from a checkpoint of one that it does not, and the other way round."""
from pathlib import Path

import pytest
import torch

from megatron_dllm.checkpoint import store
from megatron_dllm.config import parse
from megatron_dllm.models.diffusion_gemma import build
from megatron_dllm.parallel import ParallelContext
from megatron_dllm.training.loop import Trainer
from megatron_dllm.training.metrics_file import read_metrics
from megatron_dllm.transformer_engine import Engine
from tests.unit.fake_transformer_engine import install_fake

FLAGS = ("--preset toy --num-layers 2 --layer-types sliding,full --vocab-size 9 --canvas-length 8 --data-source sudoku "
         "--sudoku-num-puzzles 40 --seq-length 34 --micro-batch-size 4 --global-batch-size 4 --log-interval 1 --bf16 --lr 3e-3 "
         "--train-iters 4").split()
ENGINE = ("--transformer-impl transformer_engine --moe-grouped-gemm-backend transformer_engine --attention-backend transformer_engine "
          "--rotary-backend transformer_engine --cross-entropy-fusion-impl te").split()


def train(folder: Path, device: torch.device, *flags: str) -> list[float]:
    """The losses of the run in `folder`."""
    run = parse([*FLAGS, "--device", device.type, "--save", str(folder), *flags])
    Trainer.build(run, ParallelContext.single(device)).fit()
    return [record["loss"] for record in read_metrics(folder / "metrics.jsonl").records if "loss" in record]


def check(folder: Path, device: torch.device, first: list[str], second: list[str]) -> None:
    whole = train(folder / "whole", device, *first)
    train(folder / "halves", device, *first, "--exit-interval", "2")
    halves = train(folder / "halves", device, *second, "--load", str(folder / "halves"))
    assert halves[:2] == whole[:2]
    assert halves[2:] == pytest.approx(whole[2:], rel=1e-2)
    contents = [store.open_checkpoint(store.iteration_folder(folder / name, 4)).shapes for name in ("whole", "halves")]
    assert contents[0] == contents[1]


ORDERS = pytest.mark.parametrize(("first", "second"), [([], ENGINE), (ENGINE, [])], ids=["from ours", "to ours"])


@pytest.mark.slow
@ORDERS
def test_with_a_stand_in(tmp_path, monkeypatch, first, second):
    engine = Engine(install_fake(monkeypatch), grouped=True, rotary=True, cross_entropy=True)
    monkeypatch.setattr(build, "load_engine", lambda *_: engine)
    check(tmp_path, torch.device("cpu"), first, second)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # the package warns when it is imported
@ORDERS
def test_with_the_package(tmp_path, first, second):
    pytest.importorskip("transformer_engine.pytorch")
    check(tmp_path, torch.device("cuda"), first, second)
