"""tools/plan.py layouts: counts, formulas against the model itself and against what was measured, and the ranking."""

import argparse
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from planning import full, layouts  # noqa: E402
from planning import layout_time as timing  # noqa: E402
from planning.measured import MEASURED  # noqa: E402

from megatron_dllm import config  # noqa: E402
from megatron_dllm.config import ParallelConfig  # noqa: E402
from megatron_dllm.models.diffusion_gemma.build import UNSET, build_model  # noqa: E402
from megatron_dllm.parallel import Group, ParallelContext  # noqa: E402
from megatron_dllm.parallel.topology import GROUP_AXES, Topology  # noqa: E402
from megatron_dllm.training import forecast as memory  # noqa: E402

GIB = 2**30
TOY = "--preset toy --data-source sudoku --train-iters 1 --bf16 --freeze-router".split()
SIX = "--preset diffusiongemma-26b-a4b --num-layers 6 --data-source sudoku --train-iters 1 --bf16 --self-conditioning-prob 1".split()


def rank_0(parallel: ParallelConfig, world: int) -> ParallelContext:
    """The context of rank 0 of a world that is not there."""
    topology, single = Topology.of(parallel, world), ParallelContext.single()
    groups = {}
    for name in GROUP_AXES:
        ranks = next(ranks for ranks in topology.groups(name) if 0 in ranks)
        groups[name] = Group(name, len(ranks), ranks.index(0), None, tuple(ranks))
    return replace(single, **groups, sequence_parallel=parallel.sequence_parallel)


@pytest.mark.parametrize(
    ("flags", "world"),
    [
        ("", 1),
        ("--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 4", 4),
        ("--tensor-model-parallel-size 4 --sequence-parallel --expert-tensor-parallel-size 2 --vocab-size 510", 4),
        ("--enable-mhc-connections --mtp-num-layers 1 --layer-types sliding,full", 1),
        ("--layer-types linear,full --linear-num-key-heads 2 --linear-num-value-heads 4 --tensor-model-parallel-size 2", 2),
        ("--lora-rank 4 --expert-model-parallel-size 2", 2),
    ],
)
def test_elements_are_those_of_the_model(flags, world):
    run = config.parse([*TOY, *flags.split()])
    model = build_model(run, rank_0(run.parallel, world), init=UNSET)
    expected = Counter()
    for parameter in model.parameters():
        expected[parameter.placement.grid, parameter.requires_grad, parameter.element_size()] += parameter.numel()
    letters = "E" + "m" * run.model.mtp_num_layers + "L"
    assert memory.model_elements(run).of_stage(letters, run.model.layer_types) == expected


def test_elements_of_the_released_model():
    run = config.parse("--preset diffusiongemma-26b-a4b --data-source sudoku --train-iters 1 --bf16".split())
    elements = memory.model_elements(run).of_stage("EL", run.model.layer_types)
    assert sum(elements.values()) == pytest.approx(25.25e9, rel=1e-3)


@pytest.mark.parametrize("one", MEASURED, ids=lambda one: one.what)
def test_plans_are_near_what_was_measured(one):
    """Time within a quarter, or told to be further off; memory within 20 %."""
    assert not config.validate(one.run(), world_size=one.gpus)
    ms, gib = one.planned()
    assert (ms == pytest.approx(one.ms, rel=full.FAR)) == (not one.far) and (one.gib is None or gib == pytest.approx(one.gib, rel=0.20))


@pytest.mark.parametrize(("flags", "rows", "canvases", "taken"), [
    ("", 1, 1, "joint"), ("", 4, 1, "joint"), ("", 1, 8, "joint"), ("--draft-pass shared", 1, 1, "shared"),
    ("--draft-pass joint", 4, 1, "joint"), ("--recompute-granularity full", 1, 1, "apart"),
    ("--recompute-granularity full", 4, 1, "shared"), ("--moe-aux-loss-coeff 0.01", 1, 1, "shared"),
    ("--context-parallel-size 2", 1, 1, "shared"), ("--draft-pass apart", 4, 1, "apart"),
    ("--expert-model-parallel-size 2", 1, 1, "shared")])
def test_drafts_are_made_as_the_trainer_would(flags, rows, canvases, taken):
    words = ("--preset diffusiongemma-26b-a4b --data-source sudoku --train-iters 1 --bf16 --self-conditioning-prob 1 --seq-length 1024 "
             f"{flags}")
    run = timing.with_draft_pass(config.parse(f"{words} --micro-batch-size {rows}".split()), canvases)
    assert run.training.draft_pass == taken
    sizes = timing.pass_sizes(timing.token_counts(run, rows, canvases=canvases), canvases)
    assert (sizes.clean, len(sizes.seen), sizes.canvas, sizes.drafts) == (1024 * rows, rows, *2 * [256 * rows * canvases])


