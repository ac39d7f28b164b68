"""Arguments of the ops of multi-head latent attention."""

from __future__ import annotations

import torch
from torch import Tensor

from tritonattn import layouts
from tritonattn.checks.mha import cache_dtype, problem_of, query_rows
from tritonattn.checks.reasons import FLOATS, FLOATS_AND_FP8, INT32, INTS, Reasons
from tritonattn.layouts import CacheView
from tritonattn.problem import AttnParams, AttnProblem, MlaParams

MIN_LATENT, MAX_LATENT, MIN_ROPE, MAX_ROPE, LATENT_STEP = 32, 512, 16, 128, 16


def check_mla_decode(
    q, kv_cache, *, seqused_k, block_table, max_seqlen_k, softmax_scale, kv_lora_rank, cu_seqlens_q, max_seqlen_q, num_splits,
    causal, q_descale, kv_descale, rope_descale, out,
) -> tuple[AttnProblem, MlaParams, Tensor, Tensor | None]:  # fmt: skip
    """Arguments of `mla_decode`. Gives q, or its latent and its rope part where it came as a pair."""
    pair = isinstance(q, tuple | list)
    if pair and len(q) != 2:
        raise ValueError(f"mla_decode: q must be a tensor or a pair (latent, rope), got {len(q)} of them")
    q, q_rope = q if pair else (q, None)
    name = "q[0]" if pair else "q"
    reasons = Reasons("mla_decode", q)
    reasons.rows(name, q, 3, FLOATS_AND_FP8)
    if q_rope is not None:
        reasons.rows("q[1]", q_rope, 3, (q.dtype,) if isinstance(q, Tensor) else FLOATS_AND_FP8)
    reasons.options(causal, (-1, -1), 0.0, None)
    reasons.number("softmax_scale", softmax_scale, positive=True)
    reasons.integer("max_seqlen_k", max_seqlen_k, 0)
    reasons.integer("max_seqlen_q", max_seqlen_q, 1)
    reasons.integer("num_splits", num_splits, 0)
    reasons.rows("seqused_k", seqused_k, 1, INT32)
    reasons.rows("block_table", block_table, 2, INT32)
    if cu_seqlens_q is not None:
        reasons.rows("cu_seqlens_q", cu_seqlens_q, 1, INT32)
    reasons.rows("kv_cache", kv_cache, 3, FLOATS_AND_FP8)
    _latent_rank(reasons, kv_lora_rank)
    reasons.stop()
    tokens, heads, _ = q.shape
    width, batch = kv_cache.shape[2], len(seqused_k)
    latent_sizes(reasons, kv_lora_rank, width)
    if q_rope is not None:
        reasons.shape("q[0]", q, (-1, -1, kv_lora_rank))
        reasons.shape("q[1]", q_rope, (tokens, heads, width - kv_lora_rank))
    else:
        reasons.shape("q", q, (-1, -1, width))
    if heads < 1:
        reasons.values.append(f"q must have at least 1 head, got {heads}")
    reasons.table(block_table, batch, max_seqlen_k)
    query_rows(reasons, name, tokens, cu_seqlens_q, batch, max_seqlen_q)
    cache_dtype(reasons, "kv_cache", q.dtype, kv_cache.dtype)
    reasons.descale("q_descale", q_descale, 1)
    reasons.descale("kv_descale", kv_descale, 1)
    reasons.descale("rope_descale", rope_descale, 1)
    reasons.out(out, (tokens, heads, kv_lora_rank))
    reasons.done()
    problem = AttnProblem(heads, 1, width, kv_lora_rank, q.dtype, kv_cache.dtype, "latent", kv_cache.shape[1], causal)
    return problem, MlaParams(softmax_scale, causal, q_descale, kv_descale, rope_descale), q, q_rope


