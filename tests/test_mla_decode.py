"""Absorbed MLA decode against the float64 reference."""

import math

import pytest
import torch

import tritonattn
from tests import cases, mla_cases
from tritonattn import mla
from tritonattn.plan import decode_plan
from tritonattn.problem import AttnProblem
from tritonattn.tuning.arch import by_name

RAGGED = [(1, 33), (2, 7), (0, 0), (0, 5), (1, 64)]


@pytest.fixture
def bad_scratch(monkeypatch):
    """Scratch comes filled with NaN."""
    monkeypatch.setattr(mla.Fresh, "take", lambda self, _, numel, dtype: torch.full((numel,), math.nan, dtype=dtype, device=self.device))


@pytest.mark.parametrize("heads", [1, 4, 6, 8, 12, 16, 20, 32, 96, 128])
def test_any_number_of_heads(device, heads):
    mla_cases.decode([(1, 33), (1, 7)], heads=heads).check(device)


@pytest.mark.parametrize("heads,query_lens", [(3, [4, 1, 3]), (16, [4, 2, 4]), (20, [3, 3, 1]), (5, [17, 1, 2])])
@pytest.mark.parametrize("causal", [True, False])
def test_ragged_query_tokens(device, heads, query_lens, causal):
    lens = list(zip(query_lens, [40, 5, 19], strict=True))
    mla_cases.decode(lens, heads=heads, options={"causal": causal}).check(device)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("block_size", [1, 16, 48, 64, 24])
def test_block_sizes(device, block_size, num_splits):
    mla_cases.decode([(1, 127), (2, 64), (1, 1), (1, 65)], block_size=block_size).check(device, num_splits=num_splits)


@pytest.mark.parametrize("num_splits", [1, 2, 4, 16, 32, 64])
@pytest.mark.parametrize("longest", [1, 2, 15, 16, 17, 33])
def test_more_splits_than_work(device, longest, num_splits, bad_scratch):
    mla_cases.decode([(1, longest), (1, 1)]).check(device, num_splits=num_splits)


@pytest.mark.parametrize("latent,rope", [(512, 64), (256, 64), (64, 32), (80, 16), (48, 48), (32, 16), (192, 64)])
def test_latent_and_rope_sizes(device, latent, rope):
    mla_cases.decode([(2, 35), (1, 16)], latent=latent, rope=rope).check(device, num_splits=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("latent,rope", [(64, 16), (512, 64)])
def test_dtypes(device, dtype, latent, rope):
    mla_cases.decode([(1, 130), (2, 31)], latent=latent, rope=rope, dtype=dtype, heads=16).check(device)


def test_query_as_a_pair_has_the_same_bits(device):
    case = mla_cases.decode(RAGGED)
    q = case.args["q"]
    one = case.check(device, num_splits=3)
    two = case.run(device, num_splits=3, q=(q[..., :64].contiguous(), q[..., 64:].contiguous()))
    assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])


def test_query_pair_may_be_strided(device):
    """Views into wider buffers: a head-major latent part, a rope part with a gap between tokens."""
    case = mla_cases.decode(RAGGED)
    q = case.args["q"]
    rope = torch.full((*q.shape[:2], 33), math.nan)[..., 1:17]
    rope.copy_(q[..., 64:])
    pair = (q[..., :64].transpose(0, 1).contiguous().transpose(0, 1), rope)
    assert torch.equal(case.run(device, q=pair)[0], case.run(device)[0])


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31])
def test_dead_slots_never_show(device, length, bad_scratch):
    case = mla_cases.decode([(1, length), (1, 5)], options={"num_splits": 4})
    clean = case.run(device, "zero")
    for poison in ("nan", "inf", "huge"):
        got = case.run(device, poison)
        assert torch.equal(got[0], clean[0]) and torch.equal(got[1], clean[1])


