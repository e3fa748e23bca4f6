"""Rules of the pipeline: its stages hold the layers, its groups the microbatches."""

from megatron_dllm.config.check import Fault, check
from megatron_dllm.pipeline.layout import StageLayout, choose_layout, layer_letters
from megatron_dllm.pipeline.schedules import check_group, legal_groups

STAGES = ("pipeline_model_parallel_size", "pipeline_model_parallel_layout", "num_layers_per_virtual_pipeline_stage",
          "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "mtp_num_layers", "layer_types")  # fmt: skip


def _layout(
    ranks: int, text: str | None, size: int | None, embedding: bool, loss: bool, mtp_depth: int, layer_types: tuple[str, ...]
) -> StageLayout:
    return choose_layout(
        text, layers=layer_letters(layer_types), ranks=ranks, layers_per_virtual_stage=size, account_for_embedding=embedding,
        account_for_loss=loss, mtp_depth=mtp_depth)  # fmt: skip


@check(*STAGES, "num_layers")
def stages_hold_the_layers(*values) -> Fault | None:
    *stages, num_layers = values
    ranks, layer_types = stages[0], stages[-1]
    if ranks == 1 or len(layer_types) != num_layers:  # another rule's matter
        return None
    try:
        _layout(*stages)
    except ValueError as error:
        why, _, remedy = str(error).partition("; ")
        return Fault(why, remedy)
    return None


@check(*STAGES, "num_layers", "world_size", "tensor_model_parallel_size", "context_parallel_size", "micro_batch_size", "global_batch_size",
       "microbatch_group_size_per_virtual_pipeline_stage")  # fmt: skip
def groups_fill_the_stages(*values) -> Fault | None:
    *stages, num_layers, world_size, tp, cp, micro, total, group = values
    ranks, layer_types = stages[0], stages[-1]
    copies = world_size // (tp * cp * ranks)
    if ranks == 1 or len(layer_types) != num_layers or copies == 0 or total % (micro * copies):
        return None
    try:
        chunks = _layout(*stages).chunks
    except ValueError:
        return None
    microbatches = total // (micro * copies)
    if group is None:
        group = (legal_groups(ranks=ranks, chunks=chunks, microbatches=microbatches) or [ranks])[0]
    try:
        check_group(ranks=ranks, chunks=chunks, microbatches=microbatches, group=group)
    except ValueError as error:
        why, _, remedy = str(error).removesuffix(".").rpartition("; ")
        return Fault(why, remedy)
    return None


@check("save_hf", "pipeline_model_parallel_size")
def exports_need_a_whole_model(save_hf: str | None, ranks: int) -> Fault | None:
    if save_hf is None or ranks == 1:
        return None
    remedy = "leave --save-hf out, and export a checkpoint with tools/convert.py"
    return Fault("no rank of a pipeline has the whole model to export", remedy, {"save_hf": None})
