"""MLA decode for CDNA with many heads: the waves of a program share out tokens for the scores and columns for the output.

With 64 query rows a program the accumulator, [rows, latent], no longer fits one wave, so here each wave holds a run of its columns. In
the first product a wave takes 32 tokens of its own for all rows; P goes through LDS once, 8 KiB at a time, and in the second product a
wave takes all tokens for its columns. K, V and Q go from memory straight into matrix operands, as in `mla_decode_wave`: a fragment that
was loaded serves all rows, 32 to a matrix instruction. The maximum of a row is one for all waves, and nothing is left to merge at the end.

P is exchanged and V is loaded in four pieces of a tile, which bounds the registers. The tokens of a piece follow one another, eight to a
wave. A piece that is a page has a scalar base, and its rows are reached by 32-bit offsets.

`again` is zero, but not to the compiler: it ties addresses to the loop, which would else be worked out before it and held in registers.
"""

import triton
import triton.language as tl

from tritonattn.paths import launch
from tritonattn.paths.decode_wave import pick_order
from tritonattn.paths.mla_decode_wave import rope_scaled
from tritonattn.tile import mask, seqlens, softmax, store
from tritonattn.tile.kv_load import descale
from tritonattn.tile.wave_load import on_axis, page_offset

LANES = tl.constexpr(32)  # rows or columns of a matrix instruction, one to a lane; its two lane groups hold different k
RUN = tl.constexpr(8)  # consecutive k of a lane: 16 bytes
STEP = tl.constexpr(16)  # tokens of the second product that the two lane groups hold at a time
SHARE = tl.constexpr(8)  # tokens of a wave in a piece
CHUNK = tl.constexpr(64)  # columns of the first product in one go
LATENT = tl.constexpr(512)
MAX_STRIDE = tl.constexpr(1 << 16)  # of a cached token, in units of VEC: offsets within a piece are then known to fit 32 bits


