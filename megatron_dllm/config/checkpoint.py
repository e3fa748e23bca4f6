"""What is saved and loaded."""

from dataclasses import dataclass

from megatron_dllm.config.flags import flag


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints"""

    save: str | None = flag("Folder to save checkpoints to, at the end and at --save-interval.", None, metavar="DIR")
    save_interval: int | None = flag("Steps between checkpoints.", None)
    async_save: bool = flag("Write checkpoints in the background; training waits for a copy in memory alone.", False)
    save_retain_interval: int | None = flag(
        "Keep the checkpoints at multiples of so many steps, and of the others the newest --save-total-limit (1 by default).", None
    )
    save_total_limit: int | None = flag("Keep so many of the newest checkpoints; all by default.", None)
    save_best: bool = flag("Also keep the checkpoint with the lowest evaluation loss.", False)
    load: str | None = flag(
        "Folder to resume from, with optimizer and data position: a run's, or one checkpoint's in it (iter_0000100).", None, metavar="DIR"
    )
    override_opt_param_scheduler: bool = flag(
        "Resume with this command line's learning-rate schedule where the checkpoint has another.", False
    )
    pretrained_checkpoint: str | None = flag(
        "Folder to take the weights from, ours or transformers', starting at step 0.", None, metavar="DIR"
    )
    save_hf: str | None = flag("Folder to export the model to in the transformers format, at the end.", None, metavar="DIR")
    save_hf_interval: int | None = flag("Steps between exports, each to a folder of its own in --save-hf (iter_0000100).", None)
