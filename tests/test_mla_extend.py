"""MLA prefill and extend, not absorbed, against the float64 reference."""

import copy
import math

import pytest
import torch

import tritonattn
from tests import cases, mla_cases
from tritonattn import mla

LENS = [(5, 37), (1, 16), (0, 20), (33, 70), (2, 2), (0, 0)]


def exact_total(case):
    return {"total_context_len": int(case.args["context_lens"].sum())}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("chunk_tokens", [16, 48, 32768])
def test_ragged_batches(device, chunk_tokens, causal):
    case = mla_cases.extend(LENS, options={"causal": causal})
    bound = case.check(device, chunk_tokens=chunk_tokens)
    exact = case.check(device, chunk_tokens=chunk_tokens, **exact_total(case))
    assert chunk_tokens != 32768 or torch.equal(bound[0], exact[0])


@pytest.mark.parametrize("context", [31, 32, 33, 64, 65])
def test_chunk_edges(device, context):
    """Contexts around multiples of the chunk, two requests in one chunk and one request across several; no empty chunk at the end."""
    case = mla_cases.extend([(3, 3 + context), (2, 2 + context)])
    results = []
    for chunk_tokens in (16, 32, 64, 128, 4096):
        case.args["up_project"].calls.clear()
        results.append(case.check(device, chunk_tokens=chunk_tokens, **exact_total(case))[0])
        calls = list(case.args["up_project"].calls)[: -(-2 * context // chunk_tokens)]
        assert sum(calls) == 2 * context, "every cached row goes through the projection once"
        assert max(calls) <= chunk_tokens
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=1e-5)


def test_no_context_needs_no_projection(device):
    case = mla_cases.extend([(5, 5), (3, 3)])
    case.run(device)
    assert case.args["up_project"].calls == []


def test_rows_of_no_token_are_zeros(device):
    """Without the total the rows are counted as B * max: `UpProject` refuses garbage."""
    case = mla_cases.extend([(1, 100), (1, 3)])
    case.check(device, chunk_tokens=64)
    assert sum(case.args["up_project"].calls[:4]) == 198


def test_a_loose_bound_is_that_of_the_table(device):
    """No row is projected that it cannot hold."""
    case = mla_cases.extend([(1, 30), (1, 3)])
    calls, room = case.args["up_project"].calls, 2 * case.cache.table.shape[1] * 16
    for total in (None, 1_000_000):
        case.run(device, chunk_tokens=64, max_context_len=1_000_000, total_context_len=total)
        assert sum(calls) == room
        calls.clear()


@pytest.mark.parametrize("wrong", [0, cases.WILD_BLOCK], ids=["poisoned block", "no block"])
def test_a_sequence_without_queries_needs_no_keys(device, wrong):
    """Its row of the block table may hold anything, and no row of its context is projected."""
    for causal in (True, False):
        case = mla_cases.extend([(0, 200), (7, 40), (0, 90), (30, 64)], options={"causal": causal})
        case.check(device)
        exact = copy.deepcopy(case)  # the oracle has the whole table
        case.cache.table[0::2] = wrong
        for total in (None, 33 + 34, 33 + 34 + 5):  # the contexts of those with queries, and more than that
            for chunk_tokens in (32, 32768):
                got = case.run(device, total_context_len=total, chunk_tokens=chunk_tokens)
                want = exact.run(device, total_context_len=total, chunk_tokens=chunk_tokens)
                assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))
        case.args["up_project"].calls.clear()
        case.run(device, total_context_len=33 + 34)
        assert sum(case.args["up_project"].calls) == 33 + 34


def test_lengths_beyond_what_the_host_was_told_stay_inside(device, monkeypatch):
    """Rows are wrong; nothing is written beside the scratch and the result."""
    monkeypatch.setattr(mla, "Fresh", cases.Guarded)
    case = mla_cases.extend([(9, 100), (20, 60)])
    for told in ({"max_context_len": 16}, {"total_context_len": 20}, {"total_context_len": 0}, {"max_context_len": 0}):
        case.run(device, "zero", chunk_tokens=48, **told)
        assert cases.Guarded.intact()


