"""Rules of context parallelism by Transformer Engine."""

from megatron_dllm.config.check import Fault, check

OURS = {"context_parallel_impl": "local"}
LARGEST_HEAD_DIM = 256  # of its attention, as context_parallel.transformer_engine has it


@check("context_parallel_impl", "context_parallel_size", "bf16", "device")
def package_computes_in_bf16_on_cuda(impl: str, cp: int, bf16: bool, device: str) -> Fault | None:
    if impl == "local" or cp == 1 or (bf16 and device != "cpu"):
        return None
    return Fault("Transformer Engine's attention is for bf16 on CUDA devices",
                 "set --bf16 and a CUDA --device, or --context-parallel-impl local", OURS)  # fmt: skip


@check("context_parallel_impl", "context_parallel_size", "canvases_scored")
def package_shares_canvases(impl: str, cp: int, scored: str) -> Fault | None:
    if impl == "local" or cp == 1 or scored == "one":
        return None
    return Fault("canvases that are dealt out whole have no bias in Transformer Engine's attention",
                 "set --canvases-scored one, or --context-parallel-impl local", OURS)  # fmt: skip


@check("context_parallel_impl", "context_parallel_size", "kv_channels", "global_kv_channels")
def package_takes_some_layers(impl: str, cp: int, sliding: int, full: int) -> Fault | None:
    if impl == "local" or cp == 1 or min(sliding, full) <= LARGEST_HEAD_DIM:
        return None
    return Fault(f"Transformer Engine's attention has head dimensions up to {LARGEST_HEAD_DIM}: no layer is its",
                 "set --context-parallel-impl local", OURS)  # fmt: skip


@check("context_parallel_impl", "context_parallel_size", "cp_comm_type_sliding", "kv_channels")
def package_windows(impl: str, cp: int, comm_type: str, width: int) -> Fault | None:
    if impl == "local" or cp == 1 or width > LARGEST_HEAD_DIM or comm_type in ("all_gather", "a2a"):
        return None
    return Fault("Transformer Engine has windows over all_gather and a2a only", "set --cp-comm-type-sliding to all_gather or a2a",
                 {"cp_comm_type_sliding": "all_gather"})  # fmt: skip


def _package_heads(impl: str, cp: int, tp: int, comm_type: str, groups: int, width: int, field: str) -> Fault | None:
    """It deals key heads out, and repeats none."""
    own_groups = max(groups // tp, 1)
    if impl == "local" or cp == 1 or width > LARGEST_HEAD_DIM or comm_type != "a2a" or own_groups % cp == 0:
        return None
    return Fault(f"Transformer Engine cannot deal {own_groups} key heads over {cp} ranks in exchange for tokens",
                 f"set --{field.replace('_', '-')} to all_gather", {field: "all_gather"})  # fmt: skip


@check("context_parallel_impl", "context_parallel_size", "tensor_model_parallel_size", "cp_comm_type", "num_global_query_groups",
       "global_kv_channels")  # fmt: skip
def package_full_heads(impl: str, cp: int, tp: int, comm_type: str, groups: int, width: int) -> Fault | None:
    return _package_heads(impl, cp, tp, comm_type, groups, width, "cp_comm_type")


@check("context_parallel_impl", "context_parallel_size", "tensor_model_parallel_size", "cp_comm_type_sliding", "num_query_groups",
       "kv_channels")  # fmt: skip
def package_sliding_heads(impl: str, cp: int, tp: int, comm_type: str, groups: int, width: int) -> Fault | None:
    return _package_heads(impl, cp, tp, comm_type, groups, width, "cp_comm_type_sliding")
