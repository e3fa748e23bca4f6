"""Plans one pipeline schedule, or checks all schedules in a range of sizes (--sweep)."""

from __future__ import annotations

import argparse
import os
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from megatron_dllm.pipeline.assembly import Schedule, build_schedule
from megatron_dllm.pipeline.checks import format_faults
from megatron_dllm.pipeline.drawing import draw_picture, draw_text, summary
from megatron_dllm.pipeline.edges import EdgeShapes
from megatron_dllm.pipeline.graph import Pipeline
from megatron_dllm.pipeline.layout import LAYER_LETTERS, StageLayout, derive_layout, letters_in, parse_layout
from megatron_dllm.pipeline.simulator import Simulation, simulate
from megatron_dllm.pipeline.sweep import Case, Outcome, cases, check_case, count_refusals, most_microbatches
from megatron_dllm.pipeline.timing import Costs, layout_costs

PICTURE = Path("runs/plan/pipeline_p4_v2_m8.png")
SIZES = {"quick": (5, 3, 6), "whole": (8, 4, 12)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_size_arguments(parser.add_argument_group("the pipeline"))
    add_cost_arguments(parser.add_argument_group("what its stages take, in ticks"))
    output = parser.add_argument_group("what is shown")
    output.add_argument("--table", action="store_true", help="print every rank's list of actions, steps down, ranks across")
    output.add_argument("--picture", type=Path, metavar="FILE", help="write the timeline as a PNG")
    output.add_argument("--columns", type=int, default=150, help="width of the timeline in the terminal")
    output.add_argument("--sweep", action="store_true", help="check all schedules of up to 8 ranks, 4 virtual stages each, 12 microbatches")
    output.add_argument("--quick", action="store_true", help="sweep up to 5 ranks, 3 virtual stages each and 6 microbatches only")
    output.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="processes that share the sweep")


def add_size_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--pipeline-model-parallel-size", type=int, default=4, metavar="P")
    group.add_argument("--num-virtual-stages-per-pipeline-rank", type=int, default=1, metavar="V", help="if no layout is given or derived")
    group.add_argument("--num-microbatches", type=int, default=8, metavar="M")
    group.add_argument("--microbatch-group-size-per-virtual-pipeline-stage", type=int, metavar="G", help="default: P")
    group.add_argument("--self-conditioned", default="none", metavar="WHICH", help="none, half (every other), all, or a list: 0,2,3")
    group.add_argument("--draft-pass", choices=("shared", "joint"), default="shared", help="joint: one backward for both loops")
    group.add_argument("--frozen-embedding", action="store_true", help="no gradient of the soft embedding is sent back")
    group.add_argument("--forward-only", action="store_true", help="plan an evaluation")
    group.add_argument("--split-backward", action="store_true", help="weight gradients are steps of their own, which fill gaps")
    group.add_argument("--no-overlap-p2p-communication", dest="overlap", action="store_false", help="receive right before use")
    group.add_argument("--extra-warmup", type=int, metavar="N", help="activations kept beyond 1F1B's; default: enough for the loops")
    group.add_argument("--kept-limit", type=int, metavar="N", help="activations of loop 0 that a rank may keep at most")
    group.add_argument("--pipeline-model-parallel-layout", metavar="LAYOUT", help="places the layers, for example 'Ett|(tt|)*2tL'")
    group.add_argument("--num-layers", type=int, metavar="N", help="derive the layout from these flags instead")
    group.add_argument("--num-layers-per-virtual-pipeline-stage", type=int, metavar="N")
    group.add_argument("--account-for-embedding-in-pipeline-split", action="store_true")
    group.add_argument("--account-for-loss-in-pipeline-split", action="store_true")
    group.add_argument("--hidden-size", type=int, default=2816)
    group.add_argument("--mhc-num-residual-streams", type=int, default=1)


def add_cost_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--layer-ticks", type=int, default=10, help="forward of one layer, or of one stage if there is no layout")
    group.add_argument("--embedding-ticks", type=int, default=1, help="forward of the embedding")
    group.add_argument("--loss-ticks", type=int, default=5, help="forward of the head and the loss")
    group.add_argument("--backward-ratio", type=float, default=2.0, help="backward over forward")
    group.add_argument("--loop-share", type=float, default=0.2, help="loop 1 (canvas tokens only) over loop 0")
    group.add_argument("--latency-ticks", type=int, default=0, help="a transfer, in the simulation")


