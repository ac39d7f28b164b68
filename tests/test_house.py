"""The rules of the house, read off the source: which way imports point, and where a thing may be written."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import tritonattn
from tritonattn.paths import launch

PACKAGE = Path(tritonattn.__file__).parent
# From the facts upwards; a module imports its own layer and those before it. What is in none is above them all.
LAYERS = [
    {"environment", "problem", "layouts", "reference", "scratch", "log", "where"}
    | {"tuning.arch", "tuning.schema", "tuning.table", "tuning.tables_dir", "tuning.codegen"},
    {"checks", "plan", "batch"},
    {"router", "mla_router", "tile"},
    {"paths"},
    {"mha", "mla"},
]
KERNELS = sorted(PACKAGE.glob("tile/*.py")) + sorted(PACKAGE.glob("paths/*.py"))
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def layer(module: str) -> int:
    parts = module.split(".")
    names = {".".join(parts[: i + 1]) for i in range(len(parts))}
    return next((i for i, members in enumerate(LAYERS) if names & members), len(LAYERS))


def imports(path: Path):
    """Modules of the package that this one imports when it is imported."""
    package = ["tritonattn", *path.relative_to(PACKAGE).parent.parts]
    for node in tree(path).body:
        if not isinstance(node, ast.ImportFrom):
            continue
        module = ".".join([*package[: len(package) + 1 - node.level], node.module or ""]) if node.level else node.module
        if module.split(".")[0] == "tritonattn":
            base = module.removeprefix("tritonattn").strip(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}".strip(".")
                yield inner if (PACKAGE / f"{inner.replace('.', '/')}.py").is_file() else base or alias.name


def test_imports_point_one_way():
    wrong = [
        f"{name_of(path)} imports {target}"
        for path in SOURCES if path.name != "__init__.py" or path.parent != PACKAGE
        for target in imports(path) if layer(target) > layer(name_of(path))
    ]  # fmt: skip
    assert not wrong


def test_tiles_are_for_paths_alone():
    allowed = ("paths", "tile", "simulator")
    wrong = [name_of(path) for path in SOURCES if name_of(path).split(".")[0] not in allowed and any(t.startswith("tile") for t in imports(path))]
    assert not wrong


def test_everything_up_to_the_router_imports_without_triton():
    modules = sorted(set.union(*LAYERS[:3]) - {"tile"})
    code = (
        "import sys\nclass Block:\n    def find_spec(self, name, *rest):\n        if name.split('.')[0] == 'triton': raise ImportError(name)\n"
        "sys.meta_path.insert(0, Block())\n" + "".join(f"import tritonattn.{module}\n" for module in modules)
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_exponentials_are_in_one_place():
    wrong = [path.name for path in KERNELS if re.search(r"\btl\.(exp|exp2|log|log2)\(", path.read_text()) and path.name != "softmax.py"]
    assert not wrong


def test_no_kernel_is_compiled_for_a_length_or_a_stride():
    """What is launched is a `launch.kernel`, which leaves the numbers of a call open; and none of those has another name."""
    launched, kernels = set(), {}
    for path in KERNELS:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call):
                first, *rest = [ast.unparse(node.func), *map(ast.unparse, node.args)]
                if [first, *rest[:1]] == ["partial", "launch.run"]:
                    first, *rest = rest
                launched |= set(rest[:1]) if first == "launch.run" else set()
            decorators = [ast.unparse(decorator) for decorator in getattr(node, "decorator_list", [])]
            if any(text.startswith("launch.kernel") for text in decorators):
                kernels[node.name] = [argument.arg for argument in node.args.args if argument.annotation is None]
    assert launched == set(kernels)
    for name, arguments in kernels.items():
        whole = {argument for argument in arguments if re.search(r"len|num|count|size|stride|begin|end|left|right|blocks", argument)}
        tensors = {"cu_seqlens_q", "cu_seqlens_k", "seq_lens", "context_lens", "lengths", "block_table"}
        assert not {argument for argument in whole - tensors if not launch.NUMBERS.match(argument)}, name


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_text(path):
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"TO" r"DO|FIX" r"ME|XX" r"X", text)
    assert "assert isinstance(" not in text, "input is checked by an error, not by assert"
    if path.name != "__init__.py" or text.strip():
        assert ast.get_docstring(tree(path)), "a module says what it is"


@pytest.mark.parametrize("name", tritonattn.__all__)
def test_public_names_are_documented(name):
    assert getattr(tritonattn, name).__doc__
