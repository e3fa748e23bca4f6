"""Which passes a self-conditioned canvas takes: chosen by --draft-pass, or by what they cost.

    shared   [clean ; draft] and [canvas]           backwards of both, in which drafts have no gradient
    apart    [seen ; draft], without gradient, and [clean ; canvas]     one backward
    joint    [clean ; draft] and [canvas]           one backward, of [clean ; canvas]

Joint is the least work, and on a GPU is taken wherever it can be: it has to know what layers keep for their backward (transformer/
joint_backward.py), so nothing may be computed again, be elsewhere, or be another package's. Stages of a pipeline join the passes of their
own layers. On a CPU what it does more takes as long as what it spares.

Of the others: `seen` are the clean tokens that drafts see, which so go forward twice. In exchange the backward reads the experts' weights
once instead of twice. Where tokens are few that is more: 128 experts of 3 x 2816 x 704 numbers are 1.5 GB, which an H200 reads in 0.33 ms,
while 768 tokens go through the rest of the layer in 0.14 ms. That one backward starts half as many kernels comes on top, uncounted.

On a CPU weights are small and starting operations takes the time: a layer's of a backward as long as its products of some dozen tokens. And
drafts' rows have a backward there, of zeros (tensor_parallel/linear.py says why), which they do not have beforehand.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..config import ModelConfig, RunConfig
from ..config.checks_passes import is_possible
from ..diffusion.batch_plan import BatchPlan, Microbatch
from ..diffusion.inputs import PassOrder
from ..kernels.attention_tiles import suits_attention
from ..moe.experts import choose_product, grouped_linear
from ..transformer.small_attention import is_small
from .operations import causal_pairs, stack_operations

# Matrix operations in bf16 in the time of reading a byte: an H200 does 590 TFLOP/s in products of these widths, and reads 4.6 TB/s.
OPERATIONS_PER_BYTE = 128
BF16_BYTES = 2
# Matrix operations of one core in the time that a second backward's operations of a layer take to start: where a toy's orders take as long.
OPERATIONS_STARTED = 4 * 10**7


@dataclass(frozen=True)
class Share:
    """Of a rank: the part of each token's work, and the part of the experts' weights."""

    tokens: float = 1.0
    experts: float = 1.0


@dataclass(frozen=True)
class PassSizes:
    """Tokens of a microbatch: clean ones; seen int64 [N]: of each example with a draft, the clean ones before its last canvas; canvases;
    those of them that have a draft; of the longest example, and of a canvas."""

    clean: int
    seen: np.ndarray
    canvas: int
    drafts: int
    longest: int
    a_canvas: int

    @classmethod
    def of(cls, microbatch: Microbatch) -> PassSizes:
        """Of a planned microbatch."""
        examples = microbatch.examples
        drafted = [example for example in examples if example.has_draft and example.canvases]

        def canvas_tokens(of: Sequence) -> int:
            return sum(len(example.canvases) * example.fit.canvas_length for example in of)

        return cls(sum(example.fit.total for example in examples),
                   np.array([example.canvas_start(max(example.canvases)) for example in drafted], np.int64),
                   canvas_tokens(examples), canvas_tokens(drafted), max((example.fit.total for example in examples), default=0),
                   max((example.fit.canvas_length for example in examples), default=0))


def apart_costs_less(model: ModelConfig, sizes: PassSizes, share: Share = Share()) -> bool:  # noqa: B008 (immutable)
    """Whether drafts beforehand take less of a GPU's time, in bf16."""
    return sizes.drafts > 0 and _more_work_apart(model, sizes, share) < 0


def _more_work_apart(model: ModelConfig, sizes: PassSizes, share: Share) -> float:
    """What `apart` takes longer than `shared`, in matrix operations of that time."""
    a_token = stack_operations(model, tokens=1, full_pairs=0, sliding_pairs=0)
    weights = 3 * model.num_layers * model.num_experts * model.hidden_size * model.moe_ffn_hidden_size * share.experts
    reading = weights * BF16_BYTES * OPERATIONS_PER_BYTE

    def experts(tokens: int) -> float:
        """A pass forward, or back without weights' gradients."""
        return max(reading, tokens * a_token["experts"] * share.tokens) if tokens else 0.0

    seen, every, again = int(sizes.seen.sum()), sizes.clean + sizes.canvas, _again(model, sizes)
    beside_experts = (sum(again.values()) - again["experts"]) * share.tokens
    apart = experts(seen + sizes.drafts) + 2 * experts(every)
    shared = experts(every) + experts(every - sizes.drafts) + 2 * experts(sizes.drafts)
    return beside_experts + apart - shared


