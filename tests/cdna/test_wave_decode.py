"""Decode in the form for CDNA: right in the interpreter, and free of LDS traffic in its loops when compiled."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tritonattn
from tritonattn import layouts, reference
from tritonattn.paths import decode_wave
from tritonattn.tuning.arch import assume, by_name
from tritonattn.tuning.table import pin

HERE = Path(__file__).parent
WAVE = {"BLOCK_N": 128, "NUM_STAGES": 1, "num_warps": 4, "num_stages": 1, "form": "wave", "programs_per_cu": 1}

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in Triton's interpreter")


def attend(layout="preshuffled", lens=(300, 437), q_lens=None, heads=8, kv_heads=2, head_size=128, block_size=16, dtype=torch.float16, kv_dtype=None,
           order=0, monkeypatch=None, config=WAVE, seed=0, **options):  # fmt: skip
    """Runs `decode_attention` over a cache whose every dead slot, block and table entry is poison; returns (out, lse), reference."""
    gen = torch.Generator().manual_seed(seed)
    q_lens = q_lens or [1] * len(lens)
    pages = -(-max(lens) // block_size) + 1
    blocks = len(lens) * pages + 2
    k, v = (torch.randn(blocks, block_size, kv_heads, head_size, generator=gen).to(kv_dtype or dtype) for _ in range(2))
    table = torch.randperm(blocks, generator=gen)[: len(lens) * pages].reshape(len(lens), pages).int()
    live = torch.zeros(blocks, block_size, dtype=torch.bool)
    for row, n in zip(table, lens, strict=True):
        live[row[: -(-n // block_size)].long()] = True
        if n % block_size:
            live[row[n // block_size], n % block_size :] = False
    q = torch.randn(sum(q_lens), heads, head_size, generator=gen).to(dtype)
    common = {"seqused_k": torch.tensor(lens, dtype=torch.int32), "max_seqlen_k": max(lens), "max_seqlen_q": max(q_lens),
              "kv_layout": layout, **options}  # fmt: skip
    if max(q_lens) > 1 or min(q_lens) < 1:
        common["cu_seqlens_q"] = torch.tensor([0, *torch.tensor(q_lens).cumsum(0)], dtype=torch.int32)
    expected = reference.decode_attention(q, *layouts.from_nhd(k, v, layout), block_table=table, **common)
    for cache in (k, v):
        if kv_dtype:  # the NaN code of e4m3fn and of e5m2
            cache.view(torch.uint8)[~live] = 0x7F
        else:
            cache[~live] = torch.nan
    for row, n in zip(table, lens, strict=True):
        row[-(-n // block_size) :] = 1 << 30
    if monkeypatch:
        monkeypatch.setattr(decode_wave, "pick_order", lambda *_: order)
    with assume(pin(by_name("interpreter"), decode=config, combine={"num_warps": 1, "BLOCK_S": 16})):
        got = tritonattn.decode_attention(q, *layouts.from_nhd(k, v, layout), block_table=table, return_lse=True, **common)
    return got, expected


def check(got, expected, tolerance=2e-3):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance)


@interpreted
@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("layout", ["preshuffled", "nhd", "hnd"])
@pytest.mark.parametrize("case", [
    {},
    {"lens": (300, 17, 1, 0), "num_splits": 1},
    {"lens": (128, 256, 257), "num_splits": 2},
    {"lens": (300, 17, 5, 437), "q_lens": [3, 4, 2, 1], "num_splits": 3, "block_size": 48, "window_size": (64, 0), "sinks": True},
    {"lens": (300, 17, 437), "q_lens": [5, 4, 0], "heads": 24, "num_splits": 2, "softcap": 3.0, "alibi_slopes": True, "sinks": True},
    {"lens": (700,), "q_lens": [3], "causal": False, "window_size": (300, 2), "num_splits": 2, "block_size": 544},
    {"lens": (5, 140), "num_splits": 7, "heads": 2, "dtype": torch.float32},
])  # fmt: skip
def test_semantics(layout, order, case, monkeypatch):
    case = dict(case)
    for name in ("sinks", "alibi_slopes"):
        if name in case:
            case[name] = torch.rand(case.get("heads", 8), generator=torch.Generator().manual_seed(1))
    check(*attend(layout, order=order, monkeypatch=monkeypatch, **case))


@interpreted
@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("layout", ["preshuffled", "nhd"])
@pytest.mark.parametrize("head_size", [64, 72, 80, 96, 192, 256])
def test_head_sizes(layout, head_size, order, monkeypatch):
    check(*attend(layout, lens=(150, 33), head_size=head_size, order=order, monkeypatch=monkeypatch))


@interpreted
@pytest.mark.parametrize("block_size", [1, 5, 8, 20])
def test_any_plain_block_size(block_size):
    check(*attend("nhd", lens=(140, 17), block_size=block_size))


@interpreted
@pytest.mark.parametrize("block_size", [8, 24, 40])
def test_preshuffled_block_sizes(block_size):
    check(*attend("preshuffled", lens=(140, 17), block_size=block_size))


@interpreted
@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("layout", ["preshuffled", "nhd"])
@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_cache(layout, kv_dtype, order, monkeypatch):
    """q and P go into the products as two fp8 numbers each, which leaves the error of the cache itself far ahead of that of the kernel.

    Triton's interpreter cuts where the hardware rounds.
    """
    common = {"lens": (300, 77, 0), "q_lens": [2, 1, 1], "kv_dtype": kv_dtype, "k_descale": 0.5, "v_descale": torch.tensor([2.0, 0.25]),
              "order": order, "monkeypatch": monkeypatch, "config": {**WAVE, "BLOCK_N": 256}}  # fmt: skip
    check(*attend(layout, **common), tolerance=0.02)
    check(*attend(layout, head_size=96, num_splits=2, **common), tolerance=0.02)


@interpreted
@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("layout", ["preshuffled", "nhd"])
@pytest.mark.parametrize("case", [
    {"q_lens": [8, 5], "num_splits": 2, "config": {**WAVE, "BLOCK_N": 64, "WAVE_ROWS": 16}},  # 32 rows: two groups, two parts of the tokens
    {"q_lens": [9, 16], "config": {**WAVE, "BLOCK_N": 64, "WAVE_ROWS": 32}},  # 64 rows
    {"q_lens": [16, 2], "heads": 6, "num_splits": 3, "window_size": (90, 0), "alibi_slopes": True, "sinks": True, "head_size": 96,
     "config": {**WAVE, "BLOCK_N": 32, "WAVE_ROWS": 16}},  # 48 rows of 64: four groups, each over all tokens
    {"q_lens": [9, 16], "head_size": 256, "kv_dtype": torch.float8_e4m3fn, "config": {**WAVE, "BLOCK_N": 32, "WAVE_ROWS": 16}},
])  # fmt: skip
def test_row_groups(layout, order, case, monkeypatch):
    """Waves that have the same tokens and other query rows."""
    case = dict(case)
    for name in ("sinks", "alibi_slopes"):
        if name in case:
            case[name] = torch.rand(case.get("heads", 8), generator=torch.Generator().manual_seed(1))
    tolerance = 0.02 if "kv_dtype" in case else 2e-3
    check(*attend(layout, lens=(150, 77), order=order, monkeypatch=monkeypatch, **case), tolerance)


@interpreted
@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("layout", ["preshuffled", "nhd"])
@pytest.mark.parametrize("head_size, kv_dtype", [(32, None), (48, None), (32, torch.float8_e4m3fn), (48, torch.float8_e4m3fn), (256, torch.float8_e4m3fn)])
def test_few_tokens_and_narrow_heads(layout, head_size, kv_dtype, order, monkeypatch):
    """32 fp8 tokens of a wave are less than its four lane groups have room for at 16 bytes each; nor do 32 columns fill them."""
    case = {"lens": (150, 33), "block_size": 32, "order": order, "monkeypatch": monkeypatch, "head_size": head_size, "kv_dtype": kv_dtype}
    check(*attend(layout, **case), 0.02 if kv_dtype else 2e-3)


@pytest.fixture(scope="module", params=["gfx942", "gfx950"])
def compiled(request):
    """(arch, case -> figures) of `wave_cases.py`, made in a process where Triton compiles."""
    path = os.pathsep.join([str(HERE.parents[1]), *sys.path])
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, str(HERE / "wave_cases.py"), request.param], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return request.param, json.loads(done.stdout)["cases"]


@pytest.mark.slow
def test_no_lds_no_barrier_no_spill(compiled):
    _, cases = compiled
    for name, case in cases.items():
        assert case["kernel"] == "decode_wave", name
        assert (case["lds_traffic"], case["barriers"], case["reasons"]) == (0, 0, []), name
        assert case["occupancy"] >= 2, name
        assert case["loops"] == 2, name


# Instructions per wave and 32 tokens in the unmasked loop, head size 128, 16 bits.
LIMITS = {"gfx942": {"preshuffled": 232, "nhd": 262, "hnd": 262}, "gfx950": {"preshuffled": 177, "nhd": 216, "hnd": 216}}


@pytest.mark.slow
def test_instruction_budget(compiled):
    arch, cases = compiled
    for name, limit in LIMITS[arch].items():
        assert cases[name]["main"]["instructions"] <= limit, name
    assert cases["preshuffled fp8"]["main"]["instructions"] <= 250  # 64 tokens
