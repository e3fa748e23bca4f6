"""Whole runs on one process: resume bit for bit, dtypes, refused updates, signals of how it ended."""
import contextlib
import dataclasses
import errno
import gc
import json
import math
import os
import re
import shutil
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import pretrain_dllm
from megatron_dllm.checkpoint import store
from megatron_dllm.config import parse
from megatron_dllm.data.sudoku import SudokuTokenizer
from megatron_dllm.models.diffusion_gemma.transformers_export import Export
from megatron_dllm.parallel import ParallelContext
from megatron_dllm.training import exporting, loop
from megatron_dllm.training.batches import BatchMaker
from megatron_dllm.training.changes import changed_flags
from megatron_dllm.training.folders import assets_of, keep_assets
from megatron_dllm.training.loop import Trainer, TrainingFailed, Watch
from megatron_dllm.training.metrics_file import read_metrics
from megatron_dllm.training.saving import restore
from megatron_dllm.training.status import read_status

FLAGS = ("--preset toy --num-layers 2 --layer-types sliding,full --vocab-size 9 --canvas-length 8 --data-source sudoku "
         "--sudoku-num-puzzles 40 --seq-length 34 --micro-batch-size 2 --global-batch-size 4 --log-interval 1 "
         "--device cpu --lr 3e-3").split()
SAME = ("loss", "autoregressive_loss", "diffusion_loss", "grad_norm", "learning_rate")


def run(folder: Path, *flags: str) -> None:
    """Train with these flags; the run's files are in `folder`."""
    assert pretrain_dllm.main([*FLAGS, "--save", str(folder), *flags]) == 0


def records(folder: Path) -> list[tuple[float, ...]]:
    return [tuple(record[name] for name in SAME) for record in read_metrics(folder / "metrics.jsonl").records if "loss" in record]


def weights(folder: Path, iteration: int) -> dict[str, torch.Tensor]:
    found = store.open_checkpoint(store.iteration_folder(folder, iteration))
    return {key: found.read_whole(key) for key in found.shapes}


@pytest.mark.parametrize("extra", [[], ["--bf16"], ["--num-workers", "1"], ["--lr-warmup-iters", "3", "--recompute-granularity", "full"]],
                         ids=["fp32", "bf16", "workers", "warm-up and recompute"])
def test_ten_steps_are_five_saved_and_five_resumed(tmp_path, extra):
    """Two epochs of 10 batches: step 10 is past the end of nothing, step 5 in the middle of an epoch."""
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    run(whole, "--train-iters", "10", *extra)
    run(halves, "--train-iters", "10", "--exit-interval", "5", *extra)
    assert read_status(halves / "status.json")["state"] == "stopped"
    run(halves, "--train-iters", "10", "--load", str(halves), *extra)
    assert records(halves) == records(whole) and len(records(whole)) == 10
    left, right = weights(whole, 10), weights(halves, 10)
    assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_a_second_epoch_draws_anew(tmp_path):
    """40 puzzles are 10 batches; the learning rate is too small to move anything, so equal batches would give equal losses."""
    run(tmp_path, "--train-iters", "20", "--lr", "1e-30")
    losses = [record[0] for record in records(tmp_path)]
    assert len(set(losses)) == 20


@pytest.mark.parametrize(("bf16", "frozen"), [(False, False), (True, False), (True, True)], ids=["fp32", "bf16", "bf16, router frozen"])
def test_dtypes_of_masters_copies_gradients_and_states(bf16, frozen):
    """Trainable: an fp32 master, gradient and moments behind a copy in the compute dtype; frozen: one copy and nothing else."""
    flags = [*FLAGS, "--train-iters", "1", *(["--bf16"] if bf16 else []), *(["--freeze-router"] if frozen else [])]
    trainer = Trainer.build(parse(flags), ParallelContext.single())
    trainer.fit()
    trained = dict(trainer.optimizer.masters())
    assert all(master.dtype == torch.float32 for master in trained.values())
    assert {state.dtype for _, _, state in trainer.optimizer.states()} == {torch.float32}
    assert {name for name, _, _ in trainer.optimizer.states()} == set(trained)
    for name, parameter in trainer.model.named_parameters():
        router = ".router." in name
        compute = torch.bfloat16 if bf16 and not (router and not frozen) else torch.float32
        assert parameter.dtype == compute and (name in trained) == parameter.requires_grad == (not (router and frozen)), name


