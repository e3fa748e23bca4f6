"""The toy model over pipelines against one process: cases, and what a case finds on a rank."""
from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import numpy as np
import torch

from megatron_dllm.checkpoint.model_state import load_whole_tensors, named_tensors
from megatron_dllm.config import ModelConfig, ObjectiveConfig, OptimizerConfig, ParallelConfig
from megatron_dllm.context_parallel.layout import ContextSplit
from megatron_dllm.diffusion.batch_plan import BatchPlan, RowRequest, fit_example, plan_batch
from megatron_dllm.diffusion.fill import filled_up, filled_up_canvases
from megatron_dllm.diffusion.inputs import MicrobatchInputs
from megatron_dllm.diffusion.passes import PassOptions, microbatch_inputs
from megatron_dllm.diffusion.random import DrawKey, Stream
from megatron_dllm.diffusion.streams import build_streams
from megatron_dllm.models.diffusion_gemma.model import DiffusionGemma
from megatron_dllm.models.diffusion_gemma.stages import ModelPipeline
from megatron_dllm.parallel import ParallelContext, Topology, create_context
from megatron_dllm.pipeline import parse_layout
from megatron_dllm.pipeline.layout import layer_letters
from megatron_dllm.tensor_parallel.initialization import Constant
from megatron_dllm.training.algorithms import sgd
from megatron_dllm.training.evaluation import sum_terms
from megatron_dllm.training.optimizer import MasterOptimizer
from megatron_dllm.training.step import forward_backward
from megatron_dllm.transformer.recompute import Recompute
from megatron_dllm.transformer.token_pass import SequenceSplit
from tests.unit.toy import CONFIG, LENGTHS, toy_model, toy_tokens

CPU = torch.device("cpu")
LAYOUT_OF_LAYERS = {3: "sliding sliding full", 6: "sliding sliding full sliding sliding full"}
ALL, SOME, NONE = "AAAA", "A100", "0000"


@dataclass(frozen=True)
class PipelineCase:
    """`layout` over `sizes` (Topology's keywords). `coins`: for each data-parallel rank, of each microbatch: 0 no example is
    self-conditioned, 1 the first of its two, A both. one_form: filled up to one form, no draft being a uniform one. joint: both loops
    have one backward."""

    sizes: tuple[tuple[str, int], ...]
    layout: str
    coins: tuple[str, ...] = (SOME,)
    layers: int = 3
    sequence_parallel: bool = False
    recompute: frozenset[str] = frozenset()
    mhc: bool = False
    distributed_optimizer: bool = False
    linear: bool = False
    mtp: int = 0
    dropout: bool = False
    one_form: bool = False
    joint: bool = False

    @property
    def topology(self) -> Topology:
        return Topology(**dict(self.sizes))

    @property
    def config(self) -> ModelConfig:
        types = tuple(LAYOUT_OF_LAYERS[self.layers].split())
        if self.linear:
            types = ("linear", *types[1:])
        return dataclasses.replace(
            CONFIG, mtp_num_layers=self.mtp, num_layers=self.layers, layer_types=types, enable_mhc_connections=self.mhc,
            linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8)


@dataclass(frozen=True)
class Found:
    """Of one rank: the largest gradient difference by the largest gradient, its parameter, loss and norm differences, numbers seen."""

    difference: float
    worst: str
    loss: float
    norm: float
    evaluation: float
    gradients: int
    messages: int


def make_plan(case: PipelineCase) -> BatchPlan:
    """A plan of two examples a microbatch whose coins are those of the case."""
    ranks, microbatches = len(case.coins), len(case.coins[0])
    lengths = [LENGTHS[i % len(LENGTHS)] for i in range(2 * ranks * microbatches)]
    rows = [RowRequest([i], [DrawKey(4, Stream.TRAIN, 0, i, 0)], [fit_example(*pair, seq_length=128, canvas_length=CONFIG.canvas_length)],
                       [False]) for i, pair in enumerate(lengths)]
    plan = plan_batch(rows, ObjectiveConfig(), micro_batch_size=2, data_parallel_size=ranks)

    def tossed(microbatch, coin):
        marks = {"0": (False, False), "1": (True, False), "A": (True, True)}[coin]
        return dataclasses.replace(microbatch, rows=tuple(
            tuple(dataclasses.replace(example, self_conditioned=mark) for example in row)
            for row, mark in zip(microbatch.rows, marks, strict=True)))

    plan = dataclasses.replace(plan, microbatches=tuple(
        tuple(tossed(m, coin) for m, coin in zip(own, coins, strict=True))
        for own, coins in zip(plan.microbatches, case.coins, strict=True)))
    return plan.with_every_draft() if case.one_form else plan


