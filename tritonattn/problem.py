"""What an attention call is, without its lengths: the static facts (`AttnProblem`) and the values of its options (`AttnParams`).

The lengths of one sequence, as every op counts them::

    |<------------------- seq_len -------------------->|
    |<------ context_len ------>|<----- query_len ---->|
    0                           ^ first query token    seq_len - 1, the last
      in the cache already        new in this call
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

SHORT_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)


def short_name(dtype: torch.dtype) -> str:
    """The name of a dtype in the tuning tables: bf16, fp16, fp32, or fp8 for any 8-bit float."""
    return SHORT_NAMES.get(dtype, "fp8")


@cache
def split_head_size(head_size: int) -> tuple[int, int, int]:
    """``(D0, D1, padded D1)`` with ``head_size = D0 + D1``: the largest power of two, the rest, and its padding.

    Tiles have power-of-two sides. 96 is computed as 64 + 32 and 80 as 64 + 16, where padding to 128
    would waste a quarter and more of the work. A rest below 16, the least a matrix instruction takes, is padded to 16.
    """
    d0 = 1 << (head_size.bit_length() - 1)
    d1 = head_size - d0
    return d0, d1, max(16, 1 << (d1 - 1).bit_length()) if d1 else 0


class AttnProblem(NamedTuple):
    """The facts that a kernel is compiled for. No length, no batch size and no stride is among them."""

    num_q_heads: int
    num_kv_heads: int
    head_size: int
    v_head_size: int
    dtype: torch.dtype
    """Of the queries (and of new keys and values)."""
    kv_dtype: torch.dtype
    """Of the cache; without one, `dtype`."""
    kv_layout: str
    """"dense" (no cache), "plain", "preshuffled" or "latent"."""
    block_size: int
    """Tokens per cache block; 0 without a cache."""
    causal: bool = False
    has_window: bool = False
    has_softcap: bool = False
    has_alibi: bool = False
    has_sinks: bool = False

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def features(self) -> str:
        """ "none", or "masked" when scores are changed or masked beyond causality; a key of the tuning tables."""
        return "masked" if self.has_window or self.has_softcap or self.has_alibi else "none"

    @property
    def start_align(self) -> int:
        """Where in a sequence a gather may start: anywhere, or at a 16-byte run of V. Either way never in a block before the one wanted."""
        return 16 // self.kv_dtype.itemsize if self.kv_layout == "preshuffled" else 1

    def table_key(self) -> dict[str, object]:
        """The static part of a tuning-table key."""
        return {
            "head_size": self.head_size,
            "v_head_size": self.v_head_size,
            "dtype": short_name(self.dtype),
            "kv_dtype": short_name(self.kv_dtype),
            "kv_layout": self.kv_layout,
            "block_size": self.block_size,
            "group": self.group,
            "num_heads": self.num_q_heads,
            "features": self.features,
        }


class AttnParams(NamedTuple):
    """The options of a call by value, named and defined as in the public ops. ``softmax_scale`` is a number here."""

    softmax_scale: float
    causal: bool = True
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    q_descale: float | Tensor | None = None
    k_descale: float | Tensor | None = None
    v_descale: float | Tensor | None = None
    out_inverse: tuple[Tensor, Tensor] | None = None
    """With an 8-bit `out`, the inverse of its scale: by itself, and times `v_descale`."""

    @property
    def dense(self) -> AttnParams:
        """For keys and values that are at hand, or were dequantised already."""
        return self._replace(k_descale=None, v_descale=None if self.out_inverse is None else self.out_inverse[0], out_inverse=None)

    @property
    def paged(self) -> AttnParams:
        """For those that are read from the cache as they are."""
        return self if self.out_inverse is None else self._replace(v_descale=self.out_inverse[1], out_inverse=None)


class MlaParams(NamedTuple):
    """The options of an MLA call by value, named and defined as in the public ops."""

    softmax_scale: float
    causal: bool = True
    q_descale: float | Tensor | None = None
    kv_descale: float | Tensor | None = None
    rope_descale: float | Tensor | None = None
    """Of the rope columns of the cache; None: that of the latent columns, `kv_descale`."""


def default_scale(softmax_scale: float | None, head_size: int) -> float:
    """``None`` means ``1 / sqrt(D)``."""
    return 1.0 / math.sqrt(head_size) if softmax_scale is None else float(softmax_scale)
