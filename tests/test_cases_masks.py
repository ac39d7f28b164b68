"""Cases from the field about masks and score modifiers; a test is named after the number of its case."""

import math

import pytest
import torch

import tritonattn
from tests import cases


def weights(seen: list[list[int]], size: int) -> torch.Tensor:
    expected = torch.zeros(len(seen), size)
    for row, keys in enumerate(seen):
        expected[row, keys] = 1 / len(keys)
    return expected


@pytest.mark.parametrize(("window", "first"), [(3, 6), (0, 9), (9, 0), (50, 0), (-1, 0)])
def test_case_41_window_counts_the_token_itself(device, window, first):
    """q = 0 and one-hot V show the weights: W tokens, the query's own included, in every path."""
    options = {"window_size": (window, 0 if window >= 0 else -1)}
    batch = cases.Batch([(1, 10)]).one_hot()
    expected = weights([list(range(first, 10))], 32)
    calls = [
        cases.decode(batch, options=options).run(device, num_splits=1),
        cases.decode(batch, options=options, layout="preshuffled").run(device, num_splits=3),
        cases.extend(batch, options=options).run(device),
    ]
    prefill = cases.prefill([(1, 10)], options=options | {"causal": True})
    prefill.args["q"].zero_()
    prefill.args["v"][:10] = torch.eye(10, 32)[:, None]
    calls.append(prefill.run(device))
    for out, lse in calls:
        torch.testing.assert_close(out[0].cpu(), expected.expand(3, -1), rtol=1e-6, atol=0)
        torch.testing.assert_close(lse.cpu(), torch.full((3, 1), math.log(10 - first)))


@pytest.mark.parametrize("num_splits", [1, 3])
def test_case_42_window_edges_over_a_block_of_rows(device, num_splits):
    batch = cases.Batch([(4, 12)]).one_hot()
    options = {"window_size": (7, 0)}
    expected = weights([list(range(1 + i, 9 + i)) for i in range(4)], 32)
    calls = [
        cases.decode(batch, options=options).run(device, num_splits=num_splits),
        cases.extend(batch, options=options).run(device, chunk_tokens=16 * num_splits),
    ]
    for out, _ in calls:
        for head in range(3):
            assert torch.equal(out[:, head].cpu() != 0, expected != 0)
            torch.testing.assert_close(out[:, head].cpu(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("score", [4400.0, 5000.0, -1e4])
def test_case_45_softcap_saturates(device, score):
    """tanh of a huge argument: every score becomes +-cap, so the rows are plain means and LSE = +-cap + log n."""
    options = {"softcap": 50.0, "softmax_scale": 1.0}
    batch = cases.Batch([(1, 20), (2, 50)], heads=(3, 1))
    batch.q[:] = score
    for keys in batch.keys:
        keys.zero_()
        keys[..., 0] = 1.0
    batch.refresh()
    for case in (cases.decode(batch, options=options), cases.extend(batch, options=options)):
        _, lse = case.check(device)
        torch.testing.assert_close(lse[:, 0].cpu(), torch.full((3,), math.copysign(50.0, score) + math.log(20)))
    prefill = cases.prefill([(5, 5)], options=options | {"causal": True})
    prefill.args["q"][:5] = score
    prefill.args["k"][:5] = 1 / 32
    prefill.check(device)


def test_case_47_alibi_distance_across_chunks(device):
    """A constant shift of all distances of a row leaves its output but not its LSE, and shows once parts are merged."""
    case = cases.extend([(5, 70), (1, 40)], options={"alibi_slopes": torch.full((3,), 0.5)})
    one = case.check(device)
    two = case.check(device, chunk_tokens=48)
    torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)
    decode = cases.decode([(2, 70), (1, 40)], options={"alibi_slopes": torch.full((3,), 0.5)})
    torch.testing.assert_close(decode.check(device, num_splits=1), decode.check(device, num_splits=2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_case_50_sink_far_above_the_scores(device, num_splits):
    sinks = torch.tensor([200.0, 0.0, -200.0])
    options = {"sinks": sinks, "softmax_scale": 1.0}
    batch = cases.Batch([(1, 40), (1, 3)])
    batch.q[:] = -1.0
    for keys in batch.keys:
        keys.fill_(200 / 32)
    batch.refresh()
    out, lse = cases.decode(batch, options=options).check(device, num_splits=num_splits)
    assert (out[:, 0].abs() < 1e-30).all() and torch.equal(lse[0].cpu(), torch.full((2,), 200.0))
    cases.extend(batch, options=options).check(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_case_50_infinite_sinks(device, dtype):
    """-inf is as no sink. +inf takes all weight, also over more keys, in later chunks, in other splits and in a merge; every LSE is finite."""
    most = torch.finfo(dtype).max
    sinks, calm = torch.tensor([-math.inf, math.inf, most], dtype=dtype), torch.tensor([-math.inf, 0.0, 0.0])
    batch = cases.Batch([(1, 90), (2, 3)])
    ways = {"decode_attention": [{"num_splits": 1}, {"num_splits": 3}], "extend_attention": [{"chunk_tokens": 16}]}
    for case in (cases.decode(batch), cases.decode(batch, layout="preshuffled"), cases.extend(batch), cases.prefill([(2, 70), (1, 0)])):
        for how in ways.get(case.op, [{}]):
            out, lse = case.but(sinks=sinks).run(device, **how)
            want = case.but(sinks=calm).check(device, **how)
            torch.testing.assert_close((out[:, 0], lse[0]), (want[0][:, 0], want[1][0]), rtol=1e-5, atol=1e-5)
            assert (out[:, 1] == 0).all() and (out[:, 2].abs() < 1e-30).all(), case.op
            assert (lse[1:].isfinite() & (lse[1:] > 6e4)).all(), case.op
            merged, total = tritonattn.merge_attn_states(out, lse, *want, return_lse=True)
            assert (merged[:, 1] == 0).all() and torch.equal(total[1], lse[1])


def test_case_50_sink_of_a_row_without_keys(device):
    sinks = torch.tensor([1.5, 200.0, -200.0])
    out, lse = cases.prefill([(2, 0), (1, 4)], options={"sinks": sinks}).check(device)
    assert (out[:2] == 0).all() and torch.equal(lse[:, 0].cpu(), sinks)


@pytest.mark.parametrize("side", [2**30, 2**31 - 1, 2**40])
def test_windows_beyond_all_lengths_are_none(device, side):
    """A side that would wrap when it is added to a position."""
    for make in (cases.prefill, cases.extend, cases.decode):
        for window, causal in (((side, 0), True), ((side, side), False), ((5, side), False)):
            case = make(case_lens(make), options={"window_size": window, "causal": causal})
            want = make(case_lens(make), options={"window_size": tuple(-1 if n == side else n for n in window), "causal": causal})
            for got, exact in zip(case.run(device), want.run(device), strict=True):
                assert torch.equal(got, exact)


def case_lens(make):
    return [(20, 40), (5, 5)] if make is cases.prefill else [(3, 40), (20, 20)]
