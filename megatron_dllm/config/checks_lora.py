"""Rules of low-rank adapters, which are trained beside weights that stay as they are."""

from megatron_dllm.config.check import Fault, check


@check("lora_rank", "lora_targets")
def adapters_go_somewhere(rank: int | None, targets: tuple[str, ...]) -> Fault | None:
    if rank is None or (targets and len(set(targets)) == len(targets)):
        return None
    if not targets:
        return Fault("nothing is named that adapters are put beside", "set --lora-targets, to attention mlp for example",
                     {"lora_targets": ("attention", "mlp")})  # fmt: skip
    unique = tuple(dict.fromkeys(targets))
    return Fault("a target is named twice", f"set --lora-targets {' '.join(unique)}", {"lora_targets": unique})


@check("lora_rank", "lora_targets", "objective", "self_conditioning_prob", "self_conditioning_null")
def adapted_parts_run(rank: int | None, targets: tuple[str, ...], objective: str, prob: float, null: str) -> Fault | None:
    if rank is None or "self_conditioning" not in targets or (objective != "ar" and (prob > 0 or null == "uniform")):
        return None
    others = tuple(target for target in targets if target != "self_conditioning") or ("attention", "mlp")
    return Fault("the self-conditioning module is never run, so its adapters are never trained", f"set --lora-targets {' '.join(others)}",
                 {"lora_targets": others})  # fmt: skip


@check("lora_dropout", "lora_targets")
def dropout_has_a_place(dropout: float, targets: tuple[str, ...]) -> Fault | None:
    others = [target for target in targets if target not in ("attention", "mlp")]
    if dropout == 0 or not others:
        return None
    return Fault(f"what reaches {' and '.join(others)} has no dropout (nor has PEFT any for experts)",
                 "set --lora-dropout 0, or --lora-targets to attention, mlp or both", {"lora_dropout": 0.0})  # fmt: skip


@check("lora_rank", "mtp_num_layers")
def adapters_without_mtp(rank: int | None, depths: int) -> Fault | None:
    if rank is None or depths == 0:
        return None
    return Fault("the blocks of multi-token prediction would stay as they are, and adapters have no place for them",
                 "leave out --mtp-num-layers or --lora-rank", {"mtp_num_layers": 0})  # fmt: skip


@check("lora_rank", "moe_router_enable_expert_bias")
def adapters_without_moving_bias(rank: int | None, bias: bool) -> Fault | None:
    if rank is None or not bias:
        return None
    return Fault("the bias would change with every step, and adapters stand beside a model that stays as it is",
                 "leave out --moe-router-enable-expert-bias or --lora-rank", {"moe_router_enable_expert_bias": False})  # fmt: skip