@pytest.mark.parametrize("block_size", [1, 16, 48, 64])
def test_block_sizes(device, block_size):
    mla_cases.extend([(5, 132), (1, 65)], block_size=block_size).check(device, chunk_tokens=64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("nope,v_head_size", [(32, 32), (128, 128)])
def test_dtypes_and_head_sizes(device, dtype, nope, v_head_size):
    rope = 64 if nope == 128 else 16
    mla_cases.extend([(5, 37), (3, 20)], dtype=dtype, nope=nope, rope=rope, v_head_size=v_head_size).check(device, chunk_tokens=16)


@pytest.mark.parametrize("descales", [{"kv_descale": 0.25}, {"kv_descale": torch.tensor([0.125]), "rope_descale": 0.5}], ids=str)
def test_fp8_cache(device, descales):
    """Powers of two, with which a dequantised number is a bfloat16: Triton's interpreter cuts off where hardware rounds."""
    for kv_dtype in cases.fp8_dtypes(device):
        mla_cases.extend([(5, 37), (3, 20)], dtype=torch.bfloat16, kv_dtype=kv_dtype, **descales).check(device, chunk_tokens=16)


def test_dead_slots_and_scratch_never_show(device, monkeypatch):
    case = mla_cases.extend(LENS, options={"chunk_tokens": 32})
    clean = case.run(device, "zero")
    monkeypatch.setattr(mla.Fresh, "take", lambda self, _, numel, dtype: torch.full((numel,), math.nan, dtype=dtype, device=self.device))
    for poison in ("nan", "inf", "huge"):
        got = case.run(device, poison)
        assert torch.equal(got[0], clean[0]) and torch.equal(got[1], clean[1])


def test_scratch_is_bounded_by_the_chunk(device, monkeypatch):
    taken = {}

    def take(self, name, numel, dtype):
        taken[name] = taken.get(name, 0) + numel
        return torch.empty(numel, dtype=dtype, device=self.device)

    monkeypatch.setattr(mla.Fresh, "take", take)
    mla_cases.extend([(1, 400), (1, 300)]).run(device, chunk_tokens=48)
    assert taken["extend_latent"] == 48 * 80


@pytest.mark.parametrize("sizes", [(192, 128), (48, 32)])
def test_prefill_with_values_narrower_than_keys(device, sizes):
    """Output columns past the values are not touched, whatever lies beside them."""
    cases.prefill([(37, 37), (1, 1), (0, 0), (20, 20)], heads=(2, 2), head_size=sizes[0], v_head_size=sizes[1], options={"causal": True}).check(device)


@pytest.mark.parametrize("changes,words", [
    ({"up_project": None}, ["up_project must be callable"]),
    ({"softmax_scale": 0.0}, ["softmax_scale"]),
    ({"total_context_len": -1, "chunk_tokens": 0}, ["total_context_len", "chunk_tokens"]),
    ({"kv_lora_rank": 70}, ["latent columns"]),
    ({"kv_lora_rank": "x"}, ["kv_lora_rank must be an int"]),
    ({"up_project": lambda latent, rope: (latent, rope)}, ["k from up_project must have 3 dimensions"]),
    ({"up_project": lambda latent, rope: (latent.new_zeros(len(latent), 3, 48), latent.new_zeros(len(latent), 3, 16))}, ["v from up_project must be"]),
    ({"up_project": lambda latent, rope: latent}, ["up_project must give back a pair .k, v. of tensors, got Tensor"]),
    ({"up_project": lambda latent, rope: (latent,) * 3}, ["up_project must give back a pair .k, v. of tensors, got 3 of them"]),
    ({"up_project": lambda latent, rope: (None, latent)}, ["k from up_project must be a tensor, got NoneType; v from up_project must have 3 dim"]),
    ({"up_project": lambda latent, rope: (latent.new_zeros(len(latent), 3, 48).half(), latent.new_zeros(len(latent), 3, 32))}, ["k from up_project must be"]),
    ({"up_project": lambda latent, rope: [latent.new_zeros(len(latent), 3, size, device="meta") for size in (48, 32)]},
     ["k from up_project must be on", "v from up_project must be on"]),
])  # fmt: skip
def test_bad_input_is_named(device, changes, words):
    case = mla_cases.extend([(3, 20)])
    args = {name: cases.to(value, device) for name, value in {"kv_cache": case.cache.clean, "block_table": case.cache.table, **case.args}.items()}
    with pytest.raises((ValueError, TypeError)) as error:
        tritonattn.mla_extend(**{**args, **changes})
    for word in words:
        error.match(word)
