"""Who fails first tells the others: they wait for it without a limit, and end with its reason instead of their lost connections."""
import time

import pytest
import torch
import torch.distributed as dist

from megatron_dllm.parallel import FirstFailure, FirstRankFirst, Group, OtherRankFailed, Topology, create_context, failures
from tests.parallel.world import RankFailure


def context_of(rank):
    return create_context(Topology(world=dist.get_world_size()), rank=rank, device=torch.device("cpu"), sequence_parallel=False)


def blocks(rank):
    """When the rank was in each of two blocks, and how many collectives of ours that took."""
    context = context_of(rank)
    context.log.clear()
    times = []
    for _ in range(2):
        with FirstRankFirst(context.world, "sleeps"):
            entered = time.monotonic()
            time.sleep(0.05)
            times.append((entered, time.monotonic()))
    return times, context.log.total()[0]


def test_others_enter_when_rank_0_has_left(world):
    (first, none), *others = world.run(blocks, size=3)
    for times, calls in others:
        assert calls == none == 0, "a collective has a time limit"
        assert all(their[0] >= ours[1] for ours, their in zip(first, times, strict=True))


def failing_block(rank):
    context = context_of(rank)
    with FirstFailure(context.world), FirstRankFirst(context.world, "prepares the data"):
        raise ValueError(f"rank {rank} finds no data.jsonl\nand says more")


def test_others_do_not_enter_what_rank_0_failed_in(world):
    with pytest.raises(RankFailure) as failure:
        world.run(failing_block, size=2)
    text = str(failure.value)
    assert "OtherRankFailed: rank 0 failed: rank 0 finds no data.jsonl\n" in text and "rank 1 finds" not in text


# The second rank's own exception -> what it ends with. The first has failed of ValueError("no such file").
FOLLOWING = {
    "lost connection": (RuntimeError("Connection closed by peer"), OtherRankFailed),
    "lost store": (dist.DistNetworkError("connection reset"), OtherRankFailed),
    "the same words": (ValueError("no such file"), OtherRankFailed),
    "another mistake": (ValueError("another file"), ValueError),
    "a fault of the program": (KeyError("no such file"), KeyError),
}


def fail_after_another(rank, error, first):
    """What rank 1, failing with `error` after rank 0 (or, `first`, before it), ends with."""
    context = context_of(rank)
    own = error if rank == 1 else ValueError("no such file")
    order = [1, 0] if first else [0, 1]
    try:
        if rank == order[1]:
            dist.recv(torch.zeros(1), order[0])
        with FirstFailure(context.world):
            raise own
    except (RuntimeError, ValueError, KeyError) as raised:
        if rank == order[0]:
            dist.send(torch.zeros(1), order[1])
        return type(raised), str(raised)


@pytest.mark.parametrize("case", FOLLOWING)
def test_what_follows_a_failure_is_told_by_its_cause(world, case):
    error, kind = FOLLOWING[case]
    (cause, _), (found, text) = world.run(fail_after_another, error, False, size=2)
    assert (cause, found) == (ValueError, kind)
    assert (text == "rank 0 failed: no such file") == (kind is OtherRankFailed)


def test_the_first_failure_passes_as_it_is(world):
    _, (found, text) = world.run(fail_after_another, RuntimeError("device-side assert"), True, size=2)
    assert (found, text) == (RuntimeError, "device-side assert")


class GoneStore:
    def compare_set(self, *given):
        raise dist.DistNetworkError("failed to recv, got 0 bytes")


@pytest.mark.parametrize("rank, error, kind", [
    (1, RuntimeError("Connection closed by peer"), OtherRankFailed), (1, ValueError("no such file"), ValueError),
    (0, RuntimeError("Connection closed by peer"), RuntimeError)])
def test_where_the_store_has_ended_too(monkeypatch, rank, error, kind):
    """As under srun, where it ends with rank 0: the others do not print a connection's traceback."""
    monkeypatch.setattr(failures, "_get_default_store", GoneStore)
    with pytest.raises(kind) as raised, FirstFailure(Group("world", 2, rank, None, (0, 1))):
        raise error
    assert type(raised.value) is kind


def test_a_failure_without_a_text_is_a_failure():
    assert failures.first_line(failures.describe(ValueError())) == "an error without a text"
    assert failures.first_line("\nbad rows\n3") == "bad rows"
