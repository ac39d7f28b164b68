"""Where a decode program leaves its rows: in the result, or as one of several parts that `combine` merges.

A part is [max_seqlen_q, heads, W] in float32 with an LSE in log2 units, at the place that `seqlens.decode_item` gives it. W columns
come as W0 (a power of two) and, where there are more, W1 more.
"""

import triton
import triton.language as tl

from tritonattn.tile import softmax
from tritonattn.tile.fp8 import to_fp8_bits


@triton.jit
def convert(x, out, FP8: tl.constexpr):
    """float32 as the elements of `out`. FP8: of `tile.fp8.FP8_FORMATS`, where `out` holds the codes of an 8-bit float."""
    if FP8 is None:
        return x.to(out.dtype.element_ty)
    else:
        return to_fp8_bits(x, FP8[0], FP8[1], FP8[2], FP8[3], FP8[4])


@triton.jit
def part_rows(place, query, head, max_seqlen_q, NUM_HEADS: tl.constexpr):
    """Which row of all parts belongs to a query token and a head; 64-bit."""
    return (place.to(tl.int64) * max_seqlen_q + query) * NUM_HEADS + head


@triton.jit
def store_columns(out, rows, ok, x0, x1, W0: tl.constexpr, W1: tl.constexpr, W: tl.constexpr, FP8: tl.constexpr = None):
    """[rows, W] at out + rows, given in two parts."""
    c0 = tl.arange(0, W0)
    tl.store(out + rows[:, None] + c0[None, :], convert(x0, out, FP8), mask=ok[:, None])
    if W1 > 0:
        c1 = tl.arange(0, W1)
        tl.store(out + W0 + rows[:, None] + c1[None, :], convert(x1, out, FP8), mask=ok[:, None] & (c1 < W - W0)[None, :])


@triton.jit
def store_result(
    out, lse, tokens, head, ok, x0, x1, lse_row, stride_out_token, stride_out_head, stride_lse_head, VEC_OUT: tl.constexpr,
    W0: tl.constexpr, W1: tl.constexpr, W: tl.constexpr, FP8: tl.constexpr = None,
):  # fmt: skip
    """Finished rows."""
    store_columns(out, (tokens * stride_out_token + head * stride_out_head) * VEC_OUT, ok, x0, x1, W0, W1, W, FP8)
    if lse is not None:
        tl.store(lse + head.to(tl.int64) * stride_lse_head + tokens, lse_row * softmax.LN2, mask=ok)


@triton.jit
def store_part(part_out, part_lse, rows, ok, x0, x1, lse_row, W0: tl.constexpr, W1: tl.constexpr, W: tl.constexpr):
    """One part of them; of a row without keys only the LSE is written, and read."""
    store_columns(part_out, rows * W, ok & (lse_row != softmax.NEG_INF), x0, x1, W0, W1, W)
    tl.store(part_lse + rows, lse_row, mask=ok)
