"""Warm a model up for an arch without its GPU, then serve batches that the warm-up does not list: prints what was compiled before and after."""

import json
import sys

import torch

import tritonattn
from tritonattn import warmup
from tritonattn.tuning.arch import by_name
from tritonattn.tuning.codegen import capture
from tritonattn.tuning.models import model

LONGEST = 2048
WIDTHS = (1, 7, 16, 128)  # of block tables


def batches():
    """(query_lens, seq_lens, width of the table): decode at every size from 1 to 256, odd and even lengths, then mixed batches."""
    for size in range(1, 257):
        for width in WIDTHS:
            yield [1] * size, [width * 16 - size % 2] * size, width
            yield [1] * size, [1 + (i * 37) % (width * 16) for i in range(size)], width
    mixes = [([1, 77, 1, 300, 9], [500, 99, 1024, 300, 2000]), ([3], [1001]), ([513, 2], [513, 1999]), ([2047], [2047]), ([1, 2], [2, 3])]
    for query, seq in mixes:
        yield query, seq, 128
    for size in (2, 31, 100):  # decodes of every number beside an extend and a prefill
        yield [1] * size + [65, 129], [1 + (i * 53) % 2048 for i in range(size)] + [300, 129], 128


def odd_rows(tokens, heads, size, odd):
    """[tokens, heads, size]; odd: cut out of wider rows, so that strides are no multiples of 16 bytes."""
    return torch.empty(tokens, heads * size + odd, dtype=torch.bfloat16)[:, : heads * size].unflatten(1, (heads, size))


def serve(deployment):
    heads, kv_heads = deployment.heads
    size = deployment.shape.head_size
    caches = tritonattn.layouts.allocate(deployment.kv_layout, 8, deployment.block_size, kv_heads, size, dtype=torch.bfloat16)
    router = tritonattn.Router(heads, kv_heads, size, dtype=torch.bfloat16, device="cpu", kv_layout=deployment.kv_layout, block_size=16)
    for i, (query, seq, width) in enumerate(batches()):
        tokens = sum(query)
        q, k, v = (odd_rows(tokens, h, size, i % 3 == 1) for h in (heads, kv_heads, kv_heads))
        out = odd_rows(tokens, heads, size, 1) if i % 5 == 1 else None
        router.run(router.plan(query, seq, torch.zeros(len(query), width, dtype=torch.int32)), q, k, v, *caches, out=out)
        tritonattn.reshape_and_cache(k, v, *caches, torch.arange(tokens) % 128, kv_layout=deployment.kv_layout)


def serve_mla(deployment):
    heads, s = deployment.heads[0], deployment.shape
    cache = torch.empty(8, 16, s.latent + s.rope, dtype=torch.bfloat16)
    router = tritonattn.MlaRouter(heads, softmax_scale=0.1, dtype=torch.bfloat16, device="cpu", block_size=16)
    for i, (query, seq, width) in enumerate(batches()):
        if i % 7:  # a tenth of a second each: torch's part on a CPU
            continue
        odd, tokens = i % 3 == 1, sum(query)
        q, k, v = (odd_rows(tokens, heads, size, odd) for size in (s.head_size, s.head_size, s.v_head_size))
        router.run(
            router.plan(query, seq, torch.zeros(len(query), width, dtype=torch.int32)), q, k, v, cache,
            absorb=lambda q, odd=odd: odd_rows(len(q), heads, s.latent + s.rope, odd),
            up_project=lambda latent, rope, odd=odd: tuple(odd_rows(len(latent), heads, n, odd) for n in (s.head_size, s.v_head_size)),
            up_project_v=lambda latent: odd_rows(len(latent), heads, s.v_head_size, 0),
        )  # fmt: skip
    for size in (1, 2, 64, 200):  # the op by itself, and cut on the device where sequences may be long
        q, lens = torch.empty(size, heads, s.latent + s.rope, dtype=torch.bfloat16), torch.ones(size, dtype=torch.int32)
        for longest in (100, 2000, 30000):
            tritonattn.mla_decode(q, cache, seqused_k=lens, block_table=torch.zeros(size, 1875).int(), max_seqlen_k=longest, softmax_scale=0.1)


def main(name, served):
    latent = served == "deepseek-r1"
    deployment = warmup.Deployment(model(served), kv_layout="nhd", max_model_len=32768 if latent else LONGEST, tensor_parallel=8 if latent else 1)
    arch = by_name(name)
    before = warmup.compile_ahead(deployment, arch)
    told = []
    with warmup.Compilations(on_new=told.append) as later, capture(arch):
        (serve_mla if deployment.shape.is_mla else serve)(deployment)
        after = [f"{event.kernel}: {event.key}" for event in later.new]
        odd = torch.empty(3, 4, 32, dtype=torch.float16)  # a shape that no model warmed up here has
        tritonattn.merge_attn_states(odd, torch.empty(4, 3), odd, torch.empty(4, 3))
    late = [event.kernel for event in told[len(after) :]]
    made = {"before": len(before), "kernels": sorted({event.kernel for event in before})}
    print(json.dumps({**made, "after": after, "late": late, "key": told[-1].key if told else ""}))


if __name__ == "__main__":
    main(*sys.argv[1:])
