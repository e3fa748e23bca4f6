"""Every command in the documents parses, and the README's tree and links lead somewhere."""

import multiprocessing
import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import TextIO

import pytest

from megatron_dllm import config
from megatron_dllm.config.unknown_flags import answer
from tests.unit.test_house_style import IMPORTS, ROOT

DOCUMENTS = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").rglob("*.md") if path.name != "log.md")]
# Where the model comes from does not matter to the other flags, and the folders of examples do not exist.
MODEL_SOURCES = ("--preset", "--model-config", "--load", "--pretrained-checkpoint")


def commands(text: str) -> list[str]:
    """The lines of fenced bash blocks, continued lines joined, comments dropped."""
    blocks = re.findall(r"^```(?:bash|sh)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in re.sub(r"\\\n\s*", "", block).splitlines()]
    return [line for line in lines if shlex.split(line, comments=True)]


def problem(command: str) -> str | None:
    """Why a command of a document cannot be run as it stands, None if nothing speaks against it."""
    words = shlex.split(command, comments=True)
    variables = {}
    while re.match(r"[A-Z_0-9]+=", words[0]):  # set for the command
        name, _, variables[name] = words[0].partition("=")
        words = words[1:]
    script = next((n for n, word in enumerate(words) if word.endswith((".py", ".sh"))), None)
    if script is None:
        known = ("source", "cd", "git", "pip", "hf", "tensorboard", "export")
        return None if words[0] in known else f"{words[0]}: no command that the test knows"
    path, arguments = ROOT / words[script], words[script + 1 :]
    if path.parent.name in ("diffusion_gemma", "launch") and path.is_file():
        return _recipe_problem(words, script, variables)
    if not path.is_file():
        return f"{words[script]} is not there"
    if path.suffix == ".sh":
        result = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
        return result.stderr or None
    if path.name == "pretrain_dllm.py":
        starter = dict(zip(words, words[1:script], strict=False))
        return _training_problem(arguments, int(starter.get("--nproc-per-node", 1)))
    own, _, training = " ".join(arguments).partition(" -- ")
    if training:  # flags of a run, handed on
        return problem(f"python tools/{path.name} {own}") or _training_problem(arguments[arguments.index("--") + 1 :])
    subcommand = arguments[0] if arguments and re.fullmatch(r"[a-z-]+", arguments[0]) and not arguments[0].startswith("-") else ""
    if "--suite" in arguments[:-1]:  # a benchmark has the options of its suite
        subcommand = f"--suite {arguments[arguments.index('--suite') + 1]}"
    try:
        known = flags_in_help(path, subcommand)
    except AssertionError as failure:
        return str(failure)
    unknown = [word for word in arguments if word.startswith("--") and word.split("=")[0] not in known]
    return f"{path.name} has no {unknown}" if unknown else None


def _recipe_problem(words: list[str], script: int, variables: dict[str, str]) -> str | None:
    """A recipe, or a launcher with one, prints its command; of a job the recipe is looked at alone."""
    recipe = next((word for word in words[script:] if "diffusion_gemma/" in word), None)
    if recipe is None or not (ROOT / recipe).is_file():
        return f"{words[script]}: no recipe {recipe}"
    start = [words[script], *words[script + 1 :]] if words[0] == "bash" else [recipe]
    environment = {**os.environ, **variables, "DRY_RUN": "command", "PYTHON": sys.executable}
    result = subprocess.run(["bash", *start], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return result.stderr or "it failed" if result.returncode else None


def _training_problem(arguments: list[str], processes: int = 1) -> str | None:
    kept = ["--preset", "toy"]
    skip = False
    for word in arguments:
        if not (skip or word in MODEL_SOURCES or word.startswith("@")):
            kept.append(word)
        skip = word in MODEL_SOURCES
    from_file = any(word.startswith("@") for word in arguments)
    try:
        run = config.parse(kept)
    except ValueError as error:
        return str(error)
    problems = config.validate(run, world_size=processes)
    # What an argument file says is not known here, so that only the flags can be judged.
    return config.format_problems(problems) if problems and not from_file else None


@cache
def flags_in_help(tool: Path, subcommand: str = "") -> frozenset[str]:
    status, text = in_a_fork(tool, [*subcommand.split(), "--help"])
    assert status == 0, f"{tool.name} {subcommand} --help: {text}"
    known = set(re.findall(r"--[a-z0-9-]+", text))
    # A tool that says so takes the flags of training as well.
    return frozenset(known | {item.name for _, item in config.run.FLAGS.values()} if "pretrain_dllm.py" in text else known)


def in_a_fork(script: Path, words: list[str]) -> tuple[int, str]:
    """Exit status and output of a script run in a fork of this process, which has imported torch, the better part of its time."""
    with tempfile.TemporaryFile("w+") as output:
        process = multiprocessing.get_context("fork").Process(target=_run_script, args=(script, words, output))
        process.start()
        process.join(60)
        assert process.exitcode is not None, f"{script.name} {' '.join(words)} has not ended after a minute"
        output.seek(0)
        return process.exitcode, output.read()


def _run_script(script: Path, words: list[str], output: TextIO) -> None:
    os.environ["COLUMNS"] = "200"
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    sys.stdout, sys.stderr = (open(descriptor, "w", closefd=False) for descriptor in (1, 2))  # noqa: SIM115 (until the process ends)
    sys.argv = [str(script), *words]
    os.chdir(ROOT)
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def cases() -> list:
    return [pytest.param(line, id=f"{path.name}: {line[:60]}") for path in DOCUMENTS for line in commands(path.read_text())]


@pytest.mark.parametrize("command", cases())
def test_command_in_a_document_parses(command):
    assert problem(command) is None


def test_commands_reads_fenced_blocks_alone():
    text = "a\n```bash\npython a.py \\\n    --b 1   # why\n\n# comment\nbash c.sh\n```\nx\n```python\nimport os\n```\n    bash d.sh\n"
    assert commands(text) == ["python a.py --b 1   # why", "bash c.sh"]


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("bash examples/nothing.sh", "is not there"),
        ("python pretrain_dllm.py --preset toy --lr-warmup 5", "--lr-warmup"),
        ("python pretrain_dllm.py --preset toy --train-iters 5 --data-path x --lr -1", "--lr"),
        ("python tools/plot_run.py runs/a --smoth 0.9", "has no ['--smoth']"),
        ("make all", "no command that the test knows"),
        ("python tools/plan.py pipelines", "invalid choice"),
        ("python tools/verify.py layouts --quik", "has no ['--quik']"),
        ("SCALE=tiny bash examples/diffusion_gemma/sft_26b.sh", "neither full nor toy"),
        ("bash examples/launch/torchrun.sh examples/diffusion_gemma/none.sh", "no recipe"),
        ("python tools/plan.py layouts --num-gpus 8 -- --preset toy --train-iters 5 --data-path x --lr -1", "--lr"),
    ],
)
def test_problem_finds_planted_ones(command, text):
    assert text in problem(command)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_document_leads_to_files_that_exist(document):
    text = document.read_text()
    targets = [target for target in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in target]
    assert all((document.parent / target).exists() for target in targets), targets
    modules = re.findall(r"`((?:[a-z_]+/)+(?:[a-z_]+\.(?:py|sh))?)`", text)
    missing = [name for name in modules if not (ROOT / name).exists() and not (ROOT / "megatron_dllm" / name).exists()]
    assert not missing, missing


