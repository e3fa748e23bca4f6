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
    "--ep": "--expert-model-parallel-size",
    "--expert-parallel-size": "--expert-model-parallel-size",
    "--checkpoint-activations": "--recompute-granularity",
    "--recompute-activations": "--recompute-granularity",
    "--activations-checkpoint-method": "--recompute-granularity",
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
    "--fp16": "--bf16",
    "--resume": "--load",
    "--output-dir": "--save",
    "--model": "--preset",
}


def suggest(unknown: str, known: Collection[str]) -> str | None:
    """The flag among `known` that was most likely meant by `unknown`, underscores and older names included."""
    spelled = "--" + unknown.lstrip("-").replace("_", "-").lower()
    if spelled in known:
        return spelled
    if spelled in RENAMED:
        return RENAMED[spelled]
    nearest = difflib.get_close_matches(spelled, known, n=1, cutoff=0.7)
    return nearest[0] if nearest else None


def refuse_unknown(words: Sequence[str], known: Collection[str]) -> None:
    """ValueError that lists every word that looks like a flag and is none, each with the flag it may have meant."""
    names = dict.fromkeys(word.partition("=")[0] for word in words if word.startswith("--"))
    lines = []
    for name in names:
        if name not in known:
            nearest = suggest(name, known)
            lines.append(f"unknown flag {name}" + (f"; did you mean {nearest}?" if nearest else "; --help lists all flags"))
    if lines:
        raise ValueError("\n".join(lines))
