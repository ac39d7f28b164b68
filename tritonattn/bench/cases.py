"""Inputs of a row, the calls that compete on them, and the work that each of them does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

import tritonattn
from tritonattn.bench.rows import Row
from tritonattn.bench.sample import sample_error
from tritonattn.layouts import from_nhd
from tritonattn.tuning.arch import detect

Call = Callable[[], object]


@dataclass
class Case:
    """What is timed for one row. The first call is the one that the others are compared with."""

    calls: dict[str, Call]
    flops: float
    bytes: float
    error: Callable[[object], float]  # of what a call returned
    kernel: str  # whose table row `--config` and `--sweep` replace


class Peers(Protocol):
    """`calls(suite, inputs)`: other libraries' calls on the same inputs."""

    def calls(self, suite: str, x: Inputs) -> dict[str, Call]: ...


@dataclass
class Inputs:
    """Tensors of one row; caches in the layout nhd (MLA: latent)."""

    row: Row
    q: Tensor
    scale: float
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    k: Tensor | None = None  # new tokens
    v: Tensor | None = None
    k_cache: Tensor | None = None
    v_cache: Tensor | None = None
    block_table: Tensor | None = None
    descales: tuple[float, float] = (1.0, 1.0)
    query_lens: tuple[int, ...] = field(default=())

    @property
    def window_size(self) -> tuple[int, int]:
        return (self.row.window - 1, 0) if self.row.window else (-1, -1)

    def empty_out(self) -> Tensor:
        return torch.full((*self.q.shape[:2], self.row.dv), float("nan"), dtype=self.q.dtype, device=self.q.device)

    def keys(self, sequence: int, kv_head: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one sequence and head, [seq_len, D] and [seq_len, Dv], as float64."""
        length = self.row.seq_lens[sequence]
        if self.k_cache is None or self.v_cache is None or self.block_table is None:
            begin = sum(self.row.seq_lens[:sequence])
            return tuple(x[begin : begin + length, kv_head].double() for x in (self.k, self.v))
        pages = self.block_table[sequence, : -(-length // self.row.block_size)].long()
        return tuple(
            cache[pages, :, kv_head].flatten(0, 1)[:length].double() * descale
            for cache, descale in zip((self.k_cache, self.v_cache), self.descales, strict=True)
        )


def build(row: Row, device: torch.device, peers: Peers | None) -> Case:
    """Fresh random inputs and every call that can run on them."""
    return _BUILDERS[row.suite](row, device, peers)


def work(row: Row) -> tuple[float, float]:
    """(FLOP, bytes) that the row cannot do without: visible scores alone, and each input and output once; for decode keys and values."""
    pairs = 0.0
    for length in row.seq_lens:
        seen = row.query_len * (length - row.query_len / 2) if row.query_len > 1 else float(length)
        pairs += min(seen, row.query_len * row.window) if row.window else seen
    flops = 2 * pairs * row.heads * (row.head_size + row.dv)
    width = row.head_size if row.suite == "mla" else row.head_size + row.dv
    keys = sum(min(length, row.window + row.query_len) if row.window else length for length in row.seq_lens)
    moved = keys * row.kv_heads * width * (1 if row.fp8 else 2)
    if row.suite in ("prefill", "extend"):
        moved += row.batch * row.query_len * row.heads * (row.head_size + row.dv) * 2
    return flops, moved


def random_inputs(row: Row, device: torch.device, *, cached: bool) -> Inputs:
    query_lens = row.seq_lens if row.suite == "prefill" else (row.query_len,) * len(row.seq_lens)
    tokens, keys = sum(query_lens), sum(row.seq_lens)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # the interpreter's dot takes no bfloat16

    def ints(values):
        return torch.tensor(list(values), dtype=torch.int32, device=device)

    def normal(*shape):
        return torch.randn(shape, dtype=dtype, device=device)

    x = Inputs(
        row, normal(tokens, row.heads, row.head_size), row.head_size**-0.5, ints(accumulate(query_lens, initial=0)), ints(row.seq_lens),
        max(query_lens), max(row.seq_lens), query_lens=query_lens,
    )  # fmt: skip
    if not cached:
        x.k, x.v = normal(keys, row.kv_heads, row.head_size), normal(keys, row.kv_heads, row.dv)
        return x
    pages = [-(-length // row.block_size) for length in row.seq_lens]
    free = torch.randperm(sum(pages), device=device).int()  # nobody's pages are neighbours
    x.block_table = torch.zeros(len(pages), max(pages), dtype=torch.int32, device=device)
    for i, begin in enumerate(accumulate(pages[:-1], initial=0)):
        x.block_table[i, : pages[i]] = free[begin : begin + pages[i]]
    x.k_cache = normal(len(free), row.block_size, row.kv_heads, row.head_size)
    x.v_cache = x.k_cache[..., : row.dv] if row.suite == "mla" else normal(len(free), row.block_size, row.kv_heads, row.dv)
    if row.fp8:
        fp8 = getattr(torch, detect(device).fp8_types[0])
        x.k_cache, x.v_cache, x.descales = x.k_cache.to(fp8), x.v_cache.to(fp8), (0.5, 2.0)
    return x


def _prefill(row: Row, device: torch.device, peers: Peers | None) -> Case:
    x = random_inputs(row, device, cached=False)
    out = x.empty_out()

    def ours():
        return tritonattn.flash_attn_varlen_func(
            x.q, x.k, x.v, cu_seqlens_q=x.cu_seqlens_q, cu_seqlens_k=x.cu_seqlens_q, max_seqlen_q=x.max_seqlen_q,
            max_seqlen_k=x.max_seqlen_k, causal=True, softmax_scale=x.scale, window_size=x.window_size, out=out,
        )  # fmt: skip

    return _case(x, {"tritonattn": ours}, peers, "prefill")


def _extend(row: Row, device: torch.device, peers: Peers | None) -> Case:
    x = random_inputs(row, device, cached=True)
    context_lens = x.seq_lens - row.query_len
    new = [x.keys(i, h) for i in range(row.batch) for h in range(row.kv_heads)]
    # The new tokens are in the cache as well, where the peers read them.
    k, v = (
        torch.stack([pair[part][-row.query_len :] for pair in new]).view(row.batch, row.kv_heads, row.query_len, -1)
        .transpose(1, 2).flatten(0, 1).to(x.q.dtype).contiguous() for part in (0, 1)
    )  # fmt: skip
    del new

    def ours(layout):
        k_cache, v_cache = from_nhd(x.k_cache, x.v_cache, layout)
        out = x.empty_out()

        def call():
            return tritonattn.extend_attention(
                x.q, k, v, k_cache, v_cache, cu_seqlens_q=x.cu_seqlens_q, context_lens=context_lens, block_table=x.block_table,
                max_seqlen_q=x.max_seqlen_q, max_context_len=x.max_seqlen_k - row.query_len, kv_layout=layout, softmax_scale=x.scale,
                window_size=x.window_size, out=out,
            )  # fmt: skip

        return call

    return _case(x, {"tritonattn nhd": ours("nhd"), "tritonattn preshuffled": ours("preshuffled")}, peers, "prefill")


def _decode(row: Row, device: torch.device, peers: Peers | None) -> Case:
    x = random_inputs(row, device, cached=True)

    def ours(layout):
        k_cache, v_cache = from_nhd(x.k_cache, x.v_cache, layout)
        out = x.empty_out()

        def call():
            return tritonattn.decode_attention(
                x.q, k_cache, v_cache, seqused_k=x.seq_lens, block_table=x.block_table, max_seqlen_k=x.max_seqlen_k,
                max_seqlen_q=row.query_len, kv_layout=layout, softmax_scale=x.scale, window_size=x.window_size,
                k_descale=x.descales[0], v_descale=x.descales[1], out=out,
            )  # fmt: skip

        return call

    return _case(x, {"tritonattn nhd": ours("nhd"), "tritonattn preshuffled": ours("preshuffled")}, peers, "decode")


def _mla(row: Row, device: torch.device, peers: Peers | None) -> Case:
    x = random_inputs(row, device, cached=True)
    x.scale = 192**-0.5  # of the head before absorption
    cache, out = x.k_cache.squeeze(2), x.empty_out()

    def ours():
        return tritonattn.mla_decode(
            x.q, cache, seqused_k=x.seq_lens, block_table=x.block_table, max_seqlen_k=x.max_seqlen_k, softmax_scale=x.scale,
            max_seqlen_q=row.query_len, out=out,
        )  # fmt: skip

    return _case(x, {"tritonattn": ours}, peers, "mla_decode")


def _case(x: Inputs, calls: dict[str, Call], peers: Peers | None, kernel: str) -> Case:
    flops, moved = work(x.row)
    others = peers.calls(x.row.suite, x) if peers else {}
    return Case({**calls, **others}, flops, moved, lambda out: sample_error(x, out), kernel)


_BUILDERS = {"prefill": _prefill, "extend": _extend, "decode": _decode, "spec-decode": _decode, "mla": _mla}
