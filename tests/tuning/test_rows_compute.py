"""The tile sizes and switches of every AMD prefill row compute the right thing: run in the interpreter, whose own row is replaced."""

import pytest
import torch

import tritonattn
from tritonattn.tuning import arch, table

ROWS = [row for name in ("gfx942", "gfx950") for row in table.rows("prefill", arch.by_name(name))]


@pytest.mark.skipif(arch.detect("cpu") is not arch.INTERPRETER, reason="for TRITON_INTERPRET=1")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.where)
def test_prefill_row(row):
    torch.manual_seed(0)
    d, dv = (80, 80) if "v_tail" in row.config else (192, 128)
    lengths = [70, 33]
    q, k, v = (torch.randn(sum(lengths), heads, width) for heads, width in ((4, d), (2, d), (2, dv)))
    cu = torch.tensor([0, 70, 103], dtype=torch.int32)
    bounds = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 70, "max_seqlen_k": 70}
    with arch.assume(table.pin(arch.INTERPRETER, prefill=row.config)):
        out = tritonattn.flash_attn_varlen_func(q, k, v, causal=True, **bounds)
    del bounds["max_seqlen_q"], bounds["max_seqlen_k"]
    expected, _ = tritonattn.reference.flash_attn_varlen_func(q, k, v, causal=True, **bounds)
    torch.testing.assert_close(out, expected.to(out.dtype), atol=2e-6, rtol=1e-5)
