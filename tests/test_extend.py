"""Extend as one row of context and new tokens: where chunks may end, how many passes there are, and what they hand on."""

import pytest
import torch

from tests import cases
from tritonattn import mha
from tritonattn.paths import extend
from tritonattn.scratch import Fresh

LENS = [(70, 90), (33, 33), (3, 61), (0, 0), (50, 51)]  # (new, all): much new on little, no context, little on much, nothing, one cached
OPTIONS = {
    "causal": {}, "full": {"causal": False}, "window": {"window_size": (20, 0)}, "both sides": {"causal": False, "window_size": (9, 17)},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]), "window_size": (31, 0)},
}  # fmt: skip


class Watched:
    """The passes of extend calls: (kind, chunk), and their state, which is marked beforehand."""

    def __init__(self, monkeypatch) -> None:
        self.passes, self.state = [], []

        def run_pass(kind, row, *args, **options):
            self.passes.append((kind, options.get("chunk", ())[:2]))
            self.block_m = row.config["BLOCK_M"]
            return original(kind, row, *args, **options)

        class Marked(Fresh):
            def take(scratch, name, numel, dtype):
                taken = super().take(name, numel, dtype)
                if name in ("extend_ml", "extend_acc"):
                    self.state.append(taken.fill_(cases.MARK))
                return taken

        original = extend.run_pass
        monkeypatch.setattr(extend, "run_pass", run_pass)
        monkeypatch.setattr(mha, "Fresh", Marked)

    def tiles_that_wait(self, heads: int) -> list[int]:
        return (self.state[0].view(-1, heads * 2 * self.block_m) != cases.MARK).any(1).nonzero().flatten().tolist()


@pytest.mark.parametrize("chunk", [16, 48, 112, 4096])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_chunks_may_end_among_the_new_tokens(device, chunk, options):
    cases.extend(LENS, layout="preshuffled", heads=(4, 2), options=options).check(device, chunk_tokens=chunk)


@pytest.mark.parametrize("layout", ["hnd", "preshuffled"])
def test_new_tokens_are_taken_as_they_are(device, layout):
    """With the descales of a cache of 8 bits, which are not theirs, in every dtype."""
    for kv_dtype in cases.fp8_dtypes(device)[:1]:
        for dtype in (torch.float32, torch.bfloat16):
            scales = {"k_descale": torch.tensor([0.5, 0.25]), "v_descale": 2.0}
            case = cases.extend(LENS, layout=layout, kv_dtype=kv_dtype, dtype=dtype, heads=(4, 2), **scales)
            case.check(device, chunk_tokens=64)


def test_new_tokens_through_any_strides(device):
    case = cases.extend(LENS, heads=(4, 2), head_size=48, v_head_size=32)
    expected = case.run(device)
    k, v = case.args["k"], case.args["v"]
    for between in (0, 16, 3):  # elements, of which 3 are no multiple of 16 bytes
        fused = torch.full((len(k), 2, 80 + between), torch.nan)
        fused[..., :48], fused[..., 48:80] = k, v
        other_way = torch.full((2, len(k) + 1, 80 + between), torch.nan).transpose(0, 1)[1:]
        other_way.copy_(fused)
        for source in (fused.to(device), other_way.to(device)):
            got = case.run(device, k=source[..., :48], v=source[..., 48:80])
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_a_loose_bound_is_that_of_the_table(device, monkeypatch):
    """No more passes than for the tokens that its columns hold."""
    seen = Watched(monkeypatch)
    for shared in (False, True):
        case = cases.extend([(20, 30), (1, 30)], shared=shared)
        want = case.check(device, chunk_tokens=16, max_context_len=case.cache.table.shape[1] * 16)
        expected = seen.passes.copy()
        seen.passes.clear()
        got = case.check(device, chunk_tokens=16, max_context_len=1_000_000)
        assert seen.passes == expected and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        seen.passes.clear()


def test_a_row_that_fits_a_chunk_takes_one_pass(device, monkeypatch):
    seen = Watched(monkeypatch)
    cases.extend([(20, 60), (20, 44)]).run(device, chunk_tokens=128)
    assert seen.passes == [(extend.CHUNK, (0, 128))]  # twice the longest, 60, rounded up
    assert len(seen.state[0]) == 3 * 2 * seen.block_m and not seen.tiles_that_wait(3)
    seen.passes.clear()
    cases.extend([(20, 60), (20, 44)], options={"window_size": (7, 0)}).run(device, chunk_tokens=96)
    assert seen.passes == [(extend.CHUNK, (0, 96))]  # 20 new ones and what the first of them sees, twice


