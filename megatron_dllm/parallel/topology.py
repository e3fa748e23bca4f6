"""Which rank does what: pure arithmetic on sizes, no processes.

One world, two grids. Dense (tp, cp, dp, pp) for everything but experts; expert (etp, ep, edp, pp) for these. Leftmost is
fastest: with tp 2, cp 1, dp 2, pp 2 and ep 2 (etp 1, so edp 2), ranks 0 to 7 are

    rank  0 1 2 3 4 5 6 7
    tp    0 1 0 1 0 1 0 1
    dp    0 0 1 1 0 0 1 1
    pp    0 0 0 0 1 1 1 1
    ep    0 1 0 1 0 1 0 1
    edp   0 0 1 1 0 0 1 1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_dllm.config.parallel import ParallelConfig

# The axes of each group, in the order in which groups are created.
GROUP_AXES: dict[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "cp": ("cp",),
    "ep": ("ep",),
    "etp": ("etp",),
    "dp": ("dp",),
    "edp": ("edp",),
    "dp_cp": ("cp", "dp"),
    "pp": ("pp",),
}
_DENSE = ("tp", "cp", "dp", "pp")
_EXPERT = ("etp", "ep", "edp", "pp")
_FLAGS = {
    "tp": "--tensor-model-parallel-size",
    "cp": "--context-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "ep": "--expert-model-parallel-size",
    "etp": "--expert-tensor-parallel-size",
}


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Sizes of both grids over `world` ranks; ValueError where they do not divide it. dp and edp follow from the others."""

    world: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1

    @staticmethod
    def of(config: ParallelConfig, world: int) -> Topology:
        """The topology that the flags ask for."""
        return Topology(
            world=world,
            tp=config.tensor_model_parallel_size,
            cp=config.context_parallel_size,
            pp=config.pipeline_model_parallel_size,
            ep=config.expert_model_parallel_size,
            etp=config.expert_tensor_parallel_size,
        )

    def __post_init__(self) -> None:
        self._check(self.world, ("tp", "cp", "pp"), f"the world of {self.world} ranks")
        per_stage = self.world // self.pp
        self._check(per_stage, ("ep", "etp"), f"the {per_stage} ranks of a pipeline stage")

    def _check(self, ranks: int, axes: Sequence[str], what: str) -> None:
        sizes = {axis: getattr(self, axis) for axis in axes}
        too_small = [f"{_FLAGS[axis]} {size}" for axis, size in sizes.items() if size < 1]
        if too_small:
            raise ValueError(f"{', '.join(too_small)}: a size is 1 at least")
        product = _product(sizes.values())
        if ranks % product == 0:
            return
        fits = {axis: [n for n in range(1, ranks + 1) if ranks % (product // sizes[axis] * n) == 0] for axis in axes}
        remedies = [f"{_FLAGS[axis]} to one of {sizes}" for axis, sizes in fits.items() if sizes]
        raise ValueError(
            f"{', '.join(f'{_FLAGS[axis]} {size}' for axis, size in sizes.items())}: their product, {product}, does not divide {what}; "
            + (f"set {', or '.join(remedies)}" if remedies else f"make their product one of {_divisors(ranks)}")
        )

    @property
    def dp(self) -> int:
        """Data-parallel copies of the dense parameters."""
        return self.world // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        """Data-parallel copies of each expert."""
        return self.world // (self.etp * self.ep * self.pp)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Place of `rank` along every axis of both grids."""
        assert 0 <= rank < self.world, f"rank {rank} of {self.world}"
        places: dict[str, int] = {}
        for grid in (_DENSE, _EXPERT):
            rest = rank
            for axis in grid:
                rest, places[axis] = divmod(rest, getattr(self, axis))
        return places

    def groups(self, name: str) -> list[tuple[int, ...]]:
        """All groups called `name` (see GROUP_AXES): ranks that differ along its axes alone; each rank is in one of them."""
        axes = GROUP_AXES[name]
        grid = _DENSE if set(axes) <= set(_DENSE) else _EXPERT
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            places = self.coordinates(rank)
            groups.setdefault(tuple(places[axis] for axis in grid if axis not in axes), []).append(rank)
        return sorted(tuple(ranks) for ranks in groups.values())


def _product(sizes: Sequence[int]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
