"""From a program to its sequence, its block of query rows and their lengths."""

import triton
import triton.language as tl


@triton.jit
def program_order(pid, num_tiles, NUM_HEADS: tl.constexpr, NUM_XCDS: tl.constexpr):
    """(tile, head) of a program: all heads of a tile run together and share K and V through the L2; the last tile comes first.

    Under causal masking the last tiles are the heavy ones, and starting them first shortens the tail. CDNA hands consecutive
    programs to its XCDs in turn, each with an L2 of its own: neighbouring heads, which share a KV head, are kept on one XCD
    (arXiv:2511.02132). NUM_XCDS divides NUM_HEADS.
    """
    per_xcd: tl.constexpr = NUM_HEADS // NUM_XCDS
    slot = pid % NUM_HEADS
    head = slot % NUM_XCDS * per_xcd + slot // NUM_XCDS
    return num_tiles - 1 - pid // NUM_HEADS, head


@triton.jit
def find_sequence(cu, position, count):
    """The sequence i with cu[i] <= position < cu[i + 1], empty sequences skipped; `count` where position >= cu[count].

    `position` is a scalar or a block.
    """
    lo = position * 0
    hi = lo + count
    steps = 0
    while (count >> steps) > 0:
        steps += 1
        middle = (lo + hi) // 2
        open_ = lo < hi
        after = tl.load(cu + middle + 1, mask=open_, other=0) <= position
        lo = tl.where(open_ & after, middle + 1, lo)
        hi = tl.where(open_ & (after == 0), middle, hi)
    return lo


@triton.jit
def find_tile(tile, cu_seqlens_q, num_seqs, num_tokens, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr = 64):
    """(sequence, first row in it) of tile 0 .. num_tokens // BLOCK_M + num_seqs, without knowing the lengths on the host.

    Sequence i starts at tile cu_seqlens_q[i] // BLOCK_M + i, which leaves room for its partial block. Tokens past the last
    sequence count as sequence `num_seqs`. The first row may lie past the end of the sequence: then the tile is empty.

    BLOCK starts are looked at together: a binary search would pay the latency of memory at every step. 64 of them make one lane each of a
    CDNA wave, whose sums are scalars to the compiler; those of 128 pass through LDS, and all addresses that follow take vector registers.
    """
    index = tl.arange(0, BLOCK)
    after = 0  # sequences that start at or before the tile; the first always does
    start = 0
    base = 0
    while base <= num_seqs:
        starts = tl.load(cu_seqlens_q + base + index, mask=base + index <= num_seqs, other=0) // BLOCK_M + base + index
        before = (starts <= tile) & (base + index <= num_seqs)
        after += tl.sum(before.to(tl.int32), 0)
        start = tl.maximum(start, tl.max(tl.where(before, starts, 0), 0))
        base = tl.where(after == base + BLOCK, base + BLOCK, num_seqs + 1)
    return after - 1, (tile - start) * BLOCK_M


@triton.jit
def decode_item(work, num_splits):
    """(sequence, split, of how many, place of its part) of a decode program on the grid (.., splits or items, sequences or 1).

    work [items, 3] int32: sequence, split, splits; splits = 0 where there is nothing to do. None: each sequence has num_splits.
    """
    if work is None:
        split = tl.program_id(1)
        seq = tl.program_id(2)
        return seq, split, num_splits, seq * num_splits + split
    else:
        place = tl.program_id(1)
        return tl.load(work + 3 * place), tl.load(work + 3 * place + 1), tl.load(work + 3 * place + 2), place


@triton.jit
def query_span(cu_seqlens_q, seq, max_seqlen_q):
    """(first token, number of tokens) of a decode sequence's queries; cu_seqlens_q None: sequence i has the i-th max_seqlen_q tokens.

    No more than max_seqlen_q: partial results have room for that many.
    """
    if cu_seqlens_q is None:
        return seq * max_seqlen_q, max_seqlen_q
    else:
        start = tl.load(cu_seqlens_q + seq)
        return start, tl.minimum(tl.load(cu_seqlens_q + seq + 1) - start, max_seqlen_q)