def _again(model: ModelConfig, sizes: PassSizes) -> dict[str, float]:
    """Matrix operations of the clean tokens that go forward twice."""
    return stack_operations(model, tokens=int(sizes.seen.sum()), full_pairs=causal_pairs(sizes.seen, None),
                            sliding_pairs=causal_pairs(sizes.seen, model.window_size))


def apart_costs_less_on_cpu(model: ModelConfig, sizes: PassSizes) -> bool:
    """Whether drafts beforehand take less of a core's time."""
    a_token = sum(stack_operations(model, tokens=1, full_pairs=0, sliding_pairs=0).values())
    again = sum(_again(model, sizes).values())
    return sizes.drafts > 0 and again < 2 * sizes.drafts * a_token + model.num_layers * OPERATIONS_STARTED


def order_of_passes(run: RunConfig, plan: BatchPlan, number: int, *, on_gpu: bool, can_join: bool) -> PassOrder:
    """The order of passes of every rank's microbatch `number`: ranks that share experts have to agree, so an order is taken where every
    rank that has drafts gains by it. What ranks send each other is not weighed: `apart` is one dispatch more forward and one less back.

    can_join: what `may_be_joint` says of the run.
    """
    wanted = run.training.draft_pass
    if wanted in ("shared", "apart"):
        return wanted
    every = [PassSizes.of(rank[number]) for rank in plan.microbatches]
    drafted = [own for own in every if own.drafts]
    if not drafted:
        return "shared"
    # Copies of a pipeline all run both loops, those without a draft too.
    joining = drafted if run.parallel.pipeline_model_parallel_size == 1 else every
    if can_join and wants_joint(run, on_gpu=on_gpu) and (on_gpu or all(is_short(own, run.model.window_size) for own in joining)):
        return "joint"
    if on_gpu:
        is_apart = all(chosen_apart(run, own) for own in drafted)
    else:
        is_apart = is_possible("apart", run) and all(apart_costs_less_on_cpu(run.model, own) for own in drafted)
    return "apart" if is_apart and wanted == "auto" else "shared"


def is_short(sizes: PassSizes, window: int) -> bool:
    """Whether on a CPU attention is products of short pieces, which keep rows alone if asked to; that of longer ones is not ours."""
    # Of a text that is longer than the window, sliding layers take bands (attention_work): half a window of queries, and what these see.
    bands = sizes.longest <= window or is_small(window, 2 * window, causal=False)
    return (bands and is_small(sizes.longest, sizes.longest, causal=True)
            and is_small(sizes.a_canvas, sizes.longest + sizes.a_canvas, causal=False))


def wants_joint(run: RunConfig, *, on_gpu: bool) -> bool:
    """Whether --draft-pass takes one backward where it can be had."""
    return run.training.draft_pass == "joint" or run.training.draft_pass == "auto" and on_gpu


def may_be_joint(run: RunConfig, device: torch.device) -> bool:
    """Whether the configuration lets both passes have one backward, and the device does: on a GPU what is joined is what the kernels for
    sm_90 and sm_100 keep (transformer/joint_backward.py). Asks the device, which a forked process cannot."""
    if not is_possible("joint", run):
        return False
    if device.type == "cpu":
        return True
    model, dtype = run.model, torch.bfloat16 if run.training.bf16 else torch.float32
    product = choose_product(dtype, device, model.hidden_size, model.moe_ffn_hidden_size, grouped=True)
    return product is grouped_linear and all(suits_attention(model.head_dim(layer), dtype, device) for layer in range(model.num_layers))


def choice_of_passes(run: RunConfig, device: torch.device) -> list[str]:
    """A line for the log on what --draft-pass auto takes on this device; none where there is nothing to choose."""
    if run.training.draft_pass != "auto" or not run.objective.decodes_twice:
        return []
    joint = wants_joint(run, on_gpu=device.type == "cuda") and may_be_joint(run, device)
    taken = "joint" if joint else "apart or shared, by what they cost" if is_possible("apart", run) else "shared"
    return [f"canvases that are decoded twice: --draft-pass {taken}"]


def chosen_apart(run: RunConfig, sizes: PassSizes) -> bool:
    """Whether --draft-pass auto takes `apart` for a microbatch of these sizes, on a GPU."""
    parallel = run.parallel
    if not (run.training.bf16 and is_possible("apart", run)):
        return False
    share = Share(1 / parallel.tensor_model_parallel_size, 1 / (parallel.expert_model_parallel_size * parallel.expert_tensor_parallel_size))
    return apart_costs_less(run.model, sizes, share)
