"""kernels.add_gradients: what torch computes in fp32, and its squares."""

import pytest
import torch

from tests.unit.kernel_cases import DEVICES, draw, need_kernels


@DEVICES
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5000), (0, 4), (70, 64)], ids=str)
def test_sums_and_squares(shape, count, device):
    need_kernels(device)
    from megatron_dllm.kernels.add_gradients import add_gradients, num_sums

    parts = [draw(shape[0] + n, shape[1], dtype=torch.bfloat16, device=device, grad=False)[n:] for n in range(count)]
    before = draw(*shape, dtype=torch.float32, device=device, grad=False)
    for is_fresh, start in ((0, before), (1, torch.full_like(before, float("nan")))):
        want = sum((part.double() for part in parts), torch.zeros_like(before) if is_fresh else before.double())
        flag = torch.tensor([is_fresh], dtype=torch.int32, device=device)
        squares = torch.full((num_sums(before),), float("nan"), device=device)
        add_gradients(start, parts, flag, squares)
        torch.testing.assert_close(start.double(), want, rtol=3e-7, atol=1e-6)
        assert squares.double().sum().item() == pytest.approx(start.double().square().sum().item(), rel=1e-6)
        assert flag.item() == 0


@DEVICES
def test_buffers_that_nothing_was_added_to_are_cleared(device):
    need_kernels(device)
    from megatron_dllm.kernels.add_gradients import FreshBuffers

    flags = [1, 0, 1, 0]
    rows = [(torch.full((size,), float(number + 1), device=device), torch.full((count,), 5.0, device=device),
             torch.tensor([flag], dtype=torch.int32, device=device))
            for number, (size, count, flag) in enumerate(zip((5, 7, 300_000, 1), (1, 2, 9000, 1), flags, strict=True))]
    buffers = FreshBuffers(rows)
    for _ in range(2):
        buffers.clear()
        for number, ((total, squares, is_fresh), flag) in enumerate(zip(rows, flags, strict=True)):
            assert (total == (0 if flag else number + 1)).all() and (squares == (0 if flag else 5)).all() and is_fresh.item() == 0
