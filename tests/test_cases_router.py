"""Cases from the field about the router, batching and speculative decoding; a test is named after the number of its case."""

import random

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import tritonattn
from tests import cases
from tritonattn.batch import Kind
from tritonattn.plan import MAX_SPLITS, decode_plan
from tritonattn.problem import AttnProblem
from tritonattn.tuning.arch import assume, by_name

MIXED = [(1, 40), (1, 7), (30, 126), (20, 20)]  # decode, decode, extend, prefill


def mixed(lens, shape=None, **rest):
    return cases.Mixed(cases.Batch(lens, **(shape or {})), **rest)


def swapped(swaps, *lists):
    lists = [list(values) for values in lists]
    for i, j in swaps:
        for values in lists:
            values[i], values[j] = values[j], values[i]
    return lists


@pytest.mark.parametrize("requests", [[(64, 0), (1, 40), (32, 96)], [(32, 96), (64, 0), (1, 40)], [(100, 50), (3, 0), (1, 9), (2, 5)]])
def test_case_52_cycles_of_three(requests):
    query, context = zip(*requests, strict=True)
    query, context = swapped(tritonattn.reorder_batch(query, context), query, context)
    assert tritonattn.classify(query, context).tolist() == sorted(tritonattn.classify(query, context).tolist())
    assert sorted(zip(query, context, strict=True)) == sorted(requests)


def test_case_52_random_batches():
    generator = random.Random(0)
    for _ in range(2000):
        size, threshold = generator.randint(0, 12), generator.randint(1, 4)
        query = [generator.choice([1, 1, 2, 3, 4, 5, 64, 100]) for _ in range(size)]
        context = [generator.choice([0, 0, 1, 40, 50, 96]) for _ in range(size)]
        kinds = tritonattn.classify(query, context, threshold).tolist()
        for one_kind, q, c in zip(kinds, query, context, strict=True):
            assert one_kind == (Kind.PREFILL if c == 0 else Kind.DECODE if q <= threshold else Kind.EXTEND)
        swaps = tritonattn.reorder_batch(query, context, threshold)
        ids, query, context = swapped(swaps, range(size), query, context)
        assert ids == sorted(range(size), key=lambda i: kinds[i]), "ordered, and stable within a kind"
        assert len(swaps) <= max(size - 1, 0)
        assert tritonattn.reorder_batch(query, context, threshold) == []


def test_case_52_plan_order(device):
    query, seq = [64, 1, 32, 1, 5], [64, 41, 128, 1, 10]
    plan = tritonattn.Router(4, 2, 64, dtype=torch.bfloat16, device=device).plan(query, seq, torch.zeros(5, 9, dtype=torch.int32, device=device))
    assert plan.order == [1, 2, 4, 0, 3]
    assert plan.kinds.tolist() == [Kind.PREFILL, Kind.DECODE, Kind.EXTEND, Kind.PREFILL, Kind.EXTEND]


def test_case_53_speculation_and_short_tails(device):
    """Threshold 4: the one-token tail of a chunked prefill, three speculating requests, a one-token prompt and a short extend."""
    case = mixed([(1, 60), (4, 50), (4, 4 + 33), (4, 90), (1, 1), (5, 25)], threshold=4)
    case.check(device)
    plan = case.router(device).plan(case.batch.query_lens, case.batch.seq_lens, case.cache.table.to(device))
    assert plan.kinds.tolist() == [Kind.DECODE] * 4 + [Kind.PREFILL, Kind.EXTEND]
    assert plan.decode.num_seqs == 4 and plan.decode.max_seqlen_q == 4