@pytest.mark.parametrize("num_splits", [1, 4])
def test_empty_sequences_and_padding(device, num_splits, bad_scratch):
    """A sequence of length 0 with a query token, one without, and rows of padding that hold NaN; without `out` they come as 0."""
    batch = mla_cases.Batch([(1, 9), (1, 0), (0, 5), (2, 30)])
    case = mla_cases.decode(batch)
    out, lse = case.check(device, num_splits=num_splits)
    assert (out[1] == 0).all() and (lse[:, 1] == -math.inf).all()
    args = {name: cases.to(value, device) for name, value in case.args.items()}
    args |= {"kv_cache": case.cache.poisoned("nan").to(device), "block_table": case.cache.table.to(device)}
    fresh, fresh_lse = tritonattn.mla_decode(**args, num_splits=num_splits, return_lse=True)
    assert torch.equal(fresh[: batch.tokens], out)
    assert (fresh[batch.tokens :] == 0).all() and (fresh_lse[:, batch.tokens :] == -math.inf).all()


def test_new_tokens_without_context(device):
    """As many keys as query tokens: the first row of each sequence sees one key."""
    mla_cases.decode([(4, 4), (4, 16), (1, 1)]).check(device, num_splits=2)


def test_zero_query_weighs_all_visible_keys_alike(device):
    """Latent rows as unit vectors, q = 0: row i of a request sees seq - 4 + i + 1 keys with 1 / n each, the others exactly 0."""
    batch = mla_cases.Batch([(4, 16), (4, 5), (4, 4)])
    batch.q.zero_()
    for rows in batch.rows:
        rows.copy_(torch.eye(*rows.shape))
    out, _ = mla_cases.decode(batch).run(device)
    for request, length in enumerate(batch.seq_lens):
        for row in range(4):
            seen = length - 4 + row + 1
            weights = out[request * 4 + row, 0].cpu()
            torch.testing.assert_close(weights[:seen], torch.full((seen,), 1.0 / seen))
            assert (weights[seen:] == 0).all()


def test_non_causal_rows_see_all_keys(device):
    batch = mla_cases.Batch([(2, 10)])
    batch.q.zero_()
    batch.rows[0].copy_(torch.eye(10, 80))
    out, _ = mla_cases.decode(batch, options={"causal": False}).run(device)
    torch.testing.assert_close(out[:, :, :10].cpu(), torch.full((2, 3, 10), 0.1))


def test_many_requests_of_several_tokens(device):
    """The table of each request is its own, to the last one."""
    mla_cases.decode([(3, 7 + i % 5) for i in range(256 if device.type == "cuda" else 48)], block_size=4, heads=1).check(device)


def test_uniform_query_tokens_need_no_offsets(device):
    case = mla_cases.decode([(2, 30), (2, 5)])
    assert torch.equal(case.run(device, cu_seqlens_q=None)[0], case.run(device)[0])


@pytest.mark.parametrize("num_splits", [0, 64])
def test_long_beside_short(device, num_splits):
    mla_cases.decode([(1, 1), (1, 4096)], block_size=64, heads=2).check(device, num_splits=num_splits)


def test_strided_cache_has_the_same_bits(device):
    dense, aligned = (mla_cases.decode(RAGGED, gap=gap).run(device)[0] for gap in (0, 80))
    assert torch.equal(dense, aligned)


@pytest.mark.parametrize("heads", [3, 70])
@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
def test_strides_of_no_16_bytes(device, heads, fp8):
    """They have table rows of their own."""
    kv_dtype = cases.fp8_dtypes(device)[0] if fp8 else None
    for shape in ({}, {"latent": 512, "rope": 64}):
        mla_cases.decode([(2, 30), (1, 70)], heads=heads, gap=7, dtype=torch.bfloat16, kv_dtype=kv_dtype, **shape).check(device)


DESCALES = [{"kv_descale": 0.25}, {"kv_descale": torch.tensor([0.25])}, {"kv_descale": 0.5, "rope_descale": 2.0},
            {"kv_descale": torch.tensor([0.5]), "rope_descale": torch.tensor(2.0), "q_descale": 1.5},
            {"rope_descale": torch.tensor([2.0])}]  # fmt: skip


