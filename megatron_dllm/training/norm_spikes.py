"""Gradient norms far above what they have been lately."""
from __future__ import annotations

import math
import statistics
from collections import deque

WINDOW, LEAST = 100, 20  # norms whose median is taken; how many there must be before one is judged


class NormSpikes:
    """Holds the last norms. multiple: of their median, above which a norm is a spike; 0: nothing is."""

    def __init__(self, multiple: float):
        self._multiple = multiple
        self._last: deque[float] = deque(maxlen=WINDOW)

    def note(self, iteration: int, norm: float) -> str | None:
        """Take the norm of this iteration in; a warning if it is a spike. One that is not finite is left out: its step is skipped."""
        if not self._multiple or not math.isfinite(norm):
            return None
        median = statistics.median(self._last) if len(self._last) >= LEAST else math.inf
        count = len(self._last)
        self._last.append(norm)
        if norm <= self._multiple * median:
            return None
        return (f"iteration {iteration}: gradient norm {norm:.4g} is {norm / median:.1f} times the median {median:.4g} of the last {count} "
                f"(--log-grad-norm-spike {self._multiple:g})" if median else
                f"iteration {iteration}: gradient norm {norm:.4g}, where the median of the last {count} is 0")
