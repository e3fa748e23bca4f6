"""Flags of mixture of experts: what cannot work is refused, and the remedy that is named works."""

import pytest

from megatron_dllm.config import parse, validate


def problems_of_dispatcher(*words: str) -> list:
    """Those that name --moe-token-dispatcher-type or --moe-recompute-replay."""
    run = parse(["--preset", "toy", "--data-source", "sudoku", "--train-iters", "1", *words])
    return [p for p in validate(run, world_size=2) if {"--moe-token-dispatcher-type", "--moe-recompute-replay"} & p.flags.keys()]


EP2 = ("--expert-model-parallel-size", "2", "--bf16")


@pytest.mark.parametrize(
    "words, why, remedies",
    [
        (("--bf16",), "there is one", (("--bf16", *EP2),)),
        (EP2[:2], "bf16 rows", (EP2,)),
        ((*EP2, "--device", "cpu"), "CUDA", ((*EP2, "--device", "cuda"),)),
        ((*EP2, "--expert-tensor-parallel-size", "2"), "one rank an expert", (EP2,)),
    ],
)
@pytest.mark.parametrize("kernels", ["deepep", "hybridep", "flex", "flex --moe-flex-dispatcher-backend hybridep"])
def test_kernels(kernels, words, why, remedies):
    chosen = ("--moe-token-dispatcher-type", *kernels.split())
    (problem,) = problems_of_dispatcher(*words, *chosen)
    assert why in str(problem) and "alltoall" in problem.remedy
    for remedy in remedies:
        assert not problems_of_dispatcher(*remedy, *chosen)
    assert not problems_of_dispatcher(*words, "--moe-token-dispatcher-type", "alltoall")


def test_hybridep_without_replay_names_both_settings_that_work():
    words = (*EP2, "--moe-token-dispatcher-type", "hybridep")
    for recompute in (("full",), ("selective", "--recompute-modules", "mlp", "moe")):
        repeating = (*words, "--recompute-granularity", *recompute)
        (problem,) = problems_of_dispatcher(*repeating, "--no-moe-recompute-replay")
        assert "--moe-recompute-replay" in problem.remedy and "--recompute-granularity" in problem.remedy
        assert not problems_of_dispatcher(*repeating, "--moe-recompute-replay")
    assert not problems_of_dispatcher(*words)
    other_parts = (*words, "--recompute-granularity", "selective", "--recompute-modules", "mlp")
    assert not problems_of_dispatcher(*other_parts, "--no-moe-recompute-replay")
    deepep = (*EP2, "--moe-token-dispatcher-type", "deepep", "--recompute-granularity", "full", "--no-moe-recompute-replay")
    assert not problems_of_dispatcher(*deepep)


def test_replay_needs_recompute():
    (problem,) = problems_of_dispatcher("--no-moe-recompute-replay")
    assert "no effect without --recompute-granularity" in str(problem)


@pytest.mark.parametrize("words, dispatcher", [
    (("alltoall",), "alltoall"), (("hybridep",), "hybridep"), (("flex",), "deepep"),
    (("flex", "--moe-flex-dispatcher-backend", "hybridep"), "hybridep")])  # fmt: skip
def test_both_spellings(words, dispatcher):
    run = parse(["--preset", "toy", *EP2, "--moe-token-dispatcher-type", *words])
    assert run.moe.dispatcher == dispatcher
    assert run.moe.moe_token_dispatcher_type == words[0]  # as it was said
    assert not problems_of_dispatcher(*EP2, "--moe-token-dispatcher-type", *words)


def problems_naming(name: str, *words: str) -> list:
    run = parse(["--preset", "toy", "--data-source", "sudoku", "--train-iters", "1", *words])
    return [p for p in validate(run, world_size=2) if name in p.flags]


def test_a_backend_without_flex_is_not_ignored():
    words = ("--moe-flex-dispatcher-backend", "hybridep", "--moe-token-dispatcher-type")
    (problem,) = problems_naming(words[0], *EP2, *words, "deepep")
    assert "no effect without --moe-token-dispatcher-type flex" in str(problem)
    assert not problems_naming(words[0], *EP2, *words, "flex")
    (problem,) = problems_naming(words[0], *EP2, *words, "flex", "--recompute-granularity", "full", "--no-moe-recompute-replay")
    assert "another number of rows" in str(problem)


@pytest.mark.parametrize("words, why, remedy", [
    ((*EP2, "--moe-token-dispatcher-type", "allgather"), "in any case", EP2),
    ((*EP2, "--moe-token-dispatcher-type", "hybridep"), "in any case", (*EP2, "--moe-token-dispatcher-type", "deepep")),
    (EP2[:2], "on the host", EP2), ((*EP2, "--no-moe-grouped-gemm"), "on the host", EP2)])  # fmt: skip
def test_a_bound_on_tokens(words, why, remedy):
    bound = ("--moe-max-tokens-per-rank", "640")
    (problem,) = problems_naming(bound[0], *words, *bound)
    assert why in str(problem)
    assert not problems_naming(bound[0], *remedy, *bound)
    (problem,) = problems_naming(bound[0], *remedy, bound[0], "0")
    assert "must be" in str(problem)
