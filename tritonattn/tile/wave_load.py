"""K and V loaded in the very order in which a CDNA matrix instruction wants them.

A wave (64 lanes) reads its operand of a 16 x 16 matrix instruction as 16 lanes (token of K, column of V) times 4 lane groups (a run of head
elements of K, a run of tokens of V). A load whose pointer tensor has those lanes as dimensions needs no exchange through LDS. Triton lays a
tensor over lanes by the order of its dimensions, and which order wins on equal contiguity differs between Triton builds: `ORD` mirrors
every dimension but the last, and the launcher keeps the order whose compiled loop is free of LDS traffic.

Softmax does not care about the order of tokens, so K rows are taken in the order that makes each lane's run of V tokens its operand:
logical position p of a wave's tile holds token `wave_tokens(...)[p]`, for the scores, the mask and V alike.

No load is masked, which would cut it up or put a branch around it: what must not be read is replaced by an address that may be. Table
entries outside the sequence give way to block 0, columns past the head to column 0 (by multiplication: the compiler then still sees their
alignment). What such a load brings is dropped later: K in the mask of the scores or by a zero of q, V of dead tokens by value (they may
hold NaN, and 0 * NaN is NaN), V columns by never being stored.
"""

import triton
import triton.language as tl


@triton.jit
def on_axis(v, AXIS: tl.constexpr, RANK: tl.constexpr):
    """The vector `v` as a tensor of rank RANK that varies along AXIS alone."""
    for i in tl.static_range(RANK):
        if i != AXIS:
            v = tl.expand_dims(v, i)
    return v


@triton.jit
def wave_tokens(TOKENS: tl.constexpr, X: tl.constexpr, PRESHUFFLED: tl.constexpr):
    """[TOKENS] token of each logical position of a wave's tile."""
    p = tl.arange(0, TOKENS)
    if PRESHUFFLED:
        HI: tl.constexpr = X // 4
        return p // (16 * HI) * (4 * X) + p // 16 % HI * 4 + p % 16 // 4 * X + p % 4
    else:
        return p // 16 * 16 + p % 4 * 4 + p % 16 // 4


@triton.jit
def page_of(n0, t, BLOCK_SIZE: tl.constexpr, STEP: tl.constexpr):
    """Table index and slot of tokens `n0 + t`; n0 is a multiple of STEP, t lies in [0, STEP)."""
    if STEP % BLOCK_SIZE == 0:
        return n0 // BLOCK_SIZE + t // BLOCK_SIZE, t % BLOCK_SIZE
    else:
        n = n0 + t
        return n // BLOCK_SIZE, n % BLOCK_SIZE


