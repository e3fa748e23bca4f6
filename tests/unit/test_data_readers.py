import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_dllm.data.readers import find_files, read_rows
from megatron_dllm.data.report import SkipReport

ROWS = [{"text": "one"}, {"text": "zwei ü"}, {"text": "three"}]


def write_jsonl(file, lines):
    file.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines) + b"\n")
    return file


def save_to_disk(folder, tables):
    """What datasets' save_to_disk writes: arrow stream files and a state that names them."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{len(tables):05d}.arrow" for i in range(len(tables))]
    for name, rows in zip(names, tables, strict=True):
        table = pa.Table.from_pylist(rows)
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return folder


def read(path):
    report = SkipReport()
    return [(str(origin), row) for origin, row in read_rows(find_files(str(path)), report)], report


def make(kind, tmp_path):
    file = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        return write_jsonl(file, ROWS)
    if kind == "jsonl.gz":
        file.write_bytes(gzip.compress(b"\n".join(json.dumps(row).encode() for row in ROWS)))
    elif kind == "json":
        file.write_text(json.dumps(ROWS, indent=2))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), file, row_group_size=2)
    else:
        return save_to_disk(tmp_path / "saved", [ROWS[:2], ROWS[2:]])
    return file


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "json", "parquet", "save_to_disk"])
def test_read_rows_of_each_kind(kind, tmp_path):
    path = make(kind, tmp_path)
    rows, report = read(path)
    assert [row for _, row in rows] == ROWS and not report.total
    if kind != "save_to_disk":
        assert [origin for origin, _ in rows] == [f"{path}:{line}" for line in (1, 2, 3)]
    else:
        assert [origin for origin, _ in rows] == [f"{path}/data-0000{f}-of-00002.arrow:{line}" for f, line in ((0, 1), (0, 2), (1, 1))]


def test_read_rows_names_corrupt_lines_and_goes_on(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [ROWS[0], b'{"text": "cut', b"", b'{"text": "\xff"}', b"[1]", ROWS[1]])
    rows, report = read(file)
    assert rows == [(f"{file}:1", ROWS[0]), (f"{file}:6", ROWS[1])]
    assert report.counts == {"corrupt line": 3}
    assert [name.split(": ")[0] for name in report.named["corrupt line"]] == [f"{file}:{line}" for line in (2, 4, 5)]


def test_read_rows_refuses_the_first_bad_line_where_told_to(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [ROWS[0], b"{"])
    with pytest.raises(ValueError, match="a.jsonl:2: corrupt line.*--on-bad-sample skip"):
        list(read_rows([file], SkipReport(refuse=True)))


def test_read_rows_takes_json_lines_in_a_json_file_and_byte_order_marks(tmp_path):
    for name, body in (("lines.json", json.dumps(ROWS[0]) + "\n" + json.dumps(ROWS[1])), ("array.json", json.dumps(ROWS[:2]))):
        (tmp_path / name).write_text(body, encoding="utf-8-sig")
        assert [row for _, row in read(tmp_path / name)[0]] == ROWS[:2]


def test_read_rows_counts_array_elements_that_are_no_objects(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([ROWS[0], 3]))
    rows, report = read(tmp_path / "a.json")
    assert len(rows) == 1 and report.named["corrupt line"][0].startswith(f"{tmp_path}/a.json:2: ")


@pytest.mark.parametrize("kind", ["jsonl.gz", "json", "parquet", "save_to_disk"])
def test_read_rows_names_a_damaged_file(kind, tmp_path):
    path = make(kind, tmp_path)
    file = path / "data-00001-of-00002.arrow" if path.is_dir() else path
    file.write_bytes(file.read_bytes()[:-25])
    with pytest.raises(ValueError, match=file.name):
        read(path)


def test_read_rows_drops_the_nulls_that_tables_put_into_structs(tmp_path):
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "name": "x"}]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet")[0][0][1] == rows[0]


def test_find_files_of_folders_and_globs(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "inner/c.parquet", ".token_cache/index.json", "notes.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    assert [f.relative_to(tmp_path).as_posix() for f in find_files(str(tmp_path))] == ["a.jsonl", "b.jsonl", "inner/c.parquet"]
    assert [f.name for f in find_files(str(tmp_path / "*.jsonl"))] == ["a.jsonl", "b.jsonl"]
    assert [f.name for f in find_files(str(tmp_path / "**/*.parquet"))] == ["c.parquet"]


def test_find_files_says_what_is_wrong(tmp_path):
    (tmp_path / "a.csv").write_text("")
    (tmp_path / "empty").mkdir()
    for path, problem in (("missing", "no such file"), ("a.csv", "convert it"), ("empty", "no .jsonl")):
        with pytest.raises(ValueError, match=problem):
            find_files(str(tmp_path / path))


def test_find_files_takes_the_only_split_and_refuses_to_mix_several(tmp_path):
    folder = tmp_path / "dataset"
    save_to_disk(folder / "train", [ROWS])
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["train"]}))
    assert len(read(folder)[0]) == 3
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    with pytest.raises(ValueError, match="name one of them, for example .*dataset/train"):
        find_files(str(folder))
