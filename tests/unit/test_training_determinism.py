"""--deterministic-mode verifies and refuses; it changes nothing that it was given."""

import dataclasses

import pytest
import torch

import pretrain_dllm
from megatron_dllm import config
from megatron_dllm.training.determinism import obstacles, require_determinism

FLAGS = "--preset toy --data-source sudoku --train-iters 1 --deterministic-mode --device cpu".split()
GOOD = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def torch_as_it_was():
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize(
    ("environment", "world_size", "texts"),
    [
        (GOOD, 2, []),
        ({**GOOD, "NCCL_ALGO": "tree"}, 2, []),
        ({"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, 1, []),
        ({"NCCL_ALGO": "Ring"}, 1, ["CUBLAS_WORKSPACE_CONFIG is not set"]),
        ({**GOOD, "CUBLAS_WORKSPACE_CONFIG": ":0:0"}, 1, ["CUBLAS_WORKSPACE_CONFIG is :0:0"]),
        ({}, 2, ["CUBLAS_WORKSPACE_CONFIG is not set", "NCCL_ALGO is not set"]),
        ({**GOOD, "NCCL_ALGO": "NVLS"}, 2, ["NCCL_ALGO is NVLS"]),
    ],
)
def test_obstacles_of_the_environment(environment, world_size, texts):
    found = obstacles(config.parse(FLAGS), CUDA, world_size, environment)
    assert len(found) == len(texts) and all(text in line for text, line in zip(texts, found, strict=True)), found


def test_obstacles_of_the_backends(monkeypatch):
    run = config.parse([*FLAGS, "--moe-token-dispatcher-type", "deepep"])
    assert "alltoall" in obstacles(run, CUDA, 2, GOOD)[0]
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert "cudnn.benchmark" in obstacles(config.parse(FLAGS), CUDA, 2, GOOD)[0]


def test_a_cpu_needs_nothing():
    assert obstacles(config.parse(FLAGS), torch.device("cpu"), 4, {}) == []


def test_require_determinism_turns_torch_strict_and_leaves_the_run_alone():
    run = config.parse(FLAGS)
    copy = dataclasses.replace(run)
    torch.use_deterministic_algorithms(False)
    line = require_determinism(run, CUDA, 2, GOOD)
    assert "NCCL_ALGO Ring" in line and ":4096:8" in line and torch.are_deterministic_algorithms_enabled()
    assert run == copy
    torch.use_deterministic_algorithms(False)
    with pytest.raises(ValueError, match="NCCL_ALGO is not set"):
        require_determinism(run, CUDA, 2, {"CUBLAS_WORKSPACE_CONFIG": ":16:8"})
    assert not torch.are_deterministic_algorithms_enabled()


def test_pretrain_refuses_with_status_2(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(pretrain_dllm, "require_determinism", lambda run, device, *rest: require_determinism(run, CUDA, *rest))
    assert pretrain_dllm.main([*FLAGS, "--data-cache-path", str(tmp_path)]) == 2
    assert "cudnn.benchmark is on" in capsys.readouterr().err
