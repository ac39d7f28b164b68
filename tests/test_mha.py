"""The MHA ops against float64: every feature, dtype, layout and size, ragged batches throughout."""

import pytest
import torch

import tritonattn
from tests import cases
from tritonattn import layouts, reference
from tritonattn.tuning.arch import assume, detect
from tritonattn.tuning.cases import unaligned
from tritonattn.tuning.table import watch

SINKS = torch.tensor([0.5, -1.0, 2.0])
SLOPES = torch.tensor([0.5, 0.25, 0.0625])
PREFILL = [(37, 37), (1, 1), (0, 0), (70, 75), (3, 20)]
EXTEND = [(5, 37), (1, 16), (0, 0), (33, 70), (2, 2)]
DECODE = [(1, 37), (3, 16), (0, 0), (2, 150), (2, 2)]
FEATURES = {
    "plain": {},
    "full": {"causal": False},
    "window": {"window_size": (9, 0)},
    "two-sided window": {"causal": False, "window_size": (9, 3)},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": SLOPES},
    "sinks": {"sinks": SINKS},
    "scale": {"softmax_scale": 0.3},
    "everything": {"window_size": (20, 0), "softcap": 5.0, "alibi_slopes": SLOPES, "sinks": SINKS, "softmax_scale": 0.2},
}
HALVES = [torch.bfloat16, torch.float16]
PER_HEAD = {"k_descale": torch.tensor([0.5, 0.25]), "v_descale": torch.tensor([0.75, 1.5])}


@pytest.mark.parametrize("options", FEATURES.values(), ids=FEATURES)
def test_prefill_features(device, options):
    cases.prefill(PREFILL, options={"causal": True} | options).check(device)


@pytest.mark.parametrize("options", FEATURES.values(), ids=FEATURES)
def test_extend_features(device, options):
    cases.extend(EXTEND, layout="hnd", options=options).check(device)


@pytest.mark.parametrize("options", [FEATURES[name] for name in ("plain", "full", "window", "everything")], ids=["plain", "full", "window", "everything"])
def test_extend_of_cached_tokens_features(device, options):
    cases.extend(EXTEND[:3], layout="preshuffled", shared=True, options=options).check(device, chunk_tokens=32)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("options", FEATURES.values(), ids=FEATURES)
def test_decode_features(device, options, num_splits):
    cases.decode(DECODE, options=options).check(device, num_splits=num_splits)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_prefill_dtypes(device, dtype):
    cases.prefill(PREFILL, dtype=dtype, head_size=64, options={"causal": True}).check(device)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("layout", layouts.PAGED_LAYOUTS)
def test_extend_dtypes(device, dtype, layout):
    cases.extend(EXTEND, dtype=dtype, layout=layout, heads=(4, 2)).check(device, chunk_tokens=48)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("layout", layouts.PAGED_LAYOUTS)
def test_decode_dtypes(device, dtype, layout):
    cases.decode(DECODE, dtype=dtype, layout=layout, heads=(4, 2), head_size=64).check(device, num_splits=2)


@pytest.mark.parametrize("descales", [PER_HEAD, {"k_descale": 0.4, "v_descale": torch.tensor([1.7])}], ids=["per head", "one"])
@pytest.mark.parametrize("layout", layouts.PAGED_LAYOUTS)
def test_fp8_caches(device, layout, descales):
    for dtype in cases.fp8_dtypes(device):
        shape = {"kv_dtype": dtype, "layout": layout, "heads": (4, 2), "dtype": torch.bfloat16, **descales}
        cases.decode([(1, 37), (0, 0), (2, 70)], **shape).check(device)
        cases.extend([(5, 37), (0, 0), (1, 20)], **shape).check(device)


@pytest.mark.parametrize("head_size", [40, 72, 120])
@pytest.mark.parametrize("layout", ["nhd", "hnd"])
def test_fp8_rows_that_end_within_16_bytes(device, layout, head_size):
    """What follows them is another head's or token's, or nobody's: it does not count, even as NaN times 0."""
    shape = {"layout": layout, "kv_dtype": cases.fp8_dtypes(device)[0], "heads": (4, 2), "dtype": torch.bfloat16, "head_size": head_size}
    cases.decode([(1, 37), (2, 70), (1, 1)], **shape).check(device, num_splits=2)
    cases.extend([(3, 37), (1, 20)], **shape).check(device)
    key, value = torch.randn(2, 5, 2, head_size, dtype=torch.bfloat16)
    slots, scales = torch.tensor([3, 47, -1, 20, 16]), {"kv_layout": layout, "k_descale": 0.5, "v_descale": 0.25}
    ours, want = (layouts.allocate(layout, 3, 16, 2, head_size, dtype=shape["kv_dtype"]) for _ in range(2))
    for cache in (*ours, *want):
        cases.fill(cache, "nan")
    ours = [cache.to(device) for cache in ours]
    tritonattn.reshape_and_cache(key.to(device), value.to(device), *ours, slots.to(device), **scales)
    reference.reshape_and_cache(key, value, *want, slots, **scales)
    assert all(torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8)) for a, b in zip(ours, want, strict=True))


