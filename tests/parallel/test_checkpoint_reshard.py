"""Checkpoints saved by several processes in one layout and read in another."""
from pathlib import Path

import pytest
import torch

from megatron_dllm.checkpoint import store
from megatron_dllm.checkpoint.save import CheckpointWriter
from megatron_dllm.checkpoint.shards import CheckpointError, Rectangle, Shard
from megatron_dllm.parallel import Group
from megatron_dllm.parallel.placement import Placement
from tests.parallel.checkpoint_cases import LAYOUTS, LORA, load_under, save_under, start_under


def world_of(rank: int, size: int) -> Group:
    return Group("world", size, rank, torch.distributed.group.WORLD, tuple(range(size)))


def placed(shape, cut, ranks, number) -> Placement:
    """Rank `number` of `ranks` along dimension `cut`, which is filled up where they do not divide it; no cut: all of it."""
    offset, extent, local = [0] * len(shape), list(shape), list(shape)
    if cut is not None:
        local[cut] = -(-shape[cut] // ranks)
        offset[cut] = min(number * local[cut], shape[cut])
        extent[cut] = min(local[cut], shape[cut] - offset[cut])
    return Placement(tuple(shape), tuple(offset), tuple(extent), tuple(local), {})


# (shape, dtype, dimension that tp cuts): an odd vocabulary with fill and an empty last shard, experts, fp32 beside bf16, sizes 1 and 24.
TENSORS = {
    "embedding.weight": ((9, 4), torch.float32, 0),
    "experts.gate_up": ((4, 2, 6, 3), torch.float32, 2),
    "mhc.alpha": ((1,), torch.float32, None),
    "mhc.bias": ((24,), torch.bfloat16, None),
    "down": ((4, 8), torch.bfloat16, 1),
}


def whole(name: str) -> torch.Tensor:
    shape, dtype, _ = TENSORS[name]
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(name))).to(dtype)


def local_of(name: str, tp: int, number: int) -> tuple[torch.Tensor, Placement]:
    shape, dtype, cut = TENSORS[name]
    placement = placed(shape, cut, tp, number)
    local = torch.full(placement.local_shape, 7.0, dtype=dtype)
    placement.region(local).copy_(placement.cut(whole(name)))
    return local, placement


