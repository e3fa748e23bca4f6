"""The training run: build, resume, iterate, evaluate, save, and leave a word about how it ended."""
from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..checkpoint import store
from ..config import RunConfig, to_arguments_text, to_flags
from ..data.build import Sources, build_sources, build_tokenizer
from ..data.tokenizers import Tokenizer
from ..diffusion.random import Stream
from ..models.diffusion_gemma.build import build_model
from ..models.diffusion_gemma.model import DiffusionGemma
from ..models.diffusion_gemma.stages import ModelPipeline, build_pipeline, over_stages
from ..moe.balance import balance_metrics
from ..parallel import FirstRankFirst, ParallelContext, Watchdog, communication
from ..parallel.initialize import shares_device
from ..tensor_parallel.fused_gradient import weight_gradients
from ..transformer.core_attention import attention_backends
from ..transformer_engine import choices
from . import out_of_memory
from .batches import BatchMaker, PreparedBatch, training_batches
from .draft_pass import choice_of_passes
from .evaluation import Beat, check_scoring, evaluate, no_beat, sample_generations, score_answers
from .folders import check_folders
from .graphs import GraphedMicrobatches, graphed
from .logging import RunLogger
from .mistakes import TrainingFailed
from .norm_spikes import NormSpikes
from .operations import TokenCounts, step_operations
from .optimizer import MasterOptimizer
from .profiling import StepProfiler
from .rank_times import RankTimes
from .saving import Restored, Saver, restore
from .schedules import LearningRateSchedule
from .signals import SignalWatcher, StopPolicy, decode_reason, encode_reason
from .status import RunStatus
from .step import StepResult, loss_metrics, replay_metrics, train_step
from .throughput import Throughput, describe_peak, memory_metrics, peak_of

LOGGED_GENERATIONS = 2
# Of the process groups' timeout: how long a rank may stand still before it writes its stacks and ends.
PATIENCE = 0.9


@dataclass(frozen=True)
class Watch:
    """beat: to be called on progress; standing: where the ranks of a pipeline stand, a line each (rank 0 knows of all)."""

    beat: Beat
    standing: Callable[[], Sequence[str]]


@dataclass
class SkippedSteps:
    """Steps whose update was not made: in a row until now, and in all."""

    in_a_row: int = 0
    in_all: int = 0


@dataclass
class Running:
    """What is there while a run trains: what it writes, watches and counts. `mark`: when the last step ended."""

    status: RunStatus
    logger: RunLogger
    watch: Watch
    signals: SignalWatcher
    policy: StopPolicy
    profiler: StepProfiler
    graphs: GraphedMicrobatches | None
    saver: Saver
    meter: Throughput
    spikes: NormSpikes
    ranks: RankTimes
    skipped: SkippedSteps = field(default_factory=SkippedSteps)
    mark: float = field(default_factory=time.perf_counter)

    def reason_to_stop(self, iteration: int) -> str | None:
        """This rank's, after so many iterations."""
        return self.policy.reason(iteration, now=time.monotonic(), signal_name=self.signals.requested)


