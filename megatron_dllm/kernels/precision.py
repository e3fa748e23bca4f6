"""In what precision sums are added up."""
from __future__ import annotations

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 for 16-bit types, the type itself otherwise."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
