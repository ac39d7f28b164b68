"""vLLM's KV cache as this package's cache views.

vLLM gives each layer a view [blocks, Hkv, block_size, 2 * D] of one allocation, K and V of a token side by side, in a physical order of its
own choice. "packed" is that format. "preshuffled" puts the preshuffled K page, then the V page, inside each (block, head) run of block_size *
2 * D elements: the same bytes per page, so nothing in vLLM's accounting changes, but only for physical orders in which a run is contiguous.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tritonattn import environment, layouts
from tritonattn.layouts import CacheView
from tritonattn.tuning.arch import detect

SETTING = "TRITONATTN_VLLM_KV_LAYOUT"
PRESHUFFLED_BY_DEFAULT = ("gfx942", "gfx950")


def chosen() -> str:
    """"packed" or "preshuffled", by the setting or else by the device. ValueError for another value."""
    choice = environment.vllm_kv_layout()
    if choice != "auto":
        return choice
    arch = detect("cuda" if torch.cuda.is_available() else "cpu")
    return "preshuffled" if arch.name in PRESHUFFLED_BY_DEFAULT else "packed"


def view(kv_cache: Tensor, head_size: int, layout: str) -> CacheView:
    """The cache of one layer, [blocks, Hkv, block_size, 2 * head_size] with any strides that the layout can have."""
    if layout == "packed":
        return layouts.view(kv_cache[..., :head_size], kv_cache[..., head_size:], "hnd")
    blocks, heads, block_size, content = kv_cache.shape
    block, head, token, element = kv_cache.stride()
    if (token, element) != (content, 1):
        raise ValueError(
            f"a preshuffled cache needs contiguous (block, head) runs, got strides {list(kv_cache.stride())} of {list(kv_cache.shape)}; "
            f"VLLM_KV_CACHE_LAYOUT must leave the last two dimensions in place, or {SETTING}=packed"
        )
    x, begin = layouts.pack_width(kv_cache.dtype), kv_cache.storage_offset()
    k = kv_cache.as_strided((blocks, heads, head_size // x, block_size, x), (block, head, block_size * x, x, 1), begin)
    v = kv_cache.as_strided((blocks, heads, block_size // x, head_size, x), (block, head, head_size * x, x, 1), begin + block_size * head_size)
    return layouts.view(k, v, "preshuffled")
