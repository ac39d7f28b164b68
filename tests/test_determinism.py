"""Twenty identical calls, identical bits: for every path and several numbers of splits; tiny in the interpreter, as served on a GPU."""

from __future__ import annotations

import pytest
import torch

from tests import cases, mla_cases
from tests.test_mla_router import Layer

ON_GPU = torch.cuda.is_available()
SPLITS = [0, 1, 2, 3, 7, 16, 64, 128] if ON_GPU else [1, 3, 20]
LENS = [(1, 5000), (3, 1000), (2, 2), (1, 129)] if ON_GPU else [(1, 90), (2, 30), (1, 1)]
SHAPE = {"dtype": torch.bfloat16, "head_size": 128, "heads": (16, 2)} if ON_GPU else {}


def check(run, times=20 if ON_GPU else 3):
    first = [x.clone() for x in run()]
    for _ in range(times - 1):
        for got, want in zip(run(), first, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("layout", ["nhd", "hnd", "preshuffled"])
@pytest.mark.parametrize("num_splits", SPLITS)
def test_decode(device, layout, num_splits):
    case = cases.decode(LENS, layout=layout, **SHAPE)
    check(lambda: case.run(device, num_splits=num_splits), 20 if ON_GPU or num_splits == 3 else 3)


@pytest.mark.parametrize("num_splits", SPLITS)
def test_decode_of_an_fp8_cache(device, num_splits):
    shape = SHAPE or {"dtype": torch.bfloat16}
    case = cases.decode(LENS, layout="preshuffled", kv_dtype=cases.fp8_dtypes(device)[0], k_descale=0.5, v_descale=0.5, **shape)
    check(lambda: case.run(device, num_splits=num_splits))


@pytest.mark.parametrize("num_splits", SPLITS)
def test_mla_decode(device, num_splits):
    shape = {"heads": 16, "latent": 512, "rope": 64, "dtype": torch.bfloat16, "block_size": 64} if ON_GPU else {}
    case = mla_cases.decode(LENS, **shape)
    check(lambda: case.run(device, num_splits=num_splits), 20 if ON_GPU or num_splits == 3 else 3)


def test_prefill_and_extend(device):
    pairs = [(900, 900), (77, 1500), (1, 1)] if ON_GPU else [(9, 9), (3, 40)]
    prefill = cases.prefill(pairs, options={"causal": True}, **SHAPE)
    check(lambda: prefill.run(device))
    for layout in ("nhd", "preshuffled"):
        extend = cases.extend(pairs, layout=layout, **SHAPE)
        check(lambda extend=extend: extend.run(device, chunk_tokens=512 if ON_GPU else 16))


def test_router(device):
    """Each step planned anew."""
    lens = [*LENS, (50, 200), (30, 30), (0, 0)]
    case = cases.Mixed(cases.Batch(lens, **SHAPE), threshold=3)
    router = case.router(device, chunk_tokens=128)
    check(lambda: case.run(device, router))
    layer = Layer([(1, 90), (20, 60), (9, 9), (2, 70)], threshold=2)
    mla = layer.router(device)
    check(lambda: layer.run(device, mla)[:2])
