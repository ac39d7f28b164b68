"""The KV-cache layouts by name, as stride views: no layout ever costs a copy.

One cached token of one KV head is a row of ``D`` numbers of K and ``Dv`` of V.
The layouts differ in the order of those rows and, for V, inside them.
``x = 16 // itemsize`` is the number of elements in 16 bytes, the widest load
of one lane (bf16: 8, fp8: 16, fp32: 4).

``"nhd"``: token, then head.  K ``[blocks, bs, Hkv, D]``, V ``[blocks, bs, Hkv, Dv]``::

    block b   token 0: | head 0: D | head 1: D | ...
              token 1: | head 0: D | head 1: D | ...

``"hnd"``: head, then token.  K ``[blocks, Hkv, bs, D]``, V ``[blocks, Hkv, bs, Dv]``::

    block b   head 0: | token 0: D | token 1: D | ...
              head 1: | token 0: D | token 1: D | ...

``"preshuffled"``: both operands of the matrix instructions are 16-byte pieces
already.  K ``[blocks, Hkv, D/x, bs, x]`` cuts a row into pieces of ``x`` dims
and puts the same piece of all tokens side by side; V ``[blocks, Hkv, bs/x, Dv, x]``
cuts the *tokens* into pieces of ``x`` and puts one dim of ``x`` tokens side by side::

    K, block b, head h                          V, block b, head h
    dims 0..x-1   : | tok 0 | tok 1 | ...       tokens 0..x-1   : | dim 0 | dim 1 | ...
    dims x..2x-1  : | tok 0 | tok 1 | ...       tokens x..2x-1  : | dim 0 | dim 1 | ...
                    each piece x dims                             each piece x tokens

    K element (t, d): (d // x) * bs * x + t * x + d % x
    V element (t, d): (t // x) * Dv * x + d * x + t % x

``"latent"``: MLA.  ``[blocks, bs, latent + rope]``, one row per token for all
heads; K is the whole row, V its first ``latent`` columns (the same memory)::

    block b   token 0: | latent: 512        | rope: 64 |
                       |<------ V --------->|
                       |<------------- K ------------->|

``nhd``, ``hnd`` and ``latent`` take any strides with a unit last one (K and V
may be interleaved halves of one allocation).  ``preshuffled`` takes any block
and head stride; inside a head the page is dense, and ``bs % x == 0``, ``D % x == 0``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tritonattn.where import device_of

PAGED_LAYOUTS = ("nhd", "hnd", "preshuffled")
"""Layouts with a K and a V cache, as ``kv_layout=`` of the MHA ops takes them."""

LAYOUTS = (*PAGED_LAYOUTS, "latent")


class CacheView(NamedTuple):
    """A pair of caches seen through strides, in elements.  Holds the caller's tensors, never a copy.

    ``kind`` is how a kernel addresses a page: ``"plain"`` by block, token and
    head stride (``nhd``, ``hnd``, ``latent``), ``"preshuffled"`` by block and
    head stride and the formulas of this module.  For ``preshuffled`` the token
    strides are those of a 16-byte piece in K (``x``) and of ``x`` tokens in V (``Dv * x``).
    """

    k: Tensor
    v: Tensor
    layout: str
    kind: str
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_size: int
    v_head_size: int
    x: int
    stride_k_block: int
    stride_k_token: int
    stride_k_head: int
    stride_v_block: int
    stride_v_token: int
    stride_v_head: int


def pack_width(dtype: torch.dtype) -> int:
    """``x``: how many elements of ``dtype`` make 16 bytes."""
    return 16 // dtype.itemsize


def shapes(
    kv_layout: str, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, v_head_size: int, x: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the K and the V cache.  ``latent``: of the rows and of their first ``v_head_size`` columns."""
    if kv_layout == "nhd":
        return (num_blocks, block_size, num_kv_heads, head_size), (num_blocks, block_size, num_kv_heads, v_head_size)
    if kv_layout == "hnd":
        return (num_blocks, num_kv_heads, block_size, head_size), (num_blocks, num_kv_heads, block_size, v_head_size)
    if kv_layout == "preshuffled":
        k_page, v_page = (head_size // x, block_size, x), (block_size // x, v_head_size, x)
        return (num_blocks, num_kv_heads, *k_page), (num_blocks, num_kv_heads, *v_page)
    if kv_layout == "latent":
        return (num_blocks, block_size, head_size), (num_blocks, block_size, v_head_size)
    raise ValueError(f"kv_layout must be one of {', '.join(LAYOUTS)}, got {kv_layout!r}")


def allocate(
    kv_layout: str,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    *,
    v_head_size: int | None = None,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor]:
    """An uninitialised ``(k_cache, v_cache)``.

    ``v_head_size`` defaults to ``head_size``.  For ``latent``, ``num_kv_heads``
    is 1, ``head_size`` the row (latent + rope), ``v_head_size`` the latent, and
    the second tensor a view of the first.

    Raises:
        ValueError, TypeError: with every reason: sizes below 1, what the layout cannot hold, a dtype or device that is none.
    """
    sizes = {"num_blocks": num_blocks, "block_size": block_size, "num_kv_heads": num_kv_heads, "head_size": head_size}
    if v_head_size is None:
        v_head_size = head_size
    else:
        sizes["v_head_size"] = v_head_size
    whole = {name: n for name, n in sizes.items() if hasattr(n, "__index__") and not isinstance(n, bool)}
    types = [f"{name} must be an int, got {type(n).__name__}" for name, n in sizes.items() if name not in whole]
    if not isinstance(dtype, torch.dtype):
        types.append(f"dtype must be a torch.dtype, got {dtype!r}")
    reasons = []
    try:
        device = device_of(device)
    except TypeError as error:
        types.append(str(error))
    except ValueError as error:
        reasons.append(str(error))
    least = {name: 0 if name == "num_blocks" else 1 for name in whole}
    reasons += [f"{name} must be at least {least[name]}, got {n}" for name, n in whole.items() if n < least[name]]
    if kv_layout not in LAYOUTS:
        reasons.append(f"kv_layout must be one of {', '.join(LAYOUTS)}, got {kv_layout!r}")
    if kv_layout == "preshuffled" and isinstance(dtype, torch.dtype):
        reasons += unpackable(whole.get("block_size", 0), whole.get("head_size", 0), dtype)
    if kv_layout == "latent" and whole.get("num_kv_heads", 1) != 1:
        reasons.append(f"num_kv_heads must be 1 for the latent layout, got {num_kv_heads}")
    if kv_layout == "latent" and set(whole) == set(sizes) and v_head_size > head_size:
        reasons.append(f"v_head_size must be at most head_size {head_size} for the latent layout, got {v_head_size}")
    if types or reasons:
        raise (ValueError if reasons else TypeError)("layouts.allocate: " + "; ".join(types + reasons))
    x = pack_width(dtype)
    k_shape, v_shape = shapes(kv_layout, num_blocks, block_size, num_kv_heads, head_size, v_head_size, x)
    k_cache = torch.empty(k_shape, dtype=dtype, device=device)
    if kv_layout == "latent":
        return k_cache, k_cache[..., :v_head_size]
    return k_cache, torch.empty(v_shape, dtype=dtype, device=device)


def unpackable(block_size: int, head_size: int, dtype: torch.dtype) -> list[str]:
    """Why tokens and dims cannot be cut into the 16-byte pieces of the preshuffled layout."""
    x = pack_width(dtype)
    sizes = {"block_size": block_size, "head_size": head_size}
    return [f"{name} must be a multiple of {x} (16 bytes of {dtype}), got {size}" for name, size in sizes.items() if size % x]


def wrong_ranks(k_cache: Tensor, v_cache: Tensor, kv_layout: str) -> list[str]:
    """Which of these have another number of dimensions than a cache of this layout; what is no tensor has none."""
    rank, reasons = {"preshuffled": 5, "latent": 3}.get(kv_layout, 4), []
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if isinstance(cache, Tensor) and cache.ndim != rank:
            reasons.append(f"{name} must have {rank} dimensions in the {kv_layout} layout, got {list(cache.shape)}")
    return reasons


def refusals(k_cache: Tensor, v_cache: Tensor, kv_layout: str) -> list[str]:
    """Every reason why the two tensors are not a cache of this layout; empty when they are."""
    if kv_layout not in LAYOUTS:
        return [f"kv_layout must be one of {', '.join(LAYOUTS)}, got {kv_layout!r}"]
    reasons = wrong_ranks(k_cache, v_cache, kv_layout)
    if reasons:
        return reasons
    k_shape, v_shape = k_cache.shape, v_cache.shape
    k_strides, v_strides = k_cache.stride(), v_cache.stride()
    if k_cache.dtype != v_cache.dtype:
        reasons.append(f"v_cache must be {k_cache.dtype} like k_cache, got {v_cache.dtype}")
    if kv_layout == "preshuffled":
        x = 16 // k_cache.itemsize
        blocks, heads, _, block_size, _ = k_shape
        dense_k, dense_v = (block_size * x, x, 1), (v_shape[3] * x, x, 1)
        if k_shape[4] != x:
            reasons.append(f"k_cache must be [blocks, Hkv, D/{x}, bs, {x}] for {k_cache.dtype}, got {list(k_shape)}")
        elif v_shape[:3] != (blocks, heads, block_size // x) or v_shape[4] != x or block_size % x:
            need = f"[{blocks}, {heads}, {block_size}/{x}, Dv, {x}]"
            reasons.append(f"v_cache must be {need}, block size a multiple of {x}, got {list(v_shape)}")
        elif not (_dense(k_shape[2:], k_strides[2:], dense_k) and _dense(v_shape[2:], v_strides[2:], dense_v)):
            reasons.append(
                f"preshuffled pages must be dense inside a head: k_cache strides [.., .., {block_size * x}, {x}, 1], "
                f"v_cache [.., .., {v_shape[3] * x}, {x}, 1], got {list(k_strides)} and {list(v_strides)}"
            )
        return reasons
    if v_shape[:-1] != k_shape[:-1]:
        need = ", ".join(map(str, k_shape[:-1]))
        reasons.append(f"v_cache must be [{need}, Dv] like k_cache {list(k_shape)}, got {list(v_shape)}")
    for name, strides in (("k_cache", k_strides), ("v_cache", v_strides)):
        if strides[-1] != 1:
            reasons.append(f"{name} must have a last stride of 1, got strides {list(strides)}")
    return reasons


def _dense(shape: tuple[int, ...], strides: tuple[int, ...], need: tuple[int, ...]) -> bool:
    return strides == need or all(s == n or size == 1 for size, s, n in zip(shape, strides, need, strict=True))


def view(k_cache: Tensor, v_cache: Tensor, kv_layout: str) -> CacheView:
    """The stride view of two caches (shapes in the module docstring).

    Raises:
        ValueError: with every reason of `refusals`. TypeError: for what is no tensor.
    """
    _require("view", k_cache, v_cache, kv_layout)
    return view_unchecked(k_cache, v_cache, kv_layout)


def _require(op: str, k_cache: Tensor, v_cache: Tensor, kv_layout: str) -> None:
    types = [f"{name} must be a tensor, got {type(x).__name__}" for name, x in (("k_cache", k_cache), ("v_cache", v_cache)) if not isinstance(x, Tensor)]
    if types:
        raise TypeError(f"layouts.{op}: " + "; ".join(types))
    reasons = refusals(k_cache, v_cache, kv_layout)
    if reasons:
        raise ValueError(f"layouts.{op}: " + "; ".join(reasons))


def view_unchecked(k_cache: Tensor, v_cache: Tensor, kv_layout: str) -> CacheView:
    """`view` for caches that passed `refusals` already (it is on the path of every decode call)."""
    k_shape, k_strides, v_strides = k_cache.shape, k_cache.stride(), v_cache.stride()
    x = 16 // k_cache.itemsize
    if kv_layout == "preshuffled":
        blocks, heads, pieces, block_size, x = k_shape
        v_head_size = v_cache.shape[3]
        return CacheView(
            k_cache, v_cache, kv_layout, "preshuffled", blocks, block_size, heads, pieces * x, v_head_size, x,
            k_strides[0], x, k_strides[1], v_strides[0], v_head_size * x, v_strides[1],
        )  # fmt: skip
    if kv_layout == "nhd":
        blocks, block_size, heads, head_size = k_shape
        k_block, k_token, k_head, _ = k_strides
        v_block, v_token, v_head, _ = v_strides
    elif kv_layout == "hnd":
        blocks, heads, block_size, head_size = k_shape
        k_block, k_head, k_token, _ = k_strides
        v_block, v_head, v_token, _ = v_strides
    else:
        blocks, block_size, head_size = k_shape
        heads, k_head, v_head = 1, 0, 0
        k_block, k_token, _ = k_strides
        v_block, v_token, _ = v_strides
    return CacheView(
        k_cache, v_cache, kv_layout, "plain", blocks, block_size, heads, head_size, v_cache.shape[-1], x,
        k_block, k_token, k_head, v_block, v_token, v_head,
    )  # fmt: skip


def preshuffle_k(k_nhd: Tensor) -> Tensor:
    """``[blocks, bs, Hkv, D]`` -> ``[blocks, Hkv, D/x, bs, x]`` (a copy)."""
    blocks, block_size, heads, head_size = k_nhd.shape
    x = pack_width(k_nhd.dtype)
    return k_nhd.reshape(blocks, block_size, heads, head_size // x, x).permute(0, 2, 3, 1, 4).contiguous()


def preshuffle_v(v_nhd: Tensor) -> Tensor:
    """``[blocks, bs, Hkv, Dv]`` -> ``[blocks, Hkv, bs/x, Dv, x]`` (a copy)."""
    blocks, block_size, heads, head_size = v_nhd.shape
    x = pack_width(v_nhd.dtype)
    return v_nhd.reshape(blocks, block_size // x, x, heads, head_size).permute(0, 3, 1, 4, 2).contiguous()


def unshuffle_k(k_cache: Tensor) -> Tensor:
    """``[blocks, Hkv, D/x, bs, x]`` -> ``[blocks, bs, Hkv, D]`` (a copy)."""
    return k_cache.permute(0, 3, 1, 2, 4).flatten(3)


def unshuffle_v(v_cache: Tensor) -> Tensor:
    """``[blocks, Hkv, bs/x, Dv, x]`` -> ``[blocks, bs, Hkv, Dv]`` (a copy)."""
    return v_cache.permute(0, 2, 4, 1, 3).flatten(1, 2)


def to_nhd(k_cache: Tensor, v_cache: Tensor, kv_layout: str) -> tuple[Tensor, Tensor]:
    """Both caches as ``[blocks, bs, Hkv, D]`` and ``[.., Dv]``: a view where the layout allows one.

    Raises:
        ValueError: with every reason of `refusals`. TypeError: for what is no tensor.
    """
    _require("to_nhd", k_cache, v_cache, kv_layout)
    if kv_layout == "nhd":
        return k_cache, v_cache
    if kv_layout == "hnd":
        return k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    if kv_layout == "preshuffled":
        return unshuffle_k(k_cache), unshuffle_v(v_cache)
    return k_cache.unsqueeze(2), v_cache.unsqueeze(2)


def from_nhd(k_nhd: Tensor, v_nhd: Tensor, kv_layout: str) -> tuple[Tensor, Tensor]:
    """``[blocks, bs, Hkv, D]`` and ``[.., Dv]`` in another MHA layout: a copy, for ``nhd`` the same tensors.

    Raises:
        ValueError: with every reason: no pair of ``nhd`` caches, or sizes that the layout cannot hold. TypeError: for what is no tensor.
    """
    if kv_layout not in PAGED_LAYOUTS:
        raise ValueError(f"layouts.from_nhd: kv_layout must be one of {', '.join(PAGED_LAYOUTS)}, got {kv_layout!r}")
    _require("from_nhd", k_nhd, v_nhd, "nhd")
    if kv_layout == "nhd":
        return k_nhd, v_nhd
    if kv_layout == "hnd":
        return k_nhd.transpose(1, 2).contiguous(), v_nhd.transpose(1, 2).contiguous()
    reasons = unpackable(k_nhd.shape[1], k_nhd.shape[3], k_nhd.dtype)
    if reasons:
        raise ValueError("layouts.from_nhd: " + "; ".join(reasons))
    return preshuffle_k(k_nhd), preshuffle_v(v_nhd)
