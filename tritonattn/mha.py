"""The public ops of multi-head attention: check, plan, run.

Shapes, units and score order are those of the words below, for every op.

- `T` query tokens in the call, `B` sequences, `Hq`/`Hkv` query/KV heads (`Hq % Hkv == 0`), `D`/`Dv` head size of Q and K / of V.
- Lengths and tables are int32 on the device; every `max_*` is a host int and an upper bound.
- Causal is bottom-right aligned: query `i` of a sequence sees keys `0 .. seq_len - query_len + i`. `window_size = (left, right)` is
  inclusive, -1 = unlimited.
- `s = softmax_scale * (q . k)`, then `softcap * tanh(s / softcap)`, then `+ alibi_slope * (key - query position)`, then masks.
  `softmax_scale=None` means `1 / sqrt(D)`. `sinks [Hq]` is one more logit per row, without a value; -inf is
  as none, +inf takes all weight: `out = 0`, and `lse` is the largest number, not +inf, which says "no key" to a merge.
- A descale (`real = stored * descale`) is a float, a 1-element float32 device tensor, or `[Hkv]`.
- `lse` is float32, natural log, `[Hq, T]`. A row that sees no key has `out = 0` and `lse = -inf` (with a sink: `lse = sink`).
- Padding, query tokens past the last sequence: prefill and extend treat it as rows that see no key, in a given `out` too. Decode and
  `Router` leave it as it is in a given `out`; in a new one it is 0. Their `lse` of it is -inf, with sinks too.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from tritonattn import checks
from tritonattn.paths.cache import gathered_rows, run_gather, run_write
from tritonattn.paths.combine import run_merge
from tritonattn.paths.decode import run_decode
from tritonattn.paths.extend import context_row, key_ends, run_extend
from tritonattn.paths.prefill import run_prefill
from tritonattn.paths.replay import repeated
from tritonattn.plan import ROW_ALIGN, device_plan
from tritonattn.scratch import Fresh, take
from tritonattn.tuning.arch import detect

Scale = float | Tensor | None


def _outputs(
    q: Tensor, v_head_size: int, out: Tensor | None, return_lse: bool, padded: bool = False, padded_lse: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Room for the results; where the kernels leave rows of padding alone, those of a new `out` are 0 and of `lse` -inf."""
    tokens, heads, _ = q.shape
    if out is None:
        dtype = q.dtype if q.element_size() > 1 else torch.bfloat16
        out = take(partial(torch.zeros if padded else torch.empty, (tokens, heads, v_head_size), dtype=dtype, device=q.device))
    if not return_lse:
        return out, None
    new = partial(torch.full, fill_value=-math.inf) if padded_lse else torch.empty
    return out, take(partial(new, (heads, tokens), dtype=torch.float32, device=q.device))


