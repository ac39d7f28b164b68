"""The vLLM plug-in: vLLM's TRITON_ATTN and TRITON_MLA become this package's.

vLLM calls `register` in each of its processes, through the entry point group `vllm.general_plugins`. It stores paths and imports nothing: no
torch, no Triton, no GPU.
"""

from __future__ import annotations

import importlib.metadata

from tritonattn.environment import vllm_allow_untested

TESTED = ("0.33.0",)
ALLOW_UNTESTED = "TRITONATTN_VLLM_ALLOW_UNTESTED"
MHA = "tritonattn.integrations.vllm.mha.TritonAttentionBackend"
MLA = "tritonattn.integrations.vllm.mla.TritonMLABackend"
MLA_PREFILL = "tritonattn.integrations.vllm.mla_prefill.PrefillBackend"
MLA_PREFILL_OR_STOCK = "tritonattn.integrations.vllm.mla_prefill.StockElseOurs"


def refusal() -> str | None:
    """Why the installed vLLM is not taken; None where it is."""
    installed = importlib.metadata.version("vllm")
    if installed.split("+")[0] in TESTED or vllm_allow_untested():
        return None
    return (
        f"tritonattn's plug-in is tested with vLLM {', '.join(TESTED)}, not with {installed}, whose attention interface may differ. "
        f"{ALLOW_UNTESTED}=1 takes the risk; VLLM_PLUGINS without 'tritonattn' leaves vLLM its own kernels"
    )


def register() -> None:
    """Put this package's classes in the slots of vLLM's. May be called any number of times.

    Raises RuntimeError on a vLLM that the plug-in was not tested with: vLLM stops there, rather than going on with other kernels.
    """
    reason = refusal()
    if reason is not None:
        raise RuntimeError(reason)
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum, register_mla_prefill_backend
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.TRITON_ATTN, MHA)
    register_backend(AttentionBackendEnum.TRITON_MLA, MLA)
    register_mla_prefill_backend(MLAPrefillBackendEnum.CUSTOM, MLA_PREFILL)
    # On ROCm vLLM only looks for AITER's and this one: without either package no dense MLA model would start.
    register_mla_prefill_backend(MLAPrefillBackendEnum.FLASH_ATTN, MLA_PREFILL_OR_STOCK)
