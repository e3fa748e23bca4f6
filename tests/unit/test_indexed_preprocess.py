"""tools/preprocess_data.py: which files become which documents, what is skipped and why, and that workers change nothing."""

import gzip
import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_dllm.data import documents
from megatron_dllm.data.documents import find_text_files
from megatron_dllm.data.indexed import IndexedFile
from megatron_dllm.data.tokenizers import ByteTokenizer
from tools.preprocess_data import main


def run(tmp_path, *arguments, name="out"):
    prefix = tmp_path / name
    status = main(["--output-prefix", str(prefix), "--workers", "1", *map(str, arguments)])
    return prefix, status


def texts(prefix):
    file = IndexedFile(prefix)
    return [ByteTokenizer().decode(file.document(i)) for i in range(len(file))]


@pytest.fixture
def tree(tmp_path):
    """A folder of code with what such folders hold."""
    root = tmp_path / "my code"
    contents = {
        "b.py": b"print(1)\r\n", "a.py": "\ufeffé = 2".encode(), "sub/c.py": b"x", "sub/d.md": b"# d", "empty.py": b" \n",
        "latin.py": b"caf\xe9", "binary.py": b"a\0b", ".hidden/e.py": b"no", ".f.py": b"no", "__pycache__/g.py": b"no",
    }  # fmt: skip
    for name, content in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    (root / "dangling.py").symlink_to("nowhere")
    return root


def test_folder_of_files(tmp_path, tree, capsys):
    prefix, status = run(tmp_path, "--input", tree, "--suffixes", ".py")
    assert status == 0
    assert texts(prefix) == ["é = 2", "print(1)\r\n", "x"]
    output = capsys.readouterr().out
    assert re.search(r"1 skipped, empty document: .*empty.py\n", output)
    assert re.search(r"1 skipped, not UTF-8: .*latin.py: .* at byte 3\n", output)
    assert re.search(r"1 skipped, not text: .*binary.py: it holds zero bytes\n", output)
    assert re.search(r"1 skipped, cannot be read: .*dangling.py: no file", output)
    assert re.search(r"3 documents, 17 tokens \(uint16\) of 7 files, 0.0 MB; 4 skipped", output)


def test_append_eod(tmp_path, tree):
    prefix, _ = run(tmp_path, "--input", tree / "b.py", tree / "sub" / "c.py", "--append-eod")
    assert texts(prefix) == ["print(1)\r\n<eos>", "x<eos>"]


ROWS = [
    '{"text": "one"}', "", '{"text": "two", "id": 2}', '{"text": "thr', '{"other": "x"}', '{"text": 4}', '{"text": ""}', '{"text": "five"}',
]  # fmt: skip


@pytest.mark.parametrize("packed", [False, True], ids=["jsonl", "jsonl.gz"])
def test_rows(tmp_path, capsys, packed):
    file = tmp_path / ("rows.jsonl.gz" if packed else "rows.jsonl")
    content = "\n".join(ROWS).encode()
    file.write_bytes(gzip.compress(content) if packed else content)
    prefix, status = run(tmp_path, "--input", file)
    assert status == 0
    assert texts(prefix) == ["one", "two", "five"]
    output = capsys.readouterr().out
    for line, reason in ((4, "corrupt line"), (7, "empty document")):
        assert re.search(rf"1 skipped, {reason}: .*{file.name}:{line}\b", output), reason
    assert re.search(rf"2 skipped, missing column: .*{file.name}:5: no 'text' in this row; .*:6: 'text' is a int, not a text", output)


def test_rows_of_other_kinds_and_keys(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([{"body": "json"}]))
    pq.write_table(pa.table({"body": ["parquet", None, "table"]}), tmp_path / "b.parquet")
    prefix, _ = run(tmp_path, "--input", tmp_path / "*.json", tmp_path / "*.parquet", "--json-key", "body")
    assert texts(prefix) == ["json", "parquet", "table"]
    prefix, _ = run(tmp_path, "--input", tmp_path / "a.json", "--read-as", "text")
    assert texts(prefix) == ['[{"body": "json"}]']


def test_workers_change_nothing(tmp_path, monkeypatch):
    """More batches than are under way at once, of lengths that finish out of order."""
    monkeypatch.setattr(documents, "BATCH_DOCUMENTS", 40)
    rows = [json.dumps({"text": f"{i} " * (3000 if i % 300 == 0 else 3)}) for i in range(1500)]
    rows[700] = rows[701] = "not json"
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    (tmp_path / "z.txt").write_text("last")
    one, _ = run(tmp_path, "--input", tmp_path / "rows.jsonl", tmp_path / "z.txt", name="one")
    four, _ = run(tmp_path, "--input", tmp_path / "rows.jsonl", tmp_path / "z.txt", "--workers", "4", name="four")
    for suffix in (".bin", ".idx"):
        assert one.with_suffix(suffix).read_bytes() == four.with_suffix(suffix).read_bytes()
    kept = texts(four)
    assert len(kept) == 1499
    assert [int(document.split()[0]) for document in kept[:-1]] == [i for i in range(1500) if i not in (700, 701)]


def test_runs_twice_over_its_own_output(tmp_path, tree):
    first, _ = run(tree, "--input", tree, name="data")
    kept = (tree / "data.bin").read_bytes()
    assert len(kept) and run(tree, "--input", tree, name="data")[1] == 0
    assert (tree / "data.bin").read_bytes() == kept


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "{}/nowhere"], "nowhere: no such file or folder, and no file matches"),
        (["--input", "{}/my code", "--suffixes", ".rs"], "my code: no file in it ends in .rs; correct --suffixes"),
        (["--input", "{}/my code/empty.py"], "--json-key as they are\n1 skipped, empty document"),
        (["--input", "{}/my code/latin.py", "--on-bad-sample", "error"], "latin.py: not UTF-8"),
        (["--input", "{}/my code/a.py", "--tokenizer-type", "HuggingFaceTokenizer"], "give --tokenizer-model"),
    ],
)
def test_refuses(tmp_path, tree, capsys, arguments, message):
    _, status = run(tmp_path, *(word.format(tmp_path) for word in arguments))
    assert status == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error
    assert not list(tmp_path.glob("out*"))


def test_refuses_no_workers(tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(tmp_path, "--input", tmp_path, "--workers", "0")
    assert "--workers 0: at least 1" in capsys.readouterr().err


def test_progress_lines(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text("\n".join(['{"text": "abcd"}'] * 600))
    run(tmp_path, "--input", tmp_path / "rows.jsonl", "--log-interval", "0")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 600
    assert re.fullmatch(r"300 documents, 1200 tokens, 0.0 of 0.0 MB, [\d.]+ MB/s, 0:00:00 left", lines[299])


def test_find_text_files_lists_none_twice(tree):
    both = find_text_files([str(tree / "sub"), str(tree / "**" / "c.py"), str(tree / "b.py")])
    assert [file.name for file in both] == ["c.py", "d.md", "b.py"]
