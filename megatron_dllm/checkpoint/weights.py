"""A checkpoint of weights alone, written as its tensors come: what conversion and averaging make."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata

from .shards import chunk_of
from .storage import INDEX, MODEL, PlacedIn, file_name, write_index
from .store import Draft, TrainingState
from .tensor_files import TensorFileWriter, TensorSpec


def write_weights(folder: Path, state: TrainingState, specs: Sequence[TensorSpec], elements: Iterable[tuple[str, Tensor]], arguments: str,
                  progress: Callable[[int, int], None]) -> Path:
    """Write the tensors of `specs`, whose elements come in this order, piece by piece. Returns the checkpoint's folder."""
    draft = Draft(folder, state.iteration)
    draft.create()
    file = file_name(MODEL, 0)
    writer = TensorFileWriter(draft.path / file, specs)
    done, total = 0, sum(spec.num_bytes for spec in specs)
    for name, piece in elements:
        writer.add(name, piece)
        done += piece.numel() * piece.itemsize
        progress(done, total)
    files = {file: writer.close()}
    whole = {spec.name: chunk_of((0,) * len(spec.shape), spec.shape) for spec in specs}
    tensors = {spec.name: TensorStorageMetadata(TensorProperties(dtype=spec.dtype), spec.size, [whole[spec.name]]) for spec in specs}
    places = {MetadataIndex(spec.name, whole[spec.name].offsets): PlacedIn(file, spec.name) for spec in specs}
    files[INDEX] = write_index(draft.path / INDEX, Metadata(tensors, storage_data=places))
    files |= draft.write_state(state, arguments)
    return draft.publish(files)
