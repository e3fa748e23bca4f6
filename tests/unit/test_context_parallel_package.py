"""megatron_dllm.context_parallel.transformer_engine: fill and its inverse, chunks and biases by hand; which layers are the package's."""
from unittest import mock

import numpy as np
import pytest
import torch

from megatron_dllm.config import PRESETS, ParallelConfig
from megatron_dllm.context_parallel import transformer_engine as package
from megatron_dllm.context_parallel.layout import by_package, zigzag_documents
from megatron_dllm.context_parallel.transformer_engine import Document, canvas_plan, causal_plan, document_chunk
from megatron_dllm.transformer.visibility import Visibility

CPU = torch.device("cpu")


@pytest.mark.parametrize("document", [Document(3, 1, 3), Document(2, 0, 4), Document(0, 0, 2), Document(5, 5, 5)])
def test_fill_stands_after_each_part_and_comes_off(document):
    x = torch.arange(1.0, document.num_tokens * 2 + 1).view(-1, 2).requires_grad_()
    filled = document.filled(x)
    assert filled.shape == (2 * document.chunk, 2)
    halves = filled.view(2, document.chunk, 2)
    assert [int(half.any(1).sum()) for half in halves] == [document.early, document.late]
    assert not halves[0, document.early:].any() and not halves[1, document.late:].any()
    assert torch.equal(document.tokens(filled), x)
    document.tokens(filled * 3).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3))


def test_documents_are_cut_by_themselves():
    with mock.patch.object(package, "KEY_MULTIPLE", 1):
        parts = zigzag_documents(np.array([0, 2]), 13, 2)
        assert [part.tolist() for part in parts] == [[0, 2, 3, 4, 11, 12], [1, 5, 6, 7, 8, 9, 10]]
        plans = [causal_plan(part, np.array([0, 2]), 13, None, "p2p", 2) for part in parts]
    assert [plan.documents for plan in plans] == [(Document(1, 0, 1), Document(3, 2, 3)), (Document(1, 0, 1), Document(3, 3, 3))]
    assert zigzag_documents(np.zeros(0, np.int64), 0, 2)[0].tolist() == [] and document_chunk(1000, 2) == 256


def test_every_token_is_on_one_rank_in_chunks_of_whole_tiles():
    starts = np.array([0, 1, 300, 1500])
    parts = zigzag_documents(starts, 1777, 4)
    assert sorted(np.concatenate(parts).tolist()) == list(range(1777)) and all((np.diff(part) > 0).all() for part in parts)
    for rank, part in enumerate(parts):
        for document, length in zip(causal_plan(part, starts, 1777, None, "p2p", 4).documents, (1, 299, 1200, 277), strict=True):
            assert document.chunk % 128 == 0 and 8 * document.chunk >= length
            assert document.early == min(max(length - rank * document.chunk, 0), document.chunk)


def test_bias_by_hand():
    """Two ranks with keys 0 1 | 2 and a canvas key each, one query that sees keys 1 and 2 and the canvas; keys in chunks 0 to 3."""
    ids = np.zeros(1, np.int64)
    seen = [Visibility(np.array([1]), np.array([2]), ids, ids, 2), Visibility(np.array([0]), np.array([1]), ids, ids, 1)]
    with mock.patch.object(package, "KEY_MULTIPLE", 4), mock.patch.object(package, "QUERY_MULTIPLE", 2):
        plan = canvas_plan(seen, [1, 1], CPU)
    # Rank 0: 0 1 canvas fill; rank 1: 2 canvas fill fill.
    visible = [[0, 1, 1, 1, 0, 0, 1, 0], [0] * 8]
    assert plan.num_keys == 4 and torch.equal(plan.bias == 0, torch.tensor(visible, dtype=torch.bool))
    assert plan.bias.dtype == torch.bfloat16 and plan.bias[~torch.tensor(visible, dtype=torch.bool)].unique().tolist() == [-9984.0]


def test_the_package_takes_layers_of_its_head_dimensions():
    released, toy = PRESETS["diffusiongemma-26b-a4b"], PRESETS["toy"]
    chosen = ParallelConfig(context_parallel_size=2, context_parallel_impl="transformer_engine")
    assert by_package(chosen, released) == {"sliding"} and by_package(chosen, toy) == {"sliding", "full"}
    assert by_package(ParallelConfig(context_parallel_size=2), toy) == set()
