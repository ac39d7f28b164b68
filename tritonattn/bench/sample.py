"""The error of an attention result, from a few of its rows computed in float64 on the device that holds it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tritonattn.bench.inputs import Inputs

ROWS = 8  # of each sequence and head looked at


def sample_error(x: Inputs, out: Tensor) -> float:
    """``||out - exact|| / ||exact||`` over sampled rows of the first, the last and a random sequence; NaN if any element is not finite.

    out [T, Hq, Dv] is bottom-right causal attention of `x`. The definition is that of `reference.attend`, for single rows.
    """
    if not torch.isfinite(out).all():
        return math.nan
    sequences = _some(len(x.row.seq_lens), 3)
    difference = norm = 0.0
    for sequence in sequences:
        begin, count, length = int(x.cu_seqlens_q[sequence]), x.row.query_lens[sequence], x.row.seq_lens[sequence]
        queries = torch.tensor(_some(count, ROWS), device=out.device)
        for head in _some(x.row.heads, 3):
            k, v = x.keys(sequence, head * x.row.kv_heads // x.row.heads)
            scores = x.scale * (x.q[begin + queries, head].double() @ k.T)
            last = queries[:, None] + (length - count)
            key = torch.arange(length, device=out.device)[None, :]
            hidden = key > last
            if x.row.window:
                hidden |= key <= last - x.row.window
            exact = torch.softmax(scores.masked_fill(hidden, -math.inf), dim=1) @ v
            difference += float((out[begin + queries, head].double() - exact).square().sum())
            norm += float(exact.square().sum())
    return math.sqrt(difference / norm)


def _some(count: int, wanted: int) -> list[int]:
    """Of 0 .. count - 1: the first, the last, and random ones between."""
    between = torch.randint(count, (max(wanted - 2, 0),)).tolist()
    return sorted({0, count - 1, *between})
