"""Rows of two tensors in one order, by a kernel, against indexing."""
import pytest
import torch

from tests.unit.kernel_cases import DEVICES, need_kernels


@DEVICES
@pytest.mark.parametrize("sizes", [(17, 5, (3, 7)), (40, 13, (2, 1408)), (1, 1, (1,)), (9, 0, (5,)), (0, 4, (2816,))])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_those_of_both(device, sizes, dtype):
    need_kernels(device)
    from megatron_dllm.kernels.choose_rows import choose_rows

    first, second, shape = sizes
    a, b = (torch.randn(count, *shape, device=device).to(dtype) for count in (first, second))
    source = torch.randperm(first + second, device=device)[:max(1, first + second - 2)]
    assert torch.equal(choose_rows(a, b, source), torch.cat([a, b])[source])
    assert len(choose_rows(a, b, source[:0])) == 0