def test_activations_shrink_by_what_is_recomputed_and_cut():
    def of(*flags: str) -> float:
        return memory.activation_bytes(config.parse([*TOY, *flags]), "sliding")

    assert of("--recompute-granularity", "full") < of("--recompute-granularity", "selective", "--recompute-modules", "moe") < of()
    assert of("--tensor-model-parallel-size", "2", "--sequence-parallel") == pytest.approx(of() / 2, rel=0.2)


def test_state_is_shared_by_the_distributed_optimizer():
    elements = Counter({("dense", True, 2): 100, ("expert", True, 2): 1000, ("dense", False, 2): 10})
    run = config.parse(TOY)
    assert memory.state_bytes(elements, run, 4, 2) == {"weights": 2220, "gradients": 4400, "optimizer": 13200}
    shared = replace(run, parallel=replace(run.parallel, use_distributed_optimizer=True))
    assert memory.state_bytes(elements, shared, 4, 2) == {"weights": 2220, "gradients": 4400, "optimizer": 300 + 6000}


def plans(flags: str, *options: str) -> list[layouts.Plan]:
    parser = argparse.ArgumentParser()
    layouts.add_arguments(parser)
    arguments = parser.parse_args([*options, "--", *TOY, *flags.split()])
    base = config.parse(arguments.flags)
    legal = [run for run in layouts.layouts(base, arguments.num_gpus) if not config.validate(run, world_size=arguments.num_gpus)]
    return [layouts.plan(run, layouts.Machine(arguments.num_gpus)) for run in legal]


def test_layouts_are_legal_and_differ():
    found = plans("--global-batch-size 4 --num-layers 4 --layer-types sliding,full", "--num-gpus", "2")
    runs = {plan.run.parallel for plan in found}
    assert {(p.tensor_model_parallel_size, p.context_parallel_size, p.pipeline_model_parallel_size, p.expert_model_parallel_size)
            for p in runs} >= {(1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)}
    # Experts over both: their state is on one rank alone, that of dense weights can be shared.
    assert any(p.use_distributed_optimizer for p in runs if p.expert_model_parallel_size == 2 and p.tensor_model_parallel_size == 1)
    by_pp = {p.run.parallel.pipeline_model_parallel_size: p.time.bubble for p in found}
    assert by_pp[1] == 0 and by_pp[2] > 0
    assert len({(p.run.parallel, p.run.training) for p in found}) == len(found)


def test_plan_ends_in_flags_that_parse(capsys):
    parser = argparse.ArgumentParser()
    layouts.add_arguments(parser)
    flags = [*TOY, "--global-batch-size", "4", "--pretrained-checkpoint", "nowhere", "--tokenizer-model", "nowhere"]
    arguments = parser.parse_args(["--num-gpus", "2", "--top", "2", "--", *flags])
    assert layouts.run(arguments) == 0
    text = capsys.readouterr().out
    assert "extrapolated" in text and "are assumed" in text
    block = text.partition("flags of the first:\n")[2].replace("\\\n", " ").split()
    chosen = config.parse([*TOY, "--global-batch-size", "4", *block])
    assert not config.validate(chosen, world_size=2)
    arguments.memory_gib = 1e-6
    assert layouts.run(arguments) == 1 and "none fits" in capsys.readouterr().out


def test_given_layout_that_is_not_legal_is_refused():
    parser = argparse.ArgumentParser()
    layouts.add_arguments(parser)
    arguments = parser.parse_args(["--given", "--num-gpus", "3", "--", *TOY, "--tensor-model-parallel-size", "2"])
    with pytest.raises(ValueError, match="3 processes do not divide"):
        layouts.run(arguments)


def time_of(flags: str, gpus: int = 2, host: float = 1.0) -> timing.StepTime:
    run = config.parse([*TOY, "--global-batch-size", "2", *flags.split()])
    return layouts.plan(run, layouts.Machine(gpus, host=host)).time


