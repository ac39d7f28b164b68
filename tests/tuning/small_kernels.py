"""Small kernels with known faults, compiled for an arch named on the command line; prints their reports as JSON.

A process of its own, because the test run may have Triton's interpreter on, which replaces the compiler.
"""

import json
import sys
from dataclasses import asdict

import torch
import triton
import triton.language as tl

from tritonattn.tuning import codegen
from tritonattn.tuning.arch import by_name


@triton.jit
def matmul(A, B, C, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """C [BM, BN] = A [BM, k] B [k, BN]; fp8 operands are converted to bf16 first."""
    m, n, kk = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    acc = tl.zeros([BM, BN], tl.float32)
    for k0 in range(0, k, BK):
        a = tl.load(A + m[:, None] * 4096 + k0 + kk[None, :]).to(tl.bfloat16)
        b = tl.load(B + (k0 + kk[:, None]) * BN + n[None, :]).to(tl.bfloat16)
        acc = tl.dot(a, b, acc)
    tl.store(C + m[:, None] * BN + n[None, :], acc)


@triton.jit
def strided_sum(X, Y, n, stride, B: tl.constexpr):
    """Reads 2-byte elements one by one: the stride is unknown."""
    acc = tl.zeros([B], tl.float32)
    for i in range(n):
        acc += tl.load(X + (i * B + tl.arange(0, B)) * stride)
    tl.store(Y + tl.arange(0, B), acc)


def matmul_of(dtype, bm=64, bn=64, bk=64, **options):
    a, b, c = torch.empty(bm, 4096, dtype=dtype), torch.empty(4096, bn, dtype=dtype), torch.empty(bm, bn)
    matmul[(1,)](a, b, c, 4096, BM=bm, BN=bn, BK=bk, **options)


def main(name):
    arch = by_name(name)
    fp8 = getattr(torch, arch.fp8_types[0])
    cases = {
        "clean": lambda: matmul_of(torch.bfloat16, num_stages=1),
        "piped": lambda: matmul_of(torch.bfloat16, num_stages=2),
        "spills": lambda: matmul_of(torch.bfloat16, 256, 256, 32, num_warps=4, num_stages=1, waves_per_eu=4),
        "too much LDS": lambda: matmul_of(torch.bfloat16, 256, 256, 128, num_warps=8, num_stages=3),
        "fp8": lambda: matmul_of(fp8, num_stages=1),
        "foreign fp8": lambda: matmul_of(torch.float8_e5m2fnuz if name == "gfx950" else torch.float8_e4m3fn, num_stages=1),
        "narrow": lambda: strided_sum[(1,)](torch.empty(1 << 16, dtype=torch.bfloat16), torch.empty(256), 8, 3, B=256),
    }
    found = {}
    for case, launch in cases.items():
        with codegen.capture(name) as launches:
            launch()
        (one,) = launches
        report = codegen.read(one)
        found[case] = {
            **asdict(report),
            "reasons": codegen.judge(report, arch, needs_matrix=case != "narrow"),
            "grid": one.grid,
            "constexprs": dict(one.constexprs),
            "main": asdict(report.main),
        }
    print(json.dumps({"triton": triton.__version__, "cases": found}))


if __name__ == "__main__":
    main(sys.argv[1])
