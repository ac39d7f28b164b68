"""Dense attention of blocks of query rows: FlashAttention-2 (arXiv:2307.08691) over packed sequences.

One kernel serves prefill (each sequence against its own new tokens) and the passes of the extend paths: a chunk of a dense row of
keys, the context and in MHA the new tokens behind it; and in MLA, where those stay with the caller, the new tokens after it. Passes
over the same queries hand on the softmax state (m, l, acc), which is what merging by log-sum-exp comes to when the parts follow one another.
"""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor

from tritonattn.paths import launch
from tritonattn.plan import LOG2E, UNLIMITED, compute_dtype, least_contraction, prefill_row, window
from tritonattn.plan import descale as descale_of
from tritonattn.problem import AttnParams, AttnProblem, split_head_size
from tritonattn.tile import mask, seqlens, softmax, store
from tritonattn.tile.kv_load import descale, load_2d, upcast
from tritonattn.tuning.arch import detect
from tritonattn.tuning.table import Row

PREFILL = 0  # keys [cu_seqlens_k[i], cu_seqlens_k[i+1])
CHUNK = 1  # the sequence's keys start at cu_seqlens_k[i] of a row of all keys: context and, with NEW_IN_ROW, new tokens; those in [chunk_begin, chunk_end)
NEW_TOKENS = 2  # like PREFILL, after CHUNK passes over a row without them: for MLA, whose keys the caller projects


@triton.jit
def describe(base, length, stride, WIDTH0: tl.constexpr, WIDTH1: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr):
    """Descriptors of the two parts of [length, WIDTH] rows for the bulk copies of NVIDIA GPUs, which keep addresses out of registers.

    They read zeros past `length`: neither the next sequence nor padding gets in, so masked tiles may use them as well. Made once on
    the host, over all sequences, they are no faster on an H200, and V then takes a mask: two programs of heads of 64 no longer fit.
    """
    rows = tl.maximum(length, 1)
    first = tl.make_tensor_descriptor(base, [rows, WIDTH0], [stride.to(tl.int64), 1], [BLOCK_N, WIDTH0])
    second = first
    if WIDTH1 > 0:
        second = tl.make_tensor_descriptor(base + WIDTH0, [rows, WIDTH - WIDTH0], [stride.to(tl.int64), 1], [BLOCK_N, WIDTH1])
    return first, second