@pytest.mark.parametrize("layout", ["nhd", "hnd", "preshuffled"])
def test_case_54_a_mixed_batch_is_its_requests(device, layout):
    case = mixed(MIXED, {"heads": (4, 2)}, layout=layout)
    case.check(device)
    order = [2, 0, 3, 1]
    shuffled = cases.Batch([MIXED[i] for i in order], heads=(4, 2))
    shuffled.keys, shuffled.values = [case.batch.keys[i] for i in order], [case.batch.values[i] for i in order]
    starts = cases.cumulative(case.batch.query_lens).tolist()
    rows = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in order])
    shuffled.q[: case.batch.tokens] = case.batch.q[rows]
    out, lse = cases.Mixed(shuffled.refresh(), layout=layout).check(device)
    first, first_lse = case.run(device)
    rows = rows.to(device)
    torch.testing.assert_close(out, first[rows], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, first_lse[:, rows], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [
    {"window_size": (20, 0)}, {"softcap": 3.0, "alibi_slopes": torch.tensor([0.5, 0.25, 0.1])}, {"sinks": torch.tensor([1.0, -1.0, 3.0])},
    {"causal": False}, {"softmax_scale": 0.3},
], ids=lambda options: next(iter(options)))  # fmt: skip
def test_case_54_with_the_options_of_the_router(device, options):
    case = mixed([*MIXED, (3, 45)], threshold=3, options=options)
    case.check(device)


def test_case_54_fp8_cache_and_half_precision(device):
    for dtype in cases.fp8_dtypes(device)[:2]:
        options = {"k_descale": torch.tensor([0.5, 0.25]), "v_descale": torch.tensor([2.0])}
        batch = cases.Batch(MIXED, heads=(4, 2), dtype=torch.bfloat16)
        # The oracle takes every new token from one place; decode takes it from the cache, where it has been rounded. So do all here.
        cases.Mixed(batch, kv_dtype=dtype, options=options, shared=True).check(device)


def test_case_54_layers_may_differ(device):
    """Sinks and descales given to run, in place of the router's."""
    sinks = torch.tensor([1.0, -1.0, 3.0])
    case = mixed(MIXED, options={"sinks": sinks})
    expected = case.check(device)
    router = case.router(device, sinks=None)
    plan = router.plan(case.batch.query_lens, case.batch.seq_lens, case.cache.hidden_table.to(device))
    out, lse = router.run(plan, **case.arguments(device), return_lse=True, sinks=sinks.to(device))
    rows = case.batch.tokens
    assert torch.equal(out[:rows], expected[0]) and torch.equal(lse[:, :rows], expected[1])
    assert (out[rows:] == 0).all() and (lse[:, rows:] == -torch.inf).all()


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("layout", ["nhd", "preshuffled"])
def test_case_55_speculative_rows_see_one_key_more_each(device, layout, num_splits):
    batch = cases.Batch([(4, 16), (4, 5), (4, 4)]).one_hot()
    out, _ = cases.decode(batch, layout=layout).run(device, num_splits=num_splits)
    row = 0
    for query, seq in batch.lens:
        for i in range(query):
            seen = seq - query + i + 1
            expected = torch.zeros(32)
            expected[:seen] = 1 / seen
            torch.testing.assert_close(out[row].cpu(), expected.expand(3, -1), rtol=1e-6, atol=0)
            row += 1


