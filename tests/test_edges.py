"""Numbers at the edge: every 8-bit code, huge scores and sinks, weights far below the largest, sums over very many keys."""

from __future__ import annotations

import math

import pytest
import torch

import tritonattn
from tests import cases
from tritonattn import layouts, reference

SMALL = 2.0**-10  # a scale that rounds nothing
LENGTHS = [1024, 16384, 131072] if torch.cuda.is_available() else [256, 2048]


def codes(dtype: torch.dtype) -> torch.Tensor:
    """The 256 values of an 8-bit float, those that are not finite as 0."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype)
    return torch.where(values.float().isfinite(), values.float(), 0.0).to(dtype)


def check_codes(out, lse, values, keys):
    """V to the bit where the result has fewer digits than the weight of the one key, which is 1 but for the rounding of its score."""
    if out.dtype is torch.float32:
        torch.testing.assert_close(out.cpu(), values, rtol=1e-5, atol=0)
    else:
        assert torch.equal(out.float().cpu(), values.to(out.dtype).float())
    torch.testing.assert_close(lse.cpu(), keys * SMALL, rtol=1e-6, atol=1e-9)


def ints(device, *values):
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("layout", layouts.PAGED_LAYOUTS)
def test_case_68_every_code_through_decode_and_gather(device, layout):
    """One key: the output is V, and with q = e_c the LSE is column c of K."""
    for dtype in cases.fp8_dtypes(device):
        known = codes(dtype).float()
        caches = layouts.allocate(layout, 2, 16, 1, 256, dtype=dtype)
        for cache in caches:
            cases.fill(cache, "nan")
        row = known[None, None]
        reference.reshape_and_cache(row, row, *caches, torch.tensor([17]), kv_layout=layout)
        caches = [cache.to(device) for cache in caches]
        for q_dtype in (torch.bfloat16, torch.float16, torch.float32):
            q = torch.eye(256, dtype=q_dtype, device=device)[None]
            table = ints(device, [1])
            out, lse = tritonattn.decode_attention(
                q, *caches, seqused_k=ints(device, 2), block_table=table, max_seqlen_k=2, window_size=(0, 0), kv_layout=layout,
                softmax_scale=SMALL, return_lse=True,
            )  # fmt: skip
            check_codes(out[0], lse[:, 0], known.expand(256, -1), known)
        keys, values = tritonattn.gather_cache(*caches, table, ints(device, 1), ints(device, 1), kv_layout=layout)
        assert torch.equal(keys.float().cpu(), row) and torch.equal(values.float().cpu(), row)


def test_case_68_every_code_through_mla_decode_and_prefill(device):
    for dtype in cases.fp8_dtypes(device):
        known = codes(dtype)
        cache = torch.zeros(1, 16, 256 + 64, dtype=dtype)
        cases.fill(cache, "nan")
        cache[0, 0, :256], cache[0, 0, 256:] = known, known[64:128]
        q = torch.eye(320, dtype=torch.bfloat16, device=device)[None, ::5]
        out, lse = tritonattn.mla_decode(
            q, cache.to(device), seqused_k=ints(device, 1), block_table=ints(device, [0]), max_seqlen_k=1, softmax_scale=SMALL, kv_lora_rank=256,
            return_lse=True,
        )  # fmt: skip
        check_codes(out[0], lse[:, 0], known.float().expand(64, -1), cache[0, 0, ::5].float())
        one = {"cu_seqlens_q": ints(device, 0, 1), "cu_seqlens_k": ints(device, 0, 1), "max_seqlen_q": 1, "max_seqlen_k": 1, "softmax_scale": SMALL}
        q, k = torch.eye(256).to(dtype)[None].to(device), known[None, None].to(device)
        out, lse = tritonattn.flash_attn_varlen_func(q, k, k, **one, return_lse=True)
        check_codes(out[0], lse[:, 0], known.float().expand(256, -1), known.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_scores_of_ten_thousand(device, dtype):
    """Of both signs in one row, where one key takes all: no NaN, in tiles, splits, chunks and masks."""
    shape = {"dtype": dtype, "head_size": 64, "heads": (4, 2), "magnitude": 4000.0}
    lens = [(3, 90), (1, 17), (2, 2)]
    cases.prefill(lens, options={"causal": True}, **shape).check(device)
    cases.extend(lens, **shape).check(device, chunk_tokens=32)
    for layout in ("nhd", "preshuffled"):
        for num_splits in (1, 3):
            cases.decode(lens, layout=layout, **shape).check(device, num_splits=num_splits)
    cases.decode(lens, layout="preshuffled", options={"softcap": 30.0}, **shape).check(device, num_splits=2)


@pytest.mark.parametrize("sink", [200.0, -200.0, 1e4])
def test_sinks_far_from_the_scores(device, sink):
    shape = {"options": {"sinks": torch.full((3,), sink)}}
    cases.prefill([(20, 40), (3, 1)], options={"causal": True, **shape["options"]}).check(device)
    cases.extend([(3, 60), (20, 20)], **shape).check(device, chunk_tokens=16)
    for num_splits in (1, 3):
        cases.decode([(3, 60), (1, 1), (1, 0)], **shape).check(device, num_splits=num_splits)


@pytest.mark.parametrize("layout", layouts.PAGED_LAYOUTS)
@pytest.mark.parametrize("log2_weight", [-12, -20, -30])
def test_small_weights_add_up_over_an_fp8_cache(device, layout, log2_weight):
    """One key of V = 0, seen first, above thousands of V = 1 that weigh 2^-12 to 2^-30 of it each: P must not lose them.

    An 8-bit P may lose those in the tile of that key, 64 at most; a float16 one, under such queries, ends at 2^-24.
    """
    count = LENGTHS[-1]
    for dtype in cases.fp8_dtypes(device):
        for q_dtype in (torch.bfloat16, *((torch.float16,) if log2_weight >= -24 else ())):
            blocks = -(-count // 16)
            caches = layouts.allocate(layout, blocks, 16, 1, 64, dtype=dtype)
            keys, values = torch.zeros(blocks, 16, 1, 64), torch.ones(blocks, 16, 1, 64)
            keys[0, 5, 0, 0], values[0, 5] = 1.0, 0.0
            caches = [x.to(device) for x in layouts.from_nhd(keys.to(dtype), values.to(dtype), layout)]
            q = torch.zeros(1, 2, 64, dtype=q_dtype, device=device)
            q[..., 0] = 1.0
            out = tritonattn.decode_attention(
                q, *caches, seqused_k=ints(device, count), block_table=torch.arange(blocks, dtype=torch.int32, device=device)[None],
                max_seqlen_k=count, kv_layout=layout, num_splits=1, softmax_scale=-log2_weight * math.log(2),
            )  # fmt: skip
            want = (count - 1) * 2.0**log2_weight
            torch.testing.assert_close(out.float().cpu(), torch.full((1, 2, 64), want / (1 + want)), rtol=0.02, atol=64 * 2.0**log2_weight)


@pytest.mark.parametrize("log2_weight", [-12, -20, -30])
def test_small_weights_add_up_over_an_fp8_latent_cache(device, log2_weight):
    """The same of MLA, at the one size that has a form of its own for CDNA."""
    count = LENGTHS[-1] // 2
    for dtype in cases.fp8_dtypes(device):
        cache = torch.ones(count // 64, 64, 576)
        cache[..., 512:], cache[0, 5, :512], cache[0, 5, 512] = 0.0, 0.0, 1.0
        q = torch.zeros(1, 16, 576, dtype=torch.bfloat16, device=device)
        q[..., 512] = 1.0
        out = tritonattn.mla_decode(
            q, cache.to(dtype).to(device), seqused_k=ints(device, count), max_seqlen_k=count, num_splits=1,
            block_table=torch.arange(count // 64, dtype=torch.int32, device=device)[None], softmax_scale=-log2_weight * math.log(2),
        )  # fmt: skip
        want = (count - 1) * 2.0**log2_weight
        torch.testing.assert_close(out.float().cpu(), torch.full((1, 16, 512), want / (1 + want)), rtol=0.02, atol=64 * 2.0**log2_weight)


@pytest.mark.parametrize("dead", [math.nan, math.inf, -math.inf])
def test_merge_of_sides_without_keys(device, dead):
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(5, 3, 40, generator=generator, dtype=torch.float32).to(device) for _ in range(2))
    a[:] = math.nan
    none, some = torch.full((3, 5), dead, device=device), torch.full((3, 5), 7.0, device=device)
    for first, second in (((a, none), (b, some)), ((b, some), (a, none))):
        out, lse = tritonattn.merge_attn_states(*first, *second, return_lse=True)
        assert torch.equal(out, b) and torch.equal(lse, some)
    out, lse = tritonattn.merge_attn_states(a, none, a, none, return_lse=True)
    assert (out == 0).all() and (lse == -math.inf).all()


@pytest.mark.parametrize("path", ["prefill", "extend", "decode", "split decode", "mla_decode"])
def test_error_stays_flat_with_length(device, path):
    """bfloat16, V around 1 so that the result does not shrink: the error of a sum over 128K keys is that of a sum over 1K."""
    errors = []
    for count in LENGTHS:
        generator = torch.Generator(device).manual_seed(count)

        def random(*shape, generator=generator):
            return torch.randn(shape, generator=generator, device=device)

        size, blocks = 64, count // 64
        q = random(1, 2, size + 16 * (path == "mla_decode")).bfloat16()
        k, v = random(blocks, 64, 1, q.shape[2]).bfloat16(), (1 + random(blocks, 64, 1, size)).bfloat16()
        table = torch.arange(blocks, dtype=torch.int32, device=device)[None]
        lens = ints(device, count)
        if path == "mla_decode":
            k[..., :size] = v
            out, lse = tritonattn.mla_decode(
                q, k.squeeze(2), seqused_k=lens, block_table=table, max_seqlen_k=count, softmax_scale=size**-0.5, kv_lora_rank=size, return_lse=True
            )
        elif path == "prefill":
            bounds = {"cu_seqlens_q": ints(device, 0, 1), "cu_seqlens_k": ints(device, 0, count), "max_seqlen_q": 1, "max_seqlen_k": count}
            out, lse = tritonattn.flash_attn_varlen_func(q, k.flatten(0, 1), v.flatten(0, 1), **bounds, return_lse=True)
        elif path == "extend":
            new = {"k": k[-1, -1:], "v": v[-1, -1:], "context_lens": lens - 1, "max_context_len": count - 1}
            out, lse = tritonattn.extend_attention(
                q, k_cache=k, v_cache=v, cu_seqlens_q=ints(device, 0, 1), block_table=table, max_seqlen_q=1, kv_layout="nhd",
                chunk_tokens=count // 3, return_lse=True, **new,
            )  # fmt: skip
        else:
            out, lse = tritonattn.decode_attention(
                q, k, v, seqused_k=lens, block_table=table, max_seqlen_k=count, kv_layout="nhd", num_splits=1 if path == "decode" else 16,
                return_lse=True,
            )  # fmt: skip
        with torch.device(device):
            exact, exact_lse = reference.attend(
                q.double(), k.flatten(0, 1).double(), v.flatten(0, 1).double(), softmax_scale=size**-0.5, causal=True
            )
        errors.append(float((out.double() - exact).norm() / exact.norm()))
        assert (lse.double() - exact_lse).abs().max() < 1e-3
    assert max(errors) < 6e-3 and errors[-1] < 2 * errors[0] + 1e-3, errors
