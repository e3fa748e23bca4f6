"""What the suite fp8 makes of losses."""
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from verification.fp8 import LAST, loss_figures  # noqa: E402


def losses(end: float) -> list[float]:
    return [4.0] + [end] * LAST


BF16 = [losses(end) for end in (2.0, 2.1, 2.2)]  # deviation 0.1


@pytest.mark.parametrize(("endings", "missed"), [
    ((2.05, 2.12, 2.3), []), ((2.1, 2.2, 2.4), ["FP8's last losses less bf16's"]), ((2.0, 2.2, 2.2), ["runs without any difference"]),
    ((float("nan"), 2.05, 2.25), ["FP8's last losses less bf16's", "their fall, of the first loss"])])
def test_what_is_missed(endings, missed):
    figures = loss_figures(BF16, [losses(end) for end in endings])
    assert [figure.name for figure in figures if not figure.holds] == missed