def check_mla_extend(
    q, k, v, kv_cache, *, up_project, cu_seqlens_q, context_lens, block_table, max_seqlen_q, max_context_len, total_context_len,
    softmax_scale, kv_lora_rank, chunk_tokens, causal, kv_descale, rope_descale, out,
) -> tuple[AttnProblem, CacheView, AttnParams]:  # fmt: skip
    """Arguments of `mla_extend`. The view has the latent columns as K and the rope columns as V."""
    reasons = Reasons("mla_extend", q)
    reasons.rows("q", q, 3, FLOATS)
    same = (q.dtype,) if isinstance(q, Tensor) else FLOATS
    reasons.rows("k", k, 3, same)
    reasons.rows("v", v, 3, same)
    if not callable(up_project):
        reasons.types.append(f"up_project must be callable, got {type(up_project).__name__}")
    reasons.options(causal, (-1, -1), 0.0, None)
    reasons.number("softmax_scale", softmax_scale, positive=True)
    reasons.integer("max_seqlen_q", max_seqlen_q, 0)
    reasons.integer("max_context_len", max_context_len, 0)
    if total_context_len is not None:
        reasons.integer("total_context_len", total_context_len, 0)
    reasons.integer("chunk_tokens", chunk_tokens, 1)
    reasons.rows("cu_seqlens_q", cu_seqlens_q, 1, INT32)
    reasons.rows("context_lens", context_lens, 1, INT32)
    reasons.rows("block_table", block_table, 2, INT32)
    reasons.rows("kv_cache", kv_cache, 3, FLOATS_AND_FP8)
    _latent_rank(reasons, kv_lora_rank)
    reasons.stop()
    tokens, num_q_heads, head_size = q.shape
    num_kv_heads, v_head_size = v.shape[1:]
    batch = len(context_lens)
    reasons.heads(num_q_heads, num_kv_heads, head_size, v_head_size)
    reasons.shape("k", k, (tokens, num_kv_heads, head_size))
    reasons.shape("v", v, (tokens, -1, -1))
    reasons.shape("cu_seqlens_q", cu_seqlens_q, (batch + 1,))
    reasons.table(block_table, batch, max_context_len)
    latent_sizes(reasons, kv_lora_rank, kv_cache.shape[2])
    cache_dtype(reasons, "kv_cache", q.dtype, kv_cache.dtype)
    reasons.descale("kv_descale", kv_descale, 1)
    reasons.descale("rope_descale", rope_descale, 1)
    reasons.out(out, (tokens, num_q_heads, v_head_size))
    reasons.done()
    params = AttnParams(softmax_scale, causal)
    return problem_of(q, num_kv_heads, v_head_size, q.dtype, "dense", 0, params), latent_halves(kv_cache, kv_lora_rank), params


def check_up_projected(made, num_tokens: int, problem: AttnProblem, device: torch.device) -> tuple[Tensor, Tensor]:
    """What `up_project` gave back: keys and values of that many tokens."""
    if not isinstance(made, tuple | list) or len(made) != 2:
        got = f"{len(made)} of them" if isinstance(made, tuple | list) else type(made).__name__
        raise TypeError(f"mla_extend: up_project must give back a pair (k, v) of tensors, got {got}")
    k, v = made
    reasons = Reasons("mla_extend", None, device)
    reasons.rows("k from up_project", k, 3, (problem.dtype,))
    reasons.rows("v from up_project", v, 3, (problem.dtype,))
    reasons.stop()
    reasons.shape("k from up_project", k, (num_tokens, problem.num_kv_heads, problem.head_size))
    reasons.shape("v from up_project", v, (num_tokens, problem.num_kv_heads, problem.v_head_size))
    reasons.done()
    return k, v


