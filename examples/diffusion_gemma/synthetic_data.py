#!/usr/bin/env python3
"""Generated data, of the same bytes everywhere.

usage: synthetic_data.py chat FILE.jsonl [CHARACTERS]           sums asked and answered: conversations of one or two turns; with CHARACTERS
                                                                each answer counts on until it is about so long
       synthetic_data.py text PREFIX                            the same as documents, in a token file of bytes (PREFIX.bin, PREFIX.idx)
       synthetic_data.py passkey FILE.jsonl CHARACTERS NUMBER   so many long texts with a number hidden in each, which is asked for
"""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

NUMBER = 240
FILLER = ("apples", "copper coins", "old letters", "pencils", "walnuts", "blue stones", "maps")


def sums(index: int) -> list[tuple[str, str]]:
    """One or two (question, answer) pairs; unequal lengths, nothing drawn at random."""
    pairs = []
    for turn in range(1 + index % 2):
        a, b = (37 * index + 11 * turn) % 97, (53 * index + 7) % (10 if index % 3 else 1000)
        pairs.append((f"{a}+{b}=?", f"{a + b}" if index % 4 else f"{a} and {b} make {a + b}."))
    return pairs


def longer(answer: str, characters: int) -> str:
    """The answer, and after it numbers until it has so many characters."""
    words = [answer]
    while sum(map(len, words)) + len(words) < characters:
        words.append(str(37 * len(words) % 1009))
    return " ".join(words)


def write_chat(path: Path, characters: int) -> None:
    rows = []
    for index in range(NUMBER):
        messages = []
        for question, answer in sums(index):
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": longer(answer, characters)}]
        rows.append(json.dumps({"messages": messages}))
    _write(path, "\n".join(rows) + "\n")


def write_text(prefix: Path) -> None:
    text = prefix.with_suffix(".jsonl")
    documents = [" ".join(f"{question} {answer}" for question, answer in sums(index) + sums(index + 5)) for index in range(NUMBER)]
    _write(text, "".join(json.dumps({"text": document}) + "\n" for document in documents))
    tool = Path(__file__).resolve().parents[2] / "tools" / "preprocess_data.py"
    subprocess.run([sys.executable, str(tool), "--input", str(text), "--output-prefix", str(prefix), "--append-eod"], check=True,
                   stdout=subprocess.DEVNULL)


def passkey(index: int, characters: int) -> tuple[str, str]:
    """(prompt of about so many characters, answer): the key stands at a place that moves through the text from one to the next."""
    key = str(10000 + (index * 7919 + 4241) % 90000)
    sentences, length = [], 0
    while length < characters - 120:
        number = index * 31 + len(sentences) * 17
        sentence = f"Box {number % 997} holds {number % 89} {FILLER[number % len(FILLER)]}. "
        sentences.append(sentence)
        length += len(sentence)
    sentences.insert(index * 37 % 101 * len(sentences) // 101, f"The pass key is {key}. ")
    return "".join(sentences) + "What is the pass key?", key


def write_passkeys(path: Path, characters: int, number: int) -> None:
    rows = []
    for index in range(number):
        question, key = passkey(index, characters)
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": key}]
        rows.append(json.dumps({"messages": messages}) + "\n")
    _write(path, "".join(rows))


def _write(path: Path, text: str) -> None:
    """Whole or not at all: another process may read it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def main() -> int:
    match sys.argv[1:]:
        case ["chat", path]:
            write_chat(Path(path), 0)
        case ["chat", path, characters] if characters.isdecimal():
            write_chat(Path(path), int(characters))
        case ["text", prefix]:
            write_text(Path(prefix))
        case ["passkey", path, characters, number] if characters.isdecimal() and number.isdecimal():
            write_passkeys(Path(path), int(characters), int(number))
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
