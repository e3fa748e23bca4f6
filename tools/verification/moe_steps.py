"""Steps of the toy model on two ranks that share experts, for the suite `moe`: what they exchange and what comes out."""
from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch

from megatron_dllm.config import MoEConfig, ObjectiveConfig, RunConfig, TrainingConfig, parse
from megatron_dllm.diffusion.batch_plan import RowRequest, fit_example, plan_batch
from megatron_dllm.diffusion.inputs import MicrobatchInputs
from megatron_dllm.diffusion.passes import PassOptions, microbatch_inputs
from megatron_dllm.diffusion.random import DrawKey, Stream
from megatron_dllm.diffusion.streams import build_streams
from megatron_dllm.models.diffusion_gemma.build import build_model
from megatron_dllm.parallel import Topology, create_context

LENGTHS = (((11, 37), (5, 2), (40, 16)), ((60, 64), (3, 9), (0, 41)))  # (prompt, response) of each rank's examples
SEQ_LENGTH = 128


@dataclass(frozen=True)
class Step:
    """How a step recomputes."""

    name: str
    granularity: str | None = None
    modules: tuple[str, ...] = ()
    replays: bool = True


STEPS = (
    Step("no recompute"),
    Step("full recompute, replay", "full"),
    Step("full recompute, no replay", "full", replays=False),
    Step("selective recompute of moe, replay", "selective", ("moe",)),
    Step("selective recompute of moe, no replay", "selective", ("moe",), replays=False),
)


@dataclass(frozen=True)
class StepOutcome:
    """digests: of the losses and each gradient, bit for bit; exchanges: of layouts; forward_dispatches: MoE calls of the forward."""

    digests: tuple[str, ...]
    exchanges: int
    forward_dispatches: int
    hits: int
    misses: int

    def equal_to(self, other: StepOutcome) -> list[bool]:
        return [a == b for a, b in zip(self.digests, other.digests, strict=True)]


def model_step(rank: int, dispatcher: str, step: Step) -> StepOutcome:
    """Forward and backward of one microbatch."""
    context = create_context(Topology(world=2, ep=2), rank=rank, device=torch.device("cpu"), sequence_parallel=False)
    run = RunConfig(
        model=parse(["--preset", "toy"]).model,
        training=TrainingConfig(recompute_granularity=step.granularity, recompute_modules=step.modules),
        moe=MoEConfig(moe_token_dispatcher_type=dispatcher, moe_recompute_replay=step.replays))
    model = build_model(run, context)
    with torch.no_grad():  # routing far from even: experts with most of the rows, and with none
        for block in model.layers.values():
            block.moe.router.weight *= 40
    inputs = microbatch(rank, run)
    context.log.clear()
    forwards = []
    hooks = [block.moe.router.register_forward_hook(lambda *_: forwards.append(1)) for block in model.layers.values()]
    terms = model(inputs)
    for hook in hooks:
        hook.remove()
    terms.total.backward()
    report = model.recompute.monitor.report()
    report.check(context)
    values = [terms.weighted.detach(), *(p.grad for p in model.parameters())]
    digests = tuple(hashlib.sha256(value.numpy().tobytes()).hexdigest() for value in values)
    return StepOutcome(digests, context.log.calls["layout_exchange", "ep"], len(forwards), report.hits, report.misses)


def microbatch(rank: int, run: RunConfig) -> MicrobatchInputs:
    """This rank's examples, some of them self-conditioned: both ranks draw the same coins, so that both take a second loop."""
    objective = ObjectiveConfig()
    for attempt in range(100):
        rows = [RowRequest([i], [DrawKey(attempt, Stream.TRAIN, 0, i, 0)],
                           [fit_example(*lengths, seq_length=SEQ_LENGTH, canvas_length=run.model.canvas_length)], [False])
                for i, lengths in enumerate(LENGTHS[rank])]
        plan = plan_batch(rows, objective, micro_batch_size=len(rows))
        examples = plan.microbatches[0][0].examples
        coins = [example.self_conditioned for example in examples]
        if any(coins) and not all(coins):
            break
    generator = np.random.default_rng(rank)
    raw = [generator.integers(3, run.model.vocab_size, e.fit.prompt + e.fit.response) for e in examples]
    streams = build_streams(plan.microbatches[0][0], raw, objective, plan.denominators, vocab_size=run.model.vocab_size,
                            fill_token=run.model.fill_token_id)
    return microbatch_inputs(streams, run.model, PassOptions(torch.float32))