def check_mla_cache_write(latent, rope, kv_cache, slot_mapping, *, kv_descale, rope_descale) -> CacheView:
    """Arguments of `mla_cache_write`. The view has the latent columns as K and the rope columns as V."""
    reasons = Reasons("mla_cache_write", latent)
    reasons.rows("latent", latent, 2, FLOATS)
    reasons.rows("rope", rope, 2, (latent.dtype,) if isinstance(latent, Tensor) else FLOATS)
    reasons.rows("kv_cache", kv_cache, 3, FLOATS_AND_FP8)
    reasons.written("kv_cache", kv_cache)
    reasons.rows("slot_mapping", slot_mapping, 1, INTS)
    reasons.stop()
    tokens, kv_lora_rank = latent.shape
    width = kv_cache.shape[2]
    latent_sizes(reasons, kv_lora_rank, width)
    reasons.shape("rope", rope, (tokens, width - kv_lora_rank))
    if len(slot_mapping) > tokens:
        reasons.values.append(f"slot_mapping must be at most as long as latent, {tokens} tokens, got {len(slot_mapping)}")
    cache_dtype(reasons, "kv_cache", latent.dtype, kv_cache.dtype)
    reasons.descale("kv_descale", kv_descale, 1)
    reasons.descale("rope_descale", rope_descale, 1)
    reasons.done()
    return latent_halves(kv_cache, kv_lora_rank)


def check_mla_gather(
    kv_cache, block_table, starts, lengths, *, kv_lora_rank, kv_descale, rope_descale, out
) -> CacheView:  # fmt: skip
    """Arguments of `mla_gather_cache`; ``out`` is a pair ``[n, latent]``, ``[n, rope]`` or None."""
    reasons = Reasons("mla_gather_cache", kv_cache)
    reasons.rows("kv_cache", kv_cache, 3, FLOATS_AND_FP8)
    reasons.rows("block_table", block_table, 2, INT32)
    reasons.rows("starts", starts, 1, INT32)
    reasons.rows("lengths", lengths, 1, INT32)
    _latent_rank(reasons, kv_lora_rank)
    if out is not None:
        if not isinstance(out, tuple | list) or len(out) != 2:
            reasons.types.append(f"out must be a pair (latent, rope) of tensors, got {type(out).__name__}")
            reasons.unusable = True
        else:
            reasons.rows("out[0]", out[0], 2, FLOATS)
            reasons.rows("out[1]", out[1], 2, (out[0].dtype,) if isinstance(out[0], Tensor) else FLOATS)
            reasons.written("out[0]", out[0])
            reasons.written("out[1]", out[1])
    reasons.stop()
    width, batch = kv_cache.shape[2], len(starts)
    latent_sizes(reasons, kv_lora_rank, width)
    reasons.shape("lengths", lengths, (batch,))
    reasons.shape("block_table", block_table, (batch, -1))
    if out is not None:
        reasons.shape("out[0]", out[0], (-1, kv_lora_rank))
        reasons.shape("out[1]", out[1], (out[0].shape[0], width - kv_lora_rank))
    reasons.descale("kv_descale", kv_descale, 1)
    reasons.descale("rope_descale", rope_descale, 1)
    reasons.hardware(kv_cache.dtype)
    reasons.done()
    return latent_halves(kv_cache, kv_lora_rank)


def _latent_rank(reasons: Reasons, kv_lora_rank: int) -> None:
    """Sizes are compared with it: without a number they cannot be discussed."""
    types = len(reasons.types)
    reasons.integer("kv_lora_rank", kv_lora_rank, 1)
    reasons.unusable |= len(reasons.types) > types


def latent_sizes(reasons: Reasons, kv_lora_rank: int, width: int) -> None:
    """The split of a cached row into latent and rope columns."""
    for name, size, least, most in (("latent", kv_lora_rank, MIN_LATENT, MAX_LATENT), ("rope", width - kv_lora_rank, MIN_ROPE, MAX_ROPE)):
        if type(size) is int and (size % LATENT_STEP or not least <= size <= most):
            need = f"a multiple of {LATENT_STEP} from {least} to {most}"
            reasons.values.append(f"{name} columns of kv_cache must be {need}, got {size} (kv_lora_rank {kv_lora_rank} of {width})")


def latent_halves(kv_cache: Tensor, kv_lora_rank: int) -> CacheView:
    return layouts.view_unchecked(kv_cache[..., :kv_lora_rank], kv_cache[..., kv_lora_rank:], "latent")