@triton.jit
def operand(rows, WIDTH: tl.constexpr, COUNT: tl.constexpr, WAVES: tl.constexpr, ORD: tl.constexpr):
    """[WAVES, COUNT, WIDTH] at the pointers `rows`, whose lanes lie on axis 4 * ORD and tiles of 32 rows on axis 3 - 2 * ORD."""
    group = on_axis(tl.arange(0, 2), 1 + 2 * ORD, 6) * RUN
    step = on_axis(tl.arange(0, WIDTH // STEP), 4 - 4 * ORD, 6) * STEP
    tile = tl.load(rows + (group + step) + on_axis(tl.arange(0, RUN), 5, 6))
    return tile.permute(2, 3 - 2 * ORD, 4 * ORD, 4 - 4 * ORD, 1 + 2 * ORD, 5).reshape(WAVES, COUNT, WIDTH)


@triton.jit
def row_pointers(
    q, row0, row_end, q_start, stride_token, stride_head, NUM_HEADS: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr, WAVES: tl.constexpr,
    ORD: tl.constexpr,
):  # fmt: skip
    """Of the rows (query token, head) from row0 on, the same for each wave; rows from row_end on repeat the first."""
    lane = on_axis(tl.arange(0, LANES), 4 * ORD, 6) + on_axis(tl.arange(0, ROWS // LANES), 3 - 2 * ORD, 6) * LANES
    row = row0 + lane + on_axis(tl.arange(0, WAVES), 2, 6) * 0
    row = tl.where(row < row_end, row, row0)
    return q + ((q_start + row // NUM_HEADS).to(tl.int64) * stride_token + row % NUM_HEADS * stride_head) * VEC


@triton.jit
def key_pointers(
    kv_cache, table, n, hi, stride_kv_block, stride_kv_token, BLOCK_SIZE: tl.constexpr, VEC: tl.constexpr, WAVES: tl.constexpr, ORD: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Of each wave's 32 tokens, SHARE of every piece. MASKED: tokens from `hi` on give way to the last one before."""
    t = on_axis(tl.arange(0, LANES), 4 * ORD, 6)
    n = n + t // SHARE * (SHARE * WAVES) + on_axis(tl.arange(0, WAVES), 2, 6) * SHARE + t % SHARE
    if MASKED:
        n = tl.minimum(n, hi - 1)
    return kv_cache + (page_offset(table, n // BLOCK_SIZE, stride_kv_block, VEC) + n % BLOCK_SIZE * stride_kv_token * VEC)


@triton.jit
def tile_tokens(WAVES: tl.constexpr):
    """[WAVES, 32] token, relative to the tile, of each score."""
    t = tl.arange(0, LANES)[None, :]
    return t // SHARE * (SHARE * WAVES) + tl.arange(0, WAVES)[:, None] * SHARE + t % SHARE


@triton.jit
def add_values(
    acc, p, kv_cache, table, n, hi, again, stride_kv_block, stride_kv_token, BLOCK_SIZE: tl.constexpr, VEC: tl.constexpr, PIECE: tl.constexpr,
    ROWS: tl.constexpr, WAVES: tl.constexpr, ORD: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """acc + p @ the latent columns of the PIECE tokens from n on, in the order of `store_rows`; p [WAVES, ROWS, SHARE].

    MASKED: tokens from `hi` on give way to live ones.
    """
    VX: tl.constexpr = LATENT // (WAVES * LANES)
    PAGED: tl.constexpr = PIECE if BLOCK_SIZE == PIECE else 16  # tokens that share a page
    h = on_axis(tl.arange(0, PIECE // STEP), 4 - 4 * ORD, 6) * STEP
    r = on_axis(tl.arange(0, RUN), 3 - 2 * ORD, 6)
    g = on_axis(tl.arange(0, 2), 1 + 2 * ORD, 6) * RUN
    column = on_axis(tl.arange(0, LANES), 4 * ORD, 6) * VX + on_axis(tl.arange(0, WAVES), 2, 6) * (VX * LANES)
    first = n if PAGED == PIECE else n + h
    last = hi - 1 - first
    if MASKED:
        first = tl.minimum(first, (hi - 1) // PAGED * PAGED)
    base = kv_cache + page_offset(table, first // BLOCK_SIZE, stride_kv_block, VEC) + first % BLOCK_SIZE * stride_kv_token * VEC
    if PAGED == PIECE:
        base = tl.multiple_of(base, VEC * kv_cache.dtype.element_ty.primitive_bitwidth // 8)
    stride = ((stride_kv_token & (MAX_STRIDE - 1)) + (again & 1)) * VEC
    if MASKED:
        last = tl.minimum(tl.maximum(last, 0), PAGED - 1) & (PAGED - 1)
        offset = tl.minimum(h % PAGED + g + r, last) * stride
    else:
        offset = g * stride + (h % PAGED + r) * stride
    tile = tl.load(base + (offset + column + on_axis(tl.arange(0, VX), 5, 6)))
    if ORD == 0:  # column lane, group, wave, r, h, VX
        tile = tile.permute(4, 1, 3, 5, 2, 0)
    else:  # h, r, wave, group, column lane, VX
        tile = tile.permute(0, 3, 1, 5, 2, 4)
    p = p.permute(1, 0, 2).reshape(ROWS, PIECE)
    return tl.dot(p, tile.reshape(PIECE, LATENT), acc, input_precision="ieee")


@triton.jit
def halves(p, WAVES: tl.constexpr, ROWS: tl.constexpr, COUNT: tl.constexpr):
    """p [WAVES, ROWS, COUNT] in two, by its last dimension."""
    return p.reshape(WAVES, ROWS, 2, COUNT // 2).permute(0, 1, 3, 2).split()


@triton.jit
def wide_tile(
    q, q_rope, acc, m, l, kv_cache, table, n, row0, row_end, q_start, hi, diag, k_len, window_right, scale, rope_scale,
    stride_q_token, stride_q_head, stride_rope_token, stride_rope_head, stride_kv_block, stride_kv_token,
    NUM_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, VEC: tl.constexpr, VEC_Q: tl.constexpr, ROWS: tl.constexpr, WAVES: tl.constexpr,
    ORD: tl.constexpr, CHEAP_P: tl.constexpr, COMPUTE: tl.constexpr, ROPE_SCALED: tl.constexpr, ROWS_IN_LOOP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Keys [n, n + 32 * WAVES) into the state."""
    PIECE: tl.constexpr = 8 * WAVES
    again = n >> 30
    k = key_pointers(kv_cache, table, n, hi, stride_kv_block, stride_kv_token, BLOCK_SIZE, VEC, WAVES, ORD, MASKED)
    first = row0 + again if ROWS_IN_LOOP else row0
    a = row_pointers(q_rope + again * VEC_Q, first, row_end, q_start, stride_rope_token, stride_rope_head, NUM_HEADS, VEC_Q, ROWS, WAVES, ORD)
    s = tl.zeros([WAVES, ROWS, LANES], tl.float32)
    x = operand(a, CHUNK, ROWS, WAVES, ORD).to(COMPUTE)
    y = operand(k + LATENT, CHUNK, LANES, WAVES, ORD).to(COMPUTE)
    s = tl.dot(x, tl.permute(y, (0, 2, 1)), s, input_precision="ieee")
    if ROPE_SCALED:
        s *= rope_scale
    a = row_pointers(q + again * VEC_Q, row0, row_end, q_start, stride_q_token, stride_q_head, NUM_HEADS, VEC_Q, ROWS, WAVES, ORD)
    for start in tl.static_range(0, LATENT, CHUNK):
        x = operand(a + start, CHUNK, ROWS, WAVES, ORD).to(COMPUTE)
        y = operand(k + start, CHUNK, LANES, WAVES, ORD).to(COMPUTE)
        s = tl.dot(x, tl.permute(y, (0, 2, 1)), s, input_precision="ieee")

    if MASKED:
        keys = n + tile_tokens(WAVES)[:, None, :]
        rows = row0 + again + tl.arange(0, ROWS)
        row_lo, row_hi = mask.row_limits(rows // NUM_HEADS, diag, hi, k_len, window_right)
        s = tl.where(mask.tile_mask(keys, row_lo[None, :, None], row_hi[None, :, None], False), s, softmax.NEG_INF)
    m_new = tl.maximum(m, tl.max(tl.max(s, 2), 0) * scale)
    shift = softmax.safe_max(m_new) if MASKED else m_new
    alpha = tl.math.exp2(m - shift)
    # Always taken, which LLVM sees. Where a product flows into another, Triton gives the waves to the rows, of which there are too few for
    # them; it does not look past control flow. The other branch gives it no reason to move the exchange of P into this one.
    if n >= 0:
        p = tl.math.exp2(s * scale - shift[None, :, None])
        l = l * alpha[None, :] + tl.sum(p, 2)
        p = softmax.round_p(p, COMPUTE, CHEAP_P)
    else:
        p = s.to(COMPUTE)

    acc *= alpha[:, None]
    p0, p2 = halves(p, WAVES, ROWS, 32)
    p0, p1 = halves(p0, WAVES, ROWS, 16)
    p2, p3 = halves(p2, WAVES, ROWS, 16)
    acc = add_values(acc, p0, kv_cache, table, n, hi, again, stride_kv_block, stride_kv_token, BLOCK_SIZE, VEC, PIECE, ROWS, WAVES, ORD, MASKED)
    acc = add_values(acc, p1, kv_cache, table, n + PIECE, hi, again, stride_kv_block, stride_kv_token, BLOCK_SIZE, VEC, PIECE, ROWS, WAVES, ORD, MASKED)
    acc = add_values(acc, p2, kv_cache, table, n + 2 * PIECE, hi, again, stride_kv_block, stride_kv_token, BLOCK_SIZE, VEC, PIECE, ROWS, WAVES, ORD, MASKED)
    acc = add_values(acc, p3, kv_cache, table, n + 3 * PIECE, hi, again, stride_kv_block, stride_kv_token, BLOCK_SIZE, VEC, PIECE, ROWS, WAVES, ORD, MASKED)
    return acc, m_new, l


@triton.jit
def store_rows(out, rows, row_ok, acc, lse, lse_rows, lse_ok, lse_row, WAVES: tl.constexpr):
    """acc, whose position j * (LATENT / VX) + i holds column i * VX + j: a lane of `add_values` reads VX columns side by side."""
    VX: tl.constexpr = LATENT // (WAVES * LANES)
    acc = acc.to(out.dtype.element_ty).reshape(acc.shape[0], VX, LATENT // VX).permute(0, 2, 1).reshape(acc.shape[0], LATENT)
    tl.store(out + rows[:, None] + tl.arange(0, LATENT)[None, :], acc, mask=row_ok[:, None])
    if lse is not None:
        tl.store(lse + lse_rows, lse_row, mask=lse_ok)


@launch.kernel(never=("kv_cache",))
def mla_decode_wide(
    # as in `mla_decode`
    out, lse, part_out, part_lse,
    q, q_rope, kv_cache, q_descale, kv_descale, rope_descale,
    cu_seqlens_q, seq_lens, block_table, work,
    stride_q_token, stride_q_head, stride_rope_token, stride_rope_head, stride_kv_block, stride_kv_token,
    stride_out_token, stride_out_head, stride_lse_head, stride_table,
    num_splits, max_seqlen_q, qk_scale, kv_scale, rope_scale, window_right,
    NUM_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    VEC: tl.constexpr, VEC_Q: tl.constexpr, VEC_OUT: tl.constexpr, COMPUTE: tl.constexpr, SPLIT: tl.constexpr, ROPE_SCALED: tl.constexpr,
    # tile
    ROWS: tl.constexpr, NUM_STAGES: tl.constexpr, WAVES: tl.constexpr, ORD: tl.constexpr, CHEAP_P: tl.constexpr, BLOCK_N: tl.constexpr,
    ROWS_IN_LOOP: tl.constexpr,
):  # fmt: skip
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
    tl.assume(begin >= 0)
    tl.assume(inner_end >= 0)

    acc = tl.zeros([ROWS, LATENT], tl.float32)
    m = tl.full([ROWS], softmax.NEG_INF, tl.float32)
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
        acc, m, l = wide_tile(
            q, rope, acc, m, l, kv, table, n, row0, row_end, q_start, hi, diag, k_len, window_right, scale, rope_ratio,
            stride_q_token, stride_q_head, stride_rope_token, stride_rope_head, stride_kv_block, stride_kv_token,
            NUM_HEADS, BLOCK_SIZE, VEC, VEC_Q, ROWS, WAVES, ORD, CHEAP_P, COMPUTE, ROPE_SCALED, ROWS_IN_LOOP, False,
        )  # fmt: skip
    for n in tl.range(inner_end, hi, BLOCK_N, num_stages=NUM_STAGES):
        acc, m, l = wide_tile(
            q, rope, acc, m, l, kv, table, n, row0, row_end, q_start, hi, diag, k_len, window_right, scale, rope_ratio,
            stride_q_token, stride_q_head, stride_rope_token, stride_rope_head, stride_kv_block, stride_kv_token,
            NUM_HEADS, BLOCK_SIZE, VEC, VEC_Q, ROWS, WAVES, ORD, CHEAP_P, COMPUTE, ROPE_SCALED, ROWS_IN_LOOP, True,
        )  # fmt: skip

    rows = row0 + (hi >> 30) + tl.arange(0, ROWS)
    query = rows // NUM_HEADS
    head = rows % NUM_HEADS
    row_ok = rows < row_end
    part = store.part_rows(place, query, head, max_seqlen_q, NUM_HEADS)
    inverse, lse_row = softmax.finish(m, tl.sum(l, 0))
    acc *= (inverse * kv_scale)[:, None]
    tokens = (q_start + query).to(tl.int64)
    out_rows = (tokens * stride_out_token + head * stride_out_head) * VEC_OUT
    lse_rows = head.to(tl.int64) * stride_lse_head + tokens
    part_ok = row_ok & (lse_row != softmax.NEG_INF)
    log = lse_row * softmax.LN2
    if not SPLIT:
        store_rows(out, out_rows, row_ok, acc, lse, lse_rows, row_ok, log, WAVES)
    elif work is None:
        store_rows(part_out, part * LATENT, part_ok, acc, part_lse, part, row_ok, lse_row, WAVES)
    elif splits > 1:
        store_rows(part_out, part * LATENT, part_ok, acc, part_lse, part, row_ok, lse_row, WAVES)
    else:
        store_rows(out, out_rows, row_ok, acc, lse, lse_rows, row_ok, log, WAVES)


def serves(static, flags, q, kv_cache) -> bool:
    """Whether this form of the kernel takes a launch of `mla_decode`: 16-bit rows of 512 + 64, aligned, pages of whole STEPs."""
    return (
        q.dtype == kv_cache.dtype and q.element_size() == 2
        and static["LATENT"] == LATENT.value and static["ROPE"] == CHUNK.value and static["BLOCK_SIZE"] % STEP.value == 0
        and flags["VEC"] == flags["VEC_Q"] == 8 and flags["ROWS"] == 64 and kv_cache.stride(1) // flags["VEC"] < MAX_STRIDE.value
    )  # fmt: skip


def launch_wide(grid, args, flags, static, row):
    """As `launch.run(mla_decode, ...)` in the form of this file: takes what `mla_decode` takes and settles the rest of the constexprs."""
    static = launch.settled(static, row, lambda: _wide_static(static, row.options), mla_decode_wide)
    flags = {**flags, "ROPE_SCALED": rope_scaled(mla_decode_wide, args)}
    order = pick_order(mla_decode_wide, grid, args, {**flags, **static, **row.options})
    launch.run(mla_decode_wide, grid, args, {**flags, "ORD": order}, static, row)


def _wide_static(static, options) -> dict:
    names = ("NUM_HEADS", "BLOCK_SIZE", "COMPUTE", "NUM_STAGES", "CHEAP_P", "BLOCK_N", "ROWS_IN_LOOP")
    return {name: {"CHEAP_P": False, "ROWS_IN_LOOP": False, **static}[name] for name in names} | {"WAVES": options["num_warps"]}