@pytest.mark.parametrize("new", [1, 4, 8], ids="{} new".format)
@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
@pytest.mark.parametrize("layout", ["nhd", "preshuffled"])
def test_decode_over_strides_of_no_16_bytes(device, layout, fp8, new, monkeypatch):
    """They have table rows of their own, by the number of query rows: 16, 32 and 64 here."""
    descales = {"k_descale": 0.5, "v_descale": 0.25} if fp8 else {}
    kv_dtype = cases.fp8_dtypes(device)[0] if fp8 else None
    lens = [(new, 37), (0, 0), (1, 150)]
    case = cases.decode(lens, layout=layout, heads=(16, 2), head_size=64, dtype=torch.bfloat16, kv_dtype=kv_dtype, **descales)
    k, v, table = case.cache.poisoned("nan")
    odd = unaligned(k.to(device)), unaligned(v.to(device)), table
    monkeypatch.setattr(case.cache, "poisoned", lambda poison: odd)
    watched, found = watch(detect(device))
    with assume(watched):
        case.check(device, num_splits=2)
    assert {kernel for kernel, _ in found} >= {"decode_unaligned"}


def test_fp8_queries(device):
    for dtype in cases.fp8_dtypes(device):
        shape = {"heads": (4, 2), "dtype": torch.bfloat16, "q_descale": torch.tensor([0.5, 2.0]), **PER_HEAD}
        cases.decode(DECODE[:3], kv_dtype=dtype, fp8_q=dtype, layout="preshuffled", **shape).check(device)
        cases.prefill(PREFILL[:3], fp8=dtype, options={"causal": True}, **shape).check(device)


@pytest.mark.parametrize(("head_size", "v_head_size"), [(192, 128), (96, 32), (32, 80), (64, 256)])
def test_value_heads_of_another_size(device, head_size, v_head_size):
    shape = {"head_size": head_size, "v_head_size": v_head_size}
    cases.prefill(PREFILL[1:4], options={"causal": True}, **shape).check(device)
    cases.extend(EXTEND[:2], layout="preshuffled", **shape).check(device)
    for layout in ("nhd", "preshuffled"):
        cases.decode(DECODE[:2], layout=layout, **shape).check(device, num_splits=2)


@pytest.mark.parametrize("layout", layouts.PAGED_LAYOUTS)
@pytest.mark.parametrize("block_size", [48, 144])
def test_block_sizes_that_are_no_power_of_two(device, layout, block_size):
    cases.decode([(1, 200), (2, 47), (1, 161)], layout=layout, block_size=block_size).check(device, num_splits=2)
    cases.extend([(3, 200), (2, 50)], layout=layout, block_size=block_size).check(device, chunk_tokens=64)


def test_decode_without_cu_seqlens(device):
    case = cases.decode([(2, 37), (2, 16), (2, 70)])
    case.check(device, cu_seqlens_q=None, max_seqlen_q=2)


@pytest.mark.parametrize("make", [cases.prefill, cases.extend, cases.decode], ids=["prefill", "extend", "decode"])
def test_nothing_to_do(device, make):
    make([]).check(device)
    make([(0, 0), (0, 0)]).check(device)


@pytest.mark.parametrize("make", [cases.extend, cases.decode], ids=["extend", "decode"])
def test_context_but_no_query(device, make):
    make([(0, 20), (1, 20), (0, 5)]).check(device)


def test_out_is_made_where_none_is_given(device):
    case = cases.decode(DECODE[:2], dtype=torch.bfloat16)
    expected, _ = case.run(device)
    k_cache, v_cache, table = (x.to(device) for x in case.cache.poisoned("nan"))
    args = {name: cases.to(value, device) for name, value in case.args.items()}
    out = tritonattn.decode_attention(**args, k_cache=k_cache, v_cache=v_cache, block_table=table)
    assert isinstance(out, torch.Tensor) and out.dtype is torch.bfloat16 and torch.equal(out[: case.rows], expected)
    assert (out[case.rows :] == 0).all()


def test_queries_may_be_a_view(device):
    case = cases.prefill(PREFILL[:2], options={"causal": True})
    expected = case.run(device)
    wide = {}
    for name in "qkv":
        tensor = case.args[name]
        wide[name] = torch.full((tensor.shape[0], 2 * tensor.shape[1], tensor.shape[2] + 5), 9.0)[:, ::2, 3 : 3 + tensor.shape[2]]
        wide[name].copy_(tensor)
    for got, want in zip(case.run(device, **wide), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


# -- merge, cache writes, gather ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("in_place", [False, True])
def test_merge(device, dtype, in_place):
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(37, 3, 80, generator=generator).to(dtype) for _ in range(2)]
    lses = [torch.randn(3, 37, generator=generator) * 5 for _ in range(2)]
    lses[0][1, :9] = -torch.inf
    oracle = cases.Oracle(*reference.merge_attn_states(parts[0], lses[0], parts[1], lses[1]), 0.0, 0.0, dtype)
    a, la, b, lb = (x.to(device) for x in (parts[0], lses[0], parts[1], lses[1]))
    out, lse = tritonattn.merge_attn_states(a, la, b, lb, out=a if in_place else None, return_lse=True)
    assert (out.data_ptr() == a.data_ptr()) == in_place
    oracle.check(out, lse)


