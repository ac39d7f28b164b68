"""``PYTHONPATH=.:tests/vllm python tests/vllm/build_times.py``: host time of a step's metadata from our builders and from vLLM's own, no GPU needed.

Microseconds on this CPU, least of many rounds that take turns. Uploads are copies in memory here. What a layer's launch costs is seen on a GPU
alone: `tritonattn.integrations.vllm.bench --host`.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from types import SimpleNamespace

import conftest  # noqa: F401  (vLLM without a GPU)
import torch
from harness import Layer, common, config
from vllm.model_executor.layers.attention import mla_attention
from vllm.v1.attention.backends import triton_attn
from vllm.v1.attention.backends.mla import triton_mla
from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import MLAAttentionSpec

BATCHES = {
    "64 decodes": [(1, 1000 + 7 * i) for i in range(64)],
    "62 decodes, an extend, a prefill": [(1, 1000 + 7 * i) for i in range(62)] + [(512, 4096), (1024, 1024)],
}
ROUNDS, CALLS = 200, 10


@contextmanager
def _one_head_count(heads):
    """Of the layers in the two modules that ask for it."""
    for module in (triton_attn, mla_attention):
        module.get_num_attention_heads_from_layers = lambda *_: heads
    yield


def mha_builder(backend):
    layer = Layer(heads=(64, 4), head_size=128, dtype=torch.bfloat16, backend=backend, blocks=2)
    if hasattr(layer.builder, "_planner"):  # what a layer does at its first step
        kind = layer.impl.kind(torch.bfloat16, True, False)
        layer.builder._planners[kind] = layer.builder._planner(kind, layer.impl)
    return layer.builder


def mla_builder(backend):
    heads, latent, rope, nope, v = 16, 512, 64, 128, 128
    vllm_config = config(heads, 1, latent + rope, torch.bfloat16)
    vllm_config.model_config.max_model_len = 65536
    mla_attention.get_current_vllm_config = triton_mla.get_current_vllm_config = lambda: vllm_config
    prefill = MLAPrefillBackendEnum.CUSTOM.get_class()(heads, 0.1, latent, nope, rope, v, vllm_config)
    vllm_config.compilation_config.static_forward_context["layer"] = SimpleNamespace(
        q_lora_rank=None, kv_lora_rank=latent, qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=v, prefill_backend=prefill, dcp_manager=None
    )
    spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=latent + rope, dtype=torch.bfloat16)
    with _one_head_count(heads):
        return backend.get_builder_cls()(spec, ["layer"], vllm_config, torch.device("cpu"))


def steps(requests):
    """What a runner hands over as every sequence grows."""
    query, seq = [q for q, _ in requests], [s for _, s in requests]
    table = torch.zeros(len(requests), 512, dtype=torch.int32)
    slots = torch.zeros(sum(query), dtype=torch.int64)
    return [common(query, [length + i for length in seq], table, slots) for i in range(8)]


def main():
    slots = {
        "TRITON_ATTN": (mha_builder, triton_attn.TritonAttentionBackend, AttentionBackendEnum.TRITON_ATTN.get_class()),
        "TRITON_MLA": (mla_builder, triton_mla.TritonMLABackend, AttentionBackendEnum.TRITON_MLA.get_class()),
    }
    for slot, (make, stock, ours) in slots.items():
        builders = {"stock": make(stock), "ours": make(ours)}
        for name, requests in BATCHES.items():
            best = dict.fromkeys(builders, float("inf"))
            metas = steps(requests)
            for _ in range(ROUNDS):
                for variant, builder in builders.items():
                    begin = time.process_time_ns()
                    for i in range(CALLS):
                        builder.build(0, metas[i % len(metas)])
                    best[variant] = min(best[variant], (time.process_time_ns() - begin) / CALLS / 1e3)
            print(f"{slot}, {name}: ours {best['ours']:.1f} us, stock {best['stock']:.1f} us")


if __name__ == "__main__":
    main()
