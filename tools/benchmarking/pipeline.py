"""Pipelines of two ranks beside one process, with mHC (four residual streams) and without: equal steps, time, bubble, what mHC adds.

    torchrun --nproc-per-node 2 tools/benchmark.py --suite pipeline [--width toy|real] [--microbatches 8] [--seq-length 1024]

The released model's widths (toy: the toy's, on a CPU over gloo too) in bf16, from random weights, half of the examples self-conditioned by
a draw. PP2 and PP2/VPP2 take optimizer steps of the 6-layer model, and forward and backward of the 12-layer one. Of the first step loss
and gradient norm must be one process's but for the order of sums. Updates then differ where a gradient is smaller than its rounding, and
losses where a token on the edge between two experts goes to the other one: what the updates did to each layer, and later steps, must lie as
near as a few times the farthest of three other runs of one process that differ in rounding alone. In a fourth half of the layers are never
updated, and it must lie beyond, or the limit would find nothing.

Bubble: the share of both ranks' time that no compute step fills, measured, and as the schedule has it when messages take no time.
"""
from __future__ import annotations

import argparse
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from verification.table import Figure, print_figures

from benchmarking.pipeline_runs import Case, Fingerprints, Outcome, Suite, Variant, alone, gathered, pipelined
from benchmarking.workload import release_memory
from megatron_dllm.config import ParallelConfig, RunConfig, TrainingConfig
from megatron_dllm.parallel import ParallelContext, initialize
from megatron_dllm.parallel.launch import launched
from megatron_dllm.pipeline import parse_layout
from megatron_dllm.pipeline.layout import Stage, StageLayout, layer_letters
from megatron_dllm.training import forecast
from tools.refusal import Refusal

# Layers -> layouts over two ranks, both with as many layers on each.
LAYOUTS = {6: {"pp2": "Ettt|tttL", "pp2 vpp2": "Et|tt|tt|tL"}, 12: {"pp2": "Et*6|t*6L", "pp2 vpp2": "Ett|t*4|t*4|ttL"}}
CASES = {"6": Case(6, 1, 3), "6-mhc": Case(6, 4, 3), "12": Case(12, 1, 0), "12-mhc": Case(12, 4, 0)}  # most wanted first
VARIANTS = (Variant("16-bit sums"), Variant("16-bit sums, the second half first", swapped=True),
            Variant("16-bit sums, the last first", last_first=True))
FAULT = Variant("half of the layers never updated", stale=True)
# The first loss is made by the same kernels on the same numbers; only fp64 sums differ. Gradients of a microbatch's two
# loops are added in 16 bits in one process and in 32 in a pipeline: a sixteenth of 16 bits' unit, for a norm over millions.
FIRST_LOSS, FIRST_NORM = 1e-6, 2**-12
# What is compared is one more of few draws. All updates together are a mean over millions of numbers; a loss may turn on one token, and a
# single one may be near by chance: its limit is no less than what rounding its tokens' losses to 16 bits would do to their mean.
ALLOWED = {"change of a layer by the first update": 4.0, "change of a layer by all updates": 2.5, "loss of later steps": 4.0,
           "norm of later steps": 4.0}  # times the farthest variant's
LOSS, BF16_UNIT = list(ALLOWED).index("loss of later steps"), 2**-9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--width", choices=("toy", "real"), default="real", help="of the model")
    parser.add_argument("--microbatches", type=int, default=8, help="of a step, one row each")
    parser.add_argument("--seq-length", type=int, default=1024, help="clean tokens of a row, half of them a prompt")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="layers, and whether with mHC")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="seconds after which no further case starts")


