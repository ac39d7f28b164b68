"""Which table row, how many splits, what grid: host arithmetic alone, without Triton and without reading a device.

Everything here follows from static facts (`Heads`) and host integers, and is cached.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .tuning.arch import Arch
from .tuning.table import Row, lookup

LOG2E = math.log2(math.e)
MAX_SPLITS = 128
UNLIMITED = 1 << 30  # a window side without a bound: it joins the arithmetic of positions without overflowing it
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def dtype_name(dtype: torch.dtype) -> str:
    """The name that tables use; every 8-bit float is "fp8"."""
    return DTYPE_NAMES.get(dtype, "fp8")


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


class Parts(NamedTuple):
    """A head of `size` columns as `first` (a power of two) and `rest` more, padded to a power of two; rest = 0: none."""

    first: int
    rest: int
    size: int


@lru_cache(maxsize=None)
def split_head(size: int) -> Parts:
    """192 -> 128 + 64, 80 -> 64 + 16, 112 -> 64 + 64 (48 of them live): no head is padded to twice its size."""
    first = 1 << (size.bit_length() - 1)
    return Parts(first, power_of_two(max(size - first, 16)) if size > first else 0, size)


@dataclass(frozen=True)
class Heads:
    """The static facts of a call that choose its table row and its compile key."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    v_head_size: int
    dtype: torch.dtype  # of the queries
    kv_dtype: torch.dtype
    kv_layout: str = "dense"  # "dense", "plain", "preshuffled", "latent"
    block_size: int = 0

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def compute_dtype(self) -> torch.dtype:
        """What the matrix products run in: fp8 queries are taken as bfloat16, which holds every fp8 value."""
        return self.dtype if self.dtype in DTYPE_NAMES else torch.bfloat16

    def key(self) -> dict[str, Any]:
        return {
            "head_size": self.head_size, "v_head_size": self.v_head_size, "dtype": dtype_name(self.compute_dtype),
            "kv_dtype": dtype_name(self.kv_dtype), "kv_layout": self.kv_layout, "block_size": self.block_size,
            "group": self.group, "num_heads": self.num_heads,
        }  # fmt: skip


class Score(NamedTuple):
    """What happens to a score between q.k and the softmax, and to the output after it. See "Words and units" in the API."""

    softmax_scale: float
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    q_descale: float | Tensor | None = None
    k_descale: float | Tensor | None = None
    v_descale: float | Tensor | None = None

    def window(self) -> tuple[int, int]:
        """(left, right) with -1 as UNLIMITED and causal as right = 0."""
        left, right = self.window_size
        right = 0 if self.causal else right
        return left if left >= 0 else UNLIMITED, right if right >= 0 else UNLIMITED


class Descale(NamedTuple):
    """A descale as a kernel takes it: a host factor, and a device pointer with the stride between KV heads."""

    factor: float
    pointer: Tensor | None
    stride: int


def descale(value: float | Tensor | None) -> Descale:
    if value is None:
        return Descale(1.0, None, 0)
    if isinstance(value, Tensor):
        return Descale(1.0, value, 0 if value.numel() == 1 else value.stride(-1))
    return Descale(float(value), None, 0)


@lru_cache(maxsize=4096)
def prefill_row(arch: Arch, heads: Heads, max_seqlen_q: int) -> Row:
    """The row for prefill and every pass of extend. The query length counts by its power of two."""
    return lookup("prefill", arch, **heads.key(), max_seqlen_q=power_of_two(max_seqlen_q))


@dataclass(frozen=True)
class DecodePlan:
    row: Row
    rows: int  # query rows of one program
    row_blocks: int
    num_splits: int


@lru_cache(maxsize=4096)
def _decode_row(arch: Arch, heads: Heads, rows: int, units: int, max_seqlen_k: int) -> Row:
    return lookup(
        "decode", arch, **heads.key(), rows=rows, units_per_cu=units / arch.compute_units, max_seqlen_k=max_seqlen_k
    )  # fmt: skip


@lru_cache(maxsize=8192)
def decode_plan(arch: Arch, heads: Heads, num_seqs: int, max_seqlen_q: int, max_seqlen_k: int, num_splits: int = 0) -> DecodePlan:
    """Rows per program and number of splits; num_splits > 0 is the caller's choice.

    Splits fill the compute units with as many programs as the row says they hold, in whole waves, with at least one tile of keys
    each: too few leave units idle, too many make the merge the larger part.
    """
    rows = heads.group * max_seqlen_q
    block_rows = min(power_of_two(max(rows, 16)), 64)
    row_blocks = -(-rows // block_rows)
    units = max(num_seqs * heads.num_kv_heads * row_blocks, 1)
    row = _decode_row(arch, heads, rows, units, power_of_two(max_seqlen_k))
    if num_splits <= 0:
        room = int(row.config["programs_per_cu"] * arch.compute_units) // units
        tiles = -(-max_seqlen_k // row.config["BLOCK_N"])
        num_splits = max(1, min(room, tiles, MAX_SPLITS))
    return DecodePlan(row, block_rows, row_blocks, num_splits)
