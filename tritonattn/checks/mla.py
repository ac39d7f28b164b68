"""Arguments of the ops of multi-head latent attention."""

from __future__ import annotations

import torch
from torch import Tensor

from tritonattn import layouts
from tritonattn.checks.mha import Ranks, cache_dtype, gathered, over_ranks, problem_of, query_rows, slots, spans
from tritonattn.checks.reasons import FLOATS, FLOATS_AND_FP8, INT32, UNKNOWN, Reasons, dtype_of, plus, same_as
from tritonattn.layouts import CacheView
from tritonattn.plan import MAX_SPLITS
from tritonattn.problem import AttnParams, AttnProblem, MlaParams

MIN_LATENT, MAX_LATENT, MIN_ROPE, MAX_ROPE, LATENT_STEP = 32, 512, 16, 128, 16


def check_mla_decode(
    q, kv_cache, *, seqused_k, block_table, max_seqlen_k, softmax_scale, kv_lora_rank, cu_seqlens_q, max_seqlen_q, num_splits, ragged,
    causal, q_descale, kv_descale, rope_descale, out, ranks: Ranks | None = None,
) -> tuple[AttnProblem, MlaParams, Tensor, Tensor | None]:  # fmt: skip
    """Arguments of `mla_decode`, and of `cp_mla_decode`. Gives q, or its latent and its rope part where it came as a pair."""
    name, parts = ("q[0]", q) if isinstance(q, tuple | list) else ("q", (q, None))
    q, q_rope = parts if len(parts) == 2 else (None, None)
    reasons = Reasons("mla_decode" if ranks is None else "cp_mla_decode", q)
    if ranks is not None:
        over_ranks(reasons, ranks, out)
    tokens = heads = UNKNOWN
    if len(parts) == 2:
        tokens, heads, _ = reasons.rows(name, q, 3, FLOATS_AND_FP8)
    else:
        reasons.values.append(f"q must be a tensor or a pair (latent, rope), got {len(parts)} of them")
    if q_rope is not None:
        reasons.rows("q[1]", q_rope, 3, same_as(q, FLOATS_AND_FP8))
    reasons.options(causal, (-1, -1), 0.0, None)
    reasons.number("softmax_scale", softmax_scale, positive=True)
    longest = reasons.longest("max_seqlen_k", max_seqlen_k)
    most = reasons.longest("max_seqlen_q", max_seqlen_q, 1)
    reasons.integer("num_splits", num_splits, 0, MAX_SPLITS)
    reasons.flag("ragged", ragged)
    (batch,) = reasons.rows("seqused_k", seqused_k, 1, INT32)
    rank, rope, width = _latent_cache(reasons, kv_cache, kv_lora_rank)
    if q_rope is not None:
        reasons.shape("q[0]", q, (-1, -1, rank))
        reasons.shape("q[1]", q_rope, (tokens, heads, rope))
    else:
        reasons.shape(name, q, (-1, -1, width))
    if heads == 0:
        reasons.values.append(f"q must have at least 1 head, got {heads}")
    reasons.table(block_table, batch, longest)
    query_rows(reasons, name, tokens, cu_seqlens_q, batch, most)
    cache_dtype(reasons, "kv_cache", "q", q, kv_cache)
    reasons.descale("q_descale", q_descale, 1)
    reasons.descale("kv_descale", kv_descale, 1)
    reasons.descale("rope_descale", rope_descale, 1)
    reasons.out(out, (tokens, heads, rank))
    reasons.done()
    problem = AttnProblem(heads, 1, width, rank, q.dtype, kv_cache.dtype, "latent", kv_cache.shape[1], causal)
    return problem, MlaParams(float(softmax_scale), causal, q_descale, kv_descale, rope_descale), q, q_rope


