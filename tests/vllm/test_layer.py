"""vLLM's own Attention layers under a real VllmConfig: selection, cache views in every physical layout, custom ops, forward context."""

import pytest
import torch
import vllm.platforms.interface as platforms
from harness import attention, common
from vllm.config import AttentionConfig, DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention.attention import Attention
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheTensor, compute_layout_strides, create_kv_cache_views
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.gpu.model_runner import sort_batch_req_ids

HEADS, KV_HEADS, SIZE, BLOCKS, BS = 4, 2, 64, 24, 16
NAMES = ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"]
REQUESTS = {"fresh": (20, 20), "decode": (1, 33), "long": (40, 100), "short": (3, 20)}


@pytest.fixture
def selecting(monkeypatch):
    """The platform here selects nothing: it takes what the config names, as CUDA's and ROCm's do."""
    choose = classmethod(lambda _, backend, **__: backend.get_path())
    monkeypatch.setattr(platforms.UnspecifiedPlatform, "get_attn_backend_cls", choose, raising=False)


@pytest.mark.parametrize("kv_layout, layout", [
    *[("packed", layout) for layout in ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")],
    *[("preshuffled", layout) for layout in ("LBHNC", "LHBNC", "BLHNC", "BHLNC")],
])  # fmt: skip
def test_two_layers(monkeypatch, selecting, kv_layout, layout):
    monkeypatch.setenv("TRITONATTN_VLLM_KV_LAYOUT", kv_layout)
    config = VllmConfig(device_config=DeviceConfig(device="cpu"), attention_config=AttentionConfig(backend="TRITON_ATTN"))
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        with set_current_vllm_config(config):
            layers = [Attention(HEADS, SIZE, SIZE**-0.5, num_kv_heads=KV_HEADS, prefix=name) for name in NAMES]
            for layer in layers:
                layer.process_weights_after_loading(torch.float16)
            spec = layers[0].get_kv_cache_spec(config)
    finally:
        torch.set_default_dtype(default)
    backend = layers[0].attn_backend
    assert backend is AttentionBackendEnum.TRITON_ATTN.get_class() and layers[0].impl.kv_layout == kv_layout
    chosen = KVCacheLayout[layout]
    assert backend.supported_kv_cache_layouts() is None or chosen in backend.supported_kv_cache_layouts()

    page = spec.page_size_bytes
    raw = torch.full((2 * BLOCKS * page,), 0x7E, dtype=torch.int8)  # NaN as float16
    layer_stride, block_stride, *_ = compute_layout_strides(spec, BLOCKS, len(NAMES), chosen)
    placed = KVCacheTensor(size=raw.numel(), layers=NAMES, layer_stride=layer_stride, block_stride=block_stride)
    views = create_kv_cache_views(raw, spec, BLOCKS, chosen, placed)
    for layer, view in zip(layers, views, strict=True):
        layer.kv_cache = view

    order = sort_batch_req_ids({name: query for name, (query, _) in REQUESTS.items()}, {}, 1)
    assert order == ["decode", "short", "fresh", "long"]
    requests = [REQUESTS[name] for name in order]
    free, table = (torch.randperm(BLOCKS - 1) + 1).tolist(), torch.zeros(len(requests), 8, dtype=torch.int32)
    for row, (_, seq) in zip(table, requests, strict=True):
        for i in range(-(-seq // BS)):
            row[i] = free.pop()

    def slots(row, begin, end):
        at = torch.arange(begin, end)
        return row[at // BS].long() * BS + at % BS

    builder = backend.get_builder_cls()
    monkeypatch.setattr("vllm.v1.attention.backends.triton_attn.get_num_attention_heads_from_layers", lambda *_: HEADS)
    config.model_config = type("Model", (), {
        "dtype": torch.float16, "max_model_len": 256,
        "get_num_attention_heads": lambda *_: HEADS, "get_num_kv_heads": lambda *_: KV_HEADS, "get_head_size": lambda _: SIZE, "rswa_window": None,
    })()  # fmt: skip
    builder = builder(spec, NAMES, config, torch.device("cpu"))
    assert len(builder._planners) == 1  # both layers share one, made before the first step

    tokens = {name: [[torch.randn(seq, h, SIZE).half() for h in (HEADS, KV_HEADS, KV_HEADS)] for _, seq in requests] for name in NAMES}
    # Two steps: contexts as prompts of their own, then the mixed batch.
    mixed = [(row, seq - query, seq, i) for i, (row, (query, seq)) in enumerate(zip(table, requests, strict=True))]
    steps = [[(row, 0, begin, i) for row, begin, _, i in mixed if begin], mixed]
    for step in steps:
        step_table = torch.stack([row for row, *_ in step])
        mapping = torch.cat([slots(row, begin, end) for row, begin, end, _ in step])
        meta = common([end - begin for _, begin, end, _ in step], [end for _, _, end, _ in step], step_table, mapping)
        built = builder.build(0, meta)
        with set_forward_context(dict.fromkeys(NAMES, built), config, slot_mapping=dict.fromkeys(NAMES, mapping)):
            for name, layer in zip(NAMES, layers, strict=True):
                q, k, v = (torch.cat([tokens[name][i][part][begin:end] for _, begin, end, i in step]) for part in range(3))
                out = layer(q.flatten(1), k.flatten(1), v.flatten(1)).view(-1, HEADS, SIZE)
                expected = torch.cat([
                    attention(tokens[name][i][0][begin:end], tokens[name][i][1][:end], tokens[name][i][2][:end], SIZE**-0.5) for _, begin, end, i in step
                ])  # fmt: skip
                torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=1e-2)
    assert len(builder._planners) == 1
