import os
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.parallel.world import RankFailure, World, run_world


def sum_of_ranks(rank: int, offset: int) -> tuple[int, torch.Tensor]:
    value = torch.tensor([rank + offset])
    dist.all_reduce(value)
    return dist.get_world_size(), value


def draw(rank: int) -> float:
    assert torch.empty(3).isnan().all()
    return torch.rand(()).item()


def raise_on(failing_rank: int, rank: int) -> None:
    if rank == failing_rank:
        raise KeyError(f"planted on rank {rank}")
    dist.barrier()


def raise_on_rank_1(rank: int) -> None:
    raise_on(1, rank)


def raise_everywhere(rank: int) -> None:
    raise ArithmeticError(f"planted on rank {rank}")


def hang_on_rank_0(rank: int) -> str:
    if rank == 0:
        time.sleep(600)
    return "done"


def die_on_rank_1(rank: int) -> None:
    if rank == 1:
        print("last words")
        os._exit(7)
    dist.barrier()


def warn(rank: int) -> None:
    warnings.warn("planted warning", UserWarning, stacklevel=1)


def new_group_of_two(rank: int) -> int:
    group = dist.new_group([0, 1])
    value = torch.ones(1)
    if rank < 2:
        dist.all_reduce(value, group=group)
    return int(value.item())


def pid(rank: int) -> int:
    return os.getpid()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_run_gives_results_by_rank_for_any_size(world, size):
    results = world.run(sum_of_ranks, 10, size=size)
    assert len(results) == size
    for world_size, value in results:
        assert world_size == size
        assert value.item() == sum(range(size)) + 10 * size


def test_run_makes_a_fresh_group_and_seed_for_each_case(world):
    assert world.run(new_group_of_two, size=3) == [2, 2, 1]
    assert world.run(new_group_of_two, size=3) == [2, 2, 1]
    first, again = world.run(draw), world.run(draw)
    assert first == again and len(set(first)) == 1


def test_run_refuses_more_ranks_than_there_are(world):
    with pytest.raises(ValueError, match="size=5: a world of 4 processes"):
        world.run(pid, size=5)


def test_run_raises_with_the_tracebacks_and_keeps_a_world_whose_ranks_all_ended(world):
    before = world.run(pid)
    with pytest.raises(RankFailure, match="ArithmeticError: planted on rank 2"):
        world.run(raise_everywhere)
    assert world.run(pid) == before


def test_run_applies_the_warning_filters_of_the_test(world):
    with pytest.raises(RankFailure, match="planted warning"):
        world.run(warn, size=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert world.run(warn, size=1) == [None]


def test_run_reports_failing_hanging_and_dying_ranks_and_starts_again():
    # One world for all of it: only the restarts that the cases themselves force.
    world = World(2)
    try:
        with pytest.raises(RankFailure) as raised:
            world.run(raise_on_rank_1)
        assert "rank 1 raised:" in str(raised.value) and "planted on rank 1" in str(raised.value)
        assert "in raise_on" in str(raised.value).split("rank 0")[1]  # where rank 0 was, hung or disconnected
        with pytest.raises(RankFailure) as raised:
            world.run(hang_on_rank_0, timeout=0.5)
        assert "rank 0 was still at work after 0.5 s" in str(raised.value)
        assert "in hang_on_rank_0" in str(raised.value)
        assert "ranks [1] returned" in str(raised.value)
        with pytest.raises(RankFailure) as raised:
            world.run(die_on_rank_1)
        assert "rank 1 died with exit code 7" in str(raised.value) and "last words" in str(raised.value)
    finally:
        world.close()


def test_run_world_starts_runs_and_ends_processes():
    (process,) = run_world(1, pid)
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
