"""The public ops of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): check, plan, run.

The cache holds one row per token for all heads, `latent` columns (`kv_lora_rank`, 512) beside `rope` columns (64); any two multiples of
16, from 32 to 512 and from 16 to 128. Words and units are those of `mha`, and further:

- Absorbed (decode): queries are in the latent space, K is the cached row, V its latent columns. `softmax_scale` has no default: it
  belongs to the head size before absorption (192), which the cached width does not tell.
- Not absorbed (prefill, extend): keys [.., H, 192] and values [.., H, 128] are projected up from the latent rows. Prefill is
  `flash_attn_varlen_func` with those sizes.
- `kv_descale` is that of an fp8 cache; `rope_descale`, if given, that of its rope columns: real = stored * descale, each a float or a
  1-element float32 device tensor.
- `lse` is float32, natural log, `[H, T]`. A row that sees no key has `out = 0` and `lse = -inf`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tritonattn import checks
from tritonattn.mha import Scale, _outputs, may_be_padded
from tritonattn.paths.cache import gathered_rows, run_gather, run_write
from tritonattn.paths.extend import context_row, key_ends
from tritonattn.paths.mla_decode import run_mla_decode
from tritonattn.paths.mla_extend import UpProject, run_mla_extend
from tritonattn.paths.replay import repeated
from tritonattn.plan import device_plan
from tritonattn.scratch import Fresh
from tritonattn.tuning.arch import detect


@repeated
def mla_decode(
    q: Tensor | tuple[Tensor, Tensor], kv_cache: Tensor, *, seqused_k: Tensor, block_table: Tensor, max_seqlen_k: int,
    softmax_scale: float, kv_lora_rank: int = 512, cu_seqlens_q: Tensor | None = None, max_seqlen_q: int = 1, num_splits: int = 0, ragged: bool = True,
    causal: bool = True, q_descale: Scale = None, kv_descale: Scale = None, rope_descale: Scale = None, out: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Absorbed decode: a few query tokens per sequence over the latent cache, split over the keys and merged.

    q [T, H, latent + rope], or the pair [T, H, latent], [T, H, rope] (taken as it is, not copied): bf16, fp16, fp32 or fp8; any
    number of heads. cu_seqlens_q [B + 1] gives the query tokens of each sequence, at most max_seqlen_q; None: max_seqlen_q each.
    Every cached row is read once for all of them.
    kv_cache [blocks, block_size, latent + rope]: the dtype of q, or fp8 with descales; any block and token stride. The new tokens
    are in it already.
    seqused_k [B]: keys of each sequence, the new tokens among them; 0 is legal. block_table [B, max_blocks].
    num_splits: parts that the keys of each sequence are cut into, at most 128; 0 lets the plan choose, by the lengths on the device.
    ragged: see `decode_attention`.

    Returns out [T, H, latent] (dtype of q; bf16 for fp8), and with return_lse also lse. Tokens past the last sequence get 0, and stay as they
    are in a given out; their lse is -inf.
    Raises ValueError or TypeError with every reason, before any launch.
    """
    problem, params, q, q_rope = checks.check_mla_decode(
        q, kv_cache, seqused_k=seqused_k, block_table=block_table, max_seqlen_k=max_seqlen_k, softmax_scale=softmax_scale,
        kv_lora_rank=kv_lora_rank, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, num_splits=num_splits, ragged=ragged, causal=causal,
        q_descale=q_descale, kv_descale=kv_descale, rope_descale=rope_descale, out=out,
    )  # fmt: skip
    max_seqlen_q, max_seqlen_k, num_splits = int(max_seqlen_q), int(max_seqlen_k), int(num_splits)
    num_seqs = len(seqused_k)
    padded = may_be_padded(q.shape[0], num_seqs, max_seqlen_q, cu_seqlens_q)
    out, lse = _outputs(q, problem.v_head_size, out, return_lse, padded, padded_lse=padded)
    run_mla_decode(
        problem, params, q, q_rope, kv_cache, out, lse, cu_seqlens_q=cu_seqlens_q, seq_lens=seqused_k, block_table=block_table,
        num_seqs=num_seqs, max_seqlen_q=max_seqlen_q,
        plan=device_plan(detect(q.device), problem, num_seqs, max_seqlen_q, max_seqlen_k, num_splits, ragged=ragged), scratch=Fresh(q.device),
    )  # fmt: skip
    return (out, lse) if lse is not None else out


