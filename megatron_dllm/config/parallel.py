"""How the ranks are dealt out."""

from dataclasses import dataclass
from typing import Literal

from megatron_dllm.config.flags import flag


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Parallelism"""

    tensor_model_parallel_size: int = flag("Ranks that share each matrix.", 1)
    sequence_parallel: bool = flag("Share the tokens between matrices over the tensor-parallel ranks as well.", False)
    context_parallel_size: int = flag("Ranks that share each sequence.", 1)
    cp_comm_type: Literal["p2p", "all_gather", "a2a"] = flag(
        "How keys come to queries on other context-parallel ranks in full layers. p2p: rank after rank sends what is seen of its own; "
        "all_gather: all go to all; a2a: tokens are traded for heads.",
        "p2p",
    )
    cp_comm_type_sliding: Literal["halo", "p2p", "all_gather", "a2a"] = flag(
        "The same in sliding layers; halo: only the keys go that a window reaches.", "halo"
    )
    context_parallel_impl: Literal["local", "transformer_engine"] = flag(
        "Whose attention over context-parallel ranks: ours, or that of the package Transformer Engine (on CUDA, with --bf16) in layers of "
        "a head dimension of at most 256, where canvases get their keys by p2p.",
        "local",
    )
    pipeline_model_parallel_size: int = flag("Ranks that share the layers.", 1)
    pipeline_model_parallel_layout: str | None = flag(
        "Which stage has what: E embedding, t attention layer, g gated-delta layer, m multi-token prediction, L final norm and loss; | "
        "ends a virtual stage, (..)*k repeats. Without it stages are of equal size. Example: Ettt|tt||tL.",
        None,
    )
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        "Layers of a virtual stage, of which each rank then has several. Without it a rank has one.", None
    )
    account_for_embedding_in_pipeline_split: bool = flag("Count the embedding as a layer where stages are of equal size.", False)
    account_for_loss_in_pipeline_split: bool = flag("Count final norm and loss as a layer where stages are of equal size.", False)
    microbatch_group_size_per_virtual_pipeline_stage: int | None = flag(
        "Microbatches that pass a virtual stage before the rank's next one starts. Without it the fewest that work.", None
    )
    overlap_p2p_communication: bool = flag("Let messages between pipeline stages travel while their ranks compute.", True)
    batch_p2p_communication: bool = flag("Start messages between pipeline stages that are due together as one operation.", True)
    expert_model_parallel_size: int = flag("Ranks that share the experts.", 1)
    expert_tensor_parallel_size: int = flag("Ranks that share each expert's matrices.", 1)
    use_distributed_optimizer: bool = flag("Share master weights and optimizer state over the data-parallel ranks.", False)
    overlap_param_gather: bool = flag(
        "Let the gathering of parameters after a step of --use-distributed-optimizer go on beside the next forward.", False
    )
    distributed_timeout_minutes: int = flag("Minutes after which a rank that waits for the others gives up and says where it stands.", 10)

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the dense weights and one batch."""
        return self.tensor_model_parallel_size * self.context_parallel_size * self.pipeline_model_parallel_size

    def data_parallel_size(self, world_size: int) -> int:
        """Copies that see different batches; validate() has checked that the division is exact."""
        return world_size // self.model_parallel_size
