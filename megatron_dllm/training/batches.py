"""Global batches by number: which rows, the plan, this rank's microbatches as the model reads them; nothing is remembered in between."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch.utils.data import DataLoader, Dataset

from ..config import RunConfig
from ..context_parallel.layout import ContextSplit
from ..data.build import build_order
from ..data.order import Order
from ..data.source import ExampleSource
from ..diffusion.batch_plan import BatchPlan, RowRequest, fit_example, plan_batch
from ..diffusion.fill import SCORED_MULTIPLE, filled_up, filled_up_canvases
from ..diffusion.inputs import MicrobatchInputs, PassOrder
from ..diffusion.passes import PassOptions, microbatch_inputs
from ..diffusion.random import DrawKey, Stream
from ..diffusion.streams import build_streams
from ..parallel import ParallelContext
from ..transformer.packed_attention import packed_types
from ..transformer.token_pass import SequenceSplit
from .draft_pass import may_be_joint, order_of_passes
from .mistakes import is_told


@dataclass(frozen=True)
class Batch:
    """The plan of a whole global batch, and this rank's microbatches, made when asked for."""

    plan: BatchPlan
    maker: BatchMaker
    rank: int

    def microbatches(self) -> Iterator[MicrobatchInputs]:
        """This rank's microbatches, in order."""
        for number in range(len(self.plan.microbatches[self.rank])):
            yield self.maker.inputs(self.plan, self.rank, number)

    def describe(self, limit: int = 8) -> str:
        """Where the batch's examples come from, for messages."""
        examples = [example for rank in self.plan.microbatches for microbatch in rank for example in microbatch.examples]
        names = [f"{self.maker.source.describe(e.index)} (epoch {e.key.epoch})" for e in examples[:limit]]
        return ", ".join(names) + (f" and {len(examples) - limit} more" if len(examples) > limit else "")


