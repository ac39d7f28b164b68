"""Arguments of `Router` and `MlaRouter`, of their plans and runs."""

from __future__ import annotations

from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from tritonattn import layouts
from tritonattn.checks.mha import new_tokens
from tritonattn.checks.mla import latent_halves, latent_sizes
from tritonattn.checks.reasons import FLOATS, FLOATS_AND_FP8, INT32, MAX_INT32, UNKNOWN, UNKNOWN_CACHE, Ints, Reasons, either, plus
from tritonattn.layouts import CacheView
from tritonattn.plan import ROW_ALIGN, bounded
from tritonattn.problem import FP8_DTYPES, AttnParams, AttnProblem, MlaParams, default_scale


def check_router(
    num_q_heads, num_kv_heads, head_size, v_head_size, dtype, device, kv_layout, kv_dtype, decode_threshold, chunk_tokens,
    batch_invariant, block_size, softmax_scale, causal, window_size, softcap, alibi_slopes, sinks, k_descale, v_descale,
) -> tuple[torch.device, AttnParams]:  # fmt: skip
    """Arguments of `Router`. Gives its device, and the options of its layers."""
    reasons = Reasons("Router", None)
    place = reasons.place(device)
    sizes = {"num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads, "head_size": head_size}
    heads, kv_heads, size = (reasons.integer(name, value, 1) for name, value in sizes.items())
    v_size = UNKNOWN if v_head_size is None else reasons.integer("v_head_size", v_head_size, 1)  # None: that of q and k, named as theirs
    reasons.integer("decode_threshold", decode_threshold, 1)
    reasons.integer("chunk_tokens", chunk_tokens, 1)
    tokens = UNKNOWN if block_size is None else reasons.integer("block_size", block_size, 1)
    reasons.flag("batch_invariant", batch_invariant)
    reasons.options(causal, window_size, softcap, softmax_scale)
    stored = _dtypes(reasons, dtype, kv_dtype)
    if kv_layout not in layouts.PAGED_LAYOUTS:
        reasons.values.append(f"kv_layout must be one of {', '.join(layouts.PAGED_LAYOUTS)}, got {kv_layout!r}")
    reasons.heads(heads, kv_heads, size, v_size)
    if kv_layout == "preshuffled" and stored is not None:
        reasons.values += layouts.unpackable(max(tokens, 0), max(size, 0), stored)
    reasons.per_head("alibi_slopes", alibi_slopes, heads)
    reasons.per_head("sinks", sinks, heads)
    for name, value in (("k_descale", k_descale), ("v_descale", v_descale)):
        reasons.descale(name, value, kv_heads)
    reasons.hardware(stored)
    reasons.done()
    params = AttnParams(
        default_scale(softmax_scale, head_size), causal, bounded(window_size), float(softcap), alibi_slopes, sinks,
        None, k_descale, v_descale,
    )  # fmt: skip
    return place, params


def _dtypes(reasons: Reasons, dtype: torch.dtype, kv_dtype: torch.dtype) -> torch.dtype | None:
    """Of the queries and of the cache. Gives the latter, if it can be one."""
    if dtype not in FLOATS:
        reasons.types.append(f"dtype must be {either(FLOATS)}, got {dtype}")
    elif kv_dtype is not dtype and kv_dtype not in FP8_DTYPES:
        reasons.types.append(f"kv_dtype must be {dtype} like dtype, or an 8-bit float, got {kv_dtype}")
    return kv_dtype if kv_dtype in FLOATS_AND_FP8 else None


def check_plan(query_lens, seq_lens, block_table, device, block_size, decode_threshold) -> tuple[Ints, Ints, Ints, int]:
    """Arguments of `Router.plan`, whose lengths the host knows. Gives query, sequence and context lengths as int32, and the longest."""
    reasons = Reasons("Router.plan", None, device)
    query, seq = reasons.lengths("query_lens", query_lens), reasons.lengths("seq_lens", seq_lens)
    if block_table is not None:
        _, blocks = reasons.rows("block_table", block_table, 2, INT32)
    if query is None or seq is None or len(query) != len(seq):
        _apart(reasons, "seq_lens", query, seq)
    context, longest = seq - query, 0
    if len(query):
        longest, signs = int(seq.item(seq.argmax())), query | context  # `max` takes four times as long
        if signs.item(signs.argmin()) < 0:
            reasons.each("query_lens must be at least 0", query, query < 0)
            reasons.each("seq_lens must be at least query_lens", seq, context < 0)
        if (longest + ROW_ALIGN) * len(query) > MAX_INT32:  # else no sum can be too large
            rows = -(-seq[query > decode_threshold] // ROW_ALIGN) * ROW_ALIGN
            for what, lens in (("query_lens", query), (f"seq_lens of extend requests, in steps of {ROW_ALIGN},", rows)):
                if (tokens := int(lens.sum(dtype=np.int64))) > MAX_INT32:
                    reasons.values.append(f"{what} must add up to at most {MAX_INT32}, got {tokens}")
        if block_table is not None:
            reasons.shape("block_table", block_table, (len(query), -1))
        elif context.any():
            reasons.each("block_table must be given where a request has context", seq, context > 0)
        if block_table is not None and block_size is not None:
            held = blocks * block_size
            if longest > held >= 0:
                stored = np.where((query > decode_threshold) | (context == 0), context, seq)
                reasons.each(f"seq_lens must fit in block_table, {held} tokens in the cache", stored, stored > held)
    reasons.done()
    return query, seq, context, longest


def _apart(reasons: Reasons, name: str, query: Ints | None, lens: Ints | None) -> NoReturn:
    """Refuses lengths of which at least one kind is none, or that are not equally many; ``name``: of the others."""
    if query is not None:
        reasons.each("query_lens must be at least 0", query, query < 0)
    if lens is not None:
        reasons.each(f"{name} must be at least 0", lens, lens < 0)
    if query is not None and lens is not None:
        reasons.values.append(f"{name} must be as long as query_lens, {len(query)}, got {len(lens)}")
    reasons.refuse()


def check_lengths(op, query_lens, context_lens, decode_threshold) -> tuple[Ints, Ints]:
    """Arguments of `classify` and `reorder_batch`. Gives the lengths as int32."""
    reasons = Reasons(op, None)
    query, context = reasons.lengths("query_lens", query_lens), reasons.lengths("context_lens", context_lens)
    reasons.integer("decode_threshold", decode_threshold, 1)
    if query is None or context is None or len(query) != len(context):
        _apart(reasons, "context_lens", query, context)
    reasons.each("query_lens must be at least 0", query, query < 0)
    reasons.each("context_lens must be at least 0", context, context < 0)
    reasons.done()
    return query, context


STALE = "plan must be the latest of its batch size (decode-only plans of one size share a buffer), got an earlier one"


def check_run(
    problem: AttnProblem, params: AttnParams, q, k, v, k_cache, v_cache, block_table, *, kv_layout, device, block_size, num_tokens,
    reads, fresh, out, sinks, k_descale, v_descale,
) -> tuple[CacheView | None, AttnParams]:  # fmt: skip
    """Arguments of `Router.run` beside what its router and plan have fixed. ``reads``: most cached tokens of a request."""
    reasons = Reasons("Router.run", None, device)
    if not fresh:
        reasons.values.append(STALE)
    tokens, _, _ = reasons.rows("q", q, 3, (problem.dtype,))
    new_tokens(reasons, k, v, (problem.dtype,))
    cache, heads = None, problem.num_kv_heads
    reasons.shape("q", q, (-1, problem.num_q_heads, problem.head_size))
    if num_tokens > tokens != UNKNOWN:
        reasons.values.append(f"q must hold the {num_tokens} tokens of the plan, got {tokens}")
    reasons.shape("k", k, (tokens, heads, problem.head_size))
    reasons.shape("v", v, (tokens, heads, problem.v_head_size))
    if reads or k_cache is not None or v_cache is not None:
        cache = reasons.cache(k_cache, v_cache, kv_layout)
        if isinstance(k_cache, Tensor) and k_cache.dtype is not problem.kv_dtype:
            reasons.types.append(f"k_cache must be {problem.kv_dtype}, got {k_cache.dtype}")
    if cache is not None and cache is not UNKNOWN_CACHE:
        got, need = cache[6:9], (heads, problem.head_size, problem.v_head_size)
        if got != need:
            reasons.values.append(f"caches must have KV heads, D and Dv {list(need)}, got {list(got)}")
        if block_size is not None and cache.block_size != block_size:
            reasons.values.append(f"caches must have the router's block size {block_size}, got {cache.block_size}")
        held = 0 if block_table is None else block_table.shape[1] * cache.block_size
        if reads > held:
            reasons.values.append(f"block_table must hold {reads} tokens, got room for {held} in blocks of {cache.block_size}")
    if out is not None:
        reasons.out(out, (tokens, problem.num_q_heads, problem.v_head_size))
    own = {"sinks": sinks, "k_descale": k_descale, "v_descale": v_descale}
    own = {name: value for name, value in own.items() if value is not None}
    for name, value in own.items():
        if name == "sinks":
            reasons.per_head(name, value, problem.num_q_heads)
        else:
            reasons.descale(name, value, heads)
    reasons.done()
    return cache, params._replace(**own) if own else params


def check_mla_router(
    num_heads, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, dtype, device, kv_dtype, decode_threshold, chunk_tokens,
    block_size, softmax_scale, causal, kv_descale, rope_descale,
) -> tuple[torch.device, AttnParams, MlaParams]:  # fmt: skip
    """Arguments of `MlaRouter`. Gives its device, and the options of the dense passes and of decode."""
    reasons = Reasons("MlaRouter", None)
    place = reasons.place(device)
    sizes = {
        "num_heads": num_heads, "kv_lora_rank": kv_lora_rank, "qk_nope_head_dim": qk_nope_head_dim, "qk_rope_head_dim": qk_rope_head_dim,
        "v_head_dim": v_head_dim, "decode_threshold": decode_threshold, "chunk_tokens": chunk_tokens,
    }  # fmt: skip
    heads, rank, nope, rope, v_size, *_ = (reasons.integer(name, value, 1) for name, value in sizes.items())
    if block_size is not None:
        reasons.integer("block_size", block_size, 1)
    reasons.options(causal, (-1, -1), 0.0, None)
    reasons.number("softmax_scale", softmax_scale, positive=True)
    reasons.heads(heads, heads, plus(nope, rope), v_size)
    latent_sizes(reasons, rank, plus(rank, rope))
    reasons.descale("kv_descale", kv_descale, 1)
    reasons.descale("rope_descale", rope_descale, 1)
    reasons.hardware(_dtypes(reasons, dtype, kv_dtype))
    reasons.done()
    scale = float(softmax_scale)
    return place, AttnParams(scale, causal), MlaParams(scale, causal, None, kv_descale, rope_descale)


def check_mla_run(
    paged: AttnProblem, dense: AttnProblem, params: MlaParams, q, k, v, kv_cache, block_table, *, device, block_size, num_tokens, reads,
    only_decodes, fresh, out, kv_descale, rope_descale, functions,
) -> tuple[CacheView | None, MlaParams]:  # fmt: skip
    """Arguments of `MlaRouter.run`; ``functions``: those that this batch needs. The view has the latent columns as K and the rope columns as V."""
    reasons = Reasons("MlaRouter.run", None, device)
    for name, function in functions.items():
        if not callable(function):
            reasons.types.append(f"{name} must be callable, got {type(function).__name__}")
    if not fresh:
        reasons.values.append(STALE)
    tokens, _, _ = reasons.rows("q", q, 3, (dense.dtype,))
    if k is not None or v is not None or not only_decodes:
        reasons.rows("k", k, 3, (dense.dtype,))
        reasons.rows("v", v, 3, (dense.dtype,))
    heads = dense.num_q_heads
    reasons.shape("q", q, (-1, heads, dense.head_size))
    if num_tokens > tokens != UNKNOWN:
        reasons.values.append(f"q must hold the {num_tokens} tokens of the plan, got {tokens}")
    reasons.shape("k", k, (tokens, heads, dense.head_size))
    reasons.shape("v", v, (tokens, heads, dense.v_head_size))
    if reads or kv_cache is not None:
        _, size, _ = reasons.rows("kv_cache", kv_cache, 3, (paged.kv_dtype,))
        reasons.shape("kv_cache", kv_cache, (-1, -1 if block_size is None else block_size, paged.head_size))
        held = 0 if block_table is None else block_table.shape[1] * size
        if reads > held and size != UNKNOWN:
            reasons.values.append(f"block_table must hold {reads} tokens, got room for {held} in blocks of {size}")
    reasons.out(out, (tokens, heads, dense.v_head_size))
    reasons.descale("kv_descale", kv_descale, 1)
    reasons.descale("rope_descale", rope_descale, 1)
    reasons.done()
    own = {name: value for name, value in (("kv_descale", kv_descale), ("rope_descale", rope_descale)) if value is not None}
    return None if kv_cache is None else latent_halves(kv_cache, paged.v_head_size), params._replace(**own) if own else params


def check_absorbed(q, problem: AttnProblem, num_tokens: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """What `absorb` gave back: one tensor, or a latent and a rope part."""
    latent, rope = q if isinstance(q, tuple | list) and len(q) == 2 else (q, None)
    reasons = Reasons("MlaRouter.run", None, device)
    reasons.rows("q from absorb", latent, 3, (problem.dtype,))
    if rope is not None:
        reasons.rows("rope part of q from absorb", rope, 3, (problem.dtype,))
    width = problem.head_size if rope is None else problem.v_head_size
    reasons.shape("q from absorb", latent, (num_tokens, problem.num_q_heads, width))
    if rope is not None:
        need = (num_tokens, problem.num_q_heads, problem.head_size - problem.v_head_size)
        reasons.shape("rope part of q from absorb", rope, need)
    reasons.done()
    return latent, rope


def check_projected(v, problem: AttnProblem, num_tokens: int, device: torch.device) -> Tensor:
    """What `up_project_v` gave back. It is rounded to the dtype of the result, whatever float it is."""
    reasons = Reasons("MlaRouter.run", None, device)
    reasons.tensor("v from up_project_v", v, 3, FLOATS)
    reasons.shape("v from up_project_v", v, (num_tokens, problem.num_q_heads, problem.v_head_size))
    reasons.done()
    return v
