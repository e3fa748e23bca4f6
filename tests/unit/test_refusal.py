"""tools/refusal.py: which errors of a suite are told without a traceback."""
import pytest

from megatron_dllm.parallel.launch import shares_gpu
from tools.refusal import Refusal, status_of


def refuse():
    raise Refusal("no GPU here")


def test_refusals_and_the_packages_own_mistakes_are_lines(capsys):
    assert status_of(refuse) == 2 and status_of(lambda: shares_gpu({"SHARE_GPU": "yes"})) == 2
    assert capsys.readouterr().err == "error: no GPU here\nerror: SHARE_GPU='yes': set 1, or leave it out\n"
    assert (status_of(lambda: 0), status_of(lambda: 3)) == (0, 1)


def test_other_errors_keep_their_traceback():
    with pytest.raises(ValueError, match="invalid literal"):
        status_of(lambda: int("yes"))
