"""Kernels through Triton's own launch path, executed as gfx942 and gfx950 machine code."""

import math
import os

import pytest
import simulated_kernels as kernels
import torch

from tritonattn.simulator import SimulatorError, active, simulated

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter runs no machine code")


@pytest.fixture(params=["gfx942", "gfx950"])
def arch(request):
    with simulated(request.param):
        yield request.param


def test_the_device_is_active_inside_the_block_only():
    with simulated("gfx950"):
        assert active() == "gfx950"
    assert active() == os.environ.get("TRITONATTN_SIM")


def test_add(arch):
    x, y = torch.randn(2, 1000)
    out = torch.full((1000,), math.nan)
    kernels.add[(4,)](x, y, out, 1000, BLOCK=256)
    torch.testing.assert_close(out, x + y, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(64, 64, 64), (50, 70, 90)])
def test_matmul(arch, dtype, shape):
    m, n, k = shape
    a, b, out = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype), torch.full((m, n), math.nan)
    kernels.matmul[(2, 3)](a, b, out, m, n, k, BM=32, BN=32, BK=32)
    torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seq_q, seq_k", [(64, 64), (37, 101)])
def test_attention(arch, seq_q, seq_k):
    d = 64
    q, k, v = (torch.randn(n, d, dtype=torch.bfloat16) for n in (seq_q, seq_k, seq_k))
    out, lse = torch.full((seq_q, d), math.nan, dtype=torch.bfloat16), torch.full((seq_q,), math.nan)
    kernels.attend[(2,)](q, k, v, out, lse, d**-0.5 * math.log2(math.e), seq_q, seq_k, BM=32, BN=32, D=d, num_warps=4)
    s = (q.double() @ k.double().T) * d**-0.5
    s = s.masked_fill(torch.arange(seq_k)[None] > torch.arange(seq_q)[:, None] + seq_k - seq_q, -math.inf)
    torch.testing.assert_close(lse.double(), s.logsumexp(1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.double(), s.softmax(1) @ v.double(), rtol=2e-2, atol=1e-2)


def test_a_byte_too_far_is_a_fault(arch):
    x, y, out = torch.randn(1000), torch.randn(999), torch.empty(1000)
    with pytest.raises(SimulatorError, match=r"memory at .*bytes past the end of a tensor of 3996 bytes"):
        kernels.add[(4,)](x, y, out, 1000, BLOCK=256)


def test_neither_the_order_of_waves_nor_stale_registers_change_a_bit(arch):
    """Waves of a workgroup in descending order between barriers; registers and LDS that start as 0 or as NaN; workgroups over two threads."""
    from tritonattn.simulator.device import launches_go_to

    q, k, v = (torch.randn(n, 64, dtype=torch.bfloat16) for n in (37, 101, 101))
    results = []
    for options in ({}, {"reverse": True}, {"poison": 0}, {"threads": 2}):
        out, lse = torch.full_like(q, math.nan), torch.full((37,), math.nan)

        def run(program, arguments, memory, grid, metadata, options=options):
            program.run(arguments, memory, grid, metadata.num_warps, metadata.shared, **options)

        with launches_go_to(run):
            kernels.attend[(2,)](q, k, v, out, lse, 0.18, 37, 101, BM=32, BN=32, D=64, num_warps=4)
        results.append((out, lse))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])


def test_a_kernel_that_is_too_large_never_launches(arch, little_lds):
    from triton.runtime.errors import OutOfResources

    a = torch.randn(128, 128, dtype=torch.bfloat16)
    with pytest.raises(OutOfResources, match="shared memory"):
        kernels.matmul[(1, 1)](a, a, torch.empty(128, 128), 128, 128, 128, BM=128, BN=128, BK=64)


@pytest.mark.parametrize("grid", [(0,), (1, 0, 1)])
def test_an_empty_grid_does_nothing(arch, grid):
    out = torch.full((8,), 3.0)
    kernels.add[grid](out, out, out, 8, BLOCK=256)
    assert (out == 3).all()


def test_tensors_elsewhere_are_refused(arch):
    with pytest.raises(TypeError, match="CPU tensors"):
        kernels.add[(1,)](*(torch.empty(8, device="meta") for _ in range(3)), 8, BLOCK=256)
