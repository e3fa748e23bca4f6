"""Checkpoints on disk, written by one process: validity, the newest one, failures, retention, averages, the tool."""
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from megatron_dllm.checkpoint import save as save_module
from megatron_dllm.checkpoint import store
from megatron_dllm.checkpoint.retention import Retention
from megatron_dllm.checkpoint.save import CheckpointWriter, check_room, describe_bytes
from megatron_dllm.checkpoint.shards import CheckpointError, Rectangle, Shard

ROOT = Path(__file__).resolve().parents[2]


def shards_of(value: float) -> list[Shard]:
    """A model of three tensors, one of them in two rectangles, and a moment."""
    weight = torch.arange(12.0).view(4, 3) + value
    return [Shard("weight", (4, 3), torch.float32, [Rectangle((0, 0), weight[:1]), Rectangle((1, 0), weight[1:])]),
            Shard.whole("half", torch.full((24,), value, dtype=torch.bfloat16)), Shard.whole("one", torch.tensor([value])),
            Shard.whole("exp_avg/weight", weight * 2)]


def save(folder: Path, iteration: int, value: float | None = None, **options) -> list:
    writer = CheckpointWriter(folder, **options)
    state = store.TrainingState(iteration, iteration * 4, iteration)
    outcomes = [*writer.save(state, shards_of(float(iteration) if value is None else value), f"# {iteration}\n"), *writer.wait()]
    writer.close()
    return outcomes


def loaded_value(found: store.Checkpoint) -> float:
    """The value that every tensor of a checkpoint was made from."""
    shards = shards_of(-1.0)
    found.load(shards)
    values = {shard.key: torch.cat([r.tensor.flatten() for r in shard.rectangles.values()]) for shard in shards}
    value = values["one"].item()
    for shard in shards_of(value):
        assert torch.equal(values[shard.key], torch.cat([r.tensor.flatten() for r in shard.rectangles.values()])), shard.key
    return value


def find(folder: Path) -> tuple[store.Checkpoint | None, str]:
    said: list[str] = []
    return store.find_newest(folder, said.append), "\n".join(said)


@pytest.mark.parametrize("background", [False, True], ids=["at once", "in the background"])
def test_what_is_saved_is_loaded(tmp_path, background):
    (outcome,) = save(tmp_path / "a b", 100, in_background=background)
    assert outcome.error is None and outcome.path == tmp_path / "a b" / "iter_0000100"
    assert (tmp_path / "a b" / "latest_checkpointed_iteration.txt").read_text() == "100\n"
    found, said = find(tmp_path / "a b")
    assert (found.state.iteration, found.state.consumed_rows, found.arguments, said) == (100, 400, "# 100\n", "")
    assert loaded_value(found) == 100.0
    assert torch.equal(found.read("weight", (0, 1), (3, 2)), (torch.arange(12.0).view(4, 3) + 100)[:3, 1:])
    assert store.problems_of(found.path) == []


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_copy_of_a_background_save_is_of_its_moment(tmp_path, device):
    """The state changes as soon as `save` returns, and the files must not. From a GPU, copies go to pinned memory behind its work."""
    elements = 1000 if device == "cpu" else 50_000_000  # whose copy takes longer than it takes to ask for the next change
    weight = torch.zeros(elements, device=device)
    writer = CheckpointWriter(tmp_path, in_background=True)
    for iteration in (1, 2):
        weight.fill_(iteration)
        writer.save(store.TrainingState(iteration, 1, 1), [Shard.whole("weight", weight)], "")
        weight.fill_(-1)
    writer.wait()
    assert all(copy.is_pinned() == (device == "cuda") for copy in writer._staged.values())
    writer.close()
    for iteration in (1, 2):
        found = store.open_checkpoint(store.iteration_folder(tmp_path, iteration))
        assert found.read_whole("weight").unique().tolist() == [iteration]


def test_poll_gives_the_outcome_once(tmp_path):
    writer = CheckpointWriter(tmp_path, in_background=True)
    assert writer.poll() is None
    assert writer.save(store.TrainingState(1, 1, 1), shards_of(1.0), "") == []
    outcome = None
    while outcome is None:
        outcome = writer.poll()
    assert outcome.path.name == "iter_0000001" and writer.poll() is None
    writer.close()


def damage_size(path: Path) -> str:
    file = path / "model_00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    return f"{file} has "


