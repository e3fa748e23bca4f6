"""A benchmark is refused on a GPU that others use."""
import pytest
import torch

from tools.benchmarking.alone import refuse_company
from tools.refusal import Refusal

GIB = 2**30


@pytest.mark.parametrize(("free", "alone"), [(139.2, True), (137.9, False), (50.0, False)])
def test_refuse_company(monkeypatch, free, alone):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free * GIB), 140 * GIB))
    device = torch.device("cuda", 1)
    if alone:
        return refuse_company(device)
    with pytest.raises(Refusal, match=f"{140 - free:.1f} GiB of cuda:1 are held by other processes.*nvidia-smi"):
        refuse_company(device)
