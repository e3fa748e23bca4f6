"""What holds for every file of the repository."""

import ast
import functools
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("megatron_dllm", "tools", "tests")
PYTHON_FILES = [ROOT / "pretrain_dllm.py", *sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))]


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


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
    found = [f"{path.relative_to(ROOT)}:{fault}" for path in PYTHON_FILES for fault in faults(tree_of(path))]
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


SCREEN, MOST_PARAMETERS = 50, 10
# What is longer than a screen, in lines, and what takes more parameters. No entry may be added, and none may grow; Triton's kernels take
# what they read and write, and autograd's functions what they keep, one by one.
LONG = {
    "tools/checkup/layers.py:row_trials": 79,
    "megatron_dllm/kernels/hyper_connection_streams.py:_read_backward": 78,
    "megatron_dllm/kernels/hyper_connection_streams.py:_normed_products": 69,
    "megatron_dllm/kernels/hyper_connection_projection.py:_project": 69,
    "megatron_dllm/kernels/hyper_connection_mappings.py:_mappings_backward": 52,
    "megatron_dllm/kernels/block_attention.py:_attend": 52,
    "megatron_dllm/kernels/cross_entropy.py:_statistics": 52,
    "megatron_dllm/diffusion/sampler.py:_denoise_canvas": 51,
}
WIDE = {
    "megatron_dllm/transformer/hyper_connection.py:_ReadNormed.forward": 14,
    "tests/parallel/fake_deep_ep.py:Buffer.dispatch": 14,
    "megatron_dllm/tensor_parallel/cross_entropy.py:linear_cross_entropy": 13,
    "megatron_dllm/kernels/hyper_connection_mappings.py:mappings_backward": 12,
    "megatron_dllm/kernels/decode_residual.py:finish_layer": 12,
    "megatron_dllm/training/graphs.py:GraphedMicrobatches.__init__": 11,
    "megatron_dllm/kernels/block_attention.py:block_attention": 11,
    "megatron_dllm/kernels/grouped_mlp.py:_GroupedMLP.forward": 11,
    "megatron_dllm/kernels/norm_heads.py:_NormHeads.forward": 11,
    "megatron_dllm/kernels/norm_heads.py:norm_heads": 11,
    "megatron_dllm/kernels/residual.py:_FedForward.forward": 11,
    "megatron_dllm/kernels/residual.py:after_feed_forward_and_norm": 11,
    "megatron_dllm/transformer/hyper_connection.py:_read_backward": 11,
    "megatron_dllm/transformer/residual.py:after_feed_forward_and_norm": 11,
}


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every function and method below, with the names of what it is in: `Class.method`, `function.inner`."""
    for node in ast.iter_child_nodes(tree):
        inner = f"{prefix}{node.name}." if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else prefix
        if isinstance(node, ast.FunctionDef):
            yield inner[:-1], node
        yield from functions(node, inner)


def num_parameters(function: ast.FunctionDef) -> int:
    """Without self, cls and autograd's ctx; 0 for a Triton kernel."""
    if any("jit" in ast.unparse(decorator) for decorator in function.decorator_list):
        return 0
    given = function.args
    named = [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    starred = (given.vararg is not None) + (given.kwarg is not None)
    return len(named) + starred - (named[:1] in (["self"], ["cls"], ["ctx"]))


def over(limit: int, sizes: dict[str, int], known: dict[str, int]) -> list[str]:
    """What is above the limit and above what is known of it, and what is known though it need not be."""
    grown = [f"{name}: {size}, at most {known.get(name, limit)}" for name, size in sizes.items() if size > known.get(name, limit)]
    return grown + [f"{name}: take it off the list" for name in known if sizes.get(name, 0) <= limit]


def test_functions_fit_a_screen_and_take_few_parameters():
    found = {f"{path.relative_to(ROOT)}:{name}": function for path in PYTHON_FILES
             for name, function in functions(tree_of(path))}
    lines = {name: function.end_lineno - function.lineno + 1 for name, function in found.items()}
    assert not (faulty := over(SCREEN, lines, LONG)), "\n".join(faulty)
    widths = {name: num_parameters(function) for name, function in found.items()}
    assert not (faulty := over(MOST_PARAMETERS, widths, WIDE)), "\n".join(faulty)


def test_functions_and_limits_see_planted_ones():
    source = "class A:\n    def f(self, a, /, b, *c, d=1, **e):\n        def g(): pass\n@triton.jit\ndef k(a, b):\n    pass"
    assert {name: num_parameters(function) for name, function in functions(ast.parse(source))} == {"A.f": 5, "A.f.g": 0, "k": 0}
    assert over(3, {"a": 3, "b": 4, "c": 5, "d": 6}, {"c": 5, "d": 5}) == ["b: 4, at most 3", "d: 6, at most 5"]
    assert over(3, {"a": 3}, {"a": 4, "b": 5}) == ["a: take it off the list", "b: take it off the list"]


# Package (or module beside the packages) -> the others of ours that it imports, those that stand lowest first.
IMPORTS = {
    "kernels": (),
    "config": ("pipeline",),
    "parallel": ("config",),
    "pipeline": ("parallel",),
    "data": ("config",),
    "tensor_parallel": ("kernels", "parallel"),
    "checkpoint": ("parallel",),
    "moe": ("kernels", "config", "parallel", "tensor_parallel", "transformer"),
    "context_parallel": ("kernels", "config", "parallel", "transformer"),
    "transformer": ("kernels", "config", "parallel", "tensor_parallel", "moe", "context_parallel", "transformer_engine"),
    "transformer_engine": ("config", "parallel", "tensor_parallel", "moe", "context_parallel", "transformer"),
    "data_parallel": ("kernels", "parallel", "pipeline", "tensor_parallel", "transformer"),
    "diffusion": ("kernels", "config", "moe", "context_parallel", "transformer"),
    "models": ("kernels", "config", "parallel", "pipeline", "data", "tensor_parallel", "checkpoint", "moe", "transformer",
               "transformer_engine", "diffusion"),
    "generation": ("config", "data", "diffusion", "models"),
    "training": ("kernels", "config", "parallel", "pipeline", "data", "tensor_parallel", "checkpoint", "moe", "context_parallel",
                 "transformer", "transformer_engine", "data_parallel", "diffusion", "models", "generation"),
    "extending": ("config", "data", "diffusion"),
}  # fmt: skip
# Edges that go both ways, each with what it waits for.
CYCLES = {
    # What fits a layout of stages is asked of the layouts themselves, beside which pipeline/ has the transfers between processes.
    ("config", "pipeline"): "layouts and schedules are pure and would stand below config",
    # Blocks hold their experts; experts and routers compute with functions on tensors that stand beside the layers.
    ("moe", "transformer"): "precision, activations and norms as functions would stand below both",
    # Attention is given its form over ranks; that form computes with the attention of one rank.
    ("context_parallel", "transformer"): "visibility and attention as functions would stand below both",
    # A pass holds the package's plan; what stands in for layers is made of ours.
    ("transformer_engine", "transformer"): "packed attention would stand with the package's other parts",
}


def imports_of(package: Path) -> dict[str, set[str]]:
    """By package or module directly in `package`, which others of these it imports, anywhere in it."""
    found: dict[str, set[str]] = {}
    for path in package.rglob("*.py"):
        inside = path.relative_to(package).with_suffix("").parts
        if inside == ("__init__",):
            continue
        imported = found.setdefault(inside[0], set())
        for node in ast.walk(tree_of(path)):
            for name in names_imported(node, (package.name, *inside[:-1])):
                if name[0] == package.name and len(name) > 1 and name[1] != inside[0]:
                    imported.add(name[1])
    return {name: imported & found.keys() for name, imported in found.items()}  # no names of the package itself, such as __version__


def names_imported(node: ast.AST, folder: tuple[str, ...]) -> list[tuple[str, ...]]:
    """What an import statement in a file of `folder` names, from the top: ("megatron_dllm", "config", "RunConfig")."""
    if isinstance(node, ast.Import):
        return [tuple(alias.name.split(".")) for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    start = folder[:len(folder) - node.level + 1] if node.level else ()
    module = tuple(node.module.split(".")) if node.module else ()
    return [(*start, *module, alias.name) for alias in node.names]


def test_packages_import_what_the_table_says():
    found = imports_of(ROOT / "megatron_dllm")
    assert found == {name: set(others) for name, others in IMPORTS.items()}


def test_imports_go_one_way_but_for_the_cycles_that_are_named():
    assert all(above in IMPORTS and below in IMPORTS[above] for above, below in CYCLES)
    one_way = {name: [other for other in others if (name, other) not in CYCLES] for name, others in IMPORTS.items()}
    assert [*graphlib.TopologicalSorter(one_way).static_order()]
    for edge in CYCLES:
        with_it = {name: [*others, edge[1]] if name == edge[0] else others for name, others in one_way.items()}
        with pytest.raises(graphlib.CycleError):
            graphlib.TopologicalSorter(with_it).prepare()


def test_imports_of_sees_every_form(tmp_path):
    package = tmp_path / "ours"
    for name, text in {"__init__": "from .a import x", "a/__init__": "", "a/one": "import ours.b.c\nfrom ours import d",
                       "b/two": "def f():\n    from ..a.one import x\n    from . import y\n    from .. import d",
                       "d": "import numpy\nfrom ours import version"}.items():
        path = package / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert imports_of(package) == {"a": {"b", "d"}, "b": {"a", "d"}, "d": set()}
