"""Rules of the model's shape and of how it is cut over ranks."""

from megatron_dllm.config.check import Fault, check, divisors, listed
from megatron_dllm.config.extensions import layer_kind
from megatron_dllm.config.model import write_layer_types
from megatron_dllm.config.objective import ObjectiveConfig


def heads_divide(heads: int, groups: int, field: str, kind: str) -> Fault | None:
    if heads % groups == 0:
        return None
    fits = divisors(heads)
    flag = "--" + field.replace("_", "-")
    return Fault(
        f"{heads} query heads do not share {groups} key heads evenly in {kind} layers",
        f"set {flag} to one of {listed(fits)}",
        {field: fits[-1]},
    )


@check("num_attention_heads", "num_query_groups")
def sliding_heads(heads: int, groups: int) -> Fault | None:
    return heads_divide(heads, groups, "num_query_groups", "sliding")


@check("num_attention_heads", "num_global_query_groups")
def full_heads(heads: int, groups: int) -> Fault | None:
    return heads_divide(heads, groups, "num_global_query_groups", "full")


@check("kv_channels")
def sliding_head_is_even(size: int) -> Fault | None:
    if size % 2 == 0:
        return None
    return Fault("rotary embedding turns pairs of channels", f"set --kv-channels to {size + 1}", {"kv_channels": size + 1})


@check("global_kv_channels")
def full_head_is_even(size: int) -> Fault | None:
    if size % 2 == 0:
        return None
    return Fault("rotary embedding turns pairs of channels", f"set --global-kv-channels to {size + 1}", {"global_kv_channels": size + 1})


@check("num_layers", "layer_types")
def layer_types_fit(num_layers: int, types: tuple[str, ...]) -> Fault | None:
    if len(types) == num_layers:
        return None
    return Fault(f"the pattern has {len(types)} layers", f"set --num-layers to {len(types)}, or a pattern of at most {num_layers}")


@check("layer_types")
def last_layer_is_full(types: tuple[str, ...]) -> Fault | None:
    if types and layer_kind(types[-1]) == "full":
        return None
    mended = (*types[:-1], "full")
    return Fault("the last layer must be full", f"set --layer-types to {write_layer_types(mended)}", {"layer_types": mended})


@check("num_experts", "moe_router_topk")
def enough_experts(experts: int, topk: int) -> Fault | None:
    if topk <= experts:
        return None
    return Fault(
        f"a token cannot go to {topk} of {experts} experts", f"set --moe-router-topk to at most {experts}", {"moe_router_topk": experts}
    )