@pytest.mark.parametrize("descales", DESCALES, ids=str)
@pytest.mark.parametrize("num_splits", [1, 3])
def test_fp8_cache(device, descales, num_splits):
    for kv_dtype in cases.fp8_dtypes(device):
        mla_cases.decode([(2, 65), (1, 20)], dtype=torch.bfloat16, kv_dtype=kv_dtype, **descales).check(device, num_splits=num_splits)


def test_fp8_query(device):
    for dtype in cases.fp8_dtypes(device):
        mla_cases.decode([(1, 40)], dtype=torch.bfloat16, kv_dtype=dtype, fp8_q=dtype, q_descale=2.0, kv_descale=0.5).check(device)


def test_own_descale_keeps_a_small_latent_beside_a_large_rope(device):
    """Latent of magnitude 0.05, rope of 1: the scores need the rope, the output is the latent."""
    for kv_dtype in cases.fp8_dtypes(device):
        batch = mla_cases.Batch([(1, 60)], dtype=torch.bfloat16)
        batch.rows[0][:, :64] *= 0.05
        limit = torch.finfo(kv_dtype).max
        descales = {"kv_descale": 0.05 * 4 / limit, "rope_descale": 4 / limit}
        case = mla_cases.decode(batch, kv_dtype=kv_dtype, **descales)
        out, _ = case.check(device)
        exact, _ = mla_cases.decode(batch).run(device)
        error = (out.double() - exact.double()).norm() / exact.double().norm()
        assert error < (0.07 if "e4m3" in str(kv_dtype) else 0.14)


def test_large_scores_stay_finite(device):
    mla_cases.decode(mla_cases.Batch([(1, 40)], magnitude=1e4), options={"softmax_scale": 1.0}).check(device, num_splits=4)


@pytest.mark.parametrize("switches", [{}, {"SCORES_ONCE": True}, {"TAIL_APART": True}, {"SCORES_ONCE": True, "TAIL_APART": True}], ids=str)
def test_forms_of_the_kernel(device, switches):
    from tritonattn.tuning import arch, table

    base = arch.detect(device)
    if "SCORES_ONCE" in switches and base.backend == "hip":
        pytest.skip("Triton 3.6 cannot compile it for AMD")
    config = {"BLOCK_H": 16, "BLOCK_N": 16, "NUM_STAGES": 2, "num_warps": 4, "num_stages": 2, "form": "tile", "programs_per_cu": 1, **switches}
    with arch.assume(table.pin(base, mla_decode=config)):
        for block_size in (16, 24):
            for causal in (True, False):
                case = mla_cases.decode([(1, 70), (4, 9), (3, 40), (20, 33), (1, 16)], block_size=block_size, options={"causal": causal})
                case.check(device, num_splits=1)
                case.check(device, num_splits=3)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_deepseek_sizes(device, heads, kv_dtype):
    descales = {"kv_descale": 0.01, "rope_descale": 0.02} if kv_dtype.itemsize == 1 else {}
    case = mla_cases.decode(
        [(1, 4097), (4, 700), (0, 0), (2, 63)], heads=heads, latent=512, rope=64, block_size=64, dtype=torch.bfloat16, kv_dtype=kv_dtype,
        **descales,
    )  # fmt: skip
    for num_splits in (0, 1, 7):
        case.check(device, num_splits=num_splits)


@pytest.mark.parametrize("block_size, rest", [
    (64, {}),
    (16, {"options": {"causal": False}}),
    (48, {"kv_descale": 0.5, "rope_descale": 0.25}),
    (128, {"dtype": torch.float16}),
])  # fmt: skip
def test_many_heads(device, block_size, rest):
    """Rows of 512 + 64 and 64 query rows a program; on CDNA every tile of 256 tokens is full, ragged or both."""
    rest = {"dtype": torch.bfloat16, **rest}
    case = mla_cases.decode([(4, 300), (1, 257), (0, 0), (5, 256), (1, 1)], heads=16, latent=512, rope=64, block_size=block_size, **rest)
    for num_splits in (1, 2):
        case.check(device, num_splits=num_splits)