def mla_extend(
    q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, *, up_project: UpProject, cu_seqlens_q: Tensor, context_lens: Tensor,
    block_table: Tensor, max_seqlen_q: int, max_context_len: int, softmax_scale: float, total_context_len: int | None = None,
    kv_lora_rank: int = 512, chunk_tokens: int = 32768, causal: bool = True, kv_descale: Scale = None, rope_descale: Scale = None,
    out: Tensor | None = None, return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """New tokens on a cached context, not absorbed: the context comes in chunks of `chunk_tokens` tokens of the whole batch.

    q [T, H, D], k [T, Hkv, D], v [T, Hkv, Dv]: the new tokens, bf16, fp16 or fp32; D, Dv as in `flash_attn_varlen_func` (192, 128).
    kv_cache [blocks, block_size, latent + rope]: the dtype of q, or fp8 with descales.
    up_project(latent [n, latent], rope [n, rope]) -> (k [n, Hkv, D], v [n, Hkv, Dv]): called once per chunk with its rows, dequantised,
    in the dtype of q, and only if there is a context. It must not keep its arguments: the next chunk overwrites them.
    context_lens [B]: tokens in the cache before the new ones. block_table [B, max_blocks].
    total_context_len: an upper bound of the sum of context_lens, those of sequences without a query left out; `up_project` gets that
    many rows in all. None: B * max_context_len. Rows that belong to no token are zeros.
    chunk_tokens bounds the scratch; it is rounded up to a multiple of 16.

    Returns out [T, H, Dv], and with return_lse also lse. Tokens past the last sequence get 0.
    Raises ValueError or TypeError with every reason, before any launch; for what `up_project` gives back, when it does.
    """
    problem, cache, params = checks.check_mla_extend(
        q, k, v, kv_cache, up_project=up_project, cu_seqlens_q=cu_seqlens_q, context_lens=context_lens, block_table=block_table,
        max_seqlen_q=max_seqlen_q, max_context_len=max_context_len, total_context_len=total_context_len, softmax_scale=softmax_scale,
        kv_lora_rank=kv_lora_rank, chunk_tokens=chunk_tokens, causal=causal, kv_descale=kv_descale, rope_descale=rope_descale, out=out,
    )  # fmt: skip
    out, lse = _outputs(q, problem.v_head_size, out, return_lse)
    max_seqlen_q, chunk_tokens = int(max_seqlen_q), int(chunk_tokens)
    max_context_len = min(int(max_context_len), block_table.shape[1] * cache.block_size)  # as in `extend_attention`
    num_seqs = len(context_lens)
    run_mla_extend(
        problem, params, q, k, v, cache, out, lse, up_project=up_project, kv_descale=kv_descale, rope_descale=rope_descale,
        cu_seqlens_q=cu_seqlens_q, context_lens=context_lens, block_table=block_table,
        row=context_row(context_lens, key_ends(cu_seqlens_q, context_lens, False), -1, 1, align=1),
        row_length=num_seqs * max_context_len if total_context_len is None else min(total_context_len, num_seqs * max_context_len),
        row_is_full=False, num_seqs=num_seqs, max_seqlen_q=max_seqlen_q, chunk_tokens=chunk_tokens, scratch=Fresh(q.device),
    )  # fmt: skip
    return (out, lse) if lse is not None else out


@repeated
def mla_cache_write(
    latent: Tensor, rope: Tensor, kv_cache: Tensor, slot_mapping: Tensor, *, kv_descale: Scale = None, rope_descale: Scale = None
) -> None:
    """Write new tokens into the latent cache.

    latent [T, latent], rope [T, rope]: bf16, fp16 or fp32. kv_cache [blocks, block_size, latent + rope]: the same dtype, or fp8: then
    `stored = real / descale`, saturating, NaN stays NaN.
    slot_mapping [at most T], int32 or int64: token i goes to block slot // block_size, position slot % block_size.
    A slot that the cache does not have (-1, say) is skipped.

    Raises ValueError or TypeError with every reason, before any launch.
    """
    cache = checks.check_mla_cache_write(latent, rope, kv_cache, slot_mapping, kv_descale=kv_descale, rope_descale=rope_descale)
    run_write(latent[:, None], rope[:, None], cache, slot_mapping, kv_descale, kv_descale if rope_descale is None else rope_descale)


def mla_gather_cache(
    kv_cache: Tensor, block_table: Tensor, starts: Tensor, lengths: Tensor, *, kv_lora_rank: int = 512, kv_descale: Scale = None,
    rope_descale: Scale = None, out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Cached rows into dense tensors, dequantised: positions starts[i] .. starts[i] + lengths[i] of sequence i, one after the other.

    starts, lengths [B]; block_table [B, max_blocks]. out: a pair [n, latent], [n, rope] with n >= the sum of lengths, whose further
    rows stay as they are. Without it n is that sum, read from the device (a synchronisation), in the dtype of the cache or bf16 for
    fp8.

    Returns the pair. Raises ValueError or TypeError with every reason, before any launch.
    """
    cache = checks.check_mla_gather(
        kv_cache, block_table, starts, lengths, kv_lora_rank=kv_lora_rank, kv_descale=kv_descale, rope_descale=rope_descale, out=out
    )
    cu = gathered_rows("mla_gather_cache", lengths, out)
    if out is None:
        dtype = kv_cache.dtype if kv_cache.element_size() > 1 else torch.bfloat16
        rows = int(cu[-1])
        latent = torch.empty(rows, cache.head_size, dtype=dtype, device=kv_cache.device)
        out = latent, torch.empty(rows, cache.v_head_size, dtype=dtype, device=kv_cache.device)
    run_gather(
        out[0][:, None], out[1][:, None], cache, kv_descale, kv_descale if rope_descale is None else rope_descale, cu_rows=cu,
        starts=starts, lengths=lengths, block_table=block_table, num_seqs=len(starts), chunk=(0, out[0].shape[0]), aligned=False,
    )  # fmt: skip
    return out