@triton.jit
def page_offset(table, page, lo, hi, stride_block, BLOCK_SIZE: tl.constexpr, VEC: tl.constexpr, MASKED: tl.constexpr):
    """int64 offset of table entry `page`; where no token of the page is in [lo, hi) the entry is not read, and block 0 stands in."""
    if MASKED:
        wanted = (page >= lo // BLOCK_SIZE) & (page <= (hi - 1) // BLOCK_SIZE)
        block = tl.load(table + page, mask=wanted, other=0)
    else:
        block = tl.load(table + page)
    return block.to(tl.uint32).to(tl.int64) * stride_block.to(tl.int64) * VEC  # unsigned: half the multiplications


@triton.jit
def keep(tile, n, lo, hi):
    """`tile` where lo <= n < hi, else zeros."""
    if tile.dtype.primitive_bitwidth == 8:
        # By bits: as conditions, the 16 tokens of a lane would hold 16 pairs of scalar registers at once.
        mask = (((n - lo) | (hi - 1 - n)) >> 31) ^ -1
        return (tile.to(tl.int8, bitcast=True) & mask.to(tl.int8)).to(tile.dtype, bitcast=True)
    else:
        return tl.where((n >= lo) & (n < hi), tile, 0.0)


@triton.jit
def load_k_preshuffled(
    k, table, n0, lo, hi, stride_block,
    D_START: tl.constexpr, D_END: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, VEC: tl.constexpr, X: tl.constexpr, WAVES: tl.constexpr, TOKENS: tl.constexpr, ORD: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """[WAVES, TOKENS, WIDTH] of columns D_START .. of a cache [blocks, heads, D/x, bs, x]; `k` points at the head."""
    T16: tl.constexpr = 4 * ORD
    GL: tl.constexpr = 1 + 2 * ORD
    TB: tl.constexpr = 3 - 2 * ORD
    GH: tl.constexpr = 4 - 4 * ORD
    HI: tl.constexpr = X // 4
    t16 = on_axis(tl.arange(0, 16), T16, 6)
    tb = on_axis(tl.arange(0, TOKENS // 16), TB, 6)
    w = on_axis(tl.arange(0, WAVES), 2, 6)
    chunk = on_axis(tl.arange(0, 4), GL, 6) + on_axis(tl.arange(0, WIDTH // X // 4), GH, 6) * 4 + D_START // X
    if D_START + WIDTH > D_END:
        chunk = chunk * (chunk < D_END // X)
    run = t16 // 4 * X + w * TOKENS  # start of the X tokens that share a page
    if TOKENS > 4 * X:
        run += tb // HI * (4 * X)
    page, slot = page_of(n0, run, BLOCK_SIZE, WAVES * TOKENS)
    block = page_offset(table, page, lo, hi, stride_block, BLOCK_SIZE, VEC, MASKED)
    offset = block + (slot + t16 % 4 + tb % HI * 4) * X
    ptr = k + offset + chunk * (BLOCK_SIZE * X) + on_axis(tl.arange(0, X), 5, 6)
    return tl.load(ptr).permute(2, TB, T16, GH, GL, 5).reshape(WAVES, TOKENS, WIDTH)


@triton.jit
def load_v_preshuffled(
    v, table, n0, lo, hi, stride_block, DV: tl.constexpr,
    D_START: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, VEC: tl.constexpr, X: tl.constexpr, WAVES: tl.constexpr, TOKENS: tl.constexpr, ORD: tl.constexpr,
    RUN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """[WAVES, TOKENS, WIDTH] of columns D_START .. of a cache [blocks, heads, bs/x, DV, x]; MASKED: tokens outside [lo, hi) are 0."""
    DL: tl.constexpr = 4 * ORD
    GQ: tl.constexpr = 1 + 2 * ORD
    DH: tl.constexpr = 3 - 2 * ORD
    TG: tl.constexpr = 4 - 4 * ORD
    col = on_axis(tl.arange(0, 16), DL, 6) + on_axis(tl.arange(0, WIDTH // 16), DH, 6) * 16 + D_START
    if D_START + WIDTH > DV:
        col = col * (col < DV)
    x = on_axis(tl.arange(0, X), 5, 6)
    run = on_axis(tl.arange(0, 4), GQ, 6) * X + on_axis(tl.arange(0, TOKENS // (4 * X)), TG, 6) * (4 * X) + on_axis(tl.arange(0, WAVES), 2, 6) * TOKENS
    page, slot = page_of(n0, run, BLOCK_SIZE, WAVES * TOKENS)
    block = page_offset(table, page, lo, hi, stride_block, BLOCK_SIZE, VEC, MASKED)
    tile = tl.load(v + (block + slot * DV) + col * X + x)
    if MASKED:
        n = n0 + run + x
        tile = keep(tile, n, lo, hi)
    if ORD == 0:
        tile = tile.reshape(16, 4, WAVES, WIDTH // 16, TOKENS // (4 * X), X // RUN, RUN).permute(2, 4, 5, 1, 6, 3, 0)
    else:
        tile = tile.reshape(TOKENS // (4 * X), WIDTH // 16, WAVES, 4, 16, X // RUN, RUN).permute(2, 0, 5, 3, 6, 1, 4)
    return tile.reshape(WAVES, TOKENS, WIDTH)


@triton.jit
def load_k_plain(
    k, table, n0, lo, hi, stride_block, stride_token,
    D_START: tl.constexpr, D_END: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, VEC: tl.constexpr, X: tl.constexpr, WAVES: tl.constexpr, TOKENS: tl.constexpr, ORD: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """[WAVES, TOKENS, WIDTH] of columns D_START .. of rows k[block, token] with a unit last stride."""
    T16: tl.constexpr = 4 * ORD
    GL: tl.constexpr = 1 + 2 * ORD
    TB: tl.constexpr = 3 - 2 * ORD
    GH: tl.constexpr = 4 - 4 * ORD
    t16 = on_axis(tl.arange(0, 16), T16, 6)
    group = on_axis(tl.arange(0, TOKENS // 16), TB, 6) * 16 + on_axis(tl.arange(0, WAVES), 2, 6) * TOKENS
    within = t16 % 4 * 4 + t16 // 4
    if BLOCK_SIZE % 16 == 0:  # 16 tokens share a page
        page, slot = page_of(n0, group, BLOCK_SIZE, WAVES * TOKENS)
        slot += within
    else:
        page, slot = page_of(n0, group + within, BLOCK_SIZE, WAVES * TOKENS)
    block = page_offset(table, page, lo, hi, stride_block, BLOCK_SIZE, VEC, MASKED)
    col = on_axis(tl.arange(0, 4), GL, 6) * X + on_axis(tl.arange(0, WIDTH // X // 4), GH, 6) * (4 * X) + D_START
    if D_START + WIDTH > D_END:
        col = col * (col < D_END)
    ptr = k + (block + slot * stride_token * VEC) + col + on_axis(tl.arange(0, X), 5, 6)
    return tl.load(ptr).permute(2, TB, T16, GH, GL, 5).reshape(WAVES, TOKENS, WIDTH)


@triton.jit
def load_v_plain(
    v, table, n0, lo, hi, stride_block, stride_token, DV: tl.constexpr,
    D_START: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, VEC: tl.constexpr, X: tl.constexpr, WAVES: tl.constexpr, TOKENS: tl.constexpr, ORD: tl.constexpr,
    RUN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """[WAVES, TOKENS, WIDTH] of columns D_START .. in the order of `column_of`; MASKED: tokens outside [lo, hi) are 0.

    A lane reads 16 bytes of a row, and the tile is transposed in registers.
    """
    C16: tl.constexpr = 4 * ORD
    GQ: tl.constexpr = 1 + 2 * ORD
    R: tl.constexpr = 3 - 2 * ORD
    J: tl.constexpr = 4 - 4 * ORD
    VX: tl.constexpr = X if WIDTH >= 16 * X else WIDTH // 16
    r = on_axis(tl.arange(0, TOKENS // 4), R, 6)
    group = r // 4 * 16 + on_axis(tl.arange(0, WAVES), 2, 6) * TOKENS
    within = r % 4 * 4 + on_axis(tl.arange(0, 4), GQ, 6)
    if BLOCK_SIZE % 16 == 0:
        page, slot = page_of(n0, group, BLOCK_SIZE, WAVES * TOKENS)
        slot += within
    else:
        page, slot = page_of(n0, group + within, BLOCK_SIZE, WAVES * TOKENS)
    block = page_offset(table, page, lo, hi, stride_block, BLOCK_SIZE, VEC, MASKED)
    col = on_axis(tl.arange(0, 16), C16, 6) * VX + on_axis(tl.arange(0, WIDTH // (16 * VX)), J, 6) * (16 * VX) + D_START
    if D_START + WIDTH > DV:
        col = col * (col < DV)
    tile = tl.load(v + (block + slot * stride_token * VEC) + col + on_axis(tl.arange(0, VX), 5, 6))
    if MASKED:
        n = n0 + group + within
        tile = tl.where((n >= lo) & (n < hi), tile, 0.0)
    if ORD == 0:
        tile = tile.reshape(16, 4, WAVES, TOKENS // (4 * RUN), RUN, WIDTH // (16 * VX), VX).permute(2, 3, 1, 4, 5, 6, 0)
    else:
        tile = tile.reshape(WIDTH // (16 * VX), TOKENS // (4 * RUN), RUN, WAVES, 4, 16, VX).permute(3, 1, 4, 2, 0, 6, 5)
    return tile.reshape(WAVES, TOKENS, WIDTH)


@triton.jit
def column_of(d, WIDTH: tl.constexpr, X: tl.constexpr):
    """Column, relative to D_START, of position `d` in a tile of `load_v_plain`."""
    VX: tl.constexpr = X if WIDTH >= 16 * X else WIDTH // 16
    return d // (16 * VX) * (16 * VX) + d % 16 * VX + d % (16 * VX) // 16
