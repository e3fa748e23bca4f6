"""Rules of --transformer-impl transformer_engine and of FP8."""

from megatron_dllm.config.check import Fault, check

LOCAL = {"transformer_impl": "local", "fp8_format": None, "moe_grouped_gemm_backend": "local", "attention_backend": "local",
         "rotary_backend": "local", "cross_entropy_fusion_impl": "native"}
OUR_ATTENTION = {"attention_backend": "local"}
WIDEST_HEAD = 256  # of its attention on sm_90
FP8_MULTIPLE = 16  # an FP8 product reads both matrices along both of their sides in pieces of 16 bytes


@check("transformer_impl", "bf16")
def engine_computes_in_bf16(impl: str, bf16: bool) -> Fault | None:
    if impl == "local" or bf16:
        return None
    return Fault("it is used for bf16 alone: float32 and float64 are the oracle's", "set --bf16, or --transformer-impl local", LOCAL)


@check("transformer_impl", "device")
def engine_runs_on_cuda(impl: str, device: str) -> Fault | None:
    if impl == "local" or device != "cpu":
        return None
    return Fault("its kernels run on CUDA devices", "set --device cuda, or --transformer-impl local", LOCAL)


@check("transformer_impl", "cuda_graph_impl")
def engine_is_not_recorded(impl: str, graphs: str) -> Fault | None:
    if impl == "local" or graphs == "none":
        return None
    return Fault("graphs are recorded of our own kernels alone: nothing holds replays of the package's modules to what they should give",
                 "set --cuda-graph-impl none, or --transformer-impl local", LOCAL)  # fmt: skip


@check("context_parallel_impl", "cuda_graph_impl")
def engine_over_ranks_is_not_recorded(impl: str, graphs: str) -> Fault | None:
    if impl == "local" or graphs == "none":
        return None
    return Fault("graphs are recorded of our own kernels and exchanges alone",
                 "set --cuda-graph-impl none, or --context-parallel-impl local", {"context_parallel_impl": "local"})  # fmt: skip


@check("attention_backend", "layer_types", "kv_channels", "global_kv_channels")
def engine_attends_in_some_layers(backend: str, types: tuple[str, ...], sliding: int, full: int) -> Fault | None:
    widths = [width for kind, width in (("sliding", sliding), ("full", full)) if kind in types]
    if backend == "local" or min(widths, default=WIDEST_HEAD + 1) <= WIDEST_HEAD:
        return None
    return Fault(f"its attention has heads up to {WIDEST_HEAD}, and no layer has such", "set --attention-backend local", OUR_ATTENTION)


@check("attention_backend", "context_parallel_size")
def engine_attends_on_one_rank(backend: str, cp: int) -> Fault | None:
    if backend == "local" or cp == 1:
        return None
    return Fault("it is for ranks that have whole sequences",
                 "set --attention-backend local; --context-parallel-impl transformer_engine has the package attend over several",
                 OUR_ATTENTION)  # fmt: skip


@check("attention_backend", "deterministic_mode")
def engine_attends_in_no_fixed_order(backend: str, deterministic: bool) -> Fault | None:
    if backend == "local" or not deterministic:
        return None
    return Fault("bit-equal repeats are our kernels' alone: for them cuDNN asks for room that grows with the square of the sequences",
                 "set --attention-backend local", OUR_ATTENTION)  # fmt: skip


@check("moe_grouped_gemm_backend", "moe_grouped_gemm")
def engine_groups_experts(backend: str, grouped: bool) -> Fault | None:
    if backend == "local" or grouped:
        return None
    return Fault("it computes grouped products, and there is a loop over experts",
                 "set --moe-grouped-gemm, or --moe-grouped-gemm-backend local", {"moe_grouped_gemm_backend": "local"})  # fmt: skip


@check("moe_grouped_gemm_backend", "moe_max_tokens_per_rank")
def engine_reads_numbers_of_rows(backend: str, tokens: int | None) -> Fault | None:
    if backend == "local" or tokens is None:
        return None
    return Fault("its GroupedLinear has the numbers of rows read on the host in any case",
                 "leave --moe-max-tokens-per-rank out, or set --moe-grouped-gemm-backend local",
                 {"moe_grouped_gemm_backend": "local"})  # fmt: skip


@check("fp8_format", "tensor_model_parallel_size", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
       "kv_channels", "num_global_query_groups", "global_kv_channels")  # fmt: skip
def fp8_takes_linear_widths(
    fp8: str | None, tp: int, hidden: int, ffn: int, heads: int, groups: int, channels: int, global_groups: int, global_channels: int
) -> Fault | None:
    if fp8 is None:
        return None
    widths = {
        "--hidden-size": hidden,
        "--ffn-hidden-size": ffn // tp,
        "the queries of sliding layers": heads * channels // tp,
        "the keys of sliding layers": max(1, groups // tp) * channels,
        "the queries of full layers": heads * global_channels // tp,
        "the keys of full layers": max(1, global_groups // tp) * global_channels,
    }
    return _odd_widths(widths)


@check("fp8_format", "moe_grouped_gemm_backend", "expert_tensor_parallel_size", "moe_ffn_hidden_size")
def fp8_takes_expert_widths(fp8: str | None, backend: str, etp: int, inner: int) -> Fault | None:
    return None if fp8 is None or backend == "local" else _odd_widths({"--moe-ffn-hidden-size": inner // etp})


def _odd_widths(widths: dict[str, int]) -> Fault | None:
    odd = [f"{name} {width}" for name, width in widths.items() if width % FP8_MULTIPLE]
    if not odd:
        return None
    return Fault(f"FP8 products take widths that are multiples of {FP8_MULTIPLE}; a rank has of {', of '.join(odd)}",
                 "change these widths, have fewer ranks share them, or leave --fp8-format out", {"fp8_format": None})  # fmt: skip
