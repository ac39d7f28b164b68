"""The oracle: every op of the public contract in float64, request by request, written to be read.

Each function takes the arguments of its public namesake (on the CPU, in any
dtype) and returns ``(out, lse)`` in float64, ``lse`` being ``[Hq, T]`` in
natural-log units.  Arguments that only bound or schedule the work (``max_*``,
``num_splits``, ``ragged``, ``chunk_tokens``) are taken and change nothing; ``out`` and
``return_lse`` are not taken.

One request, one head, in the order of the contract::

    s = softmax_scale * (q . k)                      scores
    s = softcap * tanh(s / softcap)                  if softcap > 0
    s = s + alibi_slope * (key - query position)
    s = -inf where the query may not see the key     causal, window
    lse = log(exp(sink) + sum exp(s))                the sink counts once
    out = sum exp(s - lse) * v                       0 where lse is -inf

The positions of a request, context and query tokens drawn as one ruler::

    keys     0 ........ context_len-1 | context_len ........ seq_len-1
                                        query 0 ... query query_len-1
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tritonattn.layouts import to_nhd

Descale = float | Tensor | None


# -- one request ----------------------------------------------------------------------------------------------


def visible(query_len: int, seq_len: int, causal: bool, window_size: tuple[int, int]) -> Tensor:
    """``[query_len, seq_len]`` bool: who sees whom, bottom-right aligned; ``-1`` is an open side of the window."""
    query = torch.arange(query_len, device="cpu")[:, None] + (seq_len - query_len)
    key = torch.arange(seq_len, device="cpu")[None, :]
    left, right = window_size
    seen = torch.ones(query_len, seq_len, dtype=torch.bool, device="cpu")
    if causal:
        seen &= key <= query
    if left >= 0:
        seen &= key >= query - left
    if right >= 0:
        seen &= key <= query + right
    return seen


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One request: q ``[n, Hq, D]``, k ``[m, Hkv, D]``, v ``[m, Hkv, Dv]`` -> out ``[n, Hq, Dv]``, lse ``[Hq, n]``."""
    n, num_q_heads, head_size = q.shape
    m, num_kv_heads, v_head_size = v.shape
    scale = 1.0 / math.sqrt(head_size) if softmax_scale is None else softmax_scale
    seen = visible(n, m, causal, window_size).to(q.device)
    distance = (torch.arange(m, device=q.device)[None, :] - torch.arange(n, device=q.device)[:, None] - (m - n)).double()
    out = torch.zeros(n, num_q_heads, v_head_size, dtype=torch.float64, device=q.device)
    lse = torch.full((num_q_heads, n), -math.inf, dtype=torch.float64, device=q.device)
    for head in range(num_q_heads):
        kv_head = head // (num_q_heads // num_kv_heads)
        scores = scale * (q[:, head].double() @ k[:, kv_head].double().T)
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        if alibi_slopes is not None:
            scores = scores + float(alibi_slopes[head]) * distance
        scores = scores.masked_fill(~seen, -math.inf)
        sink = -math.inf if sinks is None else float(sinks[head])
        logits = torch.cat([scores, torch.full((n, 1), sink, dtype=torch.float64, device=q.device)], dim=1)
        lse[head] = torch.logsumexp(logits, dim=1)
        weights = torch.exp(scores - lse[head][:, None]).masked_fill(~seen, 0.0)
        out[:, head] = weights @ v[:, kv_head].double()
    return out, lse


# -- helpers --------------------------------------------------------------------------------------------------


