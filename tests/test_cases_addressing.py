"""Cases from the field about addressing and layout; a test is named after the number of its case."""

import pytest
import torch

import tritonattn
from tests import cases
from tritonattn import layouts
from tritonattn.paths import launch

LENS = [(1, 40), (3, 20)]


def pools(cache: cases.Cache) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The same cache in other allocations, with gaps full of NaN."""
    nan, shape = float("nan"), cache.k.shape
    pages = [x.flatten(2) for x in (cache.k, cache.v)]
    inner = [x.shape[2:] for x in (cache.k, cache.v)]
    whole = torch.full((shape[0], 2, *pages[0].shape[1:]), nan)
    wide = torch.full((2, shape[0], shape[1] + 3, *pages[0].shape[2:]), nan)
    for at, page in enumerate(pages):
        whole[:, at] = page
        wide[at, :, 2 : 2 + shape[1]] = page
    halves, gaps = whole.unbind(1), [wide[at, :, 2 : 2 + shape[1]] for at in range(2)]
    found = {
        "interleaved halves": tuple(x.unflatten(2, size) for x, size in zip(halves, inner, strict=True)),
        "gaps between blocks": tuple(x.unflatten(2, size) for x, size in zip(gaps, inner, strict=True)),
    }
    if cache.layout != "preshuffled":
        packed = torch.full((*shape[:3], 2 * shape[3] + 4), nan)
        packed[..., : shape[3]], packed[..., shape[3] : 2 * shape[3]] = cache.k, cache.v
        found["packed columns"] = packed[..., : 2 * shape[3]].split(shape[3], -1)
        transposed = packed.transpose(1, 2).contiguous().transpose(1, 2)
        found["packed columns, other order"] = transposed[..., : 2 * shape[3]].split(shape[3], -1)
    return found


def test_case_19_packed_columns_are_read_as_two_caches_are(device, monkeypatch):
    """K and V as halves of one row: the same kernels in the same form, loads of 16 bytes, and the caller's memory, not a copy of it."""
    batch, seen = cases.Batch(LENS, heads=(4, 2), head_size=64, dtype=torch.bfloat16), []
    original = launch.run

    def run(kernel, grid, args, flags, static, row):
        seen.append((kernel, grid, flags, static, row, [x for x in args if not isinstance(x, torch.Tensor | int)]))
        places.update(x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor))
        original(kernel, grid, args, flags, static, row)

    for case in (cases.decode(batch), cases.extend(batch)):
        monkeypatch.setattr(launch, "run", original)
        case.run(device)  # compiled, and remembered: the next calls differ in pointers and strides alone
        monkeypatch.setattr(launch, "run", run)
        args = {name: cases.to(value, device) for name, value in case.args.items()} | {"block_table": case.cache.hidden_table.to(device)}
        packed = torch.zeros(*case.cache.k.shape[:3], 128, dtype=torch.bfloat16, device=device)
        packed[..., :64], packed[..., 64:] = case.cache.k, case.cache.v
        forms = []
        for caches in ((case.cache.k.to(device), case.cache.v.to(device)), packed.split(64, -1)):
            places = set()
            seen.clear()
            getattr(tritonattn, case.op)(**args, k_cache=caches[0], v_cache=caches[1])
            forms.append(list(seen))
            assert {x.untyped_storage().data_ptr() for x in caches} <= places
        assert forms[0] == forms[1] and forms[0]
        assert any(form[2].get("VEC") == 8 or form[2].get("VEC_KV") == 8 for form in forms[1]), [form[2] for form in forms[1]]


