"""The runs of the suite full: each a recipe with further flags, as `bash examples/diffusion_gemma/RECIPE.sh FLAGS` would start it."""
from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from planning.layouts import without_weights

from megatron_dllm import config
from megatron_dllm.config import RunConfig

ROOT = Path(__file__).resolve().parents[2]
STREAMS = 4
# Two virtual stages a rank, three layers a rank in the mean. Without graphs the head takes about as long as a layer, so its rank has one
# less: of all layouts of 12 layers in stages of one or two, the simulator gives this one the shortest step of 8 microbatches.
INTERLEAVED = {2: "Et|tt|tt|tL", 4: "Et|tt|tt|t|tt|tt|t|tL"}
DEEPEP = ("--moe-token-dispatcher-type", "deepep")
ALLTOALL = ("--moe-token-dispatcher-type", "alltoall")


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
    `Size.long_length`."""

    name: str
    recipe: str
    ranks: int
    flags: tuple[str, ...]
    reference: str | None
    environment: tuple[tuple[str, str], ...] = ()
    is_long: bool = False

    @property
    def needs_cuda(self) -> bool:
        return "deepep" in self.flags or "--cuda-graph-impl" in self.flags

    @property
    def trains(self) -> bool:
        return self.reference is not None

    def run(self, toy: bool) -> RunConfig:
        """As the recipe's command line gives it."""
        words = [*recipe_words(self.recipe, self.environment), *self.flags]
        if toy:
            words = [*without(words, "--bf16", "--preset"), "--preset", "toy", "--device", "cpu"]
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
    """All that fit a world of so many ranks, most wanted first; a reference stands before those that are compared with it."""
    common = ("--no-packing", "--self-conditioning-prob", "1", "--micro-batch-size", "1")
    rows = (*common, "--seq-length", str(size.seq_length), "--global-batch-size")
    layers = ("--num-layers", str(size.layers))
    whole = (*layers, *rows, str(ranks))
    canvas = config.PRESETS["toy" if size.toy else "diffusiongemma-26b-a4b"].canvas_length
    graph = (*DEEPEP, "--moe-max-tokens-per-rank", str(size.seq_length + canvas), "--cuda-graph-impl", "local")
    spread = (*whole, "--expert-model-parallel-size", str(ranks))
    alone = ("--expert-model-parallel-size", "1", "--no-use-distributed-optimizer")
    keep = (("RECOMPUTE", "none"),)
    found = [
        Case("sft, one device", "sft_26b", 1, (*whole, *alone), None),
        Case(f"ep{ranks} deepep, replay, graph", "sft_26b", ranks, (*spread, *graph), "sft, one device"),
        Case(f"ep{ranks} deepep, no recompute, graph", "sft_26b", ranks, (*spread, *graph), "sft, one device", keep),
        Case(f"ep{ranks} deepep, replay", "sft_26b", ranks, (*spread, *DEEPEP), "sft, one device"),
        Case(f"ep{ranks} alltoall, replay", "sft_26b", ranks, (*spread, *ALLTOALL), "sft, one device"),
        Case(f"ep{ranks} alltoall, no recompute", "sft_26b", ranks, (*spread, *ALLTOALL), "sft, one device", keep),
        # Half as many backwards to start.
        Case(f"ep{ranks} alltoall, no recompute, drafts apart", "sft_26b", ranks, (*spread, *ALLTOALL, "--draft-pass", "apart"),
             "sft, one device", keep),
        Case(f"ep{ranks} deepep, no replay", "sft_26b", ranks, (*spread, *DEEPEP, "--no-moe-recompute-replay"), "sft, one device"),
        Case(f"ep{ranks} deepep, no recompute", "sft_26b", ranks, (*spread, *DEEPEP), "sft, one device", keep),
    ]
    if ranks % 4 == 0:
        # The host takes as long for four rows as for one: by the planner four at once halve the step, though the stages then wait.
        found.append(Case("tp2+sp pp2 ep2", "sft_26b", ranks, (
            *whole, "--micro-batch-size", "4", "--tensor-model-parallel-size", "2", "--sequence-parallel",
            "--pipeline-model-parallel-size", "2", "--expert-model-parallel-size", "2"), "sft, one device", keep))
    if ranks == 2:
        tensor = ("--micro-batch-size", "2", "--tensor-model-parallel-size", "2", "--sequence-parallel", "--no-use-distributed-optimizer")
        found += [
            Case("tp2+sp ep2", "sft_26b", ranks, (*spread, *tensor), "sft, one device", keep),
            Case("pp2", "sft_26b", ranks, (*whole, *alone, "--pipeline-model-parallel-size", "2"), "sft, one device", keep)]
    stages = ranks // 2 if ranks // 2 in INTERLEAVED else 2
    streams = ("--num-layers", str(3 * stages), *rows, str(ranks // stages * 4 * stages), "--micro-batch-size", "2", *alone[:2],
               "--enable-mhc-connections", "--mhc-num-residual-streams", str(STREAMS))
    long = (*layers, *common, "--seq-length", str(size.long_length), "--global-batch-size", "1", "--encoder-loss-tokens", "response")
    return [
        *found,
        Case("lora long, one device", "lora_26b", 1, long, None, is_long=True),
        # Attention is most of the work, so its results are kept.
        Case(f"cp{ranks}, lora, long", "lora_26b", ranks, (
            *long, "--context-parallel-size", str(ranks), "--use-distributed-optimizer", "--recompute-granularity", "selective",
            "--recompute-modules", "moe"), "lora long, one device", is_long=True),
        Case("mhc, one device", "sft_26b", 1, (*streams, alone[2]), None),
        Case(f"pp{stages} vpp2, mHC {STREAMS}", "sft_26b", ranks, (
            *streams, "--pipeline-model-parallel-size", str(stages), "--pipeline-model-parallel-layout", INTERLEAVED[stages]),
            "mhc, one device", keep),
    ]
