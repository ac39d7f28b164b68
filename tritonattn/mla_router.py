"""Mixed batches of MLA: the plan of `Router`, with decode requests absorbed and the others not.

One launch cannot serve both: absorbed queries are 576 wide and shared-latent, the others 192 wide with keys of their own. The weights that
lead from one space to the other are the caller's, so `run` takes them as functions and calls each on the tokens that need it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tritonattn.batch import DecodeLaunch, Ints, Plan, Sent, Upload
from tritonattn.checks import check_absorbed, check_mla_router, check_mla_run, check_projected
from tritonattn.problem import AttnProblem
from tritonattn.router import ASSUMED_BLOCK_SIZE, Router

Absorb = Callable[[Tensor], "Tensor | tuple[Tensor, Tensor]"]
UpProject = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(eq=False)
class MlaDecodeLaunch(DecodeLaunch):
    """The decode requests of a plan, and where their tokens are."""

    tokens: Tensor | None
    """int32: the rows of q that belong to them, request after request. None: all."""
    cu_seqlens_q: Tensor | None
    """[B + 1] int32 among those rows, where other requests have none. None: that of the plan."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return *super().tensors, *(x for x in (self.tokens, self.cu_seqlens_q) if x is not None)


class MlaRouter(Router):
    """Runs prefill, extend and decode requests of one batch of an MLA model, each on its own path.

    Args:
        num_heads: query heads.
        kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim: as in the model's config (512, 128, 64, 128 in DeepSeek's).
        dtype: of queries, new keys and values, and of the result.
        device: where everything lives.
        softmax_scale: of the scores; it has no default, since models scale them beyond ``1 / sqrt(192)``.
        kv_dtype: of the cache; defaults to ``dtype``.
        kv_descale, rope_descale: as in `mla_decode`; may be given to `run` instead, where layers differ.
        decode_threshold, chunk_tokens, block_size, causal: as in `Router`.

    Raises:
        ValueError, TypeError: with every reason why these arguments are not supported.

    `plan`, and what holds for scratch and graph capture, is that of `Router`.
    """

    def __init__(
        self, num_heads: int, *, softmax_scale: float, dtype: torch.dtype, device: torch.device | str, kv_lora_rank: int = 512,
        qk_nope_head_dim: int = 128, qk_rope_head_dim: int = 64, v_head_dim: int = 128, kv_dtype: torch.dtype | None = None,
        decode_threshold: int = 1, chunk_tokens: int = 32768, block_size: int | None = None, causal: bool = True,
        kv_descale: float | Tensor | None = None, rope_descale: float | Tensor | None = None,
    ) -> None:  # fmt: skip
        kv_dtype = dtype if kv_dtype is None else kv_dtype
        self.device, self.params, self.mla_params = check_mla_router(
            num_heads, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, dtype, device, kv_dtype, decode_threshold,
            chunk_tokens, block_size, softmax_scale, causal, kv_descale, rope_descale,
        )  # fmt: skip
        num_heads, kv_lora_rank, v_head_dim = int(num_heads), int(kv_lora_rank), int(v_head_dim)
        qk_nope_head_dim, qk_rope_head_dim = int(qk_nope_head_dim), int(qk_rope_head_dim)
        self.kv_layout = "latent"
        self.block_size = None if block_size is None else int(block_size)
        self.decode_threshold, self.chunk_tokens = int(decode_threshold), int(chunk_tokens)
        self.batch_invariant = False  # the caller's projections are not
        self.paged = AttnProblem(
            num_heads, 1, kv_lora_rank + qk_rope_head_dim, kv_lora_rank, dtype, kv_dtype, "latent", self.block_size or ASSUMED_BLOCK_SIZE, causal
        )
        self.dense = AttnProblem(num_heads, num_heads, qk_nope_head_dim + qk_rope_head_dim, v_head_dim, dtype, dtype, "dense", 0, causal)
        self.extended = self.dense
        self.row_align, self.new_in_row = 1, False  # no projection is spent on gaps, nor on what the caller has projected
        self._start()

    def _decode_part(
        self, upload: Upload, ids: NDArray[np.int64] | None, query: Ints, seq: Ints, block_table: Tensor | None
    ) -> Callable[[Sent], MlaDecodeLaunch]:
        launch = super()._decode_part(upload, ids, query, seq, block_table)
        if ids is None:
            return lambda sent: MlaDecodeLaunch(**vars(launch(sent)), tokens=None, cu_seqlens_q=None)
        at_tokens, at_cu = upload.put(self._mix.decode_tokens), upload.put(self._mix.decode_starts)
        return lambda sent: MlaDecodeLaunch(**vars(launch(sent)), tokens=sent[at_tokens], cu_seqlens_q=sent[at_cu])

    def run(  # type: ignore[override]
        self, plan: Plan, q: Tensor, k: Tensor | None, v: Tensor | None, kv_cache: Tensor | None, *, absorb: Absorb, up_project: UpProject,
        up_project_v: Callable[[Tensor], Tensor], out: Tensor | None = None, return_lse: bool = False,
        kv_descale: float | Tensor | None = None, rope_descale: float | Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """One layer of a planned batch.

        Args:
            q: [T, H, nope + rope], the query tokens of the requests in the order of the plan; ``T`` may exceed their number (padding).
            k, v: [T, H, nope + rope], [T, H, v], the new tokens, projected up. Those of decode requests are not read; None will
                do where there are no others.
            kv_cache: [blocks, block_size, latent + rope], holding the context, and for decode requests the new tokens too. None
                will do where no request has context.
            absorb: q [n, H, nope + rope] of decode requests -> [n, H, latent + rope], or the pair of its parts.
            up_project: as in `mla_extend`, for the context of extend requests; None will do where there are none.
            up_project_v: [n, H, latent] -> [n, H, v], for the outputs of decode requests.
            out: [T, H, v]. Rows past the last request stay as they are in a given ``out`` and are 0 in a new one; in a batch of
                decode requests alone they are what ``up_project_v`` makes of 0.
            kv_descale, rope_descale: of this layer, each in place of the router's.

        Returns:
            out, with ``return_lse`` the pair ``(out, lse)``, lse [H, T] fp32, natural log.

        Raises:
            ValueError, TypeError: with every reason, before any launch; for what a projection gives back, when it does.
        """
        from tritonattn.paths.mla_decode import run_mla_decode
        from tritonattn.paths.mla_extend import run_mla_extend
        from tritonattn.paths.prefill import run_prefill
        from tritonattn.paths.replay import repeat

        fresh, decode_only = self._knows(plan), plan.decode_only
        functions: dict[str, Callable] = {} if plan.extend is None else {"up_project": up_project}
        if plan.decode is not None:
            functions |= {"absorb": absorb, "up_project_v": up_project_v}
        cache, params = check_mla_run(
            self.paged, self.dense, self.mla_params, q, k, v, kv_cache, plan.block_table, device=self.device, block_size=self.block_size,
            num_tokens=plan.num_tokens, reads=plan.max_cached_len, only_decodes=decode_only, fresh=fresh, out=out,
            kv_descale=kv_descale, rope_descale=rope_descale, functions=functions,
        )  # fmt: skip
        out, lse = self._results(q, plan.num_tokens, out, return_lse)
        cu_seqlens_q, table, extend, prefill, decode = plan.device_cu_seqlens_q, plan.block_table, plan.extend, plan.prefill, plan.decode
        if extend is not None and cache is not None and table is not None and k is not None and v is not None:
            run_mla_extend(
                self.dense, self.params, q, k, v, cache, out, lse, up_project=up_project, kv_descale=params.kv_descale,
                rope_descale=params.rope_descale, cu_seqlens_q=cu_seqlens_q, context_lens=plan.device_context_lens, block_table=table,
                row=extend.row, row_length=extend.row_length, row_is_full=True, num_seqs=plan.num_seqs,
                max_seqlen_q=extend.max_seqlen_q, chunk_tokens=self.chunk_tokens, scratch=self.scratch, tiles=extend.tiles,
                num_tiles=extend.num_tiles,
            )  # fmt: skip
        if prefill is not None and k is not None and v is not None:
            run_prefill(
                self.dense, self.params, q, k, v, out, lse, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_q, num_seqs=plan.num_seqs,
                max_seqlen_q=prefill.max_seqlen_q, tiles=prefill.tiles, num_tiles=prefill.num_tiles,
            )  # fmt: skip
        if isinstance(decode, MlaDecodeLaunch) and len(q) and kv_cache is not None and table is not None:
            rows = decode.tokens
            absorbed = absorb(q if rows is None else q[rows])
            q_latent, q_rope = check_absorbed(absorbed, self.paged, len(q) if rows is None else len(rows), self.device)
            tokens, heads = q_latent.shape[:2]
            width = self.paged.v_head_size
            latent = self.scratch.take("latent_out", tokens * heads * width, q.dtype).view(tokens, heads, width)
            part_lse = lse if rows is None or lse is None else self.scratch.take("latent_lse", heads * tokens, lse.dtype).view(heads, tokens)
            if rows is None:
                latent.zero_()
            cu = cu_seqlens_q if decode.cu_seqlens_q is None else decode.cu_seqlens_q
            tensors = (q_latent, q_rope, kv_cache, latent, part_lse, cu, plan.device_seq_lens, table)
            repeat(
                self._decode_runs, (decode.plan,), (*tensors, *params, *decode.work, decode.num_seqs, decode.max_seqlen_q),
                lambda: run_mla_decode(
                    self.paged._replace(block_size=kv_cache.shape[1]), params, q_latent, q_rope, kv_cache, latent, part_lse, cu_seqlens_q=cu,
                    seq_lens=plan.device_seq_lens, block_table=table, num_seqs=decode.num_seqs, max_seqlen_q=decode.max_seqlen_q,
                    plan=decode.plan, scratch=self.scratch, work=decode.work,
                ),
            )  # fmt: skip
            projected = check_projected(up_project_v(latent), self.dense, tokens, self.device)
            if rows is None:
                out.copy_(projected)
            else:
                out[rows] = projected
                if lse is not None and part_lse is not None:
                    lse[:, rows] = part_lse
        return (out, lse) if lse is not None else out