@pytest.mark.parametrize("layout", layouts.PAGED_LAYOUTS)
@pytest.mark.parametrize("slots", [torch.int32, torch.int64], ids=str)
def test_cache_write_touches_its_slots_alone(device, layout, slots):
    """Byte for byte the cache that the reference writes, in a cache full of marks."""
    generator = torch.Generator().manual_seed(2)
    pairs = [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32), *((torch.float16, fp8) for fp8 in cases.fp8_dtypes(device))]
    for dtype, kv_dtype in pairs:
        key, value = (torch.randn(21, 3, size, generator=generator).to(dtype) * 4 for size in (64, 96))
        key[3, 0, :3] = torch.tensor([60000.0, -60000.0, torch.nan])
        mapping = torch.randperm(96, generator=generator)[:19].to(slots)
        mapping[[4, 11]] = -1
        descale = {"k_descale": torch.tensor([0.5, 2.0, 0.25]), "v_descale": 0.125} if kv_dtype.itemsize == 1 else {}
        caches = [layouts.allocate(layout, 6, 16, 3, 64, v_head_size=96, dtype=kv_dtype) for _ in range(2)]
        for pair in caches:
            for cache in pair:
                cache.view(torch.uint8).fill_(0x55)
        reference.reshape_and_cache(key, value, *caches[0], mapping, kv_layout=layout, **descale)
        on_device = [cache.to(device) for cache in caches[1]]
        args = {name: cases.to(descale_value, device) for name, descale_value in descale.items()}
        key[[4, 11, 19, 20]] = torch.nan
        tritonattn.reshape_and_cache(key.to(device), value.to(device), *on_device, mapping.to(device), kv_layout=layout, **args)
        for got, want in zip(on_device, caches[0], strict=True):
            got, both_nan = got.cpu(), got.cpu().float().isnan() & want.float().isnan()
            bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[want.itemsize]
            different = (got.view(bits) != want.view(bits)) & ~both_nan
            assert not different.any(), f"{int(different.sum())} elements differ for {kv_dtype}"


@pytest.mark.parametrize("layout", layouts.PAGED_LAYOUTS)
@pytest.mark.parametrize("slots", [torch.int32, torch.int64], ids=str)
def test_slots_outside_the_cache_are_skipped(device, layout, slots):
    """The cache is two blocks of a pool of six: what lies around it belongs to others."""
    mapping = torch.tensor([5, *cases.slots_outside(32, slots), 0, 31], dtype=slots)
    key, value = torch.randn(2, len(mapping), 3, 64, generator=torch.Generator().manual_seed(0))
    ours, want = ([torch.full_like(pool, cases.MARK) for pool in layouts.allocate(layout, 6, 16, 3, 64, dtype=torch.float32)] for _ in range(2))
    ours = [pool.to(device) for pool in ours]
    tritonattn.reshape_and_cache(key.to(device), value.to(device), *(pool[2:4] for pool in ours), mapping.to(device), kv_layout=layout)
    reference.reshape_and_cache(key, value, *(pool[2:4] for pool in want), mapping, kv_layout=layout)
    for got, expected in zip(ours, want, strict=True):
        assert (expected[2:4] != cases.MARK).sum() == 3 * 3 * 64
        assert torch.equal(got.cpu(), expected)


@pytest.mark.parametrize("layout", layouts.PAGED_LAYOUTS)
def test_gather(device, layout):
    batch = cases.Batch([(0, 50), (0, 3), (0, 0), (0, 70)], heads=(2, 2), v_head_size=48, dtype=torch.bfloat16)
    starts, lengths = torch.tensor([3, 0, 0, 16]).int(), torch.tensor([40, 3, 0, 54]).int()
    for kv_dtype in (torch.bfloat16, *cases.fp8_dtypes(device)):
        scale = {} if kv_dtype is torch.bfloat16 else PER_HEAD
        cache = batch.cache(batch.seq_lens, layout=layout, dtype=kv_dtype, **scale)
        expected = reference.gather_cache(cache.k, cache.v, cache.table, starts, lengths, kv_layout=layout, **scale)
        k_cache, v_cache, table = (x.to(device) for x in cache.poisoned("nan"))
        args = {name: cases.to(value, device) for name, value in scale.items()} | {"kv_layout": layout}
        got = tritonattn.gather_cache(k_cache, v_cache, table, starts.to(device), lengths.to(device), **args)
        rooms = tuple(torch.full((99, 2, size), cases.MARK, dtype=torch.float32, device=device) for size in (32, 48))
        tritonattn.gather_cache(k_cache, v_cache, table, starts.to(device), lengths.to(device), out=rooms, **args)
        for tensor, room, want in zip(got, rooms, expected, strict=True):
            assert torch.equal(tensor.cpu(), want.bfloat16())
            assert torch.equal(room[:97].cpu(), want.float()) and (room[97:] == cases.MARK).all()
