"""Cases from the field about empty, masked and padded work; a test is named after the number of its case."""

import math
import warnings

import pytest
import torch

import tritonattn
from tests import cases
from tritonattn import layouts

SINKS = torch.tensor([0.5, -1.0, 2.0])
SPLITS = pytest.mark.parametrize("num_splits", [1, 4])


def assert_same(got, want):
    """Bit for bit."""
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dead", [math.nan, math.inf, 777.0], ids=str)
def test_case_1_merge_selects_the_live_side(device, dead):
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(4, 2, 64, generator=generator) for _ in range(2))
    lse_a = torch.tensor([-math.inf, -math.inf, 0.3, -80.0]).expand(2, 4).contiguous()
    lse_b = torch.tensor([-math.inf, 0.3, -math.inf, -90.0]).expand(2, 4).contiguous()
    dirty_a, dirty_b = a.clone(), b.clone()
    dirty_a[[0, 1]] = dead
    dirty_b[[0, 2]] = dead
    args = [x.to(device) for x in (dirty_a, lse_a, dirty_b, lse_b)]
    out, lse = (x.cpu() for x in tritonattn.merge_attn_states(*args, return_lse=True))
    assert (out[0] == 0).all() and (lse[:, 0] == -math.inf).all()
    assert torch.equal(out[1], b[1]) and torch.equal(out[2], a[2])
    torch.testing.assert_close(out[3], a[3] + (b[3] - a[3]) / (1 + math.exp(10)))
    assert torch.equal(lse[:, 1:3], torch.full((2, 2), 0.3))


def test_case_2_empty_rows_have_lse_minus_infinity(device):
    case = cases.prefill([(5, 9), (4, 0), (3, 3)])
    _, lse = case.check(device)
    assert (lse[:, 5:9] == -math.inf).all()
    cases.prefill([(4, 0), (2, 0)], options={"causal": True}).check(device)


@pytest.mark.parametrize("empty", [-math.inf, math.inf])
def test_case_2_merge_takes_either_infinity_as_empty(device, empty):
    a, b = torch.full((3, 2, 32), math.nan, device=device), torch.randn(3, 2, 32, device=device)
    lse_a, lse_b = torch.full((2, 3), empty, device=device), torch.randn(2, 3, device=device)
    out, lse = tritonattn.merge_attn_states(a, lse_a, b, lse_b, return_lse=True)
    assert torch.equal(out, b)
    torch.testing.assert_close(lse, lse_b, rtol=1e-6, atol=0)


@pytest.mark.parametrize("chunk", [16, 64, 100])
def test_case_4_chunk_size_changes_nothing(device, chunk):
    """Contexts just below, at and above the edges of the chunk, and two requests, one of which ends before the last chunk."""
    for contexts in ((chunk - 1, 2 * chunk + 1), (chunk, chunk + 1), (2 * chunk,)):
        case = cases.extend([(2, 2 + context) for context in contexts], layout="preshuffled")
        case.check(device, chunk_tokens=chunk)


@SPLITS
@pytest.mark.parametrize("layout", ["hnd", "preshuffled"])
def test_case_5_a_padded_row_spoils_nobody(device, layout, num_splits):
    batch = cases.Batch([(1, 5), (1, 9), (1, 3)])
    alone = cases.decode(batch, layout=layout).check(device, num_splits=num_splits)
    padded = cases.decode(batch, layout=layout)
    padded.cache.hidden_table = torch.cat([padded.cache.hidden_table, torch.full_like(padded.cache.hidden_table[:1], cases.WILD_BLOCK)])
    changes = {"seqused_k": torch.tensor([5, 9, 3, 0]).int(), "cu_seqlens_q": None, "num_splits": num_splits}
    padded.rows = 4  # the padded row is computed: 0, LSE -inf
    padded.args["q"] = batch.q[:4]
    out, lse = padded.run(device, **changes)
    assert_same((out[:3], lse[:, :3]), alone)
    assert (out[3] == 0).all() and (lse[:, 3] == -math.inf).all()


@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
@pytest.mark.parametrize("layout", ["nhd", "hnd", "preshuffled"])
def test_case_6_dead_slots(device, layout, fp8):
    """Of K and of V: 15, 0, 1 and 13 of them in the last block."""
    shape = {"layout": layout, "kv_dtype": cases.fp8_dtypes(device)[0] if fp8 else torch.float32}
    for case in (cases.decode([(1, 17), (1, 16), (1, 1), (2, 15), (1, 35)], **shape), cases.extend([(2, 19), (3, 18), (1, 4)], **shape)):
        clean = case.run(device, "zero")
        for poison in ("nan", "inf", "huge"):
            assert_same(case.run(device, poison), clean)


@SPLITS
@pytest.mark.parametrize("block_size", [16, 4, 20])
@pytest.mark.parametrize("layout", ["nhd", "preshuffled"])
def test_case_7_blocks_left_of_the_window(device, layout, block_size, num_splits):
    """Also where no 16 tokens fit a block, or a block ends anywhere between two multiples of 16: their table entries are no blocks."""
    shape = {"layout": layout, "block_size": block_size, "options": {"window_size": (31, 0)}}
    cases.decode([(1, 200), (2, 90)], **shape).check(device, num_splits=num_splits)
    lens = [(3, 200), (20, 90), (2, 63), (2, 55)]
    cases.extend(lens, **shape).check(device, chunk_tokens=32)
    cases.extend(lens, shared=True, **shape).check(device, chunk_tokens=32)
    cases.Mixed(cases.Batch(lens), **shape).check(device, chunk_tokens=32)


