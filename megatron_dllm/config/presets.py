"""Models by name."""

from megatron_dllm.config.model import DEFAULT_LAYER_PATTERN, ModelConfig

PRESETS: dict[str, ModelConfig] = {
    # google/diffusiongemma-26B-A4B-it as released.
    "diffusiongemma-26b-a4b": ModelConfig(
        num_layers=30,
        hidden_size=2816,
        ffn_hidden_size=2112,
        num_attention_heads=16,
        num_query_groups=8,
        kv_channels=256,
        num_global_query_groups=2,
        global_kv_channels=512,
        window_size=1024,
        layer_types=DEFAULT_LAYER_PATTERN * 5,
        num_experts=128,
        moe_router_topk=8,
        moe_ffn_hidden_size=704,
        vocab_size=262144,
    ),
    # The same architecture at a width that two CPU cores can train.
    "toy": ModelConfig(
        num_layers=6,
        hidden_size=64,
        ffn_hidden_size=96,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=16,
        num_global_query_groups=1,
        global_kv_channels=32,
        window_size=32,
        layer_types=DEFAULT_LAYER_PATTERN,
        num_experts=8,
        moe_router_topk=2,
        moe_ffn_hidden_size=32,
        vocab_size=512,
        canvas_length=16,
        eos_token_id=(1,),
        max_position_embeddings=4096,
    ),
}
