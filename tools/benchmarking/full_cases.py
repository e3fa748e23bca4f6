"""The runs of the suite full: each a recipe with further flags, as `bash examples/diffusion_gemma/RECIPE.sh FLAGS` would start it."""
from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from planning.layouts import without_weights

from megatron_dllm import config
from megatron_dllm.config import RunConfig

ROOT = Path(__file__).resolve().parents[2]
STREAMS = 4
# Two virtual stages a rank, three layers a rank in the mean. Without graphs the head takes about as long as a layer, so its rank has one
# less: of all layouts of 12 layers in stages of one or two, the simulator gives this one the shortest step of 8 microbatches. Recorded,
# the head takes as long as two or three layers: the best of those that the planner gives 2 ranks and 4.
INTERLEAVED = {2: "Et|tt|tt|tL", 4: "Et|tt|tt|t|tt|tt|t|tL"}
RECORDED = {2: "Et|tt|ttt|L", 4: "Ett|t|tt|t|tt|tt|tt|L"}
DEEPEP = ("--moe-token-dispatcher-type", "deepep")
ALLTOALL = ("--moe-token-dispatcher-type", "alltoall")
EXPERTS_AGAIN = ("--recompute-granularity", "selective", "--recompute-modules", "moe")
ANEW = "--no-moe-recompute-replay"
ALONE, UNSHARED = ("--expert-model-parallel-size", "1"), "--no-use-distributed-optimizer"
KEEP = (("RECOMPUTE", "none"),)


@dataclass(frozen=True)
class Size:
    """Of the work: toy widths in fp32 on a CPU, or the released ones in bf16; layers of the model (those with residual streams have three
    a pipeline rank); clean tokens of a row, and of the long document."""

    toy: bool
    layers: int
    seq_length: int
    long_length: int

    @classmethod
    def of(cls, toy: bool, layers: int | None = None, seq_length: int | None = None, long_length: int | None = None) -> Size:
        """With what is not given as the scale has it."""
        defaults = (4, 64, 512) if toy else (30, 1024, 100096)
        return cls(toy, *(default if given is None else given for default, given in zip(defaults, (layers, seq_length, long_length),
                                                                                         strict=True)))


@dataclass(frozen=True)
class Case:
    """A run of a recipe over `ranks` devices. reference: the case, on one device and forward alone, that gives the first loss as well, None
    for such a case itself. environment: what the recipe reads of it, beside model and data. is_long: whether its row is a document of
    `Size.long_length`. on_request: on GPUs run only where its name is asked for."""

    name: str
    recipe: str
    ranks: int
    flags: tuple[str, ...]
    reference: str | None
    environment: tuple[tuple[str, str], ...] = ()
    is_long: bool = False
    on_request: bool = False

    @property
    def needs_cuda(self) -> bool:
        return "deepep" in self.flags or "--cuda-graph-impl" in self.flags

    @property
    def trains(self) -> bool:
        return self.reference is not None

    def run(self, toy: bool, device: str = "cpu") -> RunConfig:
        """As the recipe's command line gives it; a toy's on `device`, in fp32 on a CPU."""
        words = [*recipe_words(self.recipe, self.environment), *self.flags]
        if toy:
            words = [*without(words, "--preset", *(["--bf16"] if device == "cpu" else [])), "--preset", "toy", "--device", device]
        return config.parse(without_weights(words))

    def command(self) -> str:
        """What starts the run by itself, on random weights and generated data."""
        settings = "".join(f"{name}={value} " for name, value in self.environment)
        return f"MODEL=random {settings}SAVE=runs/trial bash examples/diffusion_gemma/{self.recipe}.sh {shlex.join(self.flags)}"


def without(words: Iterable[str], *flags: str) -> list[str]:
    """The words without these flags and their values."""
    kept, skip = [], False
    for word in words:
        skip = word in flags or (skip and not word.startswith("--"))
        if not skip:
            kept.append(word)
    return kept