def test_case_8_windowed_prefill_is_finite(device):
    window = {"window_size": (3, 0), "causal": True}
    cases.prefill([(64, 128)], options=window).check(device)
    cases.extend([(64, 128)], options=window).check(device)


@pytest.mark.parametrize(("queries", "keys"), [((0, 1, 0, 1), (0, 3, 0, 5)), ((4, 0, 4), (0, 3, 2))])
@pytest.mark.parametrize("causal", [False, True])
def test_case_10_zero_length_members(device, queries, keys, causal):
    cases.prefill(list(zip(queries, keys, strict=True)), options={"causal": causal}).check(device)


@pytest.mark.parametrize("sinks", [None, SINKS], ids=["no sink", "sink"])
def test_case_11_policy_for_rows_that_see_nothing(device, sinks):
    """out = 0 and LSE = -inf, or the sink: here in prefill, with fewer keys than queries."""
    case = cases.prefill([(6, 2), (3, 3)], options={"causal": True, "sinks": sinks})
    out, lse = case.check(device)
    assert (out[:4] == 0).all()
    expected = torch.full((3, 4), -math.inf) if sinks is None else sinks[:, None].expand(3, 4)
    torch.testing.assert_close(lse[:, :4].cpu(), expected)


@SPLITS
def test_case_11_decode_of_an_empty_sequence(device, num_splits):
    batch = cases.Batch([(1, 1), (1, 4)])
    for sinks in (None, SINKS):
        case = cases.decode(batch, options={"sinks": sinks})
        case.args["seqused_k"] = torch.tensor([0, 4]).int()
        out, lse = case.check(device, num_splits=num_splits)
        assert (out[0] == 0).all()
        torch.testing.assert_close(lse[:, 0].cpu(), torch.full((3,), -math.inf) if sinks is None else sinks)


def test_case_12_more_rows_than_tokens(device):
    """The builders pad every batch by rows of NaN; here also more requests than tokens."""
    cases.decode([(1, 7), (0, 0), (0, 12)]).check(device)
    cases.prefill([(9, 9)], options={"causal": True}).check(device)
    cases.extend([(9, 20), (0, 0)]).check(device)


@pytest.mark.parametrize("sinks", [None, SINKS], ids=["no sink", "sink"])
def test_what_padding_gets(device, sinks):
    """As `mha` says: rows that see no key in prefill and extend; in decode and the router what was there, or 0, and LSE -inf."""
    options = {"sinks": sinks}
    batch = cases.Batch([(1, 9), (1, 20)])
    new_lse = torch.full((3, cases.PAD_ROWS), -math.inf) if sinks is None else sinks[:, None].expand(3, cases.PAD_ROWS)
    for case, left in (
        (cases.prefill([(3, 3), (2, 2)], options={"causal": True, **options}), False), (cases.extend([(3, 30), (2, 9)], options=options), False),
        (cases.decode(batch, options=options), True),
    ):  # fmt: skip
        args = case.args
        if case.cache is not None:
            args = args | dict(zip(("k_cache", "v_cache", "block_table"), case.cache.poisoned("nan"), strict=True))
        args = {name: cases.to(value, device) for name, value in args.items()}
        for given in (False, True):
            out = torch.full_like(args["q"], cases.MARK) if given else None
            out, lse = getattr(tritonattn, case.op)(**args | {"out": out, "return_lse": True})
            assert (out[case.rows :] == (cases.MARK if given and left else 0)).all()
            assert torch.equal(lse[:, case.rows :].cpu(), torch.full_like(new_lse, -math.inf) if left else new_lse)


@pytest.mark.parametrize("head_size", [128, 192])
def test_case_93_tiles_that_a_row_may_not_see(device, head_size):
    """The first tile of the keys is hidden from some rows of a block, and some splits hold no key of a row at all."""
    shape = {"head_size": head_size, "heads": (2, 1), "magnitude": 30.0}
    cases.prefill([(70, 200)], options={"causal": True, "window_size": (40, 0)}, **shape).check(device)
    for num_splits in (2, 4):
        cases.decode([(40, 100), (1, 3)], options={"window_size": (20, 0)}, **shape).check(device, num_splits=num_splits)


@pytest.mark.parametrize("layout", layouts.PAGED_LAYOUTS)
def test_garbage_goes_by_without_a_warning(device, layout):
    """What no token was written to is multiplied and then masked, which NumPy, under the interpreter, would speak of."""
    q, lens = torch.randn(1, 4, 64, dtype=torch.bfloat16, device=device) * 4, torch.tensor([12], dtype=torch.int32, device=device)
    caches = [x.fill_(3e38) for x in layouts.allocate(layout, 1, 16, 2, 64, dtype=torch.bfloat16, device=device)]
    key = torch.randn(12, 2, 64, dtype=torch.bfloat16, device=device)
    tritonattn.reshape_and_cache(key, key, *caches, torch.arange(12, device=device), kv_layout=layout)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        out = tritonattn.decode_attention(
            q, *caches, seqused_k=lens, block_table=torch.zeros(1, 1, dtype=torch.int32, device=device), max_seqlen_k=12, kv_layout=layout
        )
    assert out.isfinite().all()
