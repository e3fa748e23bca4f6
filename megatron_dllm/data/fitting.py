"""How examples lie in the sequence: which are cut, and which do not fit at all."""

from __future__ import annotations

import numpy as np

from .report import SampleError, SkipReport
from .source import ExampleSource


def fitted_lengths(lengths: np.ndarray, *, seq_length: int, canvas_length: int) -> np.ndarray:
    """int64 [N]: tokens of each example as it lies in a row, cut after the last whole canvas that the sequence holds and filled to whole
    canvases; 0 where not one canvas fits behind the prompt. The same rule as diffusion.batch_plan.fit_example, for all examples at once.
    """
    prompt, response = np.asarray(lengths, np.int64).T
    room = (seq_length - prompt) // canvas_length
    needed = -(-response // canvas_length)
    return np.where((room > 0) & (needed > 0), prompt + np.minimum(room, needed) * canvas_length, 0)


def fit_report(source: ExampleSource, *, seq_length: int, canvas_length: int, refuse: bool = False) -> SkipReport:
    """Prompts that leave no room for one canvas (left out), by name. ValueError at the first under `refuse`."""
    report = SkipReport(refuse=refuse)
    for index in np.flatnonzero(fitted_lengths(source.lengths, seq_length=seq_length, canvas_length=canvas_length) == 0).tolist():
        prompt, response = map(int, source.lengths[index])
        reason = "prompt without room for one canvas" if response else "empty response"
        report.skip(source.describe(index), SampleError(reason, f"{prompt} tokens, and --seq-length {seq_length} holds canvases of "
                                                                f"{canvas_length}"))
    return report


def num_cut(source: ExampleSource, *, seq_length: int, canvas_length: int) -> int:
    """Examples whose response is cut because it does not fit."""
    fitted = fitted_lengths(source.lengths, seq_length=seq_length, canvas_length=canvas_length)
    return int(((fitted > 0) & (fitted < source.lengths.sum(axis=1))).sum())
