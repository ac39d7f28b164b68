"""Decode of a sequence whose cached keys are spread over the ranks of a `torch.distributed` group.

Each rank attends to the keys it holds; the states meet by their LSE (Ring Attention's and Flash-Decoding's merge, arXiv:2310.01889): one
all-gather of the LSEs, one all-reduce of the outputs, each scaled by its share of the sum. gloo, NCCL and RCCL run the same code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tritonattn import checks
from tritonattn.checks.reasons import UNKNOWN
from tritonattn.mha import decode_attention
from tritonattn.mla import mla_decode


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
    Raises ValueError or TypeError with every reason, before any launch and before the ranks meet: all of them check what they share, also what
    only one of them uses. Not supported are options that depend on a key's place in the whole sequence (window_size, alibi_slopes), and `out`.
    """
    ranks, rank = _ranks(group, new_tokens_on)
    given = {"seqused_k": seqused_k, "block_table": block_table, "max_seqlen_k": max_seqlen_k, "causal": causal, "sinks": sinks}
    call = _keywords("cp_decode_attention", decode_attention, given | options)
    problem, _, _ = checks.check_decode(q, k_cache, v_cache, ranks=ranks, **call)
    owns = rank == new_tokens_on % ranks.size
    call |= {"causal": causal and owns, "sinks": sinks if owns else None, "out": _wide(q, problem.v_head_size)}
    out, lse = decode_attention(q, k_cache, v_cache, return_lse=True, **call)
    return _result(q, *merge_over_ranks(out, lse, group), return_lse)


def cp_mla_decode(
    q: Tensor | tuple[Tensor, Tensor], kv_cache: Tensor, *, seqused_k: Tensor, block_table: Tensor, max_seqlen_k: int,
    softmax_scale: float, kv_lora_rank: int = 512, group: dist.ProcessGroup | None = None, new_tokens_on: int = -1,
    causal: bool = True, return_lse: bool = False, **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`mla_decode` over latent rows on several ranks; the arguments as in `cp_decode_attention`."""
    ranks, rank = _ranks(group, new_tokens_on)
    given = {
        "seqused_k": seqused_k, "block_table": block_table, "max_seqlen_k": max_seqlen_k, "softmax_scale": softmax_scale,
        "kv_lora_rank": kv_lora_rank, "causal": causal,
    }  # fmt: skip
    call = _keywords("cp_mla_decode", mla_decode, given | options)
    problem, _, queries, _ = checks.check_mla_decode(q, kv_cache, ranks=ranks, **call)
    call |= {"causal": causal and rank == new_tokens_on % ranks.size, "out": _wide(queries, problem.v_head_size)}
    out, lse = mla_decode(q, kv_cache, return_lse=True, **call)
    return _result(queries, *merge_over_ranks(out, lse, group), return_lse)


def _ranks(group: dist.ProcessGroup | None, new_tokens_on: int) -> tuple[checks.Ranks, int]:
    """The group as it is checked, and this rank's number in it."""
    if group is not None and not isinstance(group, dist.ProcessGroup):  # of a group that it is not in, a rank has a placeholder
        return checks.Ranks(group, UNKNOWN, new_tokens_on), UNKNOWN
    return checks.Ranks(group, dist.get_world_size(group), new_tokens_on), dist.get_rank(group)


@cache
def _defaults(function: Callable) -> dict[str, Any]:
    keywords = {p.name: p.default for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY}
    del keywords["return_lse"]
    return keywords


def _keywords(op: str, function: Callable, given: dict[str, Any]) -> dict[str, Any]:
    """All keywords of a call of `function` but `return_lse`: those given, the others as it has them by itself."""
    defaults = _defaults(function)
    for name in given:
        if name not in defaults:
            raise TypeError(f"{op}() got an unexpected keyword argument {name!r}")
    return defaults | given


def _wide(q: Tensor, v_head_size: int) -> Tensor:
    """A float32 output: the parts are rounded once, after their sum."""
    return torch.zeros(q.shape[0], q.shape[1], v_head_size, dtype=torch.float32, device=q.device)


def _result(q: Tensor, out: Tensor, lse: Tensor, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    out = out.to(q.dtype if q.dtype.itemsize > 1 else torch.bfloat16)
    return (out, lse) if return_lse else out
