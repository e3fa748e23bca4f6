#!/usr/bin/env python3
"""Small data of the same bytes everywhere, for recipes at toy scale: sums asked and answered, as conversations or as plain text.

usage: toy_data.py chat FILE.jsonl      conversations of one or two turns, OpenAI messages
       toy_data.py text PREFIX          documents of sums, as a token file of bytes (PREFIX.bin and PREFIX.idx)
"""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

NUMBER = 240


def sums(index: int) -> list[tuple[str, str]]:
    """One or two (question, answer) pairs; unequal lengths, nothing drawn at random."""
    pairs = []
    for turn in range(1 + index % 2):
        a, b = (37 * index + 11 * turn) % 97, (53 * index + 7) % (10 if index % 3 else 1000)
        pairs.append((f"{a}+{b}=?", f"{a + b}" if index % 4 else f"{a} and {b} make {a + b}."))
    return pairs


def write_chat(path: Path) -> None:
    rows = []
    for index in range(NUMBER):
        messages = []
        for question, answer in sums(index):
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows.append(json.dumps({"messages": messages}))
    _write(path, "\n".join(rows) + "\n")


def write_text(prefix: Path) -> None:
    text = prefix.with_suffix(".jsonl")
    documents = [" ".join(f"{question} {answer}" for question, answer in sums(index) + sums(index + 5)) for index in range(NUMBER)]
    _write(text, "".join(json.dumps({"text": document}) + "\n" for document in documents))
    tool = Path(__file__).resolve().parents[2] / "tools" / "preprocess_data.py"
    subprocess.run([sys.executable, str(tool), "--input", str(text), "--output-prefix", str(prefix), "--append-eod"], check=True,
                   stdout=subprocess.DEVNULL)


def _write(path: Path, text: str) -> None:
    """Whole or not at all: another process may read it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def main() -> int:
    if len(sys.argv) != 3 or sys.argv[1] not in ("chat", "text"):
        print(__doc__, file=sys.stderr)
        return 2
    {"chat": write_chat, "text": write_text}[sys.argv[1]](Path(sys.argv[2]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
