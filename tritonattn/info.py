"""``tritonattn info``: what this machine and this install offer."""
from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

from rich.table import Table

from tritonattn import environment
from tritonattn.cli import version
from tritonattn.console import console
from tritonattn.integrations.vllm.selfcheck import describe
from tritonattn.tuning.arch import detect
from tritonattn.tuning.table import folders, load

TESTED_TRITON = ((3, 6), (3, 10))  # from, below; as in pyproject.toml


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--vllm", action="store_true", help="import vLLM and ask it which attention classes it takes")


def run(args: argparse.Namespace) -> int:
    facts = collect(load_vllm=args.vllm)
    if args.json:
        print(json.dumps(facts, indent=2))
        return 0
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in facts.items():
        if name not in ("notes", "tables"):
            table.add_row(f"[bold]{name}", "\n".join(value) if isinstance(value, list) else str(value))
    for arch, kernels in facts["tables"].items():
        table.add_row(f"[bold]tables {arch}", ", ".join(f"{kernel} ({rows})" for kernel, rows in kernels.items()))
    out = console()
    out.print(table)
    for note in facts["notes"]:
        out.print(f"[yellow]note[/] {note}")
    return 0


def collect(load_vllm: bool = False) -> dict[str, Any]:
    """The facts as a JSON-ready mapping; ``notes`` are sentences on what is missing or untested."""
    notes: list[str] = []
    facts: dict[str, Any] = {
        "tritonattn": version(),
        "python": platform.python_version(),
    }
    facts |= _torch(notes)
    facts |= _triton(notes)
    facts |= describe(notes, load_vllm)
    facts["tables"] = {}
    try:
        for folder in reversed(folders()):  # a table of the user's own stands before the library's
            facts.setdefault("tables folders", []).insert(0, str(folder))
            for arch in sorted(folder.iterdir()):
                if arch.is_dir():
                    facts["tables"].setdefault(arch.name, {}).update(_rows(arch))
    except FileNotFoundError as error:
        notes.append(str(error))
    facts["notes"] = notes
    return facts


def _torch(notes: list[str]) -> dict[str, Any]:
    try:
        import torch
    except ImportError:
        notes.append("PyTorch is not installed; README.md, section Install, has the line for ROCm, CUDA and CPU")
        return {"torch": None}
    gpu = torch.cuda.is_available()
    arch = detect("cuda" if gpu else "cpu")
    facts: dict[str, Any] = {"torch": torch.__version__, "arch": arch.name if gpu else f"{arch.name} (no GPU)"}
    if "TRITONATTN_ARCH" in os.environ:
        notes.append("the arch is what TRITONATTN_ARCH says, not the device's")
    if not gpu:
        simulated = environment.simulated_arch()
        how = f"as {simulated} machine code in the simulator" if simulated else "in Triton's interpreter, with TRITON_INTERPRET=1 set before Triton is imported"
        notes.append(f"no GPU: ops run {how}")
        return facts | {"device": "cpu"}
    device = torch.cuda.get_device_properties(0)
    return facts | {
        "device": device.name,
        "devices": torch.cuda.device_count(),
        "nearest known GPU": arch.sku,
        "compute units": arch.compute_units,
        "memory": f"{device.total_memory / 2**30:.0f} GiB",
        "runtime": f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}",
    }


def _triton(notes: list[str]) -> dict[str, Any]:
    try:
        import triton
    except ImportError:
        notes.append("Triton is not installed; README.md, section Install, has the line for ROCm, CUDA and CPU")
        return {"triton": None}
    first, beyond = TESTED_TRITON
    version = tuple(int(part) for part in triton.__version__.split("+")[0].split(".")[:2])
    if not first <= version < beyond:
        notes.append(f"Triton {triton.__version__} is outside the tested range {first[0]}.{first[1]} <= version < {beyond[0]}.{beyond[1]}")
    # Two distributions that both ship the module `triton` overwrite each other's files: the fault that installs must avoid.
    owners = sorted(set(importlib.metadata.packages_distributions().get("triton", [])))
    if len(owners) > 1:
        notes.append(f"{' and '.join(owners)} both install the module triton over each other; keep the one that your torch names")
    return {"triton": triton.__version__, "interpreter": os.environ.get("TRITON_INTERPRET", "0") == "1"}


def _rows(arch_folder: Path) -> dict[str, int]:
    """Rows of each kernel's table. TableError where a file is not a table."""
    return {path.stem: len(load(path)) for path in sorted(arch_folder.glob("*.json"))}
