"""`@file` arguments: a file of flags, one with its value on a line, as every run writes its own (args.txt)."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

# White space, a comment (# where a word could begin), or a word with the shell's quotes.
_PIECE = re.compile(r"""(?P<skip>\s+|\#[^\n]*)|(?P<word>(?:\\.|'[^']*'|"(?:\\.|[^"\\])*"|[^\s'"\\])+)""", re.DOTALL)


def split_arguments(text: str, source: str) -> list[str]:
    """The words of an argument file's `text`; ValueError names the line of a quote that is not closed."""
    words, position = [], 0
    while position < len(text):
        piece = _PIECE.match(text, position)
        if piece is None:
            raise ValueError(f"{source}, line {text.count(chr(10), 0, position) + 1}: a quote that begins here is not closed; close it, "
                             "or write \\ before it")
        if piece["word"]:
            words += shlex.split(piece["word"])
        position = piece.end()
    return words


def expand_argument_files(words: Sequence[str], folder: Path, reading: tuple[Path, ...] = ()) -> list[str]:
    """`words` with each @file replaced by the words in it; a file named in a file is sought beside it.

    `reading` are the files being read. ValueError for a file that is missing or includes itself.
    """
    expanded: list[str] = []
    for word in words:
        if not word.startswith("@"):
            expanded.append(word)
            continue
        path = folder / word[1:]
        if not path.is_file():
            raise ValueError(f"{word}: there is no file {path}; correct its path (a value that begins with @ is given as --flag=@value)")
        if path.resolve() in reading:
            raise ValueError(f"{word}: {path} includes itself; remove that line")
        inner = split_arguments(path.read_text(encoding="utf-8"), str(path))
        expanded += expand_argument_files(inner, path.parent, (*reading, path.resolve()))
    return expanded