def test_case_58_a_block_that_is_not_causal(device):
    batch = cases.Batch([(2, 10)]).one_hot()
    for case in (cases.decode(batch, options={"causal": False}), cases.extend(batch, options={"causal": False})):
        out, _ = case.run(device)
        expected = torch.zeros(32)
        expected[:10] = 0.1
        torch.testing.assert_close(out.cpu(), expected.expand(2, 3, -1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("layout", ["nhd", "preshuffled"])
def test_case_60_layers_that_share_a_cache(device, layout):
    """k = v = None: nothing is written to the cache, every row of the result is."""
    case = mixed([*MIXED, (0, 0)], layout=layout, shared=True)
    case.check(device)
    router, args = case.router(device), case.arguments(device)
    before = [args[name].clone() for name in ("k_cache", "v_cache")]
    plan = router.plan(case.batch.query_lens, case.batch.seq_lens, case.cache.hidden_table.to(device))
    router.run(plan, **args)
    for cache, copy in zip((args["k_cache"], args["v_cache"]), before, strict=True):
        torch.testing.assert_close(cache, copy, rtol=0, atol=0, equal_nan=True)


def test_case_61_context_is_what_is_left(device):
    case = mixed([*MIXED, (5, 5), (3, 9), (0, 0)])
    plan = case.router(device).plan(case.batch.query_lens, case.batch.seq_lens, case.cache.table.to(device))
    assert plan.device_context_lens.tolist() == case.batch.context_lens
    assert plan.device_seq_lens.tolist() == case.batch.seq_lens
    assert plan.device_cu_seqlens_q.tolist() == cases.cumulative(case.batch.query_lens).tolist()


@pytest.mark.parametrize("layout", ["nhd", "hnd", "preshuffled"])
def test_case_62_writing_in_chunks(device, layout):
    batch = cases.Batch([(0, 32)], heads=(2, 2), dtype=torch.bfloat16)
    cache = batch.cache([32], layout=layout)
    slots = (cache.table[0].long()[torch.arange(32) // 16] * 16 + torch.arange(32) % 16).to(device)
    key, value = batch.keys[0].to(device), batch.values[0].to(device)
    stores = [[torch.full_like(x, 5.0).to(device) for x in (cache.k, cache.v)] for _ in range(2)]
    tritonattn.reshape_and_cache(key, value, *stores[0], slots, kv_layout=layout)
    for begin, end in ((0, 7), (7, 23), (23, 32)):
        tritonattn.reshape_and_cache(key[begin:end], value[begin:end], *stores[1], slots[begin:end], kv_layout=layout)
    for once, chunks in zip(*stores, strict=True):
        assert torch.equal(once, chunks)


# -- promises of the router -----------------------------------------------------------------------------------


def request_rows(batch, b):
    starts = cases.cumulative(batch.query_lens).tolist()
    return slice(starts[b], starts[b + 1])


@pytest.mark.parametrize("threshold", [1, 4])
def test_batch_invariance(device, threshold):
    """Every request alone, to the bit what it is in the batch; contexts long and short against the chunk and the splits."""
    lens = [(1, 300), (1, 17), (20, 90), (3, 160), (40, 40), (2, 2), (1, 70), (70, 100)]
    case = mixed(lens, {"head_size": 32}, threshold=threshold)
    router = case.router(device, batch_invariant=True, chunk_tokens=64)
    out, lse = case.check(device, batch_invariant=True, chunk_tokens=64)
    for b, (query, seq) in enumerate(lens):
        alone = cases.Batch([(query, seq)])
        alone.keys, alone.values = [case.batch.keys[b]], [case.batch.values[b]]
        rows = request_rows(case.batch, b)
        alone.q[:query] = case.batch.q[rows]
        one, one_lse = cases.Mixed(alone.refresh(), threshold).run(device, router)
        assert torch.equal(one, out[rows]) and torch.equal(one_lse, lse[:, rows]), f"request {b} depends on its neighbours"


def test_one_router_serves_step_after_step(device):
    """Batches of other sizes and kinds in turn; the scratch stops growing."""
    batches = [mixed(MIXED), mixed([(1, 9), (1, 100)]), mixed([(5, 5)]), mixed([(9, 200), (1, 3)]), mixed([])]
    router = batches[0].router(device, chunk_tokens=64)
    for case in batches:
        case.oracle().check(*case.run(device, router), slice(0, case.batch.tokens))
    held = router.scratch.nbytes
    for case in batches:
        case.run(device, router)
    assert router.scratch.nbytes == held


def test_nothing_but_padding(device):
    mixed([(0, 0), (0, 0)]).check(device)
    case = mixed([(1, 20), (0, 0), (1, 5), (0, 0)])
    case.check(device)
    plan = case.router(device).plan([1, 0, 1, 0], [20, 0, 5, 0], case.cache.table.to(device))
    assert plan.decode.num_seqs == 4, "padding keeps its place in a decode-only batch, so that the grid is that of the graph"


def test_a_long_request_among_short_ones_is_cut(device):
    """All parts are about as long, their number is bounded, and another batch of the same size fills the same grid."""
    router = tritonattn.Router(8, 2, 64, dtype=torch.bfloat16, device=device, block_size=16)
    table = torch.zeros(64, 8192, dtype=torch.int32, device=device)
    plans = [router.plan([1] * 64, lens, table) for lens in ([128] * 63 + [131072], [4096] * 64, [7] * 64)]
    decode = plans[0].decode
    assert len(decode.cut) == 1 and decode.cut[0] > 1 and decode.num_seqs == 64
    sizes = {(plan.decode.work.num_items, plan.decode.work.num_merges, plan.decode.plan, plan.decode.max_seqlen_q) for plan in plans}
    assert len(sizes) == 1
    assert len({plan.decode.work.items.data_ptr() for plan in plans}) == 1
    mixed([(1, 20)] * 3 + [(1, 1500)] + [(0, 0), (1, 100)]).check(device)
    mixed([(1, 20), (1, 1500), (9, 20), (3, 700)], threshold=3).check(device)


REQUEST = st.one_of(
    st.just((0, 0)), st.tuples(st.integers(1, 3), st.integers(1, 9000)), st.tuples(st.integers(1, 400), st.integers(1, 900)),
    st.tuples(st.integers(0, 400), st.just(0)),
)  # fmt: skip


def facts(part):
    """Everything in a plan but who made it, tensors and arrays as lists."""
    if isinstance(part, torch.Tensor | np.ndarray):
        return part.tolist()
    if isinstance(part, tuple):
        return [facts(value) for value in part]
    if hasattr(part, "__dict__") and not isinstance(part, type):
        return {name: facts(value) for name, value in vars(part).items() if name not in ("router", "version", "block_table")}
    return part


@settings(max_examples=60)
@example([(20, 0), (1, 9)], ["chunk", "chunk", "grow", "grow"], {}, False)  # a prompt in pieces, which is a prefill first and then extends
@given(
    st.lists(REQUEST, max_size=6), st.lists(st.sampled_from(["grow", "chunk", "finish", "swap", "arrays"]), max_size=6),
    st.sampled_from([{}, {"decode_threshold": 3}, {"batch_invariant": True, "chunk_tokens": 64}, {"window_size": (100, 0)}]), st.booleans(),
)  # fmt: skip
def test_a_plan_does_not_depend_on_the_one_before(requests, steps, options, latent):
    """What a router keeps from step to step is what a new one finds: batches that grow, chunk by chunk, end and change places."""

    def router():
        if latent:
            shared = {name: value for name, value in options.items() if name == "decode_threshold"}
            return tritonattn.MlaRouter(16, softmax_scale=0.1, dtype=torch.bfloat16, device="cpu", **shared)
        return tritonattn.Router(16, 2, 64, dtype=torch.bfloat16, device="cpu", **options)

    with assume(by_name("gfx942")):
        kept = router()
        for step in ["first", *steps]:
            if step in ("grow", "chunk"):  # what was new is context; a next token, or as many as before
                requests = [(1 if step == "grow" and query else query, context + query) for query, context in requests]
            requests = requests[1:] if step == "finish" else requests[::-1] if step == "swap" else requests
            query, seq = [query for query, _ in requests], [query + context for query, context in requests]
            if step == "arrays":
                query, seq = np.array(query, np.int32), np.array(seq, np.int64)
            table = torch.zeros(len(requests), 1024, dtype=torch.int32)
            assert facts(kept.plan(query, seq, table)) == facts(router().plan(query, seq, table))


def test_prefill_needs_no_cache(device):
    case = mixed([(5, 5), (20, 20)])
    router, args = case.router(device), case.arguments(device) | {"k_cache": None, "v_cache": None}
    out, lse = router.run(router.plan([5, 20], [5, 20], None), **args, return_lse=True)
    case.oracle().check(out, lse, slice(0, 25))


@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "sm_90"])
@pytest.mark.parametrize("heads", [(32, 8), (64, 4), (8, 8)], ids=str)
def test_case_79_splits_do_not_grow_with_the_batch(arch, heads):
    """In the op and in the router; at 256 short sequences there is nothing to merge."""
    problem = AttnProblem(*heads, 128, 128, torch.bfloat16, torch.bfloat16, "plain", 16, True)
    facts = by_name(arch)
    for length in (256, 8192, 131072):
        splits = [decode_plan(facts, problem, batch, 1, length).num_splits for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)]
        assert splits == sorted(splits, reverse=True) and splits[-1] == 1
    with assume(facts):
        router = tritonattn.Router(*heads, 128, dtype=torch.bfloat16, device="cpu", kv_layout="nhd", block_size=16)
        for length in (256, 8192):
            most = [int(router.plan([1] * n, [length] * n, torch.zeros(n, length // 16).int()).decode.cut.max(initial=1)) for n in (1, 4, 16, 64, 256)]
            assert most == sorted(most, reverse=True) and most[-1] == 1


def test_case_78_a_graph_captured_short_replays_long_in_as_many_parts():
    """One sequence of MLA with 12 heads: the plan for two tokens has the grid of that for 131072, whose parts are those of the op."""
    table = torch.zeros(1, 131072 // 64, dtype=torch.int32)
    for name in ("MI300X", "MI355X", "H200"):
        facts = by_name(name)
        with assume(facts):
            router = tritonattn.MlaRouter(12, softmax_scale=0.1, dtype=torch.bfloat16, device="cpu", block_size=64)
            short, long = (router.plan([1], [length], table).decode for length in (2, 131072))
            assert short.key == long.key, "what the graph has recorded"
            assert len(short.cut) == 0 and long.cut.sum() == decode_plan(facts, router.paged, 1, 1, 131072).num_splits >= 128


def busiest(router, arch, batch, length):
    """(keys that the last unit to finish has read, those that each would read if all had the same), units taking programs in turn."""
    decode = router.plan([1] * batch, [length] * batch, torch.zeros(1, length // 16, dtype=torch.int32).expand(batch, -1)).decode
    splits = [parts for _, _, parts in decode.work.items.view(-1, 3).tolist() if parts]
    programs = router.paged.num_kv_heads * decode.plan.row_blocks
    slots = int(decode.plan.row.config["programs_per_cu"] * arch.compute_units)
    most = -(-length // min(splits)) * -(-len(splits) * programs // slots)
    return most, max(batch * length * programs / slots, length / MAX_SPLITS)


@pytest.mark.parametrize("name", ["MI300X", "MI355X", "H200"])
@pytest.mark.parametrize("kv_heads", [1, 4, 8])
def test_case_92_no_batch_size_leaves_the_device_idle(name, kv_heads):
    """From one batch size to the next and from one length to the next, the work of the busiest unit grows as all work does."""
    facts = by_name(name)
    with assume(facts):
        router = tritonattn.Router(8 * kv_heads, kv_heads, 128, dtype=torch.bfloat16, device="cpu", block_size=16)
        for batch in (1, 8, 12, 16, 24, 40, 64, 100):
            found = [busiest(router, facts, batch, length) for length in (32768, 131072)]
            for most, fair in found:
                assert most <= 1.8 * fair, f"batch {batch}: {most / fair:.2f} times its share"
            assert 3.6 < found[1][0] / found[0][0] < 4.4, f"batch {batch}"


def test_a_long_sequence_among_others_is_not_cut_further_than_the_merge_takes():
    with assume(by_name("MI300X")):
        router = tritonattn.Router(8, 1, 128, dtype=torch.bfloat16, device="cpu", block_size=16)
        cut = router.plan([1] * 8, [131072] + [128] * 7, torch.zeros(8, 8192, dtype=torch.int32)).decode.cut
    assert cut.tolist() == [MAX_SPLITS]


def test_a_window_beyond_all_lengths_is_planned_as_none(device):
    plans = []
    for left in (-1, 2**31 - 1, 2**40):
        router = tritonattn.Router(8, 1, 64, dtype=torch.float32, device=device, window_size=(left, 0), block_size=16)
        plans.append(router.plan([1, 9], [8000, 400], torch.zeros(2, 500, dtype=torch.int32, device=device)))
    for plan in plans[1:]:
        assert (plan.decode.cut == plans[0].decode.cut).all()
        assert plan.extend.row_length == plans[0].extend.row_length


@pytest.mark.parametrize("query, seq, text", [
    ([1, 1], [2**31 - 1] * 2, "seq_lens must be at most 1073741824, got 2147483647"),
    ([2**30] * 3, [2**30] * 3, "query_lens must add up to at most 2147483647"),
    ([2] * 2, [2**30 - 7] * 2, "seq_lens of extend requests, in steps of 16, must add up to at most 2147483647, got 2147483648"),
])  # fmt: skip
def test_lengths_that_no_sum_of_positions_holds(device, query, seq, text):
    router = tritonattn.Router(8, 1, 64, dtype=torch.float32, device=device)
    table = None if query == seq else torch.zeros(2, 4, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=text):
        router.plan(query, seq, table)
