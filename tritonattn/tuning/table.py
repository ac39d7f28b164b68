"""Tuning tables: which tile sizes and compile options a kernel takes for a problem on an arch.

A table is `autotune_configs/<arch>/<kernel>.json`: rows tried in order, the first whose `when` holds wins, and the last one
holds always. `schema.json` says what may stand in it; every number that tunes anything is there and not in Python.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

from tritonattn import environment

from . import schema
from .arch import Arch, warn_untuned
from .tables_dir import tables_dir

# Compile options of Triton among the config keys. The others in lower case steer the plan, those in capitals are constexprs.
_OPTIONS = ("num_warps", "num_stages", "waves_per_eu", "matrix_instr_nonkdim", "kpack", "maxnreg", "llvm_fn_attrs")


class TableError(ValueError):
    """A table that cannot be used: its file, and all that is wrong in it."""


@dataclass(frozen=True, eq=False)
class Row:
    """One row of a table, as found."""

    when: Mapping[str, Any]
    config: Mapping[str, Any]
    provenance: Mapping[str, Any]
    where: str  # "gfx942/decode.json row 3", rows counted from 0
    accepts: Mapping[str, Any] | None = None  # which rules of `check` it may break, how far, and why

    @cached_property
    def constexprs(self) -> Mapping[str, Any]:
        """The config keys in capitals: BLOCK_M, ..."""
        return MappingProxyType({k: v for k, v in self.config.items() if k.isupper()})

    @cached_property
    def options(self) -> Mapping[str, Any]:
        """Triton's compile options: num_warps, ..., without those that this Triton does not have."""
        lacking = _lacking_options()
        options = {k: v for k, v in self.config.items() if k in _OPTIONS and k not in lacking}
        # Scores are scaled inside the one FMA that feeds exp2; Triton 3.10 fuses only when asked.
        return MappingProxyType({"enable_fp_fusion": True, **options})

    def matches(self, key: Mapping[str, Any]) -> bool:
        return all(_holds(condition, key, name, self.where) for name, condition in self.when.items())


def _holds(condition, key, name, where) -> bool:
    if name not in key:
        raise TableError(f"{where} depends on {name!r}, which the caller does not give (given: {', '.join(sorted(key))})")
    value = key[name]
    if isinstance(condition, dict):
        return condition.get("min", -math.inf) <= value <= condition.get("max", math.inf)
    return value in condition if isinstance(condition, list) else value == condition


@lru_cache(maxsize=8192)
def lookup(kernel: str, arch: Arch, **key) -> Row:
    """The first row of the kernel's table that holds for a problem.

    kernel: "prefill", "decode", "decode_unaligned", "mla_decode", "mla_decode_unaligned", "combine", "cut", "cache_write", "gather" or "merge".
    key:    what rows may ask for, by the names under `when` in schema.json; hashable values. `compute_units` is added.

    An arch without tables takes those of its nearest kin and warns once. TableError (a ValueError) names a file that is
    missing, cut short or not by the schema, the same on every call. A repeated call is one dictionary access.
    """
    known = schema.tables()["$defs"]["when"]["properties"]
    wrong = [f"{name!r} is not a lookup key (known: {', '.join(known)})" for name in key if name not in known]
    if wrong:
        raise TypeError("; ".join(wrong))
    key["compute_units"] = arch.compute_units
    pinned = _pinned.get(arch, {}).get(kernel)
    row = pinned or next(row for row in rows(kernel, arch) if row.matches(key))
    if arch in _watched:
        _watched[arch].append((kernel, row))
    return row


_pinned: WeakKeyDictionary[Arch, Mapping[str, Row]] = WeakKeyDictionary()


def pin(arch: Arch, **configs: Mapping[str, Any]) -> Arch:
    """A copy of `arch` for which `lookup` of each kernel named answers with the config given: how a candidate is tried.

    pin(arch, decode={"BLOCK_N": 64, ...}), then `with assume(...)`: every cache on the way is keyed by the arch object.
    """
    copy = replace(arch)
    provenance = {"kind": "default", "note": "a candidate"}
    _pinned[copy] = {kernel: Row({}, config, provenance, f"candidate for {arch.name}/{kernel}") for kernel, config in configs.items()}
    return copy


def candidate(arch: Arch, kernel: str, config: Mapping[str, Any]) -> Arch:
    """`pin` of one kernel by itself: no batch is cut on the device before it (`paths.cut`), since those that it is tried on have one length."""
    uncut = {**rows("cut", arch)[-1].config, "cut_keys": 1 << 31}
    return pin(arch, **{"cut": uncut, kernel: config})


@cache
def _lacking_options() -> tuple[str, ...]:
    """Options that older Triton lacks; the code it makes is judged without them."""
    try:
        from triton.backends.amd.compiler import HIPOptions
    except ImportError:
        return ()
    return tuple(name for name in ("llvm_fn_attrs",) if name not in HIPOptions.__dataclass_fields__)


_watched: WeakKeyDictionary[Arch, list[tuple[str, Row]]] = WeakKeyDictionary()


def watch(arch: Arch) -> tuple[Arch, list[tuple[str, Row]]]:
    """A copy of `arch`, and the list of (kernel, row) that will be looked up for it."""
    copy = replace(arch)
    _pinned[copy] = _pinned.get(arch, {})
    return copy, _watched.setdefault(copy, [])


def rows(kernel: str, arch: Arch) -> tuple[Row, ...]:
    """All rows of a kernel's table, of the arch itself or, with one warning, of its nearest kin."""
    for folder in dict.fromkeys((arch.name, arch.table)):
        for root in folders():
            path = root / folder / f"{kernel}.json"
            if path.is_file():
                if folder != arch.name:
                    warn_untuned(arch, folder)
                return load(path)
    tried = ", ".join(str(root / arch.table) for root in folders())
    raise TableError(f"no table for kernel {kernel!r} on {arch.name}; looked for {kernel}.json in: {tried}")


def folders() -> tuple[Path, ...]:
    """Where tables are looked for: $TRITONATTN_TABLES if set, then those that came with the library."""
    own = environment.tables()
    return (*([own] if own else []), tables_dir())


@cache
def load(path: Path) -> tuple[Row, ...]:
    """Read and check one table file. TableError lists every fault."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TableError(f"{path}: not readable as JSON: {error}") from None
    faults = schema.errors(table)
    if not faults:
        if table["kernel"] != path.stem or table["arch"] != path.parent.name:
            faults.append(f"is for {table['arch']}/{table['kernel']}, by its own words")
        if table["rows"][-1]["when"]:
            faults.append('the last row must hold always ("when": {})')
    if faults:
        raise TableError(f"{path}: " + "; ".join(faults))
    name = f"{path.parent.name}/{path.name}"
    return tuple(
        Row(row["when"], MappingProxyType(row["config"]), MappingProxyType(row["provenance"]), f"{name} row {i}", row.get("accepts"))
        for i, row in enumerate(table["rows"])
    )


def forget() -> None:
    """Drop what was read, so that changed files and variables are seen (for `tune` and tests)."""
    lookup.cache_clear()
    load.cache_clear()