def damage_bit(path: Path) -> str:
    file = path / "optimizer_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    return f"{file} has changed"


def damage_index(path: Path) -> str:
    file = path / "tensors.json"
    file.write_text(file.read_text().replace('"weight"', '"waight"'))
    return f"{file} has changed"


def damage_missing(path: Path) -> str:
    (path / "model_00000.safetensors").unlink()
    return "model_00000.safetensors is missing: the part of rank 0"


def damage_last_file(path: Path) -> str:
    (path / "complete.json").unlink()
    return "complete.json is missing: the checkpoint was not finished"


def damage_last_file_content(path: Path) -> str:
    (path / "complete.json").write_text("[]")
    return "complete.json holds a list"


DAMAGES = [damage_size, damage_bit, damage_index, damage_missing, damage_last_file, damage_last_file_content]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_named_and_passed_over(tmp_path, damage):
    for iteration in (1, 2):
        save(tmp_path, iteration)
    message = damage(tmp_path / "iter_0000002")
    found, said = find(tmp_path)
    assert found.state.iteration == 1 and loaded_value(found) == 1.0
    assert "skipping checkpoint iter_0000002" in said and message in said
    with pytest.raises(CheckpointError):
        store.open_checkpoint(tmp_path / "iter_0000002")


def test_find_newest_goes_by_number_and_tells_of_cut_short_saves(tmp_path):
    assert find(tmp_path / "absent") == (None, "")
    (tmp_path / "iter_0000007.partial").mkdir()
    found, said = find(tmp_path)
    assert found is None and "iter_0000007.partial" in said and "cut short" in said
    for iteration in (9_999_999, 10_000_000):
        save(tmp_path, iteration)
    assert find(tmp_path)[0].state.iteration == 10_000_000


def test_the_same_iteration_saved_twice_is_at_no_moment_absent(tmp_path):
    save(tmp_path, 1, value=5.0)
    # Cut short between the two renames:
    (tmp_path / "iter_0000001").rename(tmp_path / "iter_0000001.old")
    assert loaded_value(find(tmp_path)[0]) == 5.0
    save(tmp_path, 1, value=6.0)
    assert loaded_value(find(tmp_path)[0]) == 6.0 and not list(tmp_path.glob("*.old"))


@pytest.mark.parametrize("background", [False, True], ids=["at once", "in the background"])
def test_a_failed_write_is_told_and_leaves_the_last_checkpoint(tmp_path, monkeypatch, background):
    save(tmp_path, 1)

    def fail(path, specs, metadata=None):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("megatron_dllm.checkpoint.storage.TensorFileWriter", fail)
    (outcome,) = save(tmp_path, 2, in_background=background)
    assert outcome.path is None and "No space left" in outcome.error and "model_00000.safetensors" in outcome.error
    assert find(tmp_path)[0].state.iteration == 1 and not list(tmp_path.glob("*.partial"))
    monkeypatch.undo()
    assert save(tmp_path, 2, in_background=background)[0].error is None


def test_a_checkpoint_is_good_where_its_number_alone_cannot_be_written(tmp_path, caplog):
    save(tmp_path, 1)
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    (tmp_path / "latest_checkpointed_iteration.txt").mkdir()
    (outcome,) = save(tmp_path, 2)
    assert outcome.error is None and find(tmp_path)[0].state.iteration == 2 and not list(tmp_path.glob("*.writing"))
    assert "latest_checkpointed_iteration.txt" in caplog.text and "iter_0000002" in caplog.text


def test_no_room_is_seen_before_a_byte_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(save_module, "SPARE_BYTES", 1 << 60)
    (outcome,) = save(tmp_path, 1)
    assert "a checkpoint takes 148 bytes, " in outcome.error and " are spared for other files, and only " in outcome.error
    assert not list(tmp_path.iterdir())
    with pytest.raises(OSError, match="are free"):
        check_room(tmp_path, 1)


@pytest.mark.parametrize(("limit", "interval", "kept"), [
    (None, None, [1, 2, 3, 4, 5, 6]), (2, None, [5, 6]), (None, 3, [3, 6]), (2, 2, [2, 4, 5, 6]), (9, None, [1, 2, 3, 4, 5, 6])])
