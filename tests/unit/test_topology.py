"""Rank grids: tables written by hand, and sizes that do not fit."""

import re
from dataclasses import replace

import pytest
import torch

from megatron_dllm.config.parallel import ParallelConfig
from megatron_dllm.parallel import Group, ParallelContext, Topology, initialize
from megatron_dllm.parallel.initialize import choose_device, shares_device
from megatron_dllm.parallel.launch import Launch, first_host, read_launch
from megatron_dllm.parallel.topology import GROUP_AXES

# tp 2, cp 2, dp 2, pp 2 over 16 ranks; experts over etp 1, ep 4, edp 2, pp 2.
SIXTEEN = Topology(world=16, tp=2, cp=2, pp=2, ep=4)
SIXTEEN_GROUPS = {
    "tp": [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11), (12, 13), (14, 15)],
    "cp": [(0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15)],
    "dp": [(0, 4), (1, 5), (2, 6), (3, 7), (8, 12), (9, 13), (10, 14), (11, 15)],
    "dp_cp": [(0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15)],
    "pp": [(0, 8), (1, 9), (2, 10), (3, 11), (4, 12), (5, 13), (6, 14), (7, 15)],
    "etp": [(rank,) for rank in range(16)],
    "ep": [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)],
    "edp": [(0, 4), (1, 5), (2, 6), (3, 7), (8, 12), (9, 13), (10, 14), (11, 15)],
}
# tp 2 and etp 4 differ: an expert's matrices are cut over the tp ranks of two data-parallel copies. edp 1.
EIGHT = Topology(world=8, tp=2, ep=2, etp=4)
EIGHT_GROUPS = {
    "tp": [(0, 1), (2, 3), (4, 5), (6, 7)],
    "cp": [(rank,) for rank in range(8)],
    "dp": [(0, 2, 4, 6), (1, 3, 5, 7)],
    "dp_cp": [(0, 2, 4, 6), (1, 3, 5, 7)],
    "pp": [(rank,) for rank in range(8)],
    "etp": [(0, 1, 2, 3), (4, 5, 6, 7)],
    "ep": [(0, 4), (1, 5), (2, 6), (3, 7)],
    "edp": [(rank,) for rank in range(8)],
}


@pytest.mark.parametrize("topology, table", [(SIXTEEN, SIXTEEN_GROUPS), (EIGHT, EIGHT_GROUPS)], ids=["sixteen", "eight"])
@pytest.mark.parametrize("name", GROUP_AXES)
def test_groups(topology, table, name):
    assert topology.groups(name) == table[name]


def test_coordinates():
    assert SIXTEEN.coordinates(13) == {"tp": 1, "cp": 0, "dp": 1, "pp": 1, "etp": 0, "ep": 1, "edp": 1}
    assert EIGHT.coordinates(6) == {"tp": 0, "cp": 0, "dp": 3, "pp": 0, "etp": 2, "ep": 1, "edp": 0}
    assert (SIXTEEN.dp, SIXTEEN.edp, EIGHT.dp, EIGHT.edp) == (2, 2, 4, 1)


@pytest.mark.parametrize(
    "sizes",
    [
        {"world": 1},
        {"world": 6, "tp": 3, "ep": 2},
        {"world": 12, "cp": 3, "pp": 2, "etp": 2},
        {"world": 24, "tp": 2, "cp": 3, "ep": 4, "etp": 3, "pp": 2},
    ],
    ids=str,
)
def test_groups_part_the_world_and_grids_hold_equally_many_ranks(sizes):
    topology = Topology(**sizes)
    assert topology.etp * topology.ep * topology.edp == topology.tp * topology.cp * topology.dp
    for name, axes in GROUP_AXES.items():
        groups = topology.groups(name)
        assert sorted(rank for group in groups for rank in group) == list(range(topology.world))
        size = 1
        for axis in axes:
            size *= getattr(topology, axis)
        assert {len(group) for group in groups} == {size}
        # Two axes of one grid share one rank at most.
        for other, other_axes in GROUP_AXES.items():
            if {name, other} <= {"tp", "cp", "dp", "pp"} and not set(axes) & set(other_axes):
                assert all(len(set(a) & set(b)) <= 1 for a in groups for b in topology.groups(other))


