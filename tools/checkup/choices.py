"""Which implementation each part takes here, and what every flag that names one would get, as the code's own functions decide it."""
from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch

from megatron_dllm.config import PRESETS, ModelConfig, MoEConfig, OptimizerConfig, RunConfig, parse
from megatron_dllm.config.validation import validate
from megatron_dllm.kernels.launch import WIDEST_ROW, takes
from megatron_dllm.moe.dispatchers.build import BY_DEEP_EP, PLAIN, build_dispatcher
from megatron_dllm.moe.dispatchers.deepep import import_package
from megatron_dllm.moe.experts import Experts
from megatron_dllm.parallel import Group, ParallelContext
from megatron_dllm.tensor_parallel import Initializer
from megatron_dllm.tensor_parallel.fused_gradient import weight_gradients
from megatron_dllm.training.algorithms import BACKENDS, adamw, algorithm_of
from megatron_dllm.training.determinism import obstacles
from megatron_dllm.transformer.core_attention import attention_backends
from megatron_dllm.transformer.gated_delta_fla import check_fla
from megatron_dllm.transformer_engine import Choice, choices, load_engine

from .report import REFUSED, TAKEN, Row, Section, outcome_of

PRESET = "diffusiongemma-26b-a4b"
DTYPES = (("--bf16", torch.bfloat16), ("(fp32)", torch.float32))
IN_TORCH, BY_KERNEL = "plain torch", "Triton kernel"
ENGINE_FLAGS = (" --fp8-format hybrid", " --fp8-format hybrid --fp8-recipe blockwise", " --attention-backend transformer_engine",
                " --rotary-backend transformer_engine", " --cross-entropy-fusion-impl te")
GATED_DELTA = {"torch": "chunks in plain torch", "fla": "kernels of flash-linear-attention"}
BACKEND_NAMES = {"looped_linear": "loop over experts", "grouped_linear": "torch's grouped_mm", "grouped_mlp": "Triton grouped kernels"}


def choices_section(device: torch.device, environment: Mapping[str, str] = os.environ) -> Section:
    """For the released model's shapes."""
    config = PRESETS[PRESET]
    rows = [*attention_rows(config, device), *expert_rows(config, device), *small_rows(config, device), *dispatcher_rows(config, device),
            *engine_rows(device), *optimizer_rows(device), *run_rows(device, environment)]
    return Section(f"What flags take here ({PRESET})", ("part", "flags", "takes"), tuple(rows))


def attention_rows(config: ModelConfig, device: torch.device) -> Iterator[Row]:
    for flag, dtype in DTYPES:
        for part, taken in attention_backends(config, dtype, device).items():
            yield Row(TAKEN, (part, flag, taken))
    for backend in GATED_DELTA:
        flag = f"--gdn-kernel-backend {backend}{' --bf16' if backend == 'fla' else ''}"
        refused = refusal(device, flag.split(), ["--layer-types", "linear*5,full"])
        if refused is None and backend == "fla":
            found = outcome_of(partial(check_fla, device))
            refused = found.first_line if found.error else None
        yield Row(REFUSED if refused else TAKEN, ("linear (gated delta net)", flag, refused or GATED_DELTA[backend]))


def expert_rows(config: ModelConfig, device: torch.device) -> Iterator[Row]:
    """Of one expert of the real widths, without and with adapters."""
    one = replace(config, num_experts=1, moe_router_topk=1)
    for flag, dtype in DTYPES:
        for grouped in (True, False):
            made = Experts("experts", one, context=ParallelContext.single(device), init=Initializer(0, 0.02), dtype=dtype, grouped=grouped)
            words = f"{flag} {'--moe-grouped-gemm' if grouped else '--no-moe-grouped-gemm'}"
            yield Row(TAKEN, ("experts", words, BACKEND_NAMES[made.backend]))
            if grouped and dtype == torch.bfloat16:
                made.down_adapter = torch.nn.Identity()
                yield Row(TAKEN, ("experts beside adapters", words, BACKEND_NAMES[made.backend]))


def small_rows(config: ModelConfig, device: torch.device) -> Iterator[Row]:
    """What `takes` decides, in training and in generation."""
    for flag, dtype in DTYPES:
        taken = takes(torch.empty(1, device=device, dtype=dtype))
        wide = BY_KERNEL if taken and config.hidden_size <= WIDEST_ROW else IN_TORCH
        yield Row(TAKEN, ("norms, rotary, residual, gelu gate, permutation, mHC", flag, wide))
    logits = torch.empty(1, device=device)
    where = BY_KERNEL if takes(logits) else IN_TORCH
    yield Row(TAKEN, ("router, cross entropy, sampler (fp32 in any case)", "", where))


