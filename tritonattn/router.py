"""Mixed batches: which request takes which path, planned once per step on the host and run once per layer.

The plan reads nothing back from the device and sends it one small buffer. Every kernel finds its sequences through that
buffer, so requests may arrive in any order and no token is moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tritonattn.batch import DECODE, EXTEND, PREFILL, DecodeLaunch, ExtendLaunch, Ints, Plan, TileLaunch, Upload, kinds_of
from tritonattn.checks import check_plan, check_router, check_run
from tritonattn.plan import MAX_SPLITS, ContextRow, DecodeWork, decode_plan, prefill_row
from tritonattn.problem import AttnProblem
from tritonattn.scratch import Arena, keep, take
from tritonattn.tuning.arch import detect

ASSUMED_BLOCK_SIZE = 16  # for looking up tuning rows where the router was not told the block size
ROW_ALIGN = 16  # a request's part of the context row starts at a multiple of this, see paths.extend
MIN_BLOCK_M = 16  # no kernel takes fewer query rows per tile
REDUCTION_SHARE = 8  # a split reads at least this many times the bytes that merging it moves


class Router:
    """Runs prefill, extend and decode requests of one batch, each on its own path.

    Args:
        num_q_heads, num_kv_heads, head_size, v_head_size: of the layers that use it (``v_head_size`` defaults to ``head_size``).
        dtype: of queries, new keys and values, and of the result.
        device: where everything lives.
        kv_layout, kv_dtype: of the cache; ``kv_dtype`` defaults to ``dtype``.
        decode_threshold: most query tokens of a request that is decoded (1 + speculated tokens).
        chunk_tokens: cached tokens gathered at a time for extend requests; bounds the scratch.
        batch_invariant: a request's result is the same to the bit whatever else is in the batch, at some cost in speed.
        block_size: tokens per cache block; told, `plan` can refuse a block table that is too short before `run` does.
        softmax_scale, causal, window_size, softcap, alibi_slopes, sinks, k_descale, v_descale: as in the ops; of
            those, sinks and descales may be given to `run` instead, where layers differ.

    Raises:
        ValueError, TypeError: with every reason why these arguments are not supported.

    Scratch belongs to the router, at addresses that stay; calls of one router run on one stream.
    """

    def __init__(
        self, num_q_heads: int, num_kv_heads: int, head_size: int, *, v_head_size: int | None = None, dtype: torch.dtype,
        device: torch.device | str, kv_layout: str = "preshuffled", kv_dtype: torch.dtype | None = None, decode_threshold: int = 1,
        chunk_tokens: int = 32768, batch_invariant: bool = False, block_size: int | None = None, softmax_scale: float | None = None,
        causal: bool = True, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None, k_descale: float | Tensor | None = None, v_descale: float | Tensor | None = None,
    ) -> None:  # fmt: skip
        v_head_size = head_size if v_head_size is None else v_head_size
        kv_dtype = dtype if kv_dtype is None else kv_dtype
        self.device, self.params = check_router(
            num_q_heads, num_kv_heads, head_size, v_head_size, dtype, device, kv_layout, kv_dtype, decode_threshold,
            chunk_tokens, batch_invariant, block_size, softmax_scale, causal, window_size, softcap, alibi_slopes, sinks, k_descale, v_descale,
        )  # fmt: skip
        self.kv_layout = kv_layout
        self.block_size = block_size
        self.decode_threshold = decode_threshold
        self.chunk_tokens = chunk_tokens
        self.batch_invariant = batch_invariant
        self.paged = AttnProblem(
            num_q_heads, num_kv_heads, head_size, v_head_size, dtype, kv_dtype,
            "preshuffled" if kv_layout == "preshuffled" else "plain", block_size or ASSUMED_BLOCK_SIZE, causal,
            self.params.window_size != (-1, -1), softcap > 0, alibi_slopes is not None, sinks is not None,
        )  # fmt: skip
        self.dense = self.paged._replace(kv_dtype=dtype, kv_layout="dense", block_size=0)
        self.extended = self.paged  # what extend requests are attended as: here as cached, after the projection in MLA
        self.row_align = ROW_ALIGN
        self._start()

    def _start(self) -> None:
        """What every kind of router has beside its problem."""
        self.scratch = Arena(self.device)
        self._arch = detect(self.device)
        self._fixed: dict[int, tuple[Tensor, dict[tuple[int, int], Tensor]]] = {}
        self._version = 0
        self._latest: dict[int, int] = {}
        self._decode_runs: dict = {}
        self._runs_of: Plan | None = None
        self._runs: dict = {}
        self._all_of: Plan | None = None
        self._all: ExtendLaunch | None = None

    # -- plan -----------------------------------------------------------------------------------------------------

    def plan(self, query_lens: Sequence[int] | Ints, seq_lens: Sequence[int] | Ints, block_table: Tensor | None) -> Plan:
        """Sort a batch into paths and choose tiles and splits: arithmetic on the host, and one upload.

        Args:
            query_lens, seq_lens: host integers per request: new tokens, and context + new tokens. ``(0, 0)`` is padding.
            block_table: [B, max_blocks] int32 on the device. None will do where no request has context.

        The plans of decode-only batches of one size (padding included) share a device buffer and a grid: a graph that was
        captured around `run` of one replays whichever was planned last, with the same block table tensor. The older plan is
        refused by `run` from then on.

        Raises:
            ValueError, TypeError: with every reason: negative lengths, more query than sequence tokens, a table too short, ...
        """
        query, seq, context, max_seq_len = check_plan(
            query_lens, seq_lens, block_table, self.device, self.block_size, self.decode_threshold
        )
        batch = len(query)
        kinds = kinds_of(query, context, self.decode_threshold)
        live = query > 0
        decode_only = not np.count_nonzero(kinds[live])
        num_tokens = int(np.add.reduce(query))
        max_cached_len, none = max_seq_len, np.zeros(0, np.int64)
        extended = prefilled = none
        # In a decode-only batch padding keeps its place, so that the grid stays that of the graph.
        decoded = np.arange(batch)
        if not decode_only:
            path = np.where(live, kinds, -1)
            decoded, extended, prefilled = (path == DECODE).nonzero()[0], (path == EXTEND).nonzero()[0], (path == PREFILL).nonzero()[0]
            max_cached_len = int(np.maximum.reduce(np.where(kinds == DECODE, seq, context)))

        upload = self._begin_upload(batch, num_tokens, decode_only)
        cu_seqlens_q, device_cu_seqlens_q = upload.room(batch + 1)
        cu_seqlens_q[0] = 0
        query.cumsum(out=cu_seqlens_q[1:])
        plan = Plan(
            num_seqs=batch, num_tokens=num_tokens, query_lens=query, seq_lens=seq, kinds=kinds, device_cu_seqlens_q=device_cu_seqlens_q,
            device_seq_lens=upload.put(seq), device_context_lens=upload.put(context), block_table=block_table,
            decode=self._decode_launch(upload, decoded, query, seq, block_table, decode_only) if len(decoded) else None,
            extend=self._extend_launch(upload, extended, query, context, context) if len(extended) else None,
            prefill=self._tile_launch(upload, self.dense, prefilled, query, context) if len(prefilled) else None,
            max_cached_len=max_cached_len, max_seq_len=max_seq_len, version=self._version, router=self,
        )  # fmt: skip
        upload.send()
        return plan

    def _begin_upload(self, batch: int, num_tokens: int, decode_only: bool) -> Upload:
        """Room for every array of a plan: some per request, those of decode parts, those of tiles."""
        self._version += 1
        parts = batch * MAX_SPLITS if self.batch_invariant else batch + MAX_SPLITS
        room = 16 * (batch + 8) + 6 * (parts + 8)
        if not decode_only:
            room += self.decode_threshold * (batch + 8) + 6 * (num_tokens // MIN_BLOCK_M + batch)
            return Upload(torch.empty(room, dtype=torch.int32, device=self.device))
        self._latest[batch] = self._version
        if batch not in self._fixed:
            self._fixed[batch] = torch.empty(room, dtype=torch.int32, device=self.device), {}
        return Upload(*self._fixed[batch])

    def _decode_launch(
        self, upload: Upload, ids: NDArray[np.int64], query: Ints, seq: Ints, block_table: Tensor | None, fixed: bool
    ) -> DecodeLaunch:
        """Cut the keys into parts of about equal length over the whole batch, as many as fill the device; longest requests first.

        ``batch_invariant``: as if each request were alone. ``fixed``: every size that a graph records is one that all batches of
        this many requests share; the lists are filled up with items that do nothing.
        """
        problem, left = self.paged, self.params.window_size[0]
        keys, queries = seq[ids], query[ids]
        if left >= 0:
            keys = np.minimum(keys, left + queries)
        by_length = (-keys).argsort(kind="stable")
        ids, keys = ids[by_length], keys[by_length]
        count = len(ids)
        max_q = self.decode_threshold if fixed or self.batch_invariant else int(np.maximum.reduce(queries))
        if self.batch_invariant:
            plan = decode_plan(self._arch, problem, 1, max_q, self.chunk_tokens)
        else:
            longest = block_table.shape[1] * problem.block_size if fixed and block_table is not None else int(keys[0])
            plan = decode_plan(self._arch, problem, count, max_q, longest)
        programs = int(plan.row.config["programs_per_cu"] * self._arch.compute_units)
        parts = min(max(1, programs // (problem.num_kv_heads * plan.row_blocks)), MAX_SPLITS)
        work = keys if self.batch_invariant else int(np.add.reduce(keys, dtype=np.int64))
        length = np.maximum(-(-work // parts), plan.row.config.get("keys_per_split") or _least_split(problem, max_q))
        splits = np.maximum((2 * keys + length) // (2 * length), 1)
        num_items, num_merges = int(np.add.reduce(splits)), int(np.count_nonzero(splits > 1))
        most, most_merges = num_items, num_merges
        if fixed:
            most, most_merges = (count * parts, count) if self.batch_invariant else (count + parts, min(count, parts))
        (items, device_items), (merges, device_merges) = upload.room(most, 3), upload.room(most_merges, 3)
        items[num_items:], merges[num_merges:] = 0, 0
        if num_merges:
            first = splits.cumsum() - splits
            items[:num_items, 0], items[:num_items, 2] = ids.repeat(splits), splits.repeat(splits)
            items[:num_items, 1] = np.arange(num_items) - first.repeat(splits)
            cut = (splits > 1).nonzero()[0]
            merges[:num_merges, 0], merges[:num_merges, 1], merges[:num_merges, 2] = ids[cut], first[cut], splits[cut]
        else:
            items[:num_items, 0], items[:num_items, 1], items[:num_items, 2] = ids, 0, 1
        return DecodeLaunch(plan, count, max_q, splits, DecodeWork(device_items, most, device_merges, most_merges))

    def _tile_launch(self, upload: Upload, problem: AttnProblem, ids: NDArray[np.int64], query: Ints, context: Ints) -> TileLaunch:
        queries = query[ids]
        max_q = self.chunk_tokens if self.batch_invariant else int(np.maximum.reduce(queries))
        block_m = prefill_row(self._arch, problem, max_q).config["BLOCK_M"]
        blocks = -(-queries // block_m)
        num_tiles = int(np.add.reduce(blocks))
        tiles = np.empty((num_tiles, 2), np.int32)
        tiles[:, 0] = ids.repeat(blocks)
        tiles[:, 1] = (np.arange(num_tiles) - (blocks.cumsum() - blocks).repeat(blocks)) * block_m
        by_keys = (tiles[:, 1] + context[tiles[:, 0]]).argsort(kind="stable")
        host, device = upload.room(num_tiles, 2)
        tiles.take(by_keys, axis=0, out=host)
        return TileLaunch(max_q, num_tiles, device)

    def _extend_launch(self, upload: Upload, ids: NDArray[np.int64], query: Ints, context: Ints, end: Ints) -> ExtendLaunch:
        """Requests whose keys are cached up to ``end``; from the first on that a query sees."""
        tiles = self._tile_launch(upload, self.extended, ids, query, context)
        align, start_align = self.row_align, self.paged.start_align
        left = self.params.window_size[0]
        (starts, device_starts), (lengths, device_lengths) = upload.room(len(context)), upload.room(len(context))
        cu, device_cu = upload.room(len(context) + 1)
        starts[:] = np.maximum(context - left, 0) // start_align * start_align if left >= 0 else 0
        lengths[:], cu[0] = 0, 0
        lengths[ids] = end[ids] - starts[ids]
        room = (lengths + (align - 1)) // align * align
        if self.batch_invariant:
            _pack_whole(room, -(-self.chunk_tokens // ROW_ALIGN) * ROW_ALIGN, cu)
        else:
            room.cumsum(out=cu[1:])
        row = ContextRow(device_starts, device_lengths, device_cu)
        return ExtendLaunch(tiles.max_seqlen_q, tiles.num_tiles, tiles.tiles, row, int(cu[-1]))

    def _extend_all(self, plan: Plan) -> ExtendLaunch | None:
        """Extend and prefill requests together, for layers without new keys: the first one of a plan makes it, with an upload more."""
        if self._all_of is not plan:
            query, seq = plan.query_lens, plan.seq_lens
            ids = ((query > 0) & (plan.kinds != DECODE)).nonzero()[0]
            self._all_of, self._all = plan, None
            if len(ids):
                upload = self._begin_upload(plan.num_seqs, plan.num_tokens, False)
                self._all = self._extend_launch(upload, ids, query, seq - query, seq)
                upload.send()
        return self._all

    # -- run ------------------------------------------------------------------------------------------------------

    def run(
        self, plan: Plan, q: Tensor, k: Tensor | None, v: Tensor | None, k_cache: Tensor | None, v_cache: Tensor | None, *,
        out: Tensor | None = None, return_lse: bool = False, sinks: Tensor | None = None, k_descale: float | Tensor | None = None,
        v_descale: float | Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """One layer of a planned batch.

        Args:
            q: [T, Hq, D], the query tokens of the requests in the order of the plan; ``T`` may exceed their number (padding).
            k, v: [T, Hkv, D], [T, Hkv, Dv], the new tokens; both None for a layer that reads them from the cache.
            k_cache, v_cache: by ``kv_layout``, holding the context, for decode requests (and where k is None) the new tokens
                too. None will do where no request has context.
            out: [T, Hq, Dv]. Rows past the last request stay as they are in a given ``out`` and are 0 in a new one.
            sinks, k_descale, v_descale: of this layer, in place of the router's.

        Returns:
            out, with ``return_lse`` the pair ``(out, lse)``, lse [Hq, T] fp32, natural log.

        Raises:
            ValueError, TypeError: with every reason, before any launch.

        Of a decode-only batch, ``run`` can be captured in a graph, once it has run outside one: nothing of it waits for the
        device, scratch has its place by then, and what changes from step to step is in the buffer that `plan` fills.
        """
        from tritonattn.paths.replay import repeat

        fresh = self._knows(plan)
        reads = plan.max_seq_len if k is None else plan.max_cached_len
        told = 0 if plan.decode_only and self.block_size is not None else reads  # `plan` has seen then that the table holds them
        return repeat(
            self._repeats(plan), plan.key if plan.decode_only else (),
            (q, k, v, k_cache, v_cache, plan.block_table, out, return_lse, sinks, k_descale, v_descale, fresh, told),
            lambda: self._run(plan, q, k, v, k_cache, v_cache, out, return_lse, sinks, k_descale, v_descale, fresh, reads),
        )  # fmt: skip

    def _knows(self, plan: Plan) -> bool:
        """Made here, and what it put on the device is still there."""
        if type(plan) is not Plan:
            raise TypeError(f"{type(self).__name__}.run: plan must be one that `plan` gave, got {type(plan).__name__}")
        return plan.router is self and (not plan.decode_only or self._latest.get(plan.num_seqs) == plan.version)

    def _repeats(self, plan: Plan) -> dict:
        """Where runs like one of this plan are remembered: with the router, or until another plan comes if it is not of decodes alone."""
        if plan.decode_only:
            return self._decode_runs
        if self._runs_of is not plan:
            self._runs_of, self._runs = plan, {}
        return self._runs

    def _run(self, plan, q, k, v, k_cache, v_cache, out, return_lse, sinks, k_descale, v_descale, fresh, reads):
        from tritonattn.paths.decode import run_decode
        from tritonattn.paths.extend import run_extend
        from tritonattn.paths.prefill import run_prefill

        cache, params = check_run(
            self.paged, self.params, q, k, v, k_cache, v_cache, plan.block_table, kv_layout=self.kv_layout, device=self.device,
            block_size=self.block_size, num_tokens=plan.num_tokens, reads=reads, fresh=fresh, out=out, sinks=sinks,
            k_descale=k_descale, v_descale=v_descale,
        )  # fmt: skip
        own = [value for value in self.params if isinstance(value, Tensor)]
        keep(*plan.tensors, *own)
        out, lse = self._results(q, plan.num_tokens, out, return_lse)
        cu_seqlens_q, table = plan.device_cu_seqlens_q, plan.block_table
        extend = plan.extend if k is not None else self._extend_all(plan)
        if extend is not None and extend is not plan.extend:
            keep(*extend.tensors)
        if extend is not None and cache is not None and table is not None:
            run_extend(
                self.paged, params, q, k, v, cache, out, lse, cu_seqlens_q=cu_seqlens_q, context_lens=plan.device_context_lens,
                block_table=table, row=extend.row, row_length=extend.row_length, num_seqs=plan.num_seqs,
                max_seqlen_q=extend.max_seqlen_q, chunk_tokens=self.chunk_tokens, scratch=self.scratch, tiles=extend.tiles,
                num_tiles=extend.num_tiles,
            )  # fmt: skip
        prefill = plan.prefill
        if prefill is not None and k is not None and v is not None:
            run_prefill(
                self.dense, params.dense, q, k, v, out, lse,
                cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_q, num_seqs=plan.num_seqs, max_seqlen_q=prefill.max_seqlen_q,
                tiles=prefill.tiles, num_tiles=prefill.num_tiles,
            )  # fmt: skip
        decode = plan.decode
        if decode is not None and cache is not None and table is not None:
            run_decode(
                self.paged._replace(block_size=cache.block_size), params, q, cache, out, lse, cu_seqlens_q=cu_seqlens_q,
                seq_lens=plan.device_seq_lens, block_table=table, num_seqs=decode.num_seqs, max_seqlen_q=decode.max_seqlen_q,
                plan=decode.plan, scratch=self.scratch, work=decode.work,
            )  # fmt: skip
        return (out, lse) if lse is not None else out

    def _results(self, q: Tensor, num_tokens: int, out: Tensor | None, return_lse: bool) -> tuple[Tensor, Tensor | None]:
        """Room for the result; what belongs to no request is 0, its LSE -inf."""
        tokens, heads, _ = q.shape

        def new_out() -> Tensor:
            out = torch.empty(tokens, heads, width, dtype=dtype, device=device)
            out[num_tokens:].zero_()
            return out

        def new_lse() -> Tensor:
            lse = torch.empty(heads, tokens, dtype=torch.float32, device=device)
            lse[:, num_tokens:].fill_(float("-inf"))
            return lse

        width, dtype, device = self.dense.v_head_size, q.dtype, q.device
        return take(new_out) if out is None else out, take(new_lse) if return_lse else None


@cache
def _least_split(problem: AttnProblem, max_seqlen_q: int) -> int:
    """Keys that a split must have so that merging it (a float32 row out and in again per query row) costs little beside reading them."""
    merged = 2 * 4 * problem.v_head_size * problem.group * max_seqlen_q
    read = (problem.head_size + problem.v_head_size) * problem.kv_dtype.itemsize
    return -(-REDUCTION_SHARE * merged // read)


def _pack_whole(room: Ints, chunk: int, cu: Ints) -> None:
    """Offsets such that a request that fits in a chunk is not cut, and a longer one is cut at multiples of the chunk of its own."""
    at = 0
    for i, size in enumerate(room.tolist()):
        if at % chunk + size > chunk and at % chunk:
            at += chunk - at % chunk
        cu[i] = at
        at += size
    cu[-1] = at
