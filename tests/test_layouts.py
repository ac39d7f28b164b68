"""Layouts: the strides of a view lead to the element that the pictures promise, without a copy."""

import pytest
import torch

from tritonattn import layouts
from tritonattn.problem import split_head_size

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


@pytest.mark.parametrize("layout", layouts.PAGED_LAYOUTS)
@pytest.mark.parametrize(("head_size", "v_head_size", "block_size"), [(32, 32, 16), (80, 48, 32), (192, 128, 16)])
def test_round_trip(layout, head_size, v_head_size, block_size):
    k, v = numbered((3, block_size, 2, head_size)), numbered((3, block_size, 2, v_head_size))
    stored = layouts.from_nhd(k, v, layout)
    x = layouts.pack_width(k.dtype)
    assert tuple(t.shape for t in stored) == layouts.shapes(layout, 3, block_size, 2, head_size, v_head_size, x)
    for got, expected in zip(layouts.to_nhd(*stored, layout), (k, v), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("layout", layouts.PAGED_LAYOUTS)
def test_view_addresses(layout):
    """Each element by the address that a kernel computes from the view."""
    k, v = numbered((3, 8, 2, 12)), -numbered((3, 8, 2, 20))
    view = layouts.view(*layouts.from_nhd(k, v, layout), layout)
    flat_k, flat_v, x = view.k.flatten(), view.v.flatten(), view.x
    assert (view.num_blocks, view.block_size, view.num_kv_heads, view.head_size, view.v_head_size) == (3, 8, 2, 12, 20)
    for block, token, head in [(0, 0, 0), (2, 7, 1), (1, 3, 0), (0, 5, 1)]:
        at_k = block * view.stride_k_block + head * view.stride_k_head
        at_v = block * view.stride_v_block + head * view.stride_v_head
        for d in range(12):
            inner = d // x * 8 * x + token * x + d % x if view.kind == "preshuffled" else token * view.stride_k_token + d
            assert flat_k[at_k + inner] == k[block, token, head, d]
        for d in range(20):
            inner = token // x * 20 * x + d * x + token % x if view.kind == "preshuffled" else token * view.stride_v_token + d
            assert flat_v[at_v + inner] == v[block, token, head, d]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", layouts.PAGED_LAYOUTS)
def test_allocate(layout, dtype):
    k, v = layouts.allocate(layout, 5, 32, 3, 64, v_head_size=96, dtype=dtype)
    view = layouts.view(k, v, layout)
    assert (view.block_size, view.num_kv_heads, view.head_size, view.v_head_size, view.x) == (32, 3, 64, 96, 16 // dtype.itemsize)
    assert view.k is k and view.v is v


@pytest.mark.parametrize(("changes", "error", "words"), [
    ({"num_blocks": -1, "block_size": 0, "head_size": -8}, ValueError, "num_blocks must be at least 0, got -1; block_size must be at least 1, got 0; head_"),
    ({"num_kv_heads": 0, "v_head_size": 0}, ValueError, "num_kv_heads must be at least 1, got 0; v_head_size must be at least 1, got 0"),
    ({"dtype": "bfloat16", "block_size": 16.0}, TypeError, "block_size must be an int, got float; dtype must be a torch.dtype, got 'bfloat16'"),
    ({"device": "foo"}, ValueError, "device must be one that torch knows, such as cuda:0 or cpu, got 'foo'"),
    ({"device": "cuda:99"}, ValueError, "device must be one of the GPUs that torch finds, of which there are [0-9]+, got cuda:99"),
    ({"kv_layout": "x"}, ValueError, "kv_layout must be one of nhd, hnd, preshuffled, latent, got 'x'"),
    ({"num_blocks": "x", "dtype": "bf16", "block_size": 0, "kv_layout": "ndh"}, ValueError,
     "^layouts.allocate: num_blocks must be an int, got str; dtype must be a torch.dtype, got 'bf16'; block_size must be at least 1, got 0; "
     "kv_layout must be one of"),
    ({"device": "foo", "block_size": 12, "head_size": 36}, ValueError,
     "^layouts.allocate: device must be one that torch knows, .* got 'foo'; block_size must be a multiple of 8 .*; head_size must be a multiple of 8 .*36$"),
    ({"device": 1.5, "head_size": 0, "kv_layout": "nhd"}, ValueError, "^layouts.allocate: device must be .* got float; head_size must be at least 1, got 0$"),
    ({"device": None}, TypeError, "^layouts.allocate: device must be a torch.device or its name, got NoneType$"),
])  # fmt: skip
def test_what_cannot_be_allocated_is_named(changes, error, words):
    sound = {"kv_layout": "preshuffled", "num_blocks": 4, "block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    assert layouts.allocate(**sound | {"num_blocks": 0})[0].shape[0] == 0
    with pytest.raises(error, match=words):
        layouts.allocate(**sound | changes)


@pytest.mark.parametrize(("convert", "args", "error", "words"), [
    (layouts.from_nhd, (torch.zeros(2, 5, 1, 36), torch.zeros(2, 5, 1, 32), "preshuffled"), ValueError, "block_size must be a multiple of 4 .*, got 5"),
    (layouts.from_nhd, (torch.zeros(2, 8, 1, 34), torch.zeros(2, 8, 1, 34), "preshuffled"), ValueError, "head_size must be a multiple of 4 .*, got 34"),
    (layouts.from_nhd, (torch.zeros(2, 8, 32), torch.zeros(2, 8, 32), "hnd"), ValueError, "k_cache must have 4 dimensions in the nhd layout"),
    (layouts.from_nhd, (torch.zeros(2, 8, 1, 32), torch.zeros(2, 4, 1, 32), "hnd"), ValueError, "v_cache must be"),
    (layouts.from_nhd, (torch.zeros(2, 8, 1, 32), None, "hnd"), TypeError, "v_cache must be a tensor, got NoneType"),
    (layouts.from_nhd, (torch.zeros(2, 8, 1, 32), torch.zeros(2, 8, 1, 32), "latent"), ValueError, "kv_layout must be one of nhd, hnd, preshuffled, got"),
    (layouts.to_nhd, (torch.zeros(2, 1, 8, 5, 4), torch.zeros(2, 1, 1, 32, 4), "preshuffled"), ValueError, "block size a multiple of 4"),
    (layouts.to_nhd, (torch.zeros(2, 8, 32), torch.zeros(2, 8, 32), "hnd"), ValueError, "k_cache must have 4 dimensions in the hnd layout"),
    (layouts.to_nhd, (torch.zeros(2, 8, 1, 32), torch.zeros(2, 8, 1, 32), "x"), ValueError, "kv_layout must be one of nhd, hnd, preshuffled, latent"),
    (layouts.view, ([1], torch.zeros(2, 8, 1, 32), "nhd"), TypeError, "k_cache must be a tensor, got list"),
])  # fmt: skip
def test_what_cannot_be_converted_is_named(convert, args, error, words):
    with pytest.raises(error, match=f"^layouts.{convert.__name__}: .*{words}"):
        convert(*args)


def test_latent_is_one_allocation():
    k, v = layouts.allocate("latent", 4, 16, 1, 576, v_head_size=512, dtype=torch.bfloat16)
    view = layouts.view(k, v, "latent")
    assert k.data_ptr() == v.data_ptr() and view.kind == "plain" and view.num_kv_heads == 1
    assert (view.head_size, view.v_head_size, view.stride_k_token, view.stride_v_token) == (576, 512, 576, 576)


def test_views_of_one_pool_are_not_copied():
    pool = torch.zeros(6, 2, 16, 4, 32)
    view = layouts.view(pool[:, 0], pool[:, 1], "nhd")
    assert view.stride_k_block == 2 * 16 * 4 * 32 and view.v.data_ptr() == pool[:, 1].data_ptr()
    packed = torch.zeros(6, 4, 16, 64)
    k, v = packed.transpose(1, 2).split(32, -1)
    view = layouts.view(k, v, "nhd")
    assert (view.stride_k_token, view.stride_k_head, view.stride_v_block) == (64, 16 * 64, 4 * 16 * 64)


@pytest.mark.parametrize(("k_shape", "v_shape", "layout", "words"), [
    ((4, 16, 2, 32), (4, 16, 2, 32), "nhdx", "kv_layout must be one of nhd, hnd, preshuffled, latent"),
    ((4, 16, 2), (4, 16, 2, 32), "nhd", "k_cache must have 4 dimensions"),
    ((4, 16, 2, 32), (4, 8, 2, 32), "nhd", r"v_cache must be \[4, 16, 2, Dv\]"),
    ((4, 2, 8, 16, 4), (4, 2, 4, 32, 8), "preshuffled", r"v_cache must be \[4, 2, 16/4, Dv, 4\]"),
    ((4, 2, 8, 16, 8), (4, 2, 4, 32, 4), "preshuffled", r"k_cache must be \[blocks, Hkv, D/4, bs, 4\]"),
    ((4, 2, 8, 18, 4), (4, 2, 4, 32, 4), "preshuffled", "a multiple of 4"),
])  # fmt: skip
def test_refusals(k_shape, v_shape, layout, words):
    with pytest.raises(ValueError, match=words):
        layouts.view(torch.zeros(k_shape), torch.zeros(v_shape), layout)


def test_strides_that_no_kernel_follows_are_refused():
    transposed = torch.zeros(4, 16, 32, 2).transpose(2, 3)
    with pytest.raises(ValueError, match=r"k_cache must have a last stride of 1.*v_cache must have a last stride of 1"):
        layouts.view(transposed, transposed, "nhd")
    loose = torch.zeros(4, 2, 8, 32, 4)[:, :, :, :16]
    with pytest.raises(ValueError, match="dense inside a head"):
        layouts.view(loose, torch.zeros(4, 2, 4, 32, 4), "preshuffled")
    with pytest.raises(ValueError, match=r"block_size must be a multiple of 8.*head_size must be a multiple of 8"):
        layouts.allocate("preshuffled", 4, 12, 2, 36, dtype=torch.bfloat16)


@pytest.mark.parametrize(("size", "parts"), [
    (32, (32, 0, 0)), (64, (64, 0, 0)), (72, (64, 8, 16)), (80, (64, 16, 16)), (96, (64, 32, 32)),
    (112, (64, 48, 64)), (192, (128, 64, 64)), (256, (256, 0, 0)), (576, (512, 64, 64)),
])  # fmt: skip
def test_split_head_size(size, parts):
    assert split_head_size(size) == parts
