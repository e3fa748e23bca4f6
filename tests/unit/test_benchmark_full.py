"""The suite full: its cases are runs that can start, and what its table says of them; what runs is tried in tests/parallel."""
import argparse
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from benchmarking import full  # noqa: E402
from benchmarking.full_cases import Size, cases, without  # noqa: E402
from planning.layouts import GIB, Machine, plan  # noqa: E402

from megatron_dllm import config  # noqa: E402
from megatron_dllm.models.diffusion_gemma.stages import model_layout  # noqa: E402
from megatron_dllm.pipeline.layout import choose_layout, layer_letters  # noqa: E402

WHOLE = Size.of(False)
ONE = full.Result("sft, one device", 1, 100.0, 100.0, 100.0, 8192, 0.0, 50.0, 0.0, 0.0, (2.0,), 0.0)
EIGHT = full.Result("ep8 alltoall, replay", 8, 200.0, 190.0, 210.0, 8192, 800.0, 70.0, 30.0, 240.0, (2.0, 1.5), 3.0)


@pytest.mark.parametrize(("ranks", "size"), [(8, WHOLE), (4, WHOLE), (2, WHOLE), (4, Size.of(True)), (2, Size.of(True))])
def test_cases_are_runs_that_can_start(ranks, size):
    found = cases(ranks, size)
    assert len({case.name for case in found}) == len(found)
    known = {None}
    for case in found:
        assert case.reference in known and (case.ranks == ranks) == case.trains
        known.add(case.name)
        run = case.run(size.toy, "cuda" if case.needs_cuda else "cpu")
        problems = config.validate(run, world_size=case.ranks)
        assert not problems, f"{case.name}: {config.format_problems(problems)}"
        assert run.training.global_batch_size % (run.parallel.data_parallel_size(case.ranks) * run.training.micro_batch_size) == 0


def test_the_eight_gpus_run_what_they_are_wanted_for():
    runs = {case.name: case.run(False) for case in cases(8, WHOLE)}
    for name, expected in {
            "deepep, replay, graph": ("deepep", "full", "local", True), "deepep, no recompute, graph": ("deepep", None, "local", True),
            "deepep, no replay, graph": ("deepep", "full", "local", False), "alltoall, replay, graph": ("alltoall", "full", "local", True),
            "alltoall, experts again, graph": ("alltoall", "selective", "local", True),
            "alltoall, replay": ("alltoall", "full", "none", True), "deepep, no replay": ("deepep", "full", "none", False)}.items():
        run = runs[f"ep8 {name}"]
        training, data = run.training, run.data
        assert (run.moe.dispatcher, training.recompute_granularity, training.cuda_graph_impl, run.moe.moe_recompute_replay) == expected
        assert (run.model.num_layers, training.global_batch_size, data.seq_length, run.objective.freeze_router) == (30, 8, 1024, True)
        assert run.moe.moe_max_tokens_per_rank == (1280 if training.cuda_graph_impl == "local" else None)
    streams, long = runs["pp4 vpp2, mHC 4"], runs["cp8, lora, long"]
    assert (streams.model.num_layers, streams.model.mhc_num_residual_streams, streams.model.enable_mhc_connections) == (12, 4, True)
    layout = choose_layout(streams.parallel.pipeline_model_parallel_layout, layers=layer_letters(streams.model.layer_types), ranks=4,
                           layers_per_virtual_stage=None, account_for_embedding=False, account_for_loss=False, mtp_depth=0)
    assert layout.chunks == 2 and [len(layout.part(rank).layers) for rank in range(4)] == [3, 4, 3, 2]
    assert (long.model.num_layers, long.data.seq_length, long.lora.lora_rank, long.parallel.context_parallel_size) == (30, 100096, 16, 8)


@pytest.mark.parametrize(("ranks", "size"), [(8, WHOLE), (2, Size.of(False, 8, None, 25088))])
def test_what_is_run_unasked_fits_and_every_layout_is_recorded(ranks, size):
    unasked = [case for case in cases(ranks, size) if not case.on_request]
    names = [case.name for case in unasked]
    for case in unasked:
        run = case.run(False)
        assert not case.trains or plan(run, Machine(ranks)).bytes < 139 * GIB, case.name
        assert case.name.endswith("graph") == (run.training.cuda_graph_impl == "local")
        if case.trains and not case.name.endswith("graph"):
            assert f"{case.name}, graph" in names or f"{case.name}, graph" in [other.name for other in cases(ranks, size)]
    last_graph = max(number for number, name in enumerate(names) if name.endswith("graph"))
    assert not any(case.trains and not case.name.endswith("graph") for case in unasked[:last_graph])
    # With rooms for every token of every rank, what eight ranks' layers keep of experts does not fit.
    kept = next(case for case in cases(8, WHOLE) if case.name == "ep8 deepep, no recompute, graph")
    assert kept.on_request and plan(kept.run(False), Machine(8)).bytes > 139 * GIB


