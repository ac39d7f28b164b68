"""Compiles `mla_decode` for one arch in the wave form and prints what the code is made of, as JSON; run by the tests."""

import json
import sys

import torch
import triton

import tritonattn
from tritonattn.tuning.arch import by_name
from tritonattn.tuning.codegen import capture, judge, read

CASES = {
    "16 heads": {},
    "16 heads, block 16": {"block_size": 16},
    "fp16, q in two": {"dtype": torch.float16, "pair": True},
    "6 heads, one split": {"heads": 6, "num_splits": 1},
    "20 heads, two tokens": {"heads": 20, "max_seqlen_q": 2},
    "block 48": {"block_size": 48},
    "64 heads": {"heads": 64},
    "128 heads, block 16": {"heads": 128, "block_size": 16},
    "32 heads, two tokens, q in two": {"heads": 32, "max_seqlen_q": 2, "pair": True},
    "128 heads, fp16, one split, block 128": {"heads": 128, "dtype": torch.float16, "num_splits": 1, "block_size": 128},
    "64 heads, not aligned": {"heads": 64, "gap": 4},
    "fp8 cache": {"fp8": True},
    "fp8 cache, 128 heads": {"fp8": True, "heads": 128},
}


def compile_case(arch, *, heads=16, dtype=torch.bfloat16, block_size=64, max_seqlen_q=1, num_splits=8, pair=False, fp8=False, gap=0):
    batch = 4
    kv_dtype = getattr(torch, by_name(arch).fp8_types[0]) if fp8 else dtype
    q = torch.zeros(batch * max_seqlen_q, heads, 576, dtype=dtype)
    with capture(arch) as launches:
        tritonattn.mla_decode(
            (q[..., :512].contiguous(), q[..., 512:].contiguous()) if pair else q, torch.zeros(8, block_size, 576 + gap, dtype=kv_dtype)[..., :576],
            seqused_k=torch.zeros(batch, dtype=torch.int32), block_table=torch.zeros(batch, 8192 // block_size, dtype=torch.int32),
            max_seqlen_k=8192, max_seqlen_q=max_seqlen_q, softmax_scale=0.1, num_splits=num_splits,
        )  # fmt: skip
    launch = launches[0]
    report = read(launch)
    constexprs = launch.constexprs
    return {
        "kernel": launch.kernel, "rows": constexprs["ROWS"], "order": constexprs.get("ORD"), "lds": report.lds, "registers": report.registers,
        "occupancy": report.occupancy, "loops": len(report.loops), "barriers": sum(loop.barriers for loop in report.loops),
        "lds_traffic": sum(sum(loop.lds_reads.values()) + sum(loop.lds_writes.values()) for loop in report.loops),
        "reasons": judge(report, launch.arch), "instructions": report.main.instructions,
        "per_head_and_key": report.main.instructions * launch.num_warps / (constexprs["ROWS"] * constexprs["BLOCK_N"]),
    }  # fmt: skip


if __name__ == "__main__":
    arch, *names = sys.argv[1:]
    print(json.dumps({"triton": triton.__version__, "cases": {name: compile_case(arch, **CASES[name]) for name in names or CASES}}))