def run(arguments: argparse.Namespace) -> int:
    """Print every line as it comes, and the table of figures last, on rank 0; the number of missed ones.

    What fails in one process alone is told and the next case follows; a rank that fails in a pipeline ends both.
    """
    rank, world = launched()
    if world != 2:
        raise Refusal(f"this suite needs two processes, not {world}: start it by torchrun --nproc-per-node 2")
    context = initialize(ParallelConfig(pipeline_model_parallel_size=2), device=arguments.device)
    suite = Suite(arguments, context, ParallelContext.single(context.device))
    figures, started, plain = [], time.monotonic(), {}

    def tell(text: object) -> None:
        if rank == 0:
            print(f"{time.monotonic() - started:4.0f} s  {text}", flush=True)

    for case in (CASES[name] for name in arguments.cases):
        late = max(gathered(time.monotonic() - started, context)) > arguments.limit_s
        if late:
            figures.append(Figure(f"{case.name}: not run", 1, 0, f"the {arguments.limit_s:.0f} s were over"))
            continue
        tell(f"{case.name}: started")
        for found in judged(suite, case, plain):
            if isinstance(found, Figure):
                figures.append(found)
                found = f"{'      ' if found.holds else 'MISSED'} {found.name}: {found.value:.3g}, limit {found.limit:.3g}; {found.note}"
            tell(found)
    missed = 0
    if rank == 0:
        name = torch.cuda.get_device_name() if suite.device.type == "cuda" else "cpu"
        print(f"\ntwo ranks, {name}, torch {torch.__version__}, {dist.get_backend()}; {arguments.width} width, {arguments.microbatches} "
              f"microbatches of {arguments.seq_length} clean tokens; {time.monotonic() - started:.0f} s")
        missed = print_figures("pipeline", figures)
    dist.destroy_process_group()
    return missed


def judged(suite: Suite, case: Case, plain: dict[str, float]) -> Iterator[Figure | str]:
    """The figures and lines of one case; `plain` keeps the times without mHC for the case with."""
    reference, variants = in_one_process(suite, case)
    if isinstance(reference, str):
        yield Figure(f"{case.name}, one process: failed", 1, 0, reference)
        return
    yield f"{case.name}, one process: {times_of(plain, case, 'one', reference)}; {describe(reference)}; {memory_of(suite, case, reference)}"
    limits = ()
    if failed := [found for found in variants if isinstance(found, str)]:
        yield Figure(f"{case.name}, one process in other ways: failed", 1, 0, failed[0])
    elif case.steps:
        far = [farthest([variant.changes], variant, reference) for variant in variants]
        for variant, values in zip((*VARIANTS, FAULT), far, strict=True):
            parts = ", ".join(f"{what} {value:.2g}" for what, value in zip(ALLOWED, values, strict=True))
            yield f"{case.name}, one process, {variant.name}: {parts}"
        limits = allowed(variants[:-1], reference, suite.arguments.microbatches * suite.arguments.seq_length)
        for what, limit, value in list(zip(ALLOWED, limits, far[-1], strict=True))[:2]:
            yield Figure(f"{case.name}: limit of {what}", limit, value, f"to be under what {FAULT.name} give")
    for where, text in LAYOUTS[case.layers].items():
        layout = parse_layout(text, ranks=2, layers=layer_letters(suite.config(case).layer_types))
        found, bubble = pipelined(suite, case, layout)
        yield (f"{case.name}, {where}: {times_of(plain, case, where, found)}; {bubble}; {describe(found)}; "
               f"{memory_of(suite, case, found, layout)}; {text}")
        changes = gathered(found.changes, suite.world)
        yield from compared(f"{case.name}, {where}", found, reference, changes, limits)
        yield Figure(f"{case.name}, {where}: models not freed", sum(not freed for freed in gathered(found.freed, suite.world)), 0, "of 2")


def in_one_process(suite: Suite, case: Case) -> tuple[Outcome | str, list[Outcome | str]]:
    """The case as it is, and its variants, if it takes steps, the fault last, shared by the ranks; where one fails, why."""
    others = [*VARIANTS, FAULT] * (case.steps > 0)
    # Without steps rank 1 does as rank 0: a kernel that it loads in the pipeline alone would have to wait for transfers under way.
    kinds = [None, *others[:1]] if suite.world.world.rank == 0 else others[1:] or [None]
    (reference, *first), found = gathered([attempt(suite, case, variant) for variant in kinds], suite.world)
    return reference, [*first, *found] if others else []


def attempt(suite: Suite, case: Case, variant: Variant | None) -> Outcome | str:
    try:
        return alone(suite, case, variant)
    except RuntimeError as error:  # too little memory, a kernel's failure: the other cases are still wanted
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"
    release_memory(suite.device)
    return reason