def make_inputs(case: PipelineCase, plan: BatchPlan, rank: int, number: int, context: ParallelContext) -> MicrobatchInputs:
    config, objective = case.config, ObjectiveConfig()
    microbatch = plan.microbatches[rank][number]
    tokens = [toy_tokens(e.index, e.fit.prompt + e.fit.response) for e in microbatch.examples]
    streams = build_streams(
        microbatch, tokens, objective, plan.denominators, vocab_size=config.vocab_size, fill_token=config.fill_token_id,
        dropout=case.dropout)
    if case.one_form:
        streams = filled_up(streams, 64, config.pad_token_id)
        streams = filled_up_canvases(streams, 3, config.canvas_length, config.pad_token_id, drafted=True)
    options = PassOptions(
        torch.float64, one_form=case.one_form, uniform_null=case.one_form, split=SequenceSplit.of(context),
        context_split=ContextSplit.of(context, ParallelConfig(context_parallel_size=context.cp.size), objective, config))
    return microbatch_inputs(
        streams, config, options, passes="joint" if case.joint else "shared",
        second_loop=max(context.pp.size, context.ep.size, context.etp.size) > 1 and plan.second_loop(number))


@functools.lru_cache(maxsize=8)
def whole_model(config: ModelConfig) -> DiffusionGemma:
    """The model of one process, whose initial values are nowhere special."""
    return toy_model(config=config)


def one_process(case: PipelineCase, plan: BatchPlan) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the whole batch, a backward for each loop."""
    case = dataclasses.replace(case, joint=False)
    model = whole_model(case.config)
    model.zero_grad()
    loss = 0.0
    for rank, own in enumerate(plan.microbatches):
        for number in range(len(own)):
            terms = model(make_inputs(case, plan, rank, number, ParallelContext.single()))
            terms.total.backward()
            loss += terms.total.item()
    return loss, {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def compare(rank: int, case: PipelineCase, tamper=None) -> Found:
    """One step over the pipeline against one process; `tamper(model, context)` may plant a fault before it."""
    context = create_context(case.topology, rank=rank, device=CPU, sequence_parallel=case.sequence_parallel)
    plan = make_plan(case)
    loss, expected = one_process(case, plan)
    layout = parse_layout(case.layout, ranks=context.pp.size, layers=layer_letters(case.config.layer_types), mtp_depth=case.mtp)
    model = DiffusionGemma(case.config, context=context, init=Constant(0.0), dtype=torch.float64, recompute=Recompute(case.recompute),
                           part=layout.part(context.pp.rank))
    load_whole_tensors(model, named_tensors(whole_model(case.config)), "one process")
    if tamper is not None:
        tamper(model, context)
    pipeline = ModelPipeline(model, layout, ParallelConfig(pipeline_model_parallel_size=context.pp.size))
    inputs = [make_inputs(case, plan, context.dp.rank, number, context) for number in range(len(plan.microbatches[0]))]
    optimizer = MasterOptimizer(model, OptimizerConfig(), context, distributed=case.distributed_optimizer, algorithm=sgd)
    evaluated = sum_terms(pipeline.evaluate(inputs), context.dp_cp, context.pp)
    terms = forward_backward(model, optimizer, inputs, pipeline)
    scale, worst, seen = max(g.abs().max().item() for g in expected.values()), (0.0, ""), 0
    for piece in optimizer.buckets.pieces():
        placement = piece.placement
        flat = torch.zeros(placement.local_shape, dtype=torch.float64)
        placement.region(flat).copy_(placement.cut(expected[piece.name]))
        difference = (piece.gradient - flat.view(-1)[piece.start:piece.stop]).abs().max().item()
        worst, seen = max(worst, (difference / scale, piece.name)), seen + 1
    norm = np.sqrt(sum(g.square().sum().item() for g in expected.values()))
    return Found(*worst, abs(terms.total.item() - loss) / loss, abs(optimizer.grad_norm().item() - norm) / norm,
                 abs(evaluated.total.item() - loss) / loss, seen, context.log.total("send", "pp")[0])


def forget_the_tie(model: DiffusionGemma, context: ParallelContext) -> None:
    """As if the embeddings of the first and the last stage were two parameters."""
    for parameter in model.parameters():
        object.__setattr__(parameter.placement, "tied_to", None)
