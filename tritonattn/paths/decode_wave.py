"""Decode for CDNA: every wave owns its own tokens, and K, V and P never touch LDS.

The same work as `decode`, program by program, so that the plan and `combine` serve both. The products are 3-D batched dots whose batch
dimension is the wave: each wave keeps a softmax state of its own over its own tokens and meets no barrier; the states merge once, after
the loop. K and V come from memory in operand order (`tile.wave_load`).
"""

import torch
import triton
import triton.language as tl

from tritonattn.paths import launch
from tritonattn.tile import mask, seqlens, softmax, store
from tritonattn.tile.fp8 import fp8_range, split_fp8, third_fp8
from tritonattn.tile.kv_load import descale, upcast
from tritonattn.tile.wave_load import column_of, first_tokens, load_k_plain, load_k_preshuffled, load_v_plain, load_v_preshuffled, wave_tokens
from tritonattn.tuning.codegen import hot_loops

P_LOG2 = tl.constexpr(7)  # with an fp8 cache, exp2 of this is the largest P of a tile: a good half of the largest e4m3 of either kind
MERGE_BYTES = tl.constexpr(16384)  # LDS that the final merge may take, so that registers alone set the occupancy


@triton.jit
def load_k(
    k, table, n0, lo, hi, stride_block, stride_token,
    D_START: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, SHUFFLED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, VEC: tl.constexpr, X: tl.constexpr, WAVES: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr,
    ORD: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    if SHUFFLED:
        return load_k_preshuffled(k, table, n0, lo, hi, stride_block, D_START, D, WIDTH, BLOCK_SIZE, VEC, X, WAVES, PARTS, TOKENS, ORD, MASKED)
    else:
        return load_k_plain(k, table, n0, lo, hi, stride_block, stride_token, D_START, D, WIDTH, BLOCK_SIZE, VEC, X, WAVES, PARTS, TOKENS, ORD, MASKED)


@triton.jit
def load_v(
    v, table, n0, lo, hi, stride_block, stride_token,
    D_START: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, SHUFFLED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, VEC: tl.constexpr, X: tl.constexpr, WAVES: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr,
    ORD: tl.constexpr, RUN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    if SHUFFLED:
        return load_v_preshuffled(v, table, n0, lo, hi, stride_block, DV, D_START, WIDTH, BLOCK_SIZE, VEC, X, WAVES, PARTS, TOKENS, ORD, RUN, MASKED)
    else:
        return load_v_plain(v, table, n0, lo, hi, stride_block, stride_token, DV, D_START, WIDTH, BLOCK_SIZE, VEC, X, WAVES, PARTS, TOKENS, ORD, RUN, MASKED)


@triton.jit
def dot_split(a, rest, b, acc, FP8: tl.constexpr):
    """acc + a @ b, or with FP8 acc + (a + rest) @ b."""
    acc = tl.dot(a, b, acc, input_precision="ieee")
    if FP8:
        acc = tl.dot(rest, b, acc)
    return acc


@triton.jit
def split_p(p, dtype: tl.constexpr):
    """P [waves, rows, tokens] as two numbers of 8 bits each, in the order in which a lane holds 8 tokens of V in a row."""
    p = p.reshape(p.shape[0], p.shape[1], p.shape[2] // 32, 2, 4, 4).permute(0, 1, 2, 4, 3, 5).reshape(p.shape)
    return split_fp8(p, dtype)


@triton.jit
def attend_tile(
    q0, q1, rest0, rest1, third0, third1, acc0, acc1, m, l, top, k, v, table, n0, lo, hi, row_lo, row_hi, slope, row_position, factor, softcap,
    stride_k_block, stride_k_token, stride_v_block, stride_v_token,
    D0: tl.constexpr, D1: tl.constexpr, D: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, DV: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, WINDOW_LEFT: tl.constexpr, SHUFFLED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    VEC: tl.constexpr, X: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr, WAVES: tl.constexpr, PARTS: tl.constexpr,
    TOKENS: tl.constexpr, ORD: tl.constexpr, CHEAP_P: tl.constexpr, COMPUTE: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Keys [n0, n0 + PARTS * TOKENS) into the state, TOKENS to each wave with its ROWS rows; row_*, slope: [WAVES, ROWS]."""
    RUN: tl.constexpr = 8 if FP8 else 4  # tokens that a lane holds in a row, in the second product
    k0 = load_k(k, table, n0, lo, hi, stride_k_block, stride_k_token, 0, D, D0, SHUFFLED, BLOCK_SIZE, VEC, X, WAVES, PARTS, TOKENS, ORD, MASKED)
    s = tl.zeros([WAVES, ROWS, TOKENS], tl.float32)
    s = dot_split(q0, rest0, tl.permute(k0 if FP8 else upcast(k0, COMPUTE), (0, 2, 1)), s, FP8)
    THIRD: tl.constexpr = FP8 and (COMPUTE == tl.float8e5 or COMPUTE == tl.float8e5b16)
    if THIRD:
        s = tl.dot(third0, tl.permute(k0, (0, 2, 1)), s)
    if D1 > 0:
        k1 = load_k(k, table, n0, lo, hi, stride_k_block, stride_k_token, D0, D, D1, SHUFFLED, BLOCK_SIZE, VEC, X, WAVES, PARTS, TOKENS, ORD, MASKED)
        s = dot_split(q1, rest1, tl.permute(k1 if FP8 else upcast(k1, COMPUTE), (0, 2, 1)), s, FP8)
        if THIRD:
            s = tl.dot(third1, tl.permute(k1, (0, 2, 1)), s)
    v0 = load_v(v, table, n0, lo, hi, stride_v_block, stride_v_token, 0, DV, V0, SHUFFLED, BLOCK_SIZE, VEC, X, WAVES, PARTS, TOKENS, ORD, RUN, MASKED)

    keys = n0 + first_tokens(WAVES, PARTS, TOKENS)[:, None, None] + wave_tokens(TOKENS, X, SHUFFLED)[None, None, :]
    s, factor = softmax.modify_scores(s, factor, softcap, slope[:, :, None], keys - row_position[:, :, None], SOFTCAP, ALIBI)
    if MASKED:
        seen = mask.tile_mask(keys, row_lo[:, :, None], row_hi[:, :, None], WINDOW_LEFT)
        s = tl.where(seen, s, softmax.NEG_INF)
    if FP8:
        p, alpha, m, l, top = softmax.online_step_narrow(s, m, l, top, factor, MASKED, P_LOG2)
    else:
        p, alpha, m, l = softmax.online_step(s, m, l, factor, MASKED)
    rest = p
    if FP8:
        p, rest = split_p(p, COMPUTE)
    else:
        p = softmax.round_p(p, COMPUTE, CHEAP_P)
    acc0 = dot_split(p, rest, v0 if FP8 else upcast(v0, COMPUTE), acc0 * alpha[:, :, None], FP8)
    if V1 > 0:
        v1 = load_v(v, table, n0, lo, hi, stride_v_block, stride_v_token, V0, DV, V1, SHUFFLED, BLOCK_SIZE, VEC, X, WAVES, PARTS, TOKENS, ORD, RUN, MASKED)
        acc1 = dot_split(p, rest, v1 if FP8 else upcast(v1, COMPUTE), acc1 * alpha[:, :, None], FP8)
    return acc0, acc1, m, l, top


@triton.jit
def rows_at(rows, kv_head, q_len, GROUP: tl.constexpr):
    """(query token, head, whether there is one) of rows of a KV head."""
    query = rows // GROUP
    return query, kv_head * GROUP + rows % GROUP, query < q_len


@triton.jit
def store_merged(
    out, rows, row_ok, acc, scale, D_START: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr, VALID: tl.constexpr,
    SHUFFLED: tl.constexpr, X: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, FP8: tl.constexpr = None,
):  # fmt: skip
    """The sum of `acc` [PARTS, ROWS, COUNT] over the parts times `scale`, in slices whose exchange fits MERGE_BYTES of LDS."""
    if PARTS * ROWS * COUNT * 4 > MERGE_BYTES:
        HALF: tl.constexpr = COUNT // 2
        a, b = acc.reshape(PARTS, ROWS, 2, HALF).permute(0, 1, 3, 2).split()
        store_merged(out, rows, row_ok, a, scale, D_START, HALF, WIDTH, VALID, SHUFFLED, X, ROWS, PARTS, FP8)
        store_merged(out, rows, row_ok, b, scale, D_START + HALF, HALF, WIDTH, VALID, SHUFFLED, X, ROWS, PARTS, FP8)
    else:
        o = tl.sum(acc, 0) * scale[:, None]
        columns = D_START + tl.arange(0, COUNT)
        if not SHUFFLED:
            columns = column_of(columns, WIDTH, X)
        ok = row_ok[:, None] & (columns < VALID)[None, :]
        tl.store(out + rows[:, None] + columns[None, :], store.convert(o, out, FP8), mask=ok)


@triton.jit
def store_rows(
    out, rows, row_ok, acc0, acc1, scale, lse, lse_rows, lse_ok, lse_row, V0: tl.constexpr, V1: tl.constexpr, DV: tl.constexpr,
    SHUFFLED: tl.constexpr, X: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, FP8: tl.constexpr = None,
):  # fmt: skip
    store_merged(out, rows, row_ok, acc0, scale, 0, V0, V0, DV, SHUFFLED, X, ROWS, PARTS, FP8)
    if V1 > 0:
        store_merged(out + V0, rows, row_ok, acc1, scale, 0, V1, V1, DV - V0, SHUFFLED, X, ROWS, PARTS, FP8)
    if lse is not None:
        tl.store(lse + lse_rows, lse_row, mask=lse_ok)


@launch.kernel(never=("k_cache", "v_cache"))  # else a cache above 2 GiB would compile anew; their alignment comes with VEC
def decode_wave(
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
    COMPUTE: tl.constexpr, FP8: tl.constexpr, SPLIT: tl.constexpr,
    # tile
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr, WAVES: tl.constexpr, WAVE_ROWS: tl.constexpr,
    ORD: tl.constexpr, CHEAP_P: tl.constexpr,
):  # fmt: skip
    GROUPS: tl.constexpr = ROWS // WAVE_ROWS  # of rows; wave w has the rows of group w % GROUPS and the tokens of part w // GROUPS
    PARTS: tl.constexpr = WAVES // GROUPS
    TOKENS: tl.constexpr = BLOCK_N // PARTS
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

    diag = k_len - q_len
    row_first = row0 // GROUP
    row_last = (tl.minimum(row0 + ROWS, q_len * GROUP) - 1) // GROUP
    lo, hi = mask.visible(row_first, row_last, diag, k_len, window_left, window_right)
    begin, end = mask.split_bounds(lo, hi, split, splits, BLOCK_N)
    lo = tl.maximum(lo, begin)
    hi = end
    if SPLIT:
        if (split > 0) & (lo >= hi):
            query, head, row_ok = rows_at(row0 + tl.arange(0, ROWS), kv_head, q_len, GROUP)
            part = store.part_rows(place, query, head, max_seqlen_q, NUM_HEADS)
            tl.store(part_lse + part, tl.full([ROWS], softmax.NEG_INF, tl.float32), mask=row_ok)
            return
    begin, inner_begin, inner_end = mask.split_loops(row_first, row_last, diag, hi, window_left, window_right, lo, hi, BLOCK_N)
    inner_begin = tl.maximum(inner_begin, begin)  # a split may begin past the left edge, or past the last unmasked tile
    inner_end = tl.maximum(inner_end, inner_begin)

    # The rows of each wave, [WAVES, WAVE_ROWS].
    waves = tl.arange(0, WAVES)
    wave_rows = row0 + (waves % GROUPS * WAVE_ROWS)[:, None] + tl.arange(0, WAVE_ROWS)[None, :]
    wave_query, wave_head, wave_ok = rows_at(wave_rows, kv_head, q_len, GROUP)
    row_lo, row_hi = mask.row_limits(wave_query, diag, hi, window_left, window_right)
    q_wave = (((q_start + wave_query).to(tl.int64) * stride_q_token + wave_head * stride_q_head) * VEC_Q)[:, :, None]
    d0 = tl.arange(0, D0)
    q0 = tl.load(q + q_wave + d0[None, None, :], mask=wave_ok[:, :, None] & (d0 < D)[None, None, :], other=0.0)
    q1 = q0
    acc0 = tl.zeros([WAVES, WAVE_ROWS, V0], tl.float32)
    acc1 = acc0
    if D1 > 0:
        d1 = D0 + tl.arange(0, D1)
        q1 = tl.load(q + q_wave + d1[None, None, :], mask=wave_ok[:, :, None] & (d1 < D)[None, None, :], other=0.0)
    scale = qk_scale * descale(q_descale, kv_head, stride_q_descale) * descale(k_descale, kv_head, stride_k_descale)
    rest0 = q0
    rest1 = q1
    third0 = q0
    third1 = q1
    if FP8:
        largest = tl.max(tl.abs(q0.to(tl.float32)))
        if D1 > 0:
            largest = tl.maximum(largest, tl.max(tl.abs(q1.to(tl.float32))))
        up, down = fp8_range(largest)
        scale = scale * down
        wide = q0.to(tl.float32) * up
        q0, rest0 = split_fp8(wide, COMPUTE)
        third0 = third_fp8(wide, q0, rest0)
        if D1 > 0:
            wide = q1.to(tl.float32) * up
            q1, rest1 = split_fp8(wide, COMPUTE)
            third1 = third_fp8(wide, q1, rest1)
    else:
        q0 = upcast(q0, COMPUTE)
        q1 = upcast(q1, COMPUTE)
    if V1 > 0:
        acc1 = tl.zeros([WAVES, WAVE_ROWS, V1], tl.float32)
    m = tl.full([WAVES, WAVE_ROWS], softmax.NEG_INF, tl.float32)
    l = tl.zeros([WAVES, WAVE_ROWS, TOKENS], tl.float32)
    if sinks is not None:  # a key of its own, which one wave of the first split sees
        owner = (waves < GROUPS)[:, None] & (split == 0) & wave_ok
        sink = softmax.sink_score(tl.load(sinks + wave_head, mask=wave_ok, other=0.0))
        m = tl.where(owner, sink, m)
        l = tl.where(owner[:, :, None] & (tl.arange(0, TOKENS) == 0)[None, None, :], 1.0, l)
    top = m
    slope = tl.zeros([WAVES, WAVE_ROWS], tl.float32)
    if alibi_slopes is not None:
        slope = tl.load(alibi_slopes + wave_head, mask=wave_ok, other=0.0).to(tl.float32)

    ALIGN: tl.constexpr = VEC * k_cache.dtype.element_ty.primitive_bitwidth // 8
    table = block_table + seq.to(tl.int64) * stride_table
    k = tl.multiple_of(k_cache + kv_head.to(tl.int64) * stride_k_head * VEC, ALIGN)
    v = tl.multiple_of(v_cache + kv_head.to(tl.int64) * stride_v_head * VEC, ALIGN)
    left = (inner_begin - begin) // BLOCK_N
    edges = left + tl.cdiv(tl.maximum(hi - inner_end, 0), BLOCK_N)
    for i in tl.range(0, edges, num_stages=NUM_STAGES):
        n = tl.where(i < left, begin + i * BLOCK_N, inner_end + (i - left) * BLOCK_N)
        acc0, acc1, m, l, top = attend_tile(
            q0, q1, rest0, rest1, third0, third1, acc0, acc1, m, l, top, k, v, table, n, lo, hi, row_lo, row_hi, slope, wave_query + diag, scale, softcap,
            stride_k_block, stride_k_token, stride_v_block, stride_v_token, D0, D1, D, V0, V1, DV, SOFTCAP, alibi_slopes is not None,
            WINDOW_LEFT, SHUFFLED, BLOCK_SIZE, VEC, X, True, WAVE_ROWS, WAVES, PARTS, TOKENS, ORD, CHEAP_P, COMPUTE, FP8,
        )  # fmt: skip
    for n in tl.range(inner_begin, inner_end, BLOCK_N, num_stages=NUM_STAGES):
        acc0, acc1, m, l, top = attend_tile(
            q0, q1, rest0, rest1, third0, third1, acc0, acc1, m, l, top, k, v, table, n, lo, hi, row_lo, row_hi, slope, wave_query + diag, scale, softcap,
            stride_k_block, stride_k_token, stride_v_block, stride_v_token, D0, D1, D, V0, V1, DV, SOFTCAP, alibi_slopes is not None,
            WINDOW_LEFT, SHUFFLED, BLOCK_SIZE, VEC, X, False, WAVE_ROWS, WAVES, PARTS, TOKENS, ORD, CHEAP_P, COMPUTE, FP8,
        )  # fmt: skip

    weight, m, l = softmax.rejoin(m.reshape(PARTS, ROWS), tl.sum(l, 2).reshape(PARTS, ROWS))
    inverse, lse_row = softmax.finish(m, l)
    inverse = inverse * out_scale * descale(v_descale, kv_head, stride_v_descale)
    acc0 = acc0.reshape(PARTS, ROWS, V0) * weight[:, :, None]
    if V1 > 0:
        acc1 = acc1.reshape(PARTS, ROWS, V1) * weight[:, :, None]
    # Worked out here, so as not to hold registers in the loops; the compiler cannot tell that the shift gives 0.
    query, head, row_ok = rows_at(row0 + (hi >> 30) + tl.arange(0, ROWS), kv_head, q_len, GROUP)
    part = store.part_rows(place, query, head, max_seqlen_q, NUM_HEADS)
    tokens = (q_start + query).to(tl.int64)
    out_rows = (tokens * stride_out_token + head * stride_out_head) * VEC_OUT
    lse_rows = head.to(tl.int64) * stride_lse_head + tokens
    part_ok = row_ok & (lse_row != softmax.NEG_INF)
    log = lse_row * softmax.LN2
    if not SPLIT:
        store_rows(out, out_rows, row_ok, acc0, acc1, inverse, lse, lse_rows, row_ok, log, V0, V1, DV, SHUFFLED, X, ROWS, PARTS, OUT_FP8)
    elif work is None:
        store_rows(part_out, part * DV, part_ok, acc0, acc1, inverse, part_lse, part, row_ok, lse_row, V0, V1, DV, SHUFFLED, X, ROWS, PARTS)
    elif splits > 1:
        store_rows(part_out, part * DV, part_ok, acc0, acc1, inverse, part_lse, part, row_ok, lse_row, V0, V1, DV, SHUFFLED, X, ROWS, PARTS)
    else:
        store_rows(out, out_rows, row_ok, acc0, acc1, inverse, lse, lse_rows, row_ok, log, V0, V1, DV, SHUFFLED, X, ROWS, PARTS, OUT_FP8)


def lds_traffic(assembly):
    """LDS reads and writes in the hot loops."""
    return sum(sum(loop.lds_reads.values()) + sum(loop.lds_writes.values()) for loop in hot_loops(assembly))


_order: dict = {}
FP8_DTYPES = {
    torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e4m3fnuz: tl.float8e4b8, torch.float8_e5m2: tl.float8e5,
    torch.float8_e5m2fnuz: tl.float8e5b16,
}  # fmt: skip


def pick_order(kernel, grid, args, meta):
    """The operand order that this Triton build turns into loads without LDS traffic: compile both, look, keep one per target.

    Which of two equally good dimension orders a build prefers is a tie-break that has changed with versions and differs between
    builds of one version, so the compiled code decides.
    """
    if not isinstance(kernel, triton.runtime.JITFunction):  # the interpreter lays nothing out
        return 0
    target = triton.runtime.driver.active.get_current_target()
    if target.backend != "hip":
        return 0
    key = kernel.fn.__name__, target.arch, meta.get("SHUFFLED"), meta["VEC"] > 1
    if key not in _order:
        _order[key] = min((0, 1), key=lambda order: lds_traffic(kernel.warmup(*args, grid=grid, ORD=order, **meta).asm["amdgcn"]))
    return _order[key]


def launch_wave(grid, args, flags, static, row):
    """As `launch.run(decode, ...)` in the form of this file: takes what `decode` takes and settles the rest of the constexprs."""
    flags = {name: value for name, value in flags.items() if name != "SAME_STRIDES"}  # K and V addresses are apart here anyway
    rows, kv_dtype = flags["ROWS"], args[decode_wave.arg_names.index("k_cache")].dtype
    static = launch.settled(static, row, lambda: _wave_static(static, row.options, rows, kv_dtype), decode_wave, rows)
    order = pick_order(decode_wave, grid, args, {**flags, **static, **row.options})
    launch.run(decode_wave, grid, args, {**flags, "ORD": order}, static, row)


def _wave_static(static, options, rows, kv_dtype) -> dict:
    fp8 = kv_dtype.itemsize == 1
    meta = {"CHEAP_P": False, **static, "WAVES": options["num_warps"], "WAVE_ROWS": min(static.get("WAVE_ROWS", rows), rows), "FP8": fp8}
    x = meta["X"]
    if fp8:
        meta["COMPUTE"] = FP8_DTYPES[kv_dtype]
    if meta["D"] < 4 * x:  # a lane group takes 16 bytes of a row, and there are four of them
        meta["D0"], meta["D1"] = 4 * x, 0
    elif meta["D1"]:
        meta["D1"] = max(meta["D1"], 4 * x)
    elif fp8 and meta["SHUFFLED"] and meta["D0"] > 128:
        meta["D0"] = meta["D1"] = meta["D0"] // 2
    if meta["DV"] < 4 * x:
        meta["V0"], meta["V1"] = 4 * x, 0
    elif meta["V1"]:
        if not meta["SHUFFLED"]:  # 16 lanes share a row, with no less than four bytes each
            meta["V1"] = max(meta["V1"], 4 * x)
    elif meta["V0"] > (128 if not meta["SHUFFLED"] else 64 if fp8 else 256):  # in two parts, which spares registers
        meta["V0"] = meta["V1"] = meta["V0"] // 2
    return meta
