"""The batches, head counts, options and tolerances of vLLM's own tests of its attention backends, through builder and layer."""

import harness
import pytest
import torch
from harness import Layer, v2_order

BACKEND_BATCHES = {  # tests/v1/attention: (query, sequence) lengths
    "small_decode": [(1, 32), (1, 40)],
    "small_prefill": [(8, 32), (8, 40)],
    "mixed_small": [(1, 32), (1, 40), (5, 48), (5, 56)],
    "medium_decode": [(1, n) for n in (128, 256, 512, 1024, 128, 256, 512, 1024)],
    "medium_prefill": [(16, 256), (16, 512)],
    "mixed_medium": [(1, 512), (1, 1024), (7, 512), (7, 1024)],
    "with_fresh_prompt": [(1, 32), (1, 40), (5, 48), (5, 56), (24, 24)],
}
KERNEL_BATCHES = {"mixed": [(1, 1328), (5, 18), (129, 463)], "decode": [(1, 523), (1, 37), (1, 2011)]}  # tests/kernels/attention
TOLERANCE = {"atol": 1e-2, "rtol": 1e-2}


@pytest.fixture(autouse=True)
def long_sequences(monkeypatch):
    monkeypatch.setattr(harness, "MAX_MODEL_LEN", 2048)


def check(requests, tolerance=TOLERANCE, **options):
    out, expected = Layer(blocks=300, dtype=torch.bfloat16, **options).step(v2_order(requests))
    torch.testing.assert_close(out.double(), expected, **tolerance)


@pytest.mark.parametrize("batch", BACKEND_BATCHES)
@pytest.mark.parametrize("layout", ["packed", "preshuffled"])
def test_backend_batches(monkeypatch, batch, layout):
    """Llama-3-8B's heads on 4 GPUs."""
    monkeypatch.setenv("TRITONATTN_VLLM_KV_LAYOUT", layout)
    check(BACKEND_BATCHES[batch], heads=(8, 2), head_size=128)


@pytest.mark.parametrize("batch, window, kv_cache_dtype", [("with_fresh_prompt", 16, "auto"), ("with_fresh_prompt", None, "fp8"), ("mixed_small", None, "fp8")])
def test_windows_and_fp8(monkeypatch, batch, window, kv_cache_dtype):
    monkeypatch.setenv("TRITONATTN_VLLM_KV_LAYOUT", "preshuffled")
    fp8 = {"atol": 6e-2, "rtol": 1e-1}
    check(BACKEND_BATCHES[batch], TOLERANCE if kv_cache_dtype == "auto" else fp8, heads=(8, 2), head_size=128, window=window, kv_cache_dtype=kv_cache_dtype)


@pytest.mark.parametrize("batch, heads, head_size, window, softcap", [
    ("mixed", (4, 4), 128, None, None), ("mixed", (5, 1), 128, 64, None), ("decode", (8, 2), 128, None, 50.0), ("decode", (5, 1), 256, 128, None),
])  # fmt: skip
def test_kernel_batches(monkeypatch, batch, heads, head_size, window, softcap):
    monkeypatch.setenv("TRITONATTN_VLLM_KV_LAYOUT", "preshuffled")
    check(KERNEL_BATCHES[batch], {"atol": 1.5e-2, "rtol": 1e-2}, heads=heads, head_size=head_size, window=window, softcap=softcap)
