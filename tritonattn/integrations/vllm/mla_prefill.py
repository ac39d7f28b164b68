"""MLA prefill for vLLM's registry: dense attention of keys and values that are projected up already.

Layers of our own TRITON_MLA run prefill themselves (see `mla`); this serves decode backends of others, and a ROCm without AITER and
flash-attn, where vLLM would find no prefill backend and start no dense MLA model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

from tritonattn.mha import flash_attn_varlen_func


class PrefillBackend(MLAPrefillBackend):
    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    def supports_out(self) -> bool:
        return True

    def run_prefill_new_tokens(
        self, q: Tensor, k: Tensor, v: Tensor, return_softmax_lse: bool, out: Tensor | None = None, output_scale: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        if output_scale is not None:
            raise NotImplementedError("fused output quantization is not supported")
        starts, longest = self._prefill_metadata.query_start_loc, int(self._prefill_metadata.max_query_len)
        return self._attend(q, k, v, starts, longest, starts, longest, True, out, return_softmax_lse)

    def run_prefill_context_chunk(self, chunk: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        starts_q, starts_k = chunk.query_start_loc, chunk.cu_seq_lens
        return self._attend(q, k, v, starts_q, int(chunk.max_query_len), starts_k, int(chunk.max_seq_len), False, out, True)

    def _attend(self, q, k, v, starts_q, longest_q, starts_k, longest_k, causal, out, return_lse) -> Any:
        if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise NotImplementedError(f"queries must be 16 or 32 bits wide, got {q.dtype}")
        return flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, max_seqlen_q=longest_q, max_seqlen_k=longest_k,
            softmax_scale=self.scale, causal=causal, out=out, return_lse=return_lse,
        )  # fmt: skip


def __getattr__(name: str) -> type[MLAPrefillBackend]:
    """`StockElseOurs`: vLLM's FLASH_ATTN where a flash-attn is installed, else `PrefillBackend`; asked for when vLLM selects."""
    if name != "StockElseOurs":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from vllm.v1.attention.backends.mla.prefill.flash_attn import FlashAttnPrefillBackend
    except ImportError:
        return PrefillBackend
    return FlashAttnPrefillBackend if FlashAttnPrefillBackend.is_available() else PrefillBackend
