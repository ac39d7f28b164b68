"""What must not matter: the number of splits, the size of a chunk, the order of pages and of requests, and which path a token takes."""

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import tritonattn
from tests import cases
from tritonattn import layouts

CLOSE = {"rtol": 2e-5, "atol": 2e-5}
request_lens = st.tuples(st.integers(0, 5), st.integers(0, 90)).map(lambda pair: (min(pair[0], pair[0] + pair[1]), pair[0] + pair[1]))
batches = st.lists(request_lens, min_size=1, max_size=4)
layout_names = st.sampled_from(layouts.PAGED_LAYOUTS)
ratios = st.sampled_from([(1, 1), (5, 1), (6, 2), (3, 3)])
windows = st.sampled_from([(-1, -1), (0, 0), (7, 0), (40, 0)])


def assert_close(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


def assert_same(got, want):
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@given(lens=batches, layout=layout_names, heads=ratios, window=windows, num_splits=st.integers(2, 12), seed=st.integers(0, 99))
def test_splits(device, lens, layout, heads, window, num_splits, seed):
    case = cases.decode(lens, layout=layout, heads=heads, seed=seed, options={"window_size": window})
    assert_close(case.run(device, num_splits=num_splits), case.check(device, num_splits=1))


@given(lens=batches, layout=layout_names, window=windows, chunk=st.integers(1, 120), shared=st.booleans(), seed=st.integers(0, 99))
def test_chunks(device, lens, layout, window, chunk, shared, seed):
    case = cases.extend(lens, layout=layout, seed=seed, shared=shared, options={"window_size": window})
    assert_close(case.run(device, chunk_tokens=chunk), case.check(device))


@given(lens=batches, layout=layout_names, block_size=st.sampled_from([4, 12, 16, 20, 64]), seeds=st.tuples(st.integers(0, 99), st.integers(100, 199)))
def test_page_order(device, lens, layout, block_size, seeds):
    """To the bit, in decode and in extend."""
    for make in (cases.decode, cases.extend):
        results = []
        for seed in seeds:
            case = make(lens, layout=layout, block_size=block_size)
            stored = case.args["seqused_k" if make is cases.decode else "context_lens"].tolist()
            case.cache = cases.Batch(lens).cache(stored, layout=layout, block_size=block_size, seed=seed)
            results.append(case.run(device))
        assert_same(*results)


@given(lens=st.lists(request_lens, min_size=2, max_size=5), data=st.data())
def test_order_and_neighbours(device, lens, data):
    """In any order, and without some of the others, to the bit (batch_invariant) the same rows."""
    batch = cases.Batch(lens)
    router = cases.Mixed(batch, threshold=2).router(device, batch_invariant=True, chunk_tokens=32)
    out, lse = cases.Mixed(batch, threshold=2).run(device, router)
    chosen = data.draw(st.permutations(range(len(lens))))[: data.draw(st.integers(1, len(lens)))]
    other = cases.Batch([lens[i] for i in chosen])
    other.keys, other.values = [batch.keys[i] for i in chosen], [batch.values[i] for i in chosen]
    starts = cases.cumulative(batch.query_lens).tolist()
    rows = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in chosen])
    other.q[: other.tokens] = batch.q[rows]
    rows = rows.to(device)
    assert_same(cases.Mixed(other.refresh(), threshold=2).run(device, router), (out[rows], lse[:, rows]))


@given(query=st.integers(1, 40), context=st.integers(0, 60), layout=layout_names, heads=ratios, seed=st.integers(0, 99))
def test_one_answer_on_every_path(device, query, context, layout, heads, seed):
    """Prefill of all tokens, extend by the last, decode of the last few: the same rows."""
    batch = cases.Batch([(query, query + context)], heads=heads, seed=seed)
    want = cases.extend(batch, layout=layout).check(device)
    assert_close(cases.extend(batch, layout=layout, shared=True).run(device), want)
    assert_close(cases.decode(batch, layout=layout).run(device), want)
    prefill = cases.prefill([(query, query + context)], heads=heads, options={"causal": True})
    assert_close(prefill.run(device, q=batch.q, k=batch.keys[0], v=batch.values[0]), want)


@given(tokens=st.integers(1, 40), heads=st.integers(1, 5), size=st.sampled_from([16, 40, 64]), seed=st.integers(0, 99), data=st.data())
def test_merge_is_associative_and_symmetric(device, tokens, heads, size, seed, data):
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for _ in range(3):
        lse = torch.randn(heads, tokens, generator=generator) * 4
        lse[:, torch.rand(tokens, generator=generator) < data.draw(st.sampled_from([0.0, 0.3]))] = -torch.inf
        parts.append((torch.randn(tokens, heads, size, generator=generator).to(device), lse.to(device)))

    def merge(a, b):
        return tritonattn.merge_attn_states(*a, *b, return_lse=True)

    a, b, c = parts
    assert_close(merge(merge(a, b), c), merge(a, merge(b, c)))
    assert_close(merge(a, b), merge(b, a))


@given(keys=st.integers(2, 80), cut=st.integers(1, 79), window=st.booleans(), seed=st.integers(0, 99))
def test_parts_merge_to_the_whole(device, keys, cut, window, seed):
    """Two attentions over disjoint keys, the sink in one of them."""
    assume(cut < keys)
    sinks = torch.tensor([0.5, -1.0, 2.0])
    case = cases.prefill([(4, keys)], seed=seed)
    q, k, v = case.args["q"], case.args["k"], case.args["v"]
    whole = case.but(sinks=sinks).run(device)
    parts = []
    for begin, end, own in ((0, cut, sinks), (cut, keys, None)):
        lens = {"cu_seqlens_k": cases.cumulative([end - begin]), "max_seqlen_k": end - begin}
        parts += case.but(sinks=own).run(device, q=q, k=k[begin:end], v=v[begin:end], **lens)
    assert_close(tritonattn.merge_attn_states(*parts, return_lse=True), whole)


@given(st.sampled_from(["hnd", "preshuffled"]), st.integers(1, 3), st.sampled_from([8, 16, 48]), st.sampled_from([32, 72, 96]), st.sampled_from([32, 40]))
def test_layouts_round_trip(layout, heads, block_size, head_size, v_head_size):
    k = torch.randn(3, block_size, heads, head_size).bfloat16()
    v = torch.randn(3, block_size, heads, v_head_size).bfloat16()
    assert_same(layouts.to_nhd(*layouts.from_nhd(k, v, layout), layout), (k, v))