def dispatcher_rows(config: ModelConfig, device: torch.device) -> Iterator[Row]:
    """Built for two ranks that share the experts; those of deep_ep stop where they would connect the ranks."""
    single = ParallelContext.single(device)
    context = replace(single, ep=Group("ep", 2, 0, None, (0, 1)))
    for name in (*PLAIN, *BY_DEEP_EP):
        words = f"--moe-token-dispatcher-type {name} --bf16 --expert-model-parallel-size 2"
        why = refusal(device, words.split(), world_size=2)
        if why is None and name in BY_DEEP_EP:
            try:
                import_package(name, BY_DEEP_EP[name][1], context)
            except ValueError as error:
                why = str(error)
        elif why is None:
            build_dispatcher(MoEConfig(moe_token_dispatcher_type=name), context, config, torch.bfloat16)
        yield Row(REFUSED if why else TAKEN, ("dispatch to experts", words, why or name))


def engine_rows(device: torch.device) -> Iterator[Row]:
    """What Transformer Engine takes of each part, and what further flags change in that."""
    engine = "--transformer-impl transformer_engine --moe-grouped-gemm-backend transformer_engine --bf16"
    without: tuple[Choice, ...] = ()
    for further in ("", *ENGINE_FLAGS):
        run = run_of(device, (engine + further).split())
        why = refusal(device, (engine + further).split())
        if why is None:
            found = outcome_of(partial(load_engine, run.training, run.moe, device))
            why = str(found.error) if found.error else None
        if why is not None:
            yield Row(REFUSED, ("layers", engine + further, why))
            continue
        for choice in choices(run):
            if choice not in without:
                yield Row(TAKEN, (choice.part, "--transformer-impl transformer_engine" + further, f"{choice.taken}; {choice.reason}"))
        without = without or choices(run)


def optimizer_rows(device: torch.device) -> Iterator[Row]:
    master = torch.zeros(1, device=device, requires_grad=True)
    for backend in BACKENDS:
        config, algorithm = OptimizerConfig(optimizer_backend=backend), algorithm_of(backend, [master])
        try:
            made = algorithm.make([{"params": [master], "copies": [None], "weight_decay": 0.0}], config)
        except ValueError as error:
            yield Row(REFUSED, ("optimizer", f"--optimizer-backend {backend}", str(error).splitlines()[0]))
            continue
        name = f"{type(made).__module__}.{type(made).__name__}"
        yield Row(TAKEN, ("optimizer", f"--optimizer-backend {backend}", name + (", fused" if algorithm is adamw else "")))
    words = "--gradient-accumulation-fusion --bf16"
    found = outcome_of(partial(weight_gradients, device))
    why = str(found.error) if found.error else refusal(device, words.split())
    yield Row(REFUSED if why else TAKEN, ("weight gradients of linear layers", words, why or f"added to fp32 by {found.value.name}"))


def run_rows(device: torch.device, environment: Mapping[str, str]) -> Iterator[Row]:
    """CUDA graphs and bit-equal repeats."""
    for words in ("--cuda-graph-impl local --bf16", "--cuda-graph-impl local"):
        why = refusal(device, words.split())
        yield Row(REFUSED if why else TAKEN, ("CUDA graphs", words, why or "a graph for each form of microbatch that comes again"))
    for world_size in (1, 2):
        found = obstacles(run_of(device, ["--deterministic-mode"]), device, world_size, environment)
        ranks = f"--deterministic-mode, {world_size} rank{'s' if world_size > 1 else ''}"
        yield Row(REFUSED if found else TAKEN, ("bit-equal repeats", ranks, "; ".join(found) or "verified at the start"))


def run_of(device: torch.device, words: list[str]) -> RunConfig:
    """A run of the released model that lacks nothing but what `words` may break."""
    needed = ["--preset", PRESET, "--train-iters", "1", "--data-source", "sudoku", "--device", device.type]
    return parse([*needed, *words])


def refusal(device: torch.device, words: list[str], others: list[str] | None = None, *, world_size: int = 1) -> str | None:
    """Why a run with these flags is refused, in the words of the checks; None if it is not. What is so without them does not count."""
    without = {str(problem) for problem in validate(run_of(device, others or []), world_size=world_size)}
    problems = [problem for problem in validate(run_of(device, [*(others or []), *words]), world_size=world_size)
                if str(problem) not in without]
    return ". And ".join(f"{problem.why}; {problem.remedy}" for problem in problems) or None
