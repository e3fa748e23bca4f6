"""What holds for every file of the repository."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("megatron_dllm", "tools", "tests")
PYTHON_FILES = [ROOT / "pretrain_dllm.py", *sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))]


def test_ruff_finds_nothing():
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format", "concise", "setup.py", "pretrain_dllm.py", *FOLDERS]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_files_stay_under_500_lines():
    long = {str(path.relative_to(ROOT)): lines for path in PYTHON_FILES if (lines := len(path.read_text().splitlines())) >= 500}
    assert not long


def faults(tree: ast.AST) -> list[str]:
    """`except Exception` hides what its author did not expect; a setting or group that is global cannot be passed."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            found.append(f"{node.lineno}: global {', '.join(node.names)}")
        if isinstance(node, ast.ExceptHandler) and (node.type is None or isinstance(node.type, ast.Name) and node.type.id == "Exception"):
            found.append(f"{node.lineno}: an except clause for any Exception")
    return found


def test_no_file_hides_errors_or_keeps_global_state():
    found = [f"{path.relative_to(ROOT)}:{fault}" for path in PYTHON_FILES for fault in faults(ast.parse(path.read_text()))]
    assert not found, "\n".join(found)


def test_faults_finds_planted_ones():
    assert faults(ast.parse("def f():\n    global x\n    try:\n        x = 1\n    except Exception as error:\n        pass")) == [
        "2: global x",
        "5: an except clause for any Exception",
    ]
    assert faults(ast.parse("try:\n    x = 1\nexcept:\n    pass")) == ["3: an except clause for any Exception"]
    assert faults(ast.parse("try:\n    x = 1\nexcept (OSError, ValueError):\n    raise")) == []


def test_the_package_lists_every_folder_with_code():
    # A folder without __init__.py is left out of an installation that is not editable.
    folders = {path.parent for path in (ROOT / "megatron_dllm").rglob("*.py")}
    assert all((folder / "__init__.py").exists() for folder in folders), [str(f) for f in folders if not (f / "__init__.py").exists()]
