"""The model's shape: what a checkpoint stores and no flag may contradict afterwards."""

import itertools
import re
from dataclasses import dataclass
from typing import Any, Literal

from megatron_dllm.config.extensions import LAYER_TYPES, layer_kind
from megatron_dllm.config.flags import flag

LayerType = Literal["sliding", "full", "linear"]
DEFAULT_LAYER_PATTERN: tuple[LayerType, ...] = ("sliding",) * 5 + ("full",)


def read_layer_types(text: str) -> tuple[str, ...]:
    """The layer types that a pattern such as `sliding*5,full` spells, once; ValueError at the item that is not understood."""
    types: list[str] = []
    for item in text.split(","):
        match = re.fullmatch(r"\s*([a-z][a-z0-9_-]*)\s*(?:\*\s*([1-9]\d*))?\s*", item)
        if not match or match[1] not in LAYER_TYPES.names:
            raise ValueError(f"layer types {text!r}: {item!r} is none of {', '.join(LAYER_TYPES.names)}, nor such with a count "
                             "(sliding*5); use these, or name an --extension that adds it")
        types += [match[1]] * int(match[2] or 1)
    return tuple(types)


def write_layer_types(types: tuple[str, ...]) -> str:
    """The shortest pattern that, repeated, gives `types` back."""
    period = next((n for n in range(1, len(types) + 1) if types[:n] * (len(types) // n) == types), 0)
    runs = [(name, len(list(run))) for name, run in itertools.groupby(types[:period])]
    return ",".join(name if count == 1 else f"{name}*{count}" for name, count in runs)


def with_linear_layers(types: tuple[str, ...], frequency: int) -> tuple[str, ...]:
    """`types` where of every `frequency` layers only the last stays what it is, and the others are linear."""
    return tuple(kind if (number + 1) % frequency == 0 else "linear" for number, kind in enumerate(types))


def repeat_layer_types(pattern: tuple[str, ...], num_layers: int) -> tuple[str, ...]:
    """`pattern` repeated, whole or in part, to exactly `num_layers` layers; a longer pattern is returned as it is (and refused later)."""
    if len(pattern) >= num_layers:
        return pattern
    return tuple(itertools.islice(itertools.cycle(pattern), num_layers))


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Model (from --preset, --model-config or a checkpoint; a flag given here overrides the first two)"""

    num_layers: int = flag("Number of transformer layers.")
    hidden_size: int = flag("Width of the residual stream.")
    ffn_hidden_size: int = flag("Width of the dense MLP that every layer has beside its experts.")
    num_attention_heads: int = flag("Query heads of every layer.")
    num_query_groups: int = flag("Key and value heads of sliding layers.")
    kv_channels: int = flag("Size of a head in sliding layers.")
    num_global_query_groups: int = flag("Key and value heads of full layers.")
    global_kv_channels: int = flag("Size of a head in full layers.")
    window_size: int = flag("Keys that a query of a sliding layer sees, itself included.")
    layer_types: tuple[LayerType, ...] = flag(
        "Kinds of the layers as a pattern, repeated to --num-layers; the last layer must be full. Without it: sliding*5,full, last full.",
        metavar="PATTERN",
        read=read_layer_types,
        write=write_layer_types,
    )
    num_experts: int = flag("Experts of every layer.")
    moe_router_topk: int = flag("Experts that each token is sent to.")
    moe_ffn_hidden_size: int = flag("Width of one expert.")
    vocab_size: int = flag("Rows of the embedding, which is also the output layer.")
    canvas_length: int = flag("Tokens that are denoised together.", 256)
    final_logit_softcapping: float = flag("Logits are bounded to plus and minus this value, by tanh.", 30.0)
    norm_epsilon: float = flag("Added to the mean square in every norm.", 1e-6)
    rotary_base: float = flag("Base of the rotary frequencies in sliding layers.", 10000.0)
    rotary_base_global: float = flag("Base of the rotary frequencies in full layers.", 1000000.0)
    rotary_percent_global: float = flag("Share of the frequencies that turn in full layers; the others have angle zero.", 0.25)
    max_position_embeddings: int = flag("Longest sequence that the model is meant for.", 262144)
    init_method_std: float = flag("Standard deviation of the initial weights.", 0.02)
    linear_num_key_heads: int = flag("Key heads of linear layers (gated delta net); queries have as many.", 16)
    linear_num_value_heads: int = flag("Value heads of linear layers, a multiple of their key heads.", 32)
    linear_key_head_dim: int = flag("Size of a key head in linear layers.", 128)
    linear_value_head_dim: int = flag("Size of a value head in linear layers.", 128)
    linear_conv_kernel_dim: int = flag("Tokens that the convolution before a linear layer's state spans.", 4)
    enable_mhc_connections: bool = flag("Run several residual streams, mixed by learned mappings around a layer's parts (mHC).", False)
    mhc_num_residual_streams: int = flag("Residual streams of mHC.", 4)
    mhc_sinkhorn_iterations: int = flag("Rounds that make the mixing of mHC's streams doubly stochastic.", 20)
    mhc_init_gating_factor: float = flag("Initial weight of what mHC's mappings read from the streams.", 0.01)
    mtp_num_layers: int = flag("Further tokens that each clean token predicts in training, a layer each (multi-token prediction).", 0)
    bos_token_id: int = flag("Token that begins a text.", 2)
    eos_token_id: tuple[int, ...] = flag("Tokens that end a text or a turn; the first one also fills a canvas after its end.", (1, 106))
    pad_token_id: int = flag("Token of positions that nothing reads.", 0)

    def is_full(self, layer: int) -> bool:
        """Whether `layer` (from 0) sees the whole sequence, not a window."""
        return self.layer_kinds[layer] == "full"

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """`layer_types`, with those of ours in the place of such as an extension has added."""
        return tuple(map(layer_kind, self.layer_types))

    def head_dim(self, layer: int) -> int:
        return self.global_kv_channels if self.is_full(layer) else self.kv_channels

    def kv_heads(self, layer: int) -> int:
        return self.num_global_query_groups if self.is_full(layer) else self.num_query_groups

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """The layers that are gated delta nets."""
        return tuple(number for number, kind in enumerate(self.layer_types) if kind == "linear")

    @property
    def num_residual_streams(self) -> int:
        """Streams between layers, each hidden_size wide."""
        return self.mhc_num_residual_streams if self.enable_mhc_connections else 1

    @property
    def fill_token_id(self) -> int:
        """What stands after the end of a response in its last canvas."""
        return self.eos_token_id[0]

    @classmethod
    def from_transformers(cls, source: dict[str, Any]) -> "ModelConfig":
        """The model that a transformers config.json describes; see transformers_format.read_config."""
        from megatron_dllm.config.transformers_format import read_config

        return read_config(source)

    def to_transformers(self, base: dict[str, Any] | None = None) -> dict[str, Any]:
        """The config.json of this model, keeping what else `base` holds; see transformers_format.write_config."""
        from megatron_dllm.config.transformers_format import write_config

        return write_config(self, base)
