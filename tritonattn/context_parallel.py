"""Decode of a sequence whose cached keys are spread over the ranks of a `torch.distributed` group.

Each rank attends to the keys it holds; the states meet by their LSE (Ring Attention's and Flash-Decoding's merge, arXiv:2310.01889): one
all-gather of the LSEs, one all-reduce of the outputs, each scaled by its share of the sum. gloo, NCCL and RCCL run the same code.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tritonattn.mha import decode_attention
from tritonattn.mla import mla_decode

_REFUSED = ("window_size", "alibi_slopes", "out")  # the first two need the positions of the keys in the whole sequence


def merge_over_ranks(out: Tensor, lse: Tensor, group: dist.ProcessGroup | None = None) -> tuple[Tensor, Tensor]:
    """The attention over all ranks' keys from each rank's own, the same on every rank.

    out [T, Hq, Dv], normalised over the rank's keys; lse [Hq, T] float32, natural log, -inf where the rank holds no visible key: then
    `out` may hold anything there. Returns (out in its dtype, lse); the sum runs in float32.
    """
    lses = lse.new_empty((dist.get_world_size(group), *lse.shape))
    dist.all_gather(list(lses.unbind(0)), lse.contiguous(), group=group)
    total = torch.logsumexp(lses, 0)
    share = torch.where(lse == -torch.inf, 0.0, torch.exp(lse - total)).transpose(0, 1)[..., None]
    mine = torch.where(share > 0, out.float() * share, 0.0)
    dist.all_reduce(mine, group=group)
    return mine.to(out.dtype), total


def cp_decode_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, seqused_k: Tensor, block_table: Tensor, max_seqlen_k: int,
    group: dist.ProcessGroup | None = None, new_tokens_on: int = -1, causal: bool = True, sinks: Tensor | None = None,
    return_lse: bool = False, **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`decode_attention` over keys on several ranks; every rank of `group` calls it with the same queries.

    k_cache, v_cache, seqused_k, block_table, max_seqlen_k are the rank's own: seqused_k [B] counts the keys that it holds, 0 included.
    new_tokens_on: the rank of the group (from the end where negative) that holds the keys of the query tokens, as the last ones of
    its part; only there does `causal` mask anything, every key on the other ranks comes before every query.
    sinks [Hq]: as in `decode_attention`; they enter once. `options` go to `decode_attention`.

    Returns out [T, Hq, Dv] and, with return_lse, lse, the same on every rank.
    Raises ValueError for options that depend on a key's place in the whole sequence (window_size, alibi_slopes), and for `out`.
    """
    _refuse(options)
    owner = _owner(new_tokens_on, group)
    rank = dist.get_rank(group)
    out, lse = decode_attention(
        q, k_cache, v_cache, seqused_k=seqused_k, block_table=block_table, max_seqlen_k=max_seqlen_k,
        causal=causal and rank == owner, sinks=sinks if rank == owner else None, return_lse=True, **_wide(q, v_cache.shape[3]), **options,
    )  # fmt: skip
    return _result(q, *merge_over_ranks(out, lse, group), return_lse)


def cp_mla_decode(
    q: Tensor | tuple[Tensor, Tensor], kv_cache: Tensor, *, seqused_k: Tensor, block_table: Tensor, max_seqlen_k: int,
    softmax_scale: float, kv_lora_rank: int = 512, group: dist.ProcessGroup | None = None, new_tokens_on: int = -1,
    causal: bool = True, return_lse: bool = False, **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`mla_decode` over latent rows on several ranks; the arguments as in `cp_decode_attention`."""
    _refuse(options)
    owns = dist.get_rank(group) == _owner(new_tokens_on, group)
    queries = q[0] if isinstance(q, tuple) else q
    out, lse = mla_decode(
        q, kv_cache, seqused_k=seqused_k, block_table=block_table, max_seqlen_k=max_seqlen_k, softmax_scale=softmax_scale,
        kv_lora_rank=kv_lora_rank, causal=causal and owns, return_lse=True, **_wide(queries, kv_lora_rank), **options,
    )  # fmt: skip
    return _result(queries, *merge_over_ranks(out, lse, group), return_lse)


def _refuse(options: dict[str, Any]) -> None:
    wrong = [f"{name} is not supported over several ranks" for name in _REFUSED if name in options]
    if wrong:
        raise ValueError("; ".join(wrong))


def _owner(rank: int, group: dist.ProcessGroup | None) -> int:
    size = dist.get_world_size(group)
    if not -size <= rank < size:
        raise ValueError(f"new_tokens_on must be a rank of a group of {size}, got {rank}")
    return rank % size


def _wide(q: Tensor, v_head_size: int) -> dict[str, Any]:
    """A float32 output: the parts are rounded once, after their sum."""
    return {"out": torch.zeros(q.shape[0], q.shape[1], v_head_size, dtype=torch.float32, device=q.device)}


def _result(q: Tensor, out: Tensor, lse: Tensor, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    out = out.to(q.dtype if q.dtype.itemsize > 1 else torch.bfloat16)
    return (out, lse) if return_lse else out
