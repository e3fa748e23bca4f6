"""Low-rank adapters."""

from dataclasses import dataclass
from typing import Literal

from megatron_dllm.config.flags import flag


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Adapters (LoRA)"""

    lora_rank: int | None = flag(
        "Train low-rank adapters of this rank beside frozen weights: y = W x + alpha / rank * B A x. --save then keeps the adapters alone, "
        "and --save-hf writes them in PEFT's format.",
        None,
    )
    lora_alpha: float = flag("Adapters count alpha / rank.", 16.0)
    lora_dropout: float = flag("Share of the inputs of A that is dropped in training; for attention and mlp alone.", 0.0)
    lora_targets: tuple[Literal["attention", "mlp", "router", "self_conditioning", "experts"], ...] = flag(
        "What gets adapters: attention (q, k, v and o projections of sliding and full layers), mlp (the dense MLP's gate, up and down), "
        "router (its projection), self_conditioning (its gate, up and down), experts (each expert's gate_up and down).",
        ("attention", "mlp"),
    )
