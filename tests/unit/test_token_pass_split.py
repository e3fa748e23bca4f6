"""Pieces of a pass under sequence parallelism: where streams end and fill begins on each rank, against a list written out."""
import numpy as np
import pytest
import torch

from megatron_dllm.config import PRESETS
from megatron_dllm.tensor_parallel.dropout import TokenDraws
from megatron_dllm.transformer.block import near_equal_counts
from megatron_dllm.transformer.core_attention import attend, attention_plan
from megatron_dllm.transformer.token_pass import LAYER_TYPES, PassTokens, SequenceSplit, TokenPass, token_pass
from megatron_dllm.transformer.visibility import CLEAN, Visibility

SPLITS = [(5, 2, 2), (5, 3, 2), (1, 0, 4), (0, 3, 2), (2, 6, 4), (7, 4, 1), (0, 0, 2), (9, 1, 4)]


@pytest.mark.parametrize("num_clean, num_canvas, size", SPLITS)
def test_pieces_are_those_of_the_filled_list(num_clean, num_canvas, size):
    kinds = ["clean"] * num_clean + ["canvas"] * num_canvas
    kinds += ["fill"] * (-len(kinds) % size)
    length, values = len(kinds) // size, {"clean": 2.0, "canvas": 3.0, "fill": 3.0}
    for rank in range(size):
        own, piece = kinds[rank * length:(rank + 1) * length], TokenPass(num_clean, num_canvas, {}, SequenceSplit(rank, size))
        assert (piece.num_own, piece.num_own_clean, piece.num_own_fill) == (length, own.count("clean"), own.count("fill"))
        assert piece.per_stream(torch.tensor([2.0, 3.0])).flatten().tolist() == [values[kind] for kind in own]


@pytest.mark.parametrize("num_live", [0, 3, 5, 7, None])
def test_a_piece_has_its_own_part_of_the_rows_with_a_gradient(num_live):
    for rank, first in enumerate((0, 3, 6)):
        piece = TokenPass(5, 2, {}, SequenceSplit(rank, 3), draws=TokenDraws(None, None, num_live))
        assert piece.num_own_live == (None if num_live is None else sum(first <= row < first + 3 for row in range(num_live)))


def test_fill_gets_positions_and_attends_to_nothing():
    config, count = PRESETS["toy"], 5
    order = np.arange(count)
    visibility = Visibility(np.zeros(count, np.int64), order + 1, np.full(count, CLEAN), np.zeros(0, np.int64), count)
    made = token_pass(config, PassTokens(dict.fromkeys(LAYER_TYPES, visibility), order, num_clean=count), device=torch.device("cpu"),
                      split=SequenceSplit(1, 4))
    assert made.num_tokens == 5 and len(made.layers["full"].rotary.cos) == 8
    plan = attention_plan(visibility, None, torch.device("cpu"))
    query, key, value = (torch.randn(8, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    out = attend(query, key, value, plan)
    assert torch.equal(out[:5], attend(query[:5], key[:5], value[:5], plan)) and not out[5:].any()
    out.sum().backward()
    assert not value.grad[5:].any() and not key.grad[5:].any() and not query.grad[5:].any() and value.grad[:5].all()


@pytest.mark.parametrize("total, pieces, counts", [(7, 3, [3, 2, 2]), (2, 4, [1, 1, 0, 0]), (0, 2, [0, 0]), (6, 2, [3, 3])])
def test_near_equal_counts(total, pieces, counts):
    assert near_equal_counts(total, pieces) == counts
