"""Compiles `decode_attention` for one arch in the wave form and prints what the code is made of, as JSON; run by the tests."""

import dataclasses
import json
import sys

import torch
import triton

import tritonattn
from tritonattn import layouts
from tritonattn.tuning.arch import by_name
from tritonattn.tuning.codegen import capture, judge, read

CASES = {
    "preshuffled": {},
    "nhd": {"kv_layout": "nhd"},
    "hnd": {"kv_layout": "hnd"},
    "preshuffled fp16": {"dtype": torch.float16},
    "preshuffled D64": {"head_size": 64},
    "preshuffled D96": {"head_size": 96},
    "preshuffled D256": {"head_size": 256},
    "nhd D64": {"kv_layout": "nhd", "head_size": 64},
    "nhd D80": {"kv_layout": "nhd", "head_size": 80},
    "nhd D256": {"kv_layout": "nhd", "head_size": 256},
    "preshuffled 1 row": {"heads": 8},
    "preshuffled 32 rows": {"heads": 128, "max_seqlen_q": 2},
    "preshuffled 64 rows": {"heads": 128, "max_seqlen_q": 4},
    "nhd 64 rows": {"kv_layout": "nhd", "heads": 128, "max_seqlen_q": 4},
    "preshuffled fp8 64 rows": {"heads": 128, "max_seqlen_q": 4, "kv_dtype": "e4m3"},
    "nhd fp8 D256 32 rows": {"kv_layout": "nhd", "heads": 64, "max_seqlen_q": 4, "kv_dtype": "e4m3", "head_size": 256},
    "preshuffled fp8 D256": {"kv_dtype": "e4m3", "head_size": 256},
    "preshuffled fp8 D32": {"kv_dtype": "e4m3", "head_size": 32},
    "nhd fp8 D48": {"kv_layout": "nhd", "kv_dtype": "e4m3", "head_size": 48},
    "preshuffled block 48": {"block_size": 48},
    "nhd block 784": {"kv_layout": "nhd", "block_size": 784},
    "preshuffled window, sinks": {"window_size": (1023, 0), "sinks": torch.zeros(64)},
    "preshuffled softcap, alibi": {"softcap": 30.0, "alibi_slopes": torch.zeros(64)},
    "nhd window, sinks": {"kv_layout": "nhd", "window_size": (1023, 0), "sinks": torch.zeros(64)},
    "preshuffled one split": {"num_splits": 1},
    "preshuffled fp8": {"kv_dtype": "e4m3"},
    "nhd fp8": {"kv_layout": "nhd", "kv_dtype": "e4m3"},
    "preshuffled fp8 D64": {"kv_dtype": "e4m3", "head_size": 64},
    "preshuffled e5m2": {"kv_dtype": "e5m2"},
}


def compile_case(arch, *, kv_layout="preshuffled", dtype=torch.bfloat16, kv_dtype=None, heads=64, kv_heads=8, head_size=128, block_size=16,
                 max_seqlen_q=1, num_splits=8, **options):  # fmt: skip
    batch = 4
    if kv_dtype:
        kv_dtype = next(getattr(torch, name) for name in by_name(arch).fp8_types if kv_dtype in name)
    k, v = layouts.allocate(kv_layout, 8, block_size, kv_heads, head_size, dtype=kv_dtype or dtype)
    with capture(arch) as launches:
        tritonattn.decode_attention(
            torch.zeros(batch * max_seqlen_q, heads, head_size, dtype=kv_dtype or dtype), k, v, seqused_k=torch.zeros(batch, dtype=torch.int32),
            block_table=torch.zeros(batch, 8192 // block_size, dtype=torch.int32), max_seqlen_k=8192, max_seqlen_q=max_seqlen_q,
            kv_layout=kv_layout, num_splits=num_splits, **options,
        )  # fmt: skip
    launch = launches[0]
    report = read(launch)
    main = {field.name: getattr(report.main, field.name) for field in dataclasses.fields(report.main) if field.name != "body"}
    return {"kernel": launch.kernel, "order": launch.constexprs.get("ORD"), "lds": report.lds, "registers": report.registers,
            "occupancy": report.occupancy, "main": main, "loops": len(report.loops),
            "lds_traffic": sum(sum(loop.lds_reads.values()) + sum(loop.lds_writes.values()) for loop in report.loops),
            "barriers": sum(loop.barriers for loop in report.loops), "reasons": judge(report, launch.arch)}  # fmt: skip


if __name__ == "__main__":
    arch, *names = sys.argv[1:]
    print(json.dumps({"triton": triton.__version__, "cases": {name: compile_case(arch, **CASES[name]) for name in names or CASES}}))
