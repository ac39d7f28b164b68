"""MLA decode in the absorbed form (DeepSeek-V2, arXiv:2405.04434): queries in the latent space over the cache of latent rows.

All heads share one cached row per token: the whole of it (latent + rope) is K and its latent part V, so each tile is loaded once and
used twice. The query rows of a sequence, (query token, head), form blocks; each block is a program of its own, and the blocks of one
sequence and split run side by side, so that one read from memory serves them all through the L2. A split takes a contiguous part of
the keys, as in `decode`, and `combine` merges the splits. This is the portable form of the kernel; `mla_decode_wave` is the one
for CDNA, and `mla_decode_wide` that for CDNA and many heads.
"""

from __future__ import annotations

from functools import lru_cache, partial

import triton
import triton.language as tl
from torch import Tensor

from tritonattn.paths import launch, mla_decode_wave, mla_decode_wide
from tritonattn.paths.combine import run_combine, take_parts
from tritonattn.paths.cut import run_cut
from tritonattn.plan import LOG2E, UNLIMITED, DecodePlan, DecodeWork, compute_dtype, least_contraction, power_of_two, unaligned_row
from tritonattn.plan import descale as descale_of
from tritonattn.problem import AttnProblem, MlaParams, split_head_size
from tritonattn.scratch import Scratch
from tritonattn.tile import kv_load, mask, seqlens, softmax, store
from tritonattn.tile.kv_load import convert_once, descale, load_2d, plain_rows, upcast
from tritonattn.tuning.arch import detect
from tritonattn.tuning.table import Row


