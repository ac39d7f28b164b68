"""Instructions per unit of work beside those of other Triton kernels, compiled by the same Triton through their own launchers.

The folder holds vLLM's pure-Triton attention kernels as the package `vllm`. Their launchers are told that this is ROCm, which is what
they would find there.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from . import check, codegen
from .arch import Arch
from .cases import Case
from .models import MODELS


@dataclass(frozen=True)
class Comparison:
    """Wave-instructions of the hot loop per unit of work, ours and a peer's, with what each spills (vector registers)."""

    name: str
    unit: str
    ours: float
    ours_spills: int
    peer: str
    theirs: float
    theirs_spills: int

    @property
    def ratio(self) -> float:
        return self.theirs / self.ours


def compare(folder: str, arch: Arch) -> Iterator[Comparison]:
    """Decode at 16 query rows per KV head, prefill, and MLA decode of 16 heads, all bf16. ValueError if the folder holds no peers."""
    path = Path(folder).resolve()
    if not (path / "vllm").is_dir():
        raise ValueError(f"--peers must be a folder with a package vllm in it, got {folder}")
    sys.path.insert(0, str(path))
    platforms: Any = importlib.import_module("vllm.platforms")
    platforms.current_platform.is_rocm = lambda: True
    qwen, deepseek = MODELS["qwen3-235b"], MODELS["deepseek-r1"]
    sixteen = replace(deepseek, num_heads=16, num_kv_heads=16)
    decode = Case("decode", qwen, layout="nhd", batch=1)
    rows = [
        (decode, "plain cache", _attn(1, 4096), "TRITON_ATTN"),
        (replace(decode, layout="preshuffled"), "preshuffled cache", _attn(1, 4096), "TRITON_ATTN"),
        (Case("prefill", qwen, batch=1, query_len=1024, kv_len=1024), "", _attn(1024, 1024), "TRITON_ATTN"),
        (Case("mla_decode", sixteen, layout="latent", block_size=64, batch=1), "16 heads", _mla, "TRITON_MLA"),
    ]
    for case, what, call, peer in rows:
        (verdict, *_) = check.judge_case(arch, case)
        if verdict.work is None:
            continue
        theirs, spills = _work(case.kernel, call, arch)
        name = f"{case.kernel} {what}".strip()
        yield Comparison(name, verdict.work[1], verdict.work[0], verdict.report.spills, peer, theirs, spills)


def _work(kernel: str, call: Callable[[], Any], arch: Arch) -> tuple[float, int]:
    with codegen.capture(arch) as launches:
        call()
    hot = [(launch, report, report.main) for launch in launches if (report := codegen.read(launch)).main]
    launch, report, loop = max(hot, key=lambda found: found[2].matrix if found[2] else 0)
    tile = launch.constexprs
    assert loop is not None  # the filter above
    keys = tile.get("TILE_SIZE", tile.get("BLOCK_N"))
    rows = {"decode": 1, "prefill": tile.get("BLOCK_M"), "mla_decode": tile.get("BLOCK_H")}[kernel]
    return loop.instructions * report.num_warps / (keys * rows), report.spills


def _attn(query_len: int, kv_len: int) -> Callable[[], Any]:
    """vLLM's TRITON_ATTN as its backend calls it: 64 query and 4 KV heads of 128, blocks of 16."""

    def call() -> None:
        unified = importlib.import_module("vllm.v1.attention.ops.triton_unified_attention").unified_attention
        heads, kv_heads, size = 64, 4, 128
        q = torch.empty(query_len, heads, size, dtype=torch.bfloat16)
        k, v = (torch.empty(4, 16, kv_heads, size, dtype=torch.bfloat16) for _ in range(2))
        bounds = torch.tensor([0, query_len], dtype=torch.int32)
        lengths, table = torch.tensor([kv_len], dtype=torch.int32), torch.zeros(1, kv_len // 16, dtype=torch.int32)
        parts = torch.empty(query_len, heads, 16, size)
        peak, total = torch.empty(query_len, heads, 16), torch.empty(query_len, heads, 16)
        unified(
            q, k, v, torch.empty_like(q), bounds, query_len, lengths, kv_len, size**-0.5, True, (-1, -1), table, 0.0, None, None, None,
            128 // kv_heads, 16, parts, peak, total,
        )  # fmt: skip

    return call


def _mla() -> None:
    """vLLM's TRITON_MLA decode, 16 heads, pages of 64."""
    attend = importlib.import_module("vllm.v1.attention.ops.triton_decode_attention").decode_attention_fwd
    q = torch.empty(1, 16, 576, dtype=torch.bfloat16)
    cache = torch.empty(4, 64, 1, 576, dtype=torch.bfloat16)
    lengths, table = torch.tensor([4096], dtype=torch.int32), torch.zeros(1, 64, dtype=torch.int32)
    out, lse = torch.empty(1, 16, 512, dtype=torch.bfloat16), torch.empty(1, 16)
    attend(q, cache, cache[..., :512], out, lse, table, lengths, torch.empty(1, 16, 8, 513), 8, 192**-0.5, 64, is_mla=True)


def show(found: dict[str, list[Comparison]]) -> None:
    """One table per arch."""
    from rich.table import Table

    from tritonattn.console import console

    for name, comparisons in found.items():
        grid = Table(title=f"{name}: wave-instructions of the hot loop per unit of work", title_justify="left")
        for column in ("kernel", "per", "ours", "spills", "peer", "theirs", "spills", "theirs / ours"):
            grid.add_column(column, justify="left" if column in ("kernel", "per", "peer") else "right")
        for c in comparisons:
            numbers = (f"{c.ours:.3g}", str(c.ours_spills), c.peer, f"{c.theirs:.3g}", str(c.theirs_spills), f"{c.ratio:.1f}")
            grid.add_row(c.name, c.unit, *numbers)
        console().print(grid)
