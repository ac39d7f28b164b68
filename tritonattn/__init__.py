"""Attention kernels for LLM serving on AMD Instinct, in Triton alone.

The ops, the cache layouts and the router are attributes of this package, loaded when first used; importing it touches no device.
"""

import os
from contextlib import suppress
from importlib import import_module

from tritonattn.environment import simulated_arch

_HOME = {
    "flash_attn_varlen_func": "torch_ops", "extend_attention": "torch_ops", "decode_attention": "torch_ops",
    "merge_attn_states": "torch_ops", "reshape_and_cache": "torch_ops", "gather_cache": "mha",
    "mla_decode": "torch_ops", "mla_cache_write": "torch_ops", "mla_extend": "mla", "mla_gather_cache": "mla",
    "cp_decode_attention": "context_parallel", "cp_mla_decode": "context_parallel",
    "MlaRouter": "mla_router", "Router": "router", "reorder_batch": "batch", "classify": "batch",
}  # fmt: skip
_MODULES = ("layouts", "reference")

__all__ = [*_HOME, *_MODULES]


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module 'tritonattn' has no attribute {name!r}")
    simulated_arch()  # refused here, not by the import below: a command says it in one line
    if name in _HOME:
        value = getattr(import_module(f"tritonattn.{_HOME[name]}"), name)
        if os.environ.get("TRITONATTN_LOG") and callable(value) and not isinstance(value, type):
            value = import_module("tritonattn.log").traced(value)
    else:
        value = import_module(f"tritonattn.{name}")
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *__all__})


_simulated = ""
with suppress(ValueError):
    _simulated = simulated_arch()
if _simulated:  # every kernel of this process runs there
    import_module("tritonattn.simulator").use(_simulated)
