"""Absorbed MLA decode against the float64 reference: dead slots and scratch poisoned, output rows that belong to nobody watched."""

import math

import pytest
import torch

from tritonattn import mla, reference
from tritonattn.plan import decode_plan
from tritonattn.problem import AttnProblem
from tritonattn.tuning.arch import by_name

SENTINEL = 777.0
FP8 = torch.float8_e4m3fn


def offsets(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int()


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


def poison(cache, value=math.nan):
    """In place; fp8 by its code of NaN."""
    if cache.dtype.itemsize == 1:
        cache.view(torch.uint8).fill_(0x7F)
    else:
        cache.fill_(value)
    return cache


def latent_cache(lengths, block_size, width, dtype, *, scale=1.0, spare=3, dead=math.nan, seed=0, pad=0):
    """(cache, table): sequences in shuffled blocks, every slot that no sequence owns holding `dead`, table entries past the end huge.

    pad: elements between blocks.
    """
    gen = torch.Generator().manual_seed(seed)
    counts = [-(-n // block_size) for n in lengths]
    total = sum(counts) + spare
    storage = poison(torch.empty(total, block_size * width + pad, dtype=dtype), dead)
    cache = storage[:, : block_size * width].unflatten(1, (block_size, width))
    order = torch.randperm(total, generator=gen).int()
    table = torch.full((len(lengths), max([*counts, 1]) + 1), 10**8, dtype=torch.int32)
    at = 0
    for i, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        blocks = order[at : at + count]
        at += count
        table[i, :count] = blocks
        for j, block in enumerate(blocks.tolist()):
            live = min(block_size, length - j * block_size)
            cache[block, :live] = (torch.randn(live, width, generator=gen) * scale).to(dtype)
    return cache, table


def queries(tokens, heads, width, dtype, seed=1):
    return torch.randn(tokens, heads, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def assert_close(out, lse, expected, expected_lse, dtype):
    finite = torch.isfinite(expected_lse)
    assert torch.equal(torch.isfinite(lse), finite)
    assert not torch.isnan(lse).any()
    torch.testing.assert_close(lse.double()[finite], expected_lse[finite], rtol=1e-5, atol=1e-4 if dtype is torch.float32 else 2e-2)
    tolerance = TOLERANCE[dtype] * max(1.0, expected.abs().max().item())
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=tolerance)


def check(lengths, query_lens, *, heads=4, latent=64, rope=16, block_size=16, dtype=torch.float32, kv_dtype=None, splits=0, pair=False,
          causal=True, scale=None, pad=0, **descales):  # fmt: skip
    kv_dtype = dtype if kv_dtype is None else kv_dtype
    cache, table = latent_cache(lengths, block_size, latent + rope, kv_dtype, pad=pad)
    tokens = sum(query_lens)
    q = queries(tokens, heads, latent + rope, dtype)
    out = torch.full((tokens + 2, heads, latent + 16), SENTINEL, dtype=dtype)[:tokens, :, :latent]
    whole = out._base
    common = {
        "seqused_k": ints(lengths), "block_table": table, "cu_seqlens_q": offsets(query_lens), "max_seqlen_q": max(query_lens),
        "max_seqlen_k": max(lengths), "softmax_scale": scale or (latent + rope) ** -0.5, "kv_lora_rank": latent, "causal": causal,
        **descales,
    }  # fmt: skip
    given = (q[..., :latent].contiguous(), q[..., latent:].contiguous()) if pair else q
    got, lse = mla.mla_decode(given, cache, num_splits=splits, out=out, return_lse=True, **common)
    expected, expected_lse = reference.mla_decode(q, cache, **common)
    assert_close(got, lse, expected, expected_lse, dtype)
    assert (whole[tokens:] == SENTINEL).all()
    assert (whole[:, :, latent:] == SENTINEL).all()
    return got, lse


@pytest.mark.parametrize("heads", [1, 4, 6, 8, 12, 16, 20, 32, 96, 128])
def test_any_number_of_heads(heads):
    check([33, 7], [1, 1], heads=heads)


@pytest.mark.parametrize("heads,query_lens", [(3, [4, 1, 3]), (16, [4, 2, 4]), (20, [3, 3, 1]), (5, [17, 1, 2])])
@pytest.mark.parametrize("causal", [True, False])
def test_ragged_query_tokens(heads, query_lens, causal):
    check([40, 5, 19], query_lens, heads=heads, causal=causal)


@pytest.mark.parametrize("block_size", [1, 16, 48, 64, 24])
@pytest.mark.parametrize("splits", [1, 3])
def test_block_sizes(block_size, splits):
    check([127, 64, 1, 65], [1, 2, 1, 1], block_size=block_size, splits=splits)


@pytest.mark.parametrize("splits", [1, 2, 4, 16, 32, 64])
@pytest.mark.parametrize("longest", [1, 2, 15, 16, 17, 33])
def test_more_splits_than_work(longest, splits):
    check([longest, 1], [1, 1], splits=splits, block_size=16)


@pytest.mark.parametrize("latent,rope", [(512, 64), (256, 64), (64, 32), (80, 16), (48, 48), (16, 16), (192, 64)])
def test_latent_and_rope_sizes(latent, rope):
    check([35, 16], [2, 1], latent=latent, rope=rope, splits=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("latent,rope", [(64, 16), (512, 64)])
def test_dtypes(dtype, latent, rope):
    check([130, 31], [1, 2], latent=latent, rope=rope, dtype=dtype, scale=192**-0.5)


def test_query_as_a_pair_has_the_same_bits():
    one, lse = check([70, 33], [2, 1], pair=False, splits=3)
    two, lse_two = check([70, 33], [2, 1], pair=True, splits=3)
    assert torch.equal(one, two) and torch.equal(lse, lse_two)


def test_query_pair_is_not_copied_and_may_be_strided():
    """The pair as views into wider buffers: head-major latent part, rope part with a gap between tokens."""
    cache, table = latent_cache([37], 16, 80, torch.float32)
    q = queries(1, 6, 80, torch.float32)
    latent = torch.empty(6, 1, 64).transpose(0, 1)
    latent.copy_(q[..., :64])
    rope = torch.full((1, 6, 33), math.nan)[..., 1:17]
    rope.copy_(q[..., 64:])
    common = {"seqused_k": ints([37]), "block_table": table, "max_seqlen_k": 37, "softmax_scale": 0.1, "kv_lora_rank": 64}
    assert torch.equal(mla.mla_decode((latent, rope), cache, **common), mla.mla_decode(q, cache, **common))


@pytest.mark.parametrize("dead", [math.nan, math.inf, 6e4])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 31])
def test_dead_slots_never_show(length, dead, scratch_poison):
    args = {"seqused_k": ints([length, 5]), "max_seqlen_k": 64, "softmax_scale": 0.2, "kv_lora_rank": 64, "num_splits": 4}
    q = queries(2, 3, 80, torch.float32)
    clean, table = latent_cache([length, 5], 16, 80, torch.float32, dead=0.0)
    poisoned, _ = latent_cache([length, 5], 16, 80, torch.float32, dead=dead)
    expected = mla.mla_decode(q, clean, block_table=table, return_lse=True, **args)
    got = mla.mla_decode(q, poisoned, block_table=table, return_lse=True, **args)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


@pytest.fixture
def scratch_poison(monkeypatch):
    """Scratch comes filled with NaN."""
    monkeypatch.setattr(mla.Fresh, "take", lambda self, name, numel, dtype: torch.full((numel,), math.nan, dtype=dtype))


@pytest.mark.parametrize("splits", [1, 4])
def test_empty_sequences_and_padding(splits, scratch_poison):
    """A sequence of length 0, one without query tokens, query rows past the last sequence that hold NaN."""
    lengths, query_lens = [9, 0, 5, 30], [1, 1, 0, 2]
    cache, table = latent_cache(lengths, 16, 80, torch.float32)
    q = queries(6, 4, 80, torch.float32)
    q[4:] = math.nan
    common = {
        "seqused_k": ints(lengths), "block_table": table, "cu_seqlens_q": offsets(query_lens), "max_seqlen_q": 2, "max_seqlen_k": 30,
        "softmax_scale": 0.2, "kv_lora_rank": 64,
    }  # fmt: skip
    out, lse = mla.mla_decode(q, cache, num_splits=splits, return_lse=True, **common)
    expected, expected_lse = reference.mla_decode(q, cache, **common)
    assert_close(out, lse, expected, expected_lse, torch.float32)
    assert (out[1] == 0).all() and (lse[:, 1] == -math.inf).all()
    assert (out[4:] == 0).all() and (lse[:, 4:] == -math.inf).all()


def test_new_tokens_without_context():
    """As many keys as query tokens: the first row of each sequence sees one key."""
    check([4, 16, 1], [4, 4, 1], heads=3, splits=2)


def test_zero_query_weighs_all_visible_keys_alike():
    """Latent rows as unit vectors, q = 0: row i of a request sees seq - 4 + i + 1 keys with 1 / n each, the others exactly 0."""
    lengths = [16, 5, 4]
    cache, table = latent_cache(lengths, 16, 80, torch.float32)
    for i, length in enumerate(lengths):
        cache[table[i, 0], :length] = torch.eye(64, 80)[:length]
    out = mla.mla_decode(
        torch.zeros(12, 2, 80), cache, seqused_k=ints(lengths), block_table=table, max_seqlen_q=4, max_seqlen_k=16, softmax_scale=1.0,
        kv_lora_rank=64,
    )  # fmt: skip
    for request, length in enumerate(lengths):
        for row in range(4):
            seen = length - 4 + row + 1
            weights = out[request * 4 + row, 0]
            torch.testing.assert_close(weights[:seen], torch.full((seen,), 1.0 / seen))
            assert (weights[seen:] == 0).all()


def test_many_requests_of_several_tokens():
    """The table of each request is its own, to the last one."""
    check([7 + i % 5 for i in range(24)], [3] * 24, heads=2, block_size=4)


@pytest.mark.parametrize("length,splits", [(4096, 0), (4096, 64)])
def test_long_beside_short(length, splits):
    check([1, length], [1, 1], heads=2, splits=splits, block_size=64)


def test_strided_cache_has_the_same_bits():
    lengths = [50, 17]
    args = {"seqused_k": ints(lengths), "max_seqlen_k": 50, "softmax_scale": 0.2, "kv_lora_rank": 64}
    q = queries(2, 4, 80, torch.float32)
    dense, table = latent_cache(lengths, 16, 80, torch.float32)
    results = [mla.mla_decode(q, dense, block_table=table, **args)]
    for pad in (80, 7):
        strided, _ = latent_cache(lengths, 16, 80, torch.float32, pad=pad)
        results.append(mla.mla_decode(q, strided, block_table=table, **args))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("descales", [{"kv_descale": 0.25}, {"kv_descale": torch.tensor([0.25])}, {"kv_descale": 0.5, "rope_descale": 2.0},
                                      {"kv_descale": torch.tensor([0.5]), "rope_descale": torch.tensor(2.0), "q_descale": 1.5},
                                      {"rope_descale": torch.tensor([2.0])}])  # fmt: skip
@pytest.mark.parametrize("splits", [1, 3])
def test_fp8_cache(descales, splits):
    check([65, 20], [2, 1], dtype=torch.bfloat16, kv_dtype=FP8, splits=splits, **descales)


def test_fp8_query():
    cache, table = latent_cache([40], 16, 80, FP8)
    q = queries(1, 4, 80, FP8)
    common = {"seqused_k": ints([40]), "block_table": table, "max_seqlen_k": 40, "softmax_scale": 0.1, "kv_lora_rank": 64, "q_descale": 2.0,
              "kv_descale": 0.5}  # fmt: skip
    out, lse = mla.mla_decode(q, cache, return_lse=True, **common)
    assert out.dtype is torch.bfloat16
    assert_close(out, lse, *reference.mla_decode(q, cache, **common), torch.bfloat16)


def test_same_bits_twenty_times():
    cache, table = latent_cache([100, 3], 16, 80, torch.float32)
    q = queries(2, 4, 80, torch.float32)
    args = {"seqused_k": ints([100, 3]), "block_table": table, "max_seqlen_k": 100, "softmax_scale": 0.2, "kv_lora_rank": 64}
    args["num_splits"] = 5
    first = mla.mla_decode(q, cache, **args)
    assert all(torch.equal(first, mla.mla_decode(q, cache, **args)) for _ in range(19))


def test_large_scores_stay_finite():
    cache, table = latent_cache([40], 16, 80, torch.float32, scale=100.0)
    q = queries(1, 2, 80, torch.float32) * 100
    common = {"seqused_k": ints([40]), "block_table": table, "max_seqlen_k": 40, "softmax_scale": 1.0, "kv_lora_rank": 64}
    out, lse = mla.mla_decode(q, cache, return_lse=True, num_splits=4, **common)
    assert_close(out, lse, *reference.mla_decode(q, cache, **common), torch.float32)


# -- plan -----------------------------------------------------------------------------------------------------


def plan(arch, num_seqs, length, heads, max_seqlen_q=1):
    problem = AttnProblem(heads, 1, 576, 512, torch.bfloat16, torch.bfloat16, "latent", 64, True)
    return decode_plan(by_name(arch), problem, num_seqs, max_seqlen_q, length)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "sm_90"])
