"""Many flat tensors gone through by one launch: where they are, and which program takes which part of which."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .copies import upload

CHUNK = 4096  # elements of a program at most: AdamW takes 41.1 ms for 5.65 G elements, with 16384 42.1 (H200)
ALIGNMENT = 16  # bytes: what a thread reads at once


@dataclass(frozen=True)
class Pieces:
    """Pieces of K tensors each, all flat and of one length within a piece.

        rows    the tensors of each piece, which stay where they are as long as this is used
        table   int64 [P, K + 1]  their addresses, and their length
        chunks  int32 [C, 2]      the piece of each chunk, and which chunk of it this is
    """

    rows: tuple[tuple[Tensor, ...], ...]
    table: Tensor
    chunks: Tensor

    @classmethod
    def of(cls, rows: Sequence[Sequence[Tensor]]) -> Pieces:
        """All on one device; at least one piece. The host waits for nothing."""
        device = rows[0][0].device
        for row in rows:
            assert all(x.is_contiguous() and x.numel() == row[0].numel() and x.device == device for x in row)
            assert all(address % ALIGNMENT == 0 for address in addresses(row)), "tensors begin at multiples of 16 bytes"
        lengths = torch.tensor([row[0].numel() for row in rows])
        numbers = -(-lengths // CHUNK)
        piece = torch.repeat_interleave(torch.arange(len(rows)), numbers)
        within = torch.arange(len(piece)) - (numbers.cumsum(0) - numbers)[piece]
        table = torch.tensor([[*addresses(row), row[0].numel()] for row in rows])
        return cls(tuple(map(tuple, rows)), upload(table, device), upload(torch.stack([piece, within], 1).int(), device))


def addresses(tensors: Sequence[Tensor]) -> list[int]:
    """Of their first elements."""
    return [x.data_ptr() for x in tensors]
