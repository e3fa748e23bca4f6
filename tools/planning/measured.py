"""What was measured by 30 November 2026 (docs/performance.md of that day), as runs that the planner can plan: to see how far off it is.

One GPU: the run of the suite h200 on commit 2f3b2bf, on a host that starts work fast. Beside it what only scripts of that day and the tree
before gave: two backwards, drafts apart, several microbatches. What stands as "older" was not measured on that tree again; its kernels were
slower.

Two GPUs: the suite full ran on two hosts: one that takes 1.3 times as long to start work as those before, since three layouts ran on both,
and one that takes about 1.1 times as long, on commit db3f850. By graphs, which ask nothing of the host, steps take as long on all.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarking.full_cases import Case, Size, cases

from megatron_dllm import config
from megatron_dllm.config import RunConfig
from planning.layouts import GIB, Machine, Plan, plan

WHOLE_MODEL = "--preset diffusiongemma-26b-a4b --data-source sudoku --train-iters 1 --bf16 --self-conditioning-prob 1"
SIX, EIGHT, TWELVE = ("--num-layers 6", "--num-layers 8 --freeze-router --global-batch-size 2 --use-distributed-optimizer",
                      "--num-layers 12 --self-conditioning-prob 0.875 --global-batch-size 8")
LORA = "--lora-rank 16"
GRAPHS, FULL = "--cuda-graph-impl local", "--recompute-granularity full"
# As before there was a choice, or as was chosen before both passes could have one backward: of pipelines all.
SHARED = "--draft-pass shared"
EXPERTS = f"{EIGHT} {SHARED} --expert-model-parallel-size 2"
ONE_FORM = ("--packing --global-batch-size 8 --self-conditioning-prob 0.5 --moe-max-tokens-per-rank 4096 --cuda-graph-token-multiple 2048 "
            "--cuda-graph-canvas-multiple 8")
DEEPEP, BOUND = "--moe-token-dispatcher-type deepep", "--moe-max-tokens-per-rank 1280"
STREAMS = "--enable-mhc-connections --mhc-num-residual-streams 4"
PP2, PP2_SIX = f"--pipeline-model-parallel-size 2 {SHARED}", "--num-layers 6 --self-conditioning-prob 0.875 --global-batch-size 8"
SLOWER_HOST, MIDDLE_HOST = 1.3, 1.1
LONG = f"{SIX} --context-parallel-size 2 --use-distributed-optimizer {FULL} --encoder-loss-tokens response"


@dataclass(frozen=True)
class Measured:
    """Milliseconds of a step, or of its forward and backward with the sums of gradients where it is not `stepped`, and the GiB that the
    device held where gradients had the planner's precision (None: not, or not noted). host: as a `Machine`'s. of_suite: the run, where it
    is one of the suite full. far: what is known where the plan is more than a quarter off."""

    what: str
    gpus: int
    flags: str
    ms: float
    gib: float | None = None
    stepped: bool = True
    rows: int = 1
    length: int = 1024
    canvases: int = 1
    host: float = 1.0
    of_suite: Case | None = None
    far: str = ""

    def run(self) -> RunConfig:
        if self.of_suite is not None:
            return self.of_suite.run(False)
        words = f"{WHOLE_MODEL} --seq-length {self.length} --micro-batch-size {self.rows}"
        if "--global-batch-size" not in self.flags:
            words += f" --global-batch-size {self.rows * (2 if '2 GPUs' in self.what else 1)}"
        return config.parse(f"{words} {self.flags}".split())

    def planned(self) -> tuple[float, float]:
        """(milliseconds, GiB) by the planner."""
        found: Plan = plan(self.run(), Machine(self.gpus, host=self.host), self.canvases)
        left_out = 0.0 if self.stepped else found.held["optimizer"]
        return found.time.total - (0.0 if self.stepped else found.time.optimizer), (found.bytes - left_out) / GIB


def one(what: str, flags: str, ms: float, gib: float | None = None, **others: int | bool) -> Measured:
    return Measured(f"1 GPU, {what}", 1, flags, ms, gib, **others)


def two(what: str, flags: str, ms: float, gib: float | None = None, **others: int | bool) -> Measured:
    return Measured(f"2 GPUs, {what}", 2, flags, ms, gib, **others)


def suite(ms: dict[str, tuple[float, float | None]], far: dict[str, str], *, host: float, where: str = "") -> list[Measured]:
    """The suite full with 8 layers and a document of 25,088 tokens: by case, milliseconds and GiB."""
    found = {case.name: replace(case, flags=(*case.flags, *(SHARED.split() if case.name.startswith("pp2") else ())))
             for case in cases(2, Size.of(False, 8, None, 25088))}
    return [Measured(f"2 GPUs, {name}{where}", 2, "", *figures, host=host, of_suite=found[name], far=far.get(name, ""))
            for name, figures in ms.items()]


MEASURED = (
    *(one(f"6 layers, {rows} x {length}, graphs", f"{SIX} {GRAPHS}", ms, stepped=False, rows=rows, length=length)
      for rows, length, ms in ((4, 1024, 99.4), (1, 4096, 84.0), (1, 1024, 34.6), (1, 32768, 715.6))),
    one("6 layers, 1 x 4096, 8 canvases, graphs", f"{SIX} {GRAPHS}", 135.3, stepped=False, length=4096, canvases=8),
    one("6 layers, 4 x 1024, mHC 4, graphs", f"{SIX} {GRAPHS} {STREAMS}", 106.2, stepped=False, rows=4),
    one("6 layers, 4 x 1024, AdamW, graphs", f"{SIX} {GRAPHS}", 139.2, 112.4, rows=4),
    one("adapters, 4 x 1024, graphs", f"{LORA} {GRAPHS}", 232.8, 72.7, rows=4),
    one("adapters, 1 x 1024, graphs", f"{LORA} {GRAPHS}", 82.1, 55.8),
    one("adapters, 4 x 1024", LORA, 325.4, 72.8, rows=4),
    one("adapters, 1 x 1024", LORA, 350.0, 56.2),
    *(one(f"6 layers, {rows} x {length}, graphs, {passes}", f"{SIX} {GRAPHS} --draft-pass {passes}", ms, stepped=False, rows=rows,
          length=length)
      for rows, length, passes, ms in ((4, 1024, "shared", 102.9), (1, 4096, "shared", 89.7), (1, 1024, "apart", 35.2))),
    one("adapters, 4 x 1024, graphs, two backwards", f"{LORA} {GRAPHS} {SHARED}", 244.2, rows=4),
    one("adapters, 1 x 1024, graphs, two backwards", f"{LORA} {GRAPHS} {SHARED}", 89.6),
    # As a pipeline of one rank; layers recorded, four microbatches of 1024.
    one("4 layers, 4 microbatches, AdamW, graphs", f"--num-layers 4 --global-batch-size 4 {GRAPHS}", 196.5, 75.0),
    one("6 layers, 1 x 32768, full recompute, older", f"{SIX} {FULL}", 876.4, 46.2, stepped=False, length=32768),
    one("adapters, 4 x 1024, graphs, full recompute, older", f"{LORA} {GRAPHS} {FULL}", 383.7, 54.4, rows=4),
    one("adapters, 4 x 1024, two backwards, older", f"{LORA} {SHARED}", 493.4, 71.2, rows=4),
    one("adapters, 1 x 1024, two backwards, older", f"{LORA} {SHARED}", 397.9, 54.0),
    # Packed conversations of all lengths, filled up to one form: 623 to 639 ms a step of four microbatches a GPU.
    two("8 layers, EP2, alltoall, packed rows filled up, graphs", f"{EXPERTS} {ONE_FORM} {GRAPHS}", 631.0, length=2048, canvases=8),
    two("8 layers, EP2, deepep, replay, the faster host", f"{EXPERTS} {DEEPEP} {FULL}", 282.2, 70.6),
    two("8 layers, EP2, deepep, no replay, the faster host", f"{EXPERTS} {DEEPEP} {FULL} --no-moe-recompute-replay", 313.6, 70.5),
    two("8 layers, EP2, alltoall, the faster host", EXPERTS, 219.7, 72.5),
    two("8 layers, EP2, alltoall, replay, the faster host", f"{EXPERTS} {FULL}", 355.2),
    two("8 layers, EP2, alltoall, bounded, the faster host", f"{EXPERTS} {BOUND}", 211.2, 74.4),
    *suite({
        "ep2 deepep, replay, graph": (100.8, 74.0), "ep2 deepep, no recompute, graph": (89.5, 75.4),
        "ep2 alltoall, no recompute, graph": (89.7, 74.5), "ep2 alltoall, replay, graph": (103.1, 72.4),
        "ep2 deepep, no replay, graph": (103.0, 74.4), "tp2+sp ep2, graph": (81.9, 69.8), "pp2, graph": (169.4, 81.2),
        "cp2, lora, long, graph": (274.2, 27.8), "pp2 vpp2, mHC 4, graph": (300.8, 79.9),
        "pp2, 8 microbatches, graph": (520.7, 80.6)}, far={}, host=MIDDLE_HOST),
    *suite({
        "ep2 deepep, replay": (347.1, 71.6), "ep2 alltoall, no recompute": (224.9, 73.5), "tp2+sp ep2": (305.3, 67.5),
        "pp2 vpp2, mHC 4": (418.6, 72.1)}, far={}, host=MIDDLE_HOST, where=", the middle host"),
    *suite({
        "ep2 deepep, replay": (364.9, 71.0), "ep2 alltoall, replay": (450.7, 70.7), "ep2 alltoall, no recompute": (307.1, 72.7),
        "ep2 alltoall, no recompute, drafts apart": (253.8, 71.8), "ep2 deepep, no replay": (399.4, 70.7),
        "ep2 deepep, no recompute": (256.5, 72.7), "tp2+sp ep2": (388.7, 66.7), "pp2": (273.1, 80.7), "cp2, lora, long": (400.9, 27.0),
        "pp2 vpp2, mHC 4": (440.7, 72.1)}, host=SLOWER_HOST, where=", the slower host",
        far={"cp2, lora, long": "rank 0 is in transfers of few bytes, and in nothing else, for 0.18 of 0.45 s; by a graph it is not"}),
    *(two(f"6 layers, {name}", f"{PP2_SIX} {flags}", ms, gib) for name, flags, ms, gib in (
        ("PP2", PP2, 536, 57.4), ("PP2/VPP2", f"{PP2} --pipeline-model-parallel-layout Et|tt|tt|tL", 606, 57.4),
        ("PP2, mHC 4", f"{PP2} {STREAMS}", 635, None),
        ("PP2/VPP2, mHC 4", f"{PP2} {STREAMS} --pipeline-model-parallel-layout Et|tt|tt|tL", 668, None))),
    *(two(f"12 layers, {name}", f"{TWELVE} {flags}", ms, gib, stepped=False) for name, flags, ms, gib in (
        ("PP2", PP2, 868, 37.4), ("PP2/VPP2", f"{PP2} --pipeline-model-parallel-layout Ett|t*4|t*4|ttL", 995, 37.5),
        ("PP2, mHC 4", f"{PP2} {STREAMS}", 1119, None),
        ("PP2/VPP2, mHC 4", f"{PP2} {STREAMS} --pipeline-model-parallel-layout Ett|t*4|t*4|ttL", 1026, None))),
    two("6 layers, CP2, 100096 tokens", f"{LONG} --global-batch-size 1", 2178, 89.0, length=100096),
    two("6 layers, CP2, 50048 tokens", f"{LONG} --global-batch-size 1", 665, 81.4, length=50048),
    two("6 layers, DP2, 4 x 1024", f"{SIX} {SHARED} --global-batch-size 4", 146.9, 40.7, stepped=False, rows=2),
    two("6 layers, EP2, 4 x 1024", f"{SIX} {SHARED} --global-batch-size 4 --expert-model-parallel-size 2", 175.8, 27.9, stepped=False,
        rows=2),
    two("6 layers, TP2+SP, 4 x 1024", f"{SIX} --global-batch-size 4 --tensor-model-parallel-size 2 --sequence-parallel", 216.4, 36.7,
        stepped=False, rows=4),
    two("6 layers, CP2, 1 x 32768, full recompute", f"{SIX} {FULL} --global-batch-size 1 --context-parallel-size 2", 519.9, 40.9,
        stepped=False, length=32768),
)
