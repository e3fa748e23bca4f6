"""Closed forms of the compute lists without loops: no pipeline, 1F1B, interleaved 1F1B. Pure: no tensors, no processes.

Sources: Narayanan et al. 2019 (PipeDream, SOSP) for 1F1B; Narayanan et al. 2021 (arXiv 2104.04473), section 2.2.2, for the interleaved one.
"""

from megatron_dllm.pipeline.actions import Action, Kind

GROUP_FLAG = "--microbatch-group-size-per-virtual-pipeline-stage"


def no_pipeline(*, microbatches: int) -> list[Action]:
    """Forward and backward of one microbatch after the other, on one rank with one chunk."""
    return [Action(kind, m, 0) for m in range(microbatches) for kind in (Kind.FORWARD, Kind.BACKWARD)]


def one_f_one_b(rank: int, *, ranks: int, microbatches: int, extra_warmup: int = 0) -> list[Action]:
    """Compute steps of `rank`: P - rank - 1 warm-up forwards, then pairs of forward and backward, then the backwards that are left."""
    forwards = [Action(Kind.FORWARD, m, 0) for m in range(microbatches)]
    backwards = [Action(Kind.BACKWARD, m, 0) for m in range(microbatches)]
    return _pair(forwards, backwards, warmup_depth(rank, ranks=ranks, chunks=1, group=1, extra=extra_warmup))


def interleaved_1f1b(rank: int, *, ranks: int, chunks: int, microbatches: int, group: int, extra_warmup: int = 0) -> list[Action]:
    """Compute steps of `rank`: warm-up forwards, then pairs, then the backwards that are left.

    `group` microbatches pass a chunk before the next chunk starts; ValueError if it breaks the rule of check_group.
    """
    check_group(ranks=ranks, chunks=chunks, microbatches=microbatches, group=group)
    order = visiting_order(chunks=chunks, microbatches=microbatches, group=group)
    forwards = [Action(Kind.FORWARD, m, c) for m, c in order]
    backwards = [Action(Kind.BACKWARD, m, chunks - 1 - c) for m, c in order]
    return _pair(forwards, backwards, warmup_depth(rank, ranks=ranks, chunks=chunks, group=group, extra=extra_warmup))


def visiting_order(*, chunks: int, microbatches: int, group: int) -> list[tuple[int, int]]:
    """(microbatch, chunk) in the order in which every rank runs forwards; backwards take the same order with the chunks reversed."""
    starts = range(0, microbatches, group)
    return [(m, c) for start in starts for c in range(chunks) for m in range(start, min(start + group, microbatches))]


def warmup_depth(rank: int, *, ranks: int, chunks: int, group: int, extra: int = 0) -> int:
    """Forwards that `rank` runs before its first pair, if there are that many; `extra` more hide slow transfers and take memory."""
    after = ranks - rank - 1
    return after + extra if chunks == 1 else 2 * after + (chunks - 1) * group + extra


def _pair(forwards: list[Action], backwards: list[Action], warmup: int) -> list[Action]:
    warmup = min(warmup, len(forwards))
    pairs = [action for pair in zip(forwards[warmup:], backwards, strict=False) for action in pair]
    return forwards[:warmup] + pairs + backwards[len(forwards) - warmup :]


def check_group(*, ranks: int, chunks: int, microbatches: int, group: int) -> None:
    """ValueError unless P <= group <= M and the last, smaller group (if any) also has at least P microbatches.

    A smaller group comes round to the next chunk of the first rank before the last rank has ended the chunk before it: all ranks then idle
    in each round, or wait for each other for ever. With one chunk there are no groups, and any number of microbatches is legal.
    """
    if chunks == 1:
        return
    remainder = microbatches % group if group >= 1 else 0
    if ranks <= group <= microbatches and (remainder == 0 or remainder >= ranks):
        return
    legal = legal_groups(ranks=ranks, chunks=chunks, microbatches=microbatches)
    in_range = ranks <= group <= microbatches
    broken = f"the last group has only {remainder}" if in_range else f"{group} is not in the range {ranks} to {microbatches}"
    more = f"give each pipeline at least {ranks} microbatches (a larger --global-batch-size)"
    remedy = f"set {GROUP_FLAG} to one of {legal}" if legal else more
    raise ValueError(
        f"{microbatches} microbatches in groups of {group} over {ranks} pipeline ranks with {chunks} virtual stages each: {broken}. "
        f"Every group, the last included, needs at least as many microbatches as there are ranks, and at most all of them; {remedy}."
    )


def legal_groups(*, ranks: int, chunks: int, microbatches: int) -> list[int]:
    """The group sizes that check_group accepts; [1] with one chunk, where groups mean nothing."""
    if chunks == 1:
        return [1]
    return [g for g in range(ranks, microbatches + 1) if microbatches % g == 0 or microbatches % g >= ranks]
