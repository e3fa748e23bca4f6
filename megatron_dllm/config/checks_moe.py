"""Rules of how tokens get to their experts."""

from megatron_dllm.config.check import Fault, check
from megatron_dllm.config.moe import dispatcher_in_use

KERNELS = ("deepep", "hybridep")
DISPATCHER = ("moe_token_dispatcher_type", "moe_flex_dispatcher_backend")
PLAIN = {"moe_token_dispatcher_type": "alltoall", "moe_flex_dispatcher_backend": None}


@check(*DISPATCHER, "expert_model_parallel_size")
def kernels_need_ranks(kind: str, backend: str | None, ep: int) -> Fault | None:
    if dispatcher_in_use(kind, backend) not in KERNELS or ep > 1:
        return None
    return Fault("its kernels connect the ranks that share experts, and there is one",
                 "set --expert-model-parallel-size above 1, or --moe-token-dispatcher-type alltoall", PLAIN)  # fmt: skip


@check(*DISPATCHER, "expert_tensor_parallel_size")
def kernels_send_whole_experts(kind: str, backend: str | None, etp: int) -> Fault | None:
    if dispatcher_in_use(kind, backend) not in KERNELS or etp == 1:
        return None
    return Fault("its kernels send a token to one rank an expert",
                 "set --expert-tensor-parallel-size 1, or --moe-token-dispatcher-type alltoall", PLAIN)  # fmt: skip


@check(*DISPATCHER, "bf16")
def kernels_move_bf16(kind: str, backend: str | None, bf16: bool) -> Fault | None:
    if dispatcher_in_use(kind, backend) not in KERNELS or bf16:
        return None
    return Fault("its kernels move bf16 rows", "set --bf16, or --moe-token-dispatcher-type alltoall", PLAIN)


@check(*DISPATCHER, "hidden_size")
def kernels_move_aligned_rows(kind: str, backend: str | None, hidden: int) -> Fault | None:
    if dispatcher_in_use(kind, backend) not in KERNELS or hidden % 8 == 0:
        return None
    return Fault("its kernels move rows in pieces of 16 bytes, 8 numbers",
                 "set --hidden-size to a multiple of 8, or --moe-token-dispatcher-type alltoall", PLAIN)  # fmt: skip


@check(*DISPATCHER, "device")
def kernels_run_on_cuda(kind: str, backend: str | None, device: str) -> Fault | None:
    if dispatcher_in_use(kind, backend) not in KERNELS or device != "cpu":
        return None
    return Fault("its kernels run on CUDA devices", "set --device cuda, or --moe-token-dispatcher-type alltoall", PLAIN)


@check(*DISPATCHER, "recompute_granularity", "recompute_modules", "moe_recompute_replay")
def hybridep_cannot_repeat(kind: str, backend: str | None, granularity: str | None, modules: tuple[str, ...], replay: bool) -> Fault | None:
    repeats = granularity == "full" or granularity == "selective" and "moe" in modules
    if dispatcher_in_use(kind, backend) != "hybridep" or replay or not repeats:
        return None
    return Fault(
        "a second hybridep dispatch of the same tokens may deliver another number of rows, so a recompute must follow its forward's",
        "set --moe-recompute-replay, or leave --recompute-granularity out (selective works too, without moe among its modules)",
        {"moe_recompute_replay": True},
    )


@check(*DISPATCHER, "moe_max_tokens_per_rank")
def max_tokens_is_for_some_dispatchers(kind: str, backend: str | None, tokens: int | None) -> Fault | None:
    if tokens is None or dispatcher_in_use(kind, backend) in ("alltoall", "deepep"):
        return None
    return Fault("this dispatcher tells the host its numbers of rows in any case",
                 "leave the bound out, or set --moe-token-dispatcher-type to alltoall or deepep",
                 {"moe_max_tokens_per_rank": None})  # fmt: skip


@check("moe_max_tokens_per_rank", "moe_grouped_gemm", "bf16")
def max_tokens_needs_grouped_products(tokens: int | None, grouped: bool, bf16: bool) -> Fault | None:
    if tokens is None or (grouped and bf16):
        return None
    return Fault("the loop over experts reads their numbers of rows on the host in any case",
                 "leave it out, or set --bf16 and --moe-grouped-gemm", {"moe_max_tokens_per_rank": None})  # fmt: skip


@check("moe_router_enable_expert_bias", "save_hf")
def expert_bias_is_not_exported(bias: bool, save_hf: str | None) -> Fault | None:
    if not bias or save_hf is None:
        return None
    return Fault("an exported model has no place for the bias, and would choose other experts",
                 "set --moe-aux-loss-coeff instead, or leave --save-hf out", {"save_hf": None})  # fmt: skip
