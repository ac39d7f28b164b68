"""MLA extend, not absorbed: the chunks of `extend`, with keys and values made from the latent rows of the cache.

A chunk of the context is gathered as latent and rope rows, dequantised, and goes through the caller's up-projection; what comes back is
attended like any dense keys and values, each head with its own. The rows of all sequences lie end to end without a gap, so that the
projection is spent on no padding.

Scratch: `chunk_tokens` latent rows and the float32 state of the query rows; what `up_project` allocates is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tritonattn.checks import check_up_projected
from tritonattn.layouts import CacheView
from tritonattn.paths.cache import run_gather
from tritonattn.paths.extend import chunk_size, run_chunks
from tritonattn.plan import ContextRow
from tritonattn.problem import AttnParams, AttnProblem
from tritonattn.scratch import Scratch

UpProject = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def run_mla_extend(
    problem: AttnProblem, params: AttnParams, q: Tensor, k: Tensor, v: Tensor, cache: CacheView, out: Tensor, lse: Tensor | None, *,
    up_project: UpProject, kv_descale: float | Tensor | None, rope_descale: float | Tensor | None, cu_seqlens_q: Tensor,
    context_lens: Tensor, block_table: Tensor, row: ContextRow, row_length: int, row_is_full: bool, num_seqs: int,
    max_seqlen_q: int, chunk_tokens: int, scratch: Scratch, tiles: Tensor | None = None, num_tiles: int = 0,
) -> None:  # fmt: skip
    """cache: the latent columns as K, the rope columns as V. row_is_full: row_length is row.cu[-1] and the row has no gaps; else
    `up_project` gets zeros for the rows that belong to no token. The rest as in `run_chunks`."""
    chunk = chunk_size(chunk_tokens, row_length)
    width, rope_width = cache.head_size, cache.v_head_size
    rows = scratch.take("extend_latent", chunk * (width + rope_width), q.dtype)
    latent, rope = rows[: chunk * width].view(chunk, 1, width), rows[chunk * width :].view(chunk, 1, rope_width)

    def load(begin: int, end: int) -> tuple[Tensor, Tensor]:
        if not row_is_full:
            rows.zero_()
        run_gather(
            latent, rope, cache, kv_descale, kv_descale if rope_descale is None else rope_descale, cu_rows=row.cu, starts=row.starts,
            lengths=row.lengths, block_table=block_table, num_seqs=num_seqs, chunk=(begin, end), aligned=False,
        )  # fmt: skip
        count = end - begin
        return check_up_projected(up_project(latent[:count, 0], rope[:count, 0]), count, problem, q.device)

    run_chunks(
        problem, params, q, k, v, out, lse, load=load, cu_seqlens_q=cu_seqlens_q, context_lens=context_lens, row=row,
        row_length=row_length, num_seqs=num_seqs, max_seqlen_q=max_seqlen_q, chunk=chunk, scratch=scratch, tiles=tiles,
        num_tiles=num_tiles,
    )  # fmt: skip