@dataclass(frozen=True)
class BatchMaker:
    """Makes the batches of one source under one configuration."""

    run: RunConfig
    source: ExampleSource
    order: Order
    stream: Stream
    context: ParallelContext
    loss_dtype: torch.dtype = torch.float32

    @classmethod
    def of(cls, run: RunConfig, source: ExampleSource, stream: Stream, context: ParallelContext) -> BatchMaker:
        """Shuffled and packed for training; for an evaluation in the source's order, an example a row."""
        is_training, objective = stream is Stream.TRAIN, run.objective
        order = build_order(
            source, run.data if is_training else replace(run.data, packing=False), seed=run.training.seed, shuffle=is_training,
            canvas_length=objective.longest_canvas(run.model.canvas_length), all_canvases=objective.scores_all_canvases)
        return cls(run, source, order, stream, context)

    def batch(self, rows: Sequence[int], iteration: int) -> Batch:
        """The batch of these rows; `iteration` decides the canvas length where that has a schedule."""
        objective = self.run.objective
        plan = plan_batch([self._request(row, iteration) for row in rows], objective, micro_batch_size=self.run.training.micro_batch_size,
                          data_parallel_size=self.context.dp.size)
        if self.has_one_form and objective.self_conditioning_prob > 0:
            plan = plan.with_every_draft()
        return Batch(plan, self, self.context.dp.rank)

    @property
    def has_one_form(self) -> bool:
        """Whether what varies from microbatch to microbatch is filled up, canvases among it."""
        return self.stream is Stream.TRAIN and self.run.training.cuda_graph_canvas_multiple is not None

    def _request(self, number: int, iteration: int) -> RowRequest:
        row, data, training = self.order.row(number), self.run.data, self.run.training
        length = self.canvas_length(iteration)
        keys, fits = [], []
        for index in row.indices:
            sample, unit = self.source.keys[index]
            epoch = 0 if self.stream is Stream.EVALUATE else row.epoch
            keys.append(DrawKey(training.seed, self.stream, epoch, int(sample), int(unit)))
            prompt, response = self.source.lengths[index]
            fits.append(fit_example(int(prompt), int(response), seq_length=data.seq_length, canvas_length=length))
        return RowRequest(row.indices, keys, fits, [bool(self.source.truncated[index]) for index in row.indices])

    def canvas_length(self, iteration: int) -> int:
        """That of the objective's schedule, or the model's."""
        return self.run.objective.canvas_length_at(iteration, self.run.model.canvas_length)

    def inputs(self, plan: BatchPlan, rank: int, number: int) -> MicrobatchInputs:
        """Microbatch `number` of a data-parallel rank with its tokens read and corrupted, on the CPU."""
        objective, model, training = self.run.objective, self.run.model, self.run.training
        microbatch = plan.microbatches[rank][number]
        # Ranks that share experts dispatch together: a loop that one of them runs is run by all, with nothing in it where there is nothing.
        # So do the copies of a pipeline: then their ranks of one stage have one action list. An auxiliary loss sums the experts' load of
        # all ranks in each pass.
        sums_load = self.run.moe.moe_aux_loss_coeff > 0 and self.context.dp.size > 1
        together = self.context.ep.size * self.context.etp.size * self.context.pp.size > 1 or sums_load
        tokens = [self.source.tokens(example.index) for example in microbatch.examples]
        streams = build_streams(
            microbatch, tokens, objective, plan.denominators, vocab_size=model.vocab_size, fill_token=model.fill_token_id,
            dropout=self.run.lora.lora_dropout > 0)
        streams = filled_up(streams, training.cuda_graph_token_multiple, model.pad_token_id)
        if self.has_one_form:
            streams = filled_up_canvases(streams, training.cuda_graph_canvas_multiple, microbatch.examples[0].fit.canvas_length,
                                         model.pad_token_id, drafted=objective.self_conditioning_prob > 0)
        return microbatch_inputs(
            streams, model, self.pass_options, second_loop=together and plan.second_loop(number),
            # An evaluation has no backward, which is what another order would spare work in.
            passes=self._order_of_passes(plan, number) if self.stream is Stream.TRAIN else "shared")

    @cached_property
    def pass_options(self) -> PassOptions:
        """What all microbatches have in common."""
        objective, training, model = self.run.objective, self.run.training, self.run.model
        return PassOptions(
            dtype=self.loss_dtype, uniform_null=objective.has_uniform_null, leave_one_out=objective.is_leave_one_out,
            mtp_scale=objective.mtp_loss_scaling_factor, scored_multiple=min(training.cuda_graph_token_multiple, SCORED_MULTIPLE),
            one_form=self.has_one_form, packed=packed_types(training, model), split=SequenceSplit.of(self.context),
            context_split=ContextSplit.of(self.context, self.run.parallel, objective, model))

    @cached_property
    def can_join(self) -> bool:
        """Whether passes may have one backward; asks the device. ValueError where the flags ask for it and it cannot be."""
        can_join = may_be_joint(self.run, self.context.device)
        if self.run.training.draft_pass == "joint" and not can_join:
            raise ValueError(f"--draft-pass joint: on {self.context.device} layers are joined where our kernels for sm_90 and sm_100 "
                             "attend and multiply (--bf16, --moe-grouped-gemm, widths that are multiples of 8, heads of a power of two up "
                             "to 512); set --draft-pass auto")
        return can_join

    def _order_of_passes(self, plan: BatchPlan, number: int) -> PassOrder:
        return order_of_passes(self.run, plan, number, on_gpu=self.context.device.type == "cuda", can_join=self.can_join)


@dataclass(frozen=True)
class PreparedBatch:
    """A batch whose microbatches are ready, on the CPU."""

    batch: Batch
    inputs: tuple[MicrobatchInputs, ...]


class _Iterations(Dataset):
    """Iteration number -> (its plan, this rank's microbatches): what a loader's process computes and hands over; or the ValueError that is
    told to people, which torch's loader would wrap in a traceback.
    """

    def __init__(self, maker: BatchMaker):
        self.maker = maker

    def __getitem__(self, iteration: int) -> tuple[BatchPlan, tuple[MicrobatchInputs, ...]] | ValueError:
        size = self.maker.run.training.global_batch_size
        try:
            batch = self.maker.batch(range(iteration * size, (iteration + 1) * size), iteration)
            return batch.plan, tuple(batch.microbatches())
        except ValueError as error:
            if is_told(error):
                return error
            raise


def training_batches(maker: BatchMaker, *, start_iteration: int, iterations: int) -> Iterator[PreparedBatch]:
    """The batches of iterations start to `iterations`, made ahead by --num-workers processes (0: by the caller); the same in any case."""
    workers = maker.run.data.num_workers
    _ = maker.can_join  # a forked process may not ask the device
    loader = DataLoader(
        _Iterations(maker), batch_size=None, sampler=range(start_iteration, iterations), num_workers=workers,
        multiprocessing_context="fork" if workers else None)
    for made in loader:
        if isinstance(made, ValueError):
            raise made
        plan, inputs = made
        yield PreparedBatch(Batch(plan, maker, maker.context.dp.rank), inputs)
