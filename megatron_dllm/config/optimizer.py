"""AdamW and its learning rate."""

from dataclasses import dataclass
from typing import Literal

from megatron_dllm.config.flags import flag


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer"""

    optimizer_backend: Literal["local", "torch", "te", "apex"] = flag(
        "Whose fused AdamW steps the fp32 masters: our own kernel on a GPU (elsewhere it is torch's), torch's, or that of the package "
        "Transformer Engine or apex.",
        "local",
    )
    lr: float = flag("Highest learning rate.", 1e-4)
    min_lr: float = flag("Learning rate at the end of the decay.", 0.0)
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = flag(
        "Course of the learning rate after the warm-up; WSD: constant, then a decay at the end.", "cosine"
    )
    lr_decay_iters: int | None = flag("Step at which the decay ends; without it: the last step.", None)
    lr_warmup_iters: int = flag("Steps of linear warm-up from 0.", 0)
    lr_warmup_fraction: float | None = flag("Share of the decay's steps that is warm-up, instead of --lr-warmup-iters.", None)
    lr_wsd_decay_iters: int | None = flag("Steps of the decay at the end, for WSD.", None)
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = flag(
        "Course of the decay at the end, for WSD.", "exponential"
    )
    weight_decay: float = flag("Decoupled weight decay of matrices; norms and scales have none.", 0.01)
    adam_beta1: float = flag("Decay of the mean of the gradient.", 0.9)
    adam_beta2: float = flag("Decay of the mean of the squared gradient.", 0.999)
    adam_eps: float = flag("Added to the root of the mean squared gradient.", 1e-8)
    clip_grad: float = flag("Largest norm of the whole gradient; 0: no clipping.", 1.0)
