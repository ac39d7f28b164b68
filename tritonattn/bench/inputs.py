"""Fresh random tensors for a row."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tritonattn.bench.rows import Row
from tritonattn.tuning.arch import detect


@dataclass
class Inputs:
    """Tensors of one row, for bottom-right causal attention."""

    row: Row
    q: Tensor
    scale: float
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    k: Any = None  # dense keys and values: there is no cache
    v: Any = None
    k_cache: Any = None  # in the layout nhd; MLA: with one head
    v_cache: Any = None
    block_table: Any = None
    descales: tuple[float, float] = (1.0, 1.0)

    @property
    def window_size(self) -> tuple[int, int]:
        return (self.row.window - 1, 0) if self.row.window else (-1, -1)

    def empty_out(self) -> Tensor:
        """NaN where nothing has been written."""
        return torch.full((*self.q.shape[:2], self.row.dv), float("nan"), dtype=self.q.dtype, device=self.q.device)

    def keys(self, sequence: int, kv_head: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one sequence and head, [seq_len, D] and [seq_len, Dv], as float64."""
        length = self.row.seq_lens[sequence]
        if self.k_cache is None:
            begin = sum(self.row.seq_lens[:sequence])
            return self.k[begin : begin + length, kv_head].double(), self.v[begin : begin + length, kv_head].double()
        pages = self.block_table[sequence, : -(-length // self.row.block_size)].long()
        k, v = (cache[pages, :, kv_head].flatten(0, 1)[:length].double() for cache in (self.k_cache, self.v_cache))
        return k * self.descales[0], v * self.descales[1]

    def new_tokens(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the query tokens, [T, Hkv, D] and [T, Hkv, Dv]: copies, for they are in the cache too."""
        parts: tuple[list[Tensor], list[Tensor]] = ([], [])
        for i, count in enumerate(self.row.query_lens):
            heads = [self.keys(i, head) for head in range(self.row.kv_heads)]
            for part, kept in enumerate(parts):
                kept.append(torch.stack([pair[part][-count:] for pair in heads], dim=1).to(self.q.dtype))
        return torch.cat(parts[0]), torch.cat(parts[1])


def random_inputs(row: Row, device: torch.device, *, cached: bool) -> Inputs:
    """Normal values in bfloat16; in float32 for the interpreter, whose matrix product does not take bfloat16."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def ints(values) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=device)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    x = Inputs(
        row, normal(sum(row.query_lens), row.heads, row.head_size), row.head_size**-0.5, ints(accumulate(row.query_lens, initial=0)),
        ints(row.seq_lens), max(row.query_lens), max(row.seq_lens),
    )  # fmt: skip
    if not cached:
        x.k, x.v = normal(sum(row.seq_lens), row.kv_heads, row.head_size), normal(sum(row.seq_lens), row.kv_heads, row.dv)
        return x
    pages = [-(-length // row.block_size) for length in row.seq_lens]
    _check_room(row, sum(pages), device)
    free = torch.randperm(sum(pages), device=device).int()  # the pages of a sequence are no neighbours
    x.block_table = torch.zeros(len(pages), max(pages), dtype=torch.int32, device=device)
    for i, begin in enumerate(accumulate(pages[:-1], initial=0)):
        x.block_table[i, : pages[i]] = free[begin : begin + pages[i]]
    x.k_cache = normal(len(free), row.block_size, row.kv_heads, row.head_size)
    x.v_cache = x.k_cache[..., : row.dv] if row.latent else normal(len(free), row.block_size, row.kv_heads, row.dv)
    if row.fp8:
        fp8 = getattr(torch, detect(device).fp8_types[0])
        x.k_cache, x.v_cache, x.descales = x.k_cache.to(fp8), x.v_cache.to(fp8), (0.5, 2.0)
    return x


def _check_room(row: Row, pages: int, device: torch.device) -> None:
    if device.type != "cuda":
        return
    need = pages * row.block_size * row.kv_heads * (row.head_size + row.dv) * 2
    free, _ = torch.cuda.mem_get_info(device)
    if need > 0.8 * free:
        raise ValueError(f"needs {need / 1e9:.0f} GB of cache, {free / 1e9:.0f} GB are free")
