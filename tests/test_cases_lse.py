"""Cases from the field about the LSE contract and merging; a test is named after the number of its case.

Every other test that compares an output compares the LSE too (case 67): `cases.Oracle.check` does both.
"""

import math

import pytest
import torch

import tritonattn
from tests import cases


def test_case_63_the_base_of_the_lse(device):
    """3072 keys with V = 0 and 64 with V = 1, all scores 0: merged by the wrong base, recent tokens weigh 0.0037 in place of 0.0204."""
    parts = []
    for keys, value in ((3072, 0.0), (64, 1.0)):
        case = cases.prefill([(1, keys)], heads=(2, 1))
        case.args["q"].zero_()
        case.args["v"].fill_(value)
        out, lse = case.run(device)
        torch.testing.assert_close(lse.cpu(), torch.full((2, 1), math.log(keys)), rtol=0, atol=1e-4)
        parts += [out, lse]
    out, lse = tritonattn.merge_attn_states(*parts, return_lse=True)
    torch.testing.assert_close(out.cpu(), torch.full((1, 2, 32), 64 / 3136), rtol=1e-4, atol=0)
    torch.testing.assert_close(lse.cpu(), torch.full((2, 1), math.log(3136)), rtol=0, atol=1e-4)


def test_case_63_every_kernel(device):
    """LSE = log(n) for q = 0: prefill, extend in one and several chunks, decode in one and several splits."""
    batch = cases.Batch([(1, 200)])
    batch.q.zero_()
    batch.refresh()
    results = [
        cases.extend(batch).run(device), cases.extend(batch).run(device, chunk_tokens=64),
        cases.decode(batch).run(device, num_splits=1), cases.decode(batch, layout="preshuffled").run(device, num_splits=4),
    ]  # fmt: skip
    for _, lse in results:
        torch.testing.assert_close(lse.cpu(), torch.full((3, 1), math.log(200)), rtol=0, atol=1e-5)


def test_case_64_as_many_tokens_as_heads(device):
    """A transposed LSE has the right shape then: only the values tell."""
    shape = {"heads": (8, 2), "magnitude": 3.0}
    cases.prefill([(8, 8)], options={"causal": True}, **shape).check(device)
    parts = [cases.prefill([(8, keys)], seed=seed, **shape).check(device) for keys, seed in ((20, 1), (9, 1))]
    out, lse = tritonattn.merge_attn_states(*parts[0], *parts[1], return_lse=True)
    exact = cases.reference.merge_attn_states(*(x.cpu() for x in (*parts[0], *parts[1])))
    torch.testing.assert_close(out.cpu().double(), exact[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.cpu().double(), exact[1], rtol=1e-5, atol=1e-5)
    cases.decode([(1, n + 3) for n in range(8)], **shape).check(device, num_splits=2)
    cases.extend([(8, 40)], **shape).check(device)


def test_case_67_lse_alone_is_asked_of_every_path(device):
    """With and without return_lse the output is the same to the bit."""
    case = cases.decode([(2, 70), (1, 9)])
    out, _ = case.run(device, num_splits=2)
    args = {name: cases.to(value, device) for name, value in case.args.items()}
    k_cache, v_cache, table = (x.to(device) for x in case.cache.poisoned("nan"))
    alone = tritonattn.decode_attention(**args, k_cache=k_cache, v_cache=v_cache, block_table=table, num_splits=2)
    assert torch.equal(alone[: case.rows], out)


@pytest.mark.parametrize("cu_seqlens_q", [None, [0, 1]])
def test_padding_has_the_lse_of_no_keys(device, cu_seqlens_q):
    """Merged later, anything else would count."""
    q, cache = torch.randn(3, 4, 64, device=device), torch.randn(4, 16, 2, 64, device=device)
    ints = lambda *values: torch.tensor(values, dtype=torch.int32, device=device)  # noqa: E731
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # what torch.empty gives is then NaN
    try:
        starts = None if cu_seqlens_q is None else ints(*cu_seqlens_q)
        options = {"block_table": ints(1)[None], "kv_layout": "nhd", "return_lse": True}
        _, lse = tritonattn.decode_attention(q, cache, cache, seqused_k=ints(5), max_seqlen_k=5, cu_seqlens_q=starts, **options)
        assert lse[:, 0].isfinite().all() and (lse[:, 1:] == -torch.inf).all()
        _, lse = tritonattn.extend_attention(
            q, None, None, cache, cache, cu_seqlens_q=ints(0, 1), context_lens=ints(4), max_seqlen_q=1, max_context_len=4, **options
        )
        assert lse[:, 0].isfinite().all() and (lse[:, 1:] == -torch.inf).all()
    finally:
        torch.use_deterministic_algorithms(before)