@pytest.mark.parametrize(
    "sizes, flag",
    [
        ({"world": 6, "tp": 4}, "--tensor-model-parallel-size"),
        ({"world": 8, "tp": 2, "cp": 3}, "--context-parallel-size"),
        ({"world": 6, "pp": 4}, "--pipeline-model-parallel-size"),
        ({"world": 8, "tp": 2, "ep": 3}, "--expert-model-parallel-size"),
        ({"world": 8, "pp": 2, "etp": 8}, "--expert-tensor-parallel-size"),
    ],
    ids=str,
)
def test_topology_names_sizes_that_fit(sizes, flag):
    with pytest.raises(ValueError) as raised:
        Topology(**sizes)
    axis = {
        "--tensor-model-parallel-size": "tp",
        "--context-parallel-size": "cp",
        "--pipeline-model-parallel-size": "pp",
        "--expert-model-parallel-size": "ep",
        "--expert-tensor-parallel-size": "etp",
    }[flag]
    fits = [int(n) for n in re.search(rf"{flag} to one of \[([\d, ]+)\]", str(raised.value))[1].split(",")]
    assert sizes[axis] not in fits
    for fit in fits:
        Topology(**{**sizes, axis: fit})


def test_topology_lists_products_where_no_single_size_helps():
    with pytest.raises(ValueError, match=re.escape("make their product one of [1, 2, 4, 8]")):
        Topology(world=8, tp=3, cp=3)
    with pytest.raises(ValueError, match="--context-parallel-size 0: a size is 1 at least"):
        Topology(world=8, cp=0)


TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
SRUN = {"SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_NTASKS": "16"}


@pytest.mark.parametrize(
    "environment, launch",
    [
        ({}, None),
        ({"SLURM_NTASKS": "16", "SLURM_PROCID": "0"}, None),  # a batch script, where srun has not been called
        (TORCHRUN, Launch(5, 8, 1, "env://")),
        ({**TORCHRUN, "SHARE_GPU": "1"}, Launch(5, 8, 1, "env://", shares_gpu=True)),
        ({**SRUN, "SHARE_GPU": "1"}, Launch(9, 16, 1, "tcp://gpu07:29500", shares_gpu=True)),
        (SRUN, Launch(9, 16, 1, "tcp://gpu07:29500")),
        ({**SRUN, "MASTER_ADDR": "head", "MASTER_PORT": "77"}, Launch(9, 16, 1, "tcp://head:77")),
        ({**SRUN, **TORCHRUN}, Launch(5, 8, 1, "env://")),
    ],
    ids=["alone", "batch script", "torchrun", "torchrun on one GPU", "srun on one GPU", "srun", "srun with address", "torchrun under srun"],
)
def test_read_launch(environment, launch):
    assert read_launch(environment) == launch


def test_read_launch_names_what_is_missing():
    with pytest.raises(ValueError, match="LOCAL_RANK, MASTER_PORT is not"):
        read_launch({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"})
    with pytest.raises(ValueError, match="SHARE_GPU='yes': set 1, or leave it out"):
        read_launch({**TORCHRUN, "SHARE_GPU": "yes"})
    assert not read_launch({**TORCHRUN, "SHARE_GPU": ""}).shares_gpu


@pytest.mark.parametrize(
    "nodes, host",
    [("gpu1", "gpu1"), ("gpu1,gpu2", "gpu1"), ("gpu[07-09,12],login1", "gpu07"), ("r[3,5]-ib", "r3-ib"), ("a-1,b[1-2]", "a-1")],
)
def test_first_host(nodes, host):
    assert first_host(nodes) == host


def test_initialize_alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    context = initialize(ParallelConfig(), device="cpu")
    assert context == ParallelContext.single("cpu")
    with pytest.raises(ValueError, match="this is one process; start several with torchrun"):
        initialize(ParallelConfig(tensor_model_parallel_size=2), device="cpu")


def test_choose_device():
    assert choose_device("cpu", 3) == torch.device("cpu")
    with pytest.raises(ValueError, match="choose auto, cpu or cuda"):
        choose_device("gpu", 0)


def test_context_group_refuses_an_unknown_axis():
    context = ParallelContext.single()
    assert context.group("dp_cp") is context.dp_cp
    with pytest.raises(ValueError, match="no axis 'model'"):
        context.group("model")


def test_group_without_process_group_is_an_error():
    group = Group("tp", 2, 0, None, (0, 1))
    with pytest.raises(RuntimeError, match="group tp of ranks .* has no process group"):
        group.handle  # noqa: B018


def test_a_device_is_shared_where_the_launch_says_so_and_others_are_there(monkeypatch):
    single = ParallelContext.single("cpu")
    several = replace(single, world=Group("world", 2, 0, None, (0, 1)), device=torch.device("cuda", 0))
    assert not shares_device(several)
    monkeypatch.setenv("SHARE_GPU", "1")
    assert [shares_device(context) for context in (several, replace(several, world=single.world), single)] == [True, False, False]
