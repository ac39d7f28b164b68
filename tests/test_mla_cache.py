"""Writing latent rows and gathering them again."""

import math

import pytest
import torch

from tests import cases, mla_cases
from tritonattn import mla_cache_write, mla_decode, mla_gather_cache, reference, reshape_and_cache

SCALES = [{}, {"kv_descale": 0.5}, {"kv_descale": torch.tensor([0.25]), "rope_descale": torch.tensor([2.0])}, {"rope_descale": 3.0}]


def bits(cache):
    return cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache


def write_both(device, dtype, kv_dtype, block_size, latent_size, rope_size, scales, gap=0):
    """The cache as the op and as the reference leave it, from 16 tokens of which 13 have a slot and two of those none."""
    width = latent_size + rope_size
    gen = torch.Generator().manual_seed(3)
    latent = (torch.randn(16, latent_size, generator=gen) * 3).to(dtype)
    rope = (torch.randn(16, rope_size, generator=gen) * 3).to(dtype)
    latent[0, 0], latent[1, 1], rope[2, 0], rope[3, 3] = 1e4, math.inf, -1e4, math.nan
    slots = torch.randperm(6 * block_size if block_size > 2 else 30, generator=gen)[:13]
    slots[4] = slots[9] = -1
    latent[4], rope[9] = math.nan, math.nan
    blocks = max(6, int(slots.max()) // block_size + 1)
    result = []
    for where in ("op", "reference"):
        storage = torch.empty(blocks, block_size * width + gap, dtype=kv_dtype)
        cases.fill(storage, "huge")
        cache = storage[:, : block_size * width].unflatten(1, (block_size, width))
        if where == "op":
            storage = storage.to(device)
            cache = storage[:, : block_size * width].unflatten(1, (block_size, width))
            on_device = {name: cases.to(value, device) for name, value in scales.items()}
            mla_cache_write(latent.to(device), rope.to(device), cache, slots.to(device), **on_device)
        else:
            reference.mla_cache_write(latent, rope, cache, slots, **scales)
        result.append(bits(storage.cpu()))
    return result


@pytest.mark.parametrize("scales", SCALES, ids=str)
@pytest.mark.parametrize("block_size", [1, 16, 48])
def test_write_fp8(device, block_size, scales):
    for kv_dtype in cases.fp8_dtypes(device):
        got, expected = write_both(device, torch.bfloat16, kv_dtype, block_size, 64, 16, scales)
        assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("sizes", [(64, 16), (512, 64), (80, 48)])
@pytest.mark.parametrize("gap", [0, 5, 80])
def test_write(device, dtype, sizes, gap):
    got, expected = write_both(device, dtype, dtype, 16, *sizes, {}, gap)
    assert torch.equal(got.nan_to_num(-7.0), expected.nan_to_num(-7.0))


@pytest.mark.parametrize("slots", [torch.int32, torch.int64], ids=str)
def test_slots_outside_the_cache_are_skipped(device, slots):
    """The cache is two blocks of a pool of six: what lies around it belongs to others."""
    mapping = torch.tensor([5, *cases.slots_outside(32, slots), 0, 31], dtype=slots)
    rows = torch.randn(len(mapping), 80, generator=torch.Generator().manual_seed(0))
    pool, want = (torch.full((6, 16, 80), cases.MARK) for _ in range(2))
    pool, there = pool.to(device), rows.to(device)
    mla_cache_write(there[:, :64], there[:, 64:], pool[2:4], mapping.to(device))
    reference.mla_cache_write(rows[:, :64], rows[:, 64:], want[2:4], mapping)
    assert (want[2:4] != cases.MARK).sum() == 3 * 80
    assert torch.equal(pool.cpu(), want)


def test_written_in_pieces_or_at_once(device):
    """7 + 16 + 9 tokens one after the other, or 32 in one call: the same bytes."""
    gen = torch.Generator().manual_seed(0)
    latent, rope = torch.randn(32, 64, generator=gen).to(device), torch.randn(32, 16, generator=gen).to(device)
    slots = (torch.arange(32, dtype=torch.int32) + 5).to(device)
    caches = [torch.zeros(3, 16, 80, device=device) for _ in range(2)]
    mla_cache_write(latent, rope, caches[0], slots)
    for begin, end in ((0, 7), (7, 23), (23, 32)):
        mla_cache_write(latent[begin:end], rope[begin:end], caches[1], slots[begin:end])
    assert torch.equal(*caches)


@pytest.mark.parametrize("scales", SCALES, ids=str)
@pytest.mark.parametrize("block_size", [1, 16, 48, 64])
def test_gather(device, block_size, scales):
    """Any part of each sequence, poison around it; the rows that are not asked for stay as they are."""
    for kv_dtype in (torch.bfloat16, *cases.fp8_dtypes(device)):
        batch = mla_cases.Batch([(0, 70), (0, 3), (0, 0), (0, 33)], dtype=torch.bfloat16)
        cache = mla_cases.latent_cache(batch.rows, 64, block_size=block_size, dtype=kv_dtype, **scales)
        starts, lengths = torch.tensor([7, 0, 0, 33]).int(), torch.tensor([63, 3, 0, 0]).int()
        expected = reference.gather_cache(
            cache.clean[..., :64], cache.clean[..., 64:], cache.table, starts, lengths, kv_layout="latent",
            k_descale=scales.get("kv_descale"), v_descale=scales.get("rope_descale", scales.get("kv_descale")),
        )  # fmt: skip
        args = [x.to(device) for x in (cache.poisoned("nan"), cache.table, starts, lengths)]
        on_device = {name: cases.to(value, device) for name, value in scales.items()}
        got = mla_gather_cache(*args, kv_lora_rank=64, **on_device)
        out = torch.full((70, 64), 777.0, dtype=torch.float32, device=device), torch.full((70, 16), 777.0, dtype=torch.float32, device=device)
        mla_gather_cache(*args, kv_lora_rank=64, out=out, **on_device)
        for want, mine, given in zip(expected, got, out, strict=True):
            assert mine.dtype is torch.bfloat16
            torch.testing.assert_close(given[:66].double().cpu(), want[:, 0], rtol=1e-6, atol=0)
            torch.testing.assert_close(mine.float().cpu(), given[:66].cpu(), rtol=2**-7, atol=0)
            assert (given[66:] == 777).all()


@pytest.mark.parametrize("call,words", [
    (lambda c, t: mla_cache_write(torch.zeros(3, 64), torch.zeros(3, 8), c, t), ["rope must be"]),
    (lambda c, t: mla_cache_write(torch.zeros(2, 64), torch.zeros(2, 16), c, t, kv_descale=0.0), ["slot_mapping must be at most", "kv_descale"]),
    (lambda c, t: mla_cache_write(torch.zeros(3, 64).half(), torch.zeros(3, 16).half(), c, t), ["kv_cache must be"]),
    (lambda c, t: mla_cache_write(torch.zeros(3, 64), torch.zeros(3, 8, 2), c[0], t[0], kv_descale=0.0),
     ["rope must have 2 dim", "kv_cache must have 3 dim", "slot_mapping must have 1 dim", "kv_descale must be"]),
    (lambda c, t: mla_gather_cache(c[..., :63], t[:, None], t, t, kv_lora_rank=64), ["rope columns of kv_cache must be .*, got -1"]),
    (lambda c, t: mla_gather_cache(c, t[None], t, t, kv_lora_rank=60), ["latent columns", "block_table must be"]),
    (lambda c, t: mla_gather_cache(c, t[:, None], t, t, kv_lora_rank=64, out=torch.zeros(3, 80)), ["out must be a pair"]),
])  # fmt: skip
def test_bad_input_is_named(call, words):
    with pytest.raises((ValueError, TypeError)) as error:
        call(torch.zeros(2, 16, 80), torch.zeros(3, dtype=torch.int32))
    for word in words:
        error.match(word)


@pytest.mark.parametrize("path", ["decode", "gather", "write"])
def test_blocks_beyond_two_to_the_31_elements(device, path):
    """A page of 480 x 576: block 7767 straddles element 2^31 of the cache. The same data in blocks 0 to 3 has the same bits."""
    kv_dtype, size, edge = cases.fp8_dtypes(device)[0], 480, 7767
    high = torch.tensor([edge - 1, edge, edge + 1, edge + 2], dtype=torch.int32)
    gen = torch.Generator().manual_seed(0)
    pages = torch.randn(4, size, 576, generator=gen).to(kv_dtype)
    far = torch.empty(edge + 3, size, 576, dtype=kv_dtype, device=device)  # on a CPU, only the pages that are touched become real
    near = torch.empty(4, size, 576, dtype=kv_dtype, device=device)
    for at, block in enumerate(high.tolist()):
        near[at], far[block] = pages[at].to(device), pages[at].to(device)
    results = []
    for cache, blocks in ((near, torch.arange(4, dtype=torch.int32)), (far, high)):
        table = blocks[None].to(device)
        if path == "decode":
            q = torch.randn(1, 2, 576, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
            length = torch.tensor([4 * size], dtype=torch.int32, device=device)
            results.append(mla_decode(q, cache, seqused_k=length, block_table=table, max_seqlen_k=4 * size, softmax_scale=0.05))
        elif path == "gather":
            start, length = (torch.tensor([n], dtype=torch.int32, device=device) for n in (size - 8, 2 * size + 16))
            results.append(torch.cat(mla_gather_cache(cache, table, start, length), dim=1))
        else:
            slots = (blocks[:, None].long() * size + torch.tensor([0, 7, size - 1])).flatten().to(device)
            new = torch.randn(12, 576, generator=torch.Generator().manual_seed(2)).bfloat16().to(device)
            mla_cache_write(new[:, :512], new[:, 512:], cache, slots)
            results.append(bits(torch.stack([cache[block] for block in blocks.tolist()])))
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_descales_of_a_cache_that_is_not_8_bits_wide(device, dtype):
    """Written divided, read multiplied, as in an fp8 cache."""
    token = torch.ones(1, 2, 64, dtype=dtype, device=device)
    k_cache, v_cache = torch.zeros(1, 16, 2, 64, dtype=dtype, device=device), torch.zeros(1, 16, 2, 64, dtype=dtype, device=device)
    slot, scales = torch.tensor([3], device=device), {"k_descale": 2.0, "v_descale": torch.tensor([4.0, 8.0], device=device)}
    reshape_and_cache(token, token, k_cache, v_cache, slot, kv_layout="nhd", **scales)
    assert (k_cache[0, 3] == 0.5).all() and (v_cache[0, 3, 0] == 0.25).all() and (v_cache[0, 3, 1] == 0.125).all()
    latent, rope, cache = token.view(1, 128)[:, :64], token.view(1, 128)[:, :16], torch.zeros(1, 16, 80, dtype=dtype, device=device)
    mla_cache_write(latent, rope, cache, slot, kv_descale=2.0)
    assert (cache[0, 3] == 0.5).all()


def test_repeated_writes_into_a_part_of_a_cache(device):
    wide = torch.zeros(2, 16, 128, dtype=torch.bfloat16, device=device)
    latent, rope = torch.randn(3, 64, device=device).bfloat16(), torch.randn(3, 16, device=device).bfloat16()
    for _ in range(3):
        wide.zero_()
        mla_cache_write(latent, rope, wide[..., :80], torch.arange(16, 19, device=device))
        assert torch.equal(wide[1, :3, :64], latent) and torch.equal(wide[1, :3, 64:80], rope) and not wide[..., 80:].any()
