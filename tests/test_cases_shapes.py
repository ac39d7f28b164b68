"""Cases from the field about shapes; a test is named after the number of its case."""

import pytest
import torch

from tests import cases

MAKERS = {"extend": cases.extend, "decode": cases.decode}


@pytest.mark.parametrize("query", [1, 2, 3, 17])
@pytest.mark.parametrize("heads", [(40, 8), (48, 8), (28, 4), (96, 8), (71, 1), (3, 1)], ids=str)
def test_case_29_any_gqa_ratio(device, heads, query):
    """V is the KV head's number: head h gives exactly h // ratio, and the column of heads after the last one keeps its marks."""
    batch = cases.Batch([(query, 20)], heads=heads).head_ids()
    out, _ = cases.decode(batch, layout="preshuffled").run(device)
    expected = (torch.arange(heads[0]) // (heads[0] // heads[1])).float()[None, :, None]
    torch.testing.assert_close(out.cpu(), expected.expand_as(out), rtol=1e-6, atol=0)


@pytest.mark.parametrize("ratio", range(1, 17))
def test_case_32_every_ratio_through_every_form_of_decode(device, ratio):
    for layout, num_splits in (("hnd", 1), ("preshuffled", 3)):
        cases.decode([(1, 70), (2, 17)], heads=(ratio, 1), layout=layout).check(device, num_splits=num_splits)


@pytest.mark.parametrize("block_size", [1, 8])
@pytest.mark.parametrize("layout", ["nhd", "hnd", "preshuffled"])
def test_case_34_small_blocks(device, layout, block_size):
    for make in MAKERS.values():
        case_of = {"layout": layout, "block_size": block_size}
        if layout == "preshuffled" and block_size % 4:
            with pytest.raises(ValueError, match="block_size must be a multiple of 4"):
                make([(1, 20)], **case_of)
        else:
            make([(1, 20), (2, 9)], **case_of).check(device)


@pytest.mark.parametrize("head_size", [64, 72, 80, 96, 112, 120, 128, 160, 192, 256])
def test_case_35_the_last_column_counts(device, head_size):
    """Q and K are zero but for their last column; the columns after the head keep their marks."""
    batch = cases.Batch([(3, 21), (1, 40)], head_size=head_size, heads=(2, 1))
    batch.q[..., :-1] = 0
    for keys in batch.keys:
        keys[..., :-1] = 0
    batch.q *= 5
    batch.refresh()
    cases.decode(batch, layout="preshuffled").check(device)
    cases.decode(batch, layout="nhd").check(device, num_splits=2)
    cases.extend(batch, layout="hnd").check(device)
    case = cases.prefill([(3, 3), (20, 20)], head_size=head_size, heads=(2, 1), options={"causal": True})
    for name in "qk":
        case.args[name][..., :-1] = 0
    case.check(device)


@pytest.mark.parametrize("head_size", [32, 48])
def test_case_36_small_heads_are_written_whole(device, head_size):
    for layout in ("nhd", "preshuffled"):
        cases.decode([(1, 30), (4, 17)], head_size=head_size, layout=layout).check(device)


@pytest.mark.parametrize("layout", ["nhd", "hnd", "preshuffled"])
def test_case_39_value_heads_of_another_size_in_the_cache(device, layout):
    """Written next to marks, then read: test_mha has the byte comparison, this the round trip at 192 / 128."""
    import tritonattn

    batch = cases.Batch([(0, 40)], head_size=192, v_head_size=128, heads=(2, 2))
    cache = batch.cache([40], layout=layout)
    k_cache, v_cache = (torch.full_like(x, cases.MARK).to(device) for x in (cache.k, cache.v))
    position = torch.arange(40)
    slots = cache.table[0].long()[position // 16] * 16 + position % 16
    key, value = batch.keys[0].to(device), batch.values[0].to(device)
    tritonattn.reshape_and_cache(key, value, k_cache, v_cache, slots.to(device), kv_layout=layout)
    for got, want, needed in ((k_cache, cache.k, cache.needed_k), (v_cache, cache.v, cache.needed_v)):
        assert torch.equal(got.cpu(), torch.where(needed, want, torch.tensor(cases.MARK)))


@pytest.mark.parametrize("count", [65, 260])
def test_the_sequence_of_a_tile_is_found_among_many(device, count):
    """`find_tile` looks at 64 starts at a time: sequences before, on and after that bound, empty ones among them."""
    lens = [(n := (i * 7) % 4, n) for i in range(count)]
    cases.prefill(lens, head_size=32, heads=(1, 1), options={"causal": True}).check(device)
