"""One row: build, check, time."""

from __future__ import annotations

import gc
import json
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch

from tritonattn.bench.cases import Case, Peers, build
from tritonattn.bench.rows import Row
from tritonattn.bench.timing import measure, reason
from tritonattn.tuning.arch import assume, detect
from tritonattn.tuning.table import pin, watch

TOLERANCE = 0.02  # relative error over the sample; bfloat16 lands near 2e-3, fp8 caches too, since they are compared as stored

Config = dict[str, Any]


def parse_config(text: str) -> Config:
    """"BLOCK_N=64,form=tile" -> {"BLOCK_N": 64, "form": "tile"}."""
    config: Config = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"--config must be KEY=VALUE,..., got {part!r}")
        try:
            config[key.strip()] = json.loads(value.lower() if value in ("True", "False") else value)
        except ValueError:
            config[key.strip()] = value.strip()
    return config


def run_row(row: Row, device: torch.device, peers: Peers | None, config: Config) -> dict[str, Any]:
    """The JSON of a row: its work, and per call the time and the error or the reason why it did not run."""
    try:
        case = build(row, device, peers)
    except (AttributeError, ImportError, torch.OutOfMemoryError, ValueError) as error:
        return {"suite": row.suite, "name": row.name, "flops": 0.0, "bytes": 0.0, "calls": {"tritonattn": {"refused": reason(error)}}}
    arch, used = watch(detect(device))
    with assume(arch), suppress(Exception):  # what fails here fails again below, where it is recorded
        next(iter(case.calls.values()))()
    if config:
        base = dict(used)[case.kernel].config if case.kernel in dict(used) else {}
        arch = pin(arch, **{case.kernel: {**base, **config}})
    with assume(arch):
        calls = time_case(case, device)
    result = {
        "suite": row.suite, "name": row.name, "flops": case.flops, "bytes": case.bytes, "calls": calls,
        "table rows": {kernel: row.where for kernel, row in used},
    }  # fmt: skip
    del case
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
    return result


def time_case(case: Case, device: torch.device) -> dict[str, dict[str, Any]]:
    """Errors first, then the times of those that ran."""
    found: dict[str, dict[str, Any]] = {}
    for name, call in case.calls.items():
        try:
            error = case.error(call())
        except Exception as problem:  # a peer may raise anything, and the row goes on without it
            found[name] = {"refused": reason(problem)}
        else:
            found[name] = {"error": error, "wrong": not error <= TOLERANCE}
    times, refused = measure({name: call for name, call in case.calls.items() if "error" in found[name]}, device)
    for name, why in refused.items():
        found[name] = {"refused": why}
    for name, timing in times.items():
        found[name] |= asdict(timing)
    return found
