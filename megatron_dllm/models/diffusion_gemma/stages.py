"""DiffusionGemma over the ranks of a pipeline: what each virtual stage computes, and a step's microbatches through all of them."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from ...config import ParallelConfig, RunConfig
from ...diffusion.inputs import MicrobatchInputs, to_device
from ...diffusion.losses import NUM_GROUPS, LossTerms, loss_terms
from ...parallel import Group, ParallelContext
from ...pipeline import EdgeShapes, Pipeline, Schedule, Stage, StageLayout, build_schedule
from ...pipeline.executor import PipelineExecutor
from ...pipeline.layout import choose_layout, layer_letters
from ...pipeline.p2p import PointToPoint
from ...pipeline.progress import ProgressBoard
from ...pipeline.schedules import legal_groups
from ...pipeline.stage import StageOutput, new_node
from ...pipeline.timing import layout_costs
from ...transformer.joint_backward import grafted
from ...transformer.token_pass import TokenPass
from .kept_pass import Contexts, KeptPass
from .model import DiffusionGemma

# Ticks of a forward that schedules are made for; only their proportions matter, and only to the order of actions.
LAYER_TICKS, EMBEDDING_TICKS, LOSS_TICKS = 10, 1, 10


@dataclass(frozen=True)
class ModelStage:
    """One virtual stage of a model part."""

    model: DiffusionGemma
    stage: Stage

    def __call__(self, inputs: MicrobatchInputs, loop: int, received: Tensor | None, earlier: Contexts | _FirstLoop | None) -> StageOutput:
        """See PipelineStage. Loop 0 is the first pass, loop 1 the second; `report` is the pass's LossTerms. Where both loops have one
        backward (`joint`), what loop 1 reads of loop 0 is a _FirstLoop."""
        if inputs.joint is not None:
            return self._first(inputs, received) if earlier is None else self._second(inputs, received, earlier)
        model, token_pass = self.model, inputs.second_pass if loop else inputs.first_pass
        if not self.stage.letters:
            return StageOutput(hidden=new_node(received))
        x = received
        if self.stage.has_embedding:
            x = model.expand(model.enter_again(inputs, received) if loop else model.enter(inputs))
        x, contexts = model.run_blocks(x, self.stage.layers, token_pass, earlier)
        if not self.stage.has_loss:
            return StageOutput(hidden=x, contexts=contexts)
        hidden = model.whole(model.leave(x), token_pass)
        terms = loss_terms(model.cross_entropy, hidden, inputs.second_scored) if loop else model.first_terms(hidden, inputs)
        is_draft = loop == 0 and inputs.second_pass is not None
        signal = model.draft_signal(hidden, inputs) if is_draft else None
        return StageOutput(loss=terms.total, soft_embedding=signal, contexts=contexts, report=terms.detach())

    def _first(self, inputs: MicrobatchInputs, received: Tensor | None) -> StageOutput:
        """Loop 0 where both loops have one backward; nothing is scored yet."""
        model = self.model
        if self.stage.has_embedding:
            with torch.no_grad():
                embedded = model.embed(torch.cat([inputs.clean.tokens, inputs.canvas.tokens]))
            leaf = model.joint_leaf(embedded, inputs)
        else:
            leaf = received.detach().requires_grad_(received.requires_grad)
        first = KeptPass.of(self._layers, leaf, inputs.first_pass)
        kept = _FirstLoop(received, first)
        if not self.stage.has_loss:
            return StageOutput(hidden=first.result, contexts=kept)
        return StageOutput(soft_embedding=model.joint_signal(first, inputs.joint), contexts=kept)

    def _second(self, inputs: MicrobatchInputs, received: Tensor, earlier: _FirstLoop) -> StageOutput:
        """Loop 1 where both loops have one backward, which begins at what this gives."""
        model, first, joint = self.model, earlier.kept_pass, inputs.joint
        entered, again = earlier.received, received
        if self.stage.has_embedding:
            entered = model.enter(inputs, signal=model.of_all_canvases(received, joint.rows, inputs))
            again = joint.places.take(entered.detach())
        if not inputs.second_pass.num_tokens:
            return self._without_second(inputs, first, entered, again)
        second = KeptPass.of(self._layers, again.detach().requires_grad_(first.leaf.requires_grad), inputs.second_pass, first.contexts)
        if not self.stage.has_loss:
            return StageOutput(hidden=second.result.detach(), joined=first.joined(second, joint.places, entered))
        first.put(second, joint.places)
        terms = model.first_terms(first.joined(second, joint.places, entered), inputs)
        return StageOutput(loss=terms.total, report=terms.detach())

    def _without_second(self, inputs: MicrobatchInputs, first: KeptPass, entered: Tensor, nothing: Tensor) -> StageOutput:
        """The same where only other ranks' microbatches have drafts: the backward is the first pass's own."""
        joined = grafted(entered, first.leaf, first.result)
        if not self.stage.has_loss:
            return StageOutput(hidden=self.model.expand(nothing) if self.stage.has_embedding else new_node(nothing), joined=joined)
        terms = self.model.first_terms(joined, inputs)
        return StageOutput(loss=terms.total, report=terms.detach())

    def _layers(self, x: Tensor, token_pass: TokenPass, earlier: Contexts | None) -> tuple[Tensor, Contexts]:
        """Ours, between what enters the stage and what leaves it."""
        stage, model = self.stage, self.model
        x, contexts = model.run_blocks(model.expand(x) if stage.has_embedding else x, stage.layers, token_pass, earlier)
        if stage.has_loss:
            return model.leave(x), contexts
        return x if stage.layers else new_node(x), contexts


@dataclass(frozen=True)
class _FirstLoop:
    """What loop 0 leaves for loop 1 where both have one backward."""

    received: Tensor | None
    kept_pass: KeptPass


class ModelPipeline:
    """Runs a global batch's microbatches through the stages, of which this rank has `model`.

    `embedding_trained`: whether any rank's embedding asks for a gradient; the ranks between those that have it must know too.
    """

    def __init__(self, model: DiffusionGemma, layout: StageLayout, parallel: ParallelConfig, *, embedding_trained: bool = True):
        self.model, self.layout, self.context, self.embedding_trained = model, layout, model.context, embedding_trained
        self.group, self.overlap = parallel.microbatch_group_size_per_virtual_pipeline_stage, parallel.overlap_p2p_communication
        stages = [ModelStage(model, stage) for stage in layout.on_rank(self.context.pp.rank)]
        transport = PointToPoint(self.context.pp, parallel.batch_p2p_communication)
        self.executor = PipelineExecutor(stages, transport, self.context.device)
        self.schedule = lru_cache(maxsize=64)(self._schedule)

    def board(self) -> ProgressBoard:
        """What tells where the ranks stand, while it is entered."""
        world, stages = self.context.world, self.layout.on_rank(self.context.pp.rank)
        name = f"pipeline rank {self.context.pp.rank} ({' | '.join(stage.letters or 'empty' for stage in stages)})"
        return ProgressBoard(self.executor.progress, rank=world.rank, ranks=world.size, stage=name)

    def train(self, microbatches: Sequence[MicrobatchInputs]) -> LossTerms:
        """Forward and backward of every microbatch; the sum of the losses on the last rank, zeros elsewhere."""
        return self._run(microbatches, forward_only=False)

    def evaluate(self, microbatches: Sequence[MicrobatchInputs]) -> LossTerms:
        """The same without backward."""
        return self._run(microbatches, forward_only=True)

    def _run(self, microbatches: Sequence[MicrobatchInputs], *, forward_only: bool) -> LossTerms:
        count = len(microbatches)
        inputs = [to_device(microbatch, self.context.device) for microbatch in microbatches]
        if forward_only and self.layout.chunks > 1:
            # An evaluation may have fewer than the schedule needs; what the others give is left out.
            inputs += [inputs[-1]] * (self.context.pp.size - count)
        schedule = self.schedule(tuple(microbatch.second_pass is not None for microbatch in inputs),
                                 tuple(microbatch.joint is not None for microbatch in inputs), forward_only)
        total = no_terms(self.context)
        for number, _, terms in self.executor.run(schedule, inputs, self._shapes(inputs)):
            if number < count:
                total = total + terms
        return total

    def _schedule(self, self_conditioned: tuple[bool, ...], joint: tuple[bool, ...], forward_only: bool) -> Schedule:
        pipeline = Pipeline(self.layout.ranks, self.layout.chunks, self_conditioned, embedding_trained=self.embedding_trained,
                            forward_only=forward_only, joint=joint)
        costs = layout_costs(self.layout, layer=LAYER_TICKS, embedding=EMBEDDING_TICKS, loss=LOSS_TICKS)
        legal = legal_groups(ranks=pipeline.ranks, chunks=pipeline.chunks, microbatches=pipeline.microbatches)
        # The flag is checked against the training batches, of which evaluations are not.
        group = legal[0] if self.group is None or forward_only else self.group
        return build_schedule(pipeline, group=group, costs=costs, overlap=self.overlap)

    def _shapes(self, inputs: Sequence[MicrobatchInputs]) -> EdgeShapes:
        config = self.model.config
        tokens = tuple((m.first_pass.num_own, 0 if m.second_pass is None else m.second_pass.num_own) for m in inputs)
        return EdgeShapes(config.hidden_size, tokens, config.num_residual_streams, str(self.model.dtype).removeprefix("torch."))


def over_stages(metrics: Mapping[str, float], pp: Group) -> dict[str, float]:
    """The metrics of all stages' layers, on every rank of the pipeline; those of one name (losses of all layers) are added up."""
    found: list[dict[str, float]] = [{} for _ in range(pp.size)]
    dist.all_gather_object(found, dict(metrics), group=pp.handle)
    merged: dict[str, float] = {}
    for own in found:
        for name, value in own.items():
            merged[name] = merged.get(name, 0.0) + value
    return merged


def no_terms(context: ParallelContext) -> LossTerms:
    """Losses of nothing."""
    total, *others = (torch.zeros(shape, dtype=torch.float64, device=context.device) for shape in ((), *[(NUM_GROUPS,)] * 4))
    return LossTerms(total, *others)


def model_layout(run: RunConfig) -> StageLayout:
    """The stages that the flags ask for; ValueError where the layers do not fit."""
    parallel = run.parallel
    return choose_layout(
        parallel.pipeline_model_parallel_layout, layers=layer_letters(run.model.layer_types), ranks=parallel.pipeline_model_parallel_size,
        layers_per_virtual_stage=parallel.num_layers_per_virtual_pipeline_stage,
        account_for_embedding=parallel.account_for_embedding_in_pipeline_split,
        account_for_loss=parallel.account_for_loss_in_pipeline_split, mtp_depth=run.model.mtp_num_layers)


def build_pipeline(model: DiffusionGemma, run: RunConfig) -> ModelPipeline | None:
    """The pipeline that a run's model part belongs to; None for a model that is not cut."""
    if run.parallel.pipeline_model_parallel_size == 1:
        return None
    return ModelPipeline(model, model_layout(run), run.parallel, embedding_trained=run.lora.lora_rank is None)
