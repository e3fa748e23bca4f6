"""The context suite: documents of exact length that hold their key, and what its table says."""
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path[:0] = [str(Path(__file__).parents[2] / "tools"), str(Path(__file__).parents[2])]

from benchmarking.context import Bench, PasskeyRows, Result, make_run, table  # noqa: E402

from examples.diffusion_gemma.synthetic_data import passkey  # noqa: E402
from megatron_dllm.config import ParallelConfig, validate  # noqa: E402
from megatron_dllm.data.tokenizers import ByteTokenizer  # noqa: E402
from megatron_dllm.parallel import ParallelContext  # noqa: E402

RESULT = Result(1000, 2, 5.0, 250.0, 10.0, 11.0, 4096.0, 1.5, 2.5, tuple(float(10 - step) for step in range(6)))


@pytest.mark.parametrize("seq_length", [333, 1000])
def test_documents_have_the_length_and_the_key(seq_length):
    rows, tokenizer = PasskeyRows(3, seq_length, 16), ByteTokenizer()
    for index in range(3):
        tokens, (prompt, response) = rows.tokens(index), rows.lengths[index]
        assert (prompt, len(tokens)) == (seq_length - 16, prompt + response) and response <= 16
        text, answer = tokenizer.decode(tokens[:prompt].tolist()), tokenizer.decode(tokens[prompt:-1].tolist())
        assert answer == passkey(index, 0)[1] and f"The pass key is {answer}. " in text and text.endswith("What is the pass key?")
    with pytest.raises(ValueError, match="longer --seq-length"):
        PasskeyRows(1, 40, 16).tokens(0)


@pytest.mark.parametrize(("toy", "ranks"), [(True, 1), (True, 2), (False, 1), (False, 2)])
def test_runs_are_valid(toy, ranks):
    run = make_run(ParallelConfig(context_parallel_size=ranks, use_distributed_optimizer=True), toy, 512, 20)
    assert validate(run.with_values(data_source="sudoku"), world_size=ranks) == []


def test_table_says_memory_by_token_of_a_rank():
    header, row = (line.split("  ") for line in table([RESULT]).splitlines())
    cells = dict(zip((cell.strip() for cell in header if cell.strip()), (cell.strip() for cell in row if cell.strip()), strict=True))
    assert (cells["tokens/s"], cells["KiB a token"]) == ("4,000", str(2 * 2**20 // 1000))
    assert RESULT.falls and not replace(RESULT, losses=RESULT.losses[::-1]).falls
    assert RESULT.ends == (9.0, 6.0) and replace(RESULT, losses=(3.0,)).ends == (3.0, 3.0)
    assert RESULT.is_finite and not replace(RESULT, losses=(1.0, float("nan"))).is_finite


@pytest.mark.slow
def test_contexts_are_the_full_layer_and_the_last_window(monkeypatch):
    run = make_run(ParallelConfig(), True, 512, 1)
    bench = Bench.build(run, ParallelContext.single(torch.device("cpu")))
    result = bench.measure(512, 1)
    bench.optimizer.buckets.release()
    model = run.model
    # Kept rows are filled up to a multiple of 128: of the 496 before the canvas all 512, and of the window's 7 the 128.
    expected = sum((512 if kind == "full" else 128) * 2 * 4 * model.kv_heads(layer) * model.head_dim(layer)
                   for layer, kind in enumerate(model.layer_types))
    assert model.window_size <= 128 and result.context_bytes == expected / 512
    assert np.isfinite(result.losses).all()