@cache
def recipe_words(recipe: str, settings: tuple[tuple[str, str], ...] = ()) -> tuple[str, ...]:
    """The flags that a recipe gives to pretrain_dllm.py on random weights. RuntimeError, with what it says, where it refuses."""
    environment = {**os.environ, "MODEL": "random", "DATA": "none", "SAVE": "none", "DRY_RUN": "command", "SCALE": "full",
                   "PYTHON": sys.executable, **dict(settings)}
    script = ROOT / "examples" / "diffusion_gemma" / f"{recipe}.sh"
    done = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{recipe}.sh: {done.stderr.strip()}")
    words = shlex.split(done.stdout.replace("\\\n", " "))
    start = next(number for number, word in enumerate(words) if word.endswith("pretrain_dllm.py"))
    return tuple(words[start + 1:])


def cases(ranks: int, size: Size) -> list[Case]:
    """All that fit a world of so many ranks, most wanted first; a reference stands before those that are compared with it.

    By CUDA graphs every layout; of those that the host starts kernel by kernel, one of a kind, the others on request.
    """
    work = Work(ranks, size)
    one, long, streams = work.references
    graphs, eager = work.spread(graph=True), work.spread(graph=False)
    return [one, *graphs, *work.tensor(graph=True), long, work.long(graph=True), streams, work.streams(graph=True), *work.microbatches(),
            *eager, *work.tensor(graph=False), work.long(graph=False), work.streams(graph=False)]


