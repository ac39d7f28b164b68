"""The oracle itself: against PyTorch written another way, and whether the harness notices what it should."""

import math

import pytest
import torch

from tests import cases
from tritonattn import layouts, reference

SINKS, SLOPES = torch.tensor([0.5, -1.0, 2.0]), torch.tensor([0.5, 0.25, 0.0625])
OPTIONS = [
    {"causal": causal, "window_size": window, "softcap": softcap, "alibi_slopes": slopes, "sinks": sinks, "softmax_scale": scale}
    for causal in (False, True)
    for window in ((-1, -1), (4, 0), (0, 3), (5, 2), (-1, 1))
    for softcap, slopes, sinks, scale in ((0.0, None, None, None), (1.5, SLOPES, SINKS, 0.3))
]


@pytest.mark.parametrize("lens", [(1, 1), (5, 12), (12, 12), (9, 4), (3, 0), (0, 3)])
def test_attend_is_what_torch_computes(lens):
    torch.manual_seed(0)
    q, k, v = torch.randn(lens[0], 3, 8), torch.randn(lens[1], 1, 8), torch.randn(lens[1], 1, 16)
    for options in OPTIONS:
        out, lse = reference.attend(q, k, v, **options)
        other, other_lse = cases.torch_attend(q, k, v, **options)
        torch.testing.assert_close(out, other, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(lse, other_lse, rtol=1e-6, atol=1e-9)


def test_attend_is_sdpa_where_every_row_sees_a_key():
    torch.manual_seed(0)
    q, k, v = (torch.randn(7, heads, 16, dtype=torch.float64) for heads in (4, 2, 2))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    expected = sdpa(*(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, enable_gqa=True)[0].transpose(0, 1)
    torch.testing.assert_close(reference.attend(q, k, v, softmax_scale=None, causal=True)[0], expected)


@pytest.mark.parametrize(("query", "seq", "window", "seen"), [
    (1, 10, (3, 0), [[6, 7, 8, 9]]), (1, 10, (0, 0), [[9]]), (2, 5, (-1, -1), [[0, 1, 2, 3], [0, 1, 2, 3, 4]]),
    (3, 2, (-1, -1), [[], [0], [0, 1]]),
])  # fmt: skip
def test_who_sees_whom(query, seq, window, seen):
    mask = reference.visible(query, seq, True, window)
    assert [row.nonzero().flatten().tolist() for row in mask] == seen


@pytest.mark.parametrize("layout", layouts.PAGED_LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2], ids=str)
def test_paged_ops_read_what_was_written(layout, dtype):
    batch = cases.Batch([(2, 19), (0, 0), (1, 33)], heads=(4, 2), v_head_size=64)
    scale = {"k_descale": 0.5, "v_descale": torch.tensor([0.25, 2.0])}
    cache = batch.cache(batch.seq_lens, layout=layout, dtype=dtype, **scale)
    table, starts = cache.table, [0, 0, 3]
    keys, values = reference.gather_cache(cache.k, cache.v, table, starts, [19, 0, 20], kv_layout=layout, **scale)
    unit = torch.finfo(dtype).eps / 2
    for got, real in ((keys, batch.keys), (values, batch.values)):
        expected = torch.cat([real[0], real[2][3:23]])
        torch.testing.assert_close(got, expected.double(), rtol=unit, atol=0.04 * unit)
    out, lse = reference.decode_attention(
        batch.q, cache.k, cache.v, seqused_k=torch.tensor(batch.seq_lens), block_table=table, kv_layout=layout,
        cu_seqlens_q=cases.cumulative(batch.query_lens), **scale,
    )  # fmt: skip
    keys, values = reference.gather_cache(cache.k, cache.v, table, [0, 0, 0], batch.seq_lens, kv_layout=layout, **scale)
    expected, expected_lse = reference.attend(batch.q[2:3], keys[19:], values[19:], softmax_scale=None, causal=True)
    assert torch.equal(out[2:3], expected) and torch.equal(lse[:, 2:3], expected_lse)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz], ids=str)
