"""Encoder, cross and chunked-local attention through vLLM's own wrappers; what is left to vLLM's kernels, and when that is refused."""

import numpy as np
import pytest
import torch
from harness import Layer, attention, common, v2_order
from vllm.model_executor.layers.attention.chunked_local_attention import create_chunked_local_attention_backend
from vllm.model_executor.layers.attention.cross_attention import create_cross_attention_backend
from vllm.model_executor.layers.attention.encoder_only_attention import create_encoder_only_attention_backend
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum

OURS = AttentionBackendEnum.TRITON_ATTN.get_class()
MIXED = [(1, 33), (40, 100), (3, 20), (20, 20)]


@pytest.fixture(params=["packed", "preshuffled"])
def layout(request, monkeypatch):
    monkeypatch.setenv("TRITONATTN_VLLM_KV_LAYOUT", request.param)
    return request.param


def close(out, expected, atol=1e-5, rtol=1e-5):
    torch.testing.assert_close(out.double(), expected, atol=atol, rtol=rtol)


@pytest.mark.parametrize("window", [None, 8])
def test_encoder_only(window):
    layer = Layer(attn_type=AttentionType.ENCODER_ONLY, backend=create_encoder_only_attention_backend(OURS), window=window)
    lengths = [5, 40, 17]
    q, k, v = layer.tokens(62, 4), layer.tokens(62, 2), layer.tokens(62, 2)
    meta = common(lengths, lengths, torch.zeros(3, 16, dtype=torch.int32), torch.full((62,), -1))
    out = torch.full_like(q, float("nan"))
    layer.impl.do_kv_cache_update(layer.layer, k, v, layer.kv_cache, meta.slot_mapping)
    layer.impl.forward(layer.layer, q, k, v, layer.kv_cache, layer.builder.build(0, meta), out)
    parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    close(out, torch.cat([attention(*part, 0.125, causal=False, window=window, two_sided=True) for part in parts]))


def test_cross_attention(layout):
    """A decoder prompt longer than what it attends to, one that is shorter, and a later token of a third request."""
    layer = Layer(attn_type=AttentionType.ENCODER_DECODER, backend=create_cross_attention_backend(OURS))
    requests, encoder = [(1, 9), (12, 12), (3, 3)], [50, 7, 20]
    table = layer.table(encoder)
    k, v = [layer.tokens(n, 2) for n in encoder], [layer.tokens(n, 2) for n in encoder]
    layer.impl.do_kv_cache_update(layer.layer, k[0], v[0], layer.kv_cache, layer.slots(table[0], 0, 50))  # at its first step
    q = [layer.tokens(n, 4) for n, _ in requests]
    meta = common([r[0] for r in requests], [r[1] for r in requests], table, torch.full((16,), -1))
    meta.encoder_seq_lens = torch.tensor(encoder, dtype=torch.int32)
    meta.encoder_seq_lens_cpu = np.array(encoder, np.int32)
    out = torch.full((16, 4, 64), float("nan"))
    new_k, new_v = torch.cat(k[1:]), torch.cat(v[1:])
    layer.impl.forward(layer.layer, torch.cat(q), new_k, new_v, layer.kv_cache, layer.builder.build(0, meta), out)
    close(out, torch.cat([attention(*part, 0.125, causal=False) for part in zip(q, k, v, strict=True)]))


def test_chunked_local_attention(layout):
    """vLLM cuts each request into requests of a chunk each."""
    layer = Layer(backend=create_chunked_local_attention_backend(OURS, 32))
    close(*layer.step([(1, 33), (40, 100), (20, 20), (1, 90)], chunk=32))
    assert len(layer.metadata.batch.query_lens) == 6 and max(layer.metadata.batch.query_lens) <= 32


def test_lengths_that_the_host_does_not_know(layout):
    def build(builder, meta):
        meta.seq_lens_cpu_upper_bound = None
        return builder.build(0, meta)

    close(*Layer().step(v2_order(MIXED), built=build))
    close(*Layer().step([(1, 33), (1, 70)], built=build))


@pytest.mark.parametrize("kwargs, reason", [
    ({"kv_cache_dtype": "int8_per_token_head"}, "scales per token and head"), ({"chunk_lookback": 1}, "chunks with lookback"),
    ({"use_alibi_sqrt": True}, "ALiBi of square roots"), ({"head_size": 264}, "head size 264"),
    ({"kv_cache_dtype": "bfloat16"}, "a bfloat16 cache"),
], ids=str)  # fmt: skip
def test_what_is_left_to_vllm(monkeypatch, kwargs, reason):
    """Such a layer keeps vLLM's cache format, whatever the setting says for the others."""
    monkeypatch.setenv("TRITONATTN_VLLM_KV_LAYOUT", "preshuffled")
    impl = Layer(**kwargs).impl
    assert impl.stock_reasons == [reason] and impl.kv_layout == "packed"


def test_delegated_layers_run(monkeypatch):
    monkeypatch.setenv("TRITONATTN_VLLM_KV_LAYOUT", "preshuffled")
    close(*Layer(kv_cache_dtype="int8_per_token_head").step(v2_order(MIXED)), atol=0.05, rtol=0.05)
    close(*Layer(head_size=264).step(v2_order(MIXED)))


def test_multimodal_ranges(layout):
    """Bidirectional ranges go to vLLM's kernel where the cache allows it, and are refused otherwise."""

    def build(builder, meta):
        meta.mm_req_doc_ranges = {1: [(2, 9)]}
        return builder.build(0, meta)

    layer = Layer()
    if layout == "packed":
        out, expected = layer.step([(1, 33), (20, 20)], built=build)
        close(out[:1], expected[:1])
        assert (out[1:].double() - expected[1:]).abs().max() > 1e-2
    else:
        with pytest.raises(NotImplementedError, match="packed"):
            layer.step([(1, 33), (20, 20)], built=build)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_quantised_output(layout, kv_cache_dtype):
    """The codes nearest to the result over the scale, from every path, and the largest of them beyond their range."""
    layer = Layer(kv_cache_dtype=kv_cache_dtype)
    assert layer.impl.fused_output_quant_supported(kFp8StaticTensorSym)
    scale = torch.tensor(0.0015)  # the largest code is 0.67
    out, expected = layer.step(v2_order([(1, 33), (40, 100), (3, 20), (20, 20), (1, 200)]), output_scale=scale)
    got = out.double() * scale.double()
    expected = expected.clamp(-448 * scale.double(), 448 * scale.double())
    assert (expected.abs() == 448 * scale.double()).any() and got.isfinite().all()
    noise = 0 if kv_cache_dtype == "auto" else 0.1  # of keys and values in 8 bits
    assert ((got - expected).abs() <= (2**-4 + 1e-3) * expected.abs() + 2**-10 * scale + noise).all()
