"""How long training runs, in what batches, and on what."""

from dataclasses import dataclass
from typing import Literal

from megatron_dllm.config.flags import flag


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Training"""

    micro_batch_size: int = flag("Rows that go through the model at once on each data-parallel rank.", 1)
    global_batch_size: int = flag("Rows of one optimizer step, over all ranks and accumulation steps.", 8)
    train_iters: int | None = flag("Optimizer steps to train for.", None)
    train_samples: int | None = flag("Rows to train for, instead of --train-iters.", None)
    num_epochs: int | None = flag("Passes over the data to train for, instead of --train-iters.", None)
    seed: int = flag("Seed of every draw: initial weights, data order, noise.", 1234)
    use_cpu_initialization: bool = flag(
        "Draw initial weights on the CPU, alike on every kind of device; --no-use-cpu-initialization draws other ones on the GPU, where a "
        "billion of them takes no seconds.",
        True,
    )
    device: Literal["auto", "cpu", "cuda"] = flag("Where to run; auto: CUDA where torch sees a device, else the CPU.", "auto")
    gdn_kernel_backend: Literal["torch", "fla"] = flag(
        "What computes the gated delta rule of linear layers: plain torch, or the kernels of the package flash-linear-attention.", "torch"
    )
    transformer_impl: Literal["local", "transformer_engine"] = flag(
        "What computes linear layers and the norms that stand alone: torch and our kernels, or the package Transformer Engine (on CUDA, "
        "with --bf16). What it cannot do, or does no better, stays as it is; the log tells what computes each part, and why.",
        "local",
    )
    attention_backend: Literal["local", "transformer_engine"] = flag(
        "What computes attention in training: ours, in one launch for clean tokens and canvases, or Transformer Engine's (cuDNN), which "
        "has heads up to 256, takes both apart and keeps the host longer; wider heads stay ours.",
        "local",
    )
    rotary_backend: Literal["local", "transformer_engine"] = flag(
        "What turns queries and keys by their positions: our kernel, which norms them too, or Transformer Engine's, after its norm.",
        "local",
    )
    cross_entropy_fusion_impl: Literal["native", "te"] = flag(
        "What computes the cross entropy of a chunk of logits, and its gradient: our kernel, which does the soft cap too, or Transformer "
        "Engine's, for which the capped logits are held beside the others.",
        "native",
    )
    gradient_accumulation_fusion: bool = flag(
        "Add the weight gradients of linear layers to their fp32 buffers in the product that makes them, by apex where it is installed and "
        "else by torch, instead of in bf16 first. Experts and embedding do so in any case.",
        False,
    )
    fp8_format: Literal["e4m3", "hybrid"] | None = flag(
        "Multiply the matrices of linear layers, and of experts under --moe-grouped-gemm-backend transformer_engine, in FP8: e4m3, or e5m2 "
        "for gradients (hybrid). Masters, weights, norms, router, embedding and losses stay as they are.",
        None,
    )
    fp8_recipe: Literal["tensorwise", "blockwise"] = flag(
        "Numbers that share a scale of FP8: a tensor, or 128 of a row (of weights 128 x 128). Both take it from the tensor itself; "
        "Megatron-LM's delayed, which takes it from earlier steps, is in no checkpoint and not repeated by a recompute, and is not here.",
        "tensorwise",
    )
    bf16: bool = flag("Compute in bfloat16, with fp32 master weights, losses and reductions.", False)
    deterministic_mode: bool = flag("Give bit-equal repeats on GPUs too, at some cost in speed.", False)
    recompute_granularity: Literal["full", "selective"] | None = flag(
        "Compute activations again in the backward pass instead of keeping them: whole layers, or --recompute-modules only.", None
    )
    recompute_modules: tuple[Literal["core_attn", "mlp", "moe", "mhc"], ...] = flag(
        "Parts that --recompute-granularity selective computes again: attention without its projections, the dense MLP, the experts, the "
        "residual streams of mHC.",
        (),
    )
    mhc_recompute_layer_num: int | None = flag(
        "Layers whose residual streams are computed again together from those that enter them; without it all of a stage.", None
    )
    draft_pass: Literal["auto", "shared", "apart", "joint"] = flag(
        "How a canvas is decoded twice:\n"
        "auto: joint with --bf16 on a GPU where that can be, else apart where it pays;\n"
        "shared: the draft rides with the clean tokens, the canvas follows by itself;\n"
        "apart: the draft first, without gradient, then canvas and clean tokens at once;\n"
        "joint: as shared, with one backward, where no recompute and no rank divides it.\n"
        "The loss is the same.",
        "auto",
    )
    cuda_graph_impl: Literal["none", "local"] = flag(
        "local: record forward and backward of a microbatch (in a pipeline, of all of a step's as one) as a CUDA graph when its form (all "
        "its sizes, on every rank that takes part) comes for the second time, and replay it from then on: for steps of few tokens, which "
        "are bound by the host that starts their kernels.",
        "none",
    )
    cuda_graph_limit: int = flag(
        "Graphs held at most; microbatches of further forms run without one. Over several ranks as many again with gradients' sums.", 16)
    cuda_graph_token_multiple: int = flag(
        "Fill each microbatch's clean tokens up to a multiple of this, so that texts of many lengths share a few graphs; with --packing, "
        "--micro-batch-size times --seq-length gives one length.", 1)
    cuda_graph_canvas_multiple: int | None = flag(
        "Fill each microbatch's canvases up to a multiple of so many too, decode each of them twice (where no coin asks for it, without "
        "the draft's signal), keep all keys and score all tokens, filled in ones without weight: microbatches of one length then have one "
        "form, whatever their documents and coins, up to some 4096 tokens. The loss is the same.", None)
    exit_duration_in_mins: int | None = flag("Save and stop after this many minutes.", None)
    exit_interval: int | None = flag("Save and stop at the first step that this number divides.", None)
    exit_signal: Literal["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"] = flag(
        "A signal at which all ranks finish the step, save and stop; SIGTERM and Ctrl-C always do.", "SIGTERM"
    )
    max_skipped_steps: int = flag("Stop after this many steps in a row with a loss or gradient that is not finite.", 3)
    profile: bool = flag("Record a torch profiler trace of the steps from --profile-step-start to --profile-step-end.", False)
    profile_step_start: int = flag("First step that is profiled.", 10)
    profile_step_end: int = flag("First step that is not profiled any more.", 12)
    memory_snapshot_path: str | None = flag("File for a CUDA memory snapshot.", None, metavar="FILE")
