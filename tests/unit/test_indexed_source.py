"""Documents of an indexed file as examples: pieces, truncation marks, keys and the BOS prompt."""

import numpy as np
import pytest

from megatron_dllm.data.indexed import IndexedSource, IndexedWriter
from megatron_dllm.data.source import ExampleSource

LENGTHS = [3, 0, 11, 4, 8, 0, 1]


@pytest.fixture
def prefix(tmp_path):
    tokens = iter(range(10, 1000))
    with IndexedWriter(tmp_path / "text", dtype=np.uint16) as writer:
        for length in LENGTHS:
            writer.add_document([next(tokens) for _ in range(length)])
    return tmp_path / "text"


def test_pieces(prefix):
    source = IndexedSource(prefix, seq_length=4)
    assert isinstance(source, ExampleSource)
    assert source.lengths.tolist() == [[0, 3], [0, 4], [0, 4], [0, 3], [0, 4], [0, 4], [0, 4], [0, 1]]
    assert source.truncated.tolist() == [False, True, True, False, False, True, False, False]
    assert source.keys.tolist() == [[0, 0], [2, 0], [2, 1], [2, 2], [3, 0], [4, 0], [4, 1], [6, 0]]
    assert source.lengths.dtype == np.int32 and source.keys.dtype == np.int64
    assert source.num_empty == 2
    assert source.describe(3) == "text document 2 piece 2"


@pytest.mark.parametrize("bos", [None, 2], ids=["no prompt", "bos"])
@pytest.mark.parametrize("canvas", [1, 3])
@pytest.mark.parametrize("seq_length", [4, 5, 7, 100])
def test_pieces_hold_every_token_once(prefix, bos, canvas, seq_length):
    source = IndexedSource(prefix, seq_length=seq_length, canvas_length=canvas, bos_id=bos)
    prompt = [] if bos is None else [bos]
    kept = []
    for i in range(len(source)):
        tokens = source.tokens(i)
        assert tokens.dtype == np.int32
        assert len(tokens) == source.lengths[i].sum()
        assert tokens[: len(prompt)].tolist() == prompt
        assert len(prompt) + -(-source.lengths[i, 1] // canvas) * canvas <= seq_length
        assert not source.truncated[i] or source.lengths[i, 1] % canvas == 0
        kept += tokens[len(prompt) :].tolist()
    assert kept == list(range(10, 10 + sum(LENGTHS)))


@pytest.mark.parametrize("lengths", [[], [0, 0]], ids=["no document", "empty documents"])
def test_source_without_examples(tmp_path, lengths):
    with IndexedWriter(tmp_path / "none", dtype=np.uint16) as writer:
        for _ in lengths:
            writer.add_document([])
    source = IndexedSource(tmp_path / "none", seq_length=4)
    assert len(source) == 0
    assert source.num_empty == len(lengths)
    assert source.lengths.shape == source.keys.shape == (0, 2)
    with pytest.raises(IndexError, match="example 0 of none, which has 0"):
        source.tokens(0)


def test_sequence_without_room(prefix):
    with pytest.raises(ValueError, match="sequence of 4 tokens holds no canvas of 4 after 1 prompt.*at least 5"):
        IndexedSource(prefix, seq_length=4, canvas_length=4, bos_id=2)
    assert len(IndexedSource(prefix, seq_length=5, canvas_length=4, bos_id=2)) == 8


def test_token_outside_the_vocabulary(prefix):
    source = IndexedSource(prefix, seq_length=4, vocab_size=15)
    assert source.tokens(0).tolist() == [10, 11, 12]
    with pytest.raises(ValueError, match="text document 2 piece 0: tokens 13 to 16 in a vocabulary of 15"):
        source.tokens(1)