def onto(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """To the device with all strides, and what lies between the elements."""
    base = tensor if tensor._base is None else tensor._base
    return base.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@pytest.mark.parametrize("layout", layouts.PAGED_LAYOUTS)
def test_case_18_reads_through_any_strides(device, layout):
    batch = cases.Batch(LENS, heads=(4, 2))
    decode, extend = cases.decode(batch, layout=layout), cases.extend(batch, layout=layout)
    for case in (decode, extend):
        plain = case.run(device)
        args = {name: cases.to(value, device) for name, value in case.args.items()}
        dirty = cases.Cache(layout, *case.cache.poisoned("nan")[:2], *([None] * 4))
        for name, (k_cache, v_cache) in pools(dirty).items():
            tables = case.cache.hidden_table.to(device)
            out, lse = getattr(tritonattn, case.op)(
                **args, k_cache=onto(k_cache, device), v_cache=onto(v_cache, device), block_table=tables, return_lse=True
            )
            assert torch.equal(out[: case.rows], plain[0]) and torch.equal(lse[:, : case.rows], plain[1]), name


@pytest.mark.parametrize("layout", layouts.PAGED_LAYOUTS)
def test_case_18_writes_through_any_strides(device, layout):
    batch = cases.Batch([(0, 20)], heads=(2, 2))
    cache = batch.cache([20], layout=layout)
    slots = cache.table[0].long()[torch.arange(20) // 16] * 16 + torch.arange(20) % 16
    empty = cases.Cache(layout, torch.full_like(cache.k, 5.0), torch.full_like(cache.v, 5.0), *([None] * 4))
    for name, pair in pools(empty).items():
        k_cache, v_cache = (onto(x, device) for x in pair)
        tritonattn.reshape_and_cache(batch.keys[0].to(device), batch.values[0].to(device), k_cache, v_cache, slots.to(device), kv_layout=layout)
        for got, want, needed in ((k_cache, cache.k, cache.needed_k), (v_cache, cache.v, cache.needed_v)):
            assert torch.equal(got.cpu(), torch.where(needed, want, torch.tensor(5.0))), name


@pytest.mark.parametrize("layout", layouts.PAGED_LAYOUTS)
def test_case_20_every_reader_of_what_our_writer_wrote(device, layout):
    batch = cases.Batch([(1, 40)], heads=(4, 2), head_size=64)
    cache = batch.cache([40], layout=layout)
    slots = cache.table[0].long()[torch.arange(40) // 16] * 16 + torch.arange(40) % 16
    k_cache, v_cache = (torch.full_like(x, float("nan")).to(device) for x in (cache.k, cache.v))
    key, value = batch.keys[0].to(device), batch.values[0].to(device)
    tritonattn.reshape_and_cache(key, value, k_cache, v_cache, slots.to(device), kv_layout=layout)
    table, paged = cache.hidden_table.to(device), {"kv_layout": layout}
    got = tritonattn.gather_cache(k_cache, v_cache, table, torch.tensor([5]).int().to(device), torch.tensor([30]).int().to(device), **paged)
    assert torch.equal(got[0], key[5:35]) and torch.equal(got[1], value[5:35])
    for make in (cases.decode, cases.extend):
        for options in ({}, {"window_size": (10, 0)}):
            case = make(batch, layout=layout, options=options)
            args = {name: cases.to(v, device) for name, v in case.args.items()}
            out = getattr(tritonattn, case.op)(**args, k_cache=k_cache, v_cache=v_cache, block_table=table)
            case.oracle().check(out, None, slice(0, 1))


@pytest.mark.parametrize("layout", layouts.PAGED_LAYOUTS)
def test_case_21_gather_keeps_the_heads_apart(device, layout):
    batch = cases.Batch([(0, 5)], heads=(3, 3)).head_ids()
    cache = batch.cache([5], layout=layout)
    k_cache, v_cache, table = (x.to(device) for x in cache.poisoned("nan"))
    starts, lengths = torch.tensor([0]).int().to(device), torch.tensor([5]).int().to(device)
    _, values = tritonattn.gather_cache(k_cache, v_cache, table, starts, lengths, kv_layout=layout)
    assert torch.equal(values.cpu(), torch.arange(3.0)[None, :, None].expand(5, 3, 32))


@pytest.mark.parametrize("layout", layouts.PAGED_LAYOUTS)
def test_case_24_padded_tokens_write_nothing(device, layout):
    """16 rows of keys, 13 slots, two of them -1: 11 slots change, the last slot of the cache is not among them."""
    generator = torch.Generator().manual_seed(0)
    key = torch.randn(16, 2, 32, generator=generator)
    slots = torch.tensor([3, 4, -1, 20, 21, 22, 17, 40, 5, -1, 6, 7, 8])
    key[[2, 9, 13, 14, 15]] = float("nan")
    k_cache, v_cache = (torch.full_like(x, cases.MARK).to(device) for x in layouts.allocate(layout, 3, 16, 2, 32, dtype=torch.float32))
    tritonattn.reshape_and_cache(key.to(device), key.to(device), k_cache, v_cache, slots.to(device), kv_layout=layout)
    for cache in layouts.to_nhd(k_cache.cpu(), v_cache.cpu(), layout):
        rows = cache.flatten(0, 1)
        changed = (rows != cases.MARK).any(-1).any(-1).nonzero().flatten().tolist()
        assert changed == sorted(s for s in slots.tolist() if s >= 0)
        assert torch.equal(rows[slots[slots >= 0]], key[:13][slots >= 0])


@pytest.mark.parametrize("layout", layouts.PAGED_LAYOUTS)
def test_case_25_reserved_block_0(device, layout):
    """Padding entries of the table point at block 0, which holds NaN."""
    for case in (cases.decode([(1, 100), (2, 33)], layout=layout, options={"window_size": (31, 0)}), cases.extend([(3, 50)], layout=layout)):
        case.cache.hidden_table[case.cache.hidden_table == cases.WILD_BLOCK] = 0
        case.check(device)


def test_case_26_layers_with_pages_of_different_size(device):
    """One pool of bytes, pages of 266,240: the first layer's page is half of that, the second one's is padded up to it. Blocks 0 and 50."""
    page, blocks = 266240, 51
    pool = torch.zeros(blocks * page, dtype=torch.uint8)
    for heads, size in ((4, 128), (8, 128)):
        batch = cases.Batch([(1, 30)], heads=(heads, heads), head_size=size, dtype=torch.bfloat16)
        elements = pool.view(torch.bfloat16)
        shape, stride = (blocks, heads, 64, size), (page // 2, 64 * size, size, 1)
        k_cache = elements.as_strided(shape, stride)
        v_cache = elements.as_strided(shape, stride, heads * 64 * size)
        for block in (0, 50):
            pool.fill_(0xFF)
            k_cache[block, :, :30], v_cache[block, :, :30] = batch.keys[0].transpose(0, 1), batch.values[0].transpose(0, 1)
            on_device = pool.to(device).view(torch.bfloat16)
            case = cases.decode(batch)
            args = {name: cases.to(v, device) for name, v in case.args.items()} | {"kv_layout": "hnd"}
            out, lse = tritonattn.decode_attention(
                **args, k_cache=on_device.as_strided(shape, stride), v_cache=on_device.as_strided(shape, stride, heads * 64 * size),
                block_table=torch.tensor([[block, cases.WILD_BLOCK]], dtype=torch.int32, device=device), return_lse=True,
            )  # fmt: skip
            case.oracle().check(out, lse, slice(0, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("gib", [1.9, 2.1, 3.9, 4.1, 9.0])
@pytest.mark.parametrize("layout", layouts.PAGED_LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_cases_13_to_15_high_block_ids(device, layout, dtype, gib):
    """Blocks around 2^31 elements, 2^31 bytes and the end of the cache: as the same data at low ids."""
    batch = cases.Batch([(1, 60), (2, 64)], heads=(16, 8), head_size=128, dtype=torch.bfloat16)
    scale = {"k_descale": 0.5, "v_descale": 0.5} if dtype.itemsize == 1 else {}
    low = cases.decode(batch, layout=layout, kv_dtype=dtype, **scale)
    expected = low.run(device)
    block = 16 * 8 * 128
    blocks = int(gib * 2**30) // (block * dtype.itemsize)
    edges = [2**31 // block, 2**31 // (block * dtype.itemsize)]
    ids = [i for edge in edges for i in (edge - 1, edge, edge + 1, edge - 2) if 0 < i < blocks][:6]
    ids = list(dict.fromkeys([*ids, blocks - 1, blocks - 2, 0, 1, 2, 3, 4, 5, 6, 7]))[:8]
    k_cache, v_cache = layouts.allocate(layout, blocks, 16, 8, 128, dtype=dtype, device=device)
    for cache, clean in ((k_cache, low.cache.k), (v_cache, low.cache.v)):
        cache.view(torch.uint8).fill_(0xFF)
        for at, block_id in enumerate(ids):
            cache[block_id].view(torch.uint8).copy_(clean[low.cache.table.flatten()[[0, 1, 2, 3, 6, 7, 8, 9]][at]].view(torch.uint8))
    table = torch.tensor([ids[:4], ids[4:]], dtype=torch.int32, device=device)
    args = {name: cases.to(value, device) for name, value in low.args.items()}
    out, lse = tritonattn.decode_attention(**args, k_cache=k_cache, v_cache=v_cache, block_table=table, return_lse=True)
    assert torch.equal(out[: low.rows], expected[0]) and torch.equal(lse[:, : low.rows], expected[1])
    keys, values = tritonattn.gather_cache(
        k_cache, v_cache, table, torch.zeros(2, dtype=torch.int32, device=device), torch.tensor([60, 64], dtype=torch.int32, device=device),
        kv_layout=layout, **scale,
    )  # fmt: skip
    assert keys.isfinite().all() and values.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_case_17_queries_around_two_to_the_31_elements(device, beyond):
    """Sequences of 64 tokens: the last ones, as if they were alone."""
    heads, size = 32, 256
    tokens = 2**31 // (heads * size) + beyond
    count = -(-tokens // 64)
    cu = (torch.arange(count + 1, device=device) * 64).clamp(max=tokens).int()
    q = torch.empty(tokens, heads, size, dtype=torch.bfloat16, device=device)
    k, v = (torch.randn(tokens, 1, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    first = int(cu[-3])
    for part in (q[:64], q[first:]):
        part.normal_()
    q[64:first] = 0
    bounds = {"max_seqlen_q": 64, "max_seqlen_k": 64, "causal": True}
    out, lse = tritonattn.flash_attn_varlen_func(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, return_lse=True, **bounds)
    for rows, own in ((slice(0, 64), cu[:2]), (slice(first, tokens), cu[-3:] - first)):
        alone = tritonattn.flash_attn_varlen_func(q[rows], k[rows], v[rows], cu_seqlens_q=own, cu_seqlens_k=own, return_lse=True, **bounds)
        assert torch.equal(out[rows], alone[0]) and torch.equal(lse[:, rows], alone[1])
