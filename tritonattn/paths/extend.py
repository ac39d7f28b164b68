"""Extend: new query tokens on a cached context, in chunks.

The keys that the call needs form one row, sequence after sequence, of each the context and behind it the new tokens. Each pass takes
the next `chunk_tokens` of the row: gathers them into a dense workspace (from the pages, dequantised, so that no query tile does it
again; new tokens from where the caller has them) and attends to them, every sequence that has a part in the chunk at once. A long
sequence spans several passes, short ones share a pass, no budget is reserved for anybody, and there is no trailing empty chunk.
Query rows whose keys lie in several chunks leave their softmax state in scratch from pass to pass.

Scratch: `chunk_tokens` keys and values, and where one chunk does not hold the row the float32 state of the query rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tritonattn.layouts import CacheView
from tritonattn.paths.cache import NewTokens, run_gather
from tritonattn.paths.prefill import CHUNK, NEW_TOKENS, run_pass, tile_count
from tritonattn.plan import ROW_ALIGN, ContextRow, prefill_row
from tritonattn.problem import AttnParams, AttnProblem
from tritonattn.scratch import Scratch
from tritonattn.tuning.arch import detect


def key_starts(context_lens: Tensor, window_left: int, align: int) -> Tensor:
    """The first cached position that the first query sees, down to a multiple of `align` (`AttnProblem.start_align`)."""
    if window_left < 0:
        return torch.zeros_like(context_lens)
    return (context_lens - window_left).clamp_(min=0) // align * align


def key_ends(cu_seqlens_q: Tensor, context_lens: Tensor, with_new: bool) -> Tensor:
    """Where the keys of each sequence end that the row is to hold, with or without its new ones; 0 where no query needs any."""
    new = cu_seqlens_q.diff()
    return (context_lens + new if with_new else context_lens) * (new > 0)


def context_row(context_lens: Tensor, end_lens: Tensor, window_left: int, start_align: int, align: int = ROW_ALIGN) -> ContextRow:
    """The row of a batch. end_lens: how far it goes in each sequence, to the end of that or of its context. align: a power of two."""
    starts = key_starts(context_lens, window_left, start_align)
    lengths = end_lens if window_left < 0 else (end_lens - starts).clamp_(min=0)
    cu = torch.zeros(len(starts) + 1, dtype=torch.int32, device=starts.device)
    torch.cumsum(lengths if align == 1 else (lengths + (align - 1)) & -align, 0, dtype=torch.int32, out=cu[1:])
    return ContextRow(starts, lengths, cu)


def chunk_size(chunk_tokens: int, row_length: int) -> int:
    """Tokens of a pass: chunk_tokens rounded up to a multiple of ROW_ALIGN, or fewer where the row is shorter."""
    return -(-max(min(chunk_tokens, row_length), 1) // ROW_ALIGN) * ROW_ALIGN


def run_extend(
    problem: AttnProblem, params: AttnParams, q: Tensor, k: Tensor | None, v: Tensor | None, cache: CacheView, out: Tensor,
    lse: Tensor | None, *, cu_seqlens_q: Tensor, context_lens: Tensor, block_table: Tensor, row: ContextRow, row_length: int,
    num_seqs: int, max_seqlen_q: int, chunk_tokens: int, scratch: Scratch, tiles: Tensor | None = None, num_tiles: int = 0,
) -> None:  # fmt: skip
    """row: of whole sequences. k = v = None: the new tokens are in the cache already. The rest as in `run_chunks`."""
    chunk = chunk_size(chunk_tokens, row_length)
    heads, k_width, v_width = cache.num_kv_heads, problem.head_size, problem.v_head_size
    k_chunk = scratch.take("extend_k", chunk * heads * k_width, q.dtype).view(heads, chunk, k_width).transpose(0, 1)
    v_chunk = scratch.take("extend_v", chunk * heads * v_width, q.dtype).view(heads, chunk, v_width).transpose(0, 1)
    new = None if k is None or v is None else NewTokens(k, v, cu_seqlens_q, context_lens)

    def load(begin: int, end: int) -> tuple[Tensor, Tensor]:
        run_gather(
            k_chunk, v_chunk, cache, params.k_descale, params.v_descale, cu_rows=row.cu, starts=row.starts, lengths=row.lengths,
            block_table=block_table, num_seqs=num_seqs, chunk=(begin, end), aligned=True, new=new,
        )  # fmt: skip
        return k_chunk, v_chunk

    run_chunks(
        problem, params.dense, q, None, None, out, lse, load=load, cu_seqlens_q=cu_seqlens_q,
        context_lens=context_lens, row=row, row_length=row_length, num_seqs=num_seqs, max_seqlen_q=max_seqlen_q, chunk=chunk,
        scratch=scratch, tiles=tiles, num_tiles=num_tiles,
    )  # fmt: skip


def run_chunks(
    problem: AttnProblem, params: AttnParams, q: Tensor, k: Tensor | None, v: Tensor | None, out: Tensor, lse: Tensor | None, *,
    load: Callable[[int, int], tuple[Tensor, Tensor]], cu_seqlens_q: Tensor, context_lens: Tensor, row: ContextRow, row_length: int,
    num_seqs: int, max_seqlen_q: int, chunk: int, scratch: Scratch, tiles: Tensor | None = None, num_tiles: int = 0,
) -> None:  # fmt: skip
    """A pass for each chunk of the row, and one for the new tokens `k`, `v`, or None for both where the row has them.

    load: the keys and values of rows [begin, end) of the row, dense.
    row_length: host int, at least row.cu[-1]; the passes after the end of the row do nothing.
    tiles, num_tiles: as in `run_prefill`; the sequences that they do not name are left alone.
    """
    config = prefill_row(detect(q.device), problem, max_seqlen_q)
    if tiles is None:
        num_tiles = tile_count(config, q.shape[0], num_seqs)
    if not num_tiles or not q.shape[0]:
        return
    new_in_row = k is None
    waiting = num_tiles if row_length > chunk or not new_in_row else 1  # tiles with a state between passes; of a single pass none
    rows = waiting * problem.num_q_heads * config.config["BLOCK_M"]
    state_ml = scratch.take("extend_ml", rows * 2, torch.float32)
    state_acc = scratch.take("extend_acc", rows * problem.v_head_size, torch.float32)
    common: dict[str, Any] = {"cu_seqlens_q": cu_seqlens_q, "num_seqs": num_seqs, "tiles": tiles,
                              "num_tiles": num_tiles, "key_starts": row.starts, "context_lens": context_lens}  # fmt: skip
    for begin in range(0, max(row_length, int(new_in_row)), chunk):  # without keys, padding has its pass all the same
        end = min(begin + chunk, row_length)
        k_chunk, v_chunk = load(begin, end)
        run_pass(
            CHUNK, config, problem, params, q, k_chunk, v_chunk, out, lse, state_ml, state_acc, cu_seqlens_k=row.cu,
            new_in_row=new_in_row, chunk=(begin, end, row_length), **common,
        )  # fmt: skip
    if k is not None and v is not None:
        run_pass(
            NEW_TOKENS, config, problem, params, q, k, v, out, lse, state_ml, state_acc, cu_seqlens_k=cu_seqlens_q, **common,
        )  # fmt: skip
