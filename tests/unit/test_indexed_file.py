"""Megatron's .bin/.idx format: bytes typed by hand, round trips, merging, and files that do not hold what they say."""

import struct

import numpy as np
import pytest

from megatron_dllm.data.indexed import IndexedFile, IndexedWriter, token_dtype

DOCUMENTS = [[5, 6, 7], [], [65000], [1, 2]]


def write(prefix, documents=DOCUMENTS, dtype=np.uint16):
    with IndexedWriter(prefix, dtype=dtype) as writer:
        for document in documents:
            writer.add_document(document)
    return prefix


def read(prefix):
    file = IndexedFile(prefix)
    return [file.document(i).tolist() for i in range(len(file))]


def test_writer_bytes(tmp_path):
    prefix = write(tmp_path / "text", [[5, 6, 7], [9]], np.uint16)
    assert (tmp_path / "text.bin").read_bytes() == struct.pack("<4H", 5, 6, 7, 9)
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 2, 3)
    assert (tmp_path / "text.idx").read_bytes() == header + struct.pack("<2i2q3q", 3, 1, 0, 6, 0, 1, 2)
    assert read(prefix) == [[5, 6, 7], [9]]


def test_reader_joins_the_sequences_of_a_document(tmp_path):
    (tmp_path / "a.bin").write_bytes(struct.pack("<6i", 10, 11, 12, 13, 14, 15))
    (tmp_path / "a.idx").write_bytes(
        b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 3, 3) + struct.pack("<3i3q3q", 1, 2, 3, 0, 4, 12, 0, 2, 3)
    )
    assert read(tmp_path / "a") == [[10, 11, 12], [13, 14, 15]]


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16])
def test_round_trip_dtypes(tmp_path, dtype):
    documents = [[3, 1, 127], [], [2]]
    assert read(write(tmp_path / "text", documents, dtype)) == documents
    assert IndexedFile(tmp_path / "text.idx").dtype == dtype


@pytest.mark.parametrize("documents", [[], [[]], [[], []]], ids=["none", "one empty", "two empty"])
def test_round_trip_without_tokens(tmp_path, documents):
    assert read(write(tmp_path / "text", documents)) == documents


def test_append_equals_one_file(tmp_path):
    write(tmp_path / "a", DOCUMENTS[:2])
    write(tmp_path / "b", [])
    write(tmp_path / "c", DOCUMENTS[2:])
    write(tmp_path / "whole")
    with IndexedWriter(tmp_path / "merged", dtype=np.uint16) as writer:
        for part in "abc":
            writer.append(tmp_path / part)
        assert writer.num_documents == 4
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"merged{suffix}").read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()


def test_append_refuses_another_dtype(tmp_path):
    write(tmp_path / "a", [[1]], np.int32)
    with pytest.raises(ValueError, match="a.bin holds int32.*merged.bin holds uint16"), IndexedWriter(
        tmp_path / "merged", dtype=np.uint16
    ) as writer:
        writer.append(tmp_path / "a")


@pytest.mark.parametrize("token", [-1, 65536])
def test_writer_refuses_tokens_that_do_not_fit(tmp_path, token):
    with pytest.raises(ValueError, match=f"text.bin: document 0 holds tokens .*{token}.*uint16"):
        write(tmp_path / "text", [[1, token]])
    assert list(tmp_path.iterdir()) == []


def test_writer_keeps_the_old_files_after_an_error(tmp_path):
    write(tmp_path / "text")
    with pytest.raises(RuntimeError), IndexedWriter(tmp_path / "text", dtype=np.uint16) as writer:
        writer.add_document([1])
        raise RuntimeError
    assert read(tmp_path / "text") == DOCUMENTS
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.bin", "text.idx"]


def change(path, at, data):
    content = bytearray(path.read_bytes())
    content[at : at + len(data)] = data
    path.write_bytes(content)


IDX = 34  # bytes of the header: lengths of DOCUMENTS begin here, offsets 16 later, document bounds 48 later
FAULTS = {
    "magic": (lambda bin, idx: change(idx, 0, b"X"), "text.idx: no index of tokens"),
    "empty index": (lambda bin, idx: idx.write_bytes(b""), "text.idx: no index of tokens"),
    "version": (lambda bin, idx: change(idx, 9, b"\x02"), "text.idx: version 2"),
    "float dtype": (lambda bin, idx: change(idx, 17, b"\x07"), "text.idx: dtype code 7"),
    "index cut": (lambda bin, idx: idx.write_bytes(idx.read_bytes()[:-1]), "text.idx: 121 bytes.*take 122"),
    "index too long": (lambda bin, idx: idx.write_bytes(idx.read_bytes() + b"\0" * 4), "text.idx: 126 bytes.*take 122"),
    "tokens cut": (lambda bin, idx: bin.write_bytes(bin.read_bytes()[:-2]), "text.bin: 10 bytes, but text.idx counts 6 tokens.*12 bytes"),
    "tokens too many": (lambda bin, idx: bin.write_bytes(bin.read_bytes() * 2), "text.bin: 24 bytes"),
    "negative length": (lambda bin, idx: change(idx, IDX, struct.pack("<i", -3)), "text.idx: sequence 0 has a negative length"),
    "length": (lambda bin, idx: change(idx, IDX, struct.pack("<i", 2)), "text.idx: sequence 1 starts at byte 6"),
    "offset": (lambda bin, idx: change(idx, IDX + 16 + 24, struct.pack("<q", 9)), "text.idx: sequence 3 starts at byte 9"),
    "first document": (lambda bin, idx: change(idx, IDX + 48, struct.pack("<q", 1)), "text.idx: the documents do not divide"),
    "last document": (lambda bin, idx: change(idx, IDX + 48 + 32, struct.pack("<q", 3)), "text.idx: the documents do not divide"),
    "document order": (lambda bin, idx: change(idx, IDX + 48 + 8, struct.pack("<q", 3)), "text.idx: the documents do not divide"),
    "no index": (lambda bin, idx: idx.unlink(), "text.idx: no such file"),
    "no tokens": (lambda bin, idx: bin.unlink(), "text.bin: no such file"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_reader_names_what_is_wrong(tmp_path, fault):
    write(tmp_path / "text")
    damage, message = FAULTS[fault]
    damage(tmp_path / "text.bin", tmp_path / "text.idx")
    with pytest.raises(ValueError, match=message):
        IndexedFile(tmp_path / "text")


def test_document_outside(tmp_path):
    file = IndexedFile(write(tmp_path / "text"))
    for index in (-1, 4):
        with pytest.raises(IndexError, match=f"document {index} of .*text.bin, which has 4"):
            file.document(index)


def test_token_dtype():
    assert [token_dtype(size) for size in (264, 65499, 65500, 262144)] == [np.uint16, np.uint16, np.int32, np.int32]
