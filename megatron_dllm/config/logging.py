"""What is reported, and where."""

from dataclasses import dataclass

from megatron_dllm.config.flags import flag


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Logging"""

    log_interval: int = flag("Steps between log lines.", 10)
    log_num_zeros_in_grad: bool = flag("Count the elements of the whole gradient that are exactly zero, in every step.", False)
    log_grad_norm_spike: float = flag(
        "Warn of a gradient norm that is more than so many times the median of the last 100; 0: of none.", 10.0
    )
    log_throughput: bool = flag("Log TFLOP/s per GPU and its share of the peak.", False)
    peak_tflops: float | None = flag("Peak that the share is taken of; without it: the device's known dense bf16 peak.", None)
    run_dir: str | None = flag(
        "Folder of args.txt, metrics.jsonl and status.json; without it: --save, and without that none is written.", None, metavar="DIR"
    )
    tensorboard_dir: str | None = flag("Folder of TensorBoard event files.", None, metavar="DIR")
    wandb_project: str | None = flag("Weights & Biases project to log to.", None)
    wandb_exp_name: str | None = flag("Name of the run in --wandb-project.", None)