class Work:
    """The flags of the cases, by kind of layout; `graph`: recorded, or started by the host."""

    def __init__(self, ranks: int, size: Size):
        self.ranks = ranks
        self.common = ("--no-packing", "--self-conditioning-prob", "1", "--micro-batch-size", "1")
        rows = (*self.common, "--seq-length", str(size.seq_length), "--global-batch-size")
        layers = ("--num-layers", str(size.layers))
        self.whole = (*layers, *rows, str(ranks))
        canvas = config.PRESETS["toy" if size.toy else "diffusiongemma-26b-a4b"].canvas_length
        self.row_tokens = size.seq_length + canvas
        self.stages = ranks // 2 if ranks // 2 in INTERLEAVED else 2
        self.of_streams = (
            "--num-layers", str(3 * self.stages), *rows, str(ranks // self.stages * 4 * self.stages), "--micro-batch-size", "2", *ALONE,
            "--enable-mhc-connections", "--mhc-num-residual-streams", str(STREAMS))
        self.of_document = (
            *layers, *self.common, "--seq-length", str(size.long_length), "--global-batch-size", "1", "--encoder-loss-tokens", "response")
        self.references = (
            Case("sft, one device", "sft_26b", 1, (*self.whole, *ALONE, UNSHARED), None),
            Case("lora long, one device", "lora_26b", 1, self.of_document, None, is_long=True),
            Case("mhc, one device", "sft_26b", 1, (*self.of_streams, UNSHARED), None))

    def case(self, name: str, flags: Iterable[str], *, graph: bool, reference: int = 0, keep: bool = False, bound: int | None = None,
             on_request: bool = False) -> Case:
        """A layout of the reference's run. keep: what the backward reads is kept. bound: tokens of a rank in a pass, where experts are
        spread, whose exchanges a recording makes room for."""
        recorded = (*(("--moe-max-tokens-per-rank", str(bound)) if bound else ()), "--cuda-graph-impl", "local") if graph else ()
        one = self.references[reference]
        return Case(f"{name}, graph" if graph else name, one.recipe, self.ranks, (*flags, *recorded), one.name,
                    KEEP if keep else (), one.is_long, on_request)

    def spread(self, *, graph: bool) -> list[Case]:
        """Experts over all ranks, by what brings tokens to them and by what is computed again."""
        flags = (*self.whole, "--expert-model-parallel-size", str(self.ranks))

        def case(name: str, *more: str, **how: bool) -> Case:
            return self.case(f"ep{self.ranks} {name}", (*flags, *more), graph=graph, bound=self.row_tokens, **how)

        # Recorded, every pass has room for all tokens of all ranks on each: many ranks cannot keep that of all layers.
        few = self.ranks < 4
        if graph:
            return [
                case("deepep, replay", *DEEPEP),
                case("deepep, no recompute", *DEEPEP, keep=True, on_request=not few),
                case("deepep, experts again", *DEEPEP, *EXPERTS_AGAIN, keep=True, on_request=few),
                case("alltoall, no recompute", *ALLTOALL, keep=True, on_request=not few),
                case("alltoall, experts again", *ALLTOALL, *EXPERTS_AGAIN, keep=True, on_request=few),
                case("alltoall, replay", *ALLTOALL),
                case("deepep, no replay", *DEEPEP, ANEW)]
        return [
            case("deepep, replay", *DEEPEP),
            case("alltoall, no recompute", *ALLTOALL, keep=True),
            case("alltoall, replay", *ALLTOALL, on_request=True),
            case("deepep, no replay", *DEEPEP, ANEW, on_request=True),
            case("deepep, no recompute", *DEEPEP, keep=True, on_request=True),
            # Half as many backwards to start.
            case("alltoall, no recompute, drafts apart", *ALLTOALL, "--draft-pass", "apart", keep=True, on_request=True)]

    def tensor(self, *, graph: bool) -> list[Case]:
        """Tensor and pipeline parallelism, with experts over ranks or without."""
        flags = (*self.whole, "--tensor-model-parallel-size", "2", "--sequence-parallel", "--expert-model-parallel-size", "2")
        if self.ranks % 4 == 0:
            # The host takes as long for four rows as for one: by the planner four at once halve the step, though the stages then wait.
            rows = 4
            pipeline = ("--micro-batch-size", str(rows), "--pipeline-model-parallel-size", "2")
            return [self.case("tp2+sp pp2 ep2", (*flags, *pipeline), graph=graph, keep=True, bound=rows * self.row_tokens // 2)]
        if self.ranks > 2:
            return []
        pipeline = (*self.whole, *ALONE, UNSHARED, "--pipeline-model-parallel-size", "2")
        return [
            self.case("tp2+sp ep2", (*flags, "--micro-batch-size", "2", UNSHARED), graph=graph, keep=True, bound=self.row_tokens),
            self.case("pp2", pipeline, graph=graph, keep=True, on_request=not graph)]

    def microbatches(self) -> list[Case]:
        """Over two ranks so many microbatches that the pipeline is mostly full, with one device's loss of them."""
        if self.ranks != 2:
            return []
        flags = (*self.whole, *ALONE, UNSHARED, "--global-batch-size", "8")
        one = Case("sft 8 rows, one device", "sft_26b", 1, flags, None)
        recorded = self.case("pp2, 8 microbatches", (*flags, "--pipeline-model-parallel-size", "2"), graph=True, keep=True)
        return [one, replace(recorded, reference=one.name)]

    def long(self, *, graph: bool) -> Case:
        """Adapters on a long document over context-parallel ranks. Attention is most of the work, so its results are kept."""
        flags = (*self.of_document, "--context-parallel-size", str(self.ranks), "--use-distributed-optimizer", *EXPERTS_AGAIN)
        return self.case(f"cp{self.ranks}, lora, long", flags, graph=graph, reference=1, on_request=not graph)

    def streams(self, *, graph: bool) -> Case:
        """Residual streams over an interleaved pipeline."""
        flags = (*self.of_streams, "--pipeline-model-parallel-size", str(self.stages), "--pipeline-model-parallel-layout",
                 (RECORDED if graph else INTERLEAVED)[self.stages])
        return self.case(f"pp{self.stages} vpp2, mHC {STREAMS}", flags, graph=graph, reference=2, keep=True)
