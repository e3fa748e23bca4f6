"""Exports of several ranks: rank 0 fails in the middle of one while the others give their parts of each tensor."""
import errno
from pathlib import Path

import pytest

from megatron_dllm.models.diffusion_gemma import transformers_export
from megatron_dllm.models.diffusion_gemma.transformers_directory import TransformersDirectory
from megatron_dllm.parallel.initialize import close
from megatron_dllm.training import exporting
from megatron_dllm.training.loop import TrainingFailed
from megatron_dllm.training.status import read_status
from tests.parallel.checkpoint_cases import build


class FullAtFirst(transformers_export.TensorFileWriter):
    """The disk is full at the third tensor of the first file."""

    full = True

    def add(self, name, piece):
        if FullAtFirst.full and name == self.specs[2].name:
            FullAtFirst.full = False
            raise OSError(errno.ENOSPC, "No space left on device", str(self.path))
        super().add(name, piece)


def train(rank: int, folder: str, where: str) -> tuple[str, list[int]]:
    """Two iterations, each exported; what the run ended with, and how many exchanges each export took."""
    export, order, counts = exporting.Exporter.export, exporting.Exporter._order, []

    def counted(exporter, iteration):
        exporter.trainer.context.log.clear()
        export(exporter, iteration)
        counts.append(exporter.trainer.context.log.total()[0])

    def stale(exporter):  # as where rank 0 cannot read the folder of carried files
        if not exporter.failed:
            raise OSError(errno.ESTALE, "Stale file handle", folder)
        return order(exporter)

    trainer = build(rank, "tp2", "--train-iters", "2", "--save", folder, "--save-hf", f"{folder}/hf", "--save-hf-interval", "1")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(TrainingFailed) as error:
        patch.setattr(exporting.Exporter, "export", counted)
        if where == "the order":
            patch.setattr(exporting.Exporter, "_order", stale)
        else:
            patch.setattr(FullAtFirst, "full", True)
            patch.setattr(transformers_export, "TensorFileWriter", FullAtFirst)
        trainer.fit()
    close(trainer.context)
    return str(error.value), counts


@pytest.mark.slow
@pytest.mark.parametrize("where", ["the disk", "the order"])
def test_an_export_that_fails_ends_no_run(world, tmp_path, where):
    first, second = world.run(train, str(tmp_path), where, size=2)
    assert first == second, "the ranks have made the same exchanges"
    text, (failed, whole) = first
    assert text == f"iteration 2 is done, its checkpoint is {tmp_path}/iter_0000002; exports failed, of iterations 1 (see their messages)"
    assert failed < whole if where == "the order" else failed == whole
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["iter_0000002"], "nothing is left of the first one"
    assert TransformersDirectory.open(tmp_path / "hf" / "iter_0000002")
    status = read_status(Path(tmp_path) / "status.json")
    assert (status["state"], status["checkpoint"]) == ("finished", f"{tmp_path}/iter_0000002")
    assert "exports failed, of iterations 1" in status["reason"]
