"""Gradients of which each tensor-parallel rank has only a share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from megatron_dllm.parallel import communication
from megatron_dllm.parallel.context import Group
from megatron_dllm.parallel.placement import Placement


def sum_shared_gradients(gradients: Iterable[tuple[Tensor, Placement]], tp: Group) -> None:
    """Complete, in place, the gradients that are shared out over `tp`: one all-reduce for each dtype, once a step.

    Shared out are those of placements with `partial_over_tp` (norms under sequence parallelism, q and k norms, ...), summed
    over all ranks, and with `copies` > 1 (KV heads fewer than ranks), summed over the ranks that hold the same rectangle.
    """
    if tp.size == 1:
        return
    by_dtype: dict[torch.dtype, list[tuple[Tensor, Placement]]] = defaultdict(list)
    for gradient, placement in gradients:
        if placement.partial_over_tp or placement.copies > 1:
            by_dtype[gradient.dtype].append((gradient, placement))
    for _, items in sorted(by_dtype.items(), key=lambda item: str(item[0])):
        slots = [_slots(gradient, placement, tp) for gradient, placement in items]
        summed = communication.all_reduce(torch.cat([slot.flatten() for slot in slots]), tp, overwrite=True)
        for (gradient, placement), slot, flat in zip(items, slots, summed.split([s.numel() for s in slots]), strict=True):
            gradient.copy_(flat.view_as(slot)[_slot_index(placement, tp)])


def _slot_index(placement: Placement, tp: Group) -> int:
    return 0 if placement.partial_over_tp else tp.rank // placement.copies


def _slots(gradient: Tensor, placement: Placement, tp: Group) -> Tensor:
    """[slots, ...]: one slot for each rectangle that ranks share, zero but for ours; so one sum serves all of them."""
    if placement.partial_over_tp:
        assert placement.axes["tp"] is None, "a gradient to be summed over all of tp belongs to a parameter that tp does not cut"
        return gradient.unsqueeze(0)
    slots = gradient.new_zeros(tp.size // placement.copies, *gradient.shape)
    slots[_slot_index(placement, tp)] = gradient
    return slots
