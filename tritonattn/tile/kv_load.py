"""Tiles of K and V as [tokens, columns], from dense tensors or from a paged cache; the only place where a page address is computed.

Strides come in units of VEC elements (16 bytes' worth when every stride and pointer allows it, of a cache of 8-bit floats also 8 bytes' worth,
else 1): the compiler then knows how wide it may load, although no kernel is specialised on a stride. Offsets that grow with the cache or
with the number of tokens are 64-bit; those inside a tile or a page stay 32-bit.

A head of D columns is loaded as D0 (a power of two) and, where it is wider, D1 more columns padded to a power of two.
"""

import triton
import triton.language as tl


@triton.jit
def upcast(x, dtype: tl.constexpr):
    """fp8 to the dtype of the product, by way of float32, which holds every fp8 value and which the hardware converts to directly."""
    if x.dtype == dtype:
        return x
    else:
        return x.to(tl.float32).to(dtype)


@triton.jit
def exact(x, dtype: tl.constexpr):
    """`upcast` of fp8 to bfloat16 by cutting: every fp8 value is one of bfloat16, and gfx942 has no instruction that rounds to it."""
    if dtype == tl.bfloat16:
        return (x.to(tl.float32).to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return upcast(x, dtype)


@triton.jit
def convert_once(x, dtype: tl.constexpr):
    """fp8 to the dtype of the products, before the tile takes the layout of one.

    Left alone, Triton takes the tile as fp8 to each of its two products and converts it there twice, byte by byte, and does not load it
    ahead. It does not move a conversion across a reduction, were it over one element.
    """
    if x.dtype == dtype:
        return x
    else:
        return tl.sum(tl.reshape(upcast(x, dtype), (x.shape[0], x.shape[1], 1)), 2)


@triton.jit
def widen(x, dtype: tl.constexpr, FP8_HALF: tl.constexpr):
    """`upcast` for a decode tile; FP8_HALF: fp8 straight to float16, one instruction for two values on NVIDIA GPUs."""
    if FP8_HALF:
        return x.to(tl.float16)
    else:
        return upcast(x, dtype)


@triton.jit
def row_power(q):
    """Per row of q [rows, columns]: the power of two that its largest magnitude starts with; 1 for a row of zeros."""
    bits = tl.max(tl.abs(q.to(tl.float32)), 1).to(tl.uint32, bitcast=True) & 0x7F800000
    return tl.where(bits == 0, 0x3F800000, bits).to(tl.float32, bitcast=True)


@triton.jit
def descale(pointer, head, stride):
    """The descale of a KV head; stride 0 for one that all heads share, None for none."""
    if pointer is None:
        return 1.0
    else:
        return tl.load(pointer + head * stride).to(tl.float32)


@triton.jit
def load_2d(base, row_offsets, columns, row_ok, column_ok, MASK_ROWS: tl.constexpr, MASK_COLUMNS: tl.constexpr):
    """[rows, columns] at base + row_offsets[:, None] + columns[None, :]; zeros where masked."""
    pointers = base + row_offsets[:, None] + columns[None, :]
    if MASK_ROWS and MASK_COLUMNS:
        return tl.load(pointers, mask=row_ok[:, None] & column_ok[None, :], other=0.0)
    elif MASK_ROWS:
        return tl.load(pointers, mask=row_ok[:, None], other=0.0)
    elif MASK_COLUMNS:
        return tl.load(pointers, mask=column_ok[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def page_ids(block_table, tokens, end, REPEAT: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Block ids of token positions. Those from `end` on are not looked up; with REPEAT they get the id of the one before it."""
    if REPEAT:
        return tl.load(block_table + tl.minimum(tokens, end - 1) // BLOCK_SIZE)
    else:
        return tl.load(block_table + tokens // BLOCK_SIZE, mask=tokens < end, other=0)


@triton.jit
def plain_rows(pages, tokens, stride_block, stride_token, BLOCK_SIZE: tl.constexpr, VEC: tl.constexpr):
    """Offsets of cached tokens in a plain (nhd, hnd, latent) cache, from the head on."""
    return (pages.to(tl.int64) * stride_block + tokens % BLOCK_SIZE * stride_token) * VEC


@triton.jit
def load_k_shuffled(base, pages, tokens, stride_block, token_ok, X: tl.constexpr, BLOCK_SIZE: tl.constexpr, VEC: tl.constexpr,
                    COLUMN0: tl.constexpr, COLUMNS: tl.constexpr, VALID: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    """[tokens, COLUMNS] from K [blocks, heads, D/x, block_size, x], starting at column COLUMN0; columns past VALID are zeros.

    The pointer tile has the order of memory, [D/x, tokens, x], so that neighbouring lanes read neighbouring 16-byte runs.
    """
    groups = tl.arange(0, COLUMNS // X)
    run = tl.arange(0, X)
    page = pages.to(tl.int64) * stride_block * VEC + tokens % BLOCK_SIZE * X
    pointers = base + ((COLUMN0 // X + groups) * (BLOCK_SIZE * X))[:, None, None] + page[None, :, None] + run[None, None, :]
    if MASK and VALID < COLUMNS:
        tile = tl.load(pointers, mask=(groups < VALID // X)[:, None, None] & token_ok[None, :, None], other=0.0)
    elif MASK:
        tile = tl.load(pointers, mask=token_ok[None, :, None], other=0.0)
    elif VALID < COLUMNS:
        tile = tl.load(pointers, mask=(groups < VALID // X)[:, None, None], other=0.0)
    else:
        tile = tl.load(pointers)
    return tl.reshape(tl.permute(tile, (1, 0, 2)), (tokens.shape[0], COLUMNS))


@triton.jit
def clear_dead(tile, first_token, tokens_lo, tokens_hi):
    """[tokens, columns] with zeros for the tokens outside [tokens_lo, tokens_hi)."""
    token = first_token + tl.arange(0, tile.shape[0])
    return tl.where(((token >= tokens_lo) & (token < tokens_hi))[:, None], tile, 0.0)


@triton.jit
def load_v_shuffled(base, group_pages, first_token, tokens_lo, tokens_hi, stride_block, D: tl.constexpr, X: tl.constexpr,
                    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, VEC: tl.constexpr, COLUMN0: tl.constexpr,
                    COLUMNS: tl.constexpr, VALID: tl.constexpr):  # fmt: skip
    """[BLOCK_N tokens, COLUMNS] from V [blocks, heads, block_size/x, D, x]; `group_pages` holds one block id per x tokens.

    Runs of x tokens, which lie in one page and make one 16-byte load, come as they are if any of their tokens is in
    [tokens_lo, tokens_hi), else as zeros.
    """
    groups = tl.arange(0, BLOCK_N // X) * X
    columns = tl.arange(0, COLUMNS)
    run = tl.arange(0, X)
    page = group_pages.to(tl.int64) * stride_block * VEC + (first_token + groups) % BLOCK_SIZE * D
    pointers = base + page[:, None, None] + ((COLUMN0 + columns) * X)[None, :, None] + run[None, None, :]
    live = ((first_token + groups + X > tokens_lo) & (first_token + groups < tokens_hi))[:, None, None]
    if VALID < COLUMNS:
        live = live & (columns < VALID)[None, :, None]
    tile = tl.load(pointers, mask=live, other=0.0)
    return tl.reshape(tl.permute(tile, (0, 2, 1)), (BLOCK_N, COLUMNS))


@triton.jit
def load_k_pages(base, pages, live, stride_block, X: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, VEC: tl.constexpr,
                 COLUMN0: tl.constexpr, COLUMNS: tl.constexpr, VALID: tl.constexpr):  # fmt: skip
    """As `load_k_shuffled`, by whole pages: one contiguous run of COLUMNS * BLOCK_SIZE elements of each page that is `live`.

    `pages` [BLOCK_N / BLOCK_SIZE]; BLOCK_SIZE is a power of two. Dead slots of a live page come as they are.
    """
    PAGES: tl.constexpr = BLOCK_N // BLOCK_SIZE
    run = tl.arange(0, COLUMNS * BLOCK_SIZE)
    pointers = base + (pages.to(tl.int64) * stride_block * VEC + COLUMN0 * BLOCK_SIZE)[:, None] + run[None, :]
    if VALID < COLUMNS:
        tile = tl.load(pointers, mask=live[:, None] & (run < VALID * BLOCK_SIZE)[None, :], other=0.0)
    else:
        tile = tl.load(pointers, mask=live[:, None], other=0.0)
    tile = tl.reshape(tile, (PAGES, COLUMNS // X, BLOCK_SIZE, X))
    return tl.reshape(tl.permute(tile, (0, 2, 1, 3)), (BLOCK_N, COLUMNS))


@triton.jit
def load_v_pages(base, pages, first_token, tokens_lo, tokens_hi, stride_block, D: tl.constexpr, X: tl.constexpr,
                 BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, VEC: tl.constexpr):  # fmt: skip
    """As `load_v_shuffled`, by whole pages: all D columns, a power of two."""
    PAGES: tl.constexpr = BLOCK_N // BLOCK_SIZE
    run = tl.arange(0, BLOCK_SIZE * D)
    group = (first_token + tl.arange(0, PAGES) * BLOCK_SIZE)[:, None] + (run // (X * D) * X)[None, :]
    live = (group + X > tokens_lo) & (group < tokens_hi)
    tile = tl.load(base + (pages.to(tl.int64) * stride_block * VEC)[:, None] + run[None, :], mask=live, other=0.0)
    tile = tl.reshape(tile, (PAGES, BLOCK_SIZE // X, D, X))
    return tl.reshape(tl.permute(tile, (0, 1, 3, 2)), (BLOCK_N, D))
