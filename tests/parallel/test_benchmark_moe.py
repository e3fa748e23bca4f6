"""The moe suite of tools/benchmark.py on two gloo ranks, deep_ep's kernels replaced by their fake."""

import dataclasses

import pytest
import torch

from megatron_dllm.moe.dispatchers import build
from megatron_dllm.parallel import Topology, create_context
from tests.parallel import fake_deep_ep
from tools.benchmarking import moe
from tools.benchmarking.workload import toy_width

REPLAY, ANEW = CASES = (moe.Case("deepep"), moe.Case("deepep", replays=False))


def measured(rank, waits):
    """(losses, gradient norms, exchanges, replayed dispatches, layouts that the fake exchanged in all) of each case; the verdicts; those
    of results with another loss and an exchange too many."""
    context = create_context(Topology(world=2, ep=2), rank=rank, device=torch.device("cpu"), sequence_parallel=False)
    config = toy_width(["sliding", "full"])
    inputs = moe.own_share(config, 64, context)
    results, rows = {}, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "import_package", lambda *_: fake_deep_ep)
        for case in CASES[:1] if waits else CASES:
            bench = moe.Bench(case, config, inputs, context)
            buffer = bench.model.layers["0"].moe.dispatcher.buffer
            if waits:
                bench.wait_at_once()
            results[case] = bench.measure(repeats=1, tokens=128, warmup=1)
            rows.append((results[case].losses, results[case].norms, results[case].exchanges, results[case].steps[-1].result.replay.hits,
                         buffer.layouts))  # fmt: skip
            assert all(len(step.times) == 4 for step in results[case].steps)
    first, last = results[REPLAY].steps
    wrong = dataclasses.replace(
        last, result=dataclasses.replace(last.result, loss=last.result.loss * (1 + 1e-15)), exchanges=last.exchanges + 1)
    changed = results | {REPLAY: dataclasses.replace(results[REPLAY], steps=(first, wrong))}
    return rows, *(moe.judge(of, config.num_layers, context) for of in (results, changed))


@pytest.mark.slow
def test_cases(world):
    (replay, anew), verdicts, of_changed = plain = world.run(measured, False, size=2, timeout=120)[0]
    assert replay[:2] == anew[:2] and len(set(replay[0])) == 2
    # Two layers, two passes; two steps.
    assert replay[2:] == (4, 4, 8)
    assert anew[2:] == (8, 0, 16)
    # Losses, norms, the exchanges of each.
    assert verdicts == [True] * 4
    assert of_changed == [False, True, False, True]
    # Waiting for every transfer at once changes no bit.
    assert world.run(measured, True, size=2, timeout=120)[0][0] == plain[0][:1]