@dataclass(frozen=True)
class Trainer:
    """Everything that a run holds. Immutable: what changes is in the model, the optimizer and the files."""

    run: RunConfig
    context: ParallelContext
    tokenizer: Tokenizer
    sources: Sources
    train: BatchMaker
    valid: BatchMaker | None
    model: DiffusionGemma
    pipeline: ModelPipeline | None
    optimizer: MasterOptimizer
    schedule: LearningRateSchedule
    total_iterations: int
    run_dir: Path | None

    @classmethod
    def build(cls, run: RunConfig, context: ParallelContext) -> Trainer:
        """Prepare data, then model and optimizer; ValueError for whatever the user can mend, TrainingFailed where memory does not do."""
        try:
            return cls._build(run, context)
        except torch.OutOfMemoryError as error:
            raise TrainingFailed(out_of_memory.report(error, run, context)) from error

    @classmethod
    def _build(cls, run: RunConfig, context: ParallelContext) -> Trainer:
        tokenizer = build_tokenizer(run.data, run.model.eos_token_id)
        # One rank makes what the cache lacks; the others find it there.
        with FirstRankFirst(context.world, "prepares the data"):
            if context.world.rank == 0:
                check_folders(run)
            sources = build_sources(run.data, run.model, tokenizer, seed=run.training.seed)
        train = BatchMaker.of(run, sources.train, Stream.TRAIN, context)
        evaluates = run.evaluation.eval_interval and sources.valid
        valid = BatchMaker.of(run, sources.valid, Stream.EVALUATE, context) if evaluates else None
        if valid and run.evaluation.eval_generations is not None:
            check_scoring(run, sources.valid)
        total = num_iterations(run, train)
        model = build_model(run, context)
        folder = run.logging.run_dir or run.checkpoint.save
        optimizer = MasterOptimizer(model, run.optimizer, context, distributed=run.parallel.use_distributed_optimizer)
        if run.parallel.overlap_param_gather:
            optimizer.gather_beside_forward(model.layers.values())
        return cls(run, context, tokenizer, sources, train, valid, model, build_pipeline(model, run), optimizer,
                   LearningRateSchedule.from_config(run.optimizer, total), total, Path(folder) if folder else None)

    @property
    def has_adapters(self) -> bool:
        """Whether adapters are trained beside a frozen model."""
        return self.run.lora.lora_rank is not None

    def fit(self) -> None:
        """Train to the last iteration, or until a stop is asked for; TrainingFailed where the run cannot go on, or exports are missing."""
        try:
            self._fit()
        except torch.OutOfMemoryError as error:
            raise TrainingFailed(out_of_memory.report(error, self.run, self.context, self.model, self.optimizer)) from error

    def _fit(self) -> None:
        restored = restore(self)
        iteration = restored.iteration
        with self._running(restored) as running:
            running.ranks.restart()
            for prepared in training_batches(self.train, start_iteration=iteration, iterations=self.total_iterations):
                self._iterate(prepared, iteration, running)
                iteration += 1
                reason = agree(running.reason_to_stop(iteration), self.context)
                if reason and iteration < self.total_iterations:
                    break
                running.ranks.restart()
            else:
                reason = None
            running.saver.finish(iteration, reason)
        if running.saver.exporter.failed:
            kept = f"its checkpoint is {running.saver.saved}" if running.saver.saved else "without a checkpoint, since there is no --save"
            raise TrainingFailed(f"iteration {iteration} is done, {kept}; {running.saver.exporter.summary()}")

    @contextmanager
    def _running(self, restored: Restored) -> Iterator[Running]:
        """What a run writes, watches and counts while it trains."""
        rank, training, start = self.context.world.rank, self.run.training, restored.iteration
        with (RunStatus(self.run_dir, rank=rank, total_iterations=self.total_iterations, iteration=start,
                        checkpoint=restored.checkpoint) as status,
              RunLogger(self.run_dir, self.run.logging, rank=rank, total_iterations=self.total_iterations, resumed_iteration=start,
                        arguments=to_flags(self.run)) as logger,
              self._watch(status) as watch,
              SignalWatcher(exit_signal=training.exit_signal,
                            on_request=lambda name: logger.message("\n".join(
                                [f"{name}: finishing this step, then saving and stopping", *watch.standing()])),
                            on_abort=lambda: status.failed("interrupted twice")) as signals,
              StepProfiler(training, self.run_dir, rank=rank, device=self.context.device) as profiler):
            self._announce(logger, start)
            self._write_arguments()
            graphs = None
            if training.cuda_graph_impl == "local":
                graphs = graphed(self.model, limit=training.cuda_graph_limit, message=logger.message, pipeline=self.pipeline,
                                 optimizer=self.optimizer, sums_load=self.run.moe.moe_aux_loss_coeff > 0)
            saver = Saver(self, logger, status, restored.base, watch.beat)
            meter = Throughput(num_devices=self.context.world.size, peak=self._peak(), with_operations=self.run.logging.log_throughput)
            policy = StopPolicy(training.exit_interval, training.exit_duration_in_mins, time.monotonic())
            yield Running(status, logger, watch, signals, policy, profiler, graphs, saver, meter,
                          NormSpikes(self.run.logging.log_grad_norm_spike), RankTimes(self.context))

    def _iterate(self, prepared: PreparedBatch, done: int, running: Running) -> None:
        """The step after so many `done` ones, and what is due after it."""
        logger, iteration = running.logger, done + 1
        running.profiler.before_step(done)
        self.model.train()
        result = train_step(
            self.model, self.optimizer, prepared.inputs, self.schedule.at(done), pipeline=self.pipeline, graphs=running.graphs,
            count_zeros=self.run.logging.log_num_zeros_in_grad, after_backward=running.ranks.after_backward)
        self._measure(prepared, running)
        self._note_skipped(result, prepared, iteration, running)
        if spike := running.spikes.note(iteration, result.grad_norm):
            logger.message(spike)
        running.watch.beat(f"iteration {iteration}")
        running.status.progress(iteration)
        self._report(iteration, result, running)
        self._evaluate(iteration, running)
        running.saver.after(iteration)

    def _measure(self, prepared: PreparedBatch, running: Running) -> None:
        """Count the step and the time since the one before, waiting for data included."""
        tokens = TokenCounts.of(prepared.batch.plan, self.run.objective)
        operations = step_operations(
            self.run.model, tokens, recompute=self.run.training.recompute_granularity,
            recompute_modules=self.run.training.recompute_modules, frozen=self.has_adapters)
        since, running.mark = running.mark, time.perf_counter()
        running.meter.add(running.mark - since, tokens, operations)

    def _note_skipped(self, result: StepResult, prepared: PreparedBatch, iteration: int, running: Running) -> None:
        """Report an update that was not made; TrainingFailed when there are too many in a row."""
        skipped = running.skipped
        if result.is_finite:
            skipped.in_a_row = 0
            return
        skipped.in_a_row, skipped.in_all = skipped.in_a_row + 1, skipped.in_all + 1
        text = (f"iteration {iteration}: loss {result.loss}, gradient norm {result.grad_norm}: the update is skipped. "
                f"Its examples: {prepared.batch.describe()}")
        running.logger.message(text)
        limit = self.run.training.max_skipped_steps
        if skipped.in_a_row >= limit:
            raise TrainingFailed(
                f"{text}. {skipped.in_a_row} in a row: stopping (--max-skipped-steps {limit}); weights are those before them")

    def _report(self, iteration: int, result: StepResult, running: Running) -> None:
        """Log the metrics since the last time, at the first and last iteration and every --log-interval; else move the progress bar.

        Every rank calls it: routers' figures and ranks' times are exchanged.
        """
        if iteration % self.run.logging.log_interval and iteration not in (1, self.total_iterations):
            running.logger.advance(iteration)
            return
        routing = balance_metrics(self.model.routing.drain(), self.context)
        if self.pipeline is not None:
            routing = over_stages(routing, self.context.pp)
        running.logger.log(iteration, {
            "consumed_samples": iteration * self.run.training.global_batch_size, "learning_rate": self.schedule.at(iteration - 1),
            **loss_metrics(result.terms), "grad_norm": result.grad_norm, "skipped": running.skipped.in_all,
            **({} if result.num_zeros is None else {"num_zeros": result.num_zeros}), **replay_metrics(result.replay),
            **routing, **running.meter.drain(), **running.ranks.drain(),
            **memory_metrics(self.context.device)})

    def _evaluate(self, iteration: int, running: Running) -> None:
        """Every --eval-interval and at the last iteration: losses on held-out rows, answers and their scores if asked for, samples for the
        log, and the best model so far kept."""
        evaluation, logger, beat = self.run.evaluation, running.logger, running.watch.beat
        if self.valid is None or (iteration % evaluation.eval_interval and iteration != self.total_iterations):
            return
        self.model.eval()
        self.optimizer.finish_gathers()
        rows = evaluation.eval_iters * self.run.training.global_batch_size
        metrics = evaluate(self.model, self.valid, rows, self.pipeline, beat)
        if evaluation.eval_generations is not None:
            metrics |= score_answers(self.model, self.run, self.sources.valid, self.tokenizer, beat)
        logger.log_evaluation(iteration, metrics)
        beat(f"the evaluation after iteration {iteration}")
        # No rank of a pipeline has the whole model that generation needs.
        if self.run.objective.has_canvases and self.pipeline is None:
            for sample in sample_generations(self.model, self.run, self.sources.valid, self.tokenizer, LOGGED_GENERATIONS):
                logger.log_generation(iteration, sample.prompt, sample.generated)
        running.saver.after_evaluation(iteration, metrics)

    @contextmanager
    def _watch(self, status: RunStatus) -> Iterator[Watch]:
        """Among several processes one that waits for a lost one would wait in silence."""
        if self.context.world.size == 1:
            yield Watch(no_beat, tuple)
            return
        seconds = PATIENCE * 60 * self.run.parallel.distributed_timeout_minutes
        with ExitStack() as stack:
            standing = tuple if self.pipeline is None else stack.enter_context(self.pipeline.board()).lines
            watchdog = stack.enter_context(
                Watchdog(self.context.log, rank=self.context.world.rank, seconds=seconds, standing=standing, tell=status.failed))
            try:
                yield Watch(watchdog.beat, standing)
            except RuntimeError as error:  # such as a transfer whose other end is gone
                told = () if isinstance(error, TrainingFailed) else (status.where_it_was_lost(),)
                sys.stderr.write("".join(f"{line}\n" for line in (*standing(), *told)))
                raise

    def _peak(self):
        return None if shares_device(self.context) else peak_of(self.context.device, peak_tflops=self.run.logging.peak_tflops)

    def _announce(self, logger: RunLogger, start: int) -> None:
        device, trainable = self.context.device, self.optimizer.num_trained
        total = sum(p.numel() for p in self.model.parameters())
        if self.context.world.size > 1:
            logger.message(f"{self.context.world.size} processes; parameters are those of rank 0: {describe_layout(self.context)}")
        logger.message(f"device: {device}; {describe_peak(self._peak(), str(device), shared=shares_device(self.context))}")
        logger.message(f"model: {total:,} parameters, {trainable:,} trained, computing in {str(self.model.dtype).removeprefix('torch.')}")
        for block in list(self.model.layers.values())[:1]:
            logger.message(
                f"experts: {self.run.moe.dispatcher} over ep {self.context.ep.size}, etp {self.context.etp.size}; "
                f"products by {block.moe.experts.backend}, routers by {block.moe.router.backend}")
        if not choices(self.run):  # which say it too
            for part, backend in attention_backends(self.run.model, self.model.dtype, device).items():
                logger.message(f"{part}: {backend}")
        for choice in (*choices(self.run), *choice_of_passes(self.run, device)):
            logger.message(str(choice))
        if self.run.training.gradient_accumulation_fusion:
            logger.message(f"weight gradients of linear layers: added to fp32 by {weight_gradients(device).name}")
        logger.message(f"data: {len(self.sources.train):,} training examples; iterations {start} to {self.total_iterations}")

    def _write_arguments(self) -> None:
        """args.txt, from which the run can be started again."""
        if self.run_dir is not None and self.context.world.rank == 0:
            store.write_text(self.run_dir / store.ARGUMENTS, to_arguments_text(self.run))