def check_mla_extend(
    q, k, v, kv_cache, *, up_project, cu_seqlens_q, context_lens, block_table, max_seqlen_q, max_context_len, total_context_len,
    softmax_scale, kv_lora_rank, chunk_tokens, causal, kv_descale, rope_descale, out,
) -> tuple[AttnProblem, CacheView, AttnParams]:  # fmt: skip
    """Arguments of `mla_extend`. The view has the latent columns as K and the rope columns as V."""
    reasons = Reasons("mla_extend", q)
    tokens, num_q_heads, head_size = reasons.rows("q", q, 3, FLOATS)
    same = same_as(q, FLOATS)
    reasons.rows("k", k, 3, same)
    _, num_kv_heads, v_head_size = reasons.rows("v", v, 3, same)
    if not callable(up_project):
        reasons.types.append(f"up_project must be callable, got {type(up_project).__name__}")
    reasons.options(causal, (-1, -1), 0.0, None)
    reasons.number("softmax_scale", softmax_scale, positive=True)
    reasons.longest("max_seqlen_q", max_seqlen_q)
    longest = reasons.longest("max_context_len", max_context_len)
    if total_context_len is not None:
        reasons.integer("total_context_len", total_context_len, 0)
    reasons.integer("chunk_tokens", chunk_tokens, 1)
    reasons.rows("cu_seqlens_q", cu_seqlens_q, 1, INT32)
    (batch,) = reasons.rows("context_lens", context_lens, 1, INT32)
    _latent_cache(reasons, kv_cache, kv_lora_rank)
    reasons.heads(num_q_heads, num_kv_heads, head_size, v_head_size)
    reasons.shape("k", k, (tokens, num_kv_heads, head_size))
    reasons.shape("v", v, (tokens, -1, -1))
    reasons.shape("cu_seqlens_q", cu_seqlens_q, (plus(batch, 1),))
    reasons.table(block_table, batch, longest)
    cache_dtype(reasons, "kv_cache", "q", q, kv_cache)
    reasons.descale("kv_descale", kv_descale, 1)
    reasons.descale("rope_descale", rope_descale, 1)
    reasons.out(out, (tokens, num_q_heads, v_head_size))
    reasons.done()
    params = AttnParams(float(softmax_scale), causal)
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
    reasons.shape("k from up_project", k, (num_tokens, problem.num_kv_heads, problem.head_size))
    reasons.shape("v from up_project", v, (num_tokens, problem.num_kv_heads, problem.v_head_size))
    reasons.done()
    return k, v


def check_mla_cache_write(latent, rope, kv_cache, slot_mapping, *, kv_descale, rope_descale) -> CacheView:
    """Arguments of `mla_cache_write`. The view has the latent columns as K and the rope columns as V."""
    reasons = Reasons("mla_cache_write", latent)
    tokens, kv_lora_rank = reasons.rows("latent", latent, 2, FLOATS)
    reasons.rows("rope", rope, 2, same_as(latent, FLOATS))
    _, _, width = reasons.rows("kv_cache", kv_cache, 3, FLOATS_AND_FP8)
    reasons.written("kv_cache", kv_cache)
    slots(reasons, slot_mapping, "latent", tokens)
    reasons.shape("rope", rope, (tokens, latent_sizes(reasons, kv_lora_rank, width)))
    cache_dtype(reasons, "kv_cache", "latent", latent, kv_cache)
    reasons.descale("kv_descale", kv_descale, 1)
    reasons.descale("rope_descale", rope_descale, 1)
    reasons.done()
    return latent_halves(kv_cache, kv_lora_rank)


def check_mla_gather(
    kv_cache, block_table, starts, lengths, *, kv_lora_rank, kv_descale, rope_descale, out
) -> CacheView:  # fmt: skip
    """Arguments of `mla_gather_cache`; ``out`` is a pair ``[n, latent]``, ``[n, rope]`` or None."""
    reasons = Reasons("mla_gather_cache", kv_cache)
    rank, rope, _ = _latent_cache(reasons, kv_cache, kv_lora_rank)
    spans(reasons, block_table, starts, lengths)
    if out is not None:
        gathered(reasons, out, "(latent, rope)", (rank,), (rope,))
    reasons.descale("kv_descale", kv_descale, 1)
    reasons.descale("rope_descale", rope_descale, 1)
    reasons.hardware(dtype_of(kv_cache))
    reasons.done()
    return latent_halves(kv_cache, kv_lora_rank)


def _latent_cache(reasons: Reasons, kv_cache: Tensor, kv_lora_rank: int) -> tuple[int, int, int]:
    """Latent columns, rope columns, all columns of a cache."""
    _, _, width = reasons.rows("kv_cache", kv_cache, 3, FLOATS_AND_FP8)
    rank = reasons.integer("kv_lora_rank", kv_lora_rank, 1)
    return rank, latent_sizes(reasons, rank, width), width


def latent_sizes(reasons: Reasons, kv_lora_rank: int, width: int) -> int:
    """The split of a cached row into latent and rope columns. Gives the number of the latter."""
    rope = width - kv_lora_rank
    parts = [("latent", kv_lora_rank, MIN_LATENT, MAX_LATENT), ("rope", rope, MIN_ROPE, MAX_ROPE)]
    if kv_lora_rank == UNKNOWN or width == UNKNOWN:
        rope, parts = UNKNOWN, parts[: kv_lora_rank != UNKNOWN]
    for name, size, least, most in parts:
        if size % LATENT_STEP or not least <= size <= most:
            need = f"a multiple of {LATENT_STEP} from {least} to {most}"
            of = "" if width == UNKNOWN else f" of {width}"
            reasons.values.append(f"{name} columns of kv_cache must be {need}, got {size} (kv_lora_rank {kv_lora_rank}{of})")
    return rope


def latent_halves(kv_cache: Tensor, kv_lora_rank: int) -> CacheView:
    return layouts.view_unchecked(kv_cache[..., :kv_lora_rank], kv_cache[..., kv_lora_rank:], "latent")
