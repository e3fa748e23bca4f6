"""Every shell script: parses, keeps to bash 3.2, and says how to use it."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path for folder in (".ci", "examples", "tests", "tools") for path in (ROOT / folder).rglob("*") if path.is_file())
SCRIPTS = [path.relative_to(ROOT) for path in SCRIPTS if path.suffix == ".sh" or path.name == "run"]
# Bash features newer than 3.2, which is what macOS has, and commands that macOS lacks or that take other options there.
NEWER = re.compile(
    r"declare -[gAn]|local -n|\bmapfile\b|\breadarray\b|\|&|&>>|\$\{\w+(,,|\^\^|@)|\bcoproc\b|\bwait -n\b|;&|\[ -v |\[\[ -v "
    r"|\breadlink -f\b|(?<![.\w])realpath\b|(?<!-)\bnproc\b|\btimeout \d|\bsed -i\b|\bdate -d\b|\bgrep -P\b|\bmd5sum\b|\bfree -|\bseq \d+ -"
)


def bash(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command, environment = ["bash", *arguments], {**os.environ, **environment}
    return subprocess.run(command, cwd="/", env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)


def test_there_are_scripts():
    assert {Path("tests/run.sh"), Path(".ci/run"), Path("tools/install_gpu.sh")} <= set(SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_script_parses_and_keeps_to_bash_3(script):
    result = bash("-n", str(ROOT / script))
    assert result.returncode == 0, result.stderr
    lines = (ROOT / script).read_text().splitlines()
    newer = [f"{script}:{n}: {line}" for n, line in enumerate(lines, 1) if NEWER.search(line.split("#")[0])]
    assert not newer, "\n".join(newer)


def test_newer_finds_what_bash_3_lacks():
    for line in ("declare -A seen", 'echo "${name,,}"', "mapfile -t lines", "run |& tee log", "sed -i s/a/b/ file", "cores=$(nproc)"):
        assert NEWER.search(line), line
    for line in ('arguments=("$@")', "${arguments[@]+x}", "a || b && c", 'echo "${1%%::*}"', "sed -n 2p file"):
        assert not NEWER.search(line), line


@pytest.mark.parametrize("script", ["tests/run.sh", "tools/install_gpu.sh", "examples/quickstart.sh"])
def test_help_prints_the_head_of_the_script(script):
    result = bash(str(ROOT / script), "--help")
    assert result.returncode == 0 and f"bash {script} [" in result.stdout and "set -e" not in result.stdout


def test_run_refuses_slack_without_a_factor():
    result = bash(str(ROOT / "tests/run.sh"), "--slack")
    assert result.returncode == 2 and "--slack needs a factor" in result.stderr


def test_install_gpu_dry_run_prints_the_commands_in_order_and_runs_none(tmp_path):
    fake = tmp_path / "python"  # answers what is asked of it, and records every call
    fake.write_text(
        f"""#!/bin/sh
echo "$@" >> "{tmp_path}/calls"
case "$*" in *version*torch*) echo 2.11.0 ;; *torch.version.cuda*) echo 12.8 ;; *capability*) echo 9.0 ;; esac
"""
    )
    fake.chmod(0o755)
    result = bash(str(ROOT / "tools/install_gpu.sh"), "--dry-run", PYTHON=str(fake))
    assert result.returncode == 0, result.stderr
    assert " -m pip " not in (tmp_path / "calls").read_text()
    order = ["transformer_engine[pytorch,core_cu12]", "DeepEP", "apex", "flash-linear-attention", "flashinfer-python"]
    places = [result.stdout.index(name) for name in order]
    assert places == sorted(places)
    installs = [line for line in result.stdout.splitlines() if "-m pip install" in line and "setuptools" not in line]
    assert len(installs) == 5 and all("'torch==2.11.0'" in line for line in installs)
    assert all("--no-build-isolation" in line for line in installs[:3])


def test_install_gpu_names_each_missing_package_with_its_command(tmp_path):
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\ncase "$*" in *version*torch*) echo 2.11.0 ;; "- "*) echo not installed ;; esac\n')
    fake.chmod(0o755)
    result = bash(str(ROOT / "tools/install_gpu.sh"), "--check", "--fla", "--te", PYTHON=str(fake))
    assert result.returncode == 1
    assert "missing  fla (not installed)" in result.stdout and "missing  te (not installed)" in result.stdout
    assert f"'{fake}' -m pip install 'flash-linear-attention>=0.6.0' 'torch==2.11.0'" in result.stdout
    assert "deepep" not in result.stdout
    result = bash(str(ROOT / "tools/install_gpu.sh"), "--fla", PYTHON=str(fake))
    assert result.returncode == 1 and "the torch 2.11.0 of" in result.stderr and "has no CUDA" in result.stderr


def test_install_gpu_refuses_an_unknown_option():
    result = bash(str(ROOT / "tools/install_gpu.sh"), "--tee")
    assert result.returncode == 2 and "--tee is not an option" in result.stderr
