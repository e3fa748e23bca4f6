"""Transfers and executor alone: affine stages over gloo against a serial run, bit for bit, and what a wrong order does."""

import pytest

from tests.parallel.affine import AffineCase, compare, swap_receives

SOME = (True, True, False, False)
NONE = (False,) * 4
CASES = {
    "pp2": AffineCase(2, 1, 40, 4, NONE),
    "pp2, some loops": AffineCase(2, 1, 40, 4, SOME),
    "pp2, all loops, unbatched": AffineCase(2, 1, 24, 4, (True,) * 3, batched=False),
    "pp2 vpp2": AffineCase(2, 2, 40, 4, NONE),
    "pp2 vpp2, some loops": AffineCase(2, 2, 40, 4, SOME),
    "pp2 vpp2, unbatched, without overlap": AffineCase(2, 2, 24, 4, SOME, batched=False, overlap=False),
    "pp2 vpp3 with empty stages": AffineCase(2, 3, 7, 1, SOME, empty=frozenset({1, 4})),
    "pp4": AffineCase(4, 1, 8, 2, (True, False, False, True, False)),
    "pp4 vpp2": AffineCase(4, 2, 8, 1, (True, False, False, False)),
    "pp2 vpp2 tp2": AffineCase(2, 2, 20, 4, SOME, tp=2),
    "pp2, a microbatch without rows": AffineCase(2, 1, 6, 2, SOME, rows_of_none=frozenset({1})),
    "one rank, two chunks": AffineCase(1, 2, 6, 2, SOME),
    # Scaled down to a row, at the widths of 4096 and 7168 with 4 streams.
    "pp2, 16384 wide": AffineCase(2, 1, 4096, 4, (True, False)),
    "pp2 vpp2, 28672 wide": AffineCase(2, 2, 7168, 4, (True, False)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_executor(world, case):
    for rank, found in enumerate(world.run(compare, case, size=case.ranks * case.tp)):
        assert found["different"] == 0, f"rank {rank}: {found}"
        assert found["compared"] > 0
        # A message to the own rank is the sender's tensor, and stays.
        assert found["held"] == (found["outputs"] if case.ranks == 1 else 0), f"rank {rank}: {found}"


def test_executor_in_wrong_order(world):
    """Both neighbours of a rank are the same one, so that a receive in the wrong place takes another boundary's tensor, unseen."""
    case = AffineCase(2, 2, 6, 1, NONE, equal_rows=True)
    assert sum(found["different"] for found in world.run(compare, case, size=2)) == 0
    assert sum(found["different"] for found in world.run(compare, case, swap_receives, size=2)) > 0
