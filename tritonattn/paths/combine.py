"""Merging: the parts that split decode leaves, and two attention states given by the caller.

Both select rather than multiply by zero: a part without keys may hold NaN.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton.language as tl
from torch import Tensor

from tritonattn.paths import launch
from tritonattn.plan import DecodeWork, power_of_two
from tritonattn.problem import AttnProblem
from tritonattn.scratch import Scratch
from tritonattn.tile import seqlens, softmax, store
from tritonattn.tuning.arch import Arch, detect
from tritonattn.tuning.table import Row, lookup


@launch.kernel
def combine(
    out, lse, part_out, part_lse, cu_seqlens_q, merges,
    stride_out_token, stride_out_head, stride_lse_head, num_splits, max_seqlen_q,
    NUM_HEADS: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, VEC_OUT: tl.constexpr, OUT_FP8: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One output row per program: grid (heads, num_seqs or num_merges * max_seqlen_q); parts are as `tile.store` leaves them.

    merges [num_merges, 3] int32: sequence, place of its first part, number of parts (0: nothing to do). None: num_splits for each.
    """
    head = tl.program_id(0)
    row = tl.program_id(1)
    seq = row // max_seqlen_q
    query = row % max_seqlen_q
    place = seq * num_splits
    if merges is not None:
        merge_ = merges + 3 * seq
        place = tl.load(merge_ + 1)
        num_splits = tl.load(merge_ + 2)
        seq = tl.load(merge_)
        if num_splits == 0:
            return
    q_start, q_len = seqlens.query_span(cu_seqlens_q, seq, max_seqlen_q)
    if query >= q_len:
        return
    token = q_start + query

    c = tl.arange(0, BLOCK_D)
    splits = tl.arange(0, BLOCK_S)
    part = store.part_rows(place + splits, query, head, max_seqlen_q, NUM_HEADS)
    m = tl.full([1], softmax.NEG_INF, tl.float32)
    l = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, BLOCK_D], tl.float32)
    for first in tl.range(0, num_splits, BLOCK_S):
        part_rows = part + first * (max_seqlen_q * NUM_HEADS)
        e = tl.load(part_lse + part_rows, mask=first + splits < num_splits, other=softmax.NEG_INF)
        live = e != softmax.NEG_INF
        x = tl.load(part_out + (part_rows * DV)[:, None] + c[None, :], mask=live[:, None] & (c < DV)[None, :], other=0.0)
        p, alpha, m, l = softmax.online_step(e[None, :], m, l, 1.0, True)
        acc = acc * alpha[:, None] + tl.sum(tl.trans(p) * x, 0)[None, :]
    inverse, lse_row = softmax.finish(m, l)
    o = out + (token.to(tl.int64) * stride_out_token + head * stride_out_head) * VEC_OUT
    tl.store(o + c[None, :], store.convert(acc * inverse[:, None], out, OUT_FP8), mask=(c < DV)[None, :])
    if lse is not None:
        tl.store(lse + head.to(tl.int64) * stride_lse_head + token + tl.zeros([1], tl.int32), lse_row * softmax.LN2)