@pytest.mark.parametrize(("options", "passes"), [({}, (24, 24, 7, 7, 6)), ({"window_size": (20, 0)}, (6, 6, 6, 6, 6))], ids=["all", "window"])
def test_a_total_spares_launches(device, monkeypatch, options, passes):
    """One long context among short ones: without their sum, all are taken to be as long."""
    seen = Watched(monkeypatch)
    case = cases.extend([(3, 203), (0, 0), (5, 9), (1, 2), (0, 70), (2, 20), (17, 17)], layout="preshuffled", options=options)
    total = int(case.args["context_lens"].sum())
    want = case.check(device, chunk_tokens=64)
    seen.passes.clear()
    for told, count in zip((None, 10**9, total + 5, total, total - 70), passes, strict=True):  # 70: of the sequence without a query
        got = case.run(device, chunk_tokens=64, total_context_len=told)
        assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))
        assert len(seen.passes) == count
        seen.passes.clear()


def test_a_state_waits_for_those_alone_whose_keys_go_on(device, monkeypatch):
    seen = Watched(monkeypatch)
    case = cases.extend([(20, 60), (20, 40), (20, 100), (0, 0)])
    case.check(device, chunk_tokens=64)  # rows 0-60; 64-104; 112-212
    assert [chunk for _, chunk in seen.passes[:4]] == [(0, 64), (64, 128), (128, 192), (192, 256)]
    assert seen.tiles_that_wait(3) == [40 // seen.block_m + 2]


def test_a_tile_is_done_with_the_last_key_that_it_sees(device, monkeypatch):
    seen = Watched(monkeypatch)
    step = cases.extend([(1, 1)]).run(device) and seen.block_m
    case = cases.extend([(3 * step, 3 * step)])
    case.check(device, chunk_tokens=2 * step)  # causal: two tiles end in the first chunk
    seen.state.clear()
    case.run(device, chunk_tokens=2 * step)
    assert seen.tiles_that_wait(3) == [2]
    seen.state.clear()
    cases.extend([(3 * step, 3 * step)], options={"window_size": (step - 1, 0)}).check(device, chunk_tokens=step)
    assert seen.tiles_that_wait(3) == [1, 2]  # each has keys in two chunks
    seen.state.clear()
    cases.extend([(3 * step, 3 * step)], options={"window_size": (0, 0)}).check(device, chunk_tokens=step)
    assert not seen.tiles_that_wait(3)


@pytest.mark.parametrize("shared", [False, True], ids=["", "cached"])
def test_padding_has_the_result_of_no_keys(device, shared):
    """In a new `out` and a new `lse`: also where there is no sequence, or none with a token."""
    sinks = torch.tensor([0.5, -1.0, 2.0])
    for lens in ([(20, 60), (0, 0)], [(0, 0)], []):
        for window in ((-1, -1), (1, 0)):
            case = cases.extend(lens, shared=shared, options={"window_size": window, "sinks": sinks})
            args = {name: cases.to(value, device) for name, value in case.args.items()}
            args |= {"q": torch.cat([args["q"], args["q"].new_full((150, 3, 32), torch.nan)])}
            if not shared:
                args |= {name: torch.cat([args[name], args[name].new_full((150, 1, 32), torch.nan)]) for name in ("k", "v")}
            cache = dict(zip(("k_cache", "v_cache", "block_table"), (cases.to(x, device) for x in case.cache.poisoned("nan")), strict=True))
            out, lse = mha.extend_attention(**args, **cache, chunk_tokens=32, return_lse=True)
            assert (out[case.rows :] == 0).all()
            torch.testing.assert_close(lse[:, case.rows :].cpu(), sinks[:, None].expand(3, len(out) - case.rows))


def test_a_sequence_without_queries_needs_no_keys(device):
    """Its row of the block table may hold anything."""
    for window in ((-1, -1), (20, 0)):
        case = cases.extend([(0, 200), (7, 40), (0, 90), (30, 64)], layout="preshuffled", options={"window_size": window})
        case.cache.hidden_table[0::2] = cases.WILD_BLOCK
        case.check(device)


def test_lengths_beyond_what_the_host_was_told_stay_inside(device, monkeypatch):
    """Rows are wrong; nothing is written beside the scratch and the result."""
    monkeypatch.setattr(mha, "Fresh", cases.Guarded)
    for lens, longest in (([(9, 100), (20, 60)], 16), ([(5, 20), (40, 300)], 8)):
        case = cases.extend(lens, layout="hnd", heads=(4, 2))
        for told in ({"max_context_len": longest}, {"total_context_len": longest}, {"total_context_len": 0}):
            case.run(device, "zero", chunk_tokens=48, **told)
            assert cases.Guarded.intact()
    cases.decode([(3, 40), (4, 60)]).run(device, "zero", max_seqlen_q=1, num_splits=4)
