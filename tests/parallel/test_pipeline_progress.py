"""What is told of a pipeline that stands still or has lost a rank: rank, stages, action, since when."""

import os
import re
import threading
import time

import pytest
import torch.distributed as dist

from megatron_dllm.pipeline.executor import batches
from megatron_dllm.pipeline.progress import Progress, ProgressBoard
from tests.parallel import affine
from tests.parallel.affine import AffineCase
from tests.parallel.world import RankFailure, run_world

CASE = AffineCase(2, 1, 6, 2, (False,) * 3)


def tell(rank):
    progress = Progress()
    progress.begin("F0.0")
    progress.end()
    progress.begin(f"B{rank}.0")
    with ProgressBoard(progress, rank=rank, ranks=2, stage=f"pipeline rank {rank} (Et)") as board:
        if rank:
            dist.barrier()
            return board.lines()
        for _ in range(100):
            if len(board.lines()) == 2 and "B1.0" in board.lines()[1]:
                break
            time.sleep(0.1)
        lines = board.lines()
        dist.barrier()
    assert not any(thread.name == "progress board" for thread in threading.enumerate())
    return lines


def test_progress_board(world):
    first, second = world.run(tell, size=2)
    assert [line.split(" for ")[0] for line in first] == [
        "rank 0, pipeline rank 0 (Et): at B0.0", "rank 1, pipeline rank 1 (Et): at B1.0"]
    assert all(line.endswith("after F0.0") for line in first)
    assert len(second) == 1


def die_in_the_middle(schedule, rank):
    """Rank 1 ends where its second backward would be."""
    if rank == 1:
        backwards = [action for action in schedule.lists[1] if action.kind == "B"]

        class Ending(list):
            def __iter__(self):
                for action in list.__iter__(self):
                    if action == backwards[1]:
                        os._exit(3)
                    yield action

        schedule.lists[1] = Ending(schedule.lists[1])
    return schedule


def compare_twice(rank):
    # The first time everything that torch loads late is loaded, so that the second time rank 0 soon comes to where it has to wait.
    affine.compare(rank, CASE)
    return affine.compare(rank, CASE, die_in_the_middle)


@pytest.mark.slow
def test_executor_names_the_action_that_a_dead_rank_left_waiting():
    with pytest.raises(RankFailure) as failure:
        run_world(2, compare_twice)
    text = str(failure.value)
    assert "rank 1 died with exit code 3" in text
    # How far it had come when the other one was gone is a matter of time.
    assert re.search(r"pipeline rank 0 of 2 failed at [SR][hg]\d\.0[<>]1.* for \d+ s, after ", text), text


def test_batches_of_starts():
    schedule = affine.build_schedule(affine.Pipeline(2, 2, (False,) * 2))
    for actions in schedule.lists:
        found = list(batches(actions))
        assert [action for group in found for action in group] == list(actions)
        assert all(len(group) == 1 or all(str(a)[0] in "SR" and not str(a).endswith("!") for a in group) for group in found)
        assert any(len(group) > 1 for group in found)