def test_quantise_saturates_and_keeps_nan(dtype):
    limit = torch.finfo(dtype).max
    stored = reference.quantise(torch.tensor([[1e6, -1e6, math.inf, -math.inf, limit, math.nan, 0.0, 3.0]]), 0.5, dtype).float()[0]
    assert stored[[0, 2, 4]].tolist() == [limit] * 3 and stored[[1, 3]].tolist() == [-limit] * 2
    assert stored[5].isnan() and stored[6] == 0 and stored[7] == 6


def test_merge_of_parts_is_the_whole():
    torch.manual_seed(0)
    q, k, v = torch.randn(5, 4, 8), torch.randn(30, 2, 8), torch.randn(30, 2, 8)
    sinks = torch.randn(4)
    options = {"softmax_scale": None, "causal": False}
    whole = reference.attend(q, k, v, sinks=sinks, **options)
    first, second = reference.attend(q, k[:9], v[:9], sinks=sinks, **options), reference.attend(q, k[9:], v[9:], **options)
    for got, expected in zip(reference.merge_attn_states(*first, *second), whole, strict=True):
        torch.testing.assert_close(got, expected)


def test_mla_absorbed_is_mla_projected():
    torch.manual_seed(0)
    heads, latent, rope, nope, v_size = 3, 32, 16, 24, 20
    w_k, w_v = torch.randn(heads, nope, latent).double() * 0.1, torch.randn(heads, v_size, latent).double() * 0.1
    rows = torch.randn(21, latent + rope).double()
    cache = torch.zeros(4, 16, latent + rope, dtype=torch.float64)
    table, slots = torch.tensor([[2, 1]]), torch.tensor([*range(32, 48), *range(16, 21)])
    reference.mla_cache_write(rows[:, :latent], rows[:, latent:], cache, slots)
    q_nope, q_rope = torch.randn(2, heads, nope).double(), torch.randn(2, heads, rope).double()

    def up_project(c, r):
        k = torch.cat([torch.einsum("nl,hdl->nhd", c, w_k), r[:, None].expand(-1, heads, -1)], -1)
        return k, torch.einsum("nl,hdl->nhd", c, w_v)

    k, v = up_project(rows[19:, :latent], rows[19:, latent:])
    common = {"block_table": table, "cu_seqlens_q": torch.tensor([0, 2]), "softmax_scale": 0.2, "kv_lora_rank": latent}
    out, lse = reference.mla_extend(
        torch.cat([q_nope, q_rope], -1), k, v, cache.bfloat16().double(), up_project=up_project, context_lens=torch.tensor([19]), **common
    )
    absorbed = (torch.einsum("thd,hdl->thl", q_nope, w_k), q_rope)
    other, other_lse = reference.mla_decode(absorbed, cache.bfloat16().double(), seqused_k=torch.tensor([21]), **common)
    torch.testing.assert_close(out, torch.einsum("thl,hdl->thd", other, w_v), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, other_lse, rtol=1e-2, atol=1e-2)


def test_attend_computes_where_its_tensors_are():
    q, k, v = (torch.empty(3, heads, 8, device="meta") for heads in (4, 2, 2))
    for result in reference.attend(q, k, v, softmax_scale=None, causal=True, window_size=(1, 0), softcap=2.0):
        assert result.is_meta


@pytest.mark.parametrize("fault", ["scaled", "shifted window", "lse base", "lse of empty", "nan"])
def test_the_oracle_notices(fault):
    case = cases.prefill([(20, 20), (3, 0)], dtype=torch.bfloat16, options={"causal": True, "window_size": (5, 0)})
    oracle = case.oracle()
    out, lse = oracle.out.clone(), oracle.lse.clone()
    oracle.check(out.bfloat16(), lse.float())
    if fault == "scaled":
        out *= 1.05
    elif fault == "shifted window":
        out, lse = case.but(window_size=(6, 0)).oracle().out, lse
    elif fault == "lse base":
        lse /= math.log(2)
    elif fault == "lse of empty":
        lse[lse == -math.inf] = math.inf
    else:
        out[21] = math.nan
    with pytest.raises(AssertionError):
        oracle.check(out.bfloat16(), lse.float())
