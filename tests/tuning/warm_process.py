"""Warm a model up for an arch without its GPU, then serve odd batches: prints what was compiled before and after."""

import json
import sys

import torch

import tritonattn
from tritonattn import warmup
from tritonattn.tuning.arch import by_name
from tritonattn.tuning.codegen import capture
from tritonattn.tuning.models import model


def serve(deployment, arch):
    """Batches that the warm-up does not list: odd sizes and lengths, several widths of the table, mixed requests."""
    heads, kv_heads = deployment.heads
    size = deployment.shape.head_size
    dtype = torch.bfloat16
    caches = tritonattn.layouts.allocate(deployment.kv_layout, 8, deployment.block_size, kv_heads, size, dtype=dtype)
    router = tritonattn.Router(heads, kv_heads, size, dtype=dtype, device="cpu", kv_layout=deployment.kv_layout, block_size=deployment.block_size)
    mixes = [([1] * n, [length] * n) for n in (1, 5, 17, 100, 255, 256) for length in (2, 15, 113, 2047)]
    mixes += [([1, 77, 1, 300, 9], [500, 99, 1024, 300, 2000]), ([3], [1001]), ([513, 2], [513, 1999])]
    for query, seq in mixes:
        for width in (7, 16, 128):
            width = max(width, -(-max(seq) // deployment.block_size))
            plan = router.plan(query, seq, torch.zeros(len(query), width, dtype=torch.int32))
            q = torch.empty(sum(query), heads, size, dtype=dtype)
            k, v = (torch.empty(sum(query), kv_heads, size, dtype=dtype) for _ in range(2))
            router.run(plan, q, k, v, *caches)
            tritonattn.reshape_and_cache(k, v, *caches, torch.arange(len(k)) % 128, kv_layout=deployment.kv_layout)


def main(name):
    deployment = warmup.Deployment(model("llama-3-8b"), kv_layout="nhd", max_model_len=2048)
    arch = by_name(name)
    before = warmup.compile_ahead(deployment, arch)
    told = []
    with warmup.Compilations(on_new=told.append) as later, capture(arch):
        serve(deployment, arch)
        after = len(later.new)
        odd = torch.empty(3, 4, 32, dtype=torch.float16)  # a shape that no model warmed up here has
        tritonattn.merge_attn_states(odd, torch.empty(4, 3), odd, torch.empty(4, 3))
    print(json.dumps({"before": len(before), "after": after, "late": [event.kernel for event in told], "key": told[-1].key if told else ""}))


if __name__ == "__main__":
    main(sys.argv[1])
