"""Mixed batches through builder and layer of the TRITON_ATTN slot, against float64."""

import pytest
import torch
from harness import Layer, v1_order, v2_order

from tritonattn.integrations.vllm.batch import Planner
from tritonattn.router import Router

# A fresh prompt between extends, as model runner V2 leaves it: [decode, short extend, fresh prompt, long extend].
MIXED = [(1, 33), (40, 100), (3, 20), (1, 70), (20, 20), (1, 1)]
LAYOUTS = ["packed", "preshuffled"]
ORDERS = {"v1": v1_order, "v2": v2_order}


@pytest.fixture(params=LAYOUTS)
def layout(request, monkeypatch):
    monkeypatch.setenv("TRITONATTN_VLLM_KV_LAYOUT", request.param)
    return request.param


@pytest.fixture
def preshuffled(monkeypatch):
    monkeypatch.setenv("TRITONATTN_VLLM_KV_LAYOUT", "preshuffled")


def close(out, expected, atol=1e-5, rtol=1e-5):
    torch.testing.assert_close(out.double(), expected, atol=atol, rtol=rtol)


@pytest.mark.parametrize("order", ORDERS)
def test_mixed_batch(layout, order):
    layer = Layer()
    assert layer.impl.kv_layout == layout and not layer.impl.stock_reasons
    close(*layer.step(ORDERS[order](MIXED)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtypes(layout, dtype):
    close(*Layer(dtype=dtype).step(v2_order(MIXED)), atol=2e-2, rtol=1e-2)


def test_fp8_cache(layout):
    layer = Layer(kv_cache_dtype="fp8")
    out, expected = layer.step(v2_order(MIXED))
    close(out, expected, atol=0.1, rtol=0.1)
    assert layer.metadata.batch.plan(layer.impl._kind[1], layer.impl).decode is not None


@pytest.mark.parametrize("feature", [
    {"window": 16}, {"softcap": 2.0}, {"slopes": [0.5, 0.25, 0.125, 0.0625]}, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    {"window": 24, "softcap": 5.0, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
], ids=["window", "softcap", "alibi", "sinks", "all"])  # fmt: skip
def test_features(preshuffled, feature):
    close(*Layer(**feature).step(v2_order(MIXED)))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 2, 3), (0, 2, 1, 3)], ids=["BHN", "HBN", "BNH"])
def test_physical_orders(monkeypatch, order):
    monkeypatch.setenv("TRITONATTN_VLLM_KV_LAYOUT", "packed" if order[2] == 1 else "preshuffled")
    close(*Layer(order=order).step(v2_order(MIXED)))


def test_preshuffled_needs_contiguous_runs(preshuffled):
    with pytest.raises(ValueError, match="contiguous"):
        Layer(order=(0, 2, 1, 3)).step([(1, 5)])


@pytest.mark.parametrize("head_size, heads", [(32, (4, 1)), (80, (2, 2)), (96, (5, 1)), (128, (8, 2))])
def test_head_sizes(preshuffled, head_size, heads):
    close(*Layer(head_size=head_size, heads=heads).step(v2_order(MIXED[:4])))


def test_block_sizes(layout):
    close(*Layer(block_size=48, blocks=24).step(v2_order(MIXED[:4])))


def test_non_causal(layout):
    close(*Layer().step(v2_order(MIXED), causal=False))


def test_shared_cache_ignores_new_keys(layout):
    layer = Layer(share="another")
    close(*layer.step(v2_order(MIXED), keys=False))


def test_graph_padding(layout):
    """A padded decode-only batch, and the buffers that a captured graph reads at the next one."""
    layer = Layer()
    close(*layer.step([(1, 33), (1, 70), (1, 1)], padded_to=5))
    first = layer.metadata.batch.plan(layer.impl._kind[1], layer.impl)
    close(*layer.step([(1, 4), (1, 120), (1, 2), (1, 50)], padded_to=5))
    second = layer.metadata.batch.plan(layer.impl._kind[1], layer.impl)
    one, two = first.decode.work, second.decode.work
    assert one.items.data_ptr() == two.items.data_ptr() and one.merges.data_ptr() == two.merges.data_ptr()
    assert (one.num_items, one.num_merges, first.decode.plan) == (two.num_items, two.num_merges, second.decode.plan)


def test_decodes_are_planned_anew_when_contexts_change_by_more_than_a_few_tokens(layout, monkeypatch):
    layer, planned = Layer(), []
    monkeypatch.setattr(Planner, "_decode_part", lambda self, *args: (planned.append(args[3].tolist()), Router._decode_part(self, *args))[1])
    steps = [
        ([33, 70, 1], True), ([34, 71, 2], False), ([34, 70, 2], False), ([33, 133, 64], False),
        ([34, 134, 65], True), ([33, 134, 65], True), ([33, 134], True), ([33, 134, 65], True), ([34, 135, 66], False),
    ]  # fmt: skip
    for lengths, anew in steps:
        planned.clear()
        close(*layer.step([(1, length) for length in lengths]))
        assert planned == [lengths] * anew, lengths
        layer.free = list(range(1, 64))


@pytest.mark.parametrize("requests", [[(4, 40), (4, 9), (4, 4)], [(4, 40), (2, 9), (30, 60), (9, 9)]], ids=["uniform", "ragged"])
def test_speculation_trusts_the_device_for_decodes(layout, requests):
    """Under asynchronous scheduling the host's lengths of decode requests are only upper bounds."""
    upper = [seq + 3 if query <= 4 else seq for query, seq in requests]
    close(*Layer(speculated=3).step(requests, upper=upper))


def test_unannounced_query_lengths_go_by_the_device(preshuffled):
    requests = [(5, 40), (1, 9), (12, 30)]
    close(*Layer().step(requests, upper=[43, 9, 30], prefilling=[False, False, True]))


def test_batch_invariance(preshuffled, monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    results = []
    for others in ([], [(1, 33), (40, 60)]):
        torch.manual_seed(0)
        layer = Layer()
        assert layer.builder._planners == {}
        out, expected = layer.step([(1, 70), *others])
        close(out, expected)
        results.append(out[:1])
        layer.step([(1, 71)])  # not by the plan of the step before, which others may have had a part in
        assert all(planner._kept is None for planner in layer.builder._planners.values())
    assert layer.builder._planners and all(planner.batch_invariant for planner in layer.builder._planners.values())
    close(results[0], results[1].double(), 0, 0)


def test_profiling_run_writes_zeros():
    layer = Layer()
    out = torch.full((5, 4, 64), float("nan"))
    layer.impl.forward(layer.layer, layer.tokens(5, 4), None, None, layer.kv_cache, None, out)
    assert not out.any()
