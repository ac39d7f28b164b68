"""Candidate configs of one kernel, timed against each other on the rows chosen."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from tritonattn.bench.cases import build
from tritonattn.bench.rows import Row
from tritonattn.bench.runner import Config, check_config, pinned, release, table_rows, time_case
from tritonattn.bench.timing import reason
from tritonattn.console import console
from tritonattn.tuning.arch import Arch, assume, detect

HOPELESS = 1.3  # slower than the best by this factor: timed once, roughly
TABLE = "the table's"


def load(path: str) -> dict[str, Config]:
    """Candidates by a label of what differs between them. The file: a JSON list of configs, each whole or a part of one."""
    try:
        configs = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--sweep must be a JSON file: {error}") from None
    if not isinstance(configs, list) or not all(isinstance(config, dict) for config in configs):
        raise ValueError(f"--sweep must be a JSON list of objects, got {type(configs).__name__}")
    for i, config in enumerate(configs):
        check_config(config, f"--sweep, entry {i}")
    keys = dict.fromkeys(key for config in configs for key in config)
    varied = [key for key in keys if len({config.get(key) for config in configs}) > 1]
    if all(config.get("num_stages") == config.get("NUM_STAGES") for config in configs):
        varied = [key for key in varied if key != "num_stages"]
    return {TABLE: {}} | {" ".join(f"{key}={config[key]}" for key in varied if key in config): config for config in configs}


def sweep_row(row: Row, device: torch.device, candidates: dict[str, Config], only: str) -> dict[str, Any]:
    """The JSON of a row: per candidate its time and error, or the reason why it did not run."""
    try:
        case = build(row, device, None, only or "tritonattn")
    except (AttributeError, ImportError, torch.OutOfMemoryError, ValueError, TypeError) as error:
        return {"suite": row.suite, "name": row.name, "candidates": {TABLE: {"refused": reason(error)}}}
    name, call = next(iter(case.calls.items()))
    arch = detect(device)
    used = table_rows(call, arch)

    def on(candidate: Arch):
        def run():
            with assume(candidate):
                return call()

        return run

    case.calls = {label: on(pinned(arch, config, case.kernel, used)) for label, config in candidates.items()}
    result = {
        "suite": row.suite, "name": row.name, "call": name, "flops": case.flops, "bytes": case.bytes,
        "table rows": {kernel: found.where for kernel, found in used.items()}, "candidates": time_case(case, device, hopeless=HOPELESS),
    }  # fmt: skip
    del case
    release(device)
    return result


def overall(results: list[dict[str, Any]]) -> list[tuple[float, float, str]]:
    """(geometric mean, worst) of each candidate's time over the row's best, and its label: for candidates that ran on every row."""
    factors: dict[str, list[float]] = {}
    for result in results:
        times = _times(result)
        for label, us in times.items():
            factors.setdefault(label, []).append(us / min(times.values()))
    return sorted((statistics.geometric_mean(f), max(f), label) for label, f in factors.items() if len(f) == len(results))


def _times(result: dict[str, Any]) -> dict[str, float]:
    return {label: found["us"] for label, found in result["candidates"].items() if "us" in found and not found["wrong"]}


def show(results: list[dict[str, Any]], top: int = 8) -> None:
    """The best of each row with the table's own, and the order over all rows."""
    out = console()
    table = Table("row", "us", "x best", "±", "error", "candidate", box=None, pad_edge=False)
    for result in results:
        times = _times(result)
        ranked = sorted(times, key=times.__getitem__)
        title = f"{result['suite']} {result['name']}"
        for label in dict.fromkeys([*ranked[:top], *(label for label in ranked if label == TABLE)]):
            found = result["candidates"][label]
            factor, spread = times[label] / times[ranked[0]], (found["high"] - found["low"]) / found["us"]
            table.add_row(title, f"{times[label]:.1f}", f"{factor:.3f}", f"{spread:.0%}", f"{found['error']:.0e}", label)
            title = ""
        for label, found in result["candidates"].items():
            if label not in times:
                table.add_row(title, "-", "", "", "", f"{label}: {found.get('refused', 'wrong results')}"[:100])
                title = ""
    out.print(table)
    if len(results) > 1:
        out.print("over all rows: mean x best, worst, candidate")
        for mean, worst, label in overall(results)[:top]:
            out.print(f"  {mean:.3f} {worst:.3f} {label}", highlight=False)
