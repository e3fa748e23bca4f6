"""Tokenizers behind one interface: a built-in byte tokenizer (nothing to download) and any `transformers` tokenizer directory."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from .report import SampleError

Message = Mapping[str, Any]


@dataclass(frozen=True)
class ChatTokens:
    """A rendered conversation. `assistant_mask` marks the tokens in generation tags; None: the template has no such tags."""

    ids: list[int]
    assistant_mask: list[bool] | None


class Tokenizer(Protocol):
    """Text to ids and back.

    `vocab_size` is one more than the largest id that can be produced. `eos_ids`: every id that ends a turn or a text, the filler first.
    `fingerprint` changes whenever the ids of some text or conversation could change.
    """

    name: str
    vocab_size: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    pad_id: int | None
    fingerprint: str

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; nothing is added in front or behind."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...

    def is_special(self, token_id: int) -> bool:
        """Whether the id stands for no text of its own (bos, end of turn, ...)."""
        ...

    def apply_chat_template(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, add_generation_prompt: bool = False
    ) -> ChatTokens:
        """The conversation as ids. ValueError when there is no template; SampleError when it refuses these messages."""
        ...

    def save_pretrained(self, path: Path) -> None:
        """Write it into a folder, as transformers' AutoTokenizer loads it."""
        ...


class ByteTokenizer:
    """UTF-8 bytes at ids 8..263; ids 0..7 are special. A turn is <role> bytes <eos>; text that looks like a special
    token stays text.
    """

    SPECIALS = ("<pad>", "<eos>", "<bos>", "<system>", "<user>", "<assistant>", "<tool>", "<unused>")
    OFFSET = len(SPECIALS)
    ROLES = {"system": 3, "developer": 3, "user": 4, "assistant": 5, "tool": 6}

    name = "byte"
    vocab_size = OFFSET + 256
    pad_id: int | None = 0
    eos_ids: tuple[int, ...] = (1,)
    bos_id: int | None = 2
    fingerprint = "byte-1"

    def encode(self, text: str) -> list[int]:
        return [self.OFFSET + byte for byte in text.encode("utf-8")]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of the ids; bytes that are not UTF-8 become U+FFFD. ValueError for an id outside the vocabulary."""
        pieces, run = [], bytearray()
        for token in map(int, ids):
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"token id {token} is outside the byte tokenizer's vocabulary of {self.vocab_size}")
            if token >= self.OFFSET:
                run.append(token - self.OFFSET)
            elif not skip_special_tokens:
                pieces += [run.decode("utf-8", errors="replace"), self.SPECIALS[token]]
                run.clear()
        return "".join(pieces) + run.decode("utf-8", errors="replace")

    def is_special(self, token_id: int) -> bool:
        return token_id < self.OFFSET

    def apply_chat_template(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, add_generation_prompt: bool = False
    ) -> ChatTokens:
        """<bos>, then <role> content <eos> for each message; an assistant's content and <eos> are inside the generation span."""
        ids, mask = [self.bos_id], [False]
        if tools:
            definitions = [self.ROLES["system"], *self.encode(json.dumps(list(tools), sort_keys=True)), self.eos_ids[0]]
            ids += definitions
            mask += [False] * len(definitions)
        for message in messages:
            role = message["role"]
            if role not in self.ROLES:
                raise SampleError("unknown role", f"{role!r} is not one of {', '.join(self.ROLES)}")
            body = [*self.encode(_plain_content(message)), self.eos_ids[0]]
            ids += [self.ROLES[role], *body]
            mask += [False] + [role == "assistant"] * len(body)
        if add_generation_prompt:
            ids.append(self.ROLES["assistant"])
            mask.append(False)
        return ChatTokens(ids, mask)

    def save_pretrained(self, path: Path) -> None:
        from .tokenizer_export import save_byte_tokenizer

        save_byte_tokenizer(path, self.SPECIALS)


