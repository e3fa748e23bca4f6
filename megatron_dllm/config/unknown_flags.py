"""What to answer to a flag that does not exist."""

import difflib
from collections.abc import Collection, Sequence

# Flags of other frameworks, or of older Megatron, and what does the same here.
RENAMED = {
    "--batch-size": "--micro-batch-size",
    "--per-device-train-batch-size": "--micro-batch-size",
    "--gradient-accumulation-steps": "--global-batch-size",
    "--max-steps": "--train-iters",
    "--epochs": "--num-epochs",
    "--num-train-epochs": "--num-epochs",
    "--learning-rate": "--lr",
    "--lr-scheduler-type": "--lr-decay-style",
    "--warmup": "--lr-warmup-fraction",
    "--warmup-ratio": "--lr-warmup-fraction",
    "--warmup-steps": "--lr-warmup-iters",
    "--max-grad-norm": "--clip-grad",
    "--max-seq-length": "--seq-length",
    "--model-parallel-size": "--tensor-model-parallel-size",
    "--tp": "--tensor-model-parallel-size",
    "--tensor-parallel-size": "--tensor-model-parallel-size",
    "--pp": "--pipeline-model-parallel-size",
    "--cp": "--context-parallel-size",
    "--virtual-pipeline-model-parallel-size": "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank": "--num-layers-per-virtual-pipeline-stage",
    "--decoder-first-pipeline-num-layers": "--pipeline-model-parallel-layout",
    "--decoder-last-pipeline-num-layers": "--pipeline-model-parallel-layout",
    "--ep": "--expert-model-parallel-size",
    "--expert-parallel-size": "--expert-model-parallel-size",
    "--checkpoint-activations": "--recompute-granularity",
    "--recompute-activations": "--recompute-granularity",
    "--activations-checkpoint-method": "--recompute-granularity",
    "--recompute-num-layers": "--recompute-granularity",
    "--gradient-checkpointing": "--recompute-granularity",
    "--layernorm-epsilon": "--norm-epsilon",
    "--rms-norm-eps": "--norm-epsilon",
    "--num-hidden-layers": "--num-layers",
    "--num-key-value-heads": "--num-query-groups",
    "--num-global-key-value-heads": "--num-global-query-groups",
    "--head-dim": "--kv-channels",
    "--global-head-dim": "--global-kv-channels",
    "--intermediate-size": "--ffn-hidden-size",
    "--moe-intermediate-size": "--moe-ffn-hidden-size",
    "--top-k-experts": "--moe-router-topk",
    "--moe-enable-deepep": "--moe-token-dispatcher-type",
    "--moe-received-token-capacity": "--moe-max-tokens-per-rank",
    "--sliding-window": "--window-size",
    "--rope-theta": "--rotary-base",
    "--block-size": "--canvas-length",
    "--block-length": "--canvas-length",
    "--tokenizer-name-or-path": "--tokenizer-model",
    "--vocab-file": "--tokenizer-model",
    "--merge-file": "--tokenizer-model",
    "--mock-data": "--data-source",
    "--dataset": "--data-path",
    "--num-dataset-builder-threads": "--num-workers",
    "--lr-decay-samples": "--lr-decay-iters",
    "--calculate-per-token-loss": "--encoder-loss-normalization",
    "--moe-router-load-balancing-type": "--moe-aux-loss-coeff",
    "--enable-cuda-graph": "--cuda-graph-impl",
    "--external-cuda-graph": "--cuda-graph-impl",
    "--fsdp": "--use-distributed-optimizer",
    "--use-torch-fsdp2": "--use-distributed-optimizer",
    "--fp16": "--bf16",
    "--resume": "--load",
    "--output-dir": "--save",
    "--model": "--preset",
    "--model-name-or-path": "--pretrained-checkpoint",
}

# Flags of Megatron that nothing here stands for, and why nothing needs to.
NOT_HERE = {
    **dict.fromkeys(
        ("--swiglu", "--normalization", "--position-embedding-type", "--use-rotary-position-embeddings", "--disable-bias-linear",
         "--untie-embeddings-and-output-weights", "--group-query-attention", "--qk-layernorm", "--apply-layernorm-1p"),
        "the architecture is fixed, and its sizes are flags"),
    **dict.fromkeys(("--attention-dropout", "--hidden-dropout"), "nothing but adapters has dropout (--lora-dropout)"),
    **dict.fromkeys(("--accumulate-allreduce-grads-in-fp32", "--attention-softmax-in-fp32", "--moe-router-dtype"),
                    "gradients are summed, and softmax and router computed, in fp32 in any case"),
    **dict.fromkeys(("--finetune", "--no-load-optim"), "--pretrained-checkpoint takes weights alone, --load everything"),
    **dict.fromkeys(("--no-load-rng", "--no-save-rng"), "there is no generator state; all draws follow from --seed"),
    **dict.fromkeys(("--eod-mask-loss", "--reset-position-ids", "--reset-attention-mask"),
                    "each document is an example of its own, whose positions start at 0 and which sees no other"),
    "--make-vocab-size-divisible-by": "a vocabulary that tensor parallelism does not divide is filled up by itself",
    "--overlap-grad-reduce": "sums of gradients always overlap with the backward",
    "--rampup-batch-size": "the batch has one size; --canvas-length-schedule changes the canvas over the course",
    "--use-flash-attn": "--attention-backend says whose attention is taken; ours needs no flag",
    "--use-mcore-models": "there is one implementation of the model",
    "--distributed-backend": "it follows from --device: NCCL or gloo",
    "--ckpt-format": "checkpoints have one format, safetensors and JSON",
}  # fmt: skip


def suggest(unknown: str, known: Collection[str]) -> str | None:
    """The flag among `known` that was most likely meant by `unknown`, underscores and older names included."""
    spelled = "--" + unknown.lstrip("-").replace("_", "-").lower()
    if spelled in known:
        return spelled
    if spelled in RENAMED:
        return RENAMED[spelled]
    nearest = difflib.get_close_matches(spelled, known, n=1, cutoff=0.7)
    return nearest[0] if nearest else None


def answer(unknown: str, known: Collection[str]) -> str:
    """What to do about a flag that is none of `known`."""
    why = NOT_HERE.get(unknown.replace("_", "-"))
    if why:
        return f"leave it out: {why}"
    nearest = suggest(unknown, known)
    return f"did you mean {nearest}?" if nearest else "--help lists all flags"


def refuse_unknown(words: Sequence[str], known: Collection[str]) -> None:
    """ValueError that lists every word that looks like a flag and is none, each with the flag it may have meant."""
    names = dict.fromkeys(word.partition("=")[0] for word in words if word.startswith("--"))
    lines = []
    for name in names:
        if name not in known:
            lines.append(f"unknown flag {name}; {answer(name, known)}")
    if lines:
        raise ValueError("\n".join(lines))
