"""K and V loaded in the very order in which a CDNA matrix instruction wants them.

A wave (64 lanes) reads its operand of a 16 x 16 matrix instruction as 16 lanes (token of K, column of V) times 4 lane groups (a run of head
elements of K, a run of tokens of V). A load whose pointer tensor has those lanes as dimensions needs no exchange through LDS. Triton lays a
tensor over lanes by the order of its dimensions, and which order wins on equal contiguity differs between Triton builds: `ORD` mirrors
every dimension but the last, and the launcher keeps the order whose compiled loop is free of LDS traffic.

Softmax does not care about the order of tokens, so K rows are taken in the order that makes each lane's run of V tokens its operand:
logical position p of a wave's tile holds token `wave_tokens(...)[p]`, for the scores, the mask and V alike.

No load is masked, which would cut it up or put a branch around it: what must not be read is replaced by an address that may be. Tokens
outside the sequence give way to the nearest one inside, columns past the head to column 0 (by multiplication: the compiler then still sees
their alignment). What such a load brings counts for nothing: K is dropped by the mask of the scores or met by a zero of q, V is met by a P of
zero or not stored. Only the dead tokens that share 16 bytes of a preshuffled V with live ones are cleared by value, as 0 * NaN is NaN.
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
        T: tl.constexpr = X if TOKENS >= 4 * X else TOKENS // 4
        HI: tl.constexpr = T // 4
        return p // (16 * HI) * (4 * T) + p // 16 % HI * 4 + p % 16 // 4 * T + p % 4
    else:
        return p // 16 * 16 + p % 4 * 4 + p % 16 // 4


@triton.jit
def first_tokens(WAVES: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr):
    """[WAVES] offset of each wave's tokens in a tile of PARTS * TOKENS: consecutive waves have the same tokens, for other query rows."""
    if PARTS == WAVES:
        return tl.arange(0, WAVES) * TOKENS
    else:
        return tl.arange(0, WAVES) // (WAVES // PARTS) * TOKENS


@triton.jit
def slots(n0, t, lo, hi, BLOCK_SIZE: tl.constexpr, STEP: tl.constexpr, MASKED: tl.constexpr):
    """(page, slot) of tokens `n0 + t`; n0 is a multiple of STEP, t lies in [0, STEP). MASKED: tokens outside [lo, hi) give way to the nearest
    one inside."""
    if MASKED:
        n = tl.minimum(tl.maximum(n0 + t, lo), hi - 1)
        return n // BLOCK_SIZE, n % BLOCK_SIZE
    elif STEP % BLOCK_SIZE == 0:
        return n0 // BLOCK_SIZE + t // BLOCK_SIZE, t % BLOCK_SIZE
    else:
        n = n0 + t
        return n // BLOCK_SIZE, n % BLOCK_SIZE


