"""Writing new tokens into a paged cache, and gathering cached tokens, and new ones behind them, into dense tensors."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tritonattn.layouts import CacheView
from tritonattn.paths import launch
from tritonattn.plan import descale as descale_of
from tritonattn.plan import power_of_two
from tritonattn.tile import kv_load, seqlens
from tritonattn.tile.fp8 import FP8_FORMATS, to_fp8_bits
from tritonattn.tuning.arch import Arch, detect
from tritonattn.tuning.table import Row, lookup
from tritonattn.where import is_capturing


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
    BLOCK_D: tl.constexpr, VEC: tl.constexpr, VEC_CACHE: tl.constexpr, FP8: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    c = tl.arange(0, BLOCK_D)
    mask = ok[:, None] & (c < D)[None, :]
    x = tl.load(source + ((tokens.to(tl.int64) * stride_token + head * stride_head) * VEC)[:, None] + c[None, :], mask=mask, other=0.0)
    y = x
    if SCALED:
        y = x.to(tl.float32) / (scale * kv_load.descale(scale_pointer, head, stride_descale))
    if FP8 is None:
        y = y.to(cache.dtype.element_ty)
    else:
        y = to_fp8_bits(y, FP8[0], FP8[1], FP8[2], FP8[3], FP8[4])
    page = cache + (slots // BLOCK_SIZE * stride_block + head * stride_cache_head) * VEC_CACHE
    if SHUFFLED:
        where = page[:, None] + element_offsets(slots % BLOCK_SIZE, c, D, X, BLOCK_SIZE, IS_V)
    else:
        where = page[:, None] + (slots % BLOCK_SIZE * stride_slot * VEC_CACHE)[:, None] + c[None, :]
    tl.store(where, y, mask=mask)


@launch.kernel
def write(
    k_cache, v_cache, key, value, k_descale, v_descale, slot_mapping,
    stride_key_token, stride_key_head, stride_value_token, stride_value_head, stride_k_block, stride_k_token, stride_k_head,
    stride_v_block, stride_v_token, stride_v_head, stride_k_descale, stride_v_descale,
    num_tokens, num_blocks, k_scale, v_scale,
    SHUFFLED: tl.constexpr, X: tl.constexpr, BLOCK_SIZE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, VEC: tl.constexpr, VEC_CACHE: tl.constexpr, FP8: tl.constexpr,
    SCALED: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Token i goes to slot_mapping[i] = block * block_size + position; outside the cache: nowhere. Grid (token blocks, KV heads)."""
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1).to(tl.int64)
    slots = tl.load(slot_mapping + tokens, mask=tokens < num_tokens, other=-1).to(tl.int64)
    ok = (slots >= 0) & (slots < num_blocks.to(tl.int64) * BLOCK_SIZE)
    slots = tl.where(ok, slots, 0)
    write_rows(
        k_cache, key, k_descale, k_scale, head, tokens, slots, ok, stride_key_token, stride_key_head, stride_k_block, stride_k_token,
        stride_k_head, stride_k_descale, SHUFFLED, False, X, BLOCK_SIZE, D, BLOCK_D, VEC, VEC_CACHE, FP8, SCALED,
    )  # fmt: skip
    write_rows(
        v_cache, value, v_descale, v_scale, head, tokens, slots, ok, stride_value_token, stride_value_head, stride_v_block,
        stride_v_token, stride_v_head, stride_v_descale, SHUFFLED, True, X, BLOCK_SIZE, DV, BLOCK_DV, VEC, VEC_CACHE, FP8, SCALED,
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


@triton.jit
def copy_rows(
    out, source, head, rows, tokens, ok, stride_out_token, stride_out_head, stride_token, stride_head, D: tl.constexpr,
    BLOCK_D: tl.constexpr, VEC: tl.constexpr, VEC_OUT: tl.constexpr,
):  # fmt: skip
    c = tl.arange(0, BLOCK_D)
    mask = ok[:, None] & (c < D)[None, :]
    x = tl.load(source + ((tokens.to(tl.int64) * stride_token + head * stride_head) * VEC)[:, None] + c[None, :], mask=mask, other=0.0)
    o = out + head * stride_out_head * VEC_OUT + (rows.to(tl.int64) * stride_out_token * VEC_OUT)[:, None] + c[None, :]
    tl.store(o, x, mask=mask)


@launch.kernel
def gather(
    k_out, v_out, k_cache, v_cache, k_new, v_new, k_descale, v_descale, cu_rows, starts, lengths, block_table, cu_seqlens_q, context_lens,
    stride_ko_token, stride_ko_head, stride_vo_token, stride_vo_head, stride_k_block, stride_k_token, stride_k_head,
    stride_v_block, stride_v_token, stride_v_head, stride_kn_token, stride_kn_head, stride_vn_token, stride_vn_head,
    stride_table, stride_k_descale, stride_v_descale, num_seqs, chunk_begin, chunk_end, k_scale, v_scale,
    SHUFFLED: tl.constexpr, X: tl.constexpr, BLOCK_SIZE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, VEC: tl.constexpr, VEC_NEW: tl.constexpr, VEC_OUT: tl.constexpr, RUNS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Rows [chunk_begin, chunk_end) of all gathered rows go to the start of *_out. Grid (row blocks, KV heads).

    Row cu_rows[i] + j is position starts[i] + j of sequence i, for j < lengths[i]; rows between two sequences stay unwritten.
    Where k_new and v_new are given, positions from context_lens[i] on are tokens cu_seqlens_q[i], ... of those, copied as they are.
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
    if k_new is not None:
        tokens = tl.where(ok, positions - tl.load(context_lens + seq, mask=ok, other=0), -1)
        ok = ok & (tokens < 0)
    pages = tl.load(block_table + seq.to(tl.int64) * stride_table + positions // BLOCK_SIZE, mask=ok, other=0)
    gather_rows(
        k_out, k_cache, k_descale, k_scale, head, local, positions, pages, ok, stride_ko_token, stride_ko_head, stride_k_block,
        stride_k_token, stride_k_head, stride_k_descale, SHUFFLED, False, X, BLOCK_SIZE, D, BLOCK_D, VEC, VEC_OUT, RUNS, BLOCK_T,
    )  # fmt: skip
    gather_rows(
        v_out, v_cache, v_descale, v_scale, head, local, positions, pages, ok, stride_vo_token, stride_vo_head, stride_v_block,
        stride_v_token, stride_v_head, stride_v_descale, SHUFFLED, True, X, BLOCK_SIZE, DV, BLOCK_DV, VEC, VEC_OUT, RUNS, BLOCK_T,
    )  # fmt: skip
    if k_new is not None:
        if tl.max(tokens, 0) >= 0:
            is_new = tokens >= 0
            tokens += tl.load(cu_seqlens_q + seq, mask=is_new, other=0)
            copy_rows(
                k_out, k_new, head, local, tokens, is_new, stride_ko_token, stride_ko_head, stride_kn_token, stride_kn_head, D, BLOCK_D,
                VEC_NEW, VEC_OUT,
            )  # fmt: skip
            copy_rows(
                v_out, v_new, head, local, tokens, is_new, stride_vo_token, stride_vo_head, stride_vn_token, stride_vn_head, DV, BLOCK_DV,
                VEC_NEW, VEC_OUT,
            )  # fmt: skip


def run_write(
    key: Tensor, value: Tensor, cache: CacheView, slot_mapping: Tensor, k_descale: float | Tensor | None,
    v_descale: float | Tensor | None,
) -> None:  # fmt: skip
    """Token i of `key` and `value` into slot slot_mapping[i] of the cache, if it has that."""
    num_tokens = slot_mapping.shape[0]
    if not num_tokens or not cache.num_kv_heads:
        return
    row, static = _config("cache_write", detect(key.device), cache.kind, cache.block_size, cache.head_size, cache.v_head_size, cache.x)
    vec, vec_cache = launch.vec_width(key, value), launch.cache_width(cache.k, cache.v)
    k_scale, v_scale = descale_of(k_descale), descale_of(v_descale)
    fp8 = FP8_FORMATS.get(cache.k.dtype)
    scaled = fp8 is not None or any(scale.pointer is not None or scale.factor != 1.0 for scale in (k_scale, v_scale))
    k_cache, v_cache = (cache.k, cache.v) if fp8 is None else (cache.k.view(torch.uint8), cache.v.view(torch.uint8))
    with launch.on(key):
        launch.run(
            write, (-(-num_tokens // static["BLOCK_T"]), cache.num_kv_heads),
            (
                k_cache, v_cache, key, value, k_scale.pointer, v_scale.pointer, slot_mapping,
                key.stride(0) // vec, key.stride(1) // vec, value.stride(0) // vec, value.stride(1) // vec,
                cache.stride_k_block // vec_cache, cache.stride_k_token // vec_cache, cache.stride_k_head // vec_cache,
                cache.stride_v_block // vec_cache, cache.stride_v_token // vec_cache, cache.stride_v_head // vec_cache,
                k_scale.stride, v_scale.stride, num_tokens, cache.num_blocks, k_scale.factor, v_scale.factor,
            ),
            {"VEC": vec, "VEC_CACHE": vec_cache, "FP8": fp8, "SCALED": scaled}, static, row,
        )  # fmt: skip


class NewTokens(NamedTuple):
    """Tokens that come behind the cached ones of each sequence and are not in the cache."""

    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    context_lens: Tensor


def gathered_rows(op: str, lengths: Tensor, out: tuple[Tensor, Tensor] | None) -> Tensor:
    """[B + 1] int32: where the rows of each sequence begin, one behind the other. Without `out` the op reads their number from the device."""
    if out is None and is_capturing(lengths.device):
        raise RuntimeError(f"{op}: out must be given while a graph is captured, which cannot read the number of its rows from the device")
    cu = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=cu[1:])
    return cu


def run_gather(
    k_out: Tensor, v_out: Tensor, cache: CacheView, k_descale: float | Tensor | None, v_descale: float | Tensor | None, *,
    cu_rows: Tensor, starts: Tensor, lengths: Tensor, block_table: Tensor, num_seqs: int, chunk: tuple[int, int], aligned: bool,
    new: NewTokens | None = None,
) -> None:  # fmt: skip
    """Rows [chunk[0], chunk[1]) of all gathered rows into the first rows of k_out, v_out [rows, KV heads, columns]; see `gather`.

    aligned: cu_rows and chunk[0] are multiples of 16, and starts, in a preshuffled cache, of the tokens in 16 bytes.
    """
    rows = chunk[1] - chunk[0]
    if not rows or not num_seqs:
        return
    row, static = _config("gather", detect(k_out.device), cache.kind, cache.block_size, cache.head_size, cache.v_head_size, cache.x)
    vec, vec_out = launch.cache_width(cache.k, cache.v), launch.vec_width(k_out, v_out)
    k_scale, v_scale = descale_of(k_descale), descale_of(v_descale)
    k_new, v_new, cu_seqlens_q, context_lens = new or (None, None, None, None)
    vec_new, strides_new = 1, (0, 0, 0, 0)
    if k_new is not None and v_new is not None:
        vec_new = launch.vec_width(k_new, v_new)
        strides_new = (k_new.stride(0) // vec_new, k_new.stride(1) // vec_new, v_new.stride(0) // vec_new, v_new.stride(1) // vec_new)
    with launch.on(k_out):
        launch.run(
            gather, (-(-rows // static["BLOCK_T"]), cache.num_kv_heads),
            (
                k_out, v_out, cache.k, cache.v, k_new, v_new, k_scale.pointer, v_scale.pointer, cu_rows, starts, lengths, block_table,
                cu_seqlens_q, context_lens,
                k_out.stride(0) // vec_out, k_out.stride(1) // vec_out, v_out.stride(0) // vec_out, v_out.stride(1) // vec_out,
                cache.stride_k_block // vec, cache.stride_k_token // vec, cache.stride_k_head // vec,
                cache.stride_v_block // vec, cache.stride_v_token // vec, cache.stride_v_head // vec, *strides_new, block_table.stride(0),
                k_scale.stride, v_scale.stride, num_seqs, *chunk, k_scale.factor, v_scale.factor,
            ),
            {"VEC": vec, "VEC_NEW": vec_new, "VEC_OUT": vec_out, "RUNS": aligned}, static, row,
        )  # fmt: skip


@lru_cache(maxsize=1024)
def _config(kernel: str, arch: Arch, kind: str, block_size: int, head_size: int, v_head_size: int, x: int) -> tuple[Row, dict]:
    row = lookup(kernel, arch, head_size=head_size, v_head_size=v_head_size, kv_layout=kind, block_size=block_size)
    return row, {
        "SHUFFLED": kind == "preshuffled", "X": x, "BLOCK_SIZE": block_size, "D": head_size, "BLOCK_D": power_of_two(head_size),
        "DV": v_head_size, "BLOCK_DV": power_of_two(v_head_size), **row.constexprs,
    }  # fmt: skip