def test_parts_of_a_step():
    alone, spread = time_of("", 1), time_of("--expert-model-parallel-size 2")
    assert alone.communication == alone.gradients == alone.beside == alone.bubble == alone.exposed == 0
    assert alone.total == alone.launches + alone.optimizer and alone.launch_bound
    assert spread.launches > alone.launches / 2 and spread.communication > 0 < spread.gradients + spread.beside
    graphs = time_of("--expert-model-parallel-size 2 --moe-token-dispatcher-type deepep --moe-max-tokens-per-rank 9 "
                     "--cuda-graph-impl local")
    deepep = time_of("--expert-model-parallel-size 2 --moe-token-dispatcher-type deepep")
    assert alone.launches / 2 < deepep.launches < spread.launches
    slower = time_of("--expert-model-parallel-size 2 --moe-token-dispatcher-type deepep", host=1.3)
    assert slower.launches == pytest.approx(1.3 * deepep.launches) and slower.compute == deepep.compute
    # Of a recording as well, gradients are summed beside the backward, but for the embedding's, which it ends with.
    assert graphs.launches == 0 and (graphs.gradients, graphs.beside) == pytest.approx((spread.gradients, spread.beside))
    model = config.parse(TOY).model
    assert graphs.gradients == pytest.approx(4 * model.vocab_size * model.hidden_size / timing.NVLINK_GB_PER_S / 1e6)
    assert graphs.total == pytest.approx(graphs.compute + graphs.communication + graphs.gradients + graphs.optimizer)
    assert graphs.exposed == pytest.approx((graphs.communication + graphs.gradients) / graphs.total)
    anew = time_of("--expert-model-parallel-size 2 --recompute-granularity full --no-moe-recompute-replay")
    again = time_of("--expert-model-parallel-size 2 --recompute-granularity full")
    assert anew.launches > again.launches == pytest.approx(spread.launches * timing.RECOMPUTED_LAUNCHES)
    apart = time_of("--expert-model-parallel-size 2 --draft-pass apart")
    assert apart.launches == pytest.approx(spread.launches * 0.8) and apart.compute < spread.compute
    # One backward reads weights once less, where clean tokens go forward twice, and where they do not.
    beforehand, shared = (time_of(f"--draft-pass {passes}", 1) for passes in ("apart", "shared"))
    assert alone.launches == beforehand.launches == pytest.approx(shared.launches * 0.8)
    assert alone.compute < beforehand.compute and alone.compute < shared.compute


def test_recorded_pipelines_wait_by_the_devices_time():
    """The host is not waited for, edges are part of the waiting, and a head that takes as long as layers needs a rank of few."""
    def time(*flags: str) -> timing.StepTime:
        words = "--seq-length 1024 --freeze-router --pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 8"
        return layouts.plan(config.parse([*SIX, *words.split(), *flags]), layouts.Machine(2)).time

    graphs, placed = ("--cuda-graph-impl", "local"), "--pipeline-model-parallel-layout"
    eager = time()
    uneven, even, empty = (time(*graphs, placed, layout) for layout in ("Etttt|ttL", "Ettt|tttL", "Et|tttttL"))
    assert eager.launch_bound and eager.waiting == eager.host_bubble > 0 and uneven.waiting == uneven.bubble
    assert eager.total == pytest.approx(eager.launches / (1 - eager.host_bubble) + eager.gradients + eager.optimizer)
    assert uneven.launches == even.launches == uneven.communication == 0
    assert 0 < uneven.bubble < even.bubble < empty.bubble < 1
    assert uneven.total == pytest.approx(uneven.compute / (1 - uneven.bubble) + uneven.gradients + uneven.optimizer)
    # The first and the last stage send each other the embedding's gradients, and both step it.
    assert uneven.gradients == pytest.approx(4 * 262144 * 2816 / timing.NVLINK_GB_PER_S / 1e6)
    assert uneven.optimizer > even.optimizer
    # One microbatch: nothing runs beside another rank's work but, with a backward for each loop, the gradient of the soft embedding.
    alone = (*graphs, placed, "Ettt|tttL", "--global-batch-size", "1")
    assert 0.5 < time(*alone).bubble < 0.51
    assert even.bubble < time(*alone, "--draft-pass", "shared").bubble < 0.5
    # With a backward for each loop, a weight's gradient is added to in each: 15 times in eight microbatches, where one GPU does it 7 times.
    even = time(*graphs, placed, "Ettt|tttL", "--draft-pass", "shared")
    words = "--seq-length 1024 --freeze-router --global-batch-size 8 --draft-pass shared --cuda-graph-impl local"
    whole = layouts.plan(config.parse([*SIX, *words.split()]), layouts.Machine(1)).time
    stepped = whole.optimizer * timing.OPTIMIZER_TB_PER_S / timing.OPTIMIZER_BYTES * 1e9
    assert 2 * even.compute - whole.compute == pytest.approx(8 * stepped * timing.ADDED_BYTES / timing.COPY_TB_PER_S / 1e9)