@check("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
def tokens_in_vocabulary(vocab_size: int, bos: int, eos: tuple[int, ...], pad: int) -> Fault | None:
    highest = max(bos, pad, *eos, 0)
    if highest < vocab_size:
        return None
    return Fault(f"token {highest} is outside a vocabulary of {vocab_size}", f"set --vocab-size to at least {highest + 1}, or other tokens",
                 {"vocab_size": highest + 1})  # fmt: skip


@check("eos_token_id")
def some_end_token(eos: tuple[int, ...]) -> Fault | None:
    if eos and min(eos) >= 0:
        return None
    return Fault(
        "a canvas is filled with the first end token, so there must be one, not negative", "set --eos-token-id to at least one token"
    )


@check("seq_length", "max_position_embeddings")
def positions_suffice(seq_length: int, most: int) -> Fault | None:
    if seq_length <= most:
        return None
    return Fault(f"the model is meant for {most} positions", f"set --seq-length to at most {most}", {"seq_length": most})


@check("canvas_length", "seq_length")
def canvas_fits(canvas_length: int, seq_length: int) -> Fault | None:
    if canvas_length <= seq_length:
        return None
    return Fault(
        f"a row of {seq_length} tokens has no room for a canvas of {canvas_length}",
        f"set --seq-length to at least {canvas_length}",
        {"seq_length": canvas_length},
    )


@check("canvas_length_schedule", "seq_length")
def schedule_fits(schedule: str, seq_length: int) -> Fault | None:
    try:
        lengths = [length for _, length in ObjectiveConfig(canvas_length_schedule=schedule).canvas_lengths()]
    except ValueError as error:
        return Fault(str(error), "write --canvas-length-schedule as 0:64,1000:256")
    if max(lengths, default=0) <= seq_length:
        return None
    return Fault(
        f"a row of {seq_length} tokens has no room for a canvas of {max(lengths)}",
        f"set --seq-length to at least {max(lengths)}",
        {"seq_length": max(lengths)},
    )


@check("world_size", "tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
def dense_grid(world_size: int, tp: int, cp: int, pp: int) -> Fault | None:
    if world_size % (tp * cp * pp) == 0:
        return None
    return Fault(
        f"{world_size} processes do not divide into copies of {tp} x {cp} x {pp} ranks",
        f"start a multiple of {tp * cp * pp} processes, or set sizes whose product is one of {listed(divisors(world_size))}",
    )


@check("world_size", "expert_tensor_parallel_size", "expert_model_parallel_size", "pipeline_model_parallel_size")
def expert_grid(world_size: int, etp: int, ep: int, pp: int) -> Fault | None:
    if world_size % (etp * ep * pp) == 0:
        return None
    return Fault(
        f"{world_size} processes do not divide into copies of {etp} x {ep} x {pp} ranks of experts",
        f"start a multiple of {etp * ep * pp} processes, or set sizes whose product is one of {listed(divisors(world_size))}",
    )


def _tp_divides(amount: int, tp: int, what: str, flag: str, field: str) -> Fault | None:
    if amount % tp == 0:
        return None
    return Fault(f"{amount} {what} do not divide over {tp} ranks", f"set {flag} to one of {listed(divisors(amount))}", {field: 1})


@check("num_attention_heads", "tensor_model_parallel_size")
def heads_over_ranks(heads: int, tp: int) -> Fault | None:
    return _tp_divides(heads, tp, "heads", "--tensor-model-parallel-size", "tensor_model_parallel_size")


@check("ffn_hidden_size", "tensor_model_parallel_size")
def mlp_over_ranks(width: int, tp: int) -> Fault | None:
    return _tp_divides(width, tp, "columns", "--tensor-model-parallel-size", "tensor_model_parallel_size")


@check("moe_ffn_hidden_size", "expert_tensor_parallel_size")
def expert_width_over_ranks(width: int, etp: int) -> Fault | None:
    return _tp_divides(width, etp, "columns of an expert", "--expert-tensor-parallel-size", "expert_tensor_parallel_size")


@check("num_experts", "expert_model_parallel_size")
def experts_over_ranks(experts: int, ep: int) -> Fault | None:
    return _tp_divides(experts, ep, "experts", "--expert-model-parallel-size", "expert_model_parallel_size")


def _key_heads_over_ranks(groups: int, tp: int, kind: str) -> Fault | None:
    """Fewer key heads than ranks are repeated, each on the same number of ranks."""
    if groups % tp == 0 or tp % groups == 0:
        return None
    return Fault(
        f"{groups} key heads of {kind} layers neither divide over {tp} ranks nor repeat evenly on them",
        f"set --tensor-model-parallel-size to a divisor or a multiple of {groups}",
        {"tensor_model_parallel_size": 1},
    )


@check("num_query_groups", "tensor_model_parallel_size")
def sliding_key_heads_over_ranks(groups: int, tp: int) -> Fault | None:
    return _key_heads_over_ranks(groups, tp, "sliding")


@check("num_global_query_groups", "tensor_model_parallel_size")
def full_key_heads_over_ranks(groups: int, tp: int) -> Fault | None:
    return _key_heads_over_ranks(groups, tp, "full")


@check("context_parallel_size", "canvas_length", "canvas_length_schedule", "canvases_scored", "objective")
def canvas_over_ranks(cp: int, canvas_length: int, schedule: str, scored: str, objective: str) -> Fault | None:
    """Each rank has an equal part of a canvas, unless whole canvases are dealt out."""
    if cp == 1 or scored == "all" or objective == "ar":
        return None
    lengths = _lengths(schedule) or [canvas_length]
    wrong = [length for length in lengths if length % cp]
    if not wrong:
        return None
    fits = [n for n in divisors(lengths[0]) if not any(length % n for length in lengths)]
    return Fault(
        f"a canvas of {wrong[0]} tokens does not divide over {cp} ranks",
        f"set --context-parallel-size to one of {listed(fits)}, or the canvas length to a multiple of {cp}",
        {"context_parallel_size": 1},
    )


def _lengths(schedule: str) -> list[int]:
    """The lengths of a schedule, none of one that is not understood (another rule says so)."""
    try:
        return [length for _, length in ObjectiveConfig(canvas_length_schedule=schedule).canvas_lengths()]
    except ValueError:
        return []


def _heads_for_tokens(comm_type: str, cp: int, tp: int, heads: int, groups: int, field: str, kind: str) -> Fault | None:
    """Tokens are traded for heads: ranks have an equal number of query heads, and of key heads unless these are fewer."""
    own_heads, own_groups = heads // tp, max(groups // tp, 1)
    if comm_type != "a2a" or cp == 1 or (own_heads % cp == 0 and (own_groups % cp == 0 or cp % own_groups == 0)):
        return None
    fits = [n for n in divisors(own_heads) if own_groups % n == 0 or n % own_groups == 0]
    flag = "--" + field.replace("_", "-")
    return Fault(
        f"{own_heads} query heads and {own_groups} key heads of a {kind} layer cannot be dealt over {cp} ranks in exchange for tokens",
        f"set {flag} to p2p or all_gather, or --context-parallel-size to one of {listed(fits)}",
        {field: "p2p"},
    )


@check("cp_comm_type", "context_parallel_size", "tensor_model_parallel_size", "num_attention_heads", "num_global_query_groups")
def full_heads_for_tokens(comm_type: str, cp: int, tp: int, heads: int, groups: int) -> Fault | None:
    return _heads_for_tokens(comm_type, cp, tp, heads, groups, "cp_comm_type", "full")


@check("cp_comm_type_sliding", "context_parallel_size", "tensor_model_parallel_size", "num_attention_heads", "num_query_groups")
def sliding_heads_for_tokens(comm_type: str, cp: int, tp: int, heads: int, groups: int) -> Fault | None:
    return _heads_for_tokens(comm_type, cp, tp, heads, groups, "cp_comm_type_sliding", "sliding")


@check("enable_mhc_connections", "recompute_modules")
def streams_to_recompute(enabled: bool, modules: tuple[str, ...]) -> Fault | None:
    if enabled or "mhc" not in modules:
        return None
    return Fault("there are no residual streams to compute again", "set --enable-mhc-connections, or leave mhc out of --recompute-modules",
                 {"enable_mhc_connections": True})  # fmt: skip


@check("linear_num_value_heads", "linear_num_key_heads")
def linear_heads(value_heads: int, key_heads: int) -> Fault | None:
    if value_heads % key_heads == 0:
        return None
    fits = divisors(value_heads)
    return Fault(f"{value_heads} value heads do not share {key_heads} key heads evenly in linear layers",
                 f"set --linear-num-key-heads to one of {listed(fits)}", {"linear_num_key_heads": fits[-1]})  # fmt: skip


@check("layer_types", "linear_num_key_heads", "tensor_model_parallel_size", "context_parallel_size")
def linear_heads_over_ranks(types: tuple[str, ...], key_heads: int, tp: int, cp: int) -> Fault | None:
    """Each rank of tp and cp has heads of its own; value heads are a multiple of key heads."""
    if "linear" not in types or key_heads % (tp * cp) == 0:
        return None
    return Fault(f"{key_heads} key heads of linear layers do not divide over {tp} x {cp} ranks",
                 f"set sizes whose product is one of {listed(divisors(key_heads))}",
                 {"tensor_model_parallel_size": 1, "context_parallel_size": 1})  # fmt: skip


@check("layer_types", "enable_mhc_connections", "save_hf")
def export_is_expressible(types: tuple[str, ...], mhc: bool, save_hf: str | None) -> Fault | None:
    if save_hf is None or not mhc and set(types) <= {"sliding", "full"}:
        return None
    return Fault("transformers has no DiffusionGemma with linear layers, the residual streams of mHC, or layers of an extension",
                 "leave --save-hf out", {"save_hf": None})  # fmt: skip