def may_be_padded(tokens: int, num_seqs: int, max_seqlen_q: int, cu_seqlens_q: Tensor | None) -> bool:
    """Whether there may be query rows of a decode call that belong to no sequence."""
    return cu_seqlens_q is not None or tokens > num_seqs * max_seqlen_q


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, sinks: Tensor | None = None, q_descale: Scale = None, k_descale: Scale = None,
    v_descale: Scale = None, out: Tensor | None = None, return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Prefill: each sequence's queries against its own dense keys. FlashAttention-2 (arXiv:2307.08691).

    q [T, Hq, D]; k [Tk, Hkv, D]; v [Tk, Hkv, Dv]: bf16, fp16, fp32 or fp8, the same for all three, unit last stride.
    cu_seqlens_q, cu_seqlens_k [B + 1]: sequence i has queries cu_seqlens_q[i]:cu_seqlens_q[i+1], and keys likewise.

    Returns out [T, Hq, Dv] (dtype of q; bf16 for fp8), and with return_lse also lse. Tokens past the last sequence get 0.
    Raises ValueError or TypeError with every reason, before any launch.
    """
    problem, params = checks.check_prefill(
        q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
        q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, out=out,
    )  # fmt: skip
    out, lse = _outputs(q, problem.v_head_size, out, return_lse)
    run_prefill(
        problem, params, q, k, v, out, lse, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, num_seqs=len(cu_seqlens_q) - 1,
        max_seqlen_q=int(max_seqlen_q),
    )  # fmt: skip
    return (out, lse) if lse is not None else out


def extend_attention(
    q: Tensor, k: Tensor | None, v: Tensor | None, k_cache: Tensor, v_cache: Tensor, *, cu_seqlens_q: Tensor, context_lens: Tensor,
    block_table: Tensor, max_seqlen_q: int, max_context_len: int, total_context_len: int | None = None, kv_layout: str = "preshuffled",
    chunk_tokens: int = 32768, softmax_scale: float | None = None, causal: bool = True, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, sinks: Tensor | None = None, k_descale: Scale = None, v_descale: Scale = None,
    out: Tensor | None = None, return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """New tokens on a cached context, in chunks of `chunk_tokens` keys of the whole batch.

    q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv]: the new tokens, bf16, fp16 or fp32; k = v = None: they are in the cache already,
    after the context.
    k_cache, v_cache: see `layouts`; the dtype of q, or fp8 with descales.
    context_lens [B]: tokens in the cache before the new ones. block_table [B, max_blocks].
    total_context_len: an upper bound of the sum of context_lens, those of sequences without a query left out; None: B * max_context_len.
    chunk_tokens bounds the scratch (keys and values of that many tokens); it is rounded up to a multiple of 16. The host launches a
    gather and a pass for each chunk of the keys that there may be, total_context_len and T; those past the last key find nothing to
    do. `Router`, which plans with the lengths, launches no more than are needed.

    Returns out [T, Hq, Dv], and with return_lse also lse. Tokens past the last sequence get 0.
    Raises ValueError or TypeError with every reason, before any launch.
    """
    problem, cache, params = checks.check_extend(
        q, k, v, k_cache, v_cache, cu_seqlens_q=cu_seqlens_q, context_lens=context_lens, block_table=block_table,
        max_seqlen_q=max_seqlen_q, max_context_len=max_context_len, total_context_len=total_context_len, kv_layout=kv_layout,
        chunk_tokens=chunk_tokens, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
        k_descale=k_descale, v_descale=v_descale, out=out,
    )  # fmt: skip
    out, lse = _outputs(q, problem.v_head_size, out, return_lse)
    max_seqlen_q, chunk_tokens = int(max_seqlen_q), int(chunk_tokens)
    max_context_len = min(int(max_context_len), block_table.shape[1] * cache.block_size)  # what it holds, where the bound is a loose one
    left, num_seqs = params.window_size[0], len(context_lens)
    longest = max_context_len if left < 0 else min(max_context_len, left + ROW_ALIGN)
    total = num_seqs * longest if total_context_len is None else min(num_seqs * longest, total_context_len)
    # Rounded up each by itself, sequences take no more than the longest of them times their number, nor than all contexts and tokens.
    row_length = min(
        num_seqs * -(-(longest + max_seqlen_q) // ROW_ALIGN) * ROW_ALIGN,
        (total + num_seqs * (ROW_ALIGN - 1) + q.shape[0]) // ROW_ALIGN * ROW_ALIGN,
    )
    run_extend(
        problem, params, q, k, v, cache, out, lse, cu_seqlens_q=cu_seqlens_q, context_lens=context_lens, block_table=block_table,
        row=context_row(context_lens, key_ends(cu_seqlens_q, context_lens, True), left, problem.start_align), row_length=row_length,
        num_seqs=num_seqs, max_seqlen_q=max_seqlen_q, chunk_tokens=chunk_tokens, scratch=Fresh(q.device),
    )  # fmt: skip
    return (out, lse) if lse is not None else out


@repeated
def decode_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, seqused_k: Tensor, block_table: Tensor, max_seqlen_k: int,
    cu_seqlens_q: Tensor | None = None, max_seqlen_q: int = 1, kv_layout: str = "preshuffled", num_splits: int = 0,
    ragged: bool = True, softmax_scale: float | None = None, causal: bool = True, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, sinks: Tensor | None = None, q_descale: Scale = None, k_descale: Scale = None,
    v_descale: Scale = None, out: Tensor | None = None, return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """A few query tokens per sequence over the paged cache, split over the keys (Flash-Decoding) and merged.

    q [T, Hq, D]: bf16, fp16, fp32 or fp8. cu_seqlens_q [B + 1] gives the query tokens of each sequence, at most max_seqlen_q; None:
    max_seqlen_q each. Every cached key is read once for all query rows of its KV head, up to 64 rows.
    k_cache, v_cache: see `layouts`; the dtype of q, or fp8 with descales. The new tokens are in the cache already.
    seqused_k [B]: keys of each sequence, the new tokens among them; 0 is legal. block_table [B, max_blocks].
    num_splits: parts that the keys of each sequence are cut into, at most 128; then the bits of a row do not depend on the lengths of other sequences.
    0 lets the plan choose: where max_seqlen_k is long for the number of sequences, a kernel on the device first cuts each by its own
    length and those of the others, so that a long one among short ones is spread over the device; in a graph, at each replay.
    ragged: False says that the sequences are about as long as each other: then all are cut alike, without that kernel and the room in
    the grid that any lengths need, which take 2 to 16 % of the time of long batches on an H200. It changes no result but in its last bits.

    Returns out [T, Hq, Dv] (dtype of q; bf16 for fp8), and with return_lse also lse. Tokens past the last sequence get 0, and stay as they
    are in a given out; their lse is -inf.
    Raises ValueError or TypeError with every reason, before any launch.
    """
    problem, cache, params = checks.check_decode(
        q, k_cache, v_cache, seqused_k=seqused_k, block_table=block_table, max_seqlen_k=max_seqlen_k, cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q, kv_layout=kv_layout, num_splits=num_splits, ragged=ragged, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks, q_descale=q_descale, k_descale=k_descale,
        v_descale=v_descale, out=out,
    )  # fmt: skip
    max_seqlen_q, max_seqlen_k, num_splits = int(max_seqlen_q), int(max_seqlen_k), int(num_splits)
    num_seqs = len(seqused_k)
    padded = may_be_padded(q.shape[0], num_seqs, max_seqlen_q, cu_seqlens_q)
    out, lse = _outputs(q, problem.v_head_size, out, return_lse, padded, padded_lse=padded)
    run_decode(
        problem, params, q, cache, out, lse, cu_seqlens_q=cu_seqlens_q, seq_lens=seqused_k, block_table=block_table,
        num_seqs=num_seqs, max_seqlen_q=max_seqlen_q, scratch=Fresh(q.device),
        plan=device_plan(detect(q.device), problem, num_seqs, max_seqlen_q, max_seqlen_k, num_splits, params.window_size[0], ragged),
    )  # fmt: skip
    return (out, lse) if lse is not None else out


@repeated
def merge_attn_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, out: Tensor | None = None, return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Two attention results over disjoint keys into the result over their union (section 2.2 of arXiv:2501.01005).

    out_a, out_b [T, Hq, Dv]; lse_a, lse_b [Hq, T], float32, natural log. A side with lse = -inf (or +inf or NaN, which some producers
    write for "no key") counts for nothing, whatever its output holds. `out` may be `out_a`.

    Returns out [T, Hq, Dv], and with return_lse also lse.
    Raises ValueError or TypeError with every reason, before any launch.
    """
    checks.check_merge(out_a, lse_a, out_b, lse_b, out=out)
    if out is None:
        out = take(partial(torch.empty, out_a.shape, dtype=out_a.dtype, device=out_a.device))
    lse = take(partial(torch.empty, lse_a.shape, dtype=lse_a.dtype, device=lse_a.device)) if return_lse else None
    run_merge(out, lse, out_a, lse_a, out_b, lse_b)
    return (out, lse) if lse is not None else out


