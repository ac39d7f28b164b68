"""Writing new tokens into a paged cache, and gathering cached tokens into dense tensors."""

import triton
import triton.language as tl

from ..tile import kv_load, seqlens


@triton.jit
def quantise(x, factor, dtype: tl.constexpr, LIMIT: tl.constexpr):
    """`x * factor` in the dtype of the cache. With LIMIT > 0 (fp8) it saturates there; NaN stays NaN."""
    if LIMIT > 0:
        y = x.to(tl.float32) * factor
        y = tl.where(y > LIMIT, LIMIT, y)
        y = tl.where(y < -LIMIT, -LIMIT, y)
        return y.to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def element_offsets(tokens, columns, D: tl.constexpr, X: tl.constexpr, BLOCK_SIZE: tl.constexpr, IS_V: tl.constexpr):
    """Offsets of [tokens, columns] inside one head of a preshuffled page; `tokens` are positions in the page."""
    if IS_V:
        return (tokens // X * (D * X) + tokens % X)[:, None] + (columns * X)[None, :]
    else:
        return (tokens * X)[:, None] + (columns // X * (BLOCK_SIZE * X) + columns % X)[None, :]


@triton.jit
def write_rows(
    cache, source, scale_pointer, scale, head, tokens, slots, ok, stride_token, stride_head, stride_block, stride_slot, stride_cache_head,
    stride_descale, SHUFFLED: tl.constexpr, IS_V: tl.constexpr, X: tl.constexpr, BLOCK_SIZE: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, VEC: tl.constexpr, VEC_CACHE: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    c = tl.arange(0, BLOCK_D)
    mask = ok[:, None] & (c < D)[None, :]
    x = tl.load(source + ((tokens.to(tl.int64) * stride_token + head * stride_head) * VEC)[:, None] + c[None, :], mask=mask, other=0.0)
    # A descale is a positive number that the caller chose; its reciprocal is taken once per program.
    y = quantise(x, 1.0 / (scale * kv_load.descale(scale_pointer, head, stride_descale)), cache.dtype.element_ty, LIMIT)
    page = cache + (slots // BLOCK_SIZE * stride_block + head * stride_cache_head) * VEC_CACHE
    if SHUFFLED:
        where = page[:, None] + element_offsets(slots % BLOCK_SIZE, c, D, X, BLOCK_SIZE, IS_V)
    else:
        where = page[:, None] + (slots % BLOCK_SIZE * stride_slot * VEC_CACHE)[:, None] + c[None, :]
    tl.store(where, y, mask=mask)


@triton.jit(
    do_not_specialize=[
        "stride_key_token", "stride_key_head", "stride_value_token", "stride_value_head", "stride_k_block", "stride_k_token",
        "stride_k_head", "stride_v_block", "stride_v_token", "stride_v_head", "stride_k_descale", "stride_v_descale", "num_slots",
    ],
)  # fmt: skip
def write(
    k_cache, v_cache, key, value, k_descale, v_descale, slot_mapping,
    stride_key_token, stride_key_head, stride_value_token, stride_value_head, stride_k_block, stride_k_token, stride_k_head,
    stride_v_block, stride_v_token, stride_v_head, stride_k_descale, stride_v_descale,
    num_slots, k_scale, v_scale,
    SHUFFLED: tl.constexpr, X: tl.constexpr, BLOCK_SIZE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, VEC: tl.constexpr, VEC_CACHE: tl.constexpr, LIMIT: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Token i goes to slot_mapping[i] = block * block_size + position, -1: nowhere. Grid (token blocks, KV heads)."""
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1).to(tl.int64)
    slots = tl.load(slot_mapping + tokens, mask=tokens < num_slots, other=-1).to(tl.int64)
    ok = slots >= 0
    slots = tl.where(ok, slots, 0)
    write_rows(
        k_cache, key, k_descale, k_scale, head, tokens, slots, ok, stride_key_token, stride_key_head, stride_k_block, stride_k_token,
        stride_k_head, stride_k_descale, SHUFFLED, False, X, BLOCK_SIZE, D, BLOCK_D, VEC, VEC_CACHE, LIMIT,
    )  # fmt: skip
    write_rows(
        v_cache, value, v_descale, v_scale, head, tokens, slots, ok, stride_value_token, stride_value_head, stride_v_block,
        stride_v_token, stride_v_head, stride_v_descale, SHUFFLED, True, X, BLOCK_SIZE, DV, BLOCK_DV, VEC, VEC_CACHE, LIMIT,
    )  # fmt: skip


@triton.jit
def gather_rows(
    out, cache, scale_pointer, scale, head, rows, positions, pages, ok, stride_out_token, stride_out_head, stride_block, stride_token,
    stride_head, stride_descale, SHUFFLED: tl.constexpr, IS_V: tl.constexpr, X: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, VEC: tl.constexpr, VEC_OUT: tl.constexpr, RUNS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    c = tl.arange(0, BLOCK_D)
    base = cache + head * stride_head * VEC
    mask = ok[:, None] & (c < D)[None, :]
    page = pages.to(tl.int64) * stride_block * VEC
    if SHUFFLED and IS_V and RUNS:
        # Every aligned run of X rows is one run of X positions, so that V comes in 16-byte pieces.
        run = tl.arange(0, X)
        first = tl.max(tl.reshape(tl.where(ok, positions, 0), (BLOCK_T // X, X)), 1) // X * X
        run_page = tl.max(tl.reshape(tl.where(ok, page, 0), (BLOCK_T // X, X)), 1)
        live = tl.max(tl.reshape(ok.to(tl.int32), (BLOCK_T // X, X)), 1) > 0
        where = (run_page + first % BLOCK_SIZE * D)[:, None, None] + (c * X)[None, :, None] + run[None, None, :]
        x = tl.load(base + where, mask=live[:, None, None] & (c < D)[None, :, None] & (run >= 0)[None, None, :], other=0.0)
        x = tl.reshape(tl.permute(x, (0, 2, 1)), (BLOCK_T, BLOCK_D))
    elif SHUFFLED:
        where = page[:, None] + element_offsets(positions % BLOCK_SIZE, c, D, X, BLOCK_SIZE, IS_V)
        x = tl.load(base + where, mask=mask, other=0.0)
    else:
        where = (page + positions % BLOCK_SIZE * stride_token * VEC)[:, None] + c[None, :]
        x = tl.load(base + where, mask=mask, other=0.0)
    x = x.to(tl.float32) * (scale * kv_load.descale(scale_pointer, head, stride_descale))
    o = out + head * stride_out_head * VEC_OUT + (rows.to(tl.int64) * stride_out_token * VEC_OUT)[:, None] + c[None, :]
    tl.store(o, x.to(out.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=[
        "stride_ko_token", "stride_ko_head", "stride_vo_token", "stride_vo_head", "stride_k_block", "stride_k_token", "stride_k_head",
        "stride_v_block", "stride_v_token", "stride_v_head", "stride_table", "stride_k_descale", "stride_v_descale", "num_seqs",
        "chunk_begin", "chunk_end",
    ],
)  # fmt: skip
def gather(
    k_out, v_out, k_cache, v_cache, k_descale, v_descale, cu_rows, starts, lengths, block_table,
    stride_ko_token, stride_ko_head, stride_vo_token, stride_vo_head, stride_k_block, stride_k_token, stride_k_head,
    stride_v_block, stride_v_token, stride_v_head, stride_table, stride_k_descale, stride_v_descale,
    num_seqs, chunk_begin, chunk_end, k_scale, v_scale,
    SHUFFLED: tl.constexpr, X: tl.constexpr, BLOCK_SIZE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, VEC: tl.constexpr, VEC_OUT: tl.constexpr, RUNS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Rows [chunk_begin, chunk_end) of all gathered rows go to the start of *_out. Grid (row blocks, KV heads).

    Row cu_rows[i] + j is position starts[i] + j of sequence i, for j < lengths[i]; rows between two sequences stay unwritten.
    RUNS promises that cu_rows, starts, chunk_begin and BLOCK_SIZE are multiples of X.
    """
    local = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1).to(tl.int64)
    rows = chunk_begin + local
    seq = seqlens.find_sequence(cu_rows, rows, num_seqs)
    ok = (rows < chunk_end) & (seq < num_seqs)
    offset = rows - tl.load(cu_rows + seq, mask=ok, other=0)
    ok = ok & (offset < tl.load(lengths + seq, mask=ok, other=0))
    positions = offset + tl.load(starts + seq, mask=ok, other=0)
    pages = tl.load(block_table + seq.to(tl.int64) * stride_table + positions // BLOCK_SIZE, mask=ok, other=0)
    gather_rows(
        k_out, k_cache, k_descale, k_scale, head, local, positions, pages, ok, stride_ko_token, stride_ko_head, stride_k_block,
        stride_k_token, stride_k_head, stride_k_descale, SHUFFLED, False, X, BLOCK_SIZE, D, BLOCK_D, VEC, VEC_OUT, RUNS, BLOCK_T,
    )  # fmt: skip
    gather_rows(
        v_out, v_cache, v_descale, v_scale, head, local, positions, pages, ok, stride_vo_token, stride_vo_head, stride_v_block,
        stride_v_token, stride_v_head, stride_v_descale, SHUFFLED, True, X, BLOCK_SIZE, DV, BLOCK_DV, VEC, VEC_OUT, RUNS, BLOCK_T,
    )  # fmt: skip
