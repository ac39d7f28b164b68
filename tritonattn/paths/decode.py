"""Decode: a few query tokens per sequence over the paged cache, split over the keys (Flash-Decoding).

All query rows that share a KV head, (query token, head in group), form one block, so each cached key is read once for all of them.
A program takes one contiguous part of the keys of one sequence; `combine` merges the parts. This is the portable form of the
kernel; `decode_wave` is the one for CDNA.
"""

from __future__ import annotations

from functools import lru_cache, partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from tritonattn.layouts import CacheView
from tritonattn.paths import launch
from tritonattn.paths.combine import run_combine, take_parts
from tritonattn.paths.cut import run_cut
from tritonattn.paths.decode_wave import launch_wave
from tritonattn.plan import LOG2E, UNLIMITED, DecodePlan, DecodeWork, compute_dtype, least_contraction, unaligned_row, window
from tritonattn.plan import descale as descale_of
from tritonattn.problem import AttnParams, AttnProblem, split_head_size
from tritonattn.scratch import Scratch
from tritonattn.tile import kv_load, mask, seqlens, softmax, store
from tritonattn.tile.kv_load import descale, load_2d, upcast
from tritonattn.tuning.arch import detect
from tritonattn.tuning.table import Row

# P in float16 with FP8_HALF: scaled so that weights down to 2^-38 of the largest count, as they would in bfloat16.
P_SCALE = tl.constexpr(16384.0)