@repeated
def reshape_and_cache(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, *, kv_layout: str = "preshuffled",
    k_descale: Scale = None, v_descale: Scale = None,
) -> None:  # fmt: skip
    """Write new tokens into the cache.

    key [T, Hkv, D], value [T, Hkv, Dv]: bf16, fp16 or fp32. k_cache, v_cache: see `layouts`; the dtype of key, or fp8: then
    `stored = real / descale`, saturating, NaN stays NaN.
    slot_mapping [at most T], int32 or int64: token i goes to block slot // block_size, position slot % block_size.
    A slot that the cache does not have (-1, say) is skipped.

    Raises ValueError or TypeError with every reason, before any launch.
    """
    cache = checks.check_reshape_and_cache(
        key, value, k_cache, v_cache, slot_mapping, kv_layout=kv_layout, k_descale=k_descale, v_descale=v_descale
    )
    run_write(key, value, cache, slot_mapping, k_descale, v_descale)


def gather_cache(
    k_cache: Tensor, v_cache: Tensor, block_table: Tensor, starts: Tensor, lengths: Tensor, *, kv_layout: str,
    k_descale: Scale = None, v_descale: Scale = None, out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Cached tokens into dense tensors, dequantised: positions starts[i] .. starts[i] + lengths[i] of sequence i, one after the other.

    starts, lengths [B]; block_table [B, max_blocks]. out: a pair [n, Hkv, D], [n, Hkv, Dv] with n >= the sum of lengths, whose
    further rows stay as they are. Without it n is that sum, read from the device (a synchronisation), in the dtype of the cache or
    bf16 for fp8.

    Returns the pair. Raises ValueError or TypeError with every reason, before any launch.
    """
    cache = checks.check_gather(
        k_cache, v_cache, block_table, starts, lengths, kv_layout=kv_layout, k_descale=k_descale, v_descale=v_descale, out=out
    )
    cu = gathered_rows("gather_cache", lengths, out)
    if out is None:
        dtype = k_cache.dtype if k_cache.element_size() > 1 else torch.bfloat16
        rows = int(cu[-1])
        out = (
            torch.empty(rows, cache.num_kv_heads, cache.head_size, dtype=dtype, device=k_cache.device),
            torch.empty(rows, cache.num_kv_heads, cache.v_head_size, dtype=dtype, device=k_cache.device),
        )
    run_gather(
        out[0], out[1], cache, k_descale, v_descale, cu_rows=cu, starts=starts, lengths=lengths, block_table=block_table,
        num_seqs=len(starts), chunk=(0, out[0].shape[0]), aligned=False,
    )  # fmt: skip
    return out
