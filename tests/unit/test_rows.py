"""megatron_dllm.transformer.rows: taking rows and their gradient."""
import numpy as np
import pytest
import torch

from megatron_dllm.transformer.rows import Rows

CPU = torch.device("cpu")


@pytest.mark.parametrize("values", [[2, 3, 4], [4, 0, 2], [1, 1, 3, 0], [], [5]], ids=["run", "distinct", "repeated", "none", "one"])
def test_take_equals_indexing_and_so_does_its_gradient(values):
    x = torch.randn(6, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    rows = Rows.of(np.array(values, np.int64), CPU)
    taken, expected = rows.take(x), x[torch.tensor(values, dtype=torch.int64)]
    assert torch.equal(taken, expected)
    upstream = torch.randn(taken.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(*(torch.autograd.grad(y, x, upstream)[0] for y in (taken, expected)))


def test_rows_know_whether_they_repeat():
    assert isinstance(Rows.of(np.arange(3, 6), CPU).index, slice)
    assert Rows.of(np.array([3, 1]), CPU).distinct and not Rows.of(np.array([3, 1, 3]), CPU).distinct