# -- plan -----------------------------------------------------------------------------------------------------


def plan(arch, num_seqs, length, heads, max_seqlen_q=1):
    problem = AttnProblem(heads, 1, 576, 512, torch.bfloat16, torch.bfloat16, "latent", 64, True)
    return decode_plan(by_name(arch), problem, num_seqs, max_seqlen_q, length)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "sm_90"])
@pytest.mark.parametrize("heads", [1, 12, 16, 128])
def test_plan_fills_the_device_and_no_more(arch, heads):
    long = plan(arch, 1, 131072, heads)
    assert long.num_splits * long.row_blocks >= by_name(arch).compute_units // 4
    splits = [plan(arch, batch, 8192, heads).num_splits for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)]
    assert splits == sorted(splits, reverse=True) and splits[-1] == 1
    assert plan(arch, 1, 1, heads).num_splits == 1


# -- errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes,words", [
    ({"q": torch.zeros(1, 4, 96)}, ["q must be", "80"]),
    ({"q": (torch.zeros(1, 4, 64), torch.zeros(1, 4, 32))}, [r"q\[1\] must be \[1, 4, 16\]"]),
    ({"q": (torch.zeros(1, 4, 64),)}, ["pair"]),
    ({"kv_lora_rank": 72}, ["latent columns", "multiple of 16", "rope columns"]),
    ({"kv_lora_rank": "x"}, ["kv_lora_rank must be an int"]),
    ({"softmax_scale": None}, ["softmax_scale"]),
    ({"block_table": torch.zeros(2, 3, dtype=torch.int32), "num_splits": -1}, ["block_table", "num_splits"]),
    ({"seqused_k": torch.tensor([20])}, ["seqused_k", "int32"]),
    ({"max_seqlen_q": 2}, ["q must hold"]),
    ({"q": torch.zeros(1, 4, 80, dtype=torch.bfloat16)}, ["kv_cache must be"]),
    ({"rope_descale": -1.0}, ["rope_descale"]),
    ({"out": torch.zeros(1, 4, 80)}, ["out must be"]),
])  # fmt: skip
def test_bad_input_is_named(changes, words):
    args = {"q": torch.zeros(1, 4, 80), "kv_cache": torch.zeros(3, 16, 80), "seqused_k": torch.tensor([20]).int(), "max_seqlen_k": 20,
            "block_table": torch.zeros(1, 2, dtype=torch.int32), "softmax_scale": 0.1, "kv_lora_rank": 64, **changes}  # fmt: skip
    with pytest.raises((ValueError, TypeError)) as error:
        mla.mla_decode(**args)
    for word in words:
        error.match(word)


@pytest.mark.gpu
def test_capture_and_replay(device):
    """Captured once for the longest sequence; lengths and descale change between replays."""
    case = mla_cases.decode([(1, 500), (1, 33)], heads=16, latent=512, rope=64, block_size=64, dtype=torch.bfloat16)
    args = {name: cases.to(value, device) for name, value in case.args.items()}
    args |= {"kv_cache": case.cache.clean.to(device), "block_table": case.cache.table.to(device), "kv_descale": torch.ones(1, device=device)}
    out = torch.zeros(*args["q"].shape[:2], 512, dtype=torch.bfloat16, device=device)
    tritonattn.mla_decode(**args, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tritonattn.mla_decode(**args, out=out)
    for lengths, scale in (([500, 33], 1.0), ([100, 1], 0.5), ([0, 20], 2.0)):
        args["seqused_k"].copy_(torch.tensor(lengths))
        args["kv_descale"].fill_(scale)
        graph.replay()
        assert torch.equal(out[:2], tritonattn.mla_decode(**args)[:2])