@triton.jit
def run_slots(n0, t, lo, hi, X: tl.constexpr, BLOCK_SIZE: tl.constexpr, STEP: tl.constexpr, MASKED: tl.constexpr):
    """`slots` of the first token of each run of X tokens; `n0 + t` is a multiple of X, and no run straddles pages."""
    return slots(n0, t, lo // X * X, (hi - 1) // X * X + 1, BLOCK_SIZE, STEP, MASKED)


@triton.jit
def group_slots(n0, group, within, lo, hi, BLOCK_SIZE: tl.constexpr, STEP: tl.constexpr, MASKED: tl.constexpr):
    """`slots` of the tokens `group + within`, which are looked up as groups of 16 where those share a page."""
    if BLOCK_SIZE % 16 == 0 and not MASKED:
        page, slot = slots(n0, group, lo, hi, BLOCK_SIZE, STEP, False)
        return page, slot + within
    else:
        return slots(n0, group + within, lo, hi, BLOCK_SIZE, STEP, MASKED)


@triton.jit
def page_offset(table, page, stride_block, VEC: tl.constexpr):
    """int64 offset of table entry `page`; block ids are not negative, and unsigned they take half the multiplications."""
    return tl.load(table + page).to(tl.uint32).to(tl.int64) * stride_block.to(tl.int64) * VEC


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
    BLOCK_SIZE: tl.constexpr, VEC: tl.constexpr, X: tl.constexpr, WAVES: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr,
    ORD: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """[WAVES, TOKENS, WIDTH] of columns D_START .. of a cache [blocks, heads, D/x, bs, x]; `k` points at the head."""
    T: tl.constexpr = X if TOKENS >= 4 * X else TOKENS // 4  # tokens that a lane holds in a row, in the second product
    HI: tl.constexpr = T // 4
    T16: tl.constexpr = 4 * ORD
    GL: tl.constexpr = 1 + 2 * ORD
    TB: tl.constexpr = 3 - 2 * ORD
    GH: tl.constexpr = 4 - 4 * ORD
    t16 = on_axis(tl.arange(0, 16), T16, 6)
    tb = on_axis(tl.arange(0, TOKENS // 16), TB, 6)
    chunk = on_axis(tl.arange(0, 4), GL, 6) + on_axis(tl.arange(0, WIDTH // X // 4), GH, 6) * 4 + D_START // X
    if D_START + WIDTH > D_END:
        chunk = chunk * (chunk < D_END // X)
    run = t16 // 4 * T + on_axis(first_tokens(WAVES, PARTS, TOKENS), 2, 6)  # start of T tokens that share a page
    if TOKENS > 4 * T:
        run += tb // HI * (4 * T)
    page, slot = run_slots(n0, run, lo, hi, T, BLOCK_SIZE, PARTS * TOKENS, MASKED)
    block = page_offset(table, page, stride_block, VEC)
    offset = block + (slot + t16 % 4 + tb % HI * 4) * X
    ptr = k + offset + chunk * (BLOCK_SIZE * X) + on_axis(tl.arange(0, X), 5, 6)
    return tl.load(ptr).permute(2, TB, T16, GH, GL, 5).reshape(WAVES, TOKENS, WIDTH)


@triton.jit
def load_v_preshuffled(
    v, table, n0, lo, hi, stride_block, DV: tl.constexpr,
    D_START: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, VEC: tl.constexpr, X: tl.constexpr, WAVES: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr,
    ORD: tl.constexpr,
    RUN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """[WAVES, TOKENS, WIDTH] of columns D_START .. of a cache [blocks, heads, bs/x, DV, x]; MASKED: tokens outside [lo, hi) are 0."""
    T: tl.constexpr = X if TOKENS >= 4 * X else TOKENS // 4
    DL: tl.constexpr = 4 * ORD
    GQ: tl.constexpr = 1 + 2 * ORD
    DH: tl.constexpr = 3 - 2 * ORD
    TG: tl.constexpr = 4 - 4 * ORD
    col = on_axis(tl.arange(0, 16), DL, 6) + on_axis(tl.arange(0, WIDTH // 16), DH, 6) * 16 + D_START
    if D_START + WIDTH > DV:
        col = col * (col < DV)
    x = on_axis(tl.arange(0, T), 5, 6)
    run = on_axis(tl.arange(0, 4), GQ, 6) * T + on_axis(tl.arange(0, TOKENS // (4 * T)), TG, 6) * (4 * T) + on_axis(first_tokens(WAVES, PARTS, TOKENS), 2, 6)
    page, slot = run_slots(n0, run, lo, hi, T, BLOCK_SIZE, PARTS * TOKENS, MASKED)
    block = page_offset(table, page, stride_block, VEC)
    if T == X:
        offset = block + slot * DV
    else:
        offset = block + slot // X * (X * DV) + slot % X // T * T
    tile = tl.load(v + offset + col * X + x)
    if MASKED:
        n = n0 + run + x
        tile = keep(tile, n, lo, hi)
    if ORD == 0:
        tile = tile.reshape(16, 4, WAVES, WIDTH // 16, TOKENS // (4 * T), T // RUN, RUN).permute(2, 4, 5, 1, 6, 3, 0)
    else:
        tile = tile.reshape(TOKENS // (4 * T), WIDTH // 16, WAVES, 4, 16, T // RUN, RUN).permute(2, 0, 5, 3, 6, 1, 4)
    return tile.reshape(WAVES, TOKENS, WIDTH)


@triton.jit
def load_k_plain(
    k, table, n0, lo, hi, stride_block, stride_token,
    D_START: tl.constexpr, D_END: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, VEC: tl.constexpr, X: tl.constexpr, WAVES: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr,
    ORD: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """[WAVES, TOKENS, WIDTH] of columns D_START .. of rows k[block, token] with a unit last stride."""
    T16: tl.constexpr = 4 * ORD
    GL: tl.constexpr = 1 + 2 * ORD
    TB: tl.constexpr = 3 - 2 * ORD
    GH: tl.constexpr = 4 - 4 * ORD
    t16 = on_axis(tl.arange(0, 16), T16, 6)
    group = on_axis(tl.arange(0, TOKENS // 16), TB, 6) * 16 + on_axis(first_tokens(WAVES, PARTS, TOKENS), 2, 6)
    within = t16 % 4 * 4 + t16 // 4
    page, slot = group_slots(n0, group, within, lo, hi, BLOCK_SIZE, PARTS * TOKENS, MASKED)
    block = page_offset(table, page, stride_block, VEC)
    col = on_axis(tl.arange(0, 4), GL, 6) * X + on_axis(tl.arange(0, WIDTH // X // 4), GH, 6) * (4 * X) + D_START
    if D_END % X == 0:
        if D_START + WIDTH > D_END:
            col = col * (col < D_END)
        col += on_axis(tl.arange(0, X), 5, 6)
    else:  # the row ends within 16 bytes, and what follows is another's
        col += on_axis(tl.arange(0, X), 5, 6)
        col = col * (col < D_END)
    return tl.load(k + (block + slot * stride_token * VEC) + col).permute(2, TB, T16, GH, GL, 5).reshape(WAVES, TOKENS, WIDTH)


@triton.jit
def load_q(
    q, row0, row_end, q_start, stride_token, stride_head, NUM_HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    X: tl.constexpr, VEC: tl.constexpr, WAVES: tl.constexpr, ROWS: tl.constexpr, ORD: tl.constexpr,
):  # fmt: skip
    """[WAVES, ROWS, WIDTH], the same for each wave, of the rows (query token, head) from row0 on; rows from row_end on repeat the first.

    X is that of the keys to be multiplied with, see `halves`.
    """
    Y: tl.constexpr = 16 // (q.dtype.element_ty.primitive_bitwidth // 8)
    T16: tl.constexpr = 4 * ORD
    GL: tl.constexpr = 1 + 2 * ORD
    TB: tl.constexpr = 3 - 2 * ORD
    GH: tl.constexpr = 4 - 4 * ORD
    row = row0 + on_axis(tl.arange(0, 16), T16, 6) + on_axis(tl.arange(0, ROWS // 16), TB, 6) * 16 + on_axis(tl.arange(0, WAVES), 2, 6) * 0
    row = tl.where(row < row_end, row, row0)
    offset = ((q_start + row // NUM_HEADS).to(tl.int64) * stride_token + row % NUM_HEADS * stride_head) * VEC
    gh = tl.arange(0, WIDTH // Y // 4)
    col = on_axis(tl.arange(0, 4), GL, 6) * X + on_axis(gh // (X // Y) * (4 * X) + gh % (X // Y) * Y, GH, 6)
    if WIDTH > D:
        col = col * (col < D)
    tile = tl.load(q + offset + col + on_axis(tl.arange(0, Y), 5, 6))
    return tile.permute(2, TB, T16, GH, GL, 5).reshape(WAVES, ROWS, WIDTH)


@triton.jit
def halves(tile):
    """A tile of fp8 keys [waves, tokens, columns] with the columns in the order of `load_q`: a lane holds 16 of them, which make two operands
    of 16-bit elements."""
    tile = tile.reshape(tile.shape[0], tile.shape[1], tile.shape[2] // 64, 4, 2, 8).permute(0, 1, 2, 4, 3, 5)
    return tile.reshape(tile.shape[0], tile.shape[1], tile.shape[2] * tile.shape[3] * tile.shape[4] * tile.shape[5])


@triton.jit
def load_v_plain(
    v, table, n0, lo, hi, stride_block, stride_token, DV: tl.constexpr,
    D_START: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, VEC: tl.constexpr, X: tl.constexpr, WAVES: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr,
    ORD: tl.constexpr,
    RUN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """[WAVES, TOKENS, WIDTH] of columns D_START .. in the order of `column_of`.

    A lane reads 16 bytes of a row, and the tile is transposed in registers.
    """
    C16: tl.constexpr = 4 * ORD
    GQ: tl.constexpr = 1 + 2 * ORD
    R: tl.constexpr = 3 - 2 * ORD
    J: tl.constexpr = 4 - 4 * ORD
    VX: tl.constexpr = X if WIDTH >= 16 * X else WIDTH // 16
    r = on_axis(tl.arange(0, TOKENS // 4), R, 6)
    group = r // 4 * 16 + on_axis(first_tokens(WAVES, PARTS, TOKENS), 2, 6)
    within = r % 4 * 4 + on_axis(tl.arange(0, 4), GQ, 6)
    page, slot = group_slots(n0, group, within, lo, hi, BLOCK_SIZE, PARTS * TOKENS, MASKED)
    block = page_offset(table, page, stride_block, VEC)
    col = on_axis(tl.arange(0, 16), C16, 6) * VX + on_axis(tl.arange(0, WIDTH // (16 * VX)), J, 6) * (16 * VX) + D_START
    if D_START + WIDTH > DV:
        col = col * (col < DV)
    tile = tl.load(v + (block + slot * stride_token * VEC) + col + on_axis(tl.arange(0, VX), 5, 6))
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
