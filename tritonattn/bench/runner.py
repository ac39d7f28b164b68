"""One row: build, check, time; as it is, or with values of its tuning row replaced."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import cycle
from typing import Any

import torch

from tritonattn.bench.cases import Call, Case, Peers, build
from tritonattn.bench.rows import Row
from tritonattn.bench.timing import measure, reason
from tritonattn.tuning import schema
from tritonattn.tuning.arch import Arch, assume, detect
from tritonattn.tuning.table import Row as TableRow
from tritonattn.tuning.table import pin, watch

MAX_COPIES = 64
TOLERANCE = 0.02  # relative error over the sample; bfloat16 lands near 2e-3, and fp8 is compared with what is stored

Config = dict[str, Any]


def parse_config(text: str) -> Config:
    """From "BLOCK_N=64,form=tile,combine.BLOCK_S=8" the mapping that it says."""
    config: Config = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"--config must be KEY=VALUE,..., got {part!r}")
        try:
            config[key.strip()] = json.loads(value.lower() if value in ("True", "False") else value)
        except ValueError:
            config[key.strip()] = value.strip()
    check_config(config, "--config")
    return config


def check_config(config: Config, name: str) -> None:
    """ValueError for a key or a value that no table row may have."""
    found = schema.errors({key.rpartition(".")[2]: value for key, value in config.items()}, schema.tables()["$defs"]["config"])
    if found:
        raise ValueError(f"{name}: {'; '.join(found)}")


def table_rows(call: Call, arch: Arch) -> dict[str, TableRow]:
    """The row of each kernel that the call looks up; nothing from where it fails on."""
    watched, seen = watch(arch)
    with assume(watched), suppress(Exception):  # what fails here fails again where it is recorded
        call()
    return dict(seen)


def pinned(arch: Arch, config: Config, kernel: str, used: dict[str, TableRow]) -> Arch:
    """An arch on which `config` is laid over the table rows in use. Keys are those of `kernel`, or KERNEL.KEY."""
    changes: dict[str, Config] = {}
    for key, value in config.items():
        of, _, name = key.rpartition(".")
        changes.setdefault(of or kernel, {})[name] = value
    return pin(arch, **{of: {**(used[of].config if of in used else {}), **change} for of, change in changes.items()})


def run_row(
    row: Row, device: torch.device, peers: Peers | None, config: Config, only: str = "", cold: bool = False
) -> dict[str, Any]:
    """The JSON of a row: its work, and per call the time and the error, or the reason why it did not run.

    cold: the calls go round several sets of inputs, more than the caches hold.
    """
    head: dict[str, Any] = {"suite": row.suite, "name": row.name}
    try:
        case = build(row, device, peers, only)
        others = [build(row, device, peers, only) for _ in range(_copies(case, device) - 1)] if cold else []
    except (AttributeError, ImportError, torch.OutOfMemoryError, ValueError, TypeError) as error:
        return {**head, "flops": 0.0, "bytes": 0.0, "calls": {"tritonattn": {"refused": reason(error)}}}
    arch = detect(device)
    used = table_rows(next(iter(case.calls.values())), arch)
    with assume(pinned(arch, config, case.kernel, used)):
        calls = time_case(case, device, others)
    where = {kernel: found.where for kernel, found in used.items()}
    result = {**head, "flops": case.flops, "bytes": case.bytes, "table rows": where, "calls": calls}
    del case, others
    release(device)
    return result


def _copies(case: Case, device: torch.device) -> int:
    """Sets of inputs that together overflow the caches by half."""
    arch = detect(device)
    return min(max(math.ceil(1.5 * max(arch.l2_bytes, arch.last_level_bytes) / max(case.bytes, 1)), 1), MAX_COPIES)


def _in_turn(calls: list[Call]) -> Call:
    if len(calls) == 1:
        return calls[0]
    turn = cycle(calls)
    return lambda: next(turn)()


def release(device: torch.device) -> None:
    """Give the memory of a finished row back, graphs' private pools among it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def time_case(case: Case, device: torch.device, others: Sequence[Case] = (), hopeless: float = math.inf) -> dict[str, dict[str, Any]]:
    """Errors first, then the times of the calls that ran; `others` are the same case on further inputs, to go round."""
    found: dict[str, dict[str, Any]] = {}
    for name, call in case.calls.items():
        try:
            error = case.error(call())
        except Exception as problem:  # a peer may raise anything, and the row goes on without it
            found[name] = {"refused": reason(problem)}
        else:
            found[name] = {"error": error, "wrong": not error <= TOLERANCE}
    runs = {name: _in_turn([c.calls[name] for c in (case, *others)]) for name in case.calls if "error" in found[name]}
    times, refused = measure(runs, device, host=case.host, hopeless=hopeless)
    for name, why in refused.items():
        found[name] = {"refused": why}
    for name, timing in times.items():
        found[name] |= asdict(timing)
    return found
