"""Small Triton kernels for the simulator's own tests."""

import triton
import triton.language as tl


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) + tl.load(y + i, mask=i < n), mask=i < n)


@triton.jit
def matmul(a, b, out, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros([BM, BN], tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        x = tl.load(a + m[:, None] * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        y = tl.load(b + k[:, None] * N + n[None, :], mask=(k[:, None] < K) & (n[None, :] < N), other=0.0)
        acc = tl.dot(x, y, acc, input_precision="ieee")
    tl.store(out + m[:, None] * N + n[None, :], acc, mask=(m[:, None] < M) & (n[None, :] < N))


@triton.jit
def attend(q, k, v, out, lse, scale_log2, seq_q, seq_k, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr):
    """One head of causal (bottom-right) attention."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    x = tl.load(q + m[:, None] * D + d[None, :], mask=m[:, None] < seq_q, other=0.0)
    top = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    for n0 in range(0, tl.minimum(seq_k, seq_k - seq_q + (tl.program_id(0) + 1) * BM), BN):
        n = n0 + tl.arange(0, BN)
        keys = tl.load(k + n[:, None] * D + d[None, :], mask=n[:, None] < seq_k, other=0.0)
        s = tl.dot(x, tl.trans(keys)) * scale_log2
        s = tl.where((n[None, :] <= m[:, None] + seq_k - seq_q) & (n[None, :] < seq_k), s, -float("inf"))
        new = tl.maximum(top, tl.max(s, 1))
        safe = tl.where(new == -float("inf"), 0.0, new)
        p = tl.math.exp2(s - safe[:, None])
        decay = tl.math.exp2(top - safe)
        total = total * decay + tl.sum(p, 1)
        values = tl.load(v + n[:, None] * D + d[None, :], mask=n[:, None] < seq_k, other=0.0)
        acc = tl.dot(p.to(v.dtype.element_ty), values, acc * decay[:, None])
        top = new
    tl.store(out + m[:, None] * D + d[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=m[:, None] < seq_q)
    tl.store(lse + m, (top + tl.math.log2(total)) * 0.6931471805599453, mask=m < seq_q)
