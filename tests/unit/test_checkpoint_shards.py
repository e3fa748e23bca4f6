"""Declared shards, their proof, and the files that they go into and come from."""
import itertools
import json
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open

from megatron_dllm.checkpoint.shards import (
    CheckpointError,
    Rectangle,
    Shard,
    ShardLoadPlanner,
    check_partition,
    rectangles_of_range,
    save_planner,
)
from megatron_dllm.checkpoint.storage import SafetensorsReader, SafetensorsWriter
from megatron_dllm.checkpoint.tensor_files import FileRecord, TensorFileWriter, TensorSpec, read_rectangle, row_blocks
from megatron_dllm.parallel.placement import Placement


def placement(shape, offset, extent, local=None):
    return Placement(shape, offset, extent, local or extent, {"tp": 0})


@pytest.mark.parametrize("shape", [(7,), (4, 3), (2, 3, 4), (3, 1, 2, 2), (1,)], ids=str)
def test_rectangles_of_range_are_the_range_in_order(shape):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for start, stop in itertools.combinations(range(whole.numel() + 1), 2):
        found = list(rectangles_of_range(shape, start, stop))
        pieces = [whole[tuple(slice(o, o + e) for o, e in zip(*pair, strict=True))].flatten() for pair in found]
        assert torch.equal(torch.cat(pieces), torch.arange(start, stop))
        assert len(found) <= 2 * len(shape) - 1
    assert list(rectangles_of_range(shape, 0, 0)) == []


def test_rectangles_of_range_as_the_docstring_says():
    assert list(rectangles_of_range((4, 3), 2, 9)) == [((0, 2), (1, 1)), ((1, 0), (2, 3))]


@pytest.mark.parametrize(("offset", "extent"), [((3, 0), (2, 3)), ((0, -1), (2, 3)), ((0,), (2,))],
                         ids=["too long", "negative", "dimensions"])
def test_shard_outside_its_tensor_is_refused_when_declared(offset, extent):
    with pytest.raises(ValueError, match=r"embedding.weight \[4, 3\].*lies outside"):
        Shard("embedding.weight", (4, 3), torch.float32, [Rectangle(offset, torch.zeros(extent))])


def test_flat_range_leaves_fill_out_and_is_written_into_in_place():
    """5 rows of 3 over 2 ranks of 3 rows: the second has one row of fill; its flat range 2..8 ends in it."""
    flat = torch.arange(6.0)
    shard = Shard.flat_range("w", flat, 2, placement((5, 3), (3, 0), (2, 3), (3, 3)))
    assert {offset: r.tensor.flatten().tolist() for offset, r in shard.rectangles.items()} == {(3, 2): [0.0], (4, 0): [1.0, 2.0, 3.0]}
    for rectangle in shard.rectangles.values():
        rectangle.tensor.fill_(9)
    assert flat.tolist() == [9, 9, 9, 9, 4, 5]


def plans_of(*ranks):
    return [save_planner(shards, is_coordinator=rank == 0).create_local_plan() for rank, shards in enumerate(ranks)]


def rows(key, start, stop, total=4, dtype=torch.float32):
    return Shard(key, (total, 3), dtype, [Rectangle((start, 0), torch.zeros(stop - start, 3, dtype=dtype))])


@pytest.mark.parametrize(("ranks", "message"), [
    (([rows("w", 0, 2)], [rows("w", 3, 4)]), r"w \[4, 3\]: 3 of 12 elements are on no rank"),
    (([rows("w", 0, 3)], [rows("w", 2, 4)]), r"\[0, 0\] of extent \[3, 3\] \(rank 0\) overlaps .*\[2, 0\] of extent \[2, 3\] \(rank 1\)"),
    (([rows("w", 0, 4)], [rows("w", 0, 2)]), "overlaps"),
    (([rows("w", 0, 2)], [rows("w", 2, 4, total=5)]), r"w is \[4, 3\] torch.float32 on ranks \[0\] and \[5, 3\]"),
    (([rows("w", 0, 2)], [rows("w", 2, 4, dtype=torch.bfloat16)]), "torch.bfloat16 on ranks"),
], ids=["gap", "overlap", "two sizes at one place", "shapes", "dtypes"])
def test_check_partition_names_what_is_wrong(ranks, message):
    with pytest.raises(CheckpointError, match=message):
        check_partition(plans_of(*ranks))