def test_a_loss_that_is_not_finite_is_skipped_then_ends_the_run(tmp_path, capsys):
    flags = [*FLAGS, "--train-iters", "9", "--max-skipped-steps", "2", "--save", str(tmp_path)]
    trainer = Trainer.build(parse(flags), ParallelContext.single())
    with torch.no_grad():
        trainer.model.final_norm.weight[0] = float("nan")
    before = {name: master.clone() for name, master in trainer.optimizer.masters()}
    with pytest.raises(TrainingFailed, match="2 in a row"):
        trainer.fit()
    assert "sudoku-4x4-train puzzle" in capsys.readouterr().out
    assert all(torch.equal(master.nan_to_num(), before[name].nan_to_num()) for name, master in trainer.optimizer.masters())
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["state"] == "failed" and "2 in a row" in status["reason"]


def test_args_file_repeats_the_run(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    run(first, "--train-iters", "3")
    assert pretrain_dllm.main([f"@{first / 'args.txt'}", "--save", str(second)]) == 0
    assert records(first) == records(second)
    one, other = (parse([f"@{folder / 'args.txt'}"]) for folder in (first, second))
    assert dataclasses.replace(one, checkpoint=other.checkpoint) == other


@pytest.mark.parametrize(("flags", "text"), [
    (["--train-iters", "3", "--vocab-size", "8"], "the model's vocabulary has 8 rows"),
    (["--train-iters", "3", "--micro-batch-size", "3"], "--micro-batch-size"),
    (["--train-samples", "3"], "do not fill one batch"),
    (["--train-iters", "3", "--seq-length", "20"], "no example is left")])
def test_mistakes_are_told_and_end_with_status_2(flags, text, capsys):
    assert pretrain_dllm.main([*FLAGS, *flags]) == 2
    assert text in capsys.readouterr().err


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A run of four steps, saved after the second and the fourth."""
    folder = tmp_path_factory.mktemp("saved")
    run(folder, "--train-iters", "4", "--save-interval", "2")
    return folder


# Flags after `--save saved` -> what is said. A new run there would be taken for the old one by its restart.
STARTS_REFUSED = {
    "anew": ([], r"holds iter_0000004, iter_0000002, and this run starts anew: .* add --load {saved} to go on with that run"),
    "from another folder": (["--load", "{other}"], r"this run starts from {other}: .* add --load {saved}"),
    "from before the newest": (["--load", "{saved}/iter_0000002"], r"holds iter_0000004, and .* move these away to go on from there"),
}


@pytest.mark.parametrize("case", STARTS_REFUSED)
def test_a_folder_with_another_runs_checkpoints_is_refused(saved, tmp_path, capsys, case):
    flags, said = STARTS_REFUSED[case]
    other = tmp_path / "other"
    shutil.copytree(saved, other)
    before = sorted(path.name for path in saved.iterdir())
    flags = [flag.format(saved=saved, other=other) for flag in flags]
    assert pretrain_dllm.main([*FLAGS, "--train-iters", "6", "--seed", "7", "--save", str(saved), *flags]) == 2
    assert re.search(said.format(saved=saved, other=other), capsys.readouterr().err)
    assert sorted(path.name for path in saved.iterdir()) == before


def test_load_takes_the_iteration_that_it_names(saved, tmp_path, capsys):
    run(tmp_path, "--train-iters", "4", "--load", str(saved / "iter_0000002"))
    assert "resuming from" in capsys.readouterr().out and records(tmp_path) == records(saved)[2:]


@pytest.mark.parametrize("name", ["mistyped", "empty"])
def test_load_of_nothing_is_refused_but_where_it_is_save(tmp_path, capsys, name):
    (tmp_path / "empty").mkdir()
    load = ["--load", str(tmp_path / name)]
    assert pretrain_dllm.main([*FLAGS, "--train-iters", "1", *load]) == 2
    assert f"--load {tmp_path / name} {'holds no checkpoint' if name == 'empty' else 'is no folder'}" in capsys.readouterr().err
    run(tmp_path / name, "--train-iters", "1", *load)


@pytest.mark.parametrize("flag", ["--save", "--run-dir", "--tensorboard-dir"])
def test_folders_that_cannot_be_written_to_are_named(tmp_path, capsys, flag):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "run"
    assert pretrain_dllm.main([*FLAGS, "--train-iters", "1", flag, str(folder)]) == 2
    assert re.search(f"error: {flag} {folder} cannot be written to: .*Not a directory", capsys.readouterr().err)


def test_whatever_takes_long_is_progress(tmp_path, monkeypatch):
    """An evaluation's microbatches and answers, a save's and an export's tensors: beats for the watchdog between two steps."""
    beats = []
    monkeypatch.setattr(Trainer, "_watch", lambda *_: contextlib.nullcontext(Watch(beats.append, tuple)))
    run(tmp_path / "run", "--train-iters", "1", "--eval-interval", "1", "--eval-iters", "2", "--eval-generations", "2",
        "--eval-score", "exact", "--save-best", "--save-hf", str(tmp_path / "hf"))
    names = {"microbatch": 4, "answer": 2, "of a checkpoint": 2 * 100, "of an export": 20}
    counts = {name: sum(name in beat for beat in beats) for name in names}
    assert all(counts[name] >= least for name, least in names.items()), counts


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which Linux has")
def test_a_disk_that_takes_no_records_ends_no_run(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    run(tmp_path, "--train-iters", "3")
    output = capsys.readouterr().out
    assert output.count("No space left on device") == 2  # once while it runs, once at its end
    assert "the run goes on" in output and "its last records are lost" in output
    assert read_status(tmp_path / "status.json")["state"] == "finished"


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc, which Linux has")
def test_flags_that_cannot_be_written_name_their_file_and_leave_the_old_ones(tmp_path, monkeypatch, capsys):
    (tmp_path / "args.txt").write_text("--seed 7\n")
    fsync = os.fsync

    def full(descriptor):
        if "args.txt" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    assert pretrain_dllm.main([*FLAGS, "--train-iters", "1", "--save", str(tmp_path)]) == 1
    assert f"error: [Errno 28] No space left on device: '{tmp_path}/args.txt'" in capsys.readouterr().err
    assert (tmp_path / "args.txt").read_text() == "--seed 7\n"


def test_exports_at_an_interval_end_with_the_last(tmp_path):
    run(tmp_path / "run", "--train-iters", "3", "--save-hf", str(tmp_path / "hf"), "--save-hf-interval", "2")
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == ["iter_0000002", "iter_0000003"]


def test_an_export_that_fails_is_told_counted_and_ends_no_run(tmp_path, monkeypatch, capfd):
    whole = Export._write_shards

    def full_at_first(export, path, *arguments):
        if path.name == "iter_0000001.partial":
            raise OSError(errno.ENOSPC, "No space left on device", str(path / "model.safetensors"))
        whole(export, path, *arguments)

    monkeypatch.setattr(Export, "_write_shards", full_at_first)
    flags = ["--train-iters", "2", "--save", str(tmp_path / "run"), "--save-hf", str(tmp_path / "hf"), "--save-hf-interval", "1"]
    assert pretrain_dllm.main([*FLAGS, *flags]) == 1
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["iter_0000002"]
    output = capfd.readouterr()
    assert re.search(r"EXPORTING ITERATION 1 .*No space left.*model.safetensors.*tools/convert.py", output.out)
    assert "error: iteration 2 is done, its checkpoint is " in output.err and "exports failed, of iterations 1 " in output.err
    status = read_status(tmp_path / "run" / "status.json")
    assert status["state"] == "finished" and "iterations 1 " in status["reason"]


def test_a_tensor_of_two_files_is_gathered_once():
    gathered = exporting._GatheredTensors(SimpleNamespace(model=torch.nn.Linear(2, 2), context=None), lambda what: None)
    gathered.follow(["weight", "weight", "bias"])
    gathered.whole("weight")
    assert gathered.due == ["bias"]
    gathered.finish()
    assert not gathered.due and gathered.name == "bias"


def test_an_export_without_what_it_must_carry_through_is_none(tmp_path):
    run = SimpleNamespace(checkpoint=SimpleNamespace(save=str(tmp_path)))
    (tmp_path / "assets").mkdir()
    exporter = exporting.Exporter(SimpleNamespace(run=run, context=ParallelContext.single()), None, {}, lambda what: None)
    (tmp_path / "assets").rmdir()
    with pytest.raises(FileNotFoundError, match="carry through is gone.*assets"):
        exporter._export_of(None)


def test_an_export_that_has_no_room_is_not_begun(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("megatron_dllm.checkpoint.save.SPARE_BYTES", 1 << 60)
    monkeypatch.setattr(Export, "write", lambda *_: pytest.fail("it was begun"))
    assert pretrain_dllm.main([*FLAGS, "--train-iters", "1", "--save-hf", str(tmp_path / "hf")]) == 1
    assert re.search(r"EXPORTING ITERATION 1 .*an export takes \d.*are free.*without --save", capsys.readouterr().out)
    assert not list(tmp_path.iterdir())


def test_a_last_checkpoint_that_cannot_be_saved_spares_the_export(tmp_path, monkeypatch, capfd):
    def refuse(folder, num_bytes):
        raise OSError(errno.ENOSPC, "no room", str(folder))

    monkeypatch.setattr("megatron_dllm.checkpoint.save.check_room", refuse)  # of saves alone
    flags = ["--train-iters", "1", "--save", str(tmp_path / "run"), "--save-hf", str(tmp_path / "hf")]
    assert pretrain_dllm.main([*FLAGS, *flags]) == 1
    assert "error: the last checkpoint, of iteration 1, could not be saved" in capfd.readouterr().err
    assert read_status(tmp_path / "run" / "status.json")["state"] == "failed" and (tmp_path / "hf" / "config.json").is_file()


def test_an_export_replaces_none_but_the_runs_own(tmp_path, capsys):
    flags, folder = ["--lr-decay-iters", "9", "--save-hf", str(tmp_path / "hf")], tmp_path / "run"
    run(folder, "--train-iters", "1", *flags)
    before = (tmp_path / "hf" / "model.safetensors").read_bytes()
    run(folder, "--train-iters", "2", "--load", str(folder), *flags)
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() != before
    assert pretrain_dllm.main([*FLAGS, "--train-iters", "1", *flags, "--save", str(tmp_path / "other")]) == 2
    assert f"--save-hf {tmp_path / 'hf'} exists, is not empty, and is no export of this run" in capsys.readouterr().err
    assert not store.checkpoints_in(tmp_path / "other")


def test_exports_at_an_interval_replace_none_but_the_runs_own(tmp_path, capsys):
    flags = ["--train-iters", "2", "--save-hf-interval", "1", "--save-hf", str(tmp_path / "hf"), "--load", str(tmp_path / "run")]
    run(tmp_path / "run", *flags, "--exit-interval", "1")
    run(tmp_path / "run", *flags)
    exported = tmp_path / "hf" / "iter_0000002"
    (exported / "config.json").unlink()
    exported.with_name("iter_0000003.partial").mkdir()  # of an export that was ended
    shutil.rmtree(store.iteration_folder(tmp_path / "run", 2))
    run(tmp_path / "run", *flags)  # from the first iteration again
    assert (exported / "config.json").is_file()
    assert pretrain_dllm.main([*FLAGS, *flags[:-2], "--save", str(tmp_path / "other")]) == 2
    assert f"--save-hf {tmp_path / 'hf'} holds iter_0000001, iter_0000002, none of them an export of this run" in capsys.readouterr().err


@pytest.mark.parametrize("score", ["nope", "regex:([", "json:nothing"])
def test_a_score_that_is_none_is_told_before_the_first_step(tmp_path, capsys, score):
    flags = ["--train-iters", "1", "--eval-interval", "1", "--eval-generations", "1", "--eval-score", score]
    assert pretrain_dllm.main([*FLAGS, *flags, "--save", str(tmp_path)]) == 2
    assert f"--eval-score {score}" in capsys.readouterr().err and not (tmp_path / "status.json").exists()


def test_assets_are_those_of_the_last_start(tmp_path):
    """Checkpoints were moved away, and the folder is started in again from another model."""
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "config.json").write_text('{"text_config": {}}')
    run(tmp_path, "--train-iters", "1", "--load", str(tmp_path))
    assert not (tmp_path / "assets").exists()


def test_assets_of_others_are_left_alone(tmp_path, capsys):
    """A common name: --save may be a folder of somebody's own."""
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "photo.txt").write_text("mine")
    assert pretrain_dllm.main([*FLAGS, "--train-iters", "1", "--save", str(tmp_path)]) == 2
    assert "holds assets, which no run has made" in capsys.readouterr().err and (tmp_path / "assets" / "photo.txt").read_text() == "mine"


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_bad_row_is_told_in_its_own_words(tmp_path, monkeypatch, capfd, workers):
    """With workers the run stood still, and then told torch's traceback of theirs."""
    monkeypatch.setattr(BatchMaker, "batch", lambda *_: SudokuTokenizer(5))  # any mistake that the package tells
    assert pretrain_dllm.main([*FLAGS, "--train-iters", "2", "--num-workers", workers, "--save", str(tmp_path)]) == 2
    told = "Sudoku size 5: set --sudoku-size to one of (4, 9)"
    assert capfd.readouterr().err.splitlines()[-1] == f"error: {told}"
    assert read_status(tmp_path / "status.json")["reason"] == f"ValueError: {told}"


@pytest.mark.parametrize("workers", ["0", "1"])
def test_an_error_that_nobody_wrote_for_people_keeps_its_traceback(monkeypatch, workers):
    monkeypatch.setattr(BatchMaker, "batch", lambda *_: math.sqrt(-1.0))
    with pytest.raises(ValueError, match="math domain error"):
        pretrain_dllm.main([*FLAGS, "--train-iters", "2", "--num-workers", workers])


@pytest.mark.parametrize("flags", [[], ["--use-distributed-optimizer"]], ids=["", "distributed optimizer"])
def test_masters_are_those_of_the_pretrained_weights(saved, flags):
    """A bf16 run's first forward is right without them, and its first update would undo it."""
    given = [*FLAGS, "--train-iters", "1", "--bf16", "--pretrained-checkpoint", str(saved), "--seed", "7", *flags]
    trainer = Trainer.build(parse(given), ParallelContext.single())
    drawn = dict((name, master.clone()) for name, master in trainer.optimizer.masters())
    restore(trainer)
    stored = store.find_newest(saved)
    for name, master in trainer.optimizer.masters():
        wanted = stored.read_whole(name)
        torch.testing.assert_close(master, wanted, rtol=2**-8, atol=0)
        if wanted.ndim > 1:  # all norms begin at one
            assert not torch.allclose(drawn[name], wanted, rtol=2**-8), name


def test_another_batch_size_is_not_resumed_with(saved, capsys):
    assert pretrain_dllm.main([*FLAGS, "--train-iters", "6", "--global-batch-size", "8", "--load", str(saved)]) == 2
    assert "has consumed 16 rows in 4 iterations; resume with 4" in capsys.readouterr().err


def test_save_best_keeps_the_lowest_alone(tmp_path, monkeypatch, capsys):
    """Also where the run is taken up from before its best."""
    losses = iter([3.0, 2.5, 2.75, 2.0, 2.25, 1.5])
    monkeypatch.setattr(loop, "evaluate", lambda *_: {"loss": next(losses)})
    flags = ["--train-iters", "5", "--eval-interval", "1", "--save-best", "--save-interval", "1", "--exit-interval"]
    for start, stop, told in ((0, 4, ["3.0", "2.5", "2.0"]), (1, 3, ["1.5"])):
        for path in store.checkpoints_in(tmp_path)[:-1]:
            shutil.rmtree(path)
        run(tmp_path, *flags, str(stop), "--load", str(tmp_path))
        output = capsys.readouterr().out
        assert f"iterations {start} to" in output and re.findall(r"lowest evaluation loss so far, (\d\.\d)", output) == told
        assert [path.name for path in store.checkpoints_in(tmp_path / "best")] == [f"iter_000000{stop}"]
        assert (tmp_path / "best" / "loss.txt").read_text() == f"{told[-1]}\n"


def test_a_best_model_whose_loss_cannot_be_noted_ends_no_run(tmp_path, capsys):
    (tmp_path / "best" / "loss.txt.writing").mkdir(parents=True)
    run(tmp_path, "--train-iters", "1", "--eval-interval", "1", "--eval-iters", "1", "--save-best")
    assert re.search(r"loss.txt.*; the run goes on, and a restart may take another model for the best", capsys.readouterr().out)
    assert [path.name for path in store.checkpoints_in(tmp_path / "best")] == ["iter_0000001"]


def test_what_changed_since_the_checkpoint_is_told(saved, tmp_path, capsys):
    folder = tmp_path / "same"
    run(folder, "--train-iters", "4", "--load", str(saved), "--log-interval", "2")
    assert "changed since" not in capsys.readouterr().out
    run(tmp_path / "other", "--train-iters", "4", "--load", str(saved), "--seed", "7", "--adam-beta1", "0.5", "--deterministic-mode")
    told, = [line for line in capsys.readouterr().out.splitlines() if line.startswith("changed since that checkpoint: ")]
    for change in ("--seed 1234 became 7", "--adam-beta1 0.9 became 0.5", "--deterministic-mode off became on"):
        assert change in told
    assert told.count("became") == 3


def test_a_flag_that_was_not_given_is_a_change_too():
    before, after = "# Precision\n--bf16\n--fp8-format e4m3", "# Precision\n--bf16\n\n# Data\n--chat-template x"
    assert changed_flags(before, after) == ["--fp8-format e4m3 became none", "--chat-template none became x"]
    assert changed_flags(before, before) == []


def test_assets_are_found_beside_a_checkpoint_and_above_the_best_one(tmp_path):
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "card.txt").write_text("x")
    for checkpoint in (tmp_path / "iter_0000004", tmp_path / "best" / "iter_0000002"):
        assert assets_of(checkpoint) == tmp_path / "assets"
        keep_assets(checkpoint, tmp_path / f"of {checkpoint.name}")
        assert (tmp_path / f"of {checkpoint.name}" / "card.txt").read_text() == "x"
    assert assets_of(tmp_path / "other" / "iter_0000004") is None


def test_groups_are_ended_when_the_training_is_gone(tmp_path, monkeypatch):
    """What is alive then may be CUDA graphs, for whose end NCCL would wait."""
    trainers, alive, fit = [], [], Trainer.fit
    monkeypatch.setattr(Trainer, "fit", lambda self: (trainers.append(weakref.ref(self)), fit(self)))
    monkeypatch.setattr(pretrain_dllm, "dist", SimpleNamespace(
        is_initialized=lambda: True, destroy_process_group=lambda: alive.extend(one() is not None for one in trainers)))
    gc.disable()
    try:
        pretrain_dllm.train(parse([*FLAGS, "--train-iters", "1", "--save", str(tmp_path)]))
    finally:
        gc.enable()
    assert alive == [False]
