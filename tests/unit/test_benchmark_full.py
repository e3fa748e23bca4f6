"""The suite full: its cases are runs that can start, and what its table says of them; what runs is tried in tests/parallel."""
import argparse
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from benchmarking import full  # noqa: E402
from benchmarking.full_cases import Size, cases, without  # noqa: E402

from megatron_dllm import config  # noqa: E402
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
        if size.toy and case.needs_cuda:
            continue
        run = case.run(size.toy)
        problems = config.validate(run, world_size=case.ranks)
        assert not problems, f"{case.name}: {config.format_problems(problems)}"
        assert run.training.global_batch_size % (run.parallel.data_parallel_size(case.ranks) * run.training.micro_batch_size) == 0


def test_the_eight_gpus_run_what_they_are_wanted_for():
    runs = {case.name: case.run(False) for case in cases(8, WHOLE)}
    for name, expected in {
            "deepep, replay, graph": ("deepep", "full", "local", True), "deepep, no recompute, graph": ("deepep", None, "local", True),
            "alltoall, replay": ("alltoall", "full", "none", True), "deepep, no replay": ("deepep", "full", "none", False)}.items():
        run = runs[f"ep8 {name}"]
        training, data = run.training, run.data
        assert (run.moe.dispatcher, training.recompute_granularity, training.cuda_graph_impl, run.moe.moe_recompute_replay) == expected
        assert (run.model.num_layers, training.global_batch_size, data.seq_length, run.objective.freeze_router) == (30, 8, 1024, True)
    streams, long = runs["pp4 vpp2, mHC 4"], runs["cp8, lora, long"]
    assert (streams.model.num_layers, streams.model.mhc_num_residual_streams, streams.model.enable_mhc_connections) == (12, 4, True)
    layout = choose_layout(streams.parallel.pipeline_model_parallel_layout, layers=layer_letters(streams.model.layer_types), ranks=4,
                           layers_per_virtual_stage=None, account_for_embedding=False, account_for_loss=False, mtp_depth=0)
    assert layout.chunks == 2 and [len(layout.part(rank).layers) for rank in range(4)] == [3, 4, 3, 2]
    assert (long.model.num_layers, long.data.seq_length, long.lora.lora_rank, long.parallel.context_parallel_size) == (30, 100096, 16, 8)


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


def test_chosen_cases_bring_what_they_are_compared_with():
    arguments = argparse.Namespace(toy=False, layers=None, seq_length=None, long_length=None, cases=["lora"])
    assert [case.name for case in full.chosen(8, arguments)] == ["lora long, one device", "cp8, lora, long"]
    arguments.toy, arguments.cases = True, None
    assert not any("deepep" in case.name for case in full.chosen(4, arguments))


def test_table():
    todo = [case for case in cases(8, WHOLE) if case.name in (ONE.case, EIGHT.case, "pp4 vpp2, mHC 4")]

    def cells(*results):
        lines, missed = full.table(todo, {result.case: result for result in results}, toy=True)
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