@triton.jit
def attend_tile(
    q0, q1, acc0, acc1, m, l, k_base, v_base, k0_block, k1_block, v0_block, v1_block, block_row,
    n, lo, hi, row_lo, row_hi, slope, row_position, factor, softcap, stride_k_token, stride_v_token,
    D0: tl.constexpr, D1: tl.constexpr, D: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, DV: tl.constexpr,
    VEC: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, WINDOW_LEFT: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr, CHEAP_P: tl.constexpr, PRELOAD_V: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """Keys [n, n + BLOCK_N) into the state. MASKED tiles read only keys [lo, hi) and apply the mask.

    *_block: see `describe`; they count from the first key of all, k_base and v_base from key `block_row`.
    """
    keys = tl.arange(0, BLOCK_N)
    ok = n + keys < hi
    if WINDOW_LEFT:
        ok = ok & (n + keys >= lo)
    k_tile = k_base + n * (stride_k_token.to(tl.int64) * VEC)
    v_tile = v_base + n * (stride_v_token.to(tl.int64) * VEC)
    k_rows = keys * stride_k_token * VEC
    v_rows = keys * stride_v_token * VEC
    d0 = tl.arange(0, D0)
    c0 = tl.arange(0, V0)

    # By pointer, K is loaded as [columns, keys], the way the product takes it: on gfx950 it then goes from memory to LDS without
    # registers and without a swizzle.
    if DESCRIPTORS:
        k0 = tl.trans(k0_block.load([block_row + n, 0]))
    else:
        k0 = load_2d(k_tile, d0, k_rows, d0 < D, ok, False, MASKED)
    s = tl.dot(q0, upcast(k0, q0.dtype), input_precision="ieee")
    if D1 > 0:
        d1 = tl.arange(0, D1)
        if DESCRIPTORS:
            k1 = tl.trans(k1_block.load([block_row + n, 0]))
        else:
            k1 = load_2d(k_tile + D0, d1, k_rows, d1 < D - D0, ok, D0 + D1 > D, MASKED)
        s = tl.dot(q1, upcast(k1, q0.dtype), s, input_precision="ieee")
    if DESCRIPTORS:
        v0 = v0_block.load([block_row + n, 0])
    elif PRELOAD_V:
        v0 = load_2d(v_tile, v_rows, c0, ok, c0 < DV, MASKED, False)
    distance = (n + keys)[None, :] - row_position[:, None]
    s, factor = softmax.modify_scores(s, factor, softcap, slope, distance, SOFTCAP, ALIBI)
    if MASKED:
        seen = mask.tile_mask((n + keys)[None, :], row_lo[:, None], row_hi[:, None], WINDOW_LEFT)
        s = tl.where(seen, s, softmax.NEG_INF)
    p, alpha, m, l = softmax.online_step(s, m, l, factor, MASKED)
    p = softmax.round_p(p, q0.dtype, CHEAP_P)
    if not DESCRIPTORS and not PRELOAD_V:
        v0 = load_2d(v_tile, v_rows, c0, ok, c0 < DV, MASKED, False)
    acc0 = tl.dot(p, upcast(v0, q0.dtype), acc0 * alpha[:, None], input_precision="ieee")
    if V1 > 0:
        c1 = tl.arange(0, V1)
        if DESCRIPTORS:
            v1 = v1_block.load([block_row + n, 0])
        else:
            v1 = load_2d(v_tile + V0, v_rows, c1, ok, c1 < DV - V0, MASKED, V0 + V1 > DV)
        acc1 = tl.dot(p, upcast(v1, q0.dtype), acc1 * alpha[:, None], input_precision="ieee")
    return acc0, acc1, m, l


@triton.jit
def store_output(
    out, lse, acc0, acc1, m, l, head, token0, row_ok, scale, stride_out_token, stride_out_head, stride_lse_head,
    V0: tl.constexpr, V1: tl.constexpr, DV: tl.constexpr, VEC_OUT: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """The finished rows, from token `token0` on: [rows, DV] of `out` and their natural-log LSE."""
    inverse, lse_row = softmax.finish(m, l)
    inverse = (inverse * scale)[:, None]
    base = out + (token0 * stride_out_token + head.to(tl.int64) * stride_out_head) * VEC_OUT
    index = tl.arange(0, m.shape[0])
    rows = base + (index * stride_out_token * VEC_OUT)[:, None]
    tl.store(rows + tl.arange(0, V0)[None, :], store.convert(acc0 * inverse, out, FP8), mask=row_ok[:, None])
    if V1 > 0:
        c1 = tl.arange(0, V1)
        ok = row_ok[:, None] & (c1 < DV - V0)[None, :]
        tl.store(rows + V0 + c1[None, :], store.convert(acc1 * inverse, out, FP8), mask=ok)
    if lse is not None:
        tl.store(lse + head.to(tl.int64) * stride_lse_head + token0 + index, lse_row * softmax.LN2, mask=row_ok)


@triton.jit
def store_state(
    ml_slot, acc_slot, acc0, acc1, m, l, BLOCK_M: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, DV: tl.constexpr
):
    """The state of rows that a later pass goes on with."""
    tl.store(ml_slot, m)
    tl.store(ml_slot + BLOCK_M, l)
    tl.store(acc_slot + tl.arange(0, V0)[None, :], acc0)
    if V1 > 0:
        c1 = tl.arange(0, V1)
        tl.store(acc_slot + V0 + c1[None, :], acc1, mask=(c1 < DV - V0)[None, :])


@launch.kernel
def attend(
    # outputs; state_ml [tile, head, 2, BLOCK_M], state_acc [tile, head, BLOCK_M, DV], fp32: rows whose passes are not over
    out, lse, state_ml, state_acc,
    # inputs
    q, k, v, sinks, alibi_slopes, q_descale, k_descale, v_descale,
    # metadata, int32; tiles [num_tiles, 2] = (sequence, first row), or None: searched for. In the row sequence i begins at its position
    # key_starts[i] (what a window cuts off is left out); its first query is at context_lens[i].
    tiles, cu_seqlens_q, cu_seqlens_k, key_starts, context_lens,
    # strides, in units of VEC elements but for lse and descales
    stride_q_token, stride_q_head, stride_k_token, stride_k_head, stride_v_token, stride_v_head,
    stride_out_token, stride_out_head, stride_lse_head, stride_q_descale, stride_k_descale, stride_v_descale,
    # scalars
    num_tiles, num_seqs, num_tokens, chunk_begin, chunk_end, row_end, qk_scale, out_scale, softcap, window_left, window_right,
    # problem
    PASS: tl.constexpr, NEW_IN_ROW: tl.constexpr, NUM_HEADS: tl.constexpr, GROUP: tl.constexpr,
    D0: tl.constexpr, D1: tl.constexpr, D: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, DV: tl.constexpr,
    VEC: tl.constexpr, VEC_OUT: tl.constexpr, OUT_FP8: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW_LEFT: tl.constexpr, COMPUTE: tl.constexpr,
    # tile
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr, CHEAP_P: tl.constexpr, PRELOAD_V: tl.constexpr,
    DESCRIPTORS: tl.constexpr, FENCE: tl.constexpr, NUM_XCDS: tl.constexpr,
):  # fmt: skip
    tile, head = seqlens.program_order(tl.program_id(0), num_tiles, NUM_HEADS, NUM_XCDS)
    kv_head = head // GROUP
    if tiles is None:
        seq, row0 = seqlens.find_tile(tile, cu_seqlens_q, num_seqs, num_tokens, BLOCK_M)
    else:
        seq = tl.load(tiles + 2 * tile)
        row0 = tl.load(tiles + 2 * tile + 1)
    live = seq < num_seqs
    q_start = tl.load(cu_seqlens_q + seq)
    q_len = tl.load(cu_seqlens_q + seq + 1, mask=live, other=num_tokens) - q_start
    if row0 >= q_len:
        return

    k_begin = tl.load(cu_seqlens_k + seq, mask=live, other=0)
    if PASS == 1:
        diag = tl.load(context_lens + seq, mask=live, other=0) - tl.load(key_starts + seq, mask=live, other=0)
        k_len = diag
        if NEW_IN_ROW:
            k_len += tl.where(live, q_len, 0)
        # The passes of a tile are those with keys that it sees: others neither load its state nor store it. The first also serves padding.
        lo, hi = mask.visible(row0, tl.minimum(row0 + BLOCK_M, q_len) - 1, diag, k_len, window_left, window_right)
        # Lengths beyond what the host was told end with the row: the last pass stores, and no state is kept that nobody made room for.
        end = tl.minimum(k_begin + hi, row_end)
        part_begin = tl.maximum(k_begin + lo, chunk_begin)
        part_end = tl.minimum(end, chunk_end)
        if (part_begin >= part_end) & (live | (chunk_begin > 0)):
            return
        first = part_begin == k_begin + lo
        last = part_end == end
        k_len = part_end - part_begin
        diag -= part_begin - k_begin
        k_row = part_begin - chunk_begin
    elif PASS == 2:
        first = tl.load(key_starts + seq, mask=live, other=0) >= tl.load(context_lens + seq, mask=live, other=0)
        k_len = tl.where(live, q_len, 0)
        diag = 0
        k_row = q_start
    else:
        k_len = tl.load(cu_seqlens_k + seq + 1, mask=live, other=0) - k_begin
        diag = k_len - q_len
        k_row = k_begin

    rows = tl.arange(0, BLOCK_M)
    row_ok = rows < q_len - row0
    token0 = (q_start + row0).to(tl.int64)
    d0 = tl.arange(0, D0)
    q_rows = rows * stride_q_token * VEC
    q_base = q + (token0 * stride_q_token + head.to(tl.int64) * stride_q_head) * VEC
    q0 = upcast(load_2d(q_base, q_rows, d0, row_ok, d0 < D, True, False), COMPUTE)
    q1 = q0
    if D1 > 0:
        d1 = tl.arange(0, D1)
        q1 = upcast(load_2d(q_base + D0, q_rows, d1, row_ok, d1 < D - D0, True, D0 + D1 > D), COMPUTE)

    # The state: a sink is a key of its own, seen first; later passes go on where the one before stopped.
    if PASS != 0:
        slot = tile.to(tl.int64) * NUM_HEADS + head
        ml_slot = state_ml + slot * (2 * BLOCK_M) + tl.arange(0, BLOCK_M)
        acc_slot = state_acc + slot * (BLOCK_M * DV) + (tl.arange(0, BLOCK_M) * DV)[:, None]
    c0 = tl.arange(0, V0)
    m = tl.full([BLOCK_M], softmax.NEG_INF, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc0 = tl.zeros([BLOCK_M, V0], tl.float32)
    acc1 = l
    if V1 > 0:
        acc1 = tl.zeros([BLOCK_M, V1], tl.float32)
        c1 = tl.arange(0, V1)
    if sinks is not None:
        m = tl.zeros([BLOCK_M], tl.float32) + softmax.sink_score(tl.load(sinks + head))
        l = tl.full([BLOCK_M], 1.0, tl.float32)
    if PASS != 0:
        if first == 0:
            m = tl.load(ml_slot)
            l = tl.load(ml_slot + BLOCK_M)
            acc0 = tl.load(acc_slot + c0[None, :])
            if V1 > 0:
                acc1 = tl.load(acc_slot + V0 + c1[None, :], mask=(c1 < DV - V0)[None, :], other=0.0)

    slope = 0.0
    if alibi_slopes is not None:
        slope = tl.load(alibi_slopes + head).to(tl.float32)
    factor = qk_scale * descale(q_descale, kv_head, stride_q_descale) * descale(k_descale, kv_head, stride_k_descale)
    k_base = k + k_row.to(tl.int64) * stride_k_token * VEC + kv_head.to(tl.int64) * stride_k_head * VEC
    v_base = v + k_row.to(tl.int64) * stride_v_token * VEC + kv_head.to(tl.int64) * stride_v_head * VEC

    k0_block = None
    k1_block = None
    v0_block = None
    v1_block = None
    if DESCRIPTORS:
        k0_block, k1_block = describe(k_base, k_len, stride_k_token * VEC, D0, D1, D, BLOCK_N)
        v0_block, v1_block = describe(v_base, k_len, stride_v_token * VEC, V0, V1, DV, BLOCK_N)
    row_last = tl.minimum(row0 + BLOCK_M, q_len) - 1
    lo, hi = mask.visible(row0, row_last, diag, k_len, window_left, window_right)
    begin, inner_begin, inner_end = mask.split_loops(row0, row_last, diag, k_len, window_left, window_right, lo, hi, BLOCK_N)
    # The unmasked loop goes first: what only the masks need is then not alive in it, which on CDNA is the difference to a spill. It
    # counts from 0, so that the pipeliner's buffer index is a plain induction variable.
    k_inner = k_base + inner_begin * (stride_k_token.to(tl.int64) * VEC)
    v_inner = v_base + inner_begin * (stride_v_token.to(tl.int64) * VEC)
    for n in tl.range(0, inner_end - inner_begin, BLOCK_N, num_stages=NUM_STAGES):
        acc0, acc1, m, l = attend_tile(
            q0, q1, acc0, acc1, m, l, k_inner, v_inner, k0_block, k1_block, v0_block, v1_block, inner_begin,
            n, lo, hi, rows, rows, slope, rows + (row0 + diag - inner_begin), factor, softcap, stride_k_token, stride_v_token,
            D0, D1, D, V0, V1, DV, VEC, SOFTCAP, alibi_slopes is not None, WINDOW_LEFT, False, BLOCK_N, CHEAP_P, PRELOAD_V, DESCRIPTORS,
        )  # fmt: skip
    if FENCE:
        # The next loop copies to the LDS that this one's last tiles are read from. Triton 3.6 puts no barrier between the two: it takes a
        # read that waited for its own copy to be safe from every other.
        tl.debug_barrier()
    row_lo, row_hi = mask.row_limits(rows, row0 + diag, k_len, window_left, window_right)
    left_tiles = (inner_begin - begin) // BLOCK_N
    masked_tiles = left_tiles + tl.cdiv(tl.maximum(hi - inner_end, 0), BLOCK_N)
    for i in tl.range(0, masked_tiles, num_stages=NUM_STAGES):
        n = tl.where(i < left_tiles, begin + i * BLOCK_N, inner_end + (i - left_tiles) * BLOCK_N)
        acc0, acc1, m, l = attend_tile(
            q0, q1, acc0, acc1, m, l, k_base, v_base, k0_block, k1_block, v0_block, v1_block, 0,
            n, lo, hi, row_lo, row_hi, slope, rows + (row0 + diag), factor, softcap, stride_k_token, stride_v_token,
            D0, D1, D, V0, V1, DV, VEC, SOFTCAP, alibi_slopes is not None, WINDOW_LEFT, True, BLOCK_N, CHEAP_P, PRELOAD_V, DESCRIPTORS,
        )  # fmt: skip

    scale = out_scale * descale(v_descale, kv_head, stride_v_descale)
    if PASS == 1 and NEW_IN_ROW:
        if last:
            store_output(
                out, lse, acc0, acc1, m, l, head, token0, row_ok, scale, stride_out_token, stride_out_head, stride_lse_head, V0, V1, DV,
                VEC_OUT, OUT_FP8,
            )  # fmt: skip
        else:
            store_state(ml_slot, acc_slot, acc0, acc1, m, l, BLOCK_M, V0, V1, DV)
    elif PASS == 1:
        store_state(ml_slot, acc_slot, acc0, acc1, m, l, BLOCK_M, V0, V1, DV)
    else:
        store_output(
            out, lse, acc0, acc1, m, l, head, token0, row_ok, scale, stride_out_token, stride_out_head, stride_lse_head, V0, V1, DV, VEC_OUT,
            OUT_FP8,
        )  # fmt: skip


def run_prefill(
    problem: AttnProblem, params: AttnParams, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, *,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, num_seqs: int, max_seqlen_q: int, tiles: Tensor | None = None, num_tiles: int = 0,
) -> None:  # fmt: skip
    """Each sequence's queries against its own dense keys.

    tiles [num_tiles, 2] int32 (sequence, first row), heavy ones last, picks the rows to compute; None: all rows of all `num_seqs`
    sequences, and tokens past the last sequence get out = 0.
    """
    row = prefill_row(detect(q.device), problem, max_seqlen_q)
    run_pass(
        PREFILL, row, problem, params, q, k, v, out, lse, None, None, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        num_seqs=num_seqs, tiles=tiles, num_tiles=num_tiles,
    )  # fmt: skip


def tile_count(row: Row, num_tokens: int, num_seqs: int) -> int:
    """Tiles that `find_tile` needs for any lengths of so many sequences, tokens past the last one included."""
    return num_tokens // row.config["BLOCK_M"] + num_seqs + 1


def run_pass(
    kind: int, row: Row, problem: AttnProblem, params: AttnParams, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None,
    state_ml: Tensor | None, state_acc: Tensor | None, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, num_seqs: int,
    tiles: Tensor | None, num_tiles: int, key_starts: Tensor | None = None, context_lens: Tensor | None = None,
    new_in_row: bool = False, chunk: tuple[int, int, int] = (0, 0, 0),
) -> None:  # fmt: skip
    """One launch of `attend`; see there for the arguments."""
    num_tokens = q.shape[0]
    if tiles is None:
        num_tiles = tile_count(row, num_tokens, num_seqs)
    if not num_tiles or not num_tokens:
        return
    out, fp8 = launch.codes(out)
    vec, vec_out = launch.vec_width(q, k, v), launch.vec_width(out)
    left, right = window(params)
    q_scale, k_scale, v_scale = descale_of(params.q_descale), descale_of(params.k_descale), descale_of(params.v_descale)
    descriptors = row.config.get("DESCRIPTORS", False) and vec > 1  # they need 16-byte strides
    with launch.on(q, row), launch.workspace(q, descriptors):
        launch.run(
            attend, (num_tiles * problem.num_q_heads,),
            (
                out, lse, state_ml, state_acc,
                q, k, v, params.sinks, params.alibi_slopes, q_scale.pointer, k_scale.pointer, v_scale.pointer,
                tiles, cu_seqlens_q, cu_seqlens_k, key_starts, context_lens,
                q.stride(0) // vec, q.stride(1) // vec, k.stride(0) // vec, k.stride(1) // vec, v.stride(0) // vec, v.stride(1) // vec,
                out.stride(0) // vec_out, out.stride(1) // vec_out, 0 if lse is None else lse.stride(0),
                q_scale.stride, k_scale.stride, v_scale.stride,
                num_tiles, num_seqs, num_tokens, *chunk,
                params.softmax_scale * LOG2E * q_scale.factor * k_scale.factor, v_scale.factor, params.softcap, left, right,
            ),
            {
                "PASS": kind, "NEW_IN_ROW": new_in_row, "VEC": vec, "VEC_OUT": vec_out, "OUT_FP8": fp8, "SOFTCAP": params.softcap > 0,
                "WINDOW_LEFT": left != UNLIMITED, "DESCRIPTORS": descriptors,
            },
            _static(row, problem, detect(q.device).dies), row,
        )  # fmt: skip


@lru_cache(maxsize=1024)
def _static(row: Row, problem: AttnProblem, dies: int) -> dict:
    d0, _, d1 = split_head_size(problem.head_size)
    v0, _, v1 = split_head_size(problem.v_head_size)
    d1 = max(d1, least_contraction(row)) if d1 else 0
    if v1:
        v1 = max(v1, row.config.get("v_tail", v1))
    elif row.config.get("v_parts", 1) == 2:
        v0 = v1 = v0 // 2
    config = {"CHEAP_P": False, "PRELOAD_V": False, **row.constexprs}
    config.pop("DESCRIPTORS", None)  # also a matter of strides: a flag of the launch
    return {
        "NUM_HEADS": problem.num_q_heads, "GROUP": problem.group, "D0": d0, "D1": d1, "D": problem.head_size, "V0": v0, "V1": v1,
        "DV": problem.v_head_size, "COMPUTE": launch.TRITON_DTYPES[compute_dtype(problem)],
        "FENCE": row.config.get("async_copy", False), "NUM_XCDS": dies if problem.num_q_heads % dies == 0 else 1, **config,
    }  # fmt: skip

