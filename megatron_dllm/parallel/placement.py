"""Where a parameter's shard lies in the whole parameter, and what its gradient still lacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from .context import ParallelContext

AXES = {"dense": ("tp",), "expert": ("ep", "etp")}


@dataclass(frozen=True)
class Placement:
    """The rectangle of a parameter that this rank holds.

    shape            of the whole parameter, without fill
    offset           first element of our rectangle
    extent           its size
    local_shape      of the tensor that holds it: longer than `extent` where a dimension is filled up (`region` cuts it)
    axes             for each model-parallel axis of the grid: the dimension it cuts, or None (equal on its ranks)
    grid             "dense": gradients are summed over dp_cp; "expert": over edp
    hold_fp32        kept and computed in fp32 at least, whatever the compute dtype
    tied_to          name of the parameter that it equals; their gradients are summed
    partial_over_tp  each tp rank has seen only part of the sequence or of the heads: gradients are summed over tp
    copies           so many consecutive tp ranks hold the same rectangle (KV heads fewer than ranks), and each has
                     its own share of the gradient: gradients are summed over these ranks
    first            this rank is the one of its model-parallel ranks that counts the rectangle (norms, checkpoints)
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    local_shape: tuple[int, ...]
    axes: Mapping[str, int | None]
    grid: str = "dense"
    hold_fp32: bool = False
    tied_to: str | None = None
    partial_over_tp: bool = False
    copies: int = 1
    first: bool = True

    def region(self, local: Tensor) -> Tensor:
        """The part of the local tensor (parameter, gradient or state) that is not fill, as a view."""
        return cut_rectangle(local, (0,) * local.dim(), self.extent)

    def cut(self, whole: Tensor) -> Tensor:
        """Our rectangle of the whole tensor, as a view."""
        assert tuple(whole.shape) == self.shape, f"a parameter of shape {self.shape}, a tensor of shape {tuple(whole.shape)}"
        return cut_rectangle(whole, self.offset, self.extent)


def cut_rectangle(x: Tensor, offset: Sequence[int], extent: Sequence[int]) -> Tensor:
    """The rectangle of `x` from `offset`, of size `extent`, as a view."""
    for dim, (start, size) in enumerate(zip(offset, extent, strict=True)):
        x = x.narrow(dim, start, size)
    return x


def place(
    shape: tuple[int, ...],
    context: ParallelContext,
    *,
    cut: Mapping[str, int] | None = None,
    grid: str = "dense",
    fill: bool = False,
    hold_fp32: bool = False,
    partial_over_tp: bool = False,
    copies: int = 1,
) -> Placement:
    """Placement of a parameter of `shape` on this rank; `cut` maps an axis (tp; ep, etp) to the dimension that it cuts.

    With `fill`, a dimension that the ranks do not divide is cut into pieces of ceil(size / R), the last ones filled up;
    without, ValueError. Tied parameters: `dataclasses.replace(placement, tied_to=name)`.
    """
    cut = dict(cut or {})
    unknown = set(cut) - set(AXES[grid])
    assert not unknown, f"axes {sorted(unknown)} do not cut {grid} parameters ({', '.join(AXES[grid])} do)"
    assert copies == 1 or "tp" in cut, "only a parameter that tp cuts has copies"
    offset, extent, local, first = [0] * len(shape), list(shape), list(shape), True
    for axis in AXES[grid]:
        group = context.group(axis)
        if axis not in cut:
            first = first and group.rank == 0
            continue
        share = copies if axis == "tp" else 1
        assert group.size % share == 0, f"{share} copies do not divide the {group.size} ranks of {axis}"
        dim, pieces = cut[axis], group.size // share
        if not fill:
            _check_divides(shape, dim, pieces, axis)
        local[dim] = -(-shape[dim] // pieces)
        offset[dim] = min(group.rank // share * local[dim], shape[dim])
        extent[dim] = min(local[dim], shape[dim] - offset[dim])
        first = first and group.rank % share == 0
    return Placement(
        shape=tuple(shape),
        offset=tuple(offset),
        extent=tuple(extent),
        local_shape=tuple(local),
        axes={axis: cut.get(axis) for axis in AXES[grid]},
        grid=grid,
        hold_fp32=hold_fp32,
        partial_over_tp=partial_over_tp,
        copies=copies,
        first=first,
    )


def _check_divides(shape: tuple[int, ...], dim: int, pieces: int, axis: str) -> None:
    size = shape[dim]
    if size % pieces:
        fits = [n for n in range(1, min(size, 64) + 1) if size % n == 0]
        raise ValueError(
            f"dimension {dim} of a weight of shape {shape} has {size} elements, which do not divide over {pieces} pieces ({axis}); "
            f"numbers of pieces that fit: {fits}"
        )