@launch.kernel
def merge(
    out, lse_out, out_a, lse_a, out_b, lse_b,
    stride_a_token, stride_a_head, stride_b_token, stride_b_head, stride_out_token, stride_out_head,
    stride_lse_a, stride_lse_b, stride_lse_out, num_tokens,
    DV: tl.constexpr, BLOCK_D: tl.constexpr, VEC: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Two attention states over disjoint keys into one; grid (token blocks, heads). `out` may be `out_a`."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1).to(tl.int64)
    ok = rows < num_tokens
    c = tl.arange(0, BLOCK_D)
    a = tl.load(lse_a + head * stride_lse_a + rows, mask=ok, other=softmax.NEG_INF) * softmax.LOG2E
    b = tl.load(lse_b + head * stride_lse_b + rows, mask=ok, other=softmax.NEG_INF) * softmax.LOG2E
    weight_a, weight_b, lse = softmax.merge_weights(a, b)
    columns = (c < DV)[None, :]
    a_rows = ((rows * stride_a_token + head * stride_a_head) * VEC)[:, None] + c[None, :]
    b_rows = ((rows * stride_b_token + head * stride_b_head) * VEC)[:, None] + c[None, :]
    x_a = tl.load(out_a + a_rows, mask=(weight_a > 0)[:, None] & columns, other=0.0).to(tl.float32)
    x_b = tl.load(out_b + b_rows, mask=(weight_b > 0)[:, None] & columns, other=0.0).to(tl.float32)
    o = x_a * weight_a[:, None] + x_b * weight_b[:, None]
    o_rows = ((rows * stride_out_token + head * stride_out_head) * VEC)[:, None] + c[None, :]
    tl.store(out + o_rows, o.to(out.dtype.element_ty), mask=ok[:, None] & columns)
    if lse_out is not None:
        tl.store(lse_out + head * stride_lse_out + rows, lse * softmax.LN2, mask=ok)


def take_parts(problem: AttnProblem, num_parts: int, max_seqlen_q: int, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """Room for the parts that `combine` merges: rows and their LSE."""
    rows = num_parts * max_seqlen_q * problem.num_q_heads
    parts = scratch.take("decode", rows * (problem.v_head_size + 1), torch.float32)
    return parts[: rows * problem.v_head_size], parts[rows * problem.v_head_size :]


def run_combine(
    problem: AttnProblem, out: Tensor, lse: Tensor | None, part_out: Tensor, part_lse: Tensor, *,
    cu_seqlens_q: Tensor | None, num_seqs: int, max_seqlen_q: int, num_splits: int, work: DecodeWork | None = None,
    fp8: tuple | None = None,
) -> None:  # fmt: skip
    """Parts of `decode` into `out` and `lse`: those that `work` lists, or num_splits of each of num_seqs sequences. `out`, fp8: see `launch.codes`."""
    num_merges, merges = (num_seqs, None) if work is None else (work.num_merges, work.merges)
    if not num_merges:
        return
    row, static = _combine_config(detect(out.device), problem.num_q_heads, problem.v_head_size)
    vec = launch.vec_width(out)
    launch.run(
        combine, (problem.num_q_heads, num_merges * max_seqlen_q),
        (
            out, lse, part_out, part_lse, cu_seqlens_q, merges,
            out.stride(0) // vec, out.stride(1) // vec, 0 if lse is None else lse.stride(0), num_splits, max_seqlen_q,
        ),
        {"VEC_OUT": vec, "OUT_FP8": fp8}, static, row,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _combine_config(arch: Arch, num_heads: int, v_head_size: int) -> tuple[Row, dict]:
    row = lookup("combine", arch, v_head_size=v_head_size)
    return row, {"NUM_HEADS": num_heads, "DV": v_head_size, "BLOCK_D": power_of_two(v_head_size), **row.constexprs}


def run_merge(
    out: Tensor, lse: Tensor | None, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> None:  # fmt: skip
    """Merge two states; `out` may be `out_a`, `lse` may be `lse_a`."""
    tokens, heads, size = out_a.shape
    if not tokens or not heads:
        return
    row = lookup("merge", detect(out.device), v_head_size=size)
    vec = launch.vec_width(out, out_a, out_b)
    grid = (-(-tokens // row.constexprs["BLOCK_T"]), heads)
    with launch.on(out):
        launch.run(
            merge, grid,
            (
                out, lse, out_a, lse_a, out_b, lse_b,
                out_a.stride(0) // vec, out_a.stride(1) // vec, out_b.stride(0) // vec, out_b.stride(1) // vec,
                out.stride(0) // vec, out.stride(1) // vec, lse_a.stride(0), lse_b.stride(0), 0 if lse is None else lse.stride(0), tokens,
            ),
            {"DV": size, "BLOCK_D": power_of_two(size), "VEC": vec}, row.constexprs, row,
        )  # fmt: skip
