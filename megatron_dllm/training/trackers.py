"""TensorBoard and Weights & Biases, each imported only when its flag asks for it."""
from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..config import LoggingConfig


def open_trackers(run_dir: Path | None, config: LoggingConfig, *, resumed_iteration: int,
                  arguments: Sequence[str]) -> list[TensorBoard | WeightsAndBiases]:
    """The trackers that the flags ask for. ValueError when the package of one is not installed."""
    trackers: list[TensorBoard | WeightsAndBiases] = []
    if config.tensorboard_dir:
        trackers.append(TensorBoard(Path(config.tensorboard_dir), resumed_iteration, arguments))
    if config.wandb_project:
        trackers.append(WeightsAndBiases(
            run_dir, config.wandb_project, config.wandb_exp_name, resumed=resumed_iteration > 0, arguments=arguments))
    return trackers


class TensorBoard:
    """Scalars and texts as TensorBoard events. Events after the resumed iteration are hidden, as the run writes them again."""

    def __init__(self, folder: Path, resumed_iteration: int, arguments: Sequence[str]):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(
                f"--tensorboard-dir {folder}: tensorboard is not installed; pip install tensorboard, or leave the flag out") from error
        self._writer = SummaryWriter(str(folder), purge_step=resumed_iteration + 1 if resumed_iteration else None)
        self._writer.add_text("arguments", " ".join(arguments), resumed_iteration)

    def scalars(self, iteration: int, metrics: Mapping[str, float | int]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, iteration)

    def text(self, iteration: int, name: str, text: str) -> None:
        # TensorBoard renders markdown; four spaces keep generated text as it is.
        self._writer.add_text(name, "\n".join("    " + line for line in text.splitlines()), iteration)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Scalars and texts of a wandb run. Its id lies in the run directory, so that a resumed run continues the same one."""

    def __init__(self, run_dir: Path | None, project: str, name: str | None, *, resumed: bool, arguments: Sequence[str]):
        try:
            import wandb
        except ImportError as error:
            raise ValueError(
                f"--wandb-project {project}: wandb is not installed; pip install wandb, or leave the flag out") from error
        self._wandb = wandb
        id_file = run_dir / "wandb_run_id.txt" if run_dir else None
        known = id_file.read_text().strip() if id_file and resumed and id_file.exists() else None
        self._run = wandb.init(
            project=project, name=name or (run_dir.name if run_dir else None), id=known, resume="allow",
            dir=str(run_dir) if run_dir else None, config={"arguments": " ".join(arguments)})
        if id_file:
            id_file.write_text(self._run.id + "\n")

    def scalars(self, iteration: int, metrics: Mapping[str, float | int]) -> None:
        self._run.log(dict(metrics), step=iteration)

    def text(self, iteration: int, name: str, text: str) -> None:
        self._run.log({name: self._wandb.Html(f"<pre>{html.escape(text)}</pre>")}, step=iteration)

    def close(self) -> None:
        self._run.finish()