def test_every_document_is_reached_from_the_index():
    index = ROOT / "docs" / "README.md"
    assert "](docs/README.md)" in (ROOT / "README.md").read_text()
    linked = {(index.parent / target).resolve() for target in re.findall(r"\]\(([^)#:]+)\)", index.read_text())}
    missing = [str(path.relative_to(ROOT)) for path in DOCUMENTS[1:] if path != index and path not in linked]
    assert not missing, f"docs/README.md: add a line for {missing}"


def test_flags_that_are_said_to_be_here_are_here():
    text = (ROOT / "docs" / "coming_from_megatron.md").read_text()
    same, _, others = text.partition("## Names that differ")
    here = [same, *(line.split("|")[2] for line in others.splitlines() if line.startswith("| "))]
    named = {name for part in here for name in re.findall(r"--[a-z][a-z0-9-]+", part)}
    assert len(named) > 60 and not named - {item.name for _, item in config.run.FLAGS.values()}


def test_flags_of_others_are_answered_when_they_are_given():
    """What the page says of a flag that is not here is no use to who pastes a command without having read it."""
    text = (ROOT / "docs" / "coming_from_megatron.md").read_text()
    table = text.partition("## Names that differ")[2].partition("\n## ")[0]
    known = {item.name for _, item in config.run.FLAGS.values()}
    there = {name for line in table.splitlines() for name in re.findall(r"`(--[a-z0-9-]+)", line.split("|")[1] if "|" in line else "")}
    assert len(there - known) >= 18
    assert [name for name in sorted(there - known) if answer(name, known) == "--help lists all flags"] == []


