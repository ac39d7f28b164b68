"""Which classes vLLM will use, and why: for `tritonattn info`, because vLLM itself only logs a plug-in that fails to load."""

from __future__ import annotations

import importlib.metadata
import os

from tritonattn.integrations.vllm import MHA, MLA, refusal

SLOTS = {"TRITON_ATTN": MHA, "TRITON_MLA": MLA}
GROUP, NAME = "vllm.general_plugins", "tritonattn"


def obstacle() -> str | None:
    """Why vLLM will not load the plug-in; None where it will. Nothing of vLLM is imported."""
    if not any(point.name == NAME for point in importlib.metadata.entry_points(group=GROUP)):
        return f"no entry point {NAME!r} in {GROUP}: tritonattn is not installed in this environment"
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and NAME not in allowed.split(","):
        return f"VLLM_PLUGINS={allowed} leaves it out"
    return refusal()


def resolve() -> dict[str, str]:
    """Slot to class, as vLLM resolves it after loading its plug-ins. Imports vLLM."""
    from vllm.plugins import load_general_plugins
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    load_general_plugins()
    classes = {slot: AttentionBackendEnum[slot].get_class() for slot in SLOTS}
    return {slot: f"{cls.__module__}.{cls.__qualname__}" for slot, cls in classes.items()}


def describe(notes: list[str], load: bool) -> dict[str, object]:
    """The facts for `info`; `load` has vLLM resolve its slots. Empty without vLLM."""
    if not any(importlib.metadata.distributions(name="vllm")):
        return {}
    version, reason = importlib.metadata.version("vllm"), obstacle()
    if reason is None and not load:
        lines = [f"{slot}: {path}, by the entry point {NAME} in {GROUP}" for slot, path in SLOTS.items()]
    elif reason is None:
        lines = []
        for slot, path in resolve().items():
            lines.append(f"{slot}: {path}, seen")
            if path != SLOTS[slot]:
                notes.append(f"vLLM resolves {slot} to {path}: another plug-in took the slot")
    else:
        lines = [f"{slot}: vLLM's own; {reason}" for slot in SLOTS]
        notes.append(f"vLLM {version} will use its own attention kernels: {reason}")
    return {"vllm": version, "vllm attention": lines}