def save_placed(rank: int, folder: str, size: int, tp: int, flat: bool, background: bool) -> list[str]:
    """tp ranks side by side, dp over the rest; `flat`: each dp rank saves its own range of the flattened local tensor."""
    dp, shards = size // tp, []
    for name in TENSORS:
        local, placement = local_of(name, tp, rank % tp)
        if flat:
            share = -(-local.numel() // dp)
            start = min(rank // tp * share, local.numel())
            shards.append(Shard.flat_range(name, local.flatten()[start:start + share], start, placement))
        else:
            shards.append(Shard.placed(name, local, placement))
    writer = CheckpointWriter(Path(folder), world_of(rank, size), in_background=background)
    outcomes = [*writer.save(store.TrainingState(3, 12, 3), shards, ""), *writer.wait()]
    writer.close()
    assert [outcome.error for outcome in outcomes] == [None]
    return sorted(path.name for path in outcomes[0].path.iterdir())


def load_placed(rank: int, folder: str, size: int, tp: int) -> None:
    found = store.find_newest(Path(folder), pytest.fail, world=world_of(rank, size) if size > 1 else None)
    wanted = {name: local_of(name, tp, rank % tp) for name in TENSORS}
    mine = {name: torch.full_like(local, 7.0) for name, (local, _) in wanted.items()}
    found.load([Shard.placed(name, mine[name], placement) for name, (_, placement) in wanted.items()])
    for name, (local, _) in wanted.items():
        assert torch.equal(mine[name], local), name


@pytest.mark.parametrize("background", [False, True], ids=["at once", "in the background"])
@pytest.mark.parametrize(("tp", "flat"), [(1, False), (2, False), (4, False), (2, True), (1, True)],
                         ids=["dp4", "tp2 dp2", "tp4", "tp2 dp2 flat", "dp4 flat"])
def test_placed_shards_come_back_under_every_layout(world, tmp_path, tp, flat, background):
    files = world.run(save_placed, str(tmp_path), 4, tp, flat, background, size=4)[0]
    assert "complete.json" in files and all(f"model_0000{rank}.safetensors" in files for rank in range(2))
    for size, loaded_tp in ((4, 2), (4, 4), (2, 2)):
        world.run(load_placed, str(tmp_path), size, loaded_tp, size=size)
    load_placed(0, str(tmp_path), 1, 1)


def save_gap(rank: int, folder: str) -> str:
    """Rank 1 leaves its half out."""
    rectangles = [Rectangle((0, 0), torch.zeros(2, 3))] if rank == 0 else []
    with pytest.raises(CheckpointError) as error:
        CheckpointWriter(Path(folder), world_of(rank, 2)).save(
            store.TrainingState(1, 1, 1), [Shard("w", (4, 3), torch.float32, rectangles)], "")
    return str(error.value)


def test_no_byte_is_written_where_a_shard_is_missing(world, tmp_path):
    for message in world.run(save_gap, str(tmp_path / "run"), size=2):
        assert "w [4, 3]: 6 of 12 elements are on no rank" in message
    assert not (tmp_path / "run").exists()


def save_with_a_failing_rank(rank: int, folder: str, background: bool) -> list[str | None]:
    """Rank 1 finds a file in its place in the second save."""
    writer, errors = CheckpointWriter(Path(folder), world_of(rank, 2), in_background=background), []
    for iteration in (1, 2, 3):
        shard = Shard.placed("w", torch.full((2, 3), float(iteration)), placed((4, 3), 0, 2, rank))
        if iteration == 2 and rank == 1:
            create = writer._write

            def fail(running, resolve, create=create):
                (running.draft.path / "model_00001.safetensors").write_text("in the way")
                return create(running, resolve)

            writer._write = fail
        outcomes = [*writer.save(store.TrainingState(iteration, iteration, 1), [shard], ""), *writer.wait()]
        if iteration == 2 and rank == 1:
            writer._write = create
        errors += [outcome.error for outcome in outcomes]
    writer.close()
    return errors


@pytest.mark.parametrize("background", [False, True], ids=["at once", "in the background"])
def test_a_rank_that_cannot_write_is_named_and_takes_no_other_checkpoint(world, tmp_path, background):
    for errors in world.run(save_with_a_failing_rank, str(tmp_path), background, size=2):
        assert errors[0] is errors[2] is None and errors[1].startswith("rank 1: ") and "model_00001.safetensors" in errors[1]
    assert [path.name for path in store.checkpoints_in(tmp_path)] == ["iter_0000003", "iter_0000001"]
    assert not list(tmp_path.glob("*.partial"))


CASES = [("dp4", "tp2 dp2"), ("tp2 dp2, distributed optimizer", "1"), ("ep4, distributed optimizer", "ep2"), ("tp2 sp", "dp4"),
         ("pp2 vpp2", "1"), ("1", "pp2 tp2")]


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "loaded"), CASES, ids=[f"{a} to {b}" for a, b in CASES])
def test_a_run_goes_on_under_another_layout(world, tmp_path, saved, loaded):
    before = world.run(save_under, saved, str(tmp_path), size=LAYOUTS[saved][0])[0]
    after = world.run(load_under, loaded, str(tmp_path), size=LAYOUTS[loaded][0])[0]
    assert before.tensors.keys() == after.tensors.keys()
    assert all(torch.equal(before.tensors[key], after.tensors[key]) for key in before.tensors)
    assert abs(before.next_loss - after.next_loss) < 1e-6


@pytest.mark.parametrize(("saved", "loaded"), [("tp2", "1"), pytest.param("pp2 vpp2", "ep2", marks=pytest.mark.slow)])
def test_adapters_go_on_under_another_layout(world, tmp_path, saved, loaded):
    base, adapters = str(tmp_path / "base"), str(tmp_path / "adapters")
    world.run(save_under, "1", base, size=1)
    flags = (*LORA, "--pretrained-checkpoint", base)
    before = world.run(save_under, saved, adapters, *flags, size=LAYOUTS[saved][0])[0]
    after = world.run(load_under, loaded, adapters, *flags, size=LAYOUTS[loaded][0])[0]
    assert before.tensors.keys() == after.tensors.keys() and all("adapter" in name for name in before.tensors)
    assert all(torch.equal(before.tensors[key], after.tensors[key]) for key in before.tensors)
    assert abs(before.next_loss - after.next_loss) < 1e-6


def test_bf16_masters_are_pretrained_on_every_rank(world, tmp_path):
    saved = world.run(save_under, "1", str(tmp_path), size=1)[0].tensors
    layout = "tp2 dp2, distributed optimizer"
    started = world.run(start_under, layout, str(tmp_path), size=LAYOUTS[layout][0])[0]
    for name in (name for name in started if not name.startswith("copy/")):
        wanted = saved[name] if ".router." in name else saved[name].bfloat16()
        assert torch.equal(started[name], wanted.float()) and torch.equal(started[f"copy/{name}"], wanted), name