@triton.jit
def tile_pages(table, n, hi, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Block ids of the keys [n, n + BLOCK_N), see `kv_load.page_ids`; a single one where a tile cannot straddle pages."""
    if BLOCK_SIZE % BLOCK_N == 0:
        return kv_load.page_ids(table, n, hi, True, BLOCK_SIZE)
    else:
        return kv_load.page_ids(table, n + tl.arange(0, BLOCK_N), hi, True, BLOCK_SIZE)


@triton.jit
def weigh(q0, q1, qr, kv0, kv1, kr, keys, row_lo, row_hi, m, l, scale, rope_scale, L1: tl.constexpr, MASKED: tl.constexpr):
    """One tile of keys into the running maximum and sums, see `softmax.online_step`; the scales take products to log2 units."""
    s = tl.dot(q0, tl.trans(kv0), input_precision="ieee") * scale
    if L1 > 0:
        s += tl.dot(q1, tl.trans(kv1), input_precision="ieee") * scale
    s += tl.dot(qr, tl.trans(kr), input_precision="ieee") * rope_scale
    if MASKED:
        s = tl.where(mask.tile_mask(keys[None, :], row_lo[:, None], row_hi[:, None], False), s, softmax.NEG_INF)
    return softmax.online_step(s, m, l, 1.0, MASKED)


@triton.jit
def mla_tile(
    q0, q1, qr, acc0, acc1, m, l, kv_cache, pages, n, hi, row_lo, row_hi, scale, rope_scale, stride_kv_block, stride_kv_token,
    BLOCK_SIZE: tl.constexpr, L0: tl.constexpr, L1: tl.constexpr, LATENT: tl.constexpr, R: tl.constexpr, ROPE: tl.constexpr,
    VEC: tl.constexpr, BLOCK_N: tl.constexpr, SCORES_ONCE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Keys [n, n + BLOCK_N) into the state of the rows. MASKED tiles read the last key below `hi` for those from there on, and apply the mask."""
    COMPUTE: tl.constexpr = q0.dtype
    keys = tl.arange(0, BLOCK_N)
    live = keys
    if MASKED:
        live = tl.minimum(keys, hi - 1 - n)
    # Within one page the offsets in a tile are the same for all tiles.
    if BLOCK_SIZE % BLOCK_N == 0:
        base = kv_cache + plain_rows(pages, n, stride_kv_block, stride_kv_token, BLOCK_SIZE, VEC)
        rows = live * (stride_kv_token * VEC)
    else:
        base = kv_cache
        rows = plain_rows(pages, n + live, stride_kv_block, stride_kv_token, BLOCK_SIZE, VEC)
    c0 = tl.arange(0, L0)
    cr = tl.arange(0, R)
    kv0 = convert_once(load_2d(base, rows, c0, None, c0 < LATENT, False, False), COMPUTE)
    kv1 = kv0
    if L1 > 0:
        c1 = tl.arange(0, L1)
        kv1 = convert_once(load_2d(base + L0, rows, c1, None, c1 < LATENT - L0, False, L0 + L1 > LATENT), COMPUTE)
    kr = convert_once(load_2d(base + LATENT, rows, cr, None, cr < ROPE, False, R > ROPE), COMPUTE)
    # Where a product flows into another, Triton gives all warps to the rows; if those are too few, warps repeat each other's scores.
    # It does not look past control flow: within a branch that is always taken, the scores are shared out among all warps.
    if not SCORES_ONCE or n >= 0:
        p, alpha, m, l = weigh(q0, q1, qr, kv0, kv1, kr, n + keys, row_lo, row_hi, m, l, scale, rope_scale, L1, MASKED)
        p = p.to(COMPUTE)
    else:
        alpha = m
        p = tl.broadcast_to(m[:, None], [m.shape[0], BLOCK_N]).to(COMPUTE)
    acc0 = tl.dot(p, kv0, acc0 * alpha[:, None], input_precision="ieee")
    if L1 > 0:
        acc1 = tl.dot(p, kv1, acc1 * alpha[:, None], input_precision="ieee")
    return acc0, acc1, m, l


@launch.kernel
def mla_decode(
    # outputs; part_*: see `tile.store`, where a sequence has more than one split
    out, lse, part_out, part_lse,
    # inputs; q_rope None: it follows the latent part in the rows of q
    q, q_rope, kv_cache, q_descale, kv_descale, rope_descale,
    # metadata, int32; cu_seqlens_q None: sequence i has the i-th max_seqlen_q query tokens; work: see `seqlens.decode_item`
    cu_seqlens_q, seq_lens, block_table, work,
    # strides, in units of VEC elements but for lse and table
    stride_q_token, stride_q_head, stride_rope_token, stride_rope_head, stride_kv_block, stride_kv_token,
    stride_out_token, stride_out_head, stride_lse_head, stride_table,
    # scalars; kv_scale, rope_scale: the host parts of the descales
    num_splits, max_seqlen_q, qk_scale, kv_scale, rope_scale, window_right,
    # problem; LATENT = L0 + (L1, padded), ROPE (padded to R)
    NUM_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, L0: tl.constexpr, L1: tl.constexpr, LATENT: tl.constexpr,
    R: tl.constexpr, ROPE: tl.constexpr, VEC: tl.constexpr, VEC_Q: tl.constexpr, VEC_OUT: tl.constexpr,
    COMPUTE: tl.constexpr, SPLIT: tl.constexpr,
    # tile
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr, SCORES_ONCE: tl.constexpr,
    TAIL_APART: tl.constexpr,
):  # fmt: skip
    row0 = tl.program_id(0) * ROWS
    seq, split, splits, place = seqlens.decode_item(work, num_splits)
    if work is not None:
        if splits == 0:
            return
    k_len = tl.load(seq_lens + seq)
    q_start, q_len = seqlens.query_span(cu_seqlens_q, seq, max_seqlen_q)
    if row0 >= q_len * NUM_HEADS:
        return

    rows = row0 + tl.arange(0, ROWS)
    query = rows // NUM_HEADS
    head = rows % NUM_HEADS
    row_ok = query < q_len
    diag = k_len - q_len
    row_last = tl.minimum(row0 + ROWS, q_len * NUM_HEADS) - 1
    lo, hi = mask.visible(row0 // NUM_HEADS, row_last // NUM_HEADS, diag, k_len, k_len, window_right)
    begin, end = mask.split_bounds(lo, hi, split, splits, BLOCK_N)
    hi = end
    row_lo, row_hi = mask.row_limits(query, diag, k_len, k_len, window_right)
    row_hi = tl.minimum(row_hi, hi)

    m = tl.full([ROWS], softmax.NEG_INF, tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc0 = tl.zeros([ROWS, L0], tl.float32)
    acc1 = l
    c0 = tl.arange(0, L0)
    if L1 > 0:
        acc1 = tl.zeros([ROWS, L1], tl.float32)
        c1 = tl.arange(0, L1)

    kv_scale *= descale(kv_descale, 0, 0)
    tokens = (q_start + query).to(tl.int64)
    if begin < hi:
        cr = tl.arange(0, R)
        q_rows = (tokens * stride_q_token + head * stride_q_head) * VEC_Q
        q0 = upcast(load_2d(q, q_rows, c0, row_ok, c0 < LATENT, True, False), COMPUTE)
        q1 = q0
        if L1 > 0:
            q1 = upcast(load_2d(q + L0, q_rows, c1, row_ok, c1 < LATENT - L0, True, L0 + L1 > LATENT), COMPUTE)
        if q_rope is None:
            qr = load_2d(q + LATENT, q_rows, cr, row_ok, cr < ROPE, True, R > ROPE)
        else:
            rope_rows = (tokens * stride_rope_token + head * stride_rope_head) * VEC_Q
            qr = load_2d(q_rope, rope_rows, cr, row_ok, cr < ROPE, True, R > ROPE)
        qr = upcast(qr, COMPUTE)
        scale = qk_scale * descale(q_descale, 0, 0)
        rope_scale *= scale * descale(rope_descale, 0, 0)
        scale *= kv_scale
        table = block_table + seq.to(tl.int64) * stride_table
        parts = tl.zeros([ROWS, BLOCK_N], tl.float32)

        # Tiles that all rows see whole need no mask; with TAIL_APART they have a loop of their own. The ids of the next tile's pages are
        # carried through the loops, see `decode`.
        inner_end = begin
        if TAIL_APART:
            _, seen_by_all = mask.visible(row0 // NUM_HEADS, row0 // NUM_HEADS, diag, k_len, k_len, window_right)
            inner_end += tl.maximum(tl.minimum(seen_by_all, hi) - begin, 0) // BLOCK_N * BLOCK_N
        pages = tile_pages(table, begin, hi, BLOCK_SIZE, BLOCK_N)
        if TAIL_APART:
            for n in tl.range(begin, inner_end, BLOCK_N, num_stages=NUM_STAGES):
                next_pages = tile_pages(table, n + BLOCK_N, hi, BLOCK_SIZE, BLOCK_N)
                acc0, acc1, m, parts = mla_tile(
                    q0, q1, qr, acc0, acc1, m, parts, kv_cache, pages, n, hi, row_lo, row_hi, scale, rope_scale, stride_kv_block,
                    stride_kv_token, BLOCK_SIZE, L0, L1, LATENT, R, ROPE, VEC, BLOCK_N, SCORES_ONCE, False,
                )  # fmt: skip
                pages = next_pages
        for n in tl.range(inner_end, hi, BLOCK_N, num_stages=NUM_STAGES):
            next_pages = tile_pages(table, n + BLOCK_N, hi, BLOCK_SIZE, BLOCK_N)
            acc0, acc1, m, parts = mla_tile(
                q0, q1, qr, acc0, acc1, m, parts, kv_cache, pages, n, hi, row_lo, row_hi, scale, rope_scale, stride_kv_block,
                stride_kv_token, BLOCK_SIZE, L0, L1, LATENT, R, ROPE, VEC, BLOCK_N, SCORES_ONCE, True,
            )  # fmt: skip
            pages = next_pages
        l = tl.sum(parts, 1)

    inverse, lse_row = softmax.finish(m, l)
    inverse = inverse * kv_scale
    acc0 = acc0 * inverse[:, None]
    if L1 > 0:
        acc1 = acc1 * inverse[:, None]
    part = store.part_rows(place, query, head, max_seqlen_q, NUM_HEADS)
    if not SPLIT:
        store.store_result(out, lse, tokens, head, row_ok, acc0, acc1, lse_row, stride_out_token, stride_out_head, stride_lse_head, VEC_OUT, L0, L1, LATENT)
    elif work is None:
        store.store_part(part_out, part_lse, part, row_ok, acc0, acc1, lse_row, L0, L1, LATENT)
    elif splits > 1:
        store.store_part(part_out, part_lse, part, row_ok, acc0, acc1, lse_row, L0, L1, LATENT)
    else:
        store.store_result(out, lse, tokens, head, row_ok, acc0, acc1, lse_row, stride_out_token, stride_out_head, stride_lse_head, VEC_OUT, L0, L1, LATENT)


def run_mla_decode(
    problem: AttnProblem, params: MlaParams, q: Tensor, q_rope: Tensor | None, kv_cache: Tensor, out: Tensor, lse: Tensor | None, *,
    cu_seqlens_q: Tensor | None, seq_lens: Tensor, block_table: Tensor, num_seqs: int, max_seqlen_q: int, plan: DecodePlan,
    scratch: Scratch, work: DecodeWork | None = None,
) -> None:  # fmt: skip
    """q [T, H, latent + rope], or [T, H, latent] beside q_rope [T, H, rope]; the rest as in `run_decode`."""
    splits = plan.num_splits
    if not num_seqs or not q.shape[0]:
        return
    if work is None and plan.cut is not None:
        work = run_cut(plan.cut, seq_lens, cu_seqlens_q, num_seqs=num_seqs, max_seqlen_q=max_seqlen_q, window_left=UNLIMITED, scratch=scratch)
    over = (splits, num_seqs) if work is None else (work.num_items, 1)
    part_out = part_lse = None
    if splits > 1 or work is not None:
        part_out, part_lse = take_parts(problem, splits * num_seqs if work is None else work.num_parts, max_seqlen_q, scratch)
    rope = q if q_rope is None else q_rope
    vec, vec_q, vec_out = launch.vec_width(kv_cache), launch.vec_width(q, rope), launch.vec_width(out)
    q_scale, kv_scale = descale_of(params.q_descale), descale_of(params.kv_descale)
    rope_scale = descale_of(params.kv_descale if params.rope_descale is None else params.rope_descale)
    flags = {"VEC": vec, "VEC_Q": vec_q, "VEC_OUT": vec_out, "SPLIT": part_out is not None, "ROWS": plan.rows}
    row = plan.row if vec > 1 else unaligned_row(detect(q.device), problem, plan.rows)
    start, static = _form(row, problem, flags, q, kv_cache)
    with launch.on(q, row):
        start(
            (plan.row_blocks, *over),
            (
                out, lse, part_out, part_lse,
                q, q_rope, kv_cache, q_scale.pointer, kv_scale.pointer, rope_scale.pointer,
                cu_seqlens_q, seq_lens, block_table, None if work is None else work.items,
                q.stride(0) // vec_q, q.stride(1) // vec_q, rope.stride(0) // vec_q, rope.stride(1) // vec_q,
                kv_cache.stride(0) // vec, kv_cache.stride(1) // vec,
                out.stride(0) // vec_out, out.stride(1) // vec_out, 0 if lse is None else lse.stride(0), block_table.stride(0),
                splits, max_seqlen_q, params.softmax_scale * LOG2E * q_scale.factor, kv_scale.factor, rope_scale.factor,
                0 if params.causal else UNLIMITED,
            ),
            flags, static, row,
        )  # fmt: skip
        if part_out is not None and part_lse is not None:
            run_combine(
                problem, out, lse, part_out, part_lse, cu_seqlens_q=cu_seqlens_q, num_seqs=num_seqs, max_seqlen_q=max_seqlen_q,
                num_splits=splits, work=work,
            )  # fmt: skip


def _form(row: Row, problem: AttnProblem, flags: dict, q: Tensor, kv_cache: Tensor):
    """(what launches it, its constexprs) of the form that the table row asks for, or of the portable one where `wide` does not serve."""
    form = row.config["form"]
    static = _static(row, problem)
    if form == "wave":
        return mla_decode_wave.launch_wave, static
    if form == "wide":
        if mla_decode_wide.serves(static, flags, q, kv_cache):
            return mla_decode_wide.launch_wide, static
        static = _static(row, problem, most_keys=32)
    return partial(launch.run, mla_decode), static


@lru_cache(maxsize=1024)
def _static(row: Row, problem: AttnProblem, most_keys: int | None = None) -> dict:
    """most_keys: the largest tile, where the row's is meant for a form that keeps none in LDS."""
    latent, rope = problem.v_head_size, problem.head_size - problem.v_head_size
    l0, _, l1 = split_head_size(latent)
    l1 = max(l1, least_contraction(row)) if l1 else 0
    tile = {name: value for name, value in {"SCORES_ONCE": False, "TAIL_APART": False, **row.constexprs}.items() if name != "BLOCK_H"}
    if most_keys:
        tile["BLOCK_N"] = min(tile["BLOCK_N"], most_keys)
        for name in ("CHEAP_P", "ROWS_IN_LOOP"):
            tile.pop(name, None)
    return {
        "NUM_HEADS": problem.num_q_heads, "BLOCK_SIZE": problem.block_size, "L0": l0, "L1": l1, "LATENT": latent,
        "R": power_of_two(max(rope, least_contraction(row))), "ROPE": rope, "COMPUTE": launch.TRITON_DTYPES[compute_dtype(problem)], **tile,
    }  # fmt: skip