def dequantise(stored: Tensor, descale: Descale, num_kv_heads: int) -> Tensor:
    """``[.., heads, D]`` in float64; ``descale`` is a number, one element, or one per KV head (shared by its group)."""
    real = stored.double()
    if descale is None:
        return real
    factor = torch.as_tensor(descale, dtype=torch.float64, device="cpu").reshape(-1)
    if factor.numel() > 1:
        factor = factor.repeat_interleave(stored.shape[-2] // num_kv_heads)
    return real * factor[:, None]


def quantise(real: Tensor, descale: Descale, dtype: torch.dtype) -> Tensor:
    """``stored = real / descale`` in the cache's dtype, fp32 arithmetic; fp8 saturates, infinities too, NaN stays NaN."""
    stored = real.float()
    if descale is not None:
        stored = stored / torch.as_tensor(descale, dtype=torch.float32, device="cpu").reshape(-1, 1)
    if dtype.itemsize == 1:
        limit = torch.finfo(dtype).max
        stored = stored.clamp(-limit, limit)
    return stored.to(dtype)


def cached(
    k_cache: Tensor, v_cache: Tensor, kv_layout: str, table_row: Tensor, start: int, length: int
) -> tuple[Tensor, Tensor]:
    """Stored tokens ``start .. start + length - 1`` of one request: ``[length, Hkv, D]`` and ``[length, Hkv, Dv]``.

    Touches only the table entries and blocks that hold those tokens.
    """
    block_size = k_cache.shape[{"nhd": 1, "hnd": 2, "preshuffled": 3, "latent": 1}[kv_layout]]
    first = start // block_size
    blocks = table_row[first : -(-(start + length) // block_size)].long()
    k_nhd, v_nhd = to_nhd(_take(k_cache, blocks), _take(v_cache, blocks), kv_layout)
    at = start - first * block_size
    return k_nhd.flatten(0, 1)[at : at + length], v_nhd.flatten(0, 1)[at : at + length]


def _take(cache: Tensor, blocks: Tensor) -> Tensor:
    return torch.stack([cache[b] for b in blocks.tolist()]) if len(blocks) else cache[:0]


def _spans(cu_seqlens: Tensor) -> Iterator[slice]:
    for begin, end in itertools.pairwise(cu_seqlens.tolist()):
        yield slice(begin, end)


def _empty(q: Tensor, v_head_size: int) -> tuple[Tensor, Tensor]:
    """What a row that belongs to no request holds: ``out = 0``, ``lse = -inf``."""
    out = torch.zeros(*q.shape[:2], v_head_size, dtype=torch.float64, device="cpu")
    return out, torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=torch.float64, device="cpu")


# -- MHA ------------------------------------------------------------------------------------------------------


def flash_attn_varlen_func(
    q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None,
    causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, sinks=None,
    q_descale=None, k_descale=None, v_descale=None,
):  # fmt: skip
    """q ``[T, Hq, D]``, k ``[Tk, Hkv, D]``, v ``[Tk, Hkv, Dv]``, packed by ``cu_seqlens_*`` ``[B + 1]``."""
    out, lse = _empty(q, v.shape[2])
    heads = k.shape[1]
    for rows, keys in zip(_spans(cu_seqlens_q), _spans(cu_seqlens_k), strict=True):
        out[rows], lse[:, rows] = attend(
            dequantise(q[rows], q_descale, heads), dequantise(k[keys], k_descale, heads),
            dequantise(v[keys], v_descale, heads), softmax_scale=softmax_scale, causal=causal,
            window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
        )  # fmt: skip
    return out, lse


def extend_attention(
    q, k, v, k_cache, v_cache, *, cu_seqlens_q, context_lens, block_table, max_seqlen_q=None, max_context_len=None,
    kv_layout="preshuffled", chunk_tokens=32768, softmax_scale=None, causal=True, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, sinks=None, k_descale=None, v_descale=None,
):  # fmt: skip
    """Keys of a request: ``context_lens[b]`` cached tokens, then the new ``k, v`` (``None``: cached as well)."""
    out, lse = _empty(q, v_cache.shape[3])
    for b, rows in enumerate(_spans(cu_seqlens_q)):
        length = int(context_lens[b]) + (0 if k is not None else rows.stop - rows.start)
        keys, values = cached(k_cache, v_cache, kv_layout, block_table[b], 0, length)
        keys = dequantise(keys, k_descale, keys.shape[1])
        values = dequantise(values, v_descale, values.shape[1])
        if k is not None:
            keys = torch.cat([keys, k[rows].double()])
            values = torch.cat([values, v[rows].double()])
        out[rows], lse[:, rows] = attend(
            q[rows], keys, values, softmax_scale=softmax_scale, causal=causal, window_size=window_size,
            softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
        )  # fmt: skip
    return out, lse


def decode_attention(
    q, k_cache, v_cache, *, seqused_k, block_table, max_seqlen_k=None, cu_seqlens_q=None, max_seqlen_q=1,
    kv_layout="preshuffled", num_splits=0, ragged=True, softmax_scale=None, causal=True, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, sinks=None, q_descale=None, k_descale=None, v_descale=None,
):  # fmt: skip
    """Keys of a request: ``seqused_k[b]`` cached tokens, the query tokens being the last of them."""
    out, lse = _empty(q, v_cache.shape[3])
    for b, rows in enumerate(_decode_rows(seqused_k, cu_seqlens_q, max_seqlen_q)):
        keys, values = cached(k_cache, v_cache, kv_layout, block_table[b], 0, int(seqused_k[b]))
        heads = keys.shape[1]
        out[rows], lse[:, rows] = attend(
            dequantise(q[rows], q_descale, heads), dequantise(keys, k_descale, heads),
            dequantise(values, v_descale, heads), softmax_scale=softmax_scale, causal=causal,
            window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
        )  # fmt: skip
    return out, lse


def _decode_rows(seqused_k: Tensor, cu_seqlens_q: Tensor | None, max_seqlen_q: int) -> Iterator[slice]:
    """Without ``cu_seqlens_q`` every sequence has exactly ``max_seqlen_q`` query tokens."""
    if cu_seqlens_q is None:
        cu_seqlens_q = torch.arange(len(seqused_k) + 1, device="cpu") * max_seqlen_q
    return _spans(cu_seqlens_q)


def merge_attn_states(out_a, lse_a, out_b, lse_b):
    """Two attentions of the same queries over disjoint keys -> the attention over both.

    ``out_*`` ``[T, Hq, Dv]``, ``lse_*`` ``[Hq, T]``.  An empty side (``lse`` of ``-inf``, or
    of ``+inf`` or NaN as some kernels report it) is left out, whatever its ``out`` holds.
    """
    lse_a, lse_b = (torch.where(lse < math.inf, lse.double(), -math.inf) for lse in (lse_a, lse_b))
    lse = torch.logaddexp(lse_a, lse_b)
    out = torch.zeros_like(out_a, dtype=torch.float64)
    for part, part_lse in ((out_a, lse_a), (out_b, lse_b)):
        live = (part_lse > -math.inf).T[..., None]
        out += torch.where(live, part.double() * torch.exp(part_lse - lse).T[..., None], 0.0)
    return out, lse


def reshape_and_cache(
    key, value, k_cache, v_cache, slot_mapping, *, kv_layout="preshuffled", k_descale=None, v_descale=None
):
    """Write key ``[T, Hkv, D]`` and value ``[T, Hkv, Dv]`` to ``slot = block * bs + offset``; slots outside the cache are skipped.  In place."""
    block_size = k_cache.shape[{"nhd": 1, "hnd": 2, "preshuffled": 3}[kv_layout]]
    for token, slot in enumerate(slot_mapping.tolist()):
        if not 0 <= slot < len(k_cache) * block_size:
            continue
        block, at = divmod(slot, block_size)
        k_row = quantise(key[token], k_descale, k_cache.dtype)
        v_row = quantise(value[token], v_descale, v_cache.dtype)
        if kv_layout == "nhd":
            k_cache[block, at] = k_row
            v_cache[block, at] = v_row
        elif kv_layout == "hnd":
            k_cache[block, :, at] = k_row
            v_cache[block, :, at] = v_row
        else:
            x = k_cache.shape[-1]
            k_cache[block, :, :, at] = k_row.unflatten(-1, (-1, x))
            v_cache[block, :, at // x, :, at % x] = v_row


def gather_cache(k_cache, v_cache, block_table, starts, lengths, *, kv_layout, k_descale=None, v_descale=None):
    """Cached tokens ``starts[b] .. starts[b] + lengths[b] - 1`` of each request, packed: ``[sum(lengths), Hkv, D|Dv]``."""
    keys, values = [], []
    for b, (start, length) in enumerate(zip(_ints(starts), _ints(lengths), strict=True)):
        k, v = cached(k_cache, v_cache, kv_layout, block_table[b], start, length)
        keys.append(dequantise(k, k_descale, k.shape[1]))
        values.append(dequantise(v, v_descale, v.shape[1]))
    return torch.cat(keys), torch.cat(values)


def _ints(values) -> list[int]:
    return values.tolist() if isinstance(values, Tensor) else list(values)


# -- MLA ------------------------------------------------------------------------------------------------------


def mla_decode(
    q, kv_cache, *, seqused_k, block_table, max_seqlen_k=None, softmax_scale, kv_lora_rank=512, cu_seqlens_q=None,
    max_seqlen_q=1, num_splits=0, ragged=True, causal=True, q_descale=None, kv_descale=None, rope_descale=None,
):  # fmt: skip
    """Absorbed decode: q ``[T, H, latent + rope]`` or the pair, kv_cache ``[blocks, bs, latent + rope]``.

    All heads share the cached row as K and its first ``kv_lora_rank`` columns as V.  out ``[T, H, kv_lora_rank]``.
    """
    q = torch.cat(q, dim=-1) if isinstance(q, tuple | list) else q
    out, lse = _empty(q, kv_lora_rank)
    for b, rows in enumerate(_decode_rows(seqused_k, cu_seqlens_q, max_seqlen_q)):
        row = _latent_rows(kv_cache, block_table[b], int(seqused_k[b]), kv_lora_rank, kv_descale, rope_descale)
        out[rows], lse[:, rows] = attend(
            dequantise(q[rows], q_descale, 1), row[:, None], row[:, None, :kv_lora_rank],
            softmax_scale=softmax_scale, causal=causal,
        )  # fmt: skip
    return out, lse


def mla_extend(
    q, k, v, kv_cache, *, up_project: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], cu_seqlens_q, context_lens,
    block_table, max_seqlen_q=None, max_context_len=None, softmax_scale, chunk_tokens=32768, kv_descale=None,
    rope_descale=None, kv_lora_rank=512, causal=True,
):  # fmt: skip
    """Non-absorbed: context rows go through ``up_project`` (in q's dtype), the new tokens come as k ``[T, H, Dqk]``, v."""
    out, lse = _empty(q, v.shape[2])
    for b, rows in enumerate(_spans(cu_seqlens_q)):
        keys, values = k[rows].double(), v[rows].double()
        context = int(context_lens[b])
        if context:
            row = _latent_rows(kv_cache, block_table[b], context, kv_lora_rank, kv_descale, rope_descale).to(q.dtype)
            old_keys, old_values = up_project(row[:, :kv_lora_rank], row[:, kv_lora_rank:])
            keys = torch.cat([old_keys.double(), keys])
            values = torch.cat([old_values.double(), values])
        out[rows], lse[:, rows] = attend(q[rows], keys, values, softmax_scale=softmax_scale, causal=causal)
    return out, lse


def mla_cache_write(latent, rope, kv_cache, slot_mapping, *, kv_descale=None, rope_descale=None):
    """Write latent ``[T, 512]`` and rope ``[T, 64]`` side by side to row ``slot``; slots outside the cache are skipped.  In place."""
    rope_descale = kv_descale if rope_descale is None else rope_descale
    block_size = kv_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if 0 <= slot < len(kv_cache) * block_size:
            row = kv_cache[slot // block_size, slot % block_size]
            row[: latent.shape[1]] = quantise(latent[token : token + 1], kv_descale, kv_cache.dtype)[0]
            row[latent.shape[1] :] = quantise(rope[token : token + 1], rope_descale, kv_cache.dtype)[0]


def _latent_rows(kv_cache, table_row, length, kv_lora_rank, kv_descale, rope_descale) -> Tensor:
    """Real values of the first ``length`` cached rows, ``[length, latent + rope]`` in float64."""
    rows, _ = cached(kv_cache, kv_cache, "latent", table_row, 0, length)
    latent = dequantise(rows[..., :kv_lora_rank], kv_descale, 1)
    rope = dequantise(rows[..., kv_lora_rank:], kv_descale if rope_descale is None else rope_descale, 1)
    return torch.cat([latent, rope], dim=-1)[:, 0]
