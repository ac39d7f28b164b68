"""Other libraries' kernels on the same inputs.

PyTorch's own attention is always there. `--peers DIR` adds what a folder holds: vLLM's Triton kernels as the package `vllm`, and in
`peers.zip` its FlashAttention-3 and FlashMLA binaries for Hopper GPUs. Every call is made the way vLLM makes it.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import types
import zipfile
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tritonattn.bench.cases import Call
from tritonattn.bench.inputs import Inputs
from tritonattn.plan import power_of_two

BINARIES = {"FA3": "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", "FlashMLA": "vllm/_flashmla_C.abi3.so"}
FA3, VLLM, VLLM_PREFILL, FLASH_MLA, VLLM_MLA, SDPA = "FA3", "TRITON_ATTN", "vLLM Triton prefill", "FlashMLA", "TRITON_MLA", "torch SDPA"


class Installed:
    """The peers found. `missing` says of each absent one why."""

    def __init__(self, folder: str | None):
        self.missing: dict[str, str] = {}
        self._binaries: set[str] = set()
        self._vllm = bool(folder)
        if not folder:
            return
        path = Path(folder).resolve()
        if not (path / "vllm").is_dir():
            raise ValueError(f"--peers must be a folder with a package vllm in it, got {folder}")
        sys.path.insert(0, str(path))
        self._load(path / "peers.zip")

    def _load(self, archive: Path) -> None:
        if torch.version.hip or not torch.cuda.is_available():
            self.missing |= dict.fromkeys(BINARIES, "built for NVIDIA's Hopper")
            return
        with tempfile.TemporaryDirectory() as folder:  # a loaded library needs its file no more
            for name, member in BINARIES.items():
                try:
                    torch.ops.load_library(zipfile.ZipFile(archive).extract(member, folder))
                    self._binaries.add(name)
                except (OSError, RuntimeError, KeyError) as error:
                    self.missing[name] = str(error).splitlines()[0]
        # FlashMLA's Python side imports its extension module, whose operators are registered by now.
        vllm: Any = importlib.import_module("vllm")
        vllm._flashmla_C = sys.modules["vllm._flashmla_C"] = types.ModuleType("vllm._flashmla_C")

    def calls(self, x: Inputs) -> dict[str, Call]:
        row = x.row
        found: dict[str, Call] = {}
        if row.fp8 or row.suite == "cliffs":
            return {}
        if row.latent:
            if row.query_len == 1:
                if FLASH_MLA in self._binaries:
                    found[FLASH_MLA] = _flash_mla(x)
                if self._vllm:
                    found[VLLM_MLA] = _triton_mla(x)
            return found
        if FA3 in self._binaries:
            found[FA3] = _fa3(x)
        if self._vllm and row.dv == row.head_size:  # its kernels write out of bounds otherwise
            if row.suite != "prefill":
                found[VLLM] = _triton_attn(x)
            else:
                found[VLLM_PREFILL] = _vllm_prefill(x)
                if not any(length % row.block_size for length in row.seq_lens):
                    found[VLLM] = _triton_attn(_paged(x))
        if row.suite == "prefill" and len(set(row.seq_lens)) == 1:
            found[SDPA] = _sdpa(x)
        return found

    def merge(self, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> dict[str, Call]:
        if not self._vllm:
            return {}
        merge = importlib.import_module("vllm.v1.attention.ops.triton_merge_attn_states").merge_attn_states
        out, lse = torch.empty_like(out_a), torch.empty_like(lse_a)

        def call():
            merge(out, out_a, lse_a, out_b, lse_b, lse)
            return out

        return {VLLM: call}


def _paged(x: Inputs) -> Inputs:
    """Dense keys and values as pages: sequences of whole pages, one after the other."""
    size = x.row.block_size
    pages = [length // size for length in x.row.seq_lens]
    table = torch.zeros(len(pages), max(pages), dtype=torch.int32)
    for i, end in enumerate(accumulate(pages)):
        table[i, : pages[i]] = torch.arange(end - pages[i], end)
    return replace(x, k_cache=x.k.unflatten(0, (-1, size)), v_cache=x.v.unflatten(0, (-1, size)), block_table=table.to(x.q.device))


def _fa3(x: Inputs) -> Call:
    k, v = (x.k, x.v) if x.k_cache is None else (x.k_cache, x.v_cache)
    cu_k, used = (x.cu_seqlens_q, None) if x.k_cache is None else (None, x.seq_lens)
    left = x.window_size[0]
    nothing = (None,) * 8

    def call():
        return torch.ops._vllm_fa3_C.fwd(
            x.q, k, v, None, None, None, None, x.cu_seqlens_q, cu_k, None, None, used, x.max_seqlen_q, x.max_seqlen_k, x.block_table,
            *nothing, x.scale, True, left, 0 if left >= 0 else -1, 0.0, True, None, 0, None, 0, None, 1, 0, None,
        )[0]  # fmt: skip

    return call


def _vllm_prefill(x: Inputs) -> Call:
    attend = importlib.import_module("vllm.v1.attention.ops.triton_prefill_attention").context_attention_fwd
    out, starts = x.empty_out(), x.cu_seqlens_q[:-1]

    def call():
        attend(x.q, x.k, x.v, out, starts, x.seq_lens, x.max_seqlen_q, True, x.scale, x.row.window, x.row.window)
        return out

    return call


def _sdpa(x: Inputs) -> Call:
    q, k, v = (t.unflatten(0, (x.row.batch, -1)).transpose(1, 2) for t in (x.q, x.k, x.v))

    grouped = x.row.heads > x.row.kv_heads

    def call():
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=x.scale, enable_gqa=grouped)
        return out.transpose(1, 2).flatten(0, 1)

    return call


def _triton_attn(x: Inputs) -> Call:
    """16 segments per sequence, and below 128 // Hkv sequences a split over them."""
    unified = importlib.import_module("vllm.v1.attention.ops.triton_unified_attention").unified_attention
    out, device = x.empty_out(), x.q.device
    rows = min(x.q.shape[0], 2048)  # where there are fewer than query tokens, it does not split
    parts = torch.empty(rows, x.row.heads, 16, power_of_two(x.row.dv), device=device)
    peak, total = torch.empty(rows, x.row.heads, 16, device=device), torch.empty(rows, x.row.heads, 16, device=device)

    def call():
        unified(
            x.q, x.k_cache, x.v_cache, out, x.cu_seqlens_q, x.max_seqlen_q, x.seq_lens, x.max_seqlen_k, x.scale, True, x.window_size,
            x.block_table, 0.0, None, None, None, 128 // x.row.kv_heads, 16, parts, peak, total,
        )  # fmt: skip
        return out

    return call


def _triton_mla(x: Inputs) -> Call:
    attend = importlib.import_module("vllm.v1.attention.ops.triton_decode_attention").decode_attention_fwd
    units = torch.cuda.get_device_properties(x.q.device).multi_processor_count if x.q.is_cuda else 1
    splits = min(power_of_two(max(1, x.max_seqlen_k // 512)), 2 * units)
    out, lse = x.empty_out(), torch.empty(*x.q.shape[:2], device=x.q.device)
    scratch = torch.empty(*x.q.shape[:2], splits, x.row.dv + 1, device=x.q.device)

    def call():
        attend(
            x.q, x.k_cache, x.v_cache, out, lse, x.block_table, x.seq_lens, scratch, splits, x.scale, x.row.block_size, is_mla=True,
        )  # fmt: skip
        return out

    return call


def _flash_mla(x: Inputs) -> Call:
    interface = importlib.import_module("vllm.third_party.flashmla.flash_mla_interface")
    meta = interface.FlashMLASchedMeta()

    def call():
        return interface.flash_mla_with_kvcache(
            x.q[:, None], x.k_cache, x.block_table, x.seq_lens, x.row.dv, meta, softmax_scale=x.scale, causal=False
        )[0][:, 0]

    return call