def barrier(context: ParallelContext) -> None:
    """Wait until every rank of the world has come here."""
    communication.all_reduce(torch.zeros((), device=context.device), context.world)


def agree(reason: str | None, context: ParallelContext) -> str | None:
    """Why the ranks stop: of the reasons that any of them has, the one with the largest code."""
    code = torch.tensor(encode_reason(reason), device=context.device)
    return decode_reason(int(communication.all_reduce(code, context.world, "max").item()))


def describe_layout(context: ParallelContext) -> str:
    """The sizes that are not 1: "tp 2 (sequence parallel), dp 4"."""
    note = " (sequence parallel)" if context.sequence_parallel else ""
    return ", ".join(f"{axis} {size}{note if axis == 'tp' else ''}" for axis, size in context.sizes.items() if size > 1)


def num_iterations(run: RunConfig, train: BatchMaker) -> int:
    """Optimizer steps of the run, from whichever of --train-iters, --train-samples and --num-epochs is given."""
    training = run.training
    if training.train_iters is not None:
        return training.train_iters
    rows = training.train_samples if training.train_samples is not None else train.order.rows_before(training.num_epochs)
    iterations = rows // training.global_batch_size
    if iterations == 0:
        raise ValueError(f"{rows} rows are fewer than one batch of --global-batch-size {training.global_batch_size}; "
                         + (f"set it to at most {rows}, or --num-epochs to more" if rows else "give more data"))
    return iterations
