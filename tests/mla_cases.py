"""Random latent caches and calls of the MLA ops, poisoned, marked and held against float64 in the manner of `cases`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import tritonattn
from tests.cases import MARK, PAD_COLUMNS, PAD_ROWS, Oracle, as_batch, cumulative, page, poisoned, to
from tritonattn import reference
from tritonattn.problem import FP8_DTYPES


@dataclass
class LatentCache:
    """Sequences in blocks of shuffled ids; what no token owns holds zeros in `clean` and poison in `poisoned`."""

    clean: Tensor
    needed: Tensor
    table: Tensor

    def poisoned(self, poison: str) -> Tensor:
        return poisoned(self.clean, self.needed, poison)


def latent_cache(
    rows: Sequence[Tensor], latent: int, *, block_size: int = 16, dtype: torch.dtype | None = None, kv_descale=None, rope_descale=None,
    gap: int = 0, seed: int = 0,
) -> LatentCache:  # fmt: skip
    """rows: those of each sequence, [n, latent + rope]. gap: elements between two blocks."""
    width = rows[0].shape[1]
    table, slots, num_blocks = page([len(row) for row in rows], block_size, seed)
    storage = torch.zeros(num_blocks, block_size * width + gap, dtype=dtype or rows[0].dtype)
    cache = storage[:, : block_size * width].unflatten(1, (block_size, width))
    needed = torch.zeros(cache.shape, dtype=torch.bool)
    for row, own in zip(rows, slots, strict=True):
        reference.mla_cache_write(row[:, :latent], row[:, latent:], cache, own, kv_descale=kv_descale, rope_descale=rope_descale)
        needed[own // block_size, own % block_size] = True
    return LatentCache(cache, needed, table)


@dataclass
class Batch:
    """Sequences as (query_len, seq_len). Rows of padding, which hold NaN, follow the queries."""

    lens: Sequence[tuple[int, int]]
    heads: int = 3
    latent: int = 64
    rope: int = 16
    dtype: torch.dtype = torch.float32
    seed: int = 0
    magnitude: float = 1.0
    q: Tensor = field(init=False)
    rows: list[Tensor] = field(init=False)

    def __post_init__(self):
        self.generator = torch.Generator().manual_seed(self.seed)
        self.q = self.random(self.tokens + PAD_ROWS, self.heads, self.width) * self.magnitude
        self.q[self.tokens :] = math.nan
        self.rows = [self.random(seq, self.width) for _, seq in self.lens]

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    @property
    def width(self) -> int:
        return self.latent + self.rope

    @property
    def tokens(self) -> int:
        return sum(query for query, _ in self.lens)

    @property
    def query_lens(self) -> list[int]:
        return [query for query, _ in self.lens]

    @property
    def seq_lens(self) -> list[int]:
        return [seq for _, seq in self.lens]

    @property
    def context_lens(self) -> list[int]:
        return [seq - query for query, seq in self.lens]


@dataclass
class Case:
    """A call of `mla_decode` or `mla_extend`."""

    op: str
    args: dict[str, Any]
    cache: LatentCache
    rows: int
    """Tokens that belong to a sequence."""
    out_size: int
    dtype: torch.dtype

    def run(self, device: torch.device, poison: str = "nan", **changes) -> tuple[Tensor, Tensor]:
        """(out, lse) of the op, after a look at what it had to leave alone."""
        args = {"kv_cache": self.cache.poisoned(poison), "block_table": self.cache.table, **self.args, **changes}
        q = args["q"]
        tokens, heads = (q[0] if isinstance(q, tuple) else q).shape[:2]
        args = {name: tuple(to(x, device) for x in value) if isinstance(value, tuple) else to(value, device) for name, value in args.items()}
        wide = torch.full((tokens, heads + 1, self.out_size + PAD_COLUMNS), MARK, dtype=self.dtype, device=device)
        out = wide[:, :heads, : self.out_size]
        got, lse = getattr(tritonattn, self.op)(**args, out=out, return_lse=True)
        assert got.data_ptr() == out.data_ptr()
        assert (wide[:, heads:] == MARK).all() and (wide[:, :, self.out_size :] == MARK).all(), "wrote outside of out"
        assert ((out[self.rows :] == MARK) | (out[self.rows :] == 0)).all(), "padding must stay or be 0"
        assert lse.shape == (heads, tokens) and lse.dtype is torch.float32
        return out[: self.rows].contiguous(), lse[:, : self.rows].contiguous()

    def check(self, device: torch.device, poison: str = "nan", **changes) -> tuple[Tensor, Tensor]:
        """Run and hold against the oracle. `changes` must not change the result."""
        out, lse = self.run(device, poison, **changes)
        Oracle.of(self.op, self.dtype, **{"kv_cache": self.cache.clean, "block_table": self.cache.table, **self.args}).check(
            out, lse, slice(0, self.rows)
        )
        return out, lse


def decode(
    lens: Sequence[tuple[int, int]] | Batch, *, block_size=16, kv_dtype=None, q_descale=None, kv_descale=None, rope_descale=None,
    fp8_q=None, gap=0, options=None, **shape,
) -> Case:  # fmt: skip
    batch = as_batch(Batch, lens, shape)
    scales = {"kv_descale": kv_descale, "rope_descale": rope_descale}
    cache = latent_cache(batch.rows, batch.latent, block_size=block_size, dtype=kv_dtype, gap=gap, **scales)
    args = {
        "q": batch.q if fp8_q is None else reference.quantise(batch.q, 1.0, fp8_q), "seqused_k": torch.tensor(batch.seq_lens).int(),
        "max_seqlen_k": max(batch.seq_lens, default=0), "cu_seqlens_q": cumulative(batch.query_lens),
        "max_seqlen_q": max([1, *batch.query_lens]), "softmax_scale": batch.width**-0.5, "kv_lora_rank": batch.latent,
        "q_descale": q_descale, **scales, **(options or {}),
    }  # fmt: skip
    return Case("mla_decode", args, cache, batch.tokens, batch.latent, torch.bfloat16 if batch.dtype in FP8_DTYPES else batch.dtype)


@dataclass
class UpProject:
    """The up-projection of a layer, in any dtype; notes the rows of each call.

    In float64, so that every device rounds its result alike: keys that differ by a unit in the last place move the LSE.
    """

    w_k: Tensor  # [heads, nope, latent]
    w_v: Tensor  # [heads, v, latent]
    calls: list[int] = field(default_factory=list)

    def __call__(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        assert latent.isfinite().all() and rope.isfinite().all(), "rows that hold no token must not be garbage"
        self.calls.append(len(latent))
        w_k, w_v = (w.to(latent.device, torch.float64) for w in (self.w_k, self.w_v))
        wide = latent.double()
        nope = torch.einsum("nl,hdl->nhd", wide, w_k).to(latent.dtype)
        keys = torch.cat([nope, rope[:, None].expand(-1, len(w_k), -1)], dim=-1)
        return keys, torch.einsum("nl,hdl->nhd", wide, w_v).to(latent.dtype)


def extend(
    lens: Sequence[tuple[int, int]] | Batch, *, nope=32, v_head_size=32, block_size=16, kv_dtype=None, kv_descale=None, rope_descale=None,
    gap=0, options=None, **shape,
) -> Case:  # fmt: skip
    """New keys and values come from the rows of the new tokens."""
    batch = as_batch(Batch, lens, shape)
    up_project = UpProject(
        *(torch.randn(batch.heads, size, batch.latent, generator=batch.generator) * batch.latent**-0.5 for size in (nope, v_head_size))
    )
    new = torch.cat([rows[len(rows) - query :] for (query, _), rows in zip(batch.lens, batch.rows, strict=True)])
    k, v = up_project(new[:, : batch.latent], new[:, batch.latent :])
    up_project.calls.clear()
    pad = torch.full((PAD_ROWS,), math.nan, dtype=batch.dtype)[:, None, None]
    context = [rows[: len(rows) - query] for (query, _), rows in zip(batch.lens, batch.rows, strict=True)]
    scales = {"kv_descale": kv_descale, "rope_descale": rope_descale}
    cache = latent_cache(context, batch.latent, block_size=block_size, dtype=kv_dtype, gap=gap, **scales)
    q = batch.random(batch.tokens + PAD_ROWS, batch.heads, nope + batch.rope)
    q[batch.tokens :] = math.nan
    args = {
        "q": q, "k": torch.cat([k, pad.expand(-1, *k.shape[1:])]), "v": torch.cat([v, pad.expand(-1, *v.shape[1:])]),
        "up_project": up_project, "cu_seqlens_q": cumulative(batch.query_lens), "context_lens": torch.tensor(batch.context_lens).int(),
        "max_seqlen_q": max(batch.query_lens, default=0), "max_context_len": max(batch.context_lens, default=0),
        "softmax_scale": (nope + batch.rope) ** -0.5, "kv_lora_rank": batch.latent, **scales, **(options or {}),
    }  # fmt: skip
    return Case("mla_extend", args, cache, batch.tokens, v_head_size, batch.dtype)