def _plain_content(message: Message) -> str:
    """Content as one string: text parts are joined; tool calls, which have no form of their own here, are written as JSON."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part if isinstance(part, str) else part["text"] for part in content)
    calls = message.get("tool_calls")
    return (content or "") + (json.dumps(list(calls), sort_keys=True) if calls else "")


GENERATION_TAG = re.compile(r"{%-?\s*generation\s*-?%}")
TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges*", "added_tokens*", "special_tokens*", "chat_template*", "generation_config.json",
                   "*.model", "*.tiktoken", "*.jinja")


class HuggingFaceTokenizer:
    """A `transformers` tokenizer directory. Nothing is downloaded, and code in the directory is never run.

    `eos_ids` are the tokenizer's own eos, those of the directory's generation_config.json (chat models name their end of turn there) and
    `extra_eos_ids`, in this order.
    """

    def __init__(self, directory: str, *, chat_template: str | None = None, extra_eos_ids: Sequence[int] = ()):
        from transformers import AutoTokenizer  # slow to import, and the byte tokenizer does without

        if not Path(directory).is_dir():
            raise ValueError(f"{directory}: no such folder; name one that holds a transformers tokenizer with --tokenizer-model")
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise ValueError(f"{directory}: no tokenizer that transformers can read without running the folder's code: {error}; "
                             "name another folder with --tokenizer-model") from error
        self._has_other_template = chat_template is not None
        if chat_template is not None:
            self._tokenizer.chat_template = chat_template
        self.name = directory
        self.vocab_size = max(self._tokenizer.get_vocab().values()) + 1
        self.bos_id: int | None = self._tokenizer.bos_token_id
        self.pad_id: int | None = self._tokenizer.pad_token_id
        own = [] if self._tokenizer.eos_token_id is None else [self._tokenizer.eos_token_id]
        self.eos_ids = tuple(dict.fromkeys([*own, *_generation_eos_ids(Path(directory)), *extra_eos_ids]))
        self.fingerprint = _fingerprint(Path(directory), chat_template, self.eos_ids)
        self._special_ids = set(self._tokenizer.all_special_ids) | {
            token_id for token_id, token in self._tokenizer.added_tokens_decoder.items() if token.special}

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self._tokenizer.decode(list(map(int, ids)), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def apply_chat_template(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, add_generation_prompt: bool = False
    ) -> ChatTokens:
        """The conversation as ids. ValueError when there is no template; SampleError when it refuses these messages."""
        from jinja2 import TemplateError  # comes with the templates of transformers

        if not self._tokenizer.chat_template:
            raise ValueError(f"{self.name}: the tokenizer has no chat template; give one with --chat-template FILE")
        tools = list(tools) if tools else None
        has_tags = bool(GENERATION_TAG.search(self._tokenizer.get_chat_template(tools=tools)))
        try:
            rendered = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tools=tools, add_generation_prompt=add_generation_prompt, tokenize=True,
                return_dict=True, return_assistant_tokens_mask=has_tags)
        except (TemplateError, TypeError) as error:  # raise_exception of the template, or an operation on a value that it did not expect
            raise SampleError("the chat template refuses the conversation", str(error)) from error
        mask = [bool(inside) for inside in rendered["assistant_masks"]] if has_tags else None
        return ChatTokens(list(rendered["input_ids"]), mask)

    def save_pretrained(self, path: Path) -> None:
        """The files of the directory as they are; with --chat-template, that template in place of its own."""
        for file in sorted({file for pattern in TOKENIZER_FILES for file in Path(self.name).glob(pattern) if file.is_file()}):
            if file.name != "generation_config.json":  # which is the model's
                shutil.copyfile(file, path / file.name)
        if self._has_other_template:
            (path / "chat_template.jinja").write_text(self._tokenizer.chat_template, encoding="utf-8")


def _generation_eos_ids(directory: Path) -> list[int]:
    file = directory / "generation_config.json"
    if not file.exists():
        return []
    stored = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    return [] if stored is None else stored if isinstance(stored, list) else [stored]


def _fingerprint(directory: Path, chat_template: str | None, eos_ids: tuple[int, ...]) -> str:
    """A digest of every file that makes up the tokenizer, of the template given in place of its own, and of the ends of turn."""
    digest = hashlib.sha256(repr((chat_template, eos_ids)).encode())
    for file in sorted({file for pattern in TOKENIZER_FILES for file in directory.glob(pattern) if file.is_file()}):
        digest.update(f"\n{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}".encode())
    return digest.hexdigest()


def open_tokenizer(tokenizer_type: str, tokenizer_model: str | None, *, chat_template: str | None = None,
                   extra_eos_ids: Sequence[int] = ()) -> Tokenizer:
    """The tokenizer that --tokenizer-type names; `chat_template` is a file. ValueError where flags and files do not fit together."""
    if tokenizer_type == "ByteTokenizer":
        if chat_template or tokenizer_model:
            raise ValueError("the byte tokenizer has its own vocabulary and template; drop --tokenizer-model and --chat-template, "
                             "or set --tokenizer-type HuggingFaceTokenizer")
        return ByteTokenizer()
    if tokenizer_type != "HuggingFaceTokenizer":
        raise ValueError(f"--tokenizer-type {tokenizer_type}: set ByteTokenizer or HuggingFaceTokenizer")
    if not tokenizer_model:
        raise ValueError("--tokenizer-type HuggingFaceTokenizer needs the tokenizer's folder; give --tokenizer-model DIR")
    template = Path(chat_template).read_text(encoding="utf-8") if chat_template else None
    return HuggingFaceTokenizer(tokenizer_model, chat_template=template, extra_eos_ids=extra_eos_ids)


def tokenizer_problems(tokenizer: Tokenizer, *, vocab_size: int, eos_ids: Sequence[int]) -> list[str]:
    """What keeps the tokenizer from serving a model of this vocabulary and these end tokens, each with its remedy; [] if nothing does."""
    problems = []
    if tokenizer.vocab_size > vocab_size:
        problems.append(f"the tokenizer makes ids up to {tokenizer.vocab_size - 1}, the model's vocabulary has {vocab_size} rows; "
                        f"set --vocab-size to at least {tokenizer.vocab_size}, or take the model's own tokenizer")
    if not tokenizer.eos_ids:
        problems.append("the tokenizer has no end-of-sequence token; set eos_token in its tokenizer_config.json")
    if tokenizer.pad_id is None:
        problems.append("the tokenizer has no padding token; set pad_token in its tokenizer_config.json (the end token will do)")
    if not eos_ids:
        problems.append("the model names no end token to fill canvases with; set --eos-token-id")
    for token in eos_ids:
        if token >= tokenizer.vocab_size:
            problems.append(f"the model's end token {token} is not in the tokenizer's vocabulary of {tokenizer.vocab_size}; "
                            f"set --eos-token-id to {_spelled(tokenizer.eos_ids)}")
        elif not tokenizer.is_special(token):
            problems.append(f"the model's end token {token} is ordinary text to the tokenizer ({tokenizer.decode([token])!r}), so texts "
                            f"would end at it; set --eos-token-id to {_spelled(tokenizer.eos_ids)}")
    return problems


def check_tokenizer(tokenizer: Tokenizer, *, vocab_size: int, eos_ids: Sequence[int]) -> None:
    """ValueError with all of `tokenizer_problems` at once, if there is one."""
    problems = tokenizer_problems(tokenizer, vocab_size=vocab_size, eos_ids=eos_ids)
    if problems:
        raise ValueError(f"tokenizer {tokenizer.name}: " + "; ".join(problems))


def _spelled(ids: Sequence[int]) -> str:
    return ",".join(map(str, ids))