@triton.jit
def load_kv(
    k_base, v_base, k_pages, v_pages, n, ok, lo, hi, stride_k_block, stride_k_token, stride_v_block, stride_v_token,
    SHUFFLED: tl.constexpr, X: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, VEC: tl.constexpr,
    FLAT: tl.constexpr, SAME_STRIDES: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    KCOL: tl.constexpr, KCOLS: tl.constexpr, VCOL: tl.constexpr, VCOLS: tl.constexpr,
    CLEAR_V: tl.constexpr, REPEAT: tl.constexpr,
):  # fmt: skip
    """K columns [KCOL, KCOL + KCOLS) and V columns [VCOL, VCOL + VCOLS) of the tokens [n, n + BLOCK_N).

    Of a plain cache, tokens from hi on come as the last one before it with REPEAT, and any outside [lo, hi) as zeros without. Of a
    preshuffled one, where 16 bytes hold several tokens, V does the latter with CLEAR_V alone, by a selection in registers that the
    interior tiles are spared; K does not need it.
    """
    tokens = n + tl.arange(0, BLOCK_N)
    if REPEAT:
        tokens = tl.minimum(tokens, hi - 1)
    if FLAT:
        page = n + tl.arange(0, BLOCK_N // BLOCK_SIZE) * BLOCK_SIZE
        live = (page < hi) & (page + BLOCK_SIZE > lo)
        k = kv_load.load_k_pages(k_base, k_pages, live, stride_k_block, X, BLOCK_SIZE, BLOCK_N, VEC, KCOL, KCOLS, D - KCOL)
        v = kv_load.load_v_pages(v_base, v_pages, n, lo, hi, stride_v_block, DV, X, BLOCK_SIZE, BLOCK_N, VEC)
    elif SHUFFLED:
        k = kv_load.load_k_shuffled(k_base, k_pages, tokens, stride_k_block, ok, X, BLOCK_SIZE, VEC, KCOL, KCOLS, D - KCOL, True)
        v = kv_load.load_v_shuffled(
            v_base, v_pages, n, lo, hi, stride_v_block, DV, X, BLOCK_SIZE, BLOCK_N, VEC, VCOL, VCOLS, DV - VCOL
        )
    else:
        kc = KCOL + tl.arange(0, KCOLS)
        vc = VCOL + tl.arange(0, VCOLS)
        k_rows = kv_load.plain_rows(k_pages, tokens, stride_k_block, stride_k_token, BLOCK_SIZE, VEC)
        v_rows = k_rows
        if not SAME_STRIDES:
            v_rows = kv_load.plain_rows(v_pages, tokens, stride_v_block, stride_v_token, BLOCK_SIZE, VEC)
        k = load_2d(k_base, k_rows, kc, ok, kc < D, not REPEAT, KCOL + KCOLS > D)
        v = load_2d(v_base, v_rows, vc, ok, vc < DV, not REPEAT, VCOL + VCOLS > DV)
    if CLEAR_V:
        v = kv_load.clear_dead(v, n, lo, hi)
    return k, v


@triton.jit
def decode_tile(
    q0, q1, q_power, acc0, acc1, m, l, k_base, v_base, k_pages, v_pages, n, lo, hi, seen_by_all, row_lo, row_hi, slope, row_position, scale, softcap,
    stride_k_block, stride_k_token, stride_v_block, stride_v_token,
    SHUFFLED: tl.constexpr, X: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, VEC: tl.constexpr,
    FLAT: tl.constexpr, SAME_STRIDES: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, D: tl.constexpr, V0: tl.constexpr,
    V1: tl.constexpr, DV: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, WINDOW_LEFT: tl.constexpr,
    CLEAR_V: tl.constexpr, MASK_FEW: tl.constexpr, FP8_HALF: tl.constexpr, CONVERT_ONCE: tl.constexpr,
):  # fmt: skip
    """Keys [n, n + BLOCK_N) into the state of the rows. MASK_FEW: tiles that end at or before `seen_by_all` pass the mask by."""
    REPEAT: tl.constexpr = not SHUFFLED and not WINDOW_LEFT
    keys = n + tl.arange(0, BLOCK_N)
    ok = keys < hi
    if WINDOW_LEFT:
        ok = ok & (keys >= lo)
    k0, v0 = load_kv(
        k_base, v_base, k_pages, v_pages, n, ok, lo, hi, stride_k_block, stride_k_token, stride_v_block, stride_v_token,
        SHUFFLED, X, BLOCK_SIZE, BLOCK_N, VEC, FLAT, SAME_STRIDES, D, DV, 0, D0, 0, V0, CLEAR_V, REPEAT,
    )  # fmt: skip
    if CONVERT_ONCE:
        k0 = kv_load.convert_once(k0, q0.dtype)
        v0 = kv_load.convert_once(v0, q0.dtype)
    s = tl.dot(q0, tl.trans(kv_load.widen(k0, q0.dtype, FP8_HALF)), input_precision="ieee")
    if D1 > 0 or V1 > 0:
        # Where one of the two has no second part, what is loaded in its place is masked out and not used.
        k1, v1 = load_kv(
            k_base, v_base, k_pages, v_pages, n, ok, lo, hi, stride_k_block, stride_k_token, stride_v_block, stride_v_token,
            SHUFFLED, X, BLOCK_SIZE, BLOCK_N, VEC, FLAT, SAME_STRIDES, D, DV, D0, D1 if D1 > 0 else 16, V0, V1 if V1 > 0 else 16, CLEAR_V, REPEAT,
        )  # fmt: skip
        if CONVERT_ONCE:
            k1 = kv_load.convert_once(k1, q0.dtype)
            v1 = kv_load.convert_once(v1, q0.dtype)
    if D1 > 0:
        s = tl.dot(q1, tl.trans(kv_load.widen(k1, q0.dtype, FP8_HALF)), s, input_precision="ieee")
    if FP8_HALF:
        s = s * q_power[:, None]
    distance = keys[None, :] - row_position[:, None]
    s, factor = softmax.modify_scores(s, scale, softcap, slope, distance, SOFTCAP, ALIBI)
    if not MASK_FEW or n + BLOCK_N > seen_by_all:
        s = tl.where(mask.tile_mask(keys[None, :], row_lo[:, None], tl.minimum(row_hi, hi)[:, None], WINDOW_LEFT), s, softmax.NEG_INF)
    p, alpha, m, l = softmax.online_step(s, m, l, factor, True)
    if FP8_HALF:
        p = p * P_SCALE
    p = p.to(q0.dtype)
    acc0 = tl.dot(p, kv_load.widen(v0, q0.dtype, FP8_HALF), acc0 * alpha[:, None], input_precision="ieee")
    if V1 > 0:
        acc1 = tl.dot(p, kv_load.widen(v1, q0.dtype, FP8_HALF), acc1 * alpha[:, None], input_precision="ieee")
    return acc0, acc1, m, l


@launch.kernel
def decode(
    # outputs; part_*: see `tile.store`, where a sequence has more than one split
    out, lse, part_out, part_lse,
    # inputs
    q, k_cache, v_cache, sinks, alibi_slopes, q_descale, k_descale, v_descale,
    # metadata, int32; cu_seqlens_q None: sequence i has the i-th max_seqlen_q query tokens; work: see `seqlens.decode_item`
    cu_seqlens_q, seq_lens, block_table, work,
    # strides, in units of VEC elements but for lse, table and descales
    stride_q_token, stride_q_head, stride_k_block, stride_k_token, stride_k_head, stride_v_block, stride_v_token, stride_v_head,
    stride_out_token, stride_out_head, stride_lse_head, stride_table, stride_q_descale, stride_k_descale, stride_v_descale,
    # scalars
    num_splits, max_seqlen_q, row_blocks, qk_scale, out_scale, softcap, window_left, window_right,
    # problem
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, SHUFFLED: tl.constexpr, X: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    D0: tl.constexpr, D1: tl.constexpr, D: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, DV: tl.constexpr,
    VEC: tl.constexpr, VEC_Q: tl.constexpr, VEC_OUT: tl.constexpr, OUT_FP8: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW_LEFT: tl.constexpr,
    COMPUTE: tl.constexpr, SPLIT: tl.constexpr, SAME_STRIDES: tl.constexpr,
    # tile
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr, FP8_HALF: tl.constexpr, CONVERT_ONCE: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0) // row_blocks
    row0 = tl.program_id(0) % row_blocks * ROWS
    seq, split, splits, place = seqlens.decode_item(work, num_splits)
    if work is not None:
        if splits == 0:
            return
    k_len = tl.load(seq_lens + seq)
    q_start, q_len = seqlens.query_span(cu_seqlens_q, seq, max_seqlen_q)
    if row0 >= q_len * GROUP:
        return

    rows = row0 + tl.arange(0, ROWS)
    query = rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    row_ok = query < q_len
    diag = k_len - q_len
    row_last = tl.minimum(row0 + ROWS, q_len * GROUP) - 1
    lo, hi = mask.visible(row0 // GROUP, row_last // GROUP, diag, k_len, window_left, window_right)
    begin, end = mask.split_bounds(lo, hi, split, splits, BLOCK_N)
    lo = tl.maximum(lo, begin)
    hi = end
    row_lo, row_hi = mask.row_limits(query, diag, k_len, window_left, window_right)

    m = tl.full([ROWS], softmax.NEG_INF, tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    if sinks is not None:
        sink = softmax.sink_score(tl.load(sinks + head, mask=row_ok, other=0.0))
        m = tl.where(split == 0, sink, m)
        l = tl.where(split == 0, 1.0, l)
    acc0 = tl.zeros([ROWS, V0], tl.float32)
    acc1 = l
    if V1 > 0:
        acc1 = tl.zeros([ROWS, V1], tl.float32)

    tokens = (q_start + query).to(tl.int64)
    if begin < hi:
        d0 = tl.arange(0, D0)
        q_rows = (tokens * stride_q_token + head * stride_q_head) * VEC_Q
        q0 = upcast(load_2d(q, q_rows, d0, row_ok, d0 < D, True, False), COMPUTE)
        q1 = q0
        if D1 > 0:
            d1 = tl.arange(0, D1)
            q1 = upcast(load_2d(q + D0, q_rows, d1, row_ok, d1 < D - D0, True, D0 + D1 > D), COMPUTE)
        q_power = l
        if FP8_HALF:
            # The products run in float16, which holds every fp8 value. A row of q is brought into its range by a power of two, without
            # an error; what that makes subnormal lies 2^24 below the row's largest element.
            q_power = tl.maximum(kv_load.row_power(q0), kv_load.row_power(q1))
            q0 = (q0.to(tl.float32) / q_power[:, None]).to(tl.float16)
            q1 = (q1.to(tl.float32) / q_power[:, None]).to(tl.float16)
        slope = 0.0
        ALIBI: tl.constexpr = alibi_slopes is not None
        if ALIBI:
            slope = tl.load(alibi_slopes + head, mask=row_ok, other=0.0).to(tl.float32)[:, None]
        scale = qk_scale * descale(q_descale, kv_head, stride_q_descale) * descale(k_descale, kv_head, stride_k_descale)
        k_base = k_cache + kv_head.to(tl.int64) * stride_k_head * VEC
        v_base = v_cache + kv_head.to(tl.int64) * stride_v_head * VEC
        table = block_table + seq.to(tl.int64) * stride_table
        keys = tl.arange(0, BLOCK_N)
        # A preshuffled cache is read by whole pages where they divide a tile, else V in runs of X tokens, none of which straddles pages.
        FLAT: tl.constexpr = SHUFFLED and V1 == 0 and D1 == 0 and BLOCK_N % BLOCK_SIZE == 0
        units = keys
        runs = keys
        if FLAT:
            units = tl.arange(0, BLOCK_N // BLOCK_SIZE) * BLOCK_SIZE
        elif SHUFFLED:
            runs = tl.arange(0, BLOCK_N // X) * X

        # The ids of the next tile's pages are carried through the loop: a table load feeding a K load in the same iteration makes the
        # pipeliner spread its stages over both hops, which leaves one K buffer at three stages.
        REPEAT: tl.constexpr = not SHUFFLED and not WINDOW_LEFT
        k_pages = kv_load.page_ids(table, begin + units, hi, REPEAT, BLOCK_SIZE)
        v_pages = k_pages
        if SHUFFLED and not FLAT:
            v_pages = kv_load.page_ids(table, begin + runs, hi, False, BLOCK_SIZE)
        # 16 bytes of V of a preshuffled cache hold X tokens, of which the last ones may be dead and hold anything. Clearing them in
        # registers would cost every tile; so the loop stops at a whole run, and the rest, fewer than X tokens, is a small tile of its own.
        # Under a window, whose left edge moves too, every tile is cleared.
        CLEAR: tl.constexpr = SHUFFLED and WINDOW_LEFT
        REST: tl.constexpr = SHUFFLED and not WINDOW_LEFT
        loop_end = hi
        if REST:
            loop_end = tl.maximum(hi - hi % X, begin)
        # With many rows the mask is a good part of a tile's work: then only the tiles that some row does not see in full take it.
        MASK_FEW: tl.constexpr = ROWS > 32 and not WINDOW_LEFT
        seen_by_all = tl.minimum(diag + row0 // GROUP + window_right + 1, loop_end)
        for n in tl.range(begin, loop_end, BLOCK_N, num_stages=NUM_STAGES):
            following = n + BLOCK_N
            next_k_pages = kv_load.page_ids(table, following + units, hi, REPEAT, BLOCK_SIZE)
            next_v_pages = next_k_pages
            if SHUFFLED and not FLAT:
                next_v_pages = kv_load.page_ids(table, following + runs, hi, False, BLOCK_SIZE)
            acc0, acc1, m, l = decode_tile(
                q0, q1, q_power, acc0, acc1, m, l, k_base, v_base, k_pages, v_pages, n, lo, loop_end, seen_by_all, row_lo, row_hi, slope, query + diag, scale,
                softcap, stride_k_block, stride_k_token, stride_v_block, stride_v_token, SHUFFLED, X, BLOCK_SIZE, BLOCK_N, VEC, FLAT,
                SAME_STRIDES, D0, D1, D, V0, V1, DV, SOFTCAP, ALIBI, WINDOW_LEFT, CLEAR, MASK_FEW, FP8_HALF, CONVERT_ONCE,
            )  # fmt: skip
            k_pages = next_k_pages
            v_pages = next_v_pages
        if REST:
            if loop_end < hi:
                few = loop_end + tl.arange(0, 16)
                first = loop_end + tl.arange(0, 16 // X) * X
                rest_k_pages = kv_load.page_ids(table, few, hi, False, BLOCK_SIZE)
                rest_v_pages = kv_load.page_ids(table, first, hi, False, BLOCK_SIZE)
                acc0, acc1, m, l = decode_tile(
                    q0, q1, q_power, acc0, acc1, m, l, k_base, v_base, rest_k_pages, rest_v_pages, loop_end, lo, hi, loop_end, row_lo, row_hi,
                    slope, query + diag, scale, softcap, stride_k_block, stride_k_token, stride_v_block, stride_v_token, SHUFFLED, X, BLOCK_SIZE,
                    16, VEC, False, SAME_STRIDES, D0, D1, D, V0, V1, DV, SOFTCAP, ALIBI, WINDOW_LEFT, True, False, FP8_HALF, CONVERT_ONCE,
                )  # fmt: skip

    inverse, lse_row = softmax.finish(m, l)
    inverse = inverse * out_scale * descale(v_descale, kv_head, stride_v_descale)
    if FP8_HALF:
        inverse = inverse * (1.0 / P_SCALE)
    acc0 = acc0 * inverse[:, None]
    if V1 > 0:
        acc1 = acc1 * inverse[:, None]
    part = store.part_rows(place, query, head, max_seqlen_q, NUM_HEADS)
    if not SPLIT:
        store.store_result(
            out, lse, tokens, head, row_ok, acc0, acc1, lse_row, stride_out_token, stride_out_head, stride_lse_head, VEC_OUT, V0, V1, DV, OUT_FP8
        )
    elif work is None:
        store.store_part(part_out, part_lse, part, row_ok, acc0, acc1, lse_row, V0, V1, DV)
    elif splits > 1:
        store.store_part(part_out, part_lse, part, row_ok, acc0, acc1, lse_row, V0, V1, DV)
    else:
        store.store_result(
            out, lse, tokens, head, row_ok, acc0, acc1, lse_row, stride_out_token, stride_out_head, stride_lse_head, VEC_OUT, V0, V1, DV, OUT_FP8
        )


def run_decode(
    problem: AttnProblem, params: AttnParams, q: Tensor, cache: CacheView, out: Tensor, lse: Tensor | None, *,
    cu_seqlens_q: Tensor | None, seq_lens: Tensor, block_table: Tensor, num_seqs: int, max_seqlen_q: int, plan: DecodePlan,
    scratch: Scratch, work: DecodeWork | None = None,
) -> None:  # fmt: skip
    """work lists which sequences to compute and in how many splits each; None: all `num_seqs`, as `plan` says."""
    splits = plan.num_splits
    if not num_seqs or not q.shape[0]:
        return
    out, fp8 = launch.codes(out)
    left, right = window(params)
    if work is None and plan.cut is not None:
        work = run_cut(plan.cut, seq_lens, cu_seqlens_q, num_seqs=num_seqs, max_seqlen_q=max_seqlen_q, window_left=left, scratch=scratch)
    over = (splits, num_seqs) if work is None else (work.num_items, 1)
    part_out = part_lse = None
    if splits > 1 or work is not None:
        part_out, part_lse = take_parts(problem, splits * num_seqs if work is None else work.num_parts, max_seqlen_q, scratch)
    vec, vec_q, vec_out = launch.cache_width(cache.k, cache.v), launch.vec_width(q), launch.vec_width(out)
    row = plan.row if vec > 1 else unaligned_row(detect(q.device), problem, plan.rows)
    params = params.paged
    q_scale, k_scale, v_scale = descale_of(params.q_descale), descale_of(params.k_descale), descale_of(params.v_descale)
    grid = (problem.num_kv_heads * plan.row_blocks, *over)
    start = launch_wave if row.config["form"] == "wave" else partial(launch.run, decode)
    with launch.on(q, row):
        start(
            grid,
            (
                out, lse, part_out, part_lse,
                q, cache.k, cache.v, params.sinks, params.alibi_slopes, q_scale.pointer, k_scale.pointer, v_scale.pointer,
                cu_seqlens_q, seq_lens, block_table, None if work is None else work.items,
                q.stride(0) // vec_q, q.stride(1) // vec_q, cache.stride_k_block // vec, cache.stride_k_token // vec,
                cache.stride_k_head // vec, cache.stride_v_block // vec, cache.stride_v_token // vec, cache.stride_v_head // vec,
                out.stride(0) // vec_out, out.stride(1) // vec_out, 0 if lse is None else lse.stride(0), block_table.stride(0),
                q_scale.stride, k_scale.stride, v_scale.stride,
                splits, max_seqlen_q, plan.row_blocks, params.softmax_scale * LOG2E * q_scale.factor * k_scale.factor, v_scale.factor,
                params.softcap, left, right,
            ),
            {
                "VEC": vec, "VEC_Q": vec_q, "VEC_OUT": vec_out, "SOFTCAP": params.softcap > 0, "WINDOW_LEFT": left != UNLIMITED,
                "SPLIT": part_out is not None, "ROWS": plan.rows, "OUT_FP8": fp8,
                # Twins, as caches usually are, share one set of addresses: room in the registers for another program.
                "SAME_STRIDES": cache.stride_k_block == cache.stride_v_block and cache.stride_k_token == cache.stride_v_token,
            },
            _static(row, problem), row,
        )  # fmt: skip
        if part_out is not None and part_lse is not None:
            run_combine(
                problem, out, lse, part_out, part_lse, cu_seqlens_q=cu_seqlens_q, num_seqs=num_seqs, max_seqlen_q=max_seqlen_q,
                num_splits=splits, work=work, fp8=fp8,
            )  # fmt: skip


@lru_cache(maxsize=1024)
def _static(row: Row, problem: AttnProblem) -> dict:
    d0, _, d1 = split_head_size(problem.head_size)
    v0, _, v1 = split_head_size(problem.v_head_size)
    d1 = max(d1, least_contraction(row)) if d1 else 0
    tile = dict(row.constexprs)
    if row.config["form"] == "tile":
        halves = (torch.bfloat16, torch.float16)  # float32 queries would lose digits
        tile["CONVERT_ONCE"] = tile.get("CONVERT_ONCE", False) and problem.kv_dtype.itemsize == 1
        for name in ("CHEAP_P", "WAVE_ROWS"):  # the other form's
            tile.pop(name, None)
        tile["FP8_HALF"] = tile.get("FP8_HALF", False) and problem.kv_dtype.itemsize == 1 and problem.dtype in halves
    return {
        "NUM_HEADS": problem.num_q_heads, "GROUP": problem.group, "SHUFFLED": problem.kv_layout == "preshuffled",
        "X": 16 // problem.kv_dtype.itemsize, "BLOCK_SIZE": problem.block_size, "D0": d0, "D1": d1, "D": problem.head_size,
        "V0": v0, "V1": v1, "DV": problem.v_head_size, "COMPUTE": launch.TRITON_DTYPES[compute_dtype(problem)], **tile,
    }  # fmt: skip
