"""Mixed batches: which request takes which path, planned once per step on the host and run once per layer.

The plan reads nothing back from the device and sends it one small buffer. Every kernel finds its sequences through that
buffer, so requests may arrive in any order and no token is moved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tritonattn.batch import DECODE, ONE, ZERO, Buffer, DecodeLaunch, ExtendLaunch, Ints, Mix, Plan, Sent, TileLaunch, Upload, starts
from tritonattn.checks import check_plan, check_router, check_run
from tritonattn.plan import (
    MAX_SPLITS,
    ROW_ALIGN,
    ContextRow,
    DecodeWork,
    decode_plan,
    fewer_parts,
    most_work,
    part_counts,
    prefill_row,
    split_length,
    split_rule,
)  # fmt: skip
from tritonattn.problem import AttnProblem
from tritonattn.scratch import Arena, keep, take
from tritonattn.tuning.arch import detect

ASSUMED_BLOCK_SIZE = 16  # for looking up tuning rows where the router was not told the block size


class Router:
    """Runs prefill, extend and decode requests of one batch, each on its own path.

    Args:
        num_q_heads, num_kv_heads, head_size, v_head_size: of the layers that use it (``v_head_size`` defaults to ``head_size``).
        dtype: of queries, new keys and values, and of the result.
        device: where everything lives.
        kv_layout, kv_dtype: of the cache; ``kv_dtype`` defaults to ``dtype``.
        decode_threshold: most query tokens of a request that is decoded (1 + speculated tokens).
        chunk_tokens: keys gathered at a time for extend requests; bounds the scratch.
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
        kv_dtype = dtype if kv_dtype is None else kv_dtype
        self.device, self.params = check_router(
            num_q_heads, num_kv_heads, head_size, v_head_size, dtype, device, kv_layout, kv_dtype, decode_threshold,
            chunk_tokens, batch_invariant, block_size, softmax_scale, causal, window_size, softcap, alibi_slopes, sinks, k_descale, v_descale,
        )  # fmt: skip
        v_head_size = head_size if v_head_size is None else v_head_size
        num_q_heads, num_kv_heads, head_size, v_head_size = map(int, (num_q_heads, num_kv_heads, head_size, v_head_size))
        self.kv_layout = kv_layout
        self.block_size = None if block_size is None else int(block_size)
        self.decode_threshold, self.chunk_tokens = int(decode_threshold), int(chunk_tokens)
        self.batch_invariant = batch_invariant
        self.paged = AttnProblem(
            num_q_heads, num_kv_heads, head_size, v_head_size, dtype, kv_dtype,
            "preshuffled" if kv_layout == "preshuffled" else "plain", self.block_size or ASSUMED_BLOCK_SIZE, causal,
            self.params.window_size != (-1, -1), self.params.softcap > 0, alibi_slopes is not None, sinks is not None,
        )  # fmt: skip
        self.dense = self.paged._replace(kv_dtype=dtype, kv_layout="dense", block_size=0)
        self.extended = self.paged  # what extend requests are attended as: here as cached, after the projection in MLA
        self.row_align, self.new_in_row = ROW_ALIGN, True
        self._start()

    def _start(self) -> None:
        """What every kind of router has beside its problem."""
        self.scratch = Arena(self.device)
        self._arch = detect(self.device)
        self._row_align = np.array(self.row_align, np.int32)
        self._mix = Mix(np.zeros(0, np.int32), np.zeros(0, np.bool_), np.array(self.decode_threshold, np.int32))
        self._fixed: dict[tuple[int, ...], Buffer] = {}
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
            RuntimeError: while a graph is captured.
        """
        query, seq, context, max_seq_len = check_plan(
            query_lens, seq_lens, block_table, self.device, self.block_size, self.decode_threshold
        )
        batch = len(query)
        mix = self._mix = self._mix.of(query, context == ZERO)
        upload = Upload()
        at_cu, at_seq, at_context = upload.put(mix.cu_seqlens_q), upload.put(seq), upload.put(context)
        decode = extend = prefill = None
        max_cached_len = max_seq_len
        if mix.decode_only:
            if batch:
                decode = self._decode_part(upload, None, query, seq, block_table)
        else:
            cached = context + mix.decode_lens
            max_cached_len = int(cached.item(cached.argmax()))
            if len(mix.decoded):
                decode = self._decode_part(upload, mix.decoded, query, seq, block_table)
            if len(mix.extended):
                extend = self._extend_part(upload, mix.extended, query, context, seq if self.new_in_row else context)
            if len(mix.prefilled):
                prefill = self._tile_part(upload, self.dense, mix.prefilled, query, context)
        sent = self._send(upload, batch, mix.decode_only)
        return Plan(
            num_seqs=batch, num_tokens=mix.num_tokens, query_lens=query, seq_lens=seq, device_cu_seqlens_q=sent[at_cu],
            device_seq_lens=sent[at_seq], device_context_lens=sent[at_context], block_table=block_table,
            decode=decode and decode(sent), extend=extend and extend(sent), prefill=prefill and prefill(sent),
            max_cached_len=max_cached_len, max_seq_len=max_seq_len, version=self._version, router=self,
        )  # fmt: skip

    def _send(self, upload: Upload, batch: int, decode_only: bool) -> Sent:
        """The plans of decodes alone take turns in buffers that stay."""
        sent = upload.send(self.device, self._fixed if decode_only else None)
        self._version += 1
        if decode_only:
            self._latest[batch] = self._version
        return sent

    def _decode_part(
        self, upload: Upload, ids: NDArray[np.int64] | None, query: Ints, seq: Ints, block_table: Tensor | None
    ) -> Callable[[Sent], DecodeLaunch]:
        """Cut the keys into parts of about equal length over the whole batch, as many as fill the device; longest requests first.

        ids: None for all requests, padding in its place: then every size that a graph records is one that all batches of this many
        requests share; the lists are filled up with items that do nothing. ``batch_invariant``: as if each request were alone.
        """
        problem, left, fixed = self.paged, self.params.window_size[0], ids is None
        keys, queries = (seq, query) if ids is None else (seq[ids], query[ids])
        if left >= 0:
            keys = np.minimum(keys, left + queries)
        order = (-keys).argsort(kind="stable")
        ids, keys = order if ids is None else ids[order], keys[order]
        count = len(ids)
        max_q = self.decode_threshold
        if max_q > 1 and not (fixed or self.batch_invariant):
            max_q = int(queries.item(queries.argmax()))
        if self.batch_invariant:
            plan = decode_plan(self._arch, problem, 1, max_q, self.chunk_tokens)
        else:
            longest = block_table.shape[1] * problem.block_size if fixed and block_table is not None else int(keys.item(0))
            plan = decode_plan(self._arch, problem, count, max_q, longest)
        parts, least = split_rule(self._arch, problem, plan, max_q, 1 if self.batch_invariant else count)
        if self.batch_invariant:
            cut = _cut(keys, np.maximum(-(-keys // parts), least))
        else:
            longest = keys.item(0)
            length = split_length(int(np.add.reduce(keys, 0, np.int64)), longest, parts, MAX_SPLITS, least)
            cut = _cut(keys, length) if 2 * longest >= 3 * length else keys[:0]
            if len(cut) == count and int(np.add.reduce(cut)) > parts:
                cut = fewer_parts(keys, length)
        most = most_cut = most_parts = 0
        if fixed:
            most, most_cut, most_parts = (count * parts, count, 0) if self.batch_invariant else most_work(count, parts)
        items, merges = _items(ids, cut, most, most_cut)
        num_items, num_merges = len(items), len(merges)
        at_items, at_merges = upload.put(items.reshape(-1)), upload.put(merges.reshape(-1))
        num_parts = most_parts or num_items
        return lambda sent: DecodeLaunch(plan, count, max_q, cut, DecodeWork(sent[at_items], num_items, sent[at_merges], num_merges, num_parts))

    def _tile_part(
        self, upload: Upload, problem: AttnProblem, ids: NDArray[np.int64], query: Ints, context: Ints
    ) -> Callable[[Sent], TileLaunch]:
        queries = query[ids]
        longest = int(queries.item(queries.argmax()))
        max_q = self.chunk_tokens if self.batch_invariant else longest
        block_m = prefill_row(self._arch, problem, max_q).config["BLOCK_M"]
        if len(ids) == 1:
            tiles = _tiles_of_one(int(ids.item(0)), longest, block_m)
        else:
            tiles = _tiles(ids, queries, block_m)
            tiles = tiles[(tiles[:, 1] + context[tiles[:, 0]]).argsort(kind="stable")]
        num_tiles, at = len(tiles), upload.put(tiles.reshape(-1))
        return lambda sent: TileLaunch(max_q, num_tiles, sent[at])

    def _extend_part(
        self, upload: Upload, ids: NDArray[np.int64], query: Ints, context: Ints, end: Ints
    ) -> Callable[[Sent], ExtendLaunch]:
        """Requests whose keys form a row, from the first that a query sees up to ``end``."""
        tiles = self._tile_part(upload, self.extended, ids, query, context)
        start_align = self.paged.start_align
        left = self.params.window_size[0]
        first, lengths = np.zeros(len(context), np.int32), np.zeros(len(context), np.int32)
        if left >= 0:
            first = np.maximum(context - left, 0) // start_align * start_align
        lengths[ids] = end[ids] - first[ids]
        room = -(-lengths // self._row_align) * self._row_align
        cu = _pack_whole(room, -(-self.chunk_tokens // ROW_ALIGN) * ROW_ALIGN) if self.batch_invariant else starts(room)
        row_length = int(cu.item(-1))
        at_row = upload.put(first), upload.put(lengths), upload.put(cu)

        def launch(sent: Sent) -> ExtendLaunch:
            return ExtendLaunch(**vars(tiles(sent)), row=ContextRow(*(sent[at] for at in at_row)), row_length=row_length)

        return launch

    def _extend_all(self, plan: Plan) -> ExtendLaunch | None:
        """Extend and prefill requests together, for layers without new keys: the first one of a plan makes it, with an upload more."""
        if self._all_of is not plan:
            query, seq = plan.query_lens, plan.seq_lens
            ids = ((query > 0) & (plan.kinds != DECODE)).nonzero()[0]
            self._all_of, self._all = plan, None
            if len(ids):
                upload = Upload()
                launch = self._extend_part(upload, ids, query, seq - query, seq)
                self._all = launch(self._send(upload, plan.num_seqs, False))
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
            RuntimeError: while a graph is captured, at a kernel that was never run before.

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
        """What it put on the device is still there. What was not made here is refused by itself: nothing else follows from it."""
        if type(plan) is not Plan:
            raise TypeError(f"{type(self).__name__}.run: plan must be one that `plan` gave, got {type(plan).__name__}")
        if plan.router is not self:
            raise ValueError(f"{type(self).__name__}.run: plan must be one that this router made, got one of another router")
        return not plan.decode_only or self._latest.get(plan.num_seqs) == plan.version

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


def _tiles(ids: NDArray[np.integer], queries: Ints, block_m: int) -> Ints:
    """[n, 2] sequence, first row, in order."""
    blocks = -(-queries // block_m)
    tiles = np.empty((len(ids), 2), np.int32)
    tiles[:, 0], tiles[:, 1] = ids, starts(blocks)[:-1]
    tiles = tiles.repeat(blocks, 0)
    tiles[:, 1] = (np.arange(len(tiles), dtype=np.int32) - tiles[:, 1]) * block_m
    return tiles


@lru_cache(maxsize=256)
def _tiles_of_one(request: int, num_queries: int, block_m: int) -> Ints:
    """As a server has them that takes prompts one by one, in pieces of one size."""
    return _tiles(np.array([request]), np.array([num_queries], np.int32), block_m)


def _cut(keys: Ints, length: int | Ints) -> Ints:
    """`part_counts`, where that is more than one: those of the first, being the longest."""
    parts = part_counts(keys, length)
    return parts[: np.count_nonzero(parts > ONE)]


def _items(ids: NDArray[np.integer], cut: Ints, most: int, most_cut: int) -> tuple[Ints, Ints]:
    """The lists of `DecodeWork`, at least so long: the first requests are cut into so many parts each, the others are whole."""
    num_cut, num_whole = len(cut), len(ids) - len(cut)
    num_parts = int(np.add.reduce(cut)) if num_cut else 0
    items, merges = np.zeros((max(most, num_parts + num_whole), 3), np.int32), np.zeros((max(most_cut, num_cut), 3), np.int32)
    if num_cut:
        merges[:num_cut, 0], merges[:num_cut, 1], merges[:num_cut, 2] = ids[:num_cut], starts(cut)[:-1], cut
        parts = merges[:num_cut].repeat(cut, 0)
        items[:num_parts] = parts
        items[:num_parts, 1] = np.arange(num_parts) - parts[:, 1]
    whole = items[num_parts : num_parts + num_whole]
    whole[:, 0], whole[:, 2] = ids[num_cut:], ONE
    return items, merges


def _pack_whole(room: Ints, chunk: int) -> Ints:
    """Offsets such that a request that fits in a chunk is not cut, and a longer one is cut at multiples of the chunk of its own."""
    at, cu = 0, np.zeros(len(room) + 1, np.int32)
    for i, size in enumerate(room.tolist()):
        if at % chunk + size > chunk and at % chunk:
            at += chunk - at % chunk
        cu[i] = at
        at += size
    cu[-1] = at
    return cu
