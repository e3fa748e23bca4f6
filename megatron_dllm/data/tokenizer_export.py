"""The built-in tokenizers as files that transformers' AutoTokenizer loads and that encode and decode as they do."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

# Stands around the names of special tokens in the files. A Unicode noncharacter, which no text holds: text that looks like a special token
# ("<user>" in an HTML page) stays text.
GUARD = "\ufdd0"

BYTE_TEMPLATE = """\
{%- set tokens = {'system': SYSTEM, 'developer': SYSTEM, 'user': USER, 'assistant': ASSISTANT, 'tool': TOOL} -%}
{{- bos_token -}}
{%- if tools %}{{ tokens['system'] + tools | tojson(ensure_ascii=True, sort_keys=True) + eos_token }}{% endif -%}
{%- for message in messages -%}
{%- if message['role'] not in tokens %}{{ raise_exception(message['role'] ~ ' is not one of ' ~ tokens | join(', ')) }}{% endif -%}
{{- tokens[message['role']] -}}
{%- set body = namespace(text='') -%}
{%- if message['content'] is string -%}{%- set body.text = message['content'] -%}
{%- elif message['content'] -%}
{%- for part in message['content'] %}{% set body.text = body.text + (part if part is string else part['text']) %}{% endfor -%}
{%- endif -%}
{%- if message['tool_calls'] -%}
{%- set body.text = body.text + message['tool_calls'] | tojson(ensure_ascii=True, sort_keys=True) -%}
{%- endif -%}
{%- if message['role'] == 'assistant' %}{% generation %}{{ body.text + eos_token }}{% endgeneration %}
{%- else %}{{ body.text + eos_token }}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ tokens['assistant'] }}{% endif -%}
"""


def save_byte_tokenizer(path: Path, specials: Sequence[str]) -> None:
    """Bytes, one token each, behind the special tokens `specials` (with angle brackets; pad, eos and bos first)."""
    guarded = {name: f"{GUARD}{name.strip('<>')}{GUARD}" for name in specials}
    words = [*guarded.values(), *(_byte_letter(byte) for byte in range(256))]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    shown = [decoders.Replace(word, name) for name, word in guarded.items()]
    tokenizer.decoder = decoders.Sequence([*shown, decoders.ByteLevel()])
    template = BYTE_TEMPLATE
    for role in ("system", "user", "assistant", "tool"):
        template = template.replace(role.upper(), repr(guarded[f"<{role}>"]))
    _save(path, tokenizer, {name: guarded[f"<{name}>"] for name in ("pad", "eos", "bos")}, list(guarded.values()), template)


def _byte_letter(byte: int) -> str:
    """The letter by which the byte-level pieces of the tokenizers library write a byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return chr(byte) if byte in printable else chr(256 + others.index(byte))


def save_letter_tokenizer(path: Path, pieces: Sequence[str], *, replaced: Mapping[str, str]) -> None:
    """One token a letter; the first three pieces are pad, eos and bos; white space is passed over, letters in `replaced` are written
    otherwise.

    A letter that is no piece is an error, in transformers too.
    """
    tokenizer = Tokenizer(models.WordLevel(vocab={piece: i for i, piece in enumerate(pieces)}))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Replace(Regex(r"\s+"), ""), *(normalizers.Replace(old, new) for old, new in replaced.items())])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    _save(path, tokenizer, dict(zip(("pad", "eos", "bos"), pieces, strict=False)), list(pieces[:3]), None)


def _save(path: Path, tokenizer: Tokenizer, roles: Mapping[str, str], specials: Sequence[str], template: str | None) -> None:
    from transformers import PreTrainedTokenizerFast  # slow to import

    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in specials])
    others = [word for word in specials if word not in roles.values()]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=roles["pad"], eos_token=roles["eos"], bos_token=roles["bos"],
        additional_special_tokens=others, clean_up_tokenization_spaces=False)
    fast.chat_template = template
    fast.save_pretrained(path)
