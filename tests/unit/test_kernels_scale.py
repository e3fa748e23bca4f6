"""kernels.scale: exactly what torch computes in two steps."""

import pytest
import torch

from tests.unit.kernel_cases import DEVICES, draw, need_kernels


@DEVICES
@pytest.mark.parametrize("shape", [(1, 1), (3, 5000), (0, 4), (70, 64)], ids=str)
def test_scaled_and_add_scaled(shape, device):
    need_kernels(device)
    from megatron_dllm.kernels.scale import add_scaled_, num_sums, scaled

    x, total = (draw(*shape, dtype=torch.float32, device=device, grad=False) * factor for factor in (1, 0.3))
    scale = torch.tensor(-0.37, device=device)
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(scaled(x, scale, dtype), (x * scale).to(dtype))
    fresh = torch.full_like(total, float("nan"))
    for start, is_fresh in ((total, 0), (fresh, 1)):
        want = x.double() * scale.double() + (0 if is_fresh else start.double())
        flag = torch.tensor([is_fresh], dtype=torch.int32, device=device)
        squares = torch.full((num_sums(x),), float("nan"), device=device)
        add_scaled_(start, x, scale, flag, squares)
        assert squares.double().sum().item() == pytest.approx(start.double().square().sum().item(), rel=1e-6)
        torch.testing.assert_close(start.double(), want, rtol=2e-7, atol=1e-7)
        assert flag.item() == 0