def run(arguments: argparse.Namespace) -> int:
    """0 if the schedules are sound; 1 if not. ValueError for what cannot be planned."""
    if arguments.sweep:
        return run_sweep(SIZES["quick" if arguments.quick else "whole"], arguments.processes, arguments.picture or PICTURE)
    layout = chosen_layout(arguments)
    ranks = arguments.pipeline_model_parallel_size
    coins = read_coins(arguments.self_conditioned, arguments.num_microbatches)
    pipeline = Pipeline(
        ranks,
        arguments.num_virtual_stages_per_pipeline_rank if layout is None else layout.chunks,
        coins,
        embedding_trained=not arguments.frozen_embedding,
        forward_only=arguments.forward_only,
        split_backward=arguments.split_backward,
        joint=coins if arguments.draft_pass == "joint" else (),
    )
    schedule = build_schedule(
        pipeline,
        group=arguments.microbatch_group_size_per_virtual_pipeline_stage,
        costs=chosen_costs(arguments, pipeline, layout),
        extra_warmup=arguments.extra_warmup,
        kept_limit=arguments.kept_limit,
        overlap=arguments.overlap,
    )
    simulation = simulate(pipeline, schedule.lists, schedule.costs, latency=arguments.latency_ticks)
    show(arguments, schedule, simulation, layout)
    return 1 if simulation.faults else 0


def chosen_layout(arguments: argparse.Namespace) -> StageLayout | None:
    """The layout that the flags give or let derive; None if they leave it open."""
    ranks, text = arguments.pipeline_model_parallel_size, arguments.pipeline_model_parallel_layout
    if text is not None:
        if arguments.num_layers is not None:
            raise ValueError("--pipeline-model-parallel-layout and --num-layers are both given: a layout says it all; leave one out")
        letters = letters_in(text)
        layers = "".join(letter for letter in letters if letter in LAYER_LETTERS)
        return parse_layout(text, ranks=ranks, layers=layers, mtp_depth=letters.count("m"))
    if arguments.num_layers is None:
        return None
    return derive_layout(
        layers="t" * arguments.num_layers,
        ranks=ranks,
        layers_per_virtual_stage=arguments.num_layers_per_virtual_pipeline_stage,
        account_for_embedding=arguments.account_for_embedding_in_pipeline_split,
        account_for_loss=arguments.account_for_loss_in_pipeline_split,
    )


def chosen_costs(arguments: argparse.Namespace, pipeline: Pipeline, layout: StageLayout | None) -> Costs:
    shares = dict(backward_ratio=arguments.backward_ratio, loop_share=arguments.loop_share)
    if layout is None:
        return Costs.of_forwards((arguments.layer_ticks,) * pipeline.stages, **shares)
    return layout_costs(layout, layer=arguments.layer_ticks, embedding=arguments.embedding_ticks, loss=arguments.loss_ticks, **shares)


def read_coins(text: str, microbatches: int) -> tuple[bool, ...]:
    """Which microbatches are self-conditioned, from none, half, all, or a list of their numbers."""
    named = {"none": set(), "half": set(range(0, microbatches, 2)), "all": set(range(microbatches))}
    if text in named:
        return tuple(m in named[text] for m in range(microbatches))
    words = text.split(",")
    unknown = [word for word in words if not word.strip().isdecimal() or int(word) >= microbatches]
    if unknown:
        raise ValueError(
            f"--self-conditioned {text}: {unknown[0]!r} is not one of the {microbatches} microbatches; "
            f"write none, half, all, or numbers from 0 to {microbatches - 1} such as 0,2"
        )
    return tuple(m in set(map(int, words)) for m in range(microbatches))