def test_rooms_are_kept_and_sent():
    def bounded(flags: str, ranks: int = 2) -> float:
        run = config.parse([*TOY, "--global-batch-size", "8", "--self-conditioning-prob", "1", *flags.split()])
        return memory.room_bytes(run, 100.0)

    room = "--expert-model-parallel-size 2 --moe-max-tokens-per-rank 80 --moe-router-topk 2"
    model = config.parse([*TOY, *room.split()]).model
    row = 2 * (2 * model.hidden_size + 2 * model.moe_ffn_hidden_size)
    # Two passes with room for 2 x 80 tokens of two choices; of 100 tokens two choices come.
    assert bounded(room) == (2 * 2 * 80 * 2 - 200) * row
    assert bounded("--expert-model-parallel-size 2") == bounded("--moe-max-tokens-per-rank 80") == 0
    runs = [config.parse([*TOY, *room.split(), "--cuda-graph-impl", "local", *more.split()])
            for more in ("", "--recompute-granularity selective --recompute-modules moe", "--recompute-granularity full")]
    kept, again, whole = (memory.forecast(run, 2).fullest for run in runs)
    assert kept["activations"] > again["activations"] > whole["activations"] and kept["buffers"] < again["buffers"]
    # Over ranks, the call of the last microbatch stands beside the recording of the others.
    once = memory.forecast(replace(runs[0], training=replace(runs[0].training, cuda_graph_impl="none")), 2).fullest
    assert kept["activations"] == once["activations"]
    assert kept["buffers"] == pytest.approx(2 * once["buffers"] + once["activations"] - memory.RUNTIME_BYTES)
    # What deepep's stream has used stays: rooms of tokens as they come and go back, with gradients, in two passes; of two ranks.
    held = [memory.recorded_bytes(replace(run, moe=replace(run.moe, moe_token_dispatcher_type="deepep"))) for run in runs]
    assert held == [2 * times * 2 * 80 * model.hidden_size * 2 for times in (4, 6, 6)] and memory.recorded_bytes(runs[0]) == 0
    # deepep sends the tokens that there are, alltoall its rooms, and weights by themselves.
    alltoall, deepep = (config.parse([*TOY, *room.split(), "--moe-token-dispatcher-type", name]) for name in ("alltoall", "deepep"))
    assert (timing.num_transfers(alltoall), timing.num_small_transfers(alltoall), timing.num_small_transfers(deepep)) == (8, 6, 0)
    assert timing.communication_ms(replace(alltoall, moe=replace(alltoall.moe, moe_max_tokens_per_rank=1600)), 100, gpus_per_node=8) > (
        timing.communication_ms(alltoall, 100, gpus_per_node=8))
    assert timing.communication_ms(deepep, 100, gpus_per_node=8) > 8 * timing.DEEPEP_MS


def test_experts_over_a_node_stay_in_it():
    """Expert groups are counted by themselves: eight ranks, whatever tensor parallelism they have besides."""
    run = config.parse([*TOY, "--global-batch-size", "8", "--tensor-model-parallel-size", "2", "--expert-model-parallel-size", "8",
                        "--num-experts", "8"])
    near, far = (timing.communication_ms(run, 1e6, gpus_per_node=gpus) for gpus in (8, 4))
    assert near < far / 2


def test_what_leaves_a_rank():
    def sent(flags: str) -> float:
        return timing.sent_rows(config.parse([*TOY, "--moe-router-topk", "2", *flags.split()]))

    assert sent("--expert-model-parallel-size 2") == 1  # half of two copies
    assert sent("--expert-model-parallel-size 2 --moe-token-dispatcher-type deepep") == pytest.approx(0.75)  # one has neither expert
    assert sent("--expert-model-parallel-size 4 --moe-max-tokens-per-rank 9") == 3
    assert timing.summed_ms(4e9, 2, distributed=False, gpus_per_node=8, ranks_before=1) == (16 / 0.25, 0)
    assert timing.summed_ms(4e9, 2, distributed=True, gpus_per_node=8, ranks_before=1) == (8 / 0.25, 4 / 0.25)


def test_table_of_the_full_suite(capsys):
    parser = argparse.ArgumentParser()
    full.add_arguments(parser)
    assert full.run(parser.parse_args(["--num-gpus", "2", "--layers", "2", "--long-length", "4096", "--commands"])) == 0
    text = capsys.readouterr().out
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({len(row) for row in rows}) == 1 and [row.count("|") for row in rows] == [13] * len(rows)
    assert len(rows) - 2 == text.count("MODEL=random") and any("cp2, lora, long" in row for row in rows)