def test_plan_fills_the_device_and_no_more(arch):
    units = by_name(arch).compute_units
    for heads in (1, 12, 16, 128):
        single = plan(arch, 1, 131072, heads)
        assert single.num_splits * single.row_blocks >= units // 4
        splits = [plan(arch, batch, 8192, heads).num_splits for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)]
        assert splits == sorted(splits, reverse=True)
        assert splits[-1] == 1
        assert plan(arch, 1, 1, heads).num_splits == 1


# -- errors ---------------------------------------------------------------------------------------------------


def bad_call(**changes):
    cache, table = latent_cache([20], 16, 80, torch.float32)
    args = {"q": torch.zeros(1, 4, 80), "kv_cache": cache, "seqused_k": ints([20]), "block_table": table, "max_seqlen_k": 20,
            "softmax_scale": 0.1, "kv_lora_rank": 64, **changes}  # fmt: skip
    return mla.mla_decode(args.pop("q"), args.pop("kv_cache"), **args)


@pytest.mark.parametrize("changes,words", [
    ({"q": torch.zeros(1, 4, 96)}, ["q must be", "80"]),
    ({"q": (torch.zeros(1, 4, 64), torch.zeros(1, 4, 32))}, [r"q\[1\] must be \[1, 4, 16\]"]),
    ({"q": (torch.zeros(1, 4, 64),)}, ["pair"]),
    ({"kv_lora_rank": 72}, ["latent columns", "multiple of 16", "rope columns"]),
    ({"softmax_scale": None}, ["softmax_scale"]),
    ({"block_table": torch.zeros(2, 3, dtype=torch.int32), "num_splits": -1}, ["block_table", "num_splits"]),
    ({"seqused_k": torch.tensor([20])}, ["seqused_k", "int32"]),
    ({"max_seqlen_q": 2}, ["q must hold"]),
    ({"q": torch.zeros(1, 4, 80, dtype=torch.bfloat16)}, ["kv_cache must be"]),
    ({"rope_descale": -1.0}, ["rope_descale"]),
    ({"out": torch.zeros(1, 4, 80)}, ["out must be"]),
])  # fmt: skip
def test_bad_input_is_named(changes, words):
    with pytest.raises((ValueError, TypeError)) as error:
        bad_call(**changes)
    for word in words:
        error.match(word)
