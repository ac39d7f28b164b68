"""One step's batch: which request takes which path, from what vLLM knows on the host.

Neither model runner promises an order that tells prefills from extends, so each request is classified by itself. Decode requests are read with
the lengths on the device alone, since under asynchronous speculative decoding the host knows only an upper bound of them; for the others the
host's lengths are exact.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tritonattn.batch import ZERO, DecodeLaunch, ExtendLaunch, Ints, TileLaunch, Upload
from tritonattn.layouts import CacheView
from tritonattn.paths.cache import run_write
from tritonattn.paths.decode import run_decode
from tritonattn.paths.extend import context_row, run_extend
from tritonattn.paths.prefill import run_prefill
from tritonattn.paths.replay import repeat
from tritonattn.problem import AttnParams
from tritonattn.router import Router
from tritonattn.scratch import Arena, keep
from tritonattn.where import is_capturing

CHUNK_TOKENS = 32768  # cached tokens gathered at a time
KEPT_FOR = 64  # tokens by which contexts may grow before decodes are planned anew: about a tile of keys, so that the parts stay even


class Kind(NamedTuple):
    """What layers must share to share a plan."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    kv_layout: str
    kv_dtype: torch.dtype
    window_size: tuple[int, int]
    softcap: float
    has_alibi: bool
    has_sinks: bool
    causal: bool
    cached_only: bool
    """The new keys are taken from the cache as well: layers that share another's cache, and cross attention."""


@dataclass(frozen=True)
class BatchPlan:
    planner: Planner
    decode: DecodeLaunch | None
    extend: ExtendLaunch | None
    prefill: TileLaunch | None
    context_lens: Tensor | None
    """[B] int32 on the device, right for the requests of `extend`; None without those."""
    whole: bool = False
    """`extend` is every request of the batch, and finds its lengths on the device."""
    runs: dict = field(default_factory=dict)
    """Of layers, to be repeated; where there are decodes alone, the planner has them."""

    @property
    def decode_only(self) -> bool:
        return self.extend is None and self.prefill is None


class Batch:
    """Host lengths and device tensors of one step; plans are made once per kind of layer.

    The device tensors are vLLM's own and stay in place where a graph is replayed.
    """

    def __init__(self, common: Any, threshold: int, planners: dict[Kind, Planner], create: Any) -> None:
        self._common = common
        self._threshold = threshold
        count = self.num_reqs = common.num_reqs
        self.max_query_len = int(common.max_query_len)
        self.decode_only = self.max_query_len <= threshold or not np.count_nonzero(self.long)
        upper = common.seq_lens_cpu_upper_bound
        self.seq_lens: Ints | None = None if upper is None else upper.numpy()[:count].astype(np.int32, copy=False)
        prefilling = common.is_prefilling
        if not self.decode_only and prefilling is not None and prefilling.device.type == "cpu":
            guessed = self.long & ~prefilling.numpy()[:count].astype(bool)
            if guessed.any():  # more query tokens than were announced, and lengths that are only bounds
                self.seq_lens = None
        self.max_seq_len = int(common.max_seq_len)
        self.cu_seqlens_q = common.query_start_loc
        self.device_seq_lens = common.seq_lens if len(common.seq_lens) == count else common.seq_lens[:count]
        self.block_table = common.block_table_tensor
        self._create = create
        self._planners = planners
        self._plans = {kind: planner.lay_out(self) for kind, planner in planners.items()}

    @cached_property
    def query_lens(self) -> Ints:
        starts = self._common.query_start_loc_cpu.numpy()[: self.num_reqs + 1].astype(np.int32, copy=False)
        return starts[1:] - starts[:-1]

    @cached_property
    def long(self) -> NDArray[np.bool_]:
        """The requests with more query tokens than a decode has."""
        return self.query_lens > np.array(self._threshold, np.int32)

    def plan(self, kind: Kind, impl: Any) -> BatchPlan:
        """The plan for layers of this kind. A kind that the builder did not foresee gets a planner here, which later batches start with."""
        plan = self._plans.get(kind)
        if plan is None:
            if is_capturing(self.device_seq_lens.device):
                raise RuntimeError("a graph cannot be captured before a layer of its kind has run once: no later plan would reach it")
            planner = self._planners.setdefault(kind, self._create(kind, impl))
            plan = self._plans[kind] = planner.lay_out(self)
        return plan


