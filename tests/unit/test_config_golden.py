"""The set of flags is held by a file, so that none is added, renamed, dropped or given another default unseen; docs/flags.md has them all.

After a change that is meant: python -m tests.unit.test_config_golden, which writes both.
"""

import difflib
from dataclasses import MISSING
from pathlib import Path

from megatron_dllm.config.describe import flags_document
from megatron_dllm.config.run import FLAGS

GOLDEN = Path(__file__).parent / "golden" / "flags.txt"
DOCUMENT = Path(__file__).parents[2] / "docs" / "flags.md"


def flag_lines() -> list[str]:
    """One line a flag: name, kind or choices, default."""
    lines, last_group = [], None
    for group, item in FLAGS.values():
        if group != last_group:
            lines.append(f"[{group}]")
            last_group = group
        kind = "{" + ",".join(map(str, item.choices)) + "}" if item.choices else item.kind.__name__
        default = "required" if item.default is MISSING else item.describe(item.default)
        lines.append(f"{item.name} {kind}{'...' if item.several else ''} = {default}")
    return lines


def test_every_flag_is_in_the_golden_file():
    found, golden = flag_lines(), GOLDEN.read_text(encoding="utf-8").splitlines()
    changes = "\n".join(difflib.unified_diff(golden, found, "flags.txt", "the code", lineterm="", n=0))
    assert found == golden, f"{changes}\nif that is meant: python -m tests.unit.test_config_golden"


def test_the_document_of_flags_is_that_of_the_code():
    written, text = DOCUMENT.read_text(encoding="utf-8"), flags_document()
    changes = "\n".join(difflib.unified_diff(written.splitlines(), text.splitlines(), "docs/flags.md", "the code", lineterm="", n=0))
    assert written == text, f"{changes}\nto write it anew: python -m tests.unit.test_config_golden"
    assert all(f"| `{item.name}` |" in text for _, item in FLAGS.values())


def test_every_flag_has_help_that_is_a_sentence():
    for _, item in FLAGS.values():
        assert item.help.endswith("."), item.name


if __name__ == "__main__":
    GOLDEN.write_text("\n".join(flag_lines()) + "\n", encoding="utf-8")
    DOCUMENT.write_text(flags_document(), encoding="utf-8")
