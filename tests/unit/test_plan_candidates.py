"""tools/plan.py layouts: which layouts are planned, that the trainer takes them as they are printed, and what fills microbatches up."""

import argparse
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from planning import candidates, layouts  # noqa: E402
from planning import layout_time as timing  # noqa: E402

from megatron_dllm import config  # noqa: E402
from megatron_dllm.context_parallel.layout import SequenceLayout  # noqa: E402

TOY = "--preset toy --data-source sudoku --train-iters 1 --bf16 --freeze-router --self-conditioning-prob 0.5 --seq-length 64"
RELEASED = "--preset diffusiongemma-26b-a4b --data-source sudoku --train-iters 1 --bf16"
GRAPHS = "--cuda-graph-impl local"


def parsed(*flags: str) -> config.RunConfig:
    return config.parse(" ".join(flags).split())


def without(words: list[str], dropped: list[str]) -> list[str]:
    """The words without these flags and their values."""
    kept, skip = [], False
    for word in words:
        skip = word in dropped or (skip and not word.startswith("--"))
        if not skip:
            kept.append(word)
    return kept


@pytest.mark.parametrize(("flags", "gpus"), [
    ("", 4),
    ("--recompute-granularity selective --recompute-modules mlp --use-distributed-optimizer --overlap-param-gather", 4),
    (f"{GRAPHS} --moe-token-dispatcher-type flex", 4),
    (f"{GRAPHS} --moe-max-tokens-per-rank 7 --cuda-graph-token-multiple 64 --cuda-graph-canvas-multiple 3", 4),
    ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett|ttL", 2),
    ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1", 4)], ids=range(6))
def test_the_trainer_takes_the_flags_that_are_printed(flags, gpus):
    """Pasted after one's own, without those that the plan says are left out, they give the planned layout, at that number of GPUs."""
    words = f"{TOY} --num-layers 4 --global-batch-size 64 {flags}".split()
    base = config.parse(words)
    legal = candidates.legal_layouts(candidates.layouts(base, gpus), gpus)
    assert len({(run.parallel.pipeline_model_parallel_size, run.parallel.expert_model_parallel_size) for run in legal}) > 2
    alone = [run.parallel for run in legal if run.parallel.pipeline_model_parallel_size == 1]
    assert {parallel.use_distributed_optimizer for parallel in alone} == {True, False}
    for run in legal[::23]:
        block = shlex.split(layouts.flags_block(base, run).replace("\\\n", " "))
        pasted = config.parse([*without(words, layouts.left_out(base, run)), *block])
        assert not config.validate(pasted, world_size=gpus)
        assert all(pasted.value(field) == run.value(field) for field in layouts.LAYOUT_FIELDS)
        spread = layouts.has_spread_experts(run)
        assert (run.moe.moe_max_tokens_per_rank == candidates.most_tokens(run, 1)) == (spread and GRAPHS in flags)


def test_stages_of_the_released_model():
    """30 layers divide over neither 4 nor 8 ranks; with embedding and head counted as layers they do."""
    def splits(pp: int, *flags: str) -> list[tuple]:
        return [tuple(split.values()) for split in candidates.stage_splits(parsed(RELEASED, *flags), pp)]

    assert splits(1) == [(False, False, None, None)]
    assert splits(4) == [(True, True, None, None), (True, True, 4, None)]
    assert splits(16) == [(True, True, None, None), (True, True, 1, None)]
    # Two stages of 15 are these whatever is counted.
    assert splits(2) == [(False, False, None, None), (False, False, 5, None), (True, True, 8, None)]
    own = "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*16|t*14L"
    assert splits(2, own)[-1] == (False, False, None, "Et*16|t*14L")
    assert all(split[-1] is None for split in splits(4, own))


def test_kernels_where_they_work():
    def dispatchers(flags: str, gpus_per_node: int = 8) -> dict[int, str]:
        base = parsed(TOY, "--num-experts 16 --global-batch-size 64 --moe-token-dispatcher-type deepep", flags)
        return {run.parallel.expert_model_parallel_size: run.moe.dispatcher for run in candidates.layouts(
            base, 16, gpus_per_node=gpus_per_node) if run.parallel.expert_tensor_parallel_size == 1}

    assert dispatchers("") == {1: "alltoall", 2: "deepep", 4: "deepep", 8: "deepep", 16: "deepep"}
    # Room for tokens is for ranks of one host.
    assert dispatchers(GRAPHS) == {1: "alltoall", 2: "deepep", 4: "deepep", 8: "deepep", 16: "alltoall"}
    assert dispatchers(GRAPHS, 4)[8] == "alltoall"


@pytest.mark.parametrize(("flags", "canvases", "most"), [
    ("", 1, 2 * 63 + 2 * 16), ("--tensor-model-parallel-size 4", 1, 40), ("--context-parallel-size 2", 1, 64 + 2 * 8),
    ("--packing --max-canvases-per-row 3", 1, 126 + 6 * 16), ("--canvases-scored all", 1, 126 + 8 * 16),
    ("--context-parallel-size 2 --canvases-scored all", 1, 64 + 4 * 16),
    (f"{GRAPHS} --cuda-graph-token-multiple 100 --cuda-graph-canvas-multiple 5", 2, 200 + 5 * 16)])
def test_room_is_for_the_most_tokens_of_a_rank(flags, canvases, most):
    run = parsed(TOY, "--canvas-length 16 --micro-batch-size 2", flags, "--seq-length 63")
    assert candidates.most_tokens(run, canvases) == most
    cp, whole = run.parallel.context_parallel_size, run.objective.scores_all_canvases
    if cp > 1:
        ids = [number for number in range(8 if whole else 2) for _ in range(16)]
        layout = SequenceLayout.of(126, np.array(ids), ranks=cp, whole_canvases=whole)
        assert 0 <= most - max(len(clean) + len(canvas) for clean, canvas in zip(layout.clean, layout.canvas, strict=True)) <= 1


def test_what_fills_microbatches_up_is_counted():
    flags = f"{TOY} --canvas-length 16 --micro-batch-size 2 --global-batch-size 4 {GRAPHS}"
    plain, filled = parsed(flags), parsed(flags, "--cuda-graph-token-multiple 100 --cuda-graph-canvas-multiple 4")
    tokens = timing.token_counts(filled, 4, canvases=3)
    # Each of two microbatches: 128 tokens up to 200, six canvases up to eight, all decoded twice, all tokens scored.
    assert tokens.clean.tolist() == [64] * 4 + [72] * 2 and tokens.canvas.tolist() == [16] * 16
    assert tokens.canvas_prefix.tolist() == [24] * 12 + [0] * 4 and tokens.self_conditioned.all()
    assert (tokens.text_tokens, tokens.encoder_targets, tokens.decoder_targets) == (256, 400, 256)
    assert timing.token_counts(plain, 4, canvases=3).self_conditioned.sum() == 6
    assert timing.Fill.of(parsed(flags, "--cuda-graph-canvas-multiple 3"), 3) == timing.Fill(0, 0, True)
    alone, both = (layouts.plan(run, layouts.Machine(1), 3) for run in (plain, filled))
    assert both.held["activations"] / alone.held["activations"] == pytest.approx((200 + 8 * 16) / (128 + 6 * 16))
    assert both.operations == alone.operations and both.time.compute > alone.time.compute
    more = timing.operations(filled, 4, 3)
    again = timing.operations(parsed(flags, "--self-conditioning-prob 1"), 4, 3)
    assert sum(more.draft.values()) > sum(again.draft.values()) > sum(timing.operations(plain, 4, 3).draft.values())


def test_multiples_of_full_rows_stay_so():
    def multiples(flags: str) -> set[tuple[int | None, ...]]:
        base = parsed(TOY, "--global-batch-size 4 --micro-batch-size 2", GRAPHS, flags)
        return {(run.training.micro_batch_size, run.training.cuda_graph_token_multiple, run.training.cuda_graph_canvas_multiple)
                for run in candidates.layouts(base, 1)}

    assert multiples("--cuda-graph-token-multiple 128 --cuda-graph-canvas-multiple 6") == {(1, 64, 3), (2, 128, 6), (4, 256, 12)}
    assert multiples("--cuda-graph-token-multiple 64") == {(1, 64, None), (2, 64, None), (4, 64, None)}


def test_stages_that_may_be_fastest_are_played(monkeypatch):
    """The fastest are found as if all had been planned whole, canvases of packed rows among what stages wait for."""
    base, machine = parsed(TOY, "--num-layers 4 --global-batch-size 8", GRAPHS), layouts.Machine(2)
    runs = candidates.legal_layouts(candidates.layouts(base, 2), 2)
    least = [layouts.plan(run, machine, 2, waits=False) for run in runs]
    whole = sorted((layouts.plan(run, machine, 2) for run in runs), key=lambda plan: plan.time.total)
    assert [plan.time for plan in layouts.fastest(least, machine, 2, 5)] == [plan.time for plan in whole[:5]]
    piped = next(plan.run for plan in whole if plan.time.bubble)
    told = []
    monkeypatch.setattr(layouts.stages, "bubble", lambda *_, canvases, **__: told.append(canvases) or 0.0)
    layouts.plan(piped, machine, 8)
    assert told == [8]


def test_stages_run_both_loops_of_what_has_one_form():
    flags = f"{TOY} --num-layers 4 --global-batch-size 8 --pipeline-model-parallel-size 2 {GRAPHS}"
    one_form, every, some = (layouts.plan(parsed(flags, more), layouts.Machine(2)).time.bubble for more in (
        "--cuda-graph-canvas-multiple 1", "--self-conditioning-prob 1", "--self-conditioning-prob 0.5"))
    assert abs(one_form - every) < abs(some - every) / 4


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    layouts.add_arguments(parser)
    return parser.parse_args(shlex.split(" ".join(words)))


@pytest.mark.parametrize(("words", "why"), [
    ("--num-gpus 2 -- --preset toy --data-source sudoku --global-batch-size 4", "no layout is legal; .*nothing says how long to train"),
    (f"--num-gpus 11 -- {TOY} --global-batch-size 8", "no layout is legal; .*8 rows do not divide into microbatches of 1 on 11"),
    (f"--num-gpus 1 --gpu A100 -- {TOY} {GRAPHS}", "--gpu A100: .*set --cuda-graph-impl none")])
def test_what_cannot_be_planned_says_why(words, why):
    with pytest.raises(ValueError, match="(?s)" + why):
        layouts.run(arguments(words))


@pytest.mark.parametrize("words", ["--num-gpus 0", "--num-gpus 2 --top 0", "--num-gpus two", "--num-gpus 2 --canvases-per-row 0"])
def test_numbers_are_from_one(words, capsys):
    with pytest.raises(SystemExit):
        arguments(words, "--", TOY)
    assert "is not a whole number from 1" in capsys.readouterr().err


def test_notes_say_what_the_flags_leave_open():
    def notes(flags: str, machine: layouts.Machine = layouts.Machine(2),  # noqa: B008 (immutable)
              canvases: int = 1, gib: float = 80.0) -> str:
        plan = layouts.plan(parsed(TOY, "--global-batch-size 2", flags), machine, canvases)
        return "\n".join(layouts.notes(plan, machine, canvases, gib))

    spread = "--expert-model-parallel-size 2"
    assert "without one" not in notes("") and "up to 8: --canvases-per-row" in notes("--packing") + notes("--packing", canvases=2)
    assert "--canvases-per-row" not in notes("--packing", canvases=2)
    eager = notes(spread)
    assert "with --cuda-graph-impl local --moe-max-tokens-per-rank 80 it takes" in eager
    assert "which CUDA graphs do not help; another layout" in notes(spread, gib=1.0) and "do not help" not in eager
    assert "--cuda-graph-impl" not in notes(spread, layouts.Machine(2, gpu="A100"))
    stops = "training stops where a rank has more in a pass, and full rows give it 80"
    assert stops in notes(f"{spread} --moe-max-tokens-per-rank 79") and stops not in notes(f"{spread} --moe-max-tokens-per-rank 80")
    filled = notes(f"{GRAPHS} --cuda-graph-token-multiple 100 --cuda-graph-canvas-multiple 3")
    assert "planned with 36 and 2 more that fill it up, every canvas decoded twice" in filled and "launches are the limit of" not in filled
    assert timing.with_draft_pass(parsed(TOY), 1).training.draft_pass == "joint"
    assert timing.with_draft_pass(parsed(TOY), 1, "A100").training.draft_pass != "joint"