def test_retention_keeps(tmp_path, limit, interval, kept):
    for iteration in range(1, 7):
        save(tmp_path, iteration, retention=Retention(limit, interval))
    assert [int(path.name[5:]) for path in reversed(store.checkpoints_in(tmp_path))] == kept


def test_retention_clears_what_cut_short_saves_left_and_nothing_else(tmp_path):
    for name in ("iter_0000001.partial", "iter_0000002.deleting", "best", "iter_0000003.mine"):
        (tmp_path / name).mkdir()
    save(tmp_path, 4, retention=Retention(1))
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["best", "iter_0000003.mine", "iter_0000004"]


def test_load_names_what_is_missing_or_misshapen(tmp_path):
    save(tmp_path, 1)
    found, _ = find(tmp_path)
    with pytest.raises(CheckpointError, match=r"bias is missing; one is \[1\], the run has \[2\]"):
        found.load([Shard.whole("bias", torch.zeros(1)), Shard.whole("one", torch.zeros(2))])


def test_describe_bytes():
    assert [describe_bytes(n) for n in (0, 999, 1536, 3 << 30)] == ["0 bytes", "999 bytes", "1.5 KiB", "3.0 GiB"]


def tool():
    spec = importlib.util.spec_from_file_location("tool_checkpoint", ROOT / "tools" / "checkpoint.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_tool_lists_verifies_inspects_and_merges(tmp_path, capsys):
    run, tool_main = tmp_path / "run", tool().main
    for iteration in (1, 2, 4):
        save(run, iteration)
    (run / "assets").mkdir()
    (run / "assets" / "config.json").write_text("{}")
    assert tool_main(["list", str(run)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["iteration", "4", "2", "1"]
    assert tool_main(["inspect", str(run), "--tensors", "w*"]) == 0
    assert "weight [4, 3] float32: mean 9.5, deviation 3.452, from 4 to 15" in capsys.readouterr().out
    assert tool_main(["merge", str(run), "--last", "2", "--save", str(tmp_path / "mean")]) == 0
    merged = store.find_newest(tmp_path / "mean")
    assert torch.equal(merged.read_whole("weight"), torch.arange(12.0).view(4, 3) + 3) and not merged.has_optimizer
    assert merged.read_whole("half").dtype == torch.bfloat16 and (tmp_path / "mean" / "assets" / "config.json").is_file()
    assert tool_main(["merge", str(run), "--last", "2", "--save", str(tmp_path / "mean")]) == 2
    assert tool_main(["merge", str(run), "--last", "4", "--save", str(tmp_path / "other")]) == 2
    assert "holds 3 valid checkpoints" in capsys.readouterr().err
    message = damage_bit(run / "iter_0000002")
    assert tool_main(["verify", str(run)]) == 0 and tool_main(["verify", str(run), "--all"]) == 1
    assert message in capsys.readouterr().out


def test_merge_refuses_another_model(tmp_path, capsys):
    save(tmp_path, 1)
    CheckpointWriter(tmp_path).save(store.TrainingState(2, 8, 2), [Shard.whole("weight", torch.zeros(5, 3))], "")
    assert tool().main(["merge", str(tmp_path), "--last", "2", "--save", str(tmp_path / "mean")]) == 2
    assert "is another model" in capsys.readouterr().err


def test_index_is_json_that_says_what_lies_where(tmp_path):
    save(tmp_path, 1)
    index = json.loads((tmp_path / "iter_0000001" / "tensors.json").read_text())
    assert index["tensors"]["weight"]["pieces"] == [
        {"offset": [0, 0], "extent": [1, 3], "file": "model_00000.safetensors", "name": "weight[0:1,0:3]"},
        {"offset": [1, 0], "extent": [3, 3], "file": "model_00000.safetensors", "name": "weight[1:4,0:3]"}]
    assert index["tensors"]["exp_avg/weight"]["pieces"][0]["file"] == "optimizer_00000.safetensors"


def test_a_checkpoint_with_more_tensors_than_the_model_is_another_models(tmp_path):
    save(tmp_path, 1)
    found, _ = find(tmp_path)
    found.check_all_held(["weight", "half", "one", "exp_avg/weight", "new"])
    found.check_all_held(["weight", "half", "one"], kinds=("model",))
    with pytest.raises(CheckpointError, match=r"iter_0000001 is of another model: it holds half, one \(2 tensors\)"):
        found.check_all_held(["weight"], kinds=("model",))