def test_check_partition_takes_replicas_and_empty_shards():
    check_partition(plans_of([rows("w", 0, 2), rows("b", 0, 4)], [rows("w", 2, 4), rows("b", 0, 4)], [rows("w", 0, 2), rows("w2", 0, 4)],
                             [Shard("w", (4, 3), torch.float32, [])]))


def test_a_key_declared_twice_is_refused():
    with pytest.raises(ValueError, match="w is declared twice"):
        save_planner([rows("w", 0, 2), rows("w", 2, 4)], is_coordinator=True)


def test_file_writer_writes_what_the_library_reads(tmp_path):
    tensors = {"a": torch.randn(5, 3), "scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4), "b": torch.randn(2, 2).bfloat16(),
               "turned": torch.arange(6).view(2, 3).t()}
    specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    writer = TensorFileWriter(tmp_path / "x.safetensors", specs, {"format": "pt"})
    for name, tensor in tensors.items():
        for piece in tensor.split(2) if tensor.dim() else [tensor]:
            writer.add(name, piece)
    assert writer.close() == FileRecord.of(tmp_path / "x.safetensors")
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        for name, tensor in tensors.items():
            found = file.get_tensor(name)
            assert found.dtype == tensor.dtype and torch.equal(found, tensor), name
    assert torch.equal(read_rectangle(tmp_path / "x.safetensors", "turned", (1, 0), (2, 1)), tensors["turned"][1:3, :1])
    assert torch.equal(read_rectangle(tmp_path / "x.safetensors", "scalar", (), ()), tensors["scalar"])


def test_file_writer_wants_every_element_in_order(tmp_path):
    specs = [TensorSpec("a", torch.float32, (4,)), TensorSpec("b", torch.float32, (1,))]
    writer = TensorFileWriter(tmp_path / "1", specs)
    with pytest.raises(AssertionError, match="b torch.float32 came, a torch.float32 was due"):
        writer.add("b", torch.zeros(1))
    writer.add("a", torch.zeros(3))
    with pytest.raises(AssertionError, match="more elements of a"):
        writer.add("a", torch.zeros(2))
    writer.abandon()
    writer = TensorFileWriter(tmp_path / "2", specs)
    writer.add("a", torch.zeros(4))
    with pytest.raises(AssertionError, match=r"\['b'\] were not given"):
        writer.close()
    writer.abandon()


def test_row_blocks_make_up_the_tensor():
    assert list(row_blocks((5, 3), 4, block_bytes=24)) == [((0, 0), (2, 3)), ((2, 0), (2, 3)), ((4, 0), (1, 3))]
    assert list(row_blocks((2, 3), 4, block_bytes=1)) == [((0, 0), (1, 3)), ((1, 0), (1, 3))]
    assert list(row_blocks((), 4)) == [((), ())]


def refuse(*arguments, **options):
    raise AssertionError("a pickle was read")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_torch_saves_and_loads_through_the_storage_without_a_pickle(tmp_path, monkeypatch):
    """dcp.save and dcp.load as their users call them, in every dtype that training holds, of sizes 1 and 24 and without dimensions."""
    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    state = {"weight": torch.randn(4, 6), "half": torch.randn(24).bfloat16(), "one": torch.tensor([3.0]), "scalar": torch.tensor(7),
             "exp_avg/weight": torch.randn(4, 6, dtype=torch.float64)}
    shards = {key: Shard.whole(key, tensor) for key, tensor in state.items()}
    planner = save_planner([], is_coordinator=True)
    dcp.save(shards, storage_writer=SafetensorsWriter(tmp_path), planner=planner, no_dist=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model_00000.safetensors", "optimizer_00000.safetensors", "tensors.json"]
    json.loads((tmp_path / "tensors.json").read_text())
    loaded = {key: Shard.whole(key, torch.zeros_like(tensor)) for key, tensor in state.items()}
    dcp.load(loaded, storage_reader=SafetensorsReader(tmp_path), planner=ShardLoadPlanner(), no_dist=True)
    for key, tensor in state.items():
        rectangle, = loaded[key].rectangles.values()
        assert torch.equal(rectangle.tensor, tensor), key
