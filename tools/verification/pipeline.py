"""Pipelines over gloo processes: transfers alone, bit for bit, then the model in every layout against one process in float64.

Usage: python tools/verify.py pipeline [--quick]      (--quick: transfers at two rows, the model's layouts once each)
"""
from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Iterator

import torch

from tests.parallel import affine
from tests.parallel.affine import AffineCase
from tests.parallel.pipeline_cases import ALL, NONE, SOME, PipelineCase, compare, forget_the_tie
from tests.parallel.world import World
from verification.table import Figure, print_figures

TOLERANCE = 1e-10
PROCESSES = 4
WIDTHS = (4096, 7168)  # hidden sizes; with four residual streams 16384 and 28672 wide
RECOMPUTE = frozenset({"block"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="Each layout with one pattern of self-conditioning, streams and recompute.")


def run(arguments: argparse.Namespace) -> int:
    """Print the table; the number of missed figures."""
    torch.set_num_threads(1)
    started = time.monotonic()
    world = World(PROCESSES)
    try:
        figures = [*transfers(world), *models(world, quick=arguments.quick)]
    finally:
        world.close()
    print(f"torch {torch.__version__}, gloo, float64; differences of gradients are relative to the largest gradient; "
          f"{time.monotonic() - started:.0f} s")
    return print_figures("pipeline", figures)


def transfers(world: World) -> Iterator[Figure]:
    """Affine stages on integers: boundary tensors, gradients and losses against a serial run, and memory of outputs that were sent."""
    cases = {"pp2": (2, 1, 1), "pp2 vpp2": (2, 2, 1), "pp2 vpp2 tp2 sp": (2, 2, 2)}
    for hidden in WIDTHS:
        for name, (ranks, chunks, tp) in cases.items():
            for batched in (True, False):
                case = AffineCase(ranks, chunks, hidden, 4, (True, False), tp=tp, batched=batched)
                found = world.run(affine.compare, case, size=ranks * tp, timeout=120)
                different, compared, outputs, held = (
                    sum(rank[key] for rank in found) for key in ("different", "compared", "outputs", "held"))
                how = "batched" if batched else "one by one"
                yield Figure(f"transfers, {name}, {case.width} wide, {how}: tensors that differ", different, 0, f"of {compared}")
                yield Figure(f"transfers, {name}, {case.width} wide, {how}: sent outputs that hold memory", held, 0, f"of {outputs}")
    case = AffineCase(2, 2, 6, 1, (False,) * 4, equal_rows=True)
    different = sum(rank["different"] for rank in world.run(affine.compare, case, affine.swap_receives, size=2))
    yield Figure("planted fault: two receives in the wrong order at P = 2 are seen (negated tensors)", -different, -1, "at least 1")


def sizes(**sizes: int) -> tuple[tuple[str, int], ...]:
    return tuple(sizes.items())


PP2, PP4 = sizes(world=2, pp=2), sizes(world=4, pp=4)
TP2_SP_PP2 = PipelineCase(sizes(world=4, pp=2, tp=2), "Et|ttL", sequence_parallel=True)
LAYOUTS = {
    "pp2": PipelineCase(PP2, "Et|ttL"),
    "pp4": PipelineCase(PP4, "Et|t|t|L"),
    "pp2 vpp2": PipelineCase(PP2, "Et|t|t|L"),
    "pp2 vpp3, empty stage": PipelineCase(PP2, "Et|t||t||L"),
    "pp4, standalone embedding and loss": PipelineCase(PP4, "E|tt|t|L"),
    "tp2 sp pp2": TP2_SP_PP2,
    "tp2 sp pp2 mtp": dataclasses.replace(TP2_SP_PP2, layout="Et|ttmL", mtp=1),
    "cp2 pp2, lengths that differ": PipelineCase(sizes(world=4, pp=2, cp=2), "Et|ttL"),
    "ep2 pp2, coins 1/0 0/1 0/0": PipelineCase(sizes(world=4, pp=2, ep=2), "Et|ttL", ("100", "010")),
    "dp2 pp2, distributed optimizer": PipelineCase(sizes(world=4, pp=2), "Et|ttL", ("A100", "1000"), distributed_optimizer=True),
    "pp2, a gated-delta layer": PipelineCase(PP2, "Eg|ttL", linear=True),
}


def variants(name: str, case: PipelineCase, *, quick: bool) -> Iterator[tuple[str, PipelineCase]]:
    """A layout with and without four residual streams, with each pattern of self-conditioning, with and without recompute."""
    number = list(LAYOUTS).index(name)
    patterns = {"all": ALL, "some": SOME, "none": NONE} if len(case.coins) == 1 else {"given": None}
    for mhc in (False, True):
        for place, (pattern, coins) in enumerate(patterns.items()):
            for again in (False, True):
                # The quick table has each layout with and without streams, and goes through the patterns and recompute in turn.
                if quick and (place != (number + mhc) % len(patterns) or again != bool((number // 2 + mhc) % 2)):
                    continue
                parts = ["mhc 4" if mhc else "plain", f"self-conditioned: {pattern}", *["recompute"] * again]
                yield f"{name}, {', '.join(parts)}", dataclasses.replace(
                    case, mhc=mhc, coins=case.coins if coins is None else (coins,), recompute=RECOMPUTE if again else frozenset())


def models(world: World, *, quick: bool) -> Iterator[Figure]:
    """One step of each case: the largest difference of loss, evaluation loss, norm and gradients on any rank."""
    for layout, base in LAYOUTS.items():
        for name, case in variants(layout, base, quick=quick):
            found = world.run(compare, case, size=case.topology.world, timeout=180)
            worst = max(found, key=lambda rank: rank.difference)
            value = max(max(rank.difference, rank.loss, rank.norm, rank.evaluation) for rank in found)
            yield Figure(name, value, TOLERANCE, f"{sum(rank.gradients for rank in found)} gradients, worst {worst.worst}")
    untied = min(rank.difference for rank in world.run(compare, LAYOUTS["pp2"], forget_the_tie, size=2))
    yield Figure("planted fault: tied embeddings not summed (negated difference)", -untied, -1e-3, "at least 1e-3")
