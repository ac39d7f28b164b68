"""Cutting a decode batch on the device, from lengths that the host does not know: the lists of `DecodeWork`, by the rule of `plan`.

The room of the lists follows from what the host knows; what is left over is filled up with nothing to do. So the launches that follow are
always the same, in a graph too, and whatever the lengths are, no list leaves its room.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from tritonattn import plan
from tritonattn.paths import launch
from tritonattn.plan import MAX_SPLITS, Cut, DecodeWork
from tritonattn.scratch import Scratch

_jit = (lambda rule: rule) if knobs.runtime.interpret else triton.jit  # the interpreter takes plain functions as they are, and no others of that module
split_length, part_counts, fewer_parts = map(_jit, (plan.split_length, plan.part_counts, plan.fewer_parts))


@triton.jit
def keys_of(seq_lens, cu_seqlens_q, seq, num_seqs, max_seqlen_q, max_keys, window_left):
    """How many keys some query of each sequence sees; none where there is no query, or no such sequence."""
    ok = seq < num_seqs
    keys = tl.load(seq_lens + seq, mask=ok, other=0)
    queries = max_seqlen_q
    if cu_seqlens_q is not None:
        queries = tl.load(cu_seqlens_q + seq + 1, mask=ok, other=0) - tl.load(cu_seqlens_q + seq, mask=ok, other=0)
        keys = tl.where(queries > 0, keys, 0)
    return tl.minimum(tl.maximum(tl.minimum(keys, window_left + queries), 0), max_keys)


@triton.jit
def order_of(keys, seq):
    """A number that is larger for more keys, and for a smaller sequence of as many: what is no sequence comes last."""
    return (keys.to(tl.int64) << 32) + (0x7FFFFFFF - seq)


@triton.jit
def parts_of(keys, ok, length, crowded):
    parts = tl.maximum(tl.where(crowded, fewer_parts(keys, length), part_counts(keys, length)), 1)
    return tl.where(ok, parts, 0)


@triton.jit
def store_entries(entries, place, a, b, c, ok):
    tl.store(entries + 3 * place, a, mask=ok)
    tl.store(entries + 3 * place + 1, b, mask=ok)
    tl.store(entries + 3 * place + 2, c, mask=ok)


@launch.kernel(never=("least",))
def cut(
    # outputs, see `plan.DecodeWork`
    work, merges,
    # metadata, int32
    seq_lens, cu_seqlens_q,
    # scalars
    num_seqs, num_items, num_merges, num_parts, max_splits, least, max_seqlen_q, max_keys, window_left,
    # tile
    BLOCK_B: tl.constexpr, OTHERS: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """A program finds the places of BLOCK_B sequences among all, longest first: before each are those with more keys, or as many and a
    smaller number. All that concerns the whole batch each program works out for itself, OTHERS sequences at a time.
    """
    each = tl.arange(0, OTHERS)
    total = tl.zeros([OTHERS], tl.int64)
    longest = tl.zeros([OTHERS], tl.int32)
    shortest = longest + max_keys
    for base in tl.range(0, num_seqs, OTHERS):
        other = base + each
        keys = keys_of(seq_lens, cu_seqlens_q, other, num_seqs, max_seqlen_q, max_keys, window_left)
        total += keys
        longest = tl.maximum(longest, keys)
        shortest = tl.where(other < num_seqs, tl.minimum(shortest, keys), shortest)
    most = tl.max(longest, 0)
    length = split_length(tl.sum(total, 0), most.to(tl.int64), num_parts, max_splits, least)
    length = tl.minimum(length, tl.maximum(most, least)).to(tl.int32)  # beyond that nothing is cut either
    made = 0
    if part_counts(tl.min(shortest, 0), length) > 1:
        parts = tl.zeros([OTHERS], tl.int32)
        for base in tl.range(0, num_seqs, OTHERS):
            other = base + each
            keys = keys_of(seq_lens, cu_seqlens_q, other, num_seqs, max_seqlen_q, max_keys, window_left)
            parts += parts_of(keys, other < num_seqs, length, False)
        made = tl.sum(parts, 0)
    crowded = made > num_parts

    own = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    own_keys = keys_of(seq_lens, cu_seqlens_q, own, num_seqs, max_seqlen_q, max_keys, window_left)
    own_parts = parts_of(own_keys, own < num_seqs, length, crowded)
    own_order = order_of(own_keys, own)
    rank = tl.zeros([BLOCK_B], tl.int32)
    first = rank
    items = tl.zeros([OTHERS], tl.int32)
    several = items
    for base in tl.range(0, num_seqs, OTHERS):
        other = base + each
        keys = keys_of(seq_lens, cu_seqlens_q, other, num_seqs, max_seqlen_q, max_keys, window_left)
        parts = parts_of(keys, other < num_seqs, length, crowded)
        items += parts
        several += (parts > 1).to(tl.int32)
        before = order_of(keys, other)[None, :] > own_order[:, None]
        rank += tl.sum(before.to(tl.int32), 1)
        first += tl.sum(tl.where(before, parts[None, :], 0), 1)

    for base in tl.range(0, tl.max(own_parts, 0), BLOCK_S):
        split = base + tl.arange(0, BLOCK_S)[None, :]
        place = first[:, None] + split
        store_entries(work, place, own[:, None], split, own_parts[:, None], (split < own_parts[:, None]) & (place < num_items))
    store_entries(merges, rank, own, first, own_parts, (own_parts > 1) & (rank < num_merges))
    step = tl.cdiv(num_seqs, BLOCK_B) * OTHERS
    for base in tl.range(3 * tl.sum(items, 0) + tl.program_id(0) * OTHERS, 3 * num_items, step):
        tl.store(work + base + each, 0, mask=base + each < 3 * num_items)
    for base in tl.range(3 * tl.sum(several, 0) + tl.program_id(0) * OTHERS, 3 * num_merges, step):
        tl.store(merges + base + each, 0, mask=base + each < 3 * num_merges)


def run_cut(
    rule: Cut, seq_lens: Tensor, cu_seqlens_q: Tensor | None, *, num_seqs: int, max_seqlen_q: int, window_left: int, scratch: Scratch
) -> DecodeWork:
    """window_left: as `plan.window` gives it."""
    num_items, num_merges, num_parts = plan.most_work(num_seqs, rule.parts)
    lists = scratch.take("work", 3 * (num_items + num_merges), torch.int32)
    work = DecodeWork(lists[: 3 * num_items], num_items, lists[3 * num_items :], num_merges, num_parts)
    row = rule.row
    with launch.on(seq_lens):
        launch.run(
            cut, (-(-num_seqs // row.constexprs["BLOCK_B"]),),
            (
                work.items, work.merges, seq_lens, cu_seqlens_q,
                num_seqs, num_items, num_merges, rule.parts, MAX_SPLITS, rule.least, max_seqlen_q, rule.max_keys, window_left,
            ),
            {}, row.constexprs, row,
        )  # fmt: skip
    return work
