"""The environment that tests and quickstart run in: tools/missing_packages.py and tools/environment.sh."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.missing_packages import missing, requirements

ROOT = Path(__file__).parents[2]
# What environment.sh may use: nothing that macOS lacks.
SYSTEM_TOOLS = ("bash", "dirname", "sed", "awk", "env")


def test_requirements_reads_the_lists_of_setup():
    plain, dev = requirements([]), requirements(["dev"])
    assert "torch>=2.11.0a0" in plain and not any(line.startswith("pytest") for line in plain)
    assert set(plain) < set(dev) and any(line.startswith("pytest-timeout") for line in dev)
    with pytest.raises(ValueError, match=r"no extra named \['devel'\].*'dev'"):
        requirements(["devel"])


def test_missing_names_the_version_found(monkeypatch):
    found = {"torch": "2.8.0", "einops": "0.8.2"}

    def version(name: str) -> str:
        if name not in found:
            raise importlib.metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert missing(["torch>=2.11.0a0", "einops>=0.8", "rich>=13.7"]) == ["torch>=2.11.0a0 (found 2.8.0)", "rich>=13.7"]
    # What NVIDIA's containers call theirs.
    found["torch"] = "2.11.0a0+eb65b36914.nv26.2"
    assert missing(["torch>=2.11.0a0"]) == []


def test_every_requirement_is_pinned_for_the_tests():
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    names = {line.partition(">=")[0].lower() for line in requirements(["dev"])}
    assert names <= pinned, f"constraints.txt does not pin {sorted(names - pinned)}"


@pytest.fixture
def checkout(tmp_path) -> Path:
    """What environment.sh reads, at a path with a space and with no .venv beside it."""
    root = tmp_path / "my clone"
    (root / "tools").mkdir(parents=True)
    for name in ("tools/environment.sh", "tools/missing_packages.py", "setup.py", "constraints.txt"):
        shutil.copy(ROOT / name, root / name)
    return root


@pytest.fixture
def no_python(tmp_path) -> Path:
    """A folder for PATH with the system's tools and no Python."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in SYSTEM_TOOLS:
        (folder / tool).symlink_to(shutil.which(tool))
    return folder


def run(script: str, checkout: Path, **environment: str) -> subprocess.CompletedProcess:
    command = ["bash", "-euc", f'. "$1/tools/environment.sh"\n{script}', "bash", str(checkout)]
    inherited = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHON")}
    return subprocess.run(command, env={**inherited, **environment}, capture_output=True, text=True, timeout=100)


def test_make_environment_checks_python_before_making_anything(checkout, no_python):
    result = run("make_environment dev", checkout, PATH=str(no_python))
    assert result.returncode == 2
    assert "no Python 3.11 to 3.14 found" in result.stderr and "PYTHON=/path/to/python3" in result.stderr
    assert not (checkout / ".venv").exists()


def test_make_environment_refuses_a_python_that_is_too_old(checkout, no_python):
    old = no_python / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    result = run("make_environment dev", checkout, PATH=str(no_python), PYTHON=str(old))
    assert result.returncode == 2 and f"PYTHON={old} is not a Python 3.11 to 3.14" in result.stderr
    assert not (checkout / ".venv").exists()


def test_make_environment_says_what_to_do_with_a_broken_venv(checkout):
    (checkout / ".venv" / "bin").mkdir(parents=True)
    result = run("make_environment dev", checkout)
    assert result.returncode == 2 and f"rm -r '{checkout}/.venv'" in result.stderr


def test_make_environment_takes_an_active_environment_that_has_everything():
    result = run("make_environment dev; echo $PYTHON", ROOT, VIRTUAL_ENV=sys.prefix)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == f"{sys.prefix}/bin/python"


@pytest.mark.slow
def test_make_venv_sees_the_torch_of_a_container_and_keeps_pip_from_replacing_it(checkout):
    torch = importlib.metadata.version("torch")
    result = run(f'own_torch "{sys.executable}"; make_venv "{sys.executable}" "$(own_torch "{sys.executable}")"', checkout)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == torch
    assert (checkout / ".venv" / "container-torch.txt").read_text() == f"torch=={torch}\n"
    find = "import importlib.util; print(importlib.util.find_spec('torch').origin)"
    theirs = subprocess.run([sys.executable, "-c", find], capture_output=True, text=True, check=True).stdout
    ours = subprocess.run([checkout / ".venv" / "bin" / "python", "-c", find], capture_output=True, text=True, check=True).stdout
    assert ours == theirs
