"""The environment variables of this package: what each may be, and what it says. All are optional; an empty one counts as none.

A module asks for its own when it needs it; a command has all of them looked at before it begins (`check`).
"""

from __future__ import annotations

import os
from pathlib import Path

SIMULATED = ("gfx942", "gfx950")
LOG_MODES = ("call", "dump")
VLLM_KV_LAYOUTS = ("auto", "packed", "preshuffled")


def _one_of(name: str, *choices: str) -> str:
    value = os.environ.get(name, "")
    if value and value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
    return value


def simulated_arch() -> str:
    """TRITONATTN_SIM: the GPU that every kernel of the process is simulated on."""
    arch = _one_of("TRITONATTN_SIM", *SIMULATED)
    if arch and os.environ.get("TRITON_INTERPRET") == "1":
        raise ValueError(f"TRITONATTN_SIM must not be set beside TRITON_INTERPRET=1, which runs no machine code to simulate, got {arch!r}")
    return arch


def simulator_threads() -> int:
    """TRITONATTN_SIM_THREADS: workgroups that are simulated at a time; one a core."""
    text = os.environ.get("TRITONATTN_SIM_THREADS") or str(os.cpu_count() or 1)
    if not text.isdecimal() or not int(text):
        raise ValueError(f"TRITONATTN_SIM_THREADS must be an integer of at least 1, got {text!r}")
    return int(text)


def arch() -> str:
    """TRITONATTN_ARCH: the arch that every device is taken for."""
    name = os.environ.get("TRITONATTN_ARCH", "")
    if name:
        from tritonattn.tuning.arch import by_name

        by_name(name, "TRITONATTN_ARCH")
    return name


def log_modes() -> frozenset[str]:
    """TRITONATTN_LOG: see `log`."""
    text = os.environ.get("TRITONATTN_LOG", "")
    modes = frozenset(filter(None, text.split(",")))
    if not modes <= set(LOG_MODES):
        raise ValueError(f"TRITONATTN_LOG must be {', '.join(LOG_MODES)} or {','.join(LOG_MODES)}, got {text!r}")
    return modes


def tables() -> Path | None:
    """TRITONATTN_TABLES: a folder of tables that is looked in before the library's."""
    text = os.environ.get("TRITONATTN_TABLES", "")
    if text and not Path(text).is_dir():
        raise ValueError(f"TRITONATTN_TABLES must be a folder that is there, got {text!r}")
    return Path(text) if text else None


def vllm_kv_layout() -> str:
    """TRITONATTN_VLLM_KV_LAYOUT: see `integrations.vllm.layout`."""
    return _one_of("TRITONATTN_VLLM_KV_LAYOUT", *VLLM_KV_LAYOUTS) or "auto"


def vllm_allow_untested() -> bool:
    """TRITONATTN_VLLM_ALLOW_UNTESTED: take another version of vLLM than those that were tested."""
    return _one_of("TRITONATTN_VLLM_ALLOW_UNTESTED", "0", "1") == "1"


def check() -> None:
    """ValueError with all that is wrong in these variables, whether or not this process needs them."""
    reasons = []
    for read in (simulated_arch, simulator_threads, arch, log_modes, tables, vllm_kv_layout, vllm_allow_untested):
        try:
            read()
        except ValueError as error:
            reasons.append(str(error))
    if reasons:
        raise ValueError("; ".join(reasons))