def compared(name: str, found: Outcome, reference: Outcome, changes: list[tuple[Fingerprints, ...]],
             limits: Sequence[float]) -> Iterator[Figure]:
    """The figures of a run beside one process; `changes` of each of its ranks."""
    for what, ours, theirs, limit in (("loss", found.losses[0], reference.losses[0], FIRST_LOSS),
                                      ("norm", found.norms[0], reference.norms[0], FIRST_NORM)):
        yield Figure(f"{name}: {what} of the first step", relative(ours, theirs), limit, f"{ours:.7g}, one process {theirs:.7g}")
    if limits:
        for what, far, limit in zip(ALLOWED, farthest(changes, found, reference), limits, strict=True):
            yield Figure(f"{name}: {what}", far, limit, "")


def allowed(variants: Sequence[Outcome], reference: Outcome, num_tokens: int) -> list[float]:
    """The limits of a run's distances, as ALLOWED names them, by how far the variants are; `num_tokens` of a step."""
    far = [farthest([variant.changes], variant, reference) for variant in variants]
    limits = [factor * max(values) for factor, *values in zip(ALLOWED.values(), *far, strict=True)]
    limits[LOSS] = max(limits[LOSS], BF16_UNIT / math.sqrt(num_tokens))
    return limits


def relative(a: float, b: float) -> float:
    return abs(a - b) / abs(b)


def farthest(changes: Iterable[tuple[Fingerprints, ...]], found: Outcome, reference: Outcome) -> list[float]:
    """How far a run is from the reference at most, as ALLOWED names it."""
    moved = [max(change_apart(rank[when], reference.changes[when]) for rank in changes) for when in range(2)]
    return moved + [max(map(relative, ours[1:], theirs[1:])) for ours, theirs in
                    ((found.losses, reference.losses), (found.norms, reference.norms))]


def change_apart(ours: Fingerprints, theirs: Fingerprints) -> float:
    """The distance of two changes over the size of theirs, of the layer, or part outside of layers, where it is largest."""
    apart, size = Counter(), Counter()
    for name, change in ours.items():
        part = ".".join(name.split(".")[:2 if name.startswith("layers.") else 1])
        apart[part] += (change - theirs[name]).square().sum().item()
        size[part] += theirs[name].square().sum().item()
    # Where 16-bit weights of 1 are all there is, nothing moves.
    return max((apart[part] / size[part]) ** 0.5 if size[part] else float("inf") if apart[part] else 0.0 for part in size)


def describe(outcome: Outcome) -> str:
    losses, norms = (" ".join(f"{value:.5f}" for value in values) for values in (outcome.losses, outcome.norms))
    return f"losses {losses}, norms {norms}"


def times_of(plain: dict[str, float], case: Case, where: str, outcome: Outcome) -> str:
    """The times, and what mHC adds to forward and backward where the plain case has run."""
    step = f"step {outcome.step * 1e3:.0f} ms, " if outcome.step else ""
    times, key = f"{step}forward and backward {outcome.passes * 1e3:.0f} ms", f"{case.layers} {where}"
    if case.streams == 1:
        plain[key] = outcome.passes
        return times
    return times + (f", mHC adds {100 * (outcome.passes / plain[key] - 1):.1f} %" if key in plain else "")


def memory_of(suite: Suite, case: Case, outcome: Outcome, layout: StageLayout | None = None) -> str:
    """The peak of this rank beside what `tools/plan.py layouts` expects on paper."""
    rank = suite.world.pp.rank if layout is not None else 0
    return f"peak {outcome.peak_gib:.1f} GiB, on paper {expected_bytes(suite, case, layout, rank) / 2**30:.1f}"


def expected_bytes(suite: Suite, case: Case, layout: StageLayout | None, rank: int) -> float:
    """What torch allocates on a rank, by the formulas of `tools/plan.py layouts`."""
    model = suite.config(case)
    run = RunConfig(model=model, training=TrainingConfig(bf16=True))
    part = Stage.whole(model.num_layers) if layout is None else layout.part(rank)
    types = tuple(model.layer_types[layer] for layer in part.layers)
    elements = forecast.model_elements(run).of_stage("EL" if layout is None else part.letters, types)
    states = forecast.state_bytes(elements, run, 1, 1)
    if not case.steps:
        del states["optimizer"]
    _, in_flight = forecast.pipeline_shape(layout, suite.arguments.microbatches, True)
    tokens = suite.arguments.seq_length + model.canvas_length
    activations = in_flight[rank] * tokens * sum(forecast.activation_bytes(run, kind) for kind in types)
    return sum(states.values()) + activations + forecast.buffer_bytes(run, elements, tokens) - forecast.RUNTIME_BYTES
