"""Who sees whom: the loop bounds of a block of query rows, and the element mask of one tile, side by side.

    keys      0 .......................... k_len
    queries            0 ..... q_len             query row i stands at key index  diag + i
    row i sees         diag + i - left  <=  key  <=  diag + i + right,   0 <= key < k_len

Bottom-right alignment is diag = k_len - q_len; causal is right = 0. An unlimited side is a number (`plan.UNLIMITED`) large
enough to take part in the arithmetic without a branch.
"""

import triton
import triton.language as tl


@triton.jit
def visible(row_first, row_last, diag, k_len, left, right):
    """[lo, hi): the keys that any of the rows row_first..row_last sees."""
    lo = tl.maximum(row_first + diag - left, 0)
    hi = tl.minimum(tl.maximum(row_last + diag + right + 1, 0), k_len)
    return lo, hi


@triton.jit
def split_loops(row_first, row_last, diag, k_len, left, right, lo, hi, BLOCK_N: tl.constexpr):
    """(begin, inner_begin, inner_end): tiles [inner_begin, inner_end) need no mask; [begin, inner_begin) and [inner_end, hi) do.

    All three are multiples of BLOCK_N; lo, hi come from `visible`. Without an unmasked tile, inner_begin = inner_end >= hi.
    """
    begin = lo // BLOCK_N * BLOCK_N
    all_from = tl.maximum(row_last + diag - left, 0)
    all_to = tl.minimum(tl.maximum(row_first + diag + right + 1, 0), k_len)
    inner_begin = tl.cdiv(all_from, BLOCK_N) * BLOCK_N
    inner_end = all_to // BLOCK_N * BLOCK_N
    none = inner_end <= inner_begin
    end = tl.cdiv(tl.maximum(hi, begin), BLOCK_N) * BLOCK_N
    return begin, tl.where(none, end, inner_begin), tl.where(none, end, inner_end)


@triton.jit
def row_limits(rows, diag, k_len, left, right):
    """Per row: the first key it sees and the one after the last."""
    return tl.maximum(rows + diag - left, 0), tl.minimum(rows + diag + right + 1, k_len)


@triton.jit
def tile_mask(keys, row_lo, row_hi, WINDOW_LEFT: tl.constexpr):
    """True where a row sees a key; the arguments broadcast. WINDOW_LEFT = False promises row_lo = 0."""
    if WINDOW_LEFT:
        return (keys < row_hi) & (keys >= row_lo)
    else:
        return keys < row_hi


@triton.jit
def split_bounds(lo, hi, split, splits, BLOCK_N: tl.constexpr):
    """The `split`-th of `splits` near-equal runs of whole tiles that cover the keys [lo, hi)."""
    first = lo // BLOCK_N
    tiles = tl.cdiv(hi, BLOCK_N) - first
    begin = (first + (tiles.to(tl.int64) * split // splits).to(tl.int32)) * BLOCK_N
    end = (first + (tiles.to(tl.int64) * (split + 1) // splits).to(tl.int32)) * BLOCK_N
    return begin, tl.minimum(end, hi)
