"""What an install brings, and what importing it costs."""
from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tritonattn.tuning.tables_dir import tables_dir

ROOT = Path(__file__).resolve().parents[1]
NEVER_PULLED = {"torch", "triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm"}


def python(code: str, **kwargs) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, **kwargs)
    assert done.returncode == 0, done.stderr
    return done.stdout


def distribution(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


@pytest.fixture(scope="module")
def project() -> dict:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11's TOML reader")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_import_costs_little_beyond_torch_and_triton():
    code = "import torch, triton, time; t = time.perf_counter(); import tritonattn; print(time.perf_counter() - t)"
    assert min(float(python(code)) for _ in range(3)) < 0.3


def test_import_touches_no_device():
    python("""
import torch, triton
def refuse(*_, **__): raise AssertionError("a device was asked for")
torch.cuda._lazy_init = torch.cuda.init = torch.cuda.get_device_properties = torch.cuda.is_available = refuse
triton.runtime.driver._default = triton.runtime.driver._active = None
type(triton.runtime.driver).active = property(refuse)
import tritonattn
for name in getattr(tritonattn, "__all__", ()):
    getattr(tritonattn, name)
""")


def test_only_the_cpu_and_cuda_extras_name_torch_or_triton(project):
    extras = project["optional-dependencies"]
    for extra, requirements in {"": project["dependencies"], **extras}.items():
        named = {distribution(requirement) for requirement in requirements} & NEVER_PULLED
        assert named == ({"torch", "triton"} if extra in ("cpu", "cuda") else set()), extra


def test_no_requirement_pulls_torch_or_triton_behind_our_back(project):
    """Walks what the requirements require in turn, as far as it is installed here."""
    extras = project["optional-dependencies"]
    todo = [*project["dependencies"], *(r for extra in ("demo", "test", "dev", "bench") for r in extras[extra])]
    seen: set[str] = set()
    while todo:
        name = distribution(todo.pop())
        if name in seen:
            continue
        seen.add(name)
        try:
            requires = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        todo += [requirement for requirement in requires if "extra ==" not in requirement]
    assert "rich" in seen
    assert not seen & NEVER_PULLED


def test_checkout_finds_the_tables():
    assert tables_dir() == ROOT / "autotune_configs"


def test_wheel_carries_the_tables_and_finds_them(tmp_path):
    pytest.importorskip("hatchling")
    built = subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
                           cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    wheel, = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
        names = archive.namelist()
    shipped = {name.removeprefix("tritonattn/") for name in names if name.startswith("tritonattn/autotune_configs/")}
    ours = {str(path.relative_to(ROOT)) for path in tables_dir().rglob("*.json")}
    assert ours <= shipped
    assert not [name for name in names if name.startswith(("tests/", ".ci/", "autotune_configs/"))]
    assert any(name.endswith("licenses/LICENSE") for name in names)
    code = "from tritonattn.tuning.tables_dir import tables_dir; print(tables_dir())"
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True,
                           env={"PYTHONPATH": str(tmp_path / "site")})
    assert found.stdout.strip() == str(tmp_path / "site" / "tritonattn" / "autotune_configs"), found.stderr


def test_targets_make_the_environment_first(tmp_path):
    """From a clean clone, each target that runs Python makes .venv before it does."""
    for name in ("Makefile", "pyproject.toml", ".ci/constraints.txt", ".ci/venv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    for target in ("demo", "test", "test-gpu", "lint", "check"):
        steps = subprocess.run(["make", "-n", target], cwd=tmp_path, capture_output=True, text=True)
        assert steps.returncode == 0, steps.stderr
        first = next(line for line in steps.stdout.splitlines() if not line.startswith("make"))
        assert first == ".ci/venv .venv", (target, steps.stdout)


def test_constraints_pin_everything_the_extras_name(project):
    pinned = {distribution(line) for line in (ROOT / ".ci/constraints.txt").read_text().splitlines() if "==" in line}
    extras = project["optional-dependencies"]
    named = {distribution(r) for requirements in (project["dependencies"], *extras.values()) for r in requirements}
    assert named <= pinned


def test_info_says_where_the_tables_are():
    facts = json.loads(python("from tritonattn.cli import main; main(['info', '--json'])"))
    assert facts["tables folders"] == [str(tables_dir())]
