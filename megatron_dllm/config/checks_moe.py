"""Rules of how tokens get to their experts."""

from megatron_dllm.config.check import Fault, check

KERNELS = ("deepep", "hybridep")
PLAIN = {"moe_token_dispatcher_type": "alltoall"}


@check("moe_token_dispatcher_type", "expert_model_parallel_size")
def kernels_need_ranks(dispatcher: str, ep: int) -> Fault | None:
    if dispatcher not in KERNELS or ep > 1:
        return None
    return Fault("its kernels connect the ranks that share experts, and there is one",
                 "set --expert-model-parallel-size above 1, or --moe-token-dispatcher-type alltoall", PLAIN)  # fmt: skip


@check("moe_token_dispatcher_type", "expert_tensor_parallel_size")
def kernels_send_whole_experts(dispatcher: str, etp: int) -> Fault | None:
    if dispatcher not in KERNELS or etp == 1:
        return None
    return Fault("its kernels send a token to one rank an expert",
                 "set --expert-tensor-parallel-size 1, or --moe-token-dispatcher-type alltoall", PLAIN)  # fmt: skip


@check("moe_token_dispatcher_type", "bf16")
def kernels_move_bf16(dispatcher: str, bf16: bool) -> Fault | None:
    if dispatcher not in KERNELS or bf16:
        return None
    return Fault("its kernels move bf16 rows", "set --bf16, or --moe-token-dispatcher-type alltoall", PLAIN)


@check("moe_token_dispatcher_type", "device")
def kernels_run_on_cuda(dispatcher: str, device: str) -> Fault | None:
    if dispatcher not in KERNELS or device != "cpu":
        return None
    return Fault("its kernels run on CUDA devices", "set --device cuda, or --moe-token-dispatcher-type alltoall", PLAIN)


@check("moe_token_dispatcher_type", "recompute_granularity", "recompute_modules", "moe_recompute_replay")
def hybridep_cannot_repeat(dispatcher: str, granularity: str | None, modules: tuple[str, ...], replay: bool) -> Fault | None:
    repeats = granularity == "full" or granularity == "selective" and "moe" in modules
    if dispatcher != "hybridep" or replay or not repeats:
        return None
    return Fault(
        "a second hybridep dispatch of the same tokens may deliver another number of rows, so a recompute must follow its forward's",
        "set --moe-recompute-replay, or leave --recompute-granularity out (selective works too, without moe among its modules)",
        {"moe_recompute_replay": True},
    )


@check("moe_router_enable_expert_bias", "save_hf")
def expert_bias_is_not_exported(bias: bool, save_hf: str | None) -> Fault | None:
    if not bias or save_hf is None:
        return None
    return Fault("an exported model has no place for the bias, and would choose other experts",
                 "set --moe-aux-loss-coeff instead, or leave --save-hf out", {"save_hf": None})  # fmt: skip