def write(key: Tensor, value: Tensor, cache: CacheView, slot_mapping: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    """`run_write`, from the second layer on at the cost of its launch."""
    values = key, value, cache.k, cache.v, slot_mapping, k_scale, v_scale
    repeat(_writes, (cache.kind,), values, partial(run_write, key, value, cache, slot_mapping, k_scale, v_scale))


_writes: dict = {}
_arenas: dict[tuple[torch.device, int], Arena] = {}


def scratch(device: torch.device) -> Arena:
    """One for all layers that run on the current stream, one after the other."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    arena = _arenas.get((device, stream))
    if arena is None:
        arena = _arenas[device, stream] = Arena(device)
    return arena


class Planner(Router):
    """`Router` for vLLM: its batches, its tensors, and no checks of what vLLM's own interface has fixed."""

    def __init__(self, kind: Kind, impl: Any, device: torch.device, block_size: int, threshold: int, batch_invariant: bool) -> None:
        self.kind = kind
        self._kept: tuple[BatchPlan, Ints, int] | None = None
        super().__init__(
            kind.num_heads, kind.num_kv_heads, kind.head_size, dtype=kind.dtype, device=device, kv_layout=kind.kv_layout,
            kv_dtype=kind.kv_dtype, decode_threshold=threshold, chunk_tokens=CHUNK_TOKENS, batch_invariant=batch_invariant,
            block_size=block_size, softmax_scale=impl.scale, causal=kind.causal, window_size=kind.window_size, softcap=kind.softcap,
            alibi_slopes=impl.slopes(device) if kind.has_alibi else None, sinks=impl.sinks if kind.has_sinks else None,
        )  # fmt: skip

    def lay_out(self, batch: Batch) -> BatchPlan:
        if batch.decode_only:
            return self._lay_out_decodes(batch)
        if batch.seq_lens is None:
            return self._lay_out_unknown(batch)
        query, seq, upload = batch.query_lens, batch.seq_lens, Upload()
        context = seq - query
        at_context = upload.put(context)
        # A request of few tokens is decoded without a context too: its keys are in the cache already.
        mix = self._mix = self._mix.of(query, np.zeros(len(query), np.bool_) if self.kind.cached_only else batch.long & (context == ZERO))
        decode = extend = prefill = None
        if len(mix.decoded):
            decode = self._decode_part(upload, mix.decoded, query, seq, batch.block_table)
        if len(mix.extended):
            extend = self._extend_part(upload, mix.extended, query, context, seq)
        if len(mix.prefilled):
            prefill = self._tile_part(upload, self.dense, mix.prefilled, query, context)
        sent = self._send(upload, len(query), False)
        return BatchPlan(self, decode and decode(sent), extend and extend(sent), prefill and prefill(sent), sent[at_context])

    def _lay_out_decodes(self, batch: Batch) -> BatchPlan:
        """That of the step before where contexts grew by a few tokens since it was made: kernels find the lengths on the device."""
        count, seq, width = batch.num_reqs, batch.seq_lens, batch.block_table.shape[1]
        if self._kept is not None and seq is not None:
            plan, kept_seq, kept_width = self._kept
            # A context that is shorter than it was is a huge number as an unsigned one.
            if len(kept_seq) == count and kept_width == width and np.maximum.reduce((seq - kept_seq).view(np.uint32), initial=0) < KEPT_FOR:
                return plan
        upload = Upload()
        longest = np.full(count, batch.max_seq_len, np.int32) if seq is None else seq
        # Padding keeps its place, so that the grid stays that of the graph.
        decode = self._decode_part(upload, None, batch.query_lens, longest, batch.block_table)
        plan = BatchPlan(self, decode(self._send(upload, count, True)), None, None, None)
        self._kept = None if seq is None or self.batch_invariant else (plan, seq.copy(), width)
        return plan

    def _lay_out_unknown(self, batch: Batch) -> BatchPlan:
        """Without lengths on the host: every request as one whose keys are all cached, found on the device. No path for speed."""
        count = len(batch.query_lens)
        queries = batch.cu_seqlens_q[: count + 1].diff()
        context = batch.device_seq_lens - queries
        row = context_row(context, batch.device_seq_lens, self.params.window_size[0], self.paged.start_align)
        launch = ExtendLaunch(batch.max_query_len, 0, queries, row, count * -(-batch.max_seq_len // self.row_align) * self.row_align)
        return BatchPlan(self, None, launch, None, context, whole=True)

    def launch(
        self, plan: BatchPlan, batch: Batch, params: AttnParams, q: Tensor, k: Tensor | None, v: Tensor | None, cache: CacheView, out: Tensor,
        arena: Any = None,
    ) -> None:
        """One layer. The new tokens are in the cache already; where `k` and `v` are given, prefill and extend take them from there."""
        if plan.whole or self.kind.cached_only:
            k = v = None
        arena, key = arena or scratch(q.device), plan.decode.key if plan.decode_only and plan.decode is not None else ()
        values = (
            q, k, v, cache.k, cache.v, out, *params, batch.cu_seqlens_q, batch.device_seq_lens, batch.block_table, plan.context_lens,
            batch.num_reqs,
        )  # fmt: skip
        repeat(
            self._decode_runs if plan.decode_only else plan.runs, (arena, *key), values,
            lambda: self._launch(plan, batch, params, q, k, v, cache, out, arena),
        )  # fmt: skip

    def _launch(self, plan: BatchPlan, batch: Batch, params: AttnParams, q, k, v, cache: CacheView, out: Tensor, arena: Arena) -> None:
        count, cu_seqlens_q, table = batch.num_reqs, batch.cu_seqlens_q, batch.block_table
        extend, prefill, decode = plan.extend, plan.prefill, plan.decode
        for part in (extend, prefill, decode):
            keep(*(() if part is None else part.tensors))
        if extend is not None and plan.context_lens is not None:
            run_extend(
                self.paged, params, q, k, v, cache, out, None, cu_seqlens_q=cu_seqlens_q, context_lens=plan.context_lens, block_table=table,
                row=extend.row, row_length=extend.row_length, num_seqs=count, max_seqlen_q=extend.max_seqlen_q,
                chunk_tokens=self.chunk_tokens, scratch=arena, tiles=None if plan.whole else extend.tiles, num_tiles=extend.num_tiles,
            )  # fmt: skip
        if prefill is not None and k is not None and v is not None:
            run_prefill(
                self.dense, params.dense, q, k, v, out, None, cu_seqlens_q=cu_seqlens_q,
                cu_seqlens_k=cu_seqlens_q, num_seqs=count, max_seqlen_q=prefill.max_seqlen_q, tiles=prefill.tiles,
                num_tiles=prefill.num_tiles,
            )  # fmt: skip
        if decode is not None:
            run_decode(
                self.paged, params, q, cache, out, None, cu_seqlens_q=cu_seqlens_q, seq_lens=batch.device_seq_lens, block_table=table,
                num_seqs=decode.num_seqs, max_seqlen_q=decode.max_seqlen_q, plan=decode.plan, scratch=arena, work=decode.work,
            )  # fmt: skip