def show(arguments: argparse.Namespace, schedule: Schedule, simulation: Simulation, layout: StageLayout | None) -> None:
    if arguments.table:
        print(schedule, end="\n\n")
    if layout is not None:
        print(f"layout {layout}")
        for rank in range(layout.ranks):
            print(f"  rank {rank}: {'  '.join(stage.letters or '(empty)' for stage in layout.on_rank(rank))}")
    if simulation.faults:
        print(format_faults(simulation.faults, schedule.lists))
        return
    shapes = EdgeShapes(arguments.hidden_size, ((1, 1),), mhc_num_residual_streams=arguments.mhc_num_residual_streams)
    print(f"between stages {shapes.width('h')} values a token, soft embedding {shapes.width('s')}")
    print(summary(schedule.pipeline, simulation))
    print(draw_text(simulation, columns=arguments.columns))
    print("most tensors kept at a time, by rank:")
    for rank, peak in enumerate(simulation.peaks):
        print(
            f"  rank {rank}: {peak.activations} activations of loop 0, {peak.loop_activations} of loop 1, {peak.contexts} contexts, "
            f"{peak.buffers} in transfer"
        )
    if arguments.picture:
        draw_picture(schedule.pipeline, simulation, arguments.picture)
        print(f"wrote {arguments.picture}")


def run_sweep(sizes: tuple[int, int, int], processes: int, picture: Path) -> int:
    """Check every schedule up to `sizes` (ranks, chunks, microbatches); print how many, and how near the bubbles come to their bound."""
    ranks, chunks, microbatches = sizes
    limits = dict(max_ranks=ranks, max_chunks=chunks, max_microbatches=microbatches)
    start = time.monotonic()
    # The large ones first, so that the processes end together.
    todo = sorted(cases(**limits), key=lambda case: case.ranks * case.chunks * case.microbatches, reverse=True)
    try:
        with ProcessPoolExecutor(processes) as pool:
            outcomes = list(pool.map(check_case, todo, chunksize=4))
        refused = count_refusals(**limits)
    except AssertionError as fault:
        print(f"bad: {fault}")
        return 1
    draw_example(picture)
    print(bubble_table(outcomes, microbatches))
    worst = max(outcomes, key=lambda outcome: outcome.time_over_bound)
    loops = [outcome.time_over_bound for outcome in outcomes if outcome.case.coins != "none"]
    print(
        f"time over the lower bound: none without loops; with loops {sum(loops) / len(loops) - 1:.2%} in the mean, "
        f"{worst.time_over_bound - 1:.1%} at most ({worst.case})\n"
        f"picture of 4 ranks of 2 virtual stages, 8 microbatches, half of them self-conditioned: {picture}\n"
        f"checked {len(outcomes)} schedules ({sum(outcome.actions for outcome in outcomes)} actions) of up to {ranks} ranks, "
        f"{chunks} virtual stages each and {microbatches} microbatches (or two for each rank): 0 bad; "
        f"{refused} illegal group sizes refused; {time.monotonic() - start:.0f} s"
    )
    return 0


def bubble_table(outcomes: list[Outcome], microbatches: int) -> str:
    """Bubbles of full groups as large as the pipeline, as many as the sweep has, each beside the least that is possible."""
    lines = [
        "bubble, and in brackets the least that any schedule could have (equal stages, loop 1 takes 0.2 of loop 0)",
        "ranks  virtual stages  microbatches  no loops         some loops       all loops",
    ]
    found = {(o.case.ranks, o.case.chunks, o.case.coins): o for o in outcomes if is_typical(o.case, microbatches)}
    for ranks, chunks in sorted({key[:2] for key in found}):
        cells = [found[ranks, chunks, coins] for coins in ("none", "some", "all")]
        text = "  ".join(f"{cell.bubble:6.2%} ({cell.least_bubble:6.2%})" for cell in cells)
        lines.append(f"{ranks:5}  {chunks:14}  {cells[0].case.microbatches:12}  {text}")
    return "\n".join(lines)


def is_typical(case: Case, microbatches: int) -> bool:
    full_groups = most_microbatches(case.ranks, microbatches) // case.ranks * case.ranks
    smallest = case.ranks if case.chunks > 1 else 1
    return case.ranks > 1 and case.microbatches == full_groups and case.group == smallest and case.overlap


def draw_example(path: Path) -> None:
    pipeline = Pipeline(4, 2, read_coins("half", 8))
    schedule = build_schedule(pipeline)
    path.parent.mkdir(parents=True, exist_ok=True)
    draw_picture(pipeline, simulate(pipeline, schedule.lists, schedule.costs), path)