def test_citations_name_sections_that_there_are():
    cited = re.compile(r"docs/(design|model)\.md,? section (\d+)")
    sources = [path for folder in ("megatron_dllm", "tools", "tests") for path in (ROOT / folder).rglob("*.py")]
    for name, section in {found for path in sources for found in cited.findall(path.read_text())}:
        assert re.search(rf"^## {section}\. ", (ROOT / "docs" / f"{name}.md").read_text(), re.MULTILINE), f"docs/{name}.md has no {section}"


def test_readme_tree_names_every_part_and_nothing_else():
    tree = re.search(r"## Where things are\n\n((?: {4}.*\n)+)", (ROOT / "README.md").read_text()).group(1)
    named, folder = set(), ""
    for line in tree.splitlines():
        depth, name = (len(line) - len(line.lstrip())) // 2, line.split()[0]
        folder = folder if depth == 3 else name
        named.add(name if depth == 2 else folder + name)
    packages = {f"megatron_dllm/{path.parent.name}/" for path in (ROOT / "megatron_dllm").glob("*/__init__.py")}
    packages.add("megatron_dllm/extending.py")  # for people
    tools = {f"tools/{path.name}" for path in (ROOT / "tools").glob("*.py")} | {"tools/install_gpu.sh"}
    helpers = {"tools/missing_packages.py", "tools/refusal.py"}  # used by scripts, not by people
    parts = packages | tools - helpers
    named_parts = {name for name in named - {"megatron_dllm/", "tools/"} if name.startswith(("megatron_dllm/", "tools/"))}
    assert not parts - named_parts, f"README.md, Where things are: add a line for {sorted(parts - named_parts)}"
    assert not named_parts - parts, f"README.md, Where things are: {sorted(named_parts - parts)} is not there"
    assert all((ROOT / name).exists() for name in named), named


def test_figures_told_again_are_those_of_the_performance_page():
    measured = (ROOT / "docs" / "performance.md").read_text()
    step = r"takes ([\d.]+) ms, where `transformers`\s+takes ([\d.]+) times and NeMo AutoModel ([\d.]+) times"
    told = re.search(step, (ROOT / "README.md").read_text())
    (row,) = re.findall(r"^\| batch 4 x 1024 \|.*$", measured, re.MULTILINE)
    assert all(re.search(rf"\| {figure}\b", row) for figure in told.groups()), f"README.md tells {told.groups()} of {row}"
    table = re.search(r"\*\*Measured\*\*.*?(?=\*\*Predicted)", (ROOT / "docs" / "recipes.md").read_text(), re.DOTALL).group(0)
    gib = re.findall(r"^\|[^|]*\| \d+ \| ([\d.]+) \|", table, re.MULTILINE)
    assert len(gib) == 7 and not [figure for figure in gib if not re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d.])", measured)]


def test_pieces_of_python_run():
    text = (ROOT / "docs" / "python.md").read_text()
    names = {}
    for piece in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        exec(compile(piece, "docs/python.md", "exec"), names)
    assert names["losses"] == sorted(names["losses"], reverse=True) and len(names["completion"].tokens) >= 1


def test_imports_point_where_the_design_says():
    section = re.search(r"^## 1\. .*?(?=^## 2\. )", (ROOT / "docs" / "design.md").read_text(), re.MULTILINE | re.DOTALL).group(0)
    lines = re.findall(r"^(\d+)\. (.*)$", section, re.MULTILINE)
    level = {package: int(number) for number, line in lines for package in re.findall(r"`([a-z_]+)`", line)}
    mutual = {int(number) for number, line in lines if "one another" in line}
    packages = {path.parent.name for path in (ROOT / "megatron_dllm").glob("*/__init__.py")}
    assert set(level) == packages
    edges = {(own, other) for own in packages for other in IMPORTS[own]}
    wrong = {(own, other) for own, other in edges if level[other] > level[own] or level[other] == level[own] not in mutual}
    assert wrong == {("config", "pipeline")}, "docs/design.md, section 1 says which packages may import which"
