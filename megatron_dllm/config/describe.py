"""Every flag as a page of documentation: `python -m megatron_dllm.config.describe > docs/flags.md`."""

from dataclasses import MISSING

from megatron_dllm.config.flags import Flag
from megatron_dllm.config.run import FLAGS, GROUPS

OPENING = """# Flags

Every flag of `pretrain_dllm.py`, by group, made from the dataclasses in `megatron_dllm/config/` by
`python -m megatron_dllm.config.describe`. A switch is given as `--name` or `--no-name`. Flags may stand in a file, one a line, that the
command line names as `@FILE`; a flag given twice has its last value. A flag that would have no effect is refused, with what it needs.
"""


def flags_document() -> str:
    """Markdown: a table a group, with each flag's name, values, default and help text."""
    return "\n".join([OPENING, *(_section(name, group.__doc__) for name, group in GROUPS.items())])


def _section(name: str, title: str) -> str:
    words, _, note = title.rstrip(")").partition(" (")
    # What stands in brackets is a sentence, or a word that belongs to the heading.
    heading = f"## {words}\n\n{note[0].upper()}{note[1:]}." if " " in note else f"## {title}"
    items = [item for group, item in FLAGS.values() if group == name]
    rows = [f"| `{item.name}` | {_values(item)} | {_default(item)} | {_cell(item.help)} |" for item in items]
    return "\n".join([heading, "", "| flag | values | default | what it does |", "|---|---|---|---|", *rows, ""])


def _values(item: Flag) -> str:
    if item.kind is bool:
        return "switch"
    kind = _cell(item.metavar or {int: "whole number", float: "number", str: "text"}[item.kind])
    words = ", ".join(f"`{choice}`" for choice in item.choices) if item.choices else kind
    return f"{words} (several)" if item.several else words


def _default(item: Flag) -> str:
    if item.default is MISSING:
        return "the model's"
    return "" if item.default in (None, (), "") else f"`{item.describe(item.default)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", "<br>")


if __name__ == "__main__":
    print(flags_document(), end="")
