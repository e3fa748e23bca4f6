"""Adapters over ranks against one process (float64): losses, gradients of A and B, the norm."""
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from megatron_dllm.checkpoint.model_state import load_whole_tensors, named_tensors
from megatron_dllm.config import LoRAConfig, OptimizerConfig, ParallelConfig
from megatron_dllm.models.diffusion_gemma.lora import TARGETS, add_adapters
from megatron_dllm.models.diffusion_gemma.model import DiffusionGemma
from megatron_dllm.models.diffusion_gemma.stages import ModelPipeline
from megatron_dllm.parallel import ParallelContext, create_context
from megatron_dllm.pipeline import parse_layout
from megatron_dllm.pipeline.layout import layer_letters
from megatron_dllm.tensor_parallel.initialization import Constant, Initializer
from megatron_dllm.training.algorithms import sgd
from megatron_dllm.training.optimizer import MasterOptimizer
from megatron_dllm.training.step import forward_backward
from megatron_dllm.transformer.recompute import Recompute
from tests.parallel.pipeline_cases import CPU, PipelineCase, make_inputs, make_plan
from tests.unit.toy import toy_model

TOLERANCE = 1e-10
ALL = tuple(TARGETS)


@dataclass(frozen=True)
class Found:
    """Of one rank: the largest gradient difference by the largest gradient, its parameter; differences of loss and norm; gradients seen."""

    difference: float
    worst: str
    loss: float
    norm: float
    gradients: int


def give_values(model) -> None:
    """B away from zero."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("adapter.b"):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


def one_process(case: PipelineCase, plan, lora: LoRAConfig):
    case = replace(case, joint=False)
    model = toy_model(config=case.config)
    add_adapters(model, lora, Initializer(3, 0.1))
    give_values(model)
    loss = 0.0
    for rank, own in enumerate(plan.microbatches):
        for number in range(len(own)):
            terms = model(make_inputs(case, plan, rank, number, ParallelContext.single()))
            terms.total.backward()
            loss += terms.total.item()
    return model, loss, {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def compare(rank: int, case: PipelineCase, targets: tuple[str, ...]) -> Found:
    """One step against one process."""
    context, plan = create_context(case.topology, rank=rank, device=CPU, sequence_parallel=case.sequence_parallel), make_plan(case)
    lora = LoRAConfig(lora_rank=3, lora_alpha=6.0, lora_targets=targets, lora_dropout=0.3 * case.dropout)
    whole, loss, expected = one_process(case, plan, lora)
    layout = None
    if context.pp.size > 1:
        layout = parse_layout(case.layout, ranks=context.pp.size, layers=layer_letters(case.config.layer_types), mtp_depth=0)
    model = DiffusionGemma(case.config, context=context, init=Constant(0.0), dtype=torch.float64, recompute=Recompute(case.recompute),
                           part=layout.part(context.pp.rank) if layout else None)
    add_adapters(model, lora, Constant(0.0))
    load_whole_tensors(model, named_tensors(whole), "one process")
    optimizer = MasterOptimizer(model, OptimizerConfig(), context, distributed=case.distributed_optimizer, algorithm=sgd)
    inputs = [make_inputs(case, plan, context.dp.rank, number, context) for number in range(len(plan.microbatches[0]))]
    pipeline = None
    if layout:
        pipeline = ModelPipeline(model, layout, ParallelConfig(pipeline_model_parallel_size=context.pp.size), embedding_trained=False)
    terms = forward_backward(model, optimizer, inputs, pipeline)
    scale, worst, seen = max(g.abs().max().item() for g in expected.values()), (0.0, ""), 0
    for piece in optimizer.buckets.pieces():
        difference = (piece.gradient - piece.cut(expected[piece.name])).abs().max().item()
        worst, seen = max(worst, (difference / scale, piece.name)), seen + 1
    norm = np.sqrt(sum(g.square().sum().item() for g in expected.values()))
    return Found(*worst, abs(terms.total.item() - loss) / loss, abs(optimizer.grad_norm().item() - norm) / norm, seen)


def sizes(**of_axes) -> tuple[tuple[str, int], ...]:
    return tuple(of_axes.items())


CASES = {
    "tp2": PipelineCase(sizes(world=2, tp=2), ""),
    "tp2 sp": PipelineCase(sizes(world=2, tp=2), "", sequence_parallel=True),
    "tp2 sp, recompute": PipelineCase(sizes(world=2, tp=2), "", sequence_parallel=True, recompute=frozenset({"block"})),
    "tp4 sp (copied key heads), ep4": PipelineCase(sizes(world=4, tp=4, ep=4), "", sequence_parallel=True),
    "ep2": PipelineCase(sizes(world=2, ep=2), "", coins=("A1", "00"), recompute=frozenset({"moe"})),
    "ep2 etp2": PipelineCase(sizes(world=4, ep=2, etp=2), "", coins=("A", "1", "0", "0")),
    "cp2": PipelineCase(sizes(world=2, cp=2), "", coins=("A1",)),
    "dp2, distributed optimizer": PipelineCase(sizes(world=2), "", coins=("A1", "00"), distributed_optimizer=True),
    "pp2": PipelineCase(sizes(world=2, pp=2), "Et|ttL", coins=("A10",)),
    "pp2, joint": PipelineCase(sizes(world=2, pp=2), "Et|ttL", coins=("A10",), joint=True),
    "pp2, embedding alone first": PipelineCase(sizes(world=2, pp=2), "E|tttL", coins=("A10",)),
    "pp2 vpp2, full recompute": PipelineCase(sizes(world=2, pp=2), "E|t|t|tL", coins=("A100",), recompute=frozenset({"block"})),
    "tp2 sp, pp2": PipelineCase(sizes(world=4, tp=2, pp=2), "Et|ttL", coins=("A1",), sequence_parallel=True),
}
for name in ("tp2", "tp2 sp, recompute", "ep2", "cp2", "pp2 vpp2, full recompute"):
    CASES[f"{name}, dropout"] = replace(CASES[name], dropout=True)
QUICK = ("tp2 sp", "ep2 etp2", "pp2, embedding alone first", "tp2 sp, recompute, dropout")


@pytest.mark.parametrize("case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES])
def test_layout(world, case):
    is_short = CASES[case].dropout or CASES[case].joint
    targets = ("attention", "mlp") if is_short else ("experts", "mlp", "attention") if "alone" in case else ALL
    results = world.run(compare, CASES[case], targets, size=CASES[case].topology.world)
    for rank, found in enumerate(results):
        assert found.difference <= TOLERANCE and found.loss <= TOLERANCE and found.norm <= TOLERANCE, f"rank {rank}: {found}"
    assert sum(found.gradients for found in results) > 0


def test_an_adapter_of_one_layer_alone_reaches_the_first_stage(world):
    case = CASES["pp2"]
    for found in world.run(compare, case, ("router",), size=2):
        assert found.difference <= TOLERANCE and found.gradients > 0, found
