"""MLA decode for CDNA: every wave owns its own tokens, and K, V and P never touch LDS; see `decode_wave` and `mla_decode`.

A cached row is read twice, as an operand of each product: once in 64-byte segments as K, once whole as V, which is transposed in
registers; the second read hits the cache. The accumulator alone takes half of a wave's registers. So the queries stay out of them:
they are read again for every tile, from the L1 cache.
"""

import triton
import triton.language as tl

from tritonattn.paths import launch
from tritonattn.paths.decode_wave import P_LOG2, dot_split, pick_order, split_p, store_merged
from tritonattn.tile import mask, seqlens, softmax, store
from tritonattn.tile.kv_load import descale, exact, upcast
from tritonattn.tile.wave_load import halves, load_k_plain, load_q, load_v_plain, wave_tokens

CHUNK = tl.constexpr(128)  # columns that 16 lanes of 16 bytes read of a row; the latent is four of them


@triton.jit
def add_scores(
    s, q, kv_cache, table, n0, row0, row_end, q_start, lo, hi, stride_q_token, stride_q_head, stride_kv_block, stride_kv_token,
    NUM_HEADS: tl.constexpr, START: tl.constexpr, END: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, X: tl.constexpr,
    VEC: tl.constexpr, VEC_Q: tl.constexpr, ROWS: tl.constexpr, WAVES: tl.constexpr, TOKENS: tl.constexpr, ORD: tl.constexpr,
    COMPUTE: tl.constexpr, FP8: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """s + q @ columns START .. END of the cached rows, transposed; q points at the columns that meet them."""
    a = load_q(q, row0, row_end, q_start, stride_q_token, stride_q_head, NUM_HEADS, END - START, WIDTH, X, VEC_Q, WAVES, ROWS, ORD)
    k = load_k_plain(kv_cache, table, n0, lo, hi, stride_kv_block, stride_kv_token, START, END, WIDTH, BLOCK_SIZE, VEC, X, WAVES, WAVES, TOKENS, ORD, MASKED)
    if a.dtype.primitive_bitwidth == 8:
        a = exact(halves(a), COMPUTE)
    if FP8:
        k = exact(halves(k), COMPUTE)
    return tl.dot(upcast(a, COMPUTE), tl.permute(upcast(k, COMPUTE), (0, 2, 1)), s, input_precision="ieee")


@triton.jit
def add_values(
    acc, p, rest, alpha, kv_cache, table, n0, lo, hi, stride_kv_block, stride_kv_token, LATENT: tl.constexpr, START: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, X: tl.constexpr, VEC: tl.constexpr, WAVES: tl.constexpr, TOKENS: tl.constexpr, ORD: tl.constexpr,
    FP8: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """acc * alpha + (p + rest) @ columns START .. START + CHUNK of the cached rows."""
    v = load_v_plain(
        kv_cache, table, n0, lo, hi, stride_kv_block, stride_kv_token, LATENT, START, CHUNK, BLOCK_SIZE, VEC, X, WAVES, WAVES, TOKENS, ORD,
        8 if FP8 else 4, MASKED,
    )  # fmt: skip
    return dot_split(p, rest, v if FP8 else upcast(v, p.dtype), acc * alpha[:, :, None], FP8)


@triton.jit
def mla_tile(
    q, q_rope, acc0, acc1, acc2, acc3, m, l, top, kv_cache, table, n0, row0, row_end, q_start, lo, hi, row_lo, row_hi, scale, rope_scale,
    stride_q_token, stride_q_head, stride_rope_token, stride_rope_head, stride_kv_block, stride_kv_token,
    NUM_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, LATENT: tl.constexpr, R: tl.constexpr, ROPE: tl.constexpr,
    X: tl.constexpr, VEC: tl.constexpr, VEC_Q: tl.constexpr, ROWS: tl.constexpr, WAVES: tl.constexpr, TOKENS: tl.constexpr,
    ORD: tl.constexpr, CHEAP_P: tl.constexpr, COMPUTE: tl.constexpr, ROPE_SCALED: tl.constexpr, FP8: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Keys [n0, n0 + WAVES * TOKENS) into the state, TOKENS to each wave."""
    again = (n0 >> 30) * VEC_Q  # zero, but not to the compiler, which would load q once and keep it in registers
    s = tl.zeros([WAVES, ROWS, TOKENS], tl.float32)
    s = add_scores(
        s, q_rope + again, kv_cache, table, n0, row0, row_end, q_start, lo, hi, stride_rope_token, stride_rope_head, stride_kv_block,
        stride_kv_token, NUM_HEADS, LATENT, LATENT + ROPE, R, BLOCK_SIZE, X, VEC, VEC_Q, ROWS, WAVES, TOKENS, ORD, COMPUTE, FP8, MASKED,
    )  # fmt: skip
    if ROPE_SCALED:
        s *= rope_scale
    for start in tl.static_range(0, LATENT, CHUNK // 2):
        s = add_scores(
            s, q + again + start, kv_cache, table, n0, row0, row_end, q_start, lo, hi, stride_q_token, stride_q_head, stride_kv_block,
            stride_kv_token, NUM_HEADS, start, start + CHUNK // 2, CHUNK // 2, BLOCK_SIZE, X, VEC, VEC_Q, ROWS, WAVES, TOKENS, ORD, COMPUTE, FP8, MASKED,
        )  # fmt: skip
    if MASKED:
        keys = n0 + (tl.arange(0, WAVES) * TOKENS)[:, None, None] + wave_tokens(TOKENS, X, False)[None, None, :]
        s = tl.where(mask.tile_mask(keys, row_lo[None, :, None], row_hi[None, :, None], False), s, softmax.NEG_INF)
    if FP8:
        p, alpha, m, l, top = softmax.online_step_narrow(s, m, l, top, scale, MASKED, P_LOG2)
    else:
        p, alpha, m, l = softmax.online_step(s, m, l, scale, MASKED)
    rest = p
    if FP8:
        p, rest = split_p(p, kv_cache.dtype.element_ty)
    else:
        p = softmax.round_p(p, COMPUTE, CHEAP_P)
    acc0 = add_values(
        acc0, p, rest, alpha, kv_cache, table, n0, lo, hi, stride_kv_block, stride_kv_token, LATENT, 0 * CHUNK, BLOCK_SIZE, X, VEC, WAVES,
        TOKENS, ORD, FP8, MASKED,
    )  # fmt: skip
    acc1 = add_values(
        acc1, p, rest, alpha, kv_cache, table, n0, lo, hi, stride_kv_block, stride_kv_token, LATENT, 1 * CHUNK, BLOCK_SIZE, X, VEC, WAVES,
        TOKENS, ORD, FP8, MASKED,
    )  # fmt: skip
    acc2 = add_values(
        acc2, p, rest, alpha, kv_cache, table, n0, lo, hi, stride_kv_block, stride_kv_token, LATENT, 2 * CHUNK, BLOCK_SIZE, X, VEC, WAVES,
        TOKENS, ORD, FP8, MASKED,
    )  # fmt: skip
    acc3 = add_values(
        acc3, p, rest, alpha, kv_cache, table, n0, lo, hi, stride_kv_block, stride_kv_token, LATENT, 3 * CHUNK, BLOCK_SIZE, X, VEC, WAVES,
        TOKENS, ORD, FP8, MASKED,
    )  # fmt: skip
    return acc0, acc1, acc2, acc3, m, l, top


@triton.jit
def store_rows(
    out, rows, row_ok, acc0, acc1, acc2, acc3, scale, lse, lse_rows, lse_ok, lse_row, X: tl.constexpr, ROWS: tl.constexpr, WAVES: tl.constexpr,
):  # fmt: skip
    store_merged(out, rows, row_ok, acc0, scale, 0, CHUNK, CHUNK, CHUNK, False, X, ROWS, WAVES)
    store_merged(out + CHUNK, rows, row_ok, acc1, scale, 0, CHUNK, CHUNK, CHUNK, False, X, ROWS, WAVES)
    store_merged(out + 2 * CHUNK, rows, row_ok, acc2, scale, 0, CHUNK, CHUNK, CHUNK, False, X, ROWS, WAVES)
    store_merged(out + 3 * CHUNK, rows, row_ok, acc3, scale, 0, CHUNK, CHUNK, CHUNK, False, X, ROWS, WAVES)
    if lse is not None:
        tl.store(lse + lse_rows, lse_row, mask=lse_ok)


@launch.kernel(never=("kv_cache",))
def mla_decode_wave(
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
    # problem; ROPE (padded to R)
    NUM_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, LATENT: tl.constexpr, R: tl.constexpr, ROPE: tl.constexpr,
    X: tl.constexpr, VEC: tl.constexpr, VEC_Q: tl.constexpr, VEC_OUT: tl.constexpr, COMPUTE: tl.constexpr, SPLIT: tl.constexpr,
    ROPE_SCALED: tl.constexpr, FP8: tl.constexpr,
    # tile
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr, WAVES: tl.constexpr, ORD: tl.constexpr, CHEAP_P: tl.constexpr,
):  # fmt: skip
    tl.static_assert(LATENT == 4 * CHUNK and ROPE == R, "only rows of 512 + 64 columns")
    TOKENS: tl.constexpr = BLOCK_N // WAVES
    row0 = tl.program_id(0) * ROWS
    seq, split, splits, place = seqlens.decode_item(work, num_splits)
    if work is not None:
        if splits == 0:
            return
    k_len = tl.load(seq_lens + seq)
    q_start, q_len = seqlens.query_span(cu_seqlens_q, seq, max_seqlen_q)
    row_end = q_len * NUM_HEADS
    if row0 >= row_end:
        return

    diag = k_len - q_len
    row_first = row0 // NUM_HEADS
    row_last = (tl.minimum(row0 + ROWS, row_end) - 1) // NUM_HEADS
    lo, hi = mask.visible(row_first, row_last, diag, k_len, k_len, window_right)
    begin, hi = mask.split_bounds(lo, hi, split, splits, BLOCK_N)
    if SPLIT:
        if (split > 0) & (begin >= hi):
            rows = row0 + tl.arange(0, ROWS)
            part = store.part_rows(place, rows // NUM_HEADS, rows % NUM_HEADS, max_seqlen_q, NUM_HEADS)
            tl.store(part_lse + part, tl.full([ROWS], softmax.NEG_INF, tl.float32), mask=rows < row_end)
            return
    _, seen_by_all = mask.visible(row_first, row_first, diag, hi, k_len, window_right)
    inner_end = begin + tl.maximum(seen_by_all - begin, 0) // BLOCK_N * BLOCK_N

    acc0 = tl.zeros([WAVES, ROWS, CHUNK], tl.float32)
    acc1 = acc0
    acc2 = acc0
    acc3 = acc0
    m = tl.full([WAVES, ROWS], softmax.NEG_INF, tl.float32)
    top = m
    l = tl.zeros([WAVES, ROWS], tl.float32)
    kv_scale *= descale(kv_descale, 0, 0)
    scale = qk_scale * descale(q_descale, 0, 0) * kv_scale
    rope_ratio = rope_scale * descale(rope_descale, 0, 0) / kv_scale
    if q_rope is None:
        rope = q + LATENT
    else:
        rope = q_rope

    table = block_table + seq.to(tl.int64) * stride_table
    kv = tl.multiple_of(kv_cache + (k_len >> 31).to(tl.int64) * VEC, VEC * kv_cache.dtype.element_ty.primitive_bitwidth // 8)
    for n in tl.range(begin, inner_end, BLOCK_N, num_stages=NUM_STAGES):
        acc0, acc1, acc2, acc3, m, l, top = mla_tile(
            q, rope, acc0, acc1, acc2, acc3, m, l, top, kv, table, n, row0, row_end, q_start, begin, hi, 0, 0, scale, rope_ratio,
            stride_q_token, stride_q_head, stride_rope_token, stride_rope_head, stride_kv_block, stride_kv_token,
            NUM_HEADS, BLOCK_SIZE, LATENT, R, ROPE, X, VEC, VEC_Q, ROWS, WAVES, TOKENS, ORD, CHEAP_P, COMPUTE, ROPE_SCALED, FP8, False,
        )  # fmt: skip
    # What the rows are is worked out where it is needed, so as not to hold registers in a loop; the compiler cannot tell that the shifts give 0.
    rows = row0 + (inner_end >> 30) + tl.arange(0, ROWS)
    row_lo, row_hi = mask.row_limits(rows // NUM_HEADS, diag, hi, k_len, window_right)
    for n in tl.range(inner_end, hi, BLOCK_N, num_stages=NUM_STAGES):
        acc0, acc1, acc2, acc3, m, l, top = mla_tile(
            q, rope, acc0, acc1, acc2, acc3, m, l, top, kv, table, n, row0, row_end, q_start, begin, hi, row_lo, row_hi, scale, rope_ratio,
            stride_q_token, stride_q_head, stride_rope_token, stride_rope_head, stride_kv_block, stride_kv_token,
            NUM_HEADS, BLOCK_SIZE, LATENT, R, ROPE, X, VEC, VEC_Q, ROWS, WAVES, TOKENS, ORD, CHEAP_P, COMPUTE, ROPE_SCALED, FP8, True,
        )  # fmt: skip

    rows = row0 + (hi >> 30) + tl.arange(0, ROWS)
    query = rows // NUM_HEADS
    head = rows % NUM_HEADS
    row_ok = rows < row_end
    part = store.part_rows(place, query, head, max_seqlen_q, NUM_HEADS)
    weight, m, l = softmax.rejoin(m, l)
    inverse, lse_row = softmax.finish(m, l)
    inverse = inverse * kv_scale
    acc0 *= weight[:, :, None]
    acc1 *= weight[:, :, None]
    acc2 *= weight[:, :, None]
    acc3 *= weight[:, :, None]
    tokens = (q_start + query).to(tl.int64)
    out_rows = (tokens * stride_out_token + head * stride_out_head) * VEC_OUT
    lse_rows = head.to(tl.int64) * stride_lse_head + tokens
    part_ok = row_ok & (lse_row != softmax.NEG_INF)
    log = lse_row * softmax.LN2
    if not SPLIT:
        store_rows(out, out_rows, row_ok, acc0, acc1, acc2, acc3, inverse, lse, lse_rows, row_ok, log, X, ROWS, WAVES)
    elif work is None:
        store_rows(part_out, part * LATENT, part_ok, acc0, acc1, acc2, acc3, inverse, part_lse, part, row_ok, lse_row, X, ROWS, WAVES)
    elif splits > 1:
        store_rows(part_out, part * LATENT, part_ok, acc0, acc1, acc2, acc3, inverse, part_lse, part, row_ok, lse_row, X, ROWS, WAVES)
    else:
        store_rows(out, out_rows, row_ok, acc0, acc1, acc2, acc3, inverse, lse, lse_rows, row_ok, log, X, ROWS, WAVES)


def rope_scaled(kernel, args) -> bool:
    """Whether the rope columns have a scale of their own."""
    facts = dict(zip(kernel.arg_names, args, strict=False))
    return facts["rope_descale"] is not facts["kv_descale"] or facts["rope_scale"] != facts["kv_scale"]


def launch_wave(grid, args, flags, static, row):
    """As `launch.run(mla_decode, ...)` in the form of this file: takes what `mla_decode` takes and settles the rest of the constexprs."""
    kv_cache = args[mla_decode_wave.arg_names.index("kv_cache")]
    static = launch.settled(static, row, lambda: _wave_static(static, row.options, kv_cache.element_size()), mla_decode_wave)
    flags = {**flags, "ROPE_SCALED": rope_scaled(mla_decode_wave, args)}
    order = pick_order(mla_decode_wave, grid, args, {**flags, **static, **row.options})
    launch.run(mla_decode_wave, grid, args, {**flags, "ORD": order}, static, row)


def _wave_static(static, options, itemsize) -> dict:
    kept = {name: value for name, value in static.items() if name not in ("L0", "L1", "SCORES_ONCE", "TAIL_APART")}
    return {"CHEAP_P": False, **kept, "X": 16 // itemsize, "FP8": itemsize == 1, "WAVES": options["num_warps"]}