def test_graphs_over_tensor_and_pipeline_ranks_have_room_for_a_ranks_tokens():
    for ranks, name, rooms in ((8, "tp2+sp pp2 ep2", 2560), (2, "tp2+sp ep2", 1280)):
        run = next(case for case in cases(ranks, WHOLE) if case.name == f"{name}, graph").run(False)
        parallel, training = run.parallel, run.training
        own = training.micro_batch_size * (run.data.seq_length + run.model.canvas_length) // parallel.tensor_model_parallel_size
        assert run.moe.moe_max_tokens_per_rank == own == rooms and training.cuda_graph_impl == "local"
    for ranks, stages in ((8, 4), (2, 2)):
        run = next(case for case in cases(ranks, WHOLE) if case.name == f"pp{stages} vpp2, mHC 4, graph").run(False)
        layout = model_layout(run)
        assert layout.chunks == 2 and layout.stages[-1].letters == "L" and run.model.num_layers == 3 * stages


def test_two_gpus_run_every_kind_of_layout_that_two_can():
    runs = {case.name: case.run(False) for case in cases(2, Size.of(False, 8, None, 25088))}
    shared = {name: runs[name].parallel for name in ("tp2+sp ep2", "pp2", "cp2, lora, long", "pp2 vpp2, mHC 4")}
    assert (shared["tp2+sp ep2"].tensor_model_parallel_size, shared["tp2+sp ep2"].sequence_parallel,
            shared["tp2+sp ep2"].expert_model_parallel_size) == (2, True, 2)
    assert shared["pp2"].pipeline_model_parallel_size == 2 and runs["pp2"].training.micro_batch_size == 1
    assert shared["cp2, lora, long"].context_parallel_size == 2 and runs["cp2, lora, long"].data.seq_length == 25088
    assert shared["pp2 vpp2, mHC 4"].pipeline_model_parallel_layout == "Et|tt|tt|tL"


def test_commands_start_the_run_by_itself():
    case = next(case for case in cases(8, WHOLE) if case.name == "ep8 alltoall, no recompute")
    words = case.command().split()
    assert words[:5] == ["MODEL=random", "RECOMPUTE=none", "SAVE=runs/trial", "bash", "examples/diffusion_gemma/sft_26b.sh"]
    assert "--expert-model-parallel-size" in words
    assert without(["--a", "1", "2", "--b", "--c", "3"], "--a", "--c") == ["--b"]


def test_chosen_cases_bring_what_they_are_compared_with(monkeypatch):
    arguments = argparse.Namespace(toy=False, device="cuda", layers=None, seq_length=None, long_length=None, cases=["lora"])
    assert [case.name for case in full.chosen(8, arguments)] == ["lora long, one device", "cp8, lora, long, graph", "cp8, lora, long"]
    arguments.cases = None
    names = [case.name for case in full.chosen(8, arguments)]
    assert "cp8, lora, long, graph" in names and "cp8, lora, long" not in names and "tp2+sp pp2 ep2" in names
    arguments.toy, arguments.device = True, "cpu"
    names = [case.name for case in full.chosen(4, arguments)]
    assert "cp4, lora, long" in names and not any("deepep" in name or "graph" in name for name in names)
    arguments.device = "cuda"  # a rehearsal: what real widths run
    names = [case.name for case in cases(4, WHOLE) if not case.on_request]
    assert [case.name for case in full.chosen(4, arguments)] == names
    monkeypatch.setenv("SHARE_GPU", "1")
    assert [case.name for case in full.chosen(4, arguments)] == [name for name in names if "deepep" not in name]


def test_table():
    todo = [case for case in cases(8, WHOLE) if case.name in (ONE.case, EIGHT.case, "pp4 vpp2, mHC 4")]

    def cells(*results):
        lines, missed = full.table(todo, {result.case: result for result in results}, toy=True, device="cpu")
        return {line.split("  ")[0]: line for line in lines}, missed

    lines, missed = cells(ONE, EIGHT)
    assert missed == 1 and lines["pp4 vpp2, mHC 4"].endswith("NOT MEASURED")
    # 8192 tokens and 800 TFLOP in 0.2 s on 8 GPUs; 30 of 240 ms exposed.
    assert lines[EIGHT.case].split()[3:] == [
        "200.0", "190.0", "210.0", "5120", "500", "70.0", "12.5%", "2.00000", "1.50000", "3", "0.0e+00", "-", "-", "ok"]
    lines, missed = cells(ONE, replace(EIGHT, losses=(2.001, 1.5)))
    assert missed == 2 and lines[EIGHT.case].endswith("LOSS DIFFERS")
    lines, missed = cells(EIGHT)
    assert missed == 3 and lines[EIGHT.case].endswith("nothing to compare with")
