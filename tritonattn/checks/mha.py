"""Arguments of the ops of multi-head attention, of merging and of the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tritonattn.checks.reasons import FLOATS, FLOATS_AND_FP8, FP32, INT32, INTS, MAX_INT32, UNKNOWN, Reasons, dtype_of, plus, same_as
from tritonattn.layouts import CacheView
from tritonattn.plan import MAX_SPLITS, UNLIMITED, bounded
from tritonattn.problem import FP8_DTYPES, AttnParams, AttnProblem, default_scale


def problem_of(
    q: Tensor, num_kv_heads: int, v_head_size: int, kv_dtype: torch.dtype, kv_layout: str, block_size: int,
    params: AttnParams,
) -> AttnProblem:  # fmt: skip
    _, num_q_heads, head_size = q.shape
    return AttnProblem(
        num_q_heads, num_kv_heads, head_size, v_head_size, q.dtype, kv_dtype, kv_layout, block_size, params.causal,
        params.window_size != (-1, -1), params.softcap > 0, params.alibi_slopes is not None, params.sinks is not None,
    )  # fmt: skip


# -- attention ------------------------------------------------------------------------------------------------


def check_prefill(
    q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size, softcap,
    alibi_slopes, sinks, q_descale, k_descale, v_descale, out,
) -> tuple[AttnProblem, AttnParams]:  # fmt: skip
    """Arguments of `flash_attn_varlen_func`."""
    reasons = Reasons("flash_attn_varlen_func", q)
    reasons.options(causal, window_size, softcap, softmax_scale)
    reasons.longest("max_seqlen_q", max_seqlen_q)
    reasons.longest("max_seqlen_k", max_seqlen_k)
    tokens, num_q_heads, head_size = reasons.rows("q", q, 3, FLOATS_AND_FP8)
    same = same_as(q, FLOATS_AND_FP8)
    num_keys, num_kv_heads, _ = reasons.rows("k", k, 3, same)
    _, _, v_head_size = reasons.rows("v", v, 3, same)
    (ends_q,) = reasons.rows("cu_seqlens_q", cu_seqlens_q, 1, INT32)
    (ends_k,) = reasons.rows("cu_seqlens_k", cu_seqlens_k, 1, INT32)
    reasons.heads(num_q_heads, num_kv_heads, head_size, v_head_size)
    reasons.shape("k", k, (-1, -1, head_size))
    reasons.shape("v", v, (num_keys, num_kv_heads, -1))
    if UNKNOWN not in (ends_q, ends_k) and (ends_q < 1 or ends_k != ends_q):
        reasons.values.append(f"cu_seqlens_q and cu_seqlens_k must both be [B + 1], got lengths {ends_q} and {ends_k}")
    reasons.hardware(dtype_of(q))
    params = _attention_options(
        reasons, (tokens, num_q_heads, head_size), num_kv_heads, v_head_size, softmax_scale, causal, window_size, softcap, alibi_slopes, sinks,
        q_descale, k_descale, v_descale, out,
    )  # fmt: skip
    return problem_of(q, num_kv_heads, v_head_size, q.dtype, "dense", 0, params), params


def check_extend(
    q, k, v, k_cache, v_cache, *, cu_seqlens_q, context_lens, block_table, max_seqlen_q, max_context_len, total_context_len,
    kv_layout, chunk_tokens, softmax_scale, causal, window_size, softcap, alibi_slopes, sinks, k_descale, v_descale, out,
) -> tuple[AttnProblem, CacheView, AttnParams]:  # fmt: skip
    """Arguments of `extend_attention`."""
    reasons = Reasons("extend_attention", q)
    reasons.options(causal, window_size, softcap, softmax_scale)
    reasons.longest("max_seqlen_q", max_seqlen_q)
    longest = reasons.longest("max_context_len", max_context_len)
    if total_context_len is not None:
        reasons.integer("total_context_len", total_context_len, 0)
    reasons.integer("chunk_tokens", chunk_tokens, 1)
    sizes = reasons.rows("q", q, 3, FLOATS)
    new_tokens(reasons, k, v, same_as(q, FLOATS))
    reasons.rows("cu_seqlens_q", cu_seqlens_q, 1, INT32)
    (batch,) = reasons.rows("context_lens", context_lens, 1, INT32)
    reasons.shape("cu_seqlens_q", cu_seqlens_q, (plus(batch, 1),))
    reasons.table(block_table, batch, longest)
    cache = reasons.cache(k_cache, v_cache, kv_layout)
    _against_cache(reasons, q, sizes, k_cache, cache)
    if k is not None:
        reasons.shape("k", k, (sizes[0], cache.num_kv_heads, cache.head_size))
        reasons.shape("v", v, (sizes[0], cache.num_kv_heads, cache.v_head_size))
    params = _attention_options(
        reasons, sizes, cache.num_kv_heads, cache.v_head_size, softmax_scale, causal, window_size, softcap, alibi_slopes,
        sinks, None, k_descale, v_descale, out,
    )  # fmt: skip
    problem = problem_of(q, cache.num_kv_heads, cache.v_head_size, k_cache.dtype, cache.kind, cache.block_size, params)
    return problem, cache, params


def check_decode(
    q, k_cache, v_cache, *, seqused_k, block_table, max_seqlen_k, cu_seqlens_q, max_seqlen_q, kv_layout, num_splits, ragged,
    softmax_scale, causal, window_size, softcap, alibi_slopes, sinks, q_descale, k_descale, v_descale, out, ranks: Ranks | None = None,
) -> tuple[AttnProblem, CacheView, AttnParams]:  # fmt: skip
    """Arguments of `decode_attention`, and of `cp_decode_attention`."""
    reasons = Reasons("decode_attention" if ranks is None else "cp_decode_attention", q)
    reasons.options(causal, window_size, softcap, softmax_scale)
    if ranks is not None:
        over_ranks(reasons, ranks, out, window_size, alibi_slopes)
    longest = reasons.longest("max_seqlen_k", max_seqlen_k)
    most = reasons.longest("max_seqlen_q", max_seqlen_q, 1)
    reasons.integer("num_splits", num_splits, 0, MAX_SPLITS)
    reasons.flag("ragged", ragged)
    sizes = reasons.rows("q", q, 3, FLOATS_AND_FP8)
    (batch,) = reasons.rows("seqused_k", seqused_k, 1, INT32)
    reasons.table(block_table, batch, longest)
    query_rows(reasons, "q", sizes[0], cu_seqlens_q, batch, most)
    cache = reasons.cache(k_cache, v_cache, kv_layout)
    _against_cache(reasons, q, sizes, k_cache, cache)
    params = _attention_options(
        reasons, sizes, cache.num_kv_heads, cache.v_head_size, softmax_scale, causal, window_size, softcap, alibi_slopes,
        sinks, q_descale, k_descale, v_descale, out,
    )  # fmt: skip
    problem = problem_of(q, cache.num_kv_heads, cache.v_head_size, k_cache.dtype, cache.kind, cache.block_size, params)
    return problem, cache, params


class Ranks(NamedTuple):
    """The group over whose ranks the keys of a decode call are spread."""

    group: object
    size: int
    """`UNKNOWN` where this rank is not in it."""
    new_tokens_on: int


def over_ranks(reasons: Reasons, ranks: Ranks, out, window_size=(-1, -1), alibi_slopes=None) -> None:
    """What such a call has besides, and what it cannot have: no rank knows the place of its keys in the whole sequence."""
    if ranks.size == UNKNOWN:
        reasons.types.append(f"group must be a process group that this rank is in, or None, got {type(ranks.group).__name__}")
        reasons.integer("new_tokens_on", ranks.new_tokens_on, -MAX_INT32)
    else:
        reasons.integer("new_tokens_on", ranks.new_tokens_on, -ranks.size, ranks.size - 1)
    if isinstance(window_size, tuple | list) and any(isinstance(side, int | np.integer) and 0 <= side < UNLIMITED for side in window_size):
        reasons.values.append(f"window_size is not supported over several ranks, got {window_size!r}")
    reasons.values += [f"{name} is not supported over several ranks" for name, x in (("alibi_slopes", alibi_slopes), ("out", out)) if x is not None]


def query_rows(reasons: Reasons, name: str, tokens: int, cu_seqlens_q, batch: int, max_seqlen_q: int) -> None:
    """Query tokens of a decode call: divided by ``cu_seqlens_q``, or ``max_seqlen_q`` for each sequence."""
    if cu_seqlens_q is not None:
        reasons.rows("cu_seqlens_q", cu_seqlens_q, 1, INT32)
        reasons.shape("cu_seqlens_q", cu_seqlens_q, (plus(batch, 1),))
    elif UNKNOWN not in (tokens, batch, max_seqlen_q) and tokens < batch * max_seqlen_q:
        need = f"{batch} sequences of max_seqlen_q {max_seqlen_q} tokens"
        reasons.values.append(f"{name} must hold {need} where cu_seqlens_q is None, got {tokens} tokens")


def cache_dtype(reasons: Reasons, name: str, beside: str, tensor: Tensor, cache: Tensor) -> None:
    """The cache has the dtype of what is read or written beside it, or it is an 8-bit float of this hardware."""
    dtype, kv_dtype = dtype_of(tensor), dtype_of(cache)
    if dtype is not kv_dtype and dtype in FLOATS_AND_FP8 and kv_dtype in FLOATS_AND_FP8 and (dtype in FP8_DTYPES or kv_dtype not in FP8_DTYPES):
        need = f"{dtype}" if dtype in FP8_DTYPES else f"{dtype} like {beside}, or an 8-bit float"
        reasons.types.append(f"{name} must be {need}, got {kv_dtype}")
    reasons.hardware(kv_dtype)


def new_tokens(reasons: Reasons, k, v, dtypes: Sequence[torch.dtype]) -> None:
    """New keys and values of one of these dtypes, or both None: then they are in the cache."""
    if (k is None) != (v is None):
        reasons.types.append(f"k and v must both be tensors or both be None, got {type(k).__name__} and {type(v).__name__}")
    for name, new in (("k", k), ("v", v)):
        if new is not None:
            reasons.rows(name, new, 3, dtypes)


def _against_cache(reasons: Reasons, q: Tensor, sizes: Sequence[int], k_cache: Tensor, cache: CacheView) -> None:
    """The query beside the cache: heads, head sizes, dtypes, hardware."""
    _, num_q_heads, head_size = sizes
    reasons.heads(num_q_heads, cache.num_kv_heads, cache.head_size, cache.v_head_size)
    if UNKNOWN not in (head_size, cache.head_size) and head_size != cache.head_size:
        reasons.values.append(f"q must be [.., .., {cache.head_size}] like k_cache, got {list(q.shape)}")
    cache_dtype(reasons, "k_cache", "q", q, k_cache)


def _attention_options(
    reasons: Reasons, sizes, num_kv_heads, v_head_size, softmax_scale, causal, window_size, softcap, alibi_slopes, sinks,
    q_descale, k_descale, v_descale, out,
) -> AttnParams:  # fmt: skip
    """The last checks: options that are tensors, and the result. Raises, or gives all options as one value."""
    tokens, num_q_heads, head_size = sizes
    if alibi_slopes is not None:
        reasons.per_head("alibi_slopes", alibi_slopes, num_q_heads)
    if sinks is not None:
        reasons.per_head("sinks", sinks, num_q_heads)
    if q_descale is not None:
        reasons.descale("q_descale", q_descale, num_kv_heads)
    if k_descale is not None:
        reasons.descale("k_descale", k_descale, num_kv_heads)
    if v_descale is not None:
        reasons.descale("v_descale", v_descale, num_kv_heads)
    if out is not None:
        reasons.out(out, (tokens, num_q_heads, v_head_size))
    reasons.done()
    return AttnParams(
        default_scale(softmax_scale, head_size), causal, bounded(window_size), float(softcap), alibi_slopes, sinks,
        q_descale, k_descale, v_descale,
    )  # fmt: skip


# -- cache and merge ------------------------------------------------------------------------------------------


def check_merge(out_a, lse_a, out_b, lse_b, *, out) -> None:
    """Arguments of `merge_attn_states`."""
    reasons = Reasons("merge_attn_states", out_a)
    tokens, heads, size = reasons.rows("out_a", out_a, 3, FLOATS)
    reasons.rows("out_b", out_b, 3, same_as(out_a, FLOATS))
    reasons.rows("lse_a", lse_a, 2, FP32)
    reasons.rows("lse_b", lse_b, 2, FP32)
    reasons.shape("out_b", out_b, (tokens, heads, size))
    reasons.shape("lse_a", lse_a, (heads, tokens))
    reasons.shape("lse_b", lse_b, (heads, tokens))
    reasons.out(out, (tokens, heads, size))
    reasons.hardware()
    reasons.done()


def check_reshape_and_cache(key, value, k_cache, v_cache, slot_mapping, *, kv_layout, k_descale, v_descale) -> CacheView:
    """Arguments of `reshape_and_cache`. ``slot_mapping`` may be shorter than ``key``: the rest is padding."""
    reasons = Reasons("reshape_and_cache", key)
    tokens, _, _ = reasons.rows("key", key, 3, FLOATS)
    reasons.rows("value", value, 3, same_as(key, FLOATS))
    slots(reasons, slot_mapping, "key", tokens)
    cache = reasons.cache(k_cache, v_cache, kv_layout)
    reasons.written("k_cache", k_cache)
    reasons.written("v_cache", v_cache)
    reasons.apart("k_cache", k_cache, "v_cache", v_cache)
    reasons.shape("key", key, (-1, cache.num_kv_heads, cache.head_size))
    reasons.shape("value", value, (tokens, cache.num_kv_heads, cache.v_head_size))
    cache_dtype(reasons, "k_cache", "key", key, k_cache)
    reasons.descale("k_descale", k_descale, cache.num_kv_heads)
    reasons.descale("v_descale", v_descale, cache.num_kv_heads)
    reasons.done()
    return cache


def slots(reasons: Reasons, slot_mapping: Tensor, name: str, tokens: int) -> None:
    """Where the tokens of a write go, as far as they are no padding."""
    (count,) = reasons.rows("slot_mapping", slot_mapping, 1, INTS)
    if count > tokens != UNKNOWN:
        reasons.values.append(f"slot_mapping must be at most as long as {name}, {tokens} tokens, got {count}")


def check_gather(k_cache, v_cache, block_table, starts, lengths, *, kv_layout, k_descale, v_descale, out) -> CacheView:
    """Arguments of `gather_cache`; ``out`` is a pair ``[n, Hkv, D]``, ``[n, Hkv, Dv]`` or None."""
    reasons = Reasons("gather_cache", k_cache)
    spans(reasons, block_table, starts, lengths)
    cache = reasons.cache(k_cache, v_cache, kv_layout)
    heads = cache.num_kv_heads
    if out is not None:
        gathered(reasons, out, "(k, v)", (heads, cache.head_size), (heads, cache.v_head_size))
    reasons.descale("k_descale", k_descale, heads)
    reasons.descale("v_descale", v_descale, heads)
    reasons.hardware(dtype_of(k_cache))
    reasons.done()
    return cache


def spans(reasons: Reasons, block_table: Tensor, starts: Tensor, lengths: Tensor) -> None:
    """What is gathered of each sequence."""
    (batch,) = reasons.rows("starts", starts, 1, INT32)
    reasons.rows("lengths", lengths, 1, INT32)
    reasons.shape("lengths", lengths, (batch,))
    reasons.table(block_table, batch, 0)


def gathered(reasons: Reasons, out, names: str, first: tuple[int, ...], second: tuple[int, ...]) -> None:
    """A pair of tensors that rows of these shapes go to."""
    if not isinstance(out, tuple | list) or len(out) != 2:
        reasons.types.append(f"out must be a pair {names} of tensors, got {type(out).__name__}")
        return
    rows, *_ = reasons.rows("out[0]", out[0], 1 + len(first), FLOATS)
    reasons.rows("out[1]", out[1], 1 + len(second), FLOATS)
    reasons.shape("out[0]", out[0], (-1, *first))
    reasons.shape("out[1]", out[1], (rows, *second))
    reasons.written("out[0]", out[0])
    reasons.written("out[1]", out[1])
    reasons.apart("out[0]", out[0], "out[1]", out[1])
