"""Every check of user input: one error before any launch, with all reasons in it.

A ``check_*`` function takes what its public op takes and returns the facts that the launchers need. The error is a
`TypeError` when all that is wrong are types and dtypes, else a `ValueError`. Text is only built for what fails: these
functions run on every call, up to once per layer and token.

What only the device knows (lengths, table entries) is not checked here: reading it would wait for the GPU.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tritonattn import layouts
from tritonattn.layouts import CacheView
from tritonattn.problem import FP8_DTYPES, AttnParams, AttnProblem, MlaParams, default_scale
from tritonattn.tuning.arch import detect

Ints = NDArray[np.int32]
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
FLOATS_AND_FP8 = FLOATS + FP8_DTYPES
INT32 = (torch.int32,)
INTS = (torch.int32, torch.int64)
FP32 = (torch.float32,)
MIN_HEAD_SIZE, MAX_HEAD_SIZE, HEAD_SIZE_STEP = 32, 256, 8
MAX_LATENT, MAX_ROPE, LATENT_STEP = 512, 128, 16


class Reasons:
    """Collects what is wrong with a call; `stop` and `done` raise it as one error. All tensors must be where the first one is."""

    __slots__ = ("device", "op", "types", "unusable", "values")

    def __init__(self, op: str, first: Tensor | None, device: torch.device | None = None) -> None:
        self.op = op
        self.device = first.device if isinstance(first, Tensor) else device
        self.types: list[str] = []
        self.values: list[str] = []
        self.unusable = False
        """Something has the wrong Python type or rank, so that its sizes cannot be discussed."""

    def done(self) -> None:
        """Raise if there is any reason."""
        if self.types or self.values:
            self._raise()

    def stop(self) -> None:
        """Raise if what was found makes the remaining checks meaningless."""
        if self.unusable:
            self._raise()

    def _raise(self) -> NoReturn:
        error = ValueError if self.values else TypeError
        raise error(f"{self.op}: " + "; ".join(self.types + self.values))

    # -- tensors --------------------------------------------------------------------------------------------------

    def tensor(self, name: str, tensor: Tensor, rank: int, dtypes: Sequence[torch.dtype]) -> None:
        """A tensor of this rank, one of these dtypes, on this device."""
        if not isinstance(tensor, Tensor):
            self.unusable = True
            self.types.append(f"{name} must be a tensor, got {type(tensor).__name__}")
            return
        if tensor.ndim != rank:
            self.unusable = True
            self.values.append(f"{name} must have {rank} dimension{'s' * (rank > 1)}, got shape {list(tensor.shape)}")
        if tensor.dtype not in dtypes:
            self.types.append(f"{name} must be {_either(dtypes)}, got {tensor.dtype}")
        if tensor.device != self.device and self.device is not None:
            self.values.append(f"{name} must be on {self.device}, got {tensor.device}")

    def rows(self, name: str, tensor: Tensor, rank: int, dtypes: Sequence[torch.dtype]) -> None:
        """As `tensor`, with a unit last stride."""
        self.tensor(name, tensor, rank, dtypes)
        if isinstance(tensor, Tensor) and tensor.ndim and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            self.values.append(f"{name} must have a last stride of 1, got strides {list(tensor.stride())}")

    def shape(self, name: str, tensor: Tensor, need: tuple[int, ...]) -> None:
        """The shape of a tensor; -1 stands for any size."""
        shape = tensor.shape
        if shape == need:
            return
        if any(n >= 0 and n != size for n, size in zip(need, shape, strict=True)):
            wanted = ", ".join(".." if n < 0 else str(n) for n in need)
            self.values.append(f"{name} must be [{wanted}], got {list(shape)}")

    def cache(self, k_cache: Tensor, v_cache: Tensor, kv_layout: str) -> None:
        """A pair of caches of this layout, of a dtype that the hardware has."""
        for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
            if not isinstance(cache, Tensor):
                self.unusable = True
                self.types.append(f"{name} must be a tensor, got {type(cache).__name__}")
                continue
            if cache.dtype not in FLOATS_AND_FP8:
                self.types.append(f"{name} must be {_either(FLOATS)} or an 8-bit float, got {cache.dtype}")
            if cache.device != self.device and self.device is not None:
                self.values.append(f"{name} must be on {self.device}, got {cache.device}")
        if kv_layout not in layouts.PAGED_LAYOUTS:
            self.unusable = True
            self.values.append(f"kv_layout must be one of {', '.join(layouts.PAGED_LAYOUTS)}, got {kv_layout!r}")
        self.stop()
        refusals = layouts.refusals(k_cache, v_cache, kv_layout)
        if refusals:
            self.unusable = True
            self.values += refusals

    def hardware(self, *dtypes: torch.dtype) -> None:
        """The device runs kernels and has these 8-bit floats."""
        device = self.device
        if device is None:
            return
        if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1" and detect(device).simulated:
            self.values.append("tensors must be on a GPU, got cpu (TRITON_INTERPRET=1 runs the kernels there, slowly)")
        for dtype in dtypes:
            if dtype.itemsize == 1:
                arch = detect(device)
                name = str(dtype).removeprefix("torch.")
                if name not in arch.fp8_types:
                    self.types.append(f"8-bit floats on {arch.name} must be {_either(arch.fp8_types)}, got {name}")

    # -- numbers --------------------------------------------------------------------------------------------------

    def integer(self, name: str, value: int, least: int) -> None:
        """A host integer, at least ``least``."""
        if type(value) is int:
            if value >= least:
                return
            self.values.append(f"{name} must be at least {least}, got {value}")
        elif isinstance(value, bool) or not hasattr(value, "__index__") or isinstance(value, Tensor):
            self.types.append(f"{name} must be an int on the host, got {type(value).__name__}")
        else:
            self.integer(name, value.__index__(), least)

    def number(self, name: str, value: float, *, positive: bool) -> None:
        """A finite host number, above 0 or (``positive=False``) at least 0."""
        if isinstance(value, bool) or not isinstance(value, float | int):
            self.types.append(f"{name} must be a float, got {type(value).__name__}")
        elif not math.isfinite(value) or value < 0 or (positive and value == 0):
            self.values.append(f"{name} must be finite and {'above 0' if positive else 'at least 0'}, got {value}")

    def lengths(self, name: str, values: Sequence[int] | Ints) -> Ints:
        """Host integers, one per request, as int32."""
        if isinstance(values, Tensor) and values.is_cuda:
            self.types.append(f"{name} must be on the host, got a tensor on {values.device}")
            self.unusable = True
            return np.zeros(0, np.int32)
        array = np.asarray(values)
        if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
            self.types.append(f"{name} must be a sequence of integers, got {array.dtype} of shape {list(array.shape)}")
            self.unusable = True
        return array.astype(np.int32, copy=False)

    def each(self, need: str, values: Ints, wrong: NDArray[np.bool_]) -> None:
        """Requests that are wrong, the first few by number and value."""
        if wrong.any():
            which = np.flatnonzero(wrong)
            got = ", ".join(f"{values[i]} (request {i})" for i in which[:4])
            self.values.append(f"{need}, got {got}{', ...' if len(which) > 4 else ''}")

    def options(self, causal: bool, window_size: tuple[int, int], softcap: float, softmax_scale: float | None) -> None:
        """Options of the scores and of the mask that are plain values."""
        if softmax_scale is not None:
            self.number("softmax_scale", softmax_scale, positive=True)
        if softcap != 0.0 or type(softcap) is not float:
            self.number("softcap", softcap, positive=False)
        if type(causal) is not bool:
            self.types.append(f"causal must be a bool, got {type(causal).__name__}")
        if window_size != (-1, -1):
            if not isinstance(window_size, tuple | list) or len(window_size) != 2:
                self.types.append(f"window_size must be a pair (left, right), got {window_size!r}")
            else:
                self.integer("window_size left (-1: unlimited)", window_size[0], -1)
                self.integer("window_size right (-1: unlimited)", window_size[1], -1)

    def per_head(self, name: str, tensor: Tensor | None, heads: int) -> None:
        """``[heads]``, contiguous, or None."""
        if tensor is None:
            return
        before = self.unusable
        self.rows(name, tensor, 1, FLOATS)
        if self.unusable is before:
            self.shape(name, tensor, (heads,))

    def descale(self, name: str, value: float | Tensor | None, heads: int) -> None:
        """A number, a tensor of one element, or ``[heads]``; fp32."""
        if value is None:
            return
        if not isinstance(value, Tensor):
            self.number(name, value, positive=True)
            return
        if value.dtype != torch.float32:
            self.types.append(f"{name} must be torch.float32, got {value.dtype}")
        if value.device != self.device:
            self.values.append(f"{name} must be on {self.device}, got {value.device}")
        if value.numel() != 1 and (value.shape != (heads,) or value.stride(0) != 1):
            self.values.append(f"{name} must have 1 element or be [{heads}], contiguous, got {list(value.shape)}")

    def heads(self, num_q_heads: int, num_kv_heads: int, head_size: int, v_head_size: int) -> None:
        """The GQA ratio and the head sizes that the MHA kernels take."""
        if num_kv_heads < 1 or num_q_heads < 1 or num_q_heads % num_kv_heads:
            self.values.append(f"query heads must be a multiple of KV heads, got {num_q_heads} and {num_kv_heads}")
        for name, size in (("head size of q and k", head_size), ("head size of v", v_head_size)):
            if size % HEAD_SIZE_STEP or not MIN_HEAD_SIZE <= size <= MAX_HEAD_SIZE:
                need = f"a multiple of {HEAD_SIZE_STEP} from {MIN_HEAD_SIZE} to {MAX_HEAD_SIZE}"
                self.values.append(f"{name} must be {need}, got {size}")

    def out(self, out: Tensor | None, shape: tuple[int, ...]) -> None:
        """A buffer for the result, or None."""
        if out is None:
            return
        before = self.unusable
        self.rows("out", out, len(shape), FLOATS)
        if self.unusable is before:
            self.shape("out", out, shape)


def _either(names: Sequence[object]) -> str:
    return " or ".join(str(name) for name in names)


def _problem(
    q: Tensor, num_kv_heads: int, v_head_size: int, kv_dtype: torch.dtype, kv_layout: str, block_size: int,
    params: AttnParams,
) -> AttnProblem:  # fmt: skip
    _, num_q_heads, head_size = q.shape
    return AttnProblem(
        num_q_heads, num_kv_heads, head_size, v_head_size, q.dtype, kv_dtype, kv_layout, block_size, params.causal,
        params.window_size != (-1, -1), params.softcap > 0, params.alibi_slopes is not None, params.sinks is not None,
    )  # fmt: skip


# -- attention ------------------------------------------------------------------------------------------------


def check_prefill(
    q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size, softcap,
    alibi_slopes, sinks, q_descale, k_descale, v_descale, out,
) -> tuple[AttnProblem, AttnParams]:  # fmt: skip
    """Arguments of `flash_attn_varlen_func`."""
    reasons = Reasons("flash_attn_varlen_func", q)
    reasons.options(causal, window_size, softcap, softmax_scale)
    reasons.integer("max_seqlen_q", max_seqlen_q, 0)
    reasons.integer("max_seqlen_k", max_seqlen_k, 0)
    reasons.rows("q", q, 3, FLOATS_AND_FP8)
    same = (q.dtype,) if isinstance(q, Tensor) else FLOATS_AND_FP8
    reasons.rows("k", k, 3, same)
    reasons.rows("v", v, 3, same)
    reasons.rows("cu_seqlens_q", cu_seqlens_q, 1, INT32)
    reasons.rows("cu_seqlens_k", cu_seqlens_k, 1, INT32)
    reasons.stop()
    _, num_q_heads, head_size = q.shape
    num_keys, num_kv_heads, _ = k.shape
    v_head_size = v.shape[2]
    reasons.heads(num_q_heads, num_kv_heads, head_size, v_head_size)
    reasons.shape("k", k, (-1, -1, head_size))
    reasons.shape("v", v, (num_keys, num_kv_heads, -1))
    if len(cu_seqlens_q) < 1 or len(cu_seqlens_k) != len(cu_seqlens_q):
        got = f"{len(cu_seqlens_q)} and {len(cu_seqlens_k)}"
        reasons.values.append(f"cu_seqlens_q and cu_seqlens_k must both be [B + 1], got lengths {got}")
    reasons.hardware(q.dtype)
    params = _attention_options(
        reasons, q, num_kv_heads, v_head_size, softmax_scale, causal, window_size, softcap, alibi_slopes, sinks,
        q_descale, k_descale, v_descale, out,
    )  # fmt: skip
    return _problem(q, num_kv_heads, v_head_size, q.dtype, "dense", 0, params), params


def check_extend(
    q, k, v, k_cache, v_cache, *, cu_seqlens_q, context_lens, block_table, max_seqlen_q, max_context_len, kv_layout,
    chunk_tokens, softmax_scale, causal, window_size, softcap, alibi_slopes, sinks, k_descale, v_descale, out,
) -> tuple[AttnProblem, CacheView, AttnParams]:  # fmt: skip
    """Arguments of `extend_attention`."""
    reasons = Reasons("extend_attention", q)
    reasons.options(causal, window_size, softcap, softmax_scale)
    reasons.integer("max_seqlen_q", max_seqlen_q, 0)
    reasons.integer("max_context_len", max_context_len, 0)
    reasons.integer("chunk_tokens", chunk_tokens, 1)
    reasons.rows("q", q, 3, FLOATS)
    _new_tokens(reasons, q, k, v)
    reasons.rows("cu_seqlens_q", cu_seqlens_q, 1, INT32)
    reasons.rows("context_lens", context_lens, 1, INT32)
    reasons.rows("block_table", block_table, 2, INT32)
    reasons.cache(k_cache, v_cache, kv_layout)
    reasons.stop()
    cache = layouts.view_unchecked(k_cache, v_cache, kv_layout)
    _against_cache(reasons, q, k, v, cache)
    batch = len(context_lens)
    reasons.shape("cu_seqlens_q", cu_seqlens_q, (batch + 1,))
    reasons.shape("block_table", block_table, (batch, -1))
    params = _attention_options(
        reasons, q, cache.num_kv_heads, cache.v_head_size, softmax_scale, causal, window_size, softcap, alibi_slopes,
        sinks, None, k_descale, v_descale, out,
    )  # fmt: skip
    problem = _problem(q, cache.num_kv_heads, cache.v_head_size, k_cache.dtype, cache.kind, cache.block_size, params)
    return problem, cache, params


def check_decode(
    q, k_cache, v_cache, *, seqused_k, block_table, max_seqlen_k, cu_seqlens_q, max_seqlen_q, kv_layout, num_splits,
    softmax_scale, causal, window_size, softcap, alibi_slopes, sinks, q_descale, k_descale, v_descale, out,
) -> tuple[AttnProblem, CacheView, AttnParams]:  # fmt: skip
    """Arguments of `decode_attention`."""
    reasons = Reasons("decode_attention", q)
    reasons.options(causal, window_size, softcap, softmax_scale)
    reasons.integer("max_seqlen_k", max_seqlen_k, 0)
    reasons.integer("max_seqlen_q", max_seqlen_q, 1)
    reasons.integer("num_splits", num_splits, 0)
    reasons.rows("q", q, 3, FLOATS_AND_FP8)
    reasons.rows("seqused_k", seqused_k, 1, INT32)
    reasons.rows("block_table", block_table, 2, INT32)
    if cu_seqlens_q is not None:
        reasons.rows("cu_seqlens_q", cu_seqlens_q, 1, INT32)
    reasons.cache(k_cache, v_cache, kv_layout)
    reasons.stop()
    cache = layouts.view_unchecked(k_cache, v_cache, kv_layout)
    _against_cache(reasons, q, None, None, cache)
    batch = len(seqused_k)
    reasons.shape("block_table", block_table, (batch, -1))
    _query_rows(reasons, "q", q.shape[0], cu_seqlens_q, batch, max_seqlen_q)
    params = _attention_options(
        reasons, q, cache.num_kv_heads, cache.v_head_size, softmax_scale, causal, window_size, softcap, alibi_slopes,
        sinks, q_descale, k_descale, v_descale, out,
    )  # fmt: skip
    problem = _problem(q, cache.num_kv_heads, cache.v_head_size, k_cache.dtype, cache.kind, cache.block_size, params)
    return problem, cache, params


def _query_rows(reasons: Reasons, name: str, tokens: int, cu_seqlens_q, batch: int, max_seqlen_q: int) -> None:
    """Query tokens of a decode call: divided by ``cu_seqlens_q``, or ``max_seqlen_q`` for each sequence."""
    if cu_seqlens_q is not None:
        reasons.shape("cu_seqlens_q", cu_seqlens_q, (batch + 1,))
    elif not reasons.types and tokens < batch * max_seqlen_q:
        need = f"{batch} sequences of max_seqlen_q {max_seqlen_q} tokens"
        reasons.values.append(f"{name} must hold {need} where cu_seqlens_q is None, got {tokens} tokens")


def _cache_dtype(reasons: Reasons, name: str, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """The cache has the dtype of what is read or written beside it, or it is an 8-bit float of this hardware."""
    if dtype is not kv_dtype and (kv_dtype.itemsize > 1 or dtype.itemsize == 1):
        need = f"{dtype}" if dtype.itemsize == 1 else f"{dtype} like q, or an 8-bit float"
        reasons.types.append(f"{name} must be {need}, got {kv_dtype}")
    reasons.hardware(kv_dtype)


def _new_tokens(reasons: Reasons, q, k, v) -> None:
    """New keys and values of q's dtype, or both None: then they are in the cache."""
    if (k is None) != (v is None):
        reasons.types.append(f"k and v must both be tensors or both be None, got {type(k).__name__} and {type(v).__name__}")
        reasons.unusable = True
    elif k is not None:
        same = (q.dtype,) if isinstance(q, Tensor) else FLOATS
        reasons.rows("k", k, 3, same)
        reasons.rows("v", v, 3, same)


def _against_cache(reasons: Reasons, q: Tensor, k: Tensor | None, v: Tensor | None, cache: CacheView) -> None:
    """The query (and the new tokens) beside the cache: heads, head sizes, dtypes, hardware."""
    tokens, num_q_heads, head_size = q.shape
    reasons.heads(num_q_heads, cache.num_kv_heads, cache.head_size, cache.v_head_size)
    if head_size != cache.head_size:
        reasons.values.append(f"q must be [.., .., {cache.head_size}] like k_cache, got {list(q.shape)}")
    if k is not None and v is not None:
        reasons.shape("k", k, (tokens, cache.num_kv_heads, cache.head_size))
        reasons.shape("v", v, (tokens, cache.num_kv_heads, cache.v_head_size))
    _cache_dtype(reasons, "k_cache", q.dtype, cache.k.dtype)


def _attention_options(
    reasons: Reasons, q, num_kv_heads, v_head_size, softmax_scale, causal, window_size, softcap, alibi_slopes, sinks,
    q_descale, k_descale, v_descale, out,
) -> AttnParams:  # fmt: skip
    """The last checks: options that are tensors, and the result. Raises, or gives all options as one value."""
    tokens, num_q_heads, head_size = q.shape
    if alibi_slopes is not None:
        reasons.per_head("alibi_slopes", alibi_slopes, num_q_heads)
    if sinks is not None:
        reasons.per_head("sinks", sinks, num_q_heads)
    if q_descale is not None:
        reasons.descale("q_descale", q_descale, num_kv_heads)
    if k_descale is not None:
        reasons.descale("k_descale", k_descale, num_kv_heads)
    if v_descale is not None:
        reasons.descale("v_descale", v_descale, num_kv_heads)
    if out is not None:
        reasons.out(out, (tokens, num_q_heads, v_head_size))
    reasons.done()
    return AttnParams(
        default_scale(softmax_scale, head_size), causal, tuple(window_size), softcap, alibi_slopes, sinks,
        q_descale, k_descale, v_descale,
    )  # fmt: skip


# -- cache and merge ------------------------------------------------------------------------------------------


def check_merge(out_a, lse_a, out_b, lse_b, *, out) -> None:
    """Arguments of `merge_attn_states`."""
    reasons = Reasons("merge_attn_states", out_a)
    reasons.rows("out_a", out_a, 3, FLOATS)
    reasons.rows("out_b", out_b, 3, (out_a.dtype,) if isinstance(out_a, Tensor) else FLOATS)
    reasons.tensor("lse_a", lse_a, 2, FP32)
    reasons.tensor("lse_b", lse_b, 2, FP32)
    reasons.stop()
    tokens, heads, size = out_a.shape
    reasons.shape("out_b", out_b, (tokens, heads, size))
    reasons.shape("lse_a", lse_a, (heads, tokens))
    reasons.shape("lse_b", lse_b, (heads, tokens))
    reasons.out(out, (tokens, heads, size))
    reasons.hardware()
    reasons.done()


def check_reshape_and_cache(key, value, k_cache, v_cache, slot_mapping, *, kv_layout, k_descale, v_descale) -> CacheView:
    """Arguments of `reshape_and_cache`. ``slot_mapping`` may be shorter than ``key``: the rest is padding."""
    reasons = Reasons("reshape_and_cache", key)
    reasons.rows("key", key, 3, FLOATS)
    reasons.rows("value", value, 3, (key.dtype,) if isinstance(key, Tensor) else FLOATS)
    reasons.rows("slot_mapping", slot_mapping, 1, INTS)
    reasons.cache(k_cache, v_cache, kv_layout)
    reasons.stop()
    cache = layouts.view_unchecked(k_cache, v_cache, kv_layout)
    tokens = key.shape[0]
    reasons.shape("key", key, (-1, cache.num_kv_heads, cache.head_size))
    reasons.shape("value", value, (tokens, cache.num_kv_heads, cache.v_head_size))
    if len(slot_mapping) > tokens:
        reasons.values.append(f"slot_mapping must be at most as long as key, {tokens} tokens, got {len(slot_mapping)}")
    kv_dtype = k_cache.dtype
    if kv_dtype is not key.dtype and kv_dtype.itemsize > 1:
        reasons.types.append(f"k_cache must be {key.dtype} like key, or an 8-bit float, got {kv_dtype}")
    reasons.descale("k_descale", k_descale, cache.num_kv_heads)
    reasons.descale("v_descale", v_descale, cache.num_kv_heads)
    reasons.hardware(kv_dtype)
    reasons.done()
    return cache


def check_gather(k_cache, v_cache, block_table, starts, lengths, *, kv_layout, k_descale, v_descale, out) -> CacheView:
    """Arguments of `gather_cache`; ``out`` is a pair ``[n, Hkv, D]``, ``[n, Hkv, Dv]`` or None."""
    reasons = Reasons("gather_cache", k_cache)
    reasons.rows("block_table", block_table, 2, INT32)
    reasons.rows("starts", starts, 1, INT32)
    reasons.rows("lengths", lengths, 1, INT32)
    reasons.cache(k_cache, v_cache, kv_layout)
    if out is not None:
        if not isinstance(out, tuple | list) or len(out) != 2:
            reasons.types.append(f"out must be a pair (k, v) of tensors, got {type(out).__name__}")
            reasons.unusable = True
        else:
            reasons.rows("out[0]", out[0], 3, FLOATS)
            reasons.rows("out[1]", out[1], 3, FLOATS)
    reasons.stop()
    cache = layouts.view_unchecked(k_cache, v_cache, kv_layout)
    batch = len(starts)
    reasons.shape("lengths", lengths, (batch,))
    reasons.shape("block_table", block_table, (batch, -1))
    if out is not None:
        reasons.shape("out[0]", out[0], (-1, cache.num_kv_heads, cache.head_size))
        reasons.shape("out[1]", out[1], (out[0].shape[0], cache.num_kv_heads, cache.v_head_size))
    reasons.descale("k_descale", k_descale, cache.num_kv_heads)
    reasons.descale("v_descale", v_descale, cache.num_kv_heads)
    reasons.hardware(k_cache.dtype)
    reasons.done()
    return cache


# -- MLA ------------------------------------------------------------------------------------------------------


def check_mla_decode(
    q, kv_cache, *, seqused_k, block_table, max_seqlen_k, softmax_scale, kv_lora_rank, cu_seqlens_q, max_seqlen_q, num_splits,
    causal, q_descale, kv_descale, rope_descale, out,
) -> tuple[AttnProblem, MlaParams, Tensor, Tensor | None]:  # fmt: skip
    """Arguments of `mla_decode`. Gives q, or its latent and its rope part where it came as a pair."""
    pair = isinstance(q, tuple | list)
    if pair and len(q) != 2:
        raise ValueError(f"mla_decode: q must be a tensor or a pair (latent, rope), got {len(q)} of them")
    q, q_rope = q if pair else (q, None)
    name = "q[0]" if pair else "q"
    reasons = Reasons("mla_decode", q)
    reasons.rows(name, q, 3, FLOATS_AND_FP8)
    if q_rope is not None:
        reasons.rows("q[1]", q_rope, 3, (q.dtype,) if isinstance(q, Tensor) else FLOATS_AND_FP8)
    reasons.options(causal, (-1, -1), 0.0, None)
    reasons.number("softmax_scale", softmax_scale, positive=True)
    reasons.integer("max_seqlen_k", max_seqlen_k, 0)
    reasons.integer("max_seqlen_q", max_seqlen_q, 1)
    reasons.integer("num_splits", num_splits, 0)
    reasons.rows("seqused_k", seqused_k, 1, INT32)
    reasons.rows("block_table", block_table, 2, INT32)
    if cu_seqlens_q is not None:
        reasons.rows("cu_seqlens_q", cu_seqlens_q, 1, INT32)
    reasons.rows("kv_cache", kv_cache, 3, FLOATS_AND_FP8)
    reasons.integer("kv_lora_rank", kv_lora_rank, 1)
    reasons.stop()
    tokens, heads, _ = q.shape
    width, batch = kv_cache.shape[2], len(seqused_k)
    _latent(reasons, kv_lora_rank, width)
    if q_rope is not None:
        reasons.shape("q[0]", q, (-1, -1, kv_lora_rank))
        reasons.shape("q[1]", q_rope, (tokens, heads, width - kv_lora_rank))
    else:
        reasons.shape("q", q, (-1, -1, width))
    if heads < 1:
        reasons.values.append(f"q must have at least 1 head, got {heads}")
    reasons.shape("block_table", block_table, (batch, -1))
    _query_rows(reasons, name, tokens, cu_seqlens_q, batch, max_seqlen_q)
    _cache_dtype(reasons, "kv_cache", q.dtype, kv_cache.dtype)
    reasons.descale("q_descale", q_descale, 1)
    reasons.descale("kv_descale", kv_descale, 1)
    reasons.descale("rope_descale", rope_descale, 1)
    reasons.out(out, (tokens, heads, kv_lora_rank))
    reasons.done()
    problem = AttnProblem(heads, 1, width, kv_lora_rank, q.dtype, kv_cache.dtype, "latent", kv_cache.shape[1], causal)
    return problem, MlaParams(softmax_scale, causal, q_descale, kv_descale, rope_descale), q, q_rope


def check_mla_extend(
    q, k, v, kv_cache, *, up_project, cu_seqlens_q, context_lens, block_table, max_seqlen_q, max_context_len, total_context_len,
    softmax_scale, kv_lora_rank, chunk_tokens, causal, kv_descale, rope_descale, out,
) -> tuple[AttnProblem, CacheView, AttnParams]:  # fmt: skip
    """Arguments of `mla_extend`. The view has the latent columns as K and the rope columns as V."""
    reasons = Reasons("mla_extend", q)
    reasons.rows("q", q, 3, FLOATS)
    same = (q.dtype,) if isinstance(q, Tensor) else FLOATS
    reasons.rows("k", k, 3, same)
    reasons.rows("v", v, 3, same)
    if not callable(up_project):
        reasons.types.append(f"up_project must be callable, got {type(up_project).__name__}")
    reasons.options(causal, (-1, -1), 0.0, None)
    reasons.number("softmax_scale", softmax_scale, positive=True)
    reasons.integer("max_seqlen_q", max_seqlen_q, 0)
    reasons.integer("max_context_len", max_context_len, 0)
    if total_context_len is not None:
        reasons.integer("total_context_len", total_context_len, 0)
    reasons.integer("chunk_tokens", chunk_tokens, 1)
    reasons.rows("cu_seqlens_q", cu_seqlens_q, 1, INT32)
    reasons.rows("context_lens", context_lens, 1, INT32)
    reasons.rows("block_table", block_table, 2, INT32)
    reasons.rows("kv_cache", kv_cache, 3, FLOATS_AND_FP8)
    reasons.integer("kv_lora_rank", kv_lora_rank, 1)
    reasons.stop()
    tokens, num_q_heads, head_size = q.shape
    num_kv_heads, v_head_size = v.shape[1:]
    batch = len(context_lens)
    reasons.heads(num_q_heads, num_kv_heads, head_size, v_head_size)
    reasons.shape("k", k, (tokens, num_kv_heads, head_size))
    reasons.shape("v", v, (tokens, -1, -1))
    reasons.shape("cu_seqlens_q", cu_seqlens_q, (batch + 1,))
    reasons.shape("block_table", block_table, (batch, -1))
    _latent(reasons, kv_lora_rank, kv_cache.shape[2])
    _cache_dtype(reasons, "kv_cache", q.dtype, kv_cache.dtype)
    reasons.descale("kv_descale", kv_descale, 1)
    reasons.descale("rope_descale", rope_descale, 1)
    reasons.out(out, (tokens, num_q_heads, v_head_size))
    reasons.done()
    params = AttnParams(softmax_scale, causal)
    return _problem(q, num_kv_heads, v_head_size, q.dtype, "dense", 0, params), _halves(kv_cache, kv_lora_rank), params


def check_up_projected(k, v, num_tokens: int, problem: AttnProblem) -> None:
    """What `up_project` gave back."""
    reasons = Reasons("mla_extend", k)
    reasons.rows("k from up_project", k, 3, (problem.dtype,))
    reasons.rows("v from up_project", v, 3, (problem.dtype,))
    reasons.stop()
    reasons.shape("k from up_project", k, (num_tokens, problem.num_kv_heads, problem.head_size))
    reasons.shape("v from up_project", v, (num_tokens, problem.num_kv_heads, problem.v_head_size))
    reasons.done()


def check_mla_cache_write(latent, rope, kv_cache, slot_mapping, *, kv_descale, rope_descale) -> CacheView:
    """Arguments of `mla_cache_write`. The view has the latent columns as K and the rope columns as V."""
    reasons = Reasons("mla_cache_write", latent)
    reasons.rows("latent", latent, 2, FLOATS)
    reasons.rows("rope", rope, 2, (latent.dtype,) if isinstance(latent, Tensor) else FLOATS)
    reasons.rows("kv_cache", kv_cache, 3, FLOATS_AND_FP8)
    reasons.rows("slot_mapping", slot_mapping, 1, INTS)
    reasons.stop()
    tokens, kv_lora_rank = latent.shape
    width = kv_cache.shape[2]
    _latent(reasons, kv_lora_rank, width)
    reasons.shape("rope", rope, (tokens, width - kv_lora_rank))
    if len(slot_mapping) > tokens:
        reasons.values.append(f"slot_mapping must be at most as long as latent, {tokens} tokens, got {len(slot_mapping)}")
    _cache_dtype(reasons, "kv_cache", latent.dtype, kv_cache.dtype)
    reasons.descale("kv_descale", kv_descale, 1)
    reasons.descale("rope_descale", rope_descale, 1)
    reasons.done()
    return _halves(kv_cache, kv_lora_rank)


def check_mla_gather(
    kv_cache, block_table, starts, lengths, *, kv_lora_rank, kv_descale, rope_descale, out
) -> CacheView:  # fmt: skip
    """Arguments of `mla_gather_cache`; ``out`` is a pair ``[n, latent]``, ``[n, rope]`` or None."""
    reasons = Reasons("mla_gather_cache", kv_cache)
    reasons.rows("kv_cache", kv_cache, 3, FLOATS_AND_FP8)
    reasons.rows("block_table", block_table, 2, INT32)
    reasons.rows("starts", starts, 1, INT32)
    reasons.rows("lengths", lengths, 1, INT32)
    reasons.integer("kv_lora_rank", kv_lora_rank, 1)
    if out is not None:
        if not isinstance(out, tuple | list) or len(out) != 2:
            reasons.types.append(f"out must be a pair (latent, rope) of tensors, got {type(out).__name__}")
            reasons.unusable = True
        else:
            reasons.rows("out[0]", out[0], 2, FLOATS)
            reasons.rows("out[1]", out[1], 2, (out[0].dtype,) if isinstance(out[0], Tensor) else FLOATS)
    reasons.stop()
    width, batch = kv_cache.shape[2], len(starts)
    _latent(reasons, kv_lora_rank, width)
    reasons.shape("lengths", lengths, (batch,))
    reasons.shape("block_table", block_table, (batch, -1))
    if out is not None:
        reasons.shape("out[0]", out[0], (-1, kv_lora_rank))
        reasons.shape("out[1]", out[1], (out[0].shape[0], width - kv_lora_rank))
    reasons.descale("kv_descale", kv_descale, 1)
    reasons.descale("rope_descale", rope_descale, 1)
    reasons.hardware(kv_cache.dtype)
    reasons.done()
    return _halves(kv_cache, kv_lora_rank)


def _latent(reasons: Reasons, kv_lora_rank: int, width: int) -> None:
    """The split of a cached row into latent and rope columns."""
    for name, size, most in (("latent", kv_lora_rank, MAX_LATENT), ("rope", width - kv_lora_rank, MAX_ROPE)):
        if type(size) is int and (size % LATENT_STEP or not LATENT_STEP <= size <= most):
            need = f"a multiple of {LATENT_STEP} from {LATENT_STEP} to {most}"
            reasons.values.append(f"{name} columns of kv_cache must be {need}, got {size} (kv_lora_rank {kv_lora_rank} of {width})")


def _halves(kv_cache: Tensor, kv_lora_rank: int) -> CacheView:
    return layouts.view_unchecked(kv_cache[..., :kv_lora_rank], kv_cache[..., kv_lora_rank:], "latent")


# -- router ---------------------------------------------------------------------------------------------------


def check_router(
    num_q_heads, num_kv_heads, head_size, v_head_size, dtype, device, kv_layout, kv_dtype, decode_threshold, chunk_tokens, block_size,
    softmax_scale, causal, window_size, softcap, alibi_slopes, sinks, q_descale, k_descale, v_descale,
) -> AttnParams:  # fmt: skip
    """Arguments of `Router`."""
    reasons = Reasons("Router", None, device)
    sizes = {"num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads, "head_size": head_size, "v_head_size": v_head_size}
    for name, value in sizes.items():
        reasons.integer(name, value, 1)
    reasons.integer("decode_threshold", decode_threshold, 1)
    reasons.integer("chunk_tokens", chunk_tokens, 1)
    if block_size is not None:
        reasons.integer("block_size", block_size, 1)
    reasons.options(causal, window_size, softcap, softmax_scale)
    if dtype not in FLOATS:
        reasons.types.append(f"dtype must be {_either(FLOATS)}, got {dtype}")
    elif kv_dtype is not dtype and kv_dtype not in FP8_DTYPES:
        reasons.types.append(f"kv_dtype must be {dtype} like dtype, or an 8-bit float, got {kv_dtype}")
    if kv_layout not in layouts.PAGED_LAYOUTS:
        reasons.values.append(f"kv_layout must be one of {', '.join(layouts.PAGED_LAYOUTS)}, got {kv_layout!r}")
    reasons.done()
    reasons.heads(num_q_heads, num_kv_heads, head_size, v_head_size)
    reasons.per_head("alibi_slopes", alibi_slopes, num_q_heads)
    reasons.per_head("sinks", sinks, num_q_heads)
    for name, value in (("q_descale", q_descale), ("k_descale", k_descale), ("v_descale", v_descale)):
        reasons.descale(name, value, num_kv_heads)
    reasons.hardware(kv_dtype)
    reasons.done()
    return AttnParams(
        default_scale(softmax_scale, head_size), causal, tuple(window_size), softcap, alibi_slopes, sinks,
        q_descale, k_descale, v_descale,
    )  # fmt: skip


def check_plan(query_lens, seq_lens, block_table, device, block_size, decode_threshold) -> tuple[Ints, Ints]:
    """Arguments of `Router.plan`, whose lengths the host knows. Gives both as int32 arrays."""
    reasons = Reasons("Router.plan", None, device)
    query, seq = reasons.lengths("query_lens", query_lens), reasons.lengths("seq_lens", seq_lens)
    if block_table is not None:
        reasons.rows("block_table", block_table, 2, INT32)
    reasons.stop()
    if len(query) != len(seq):
        reasons.values.append(f"seq_lens must be as long as query_lens, {len(query)}, got {len(seq)}")
        reasons.done()
    if len(query):
        if query.min() < 0:
            reasons.each("query_lens must be at least 0", query, query < 0)
        context = seq - query
        if context.min() < 0:
            reasons.each("seq_lens must be at least query_lens", seq, context < 0)
        if block_table is not None:
            reasons.shape("block_table", block_table, (len(query), -1))
        elif context.any():
            reasons.each("block_table must be given where a request has context", seq, context > 0)
        if block_table is not None and block_size is not None:
            held = block_table.shape[1] * block_size
            if seq.max() > held:
                stored = np.where((query > decode_threshold) | (context == 0), context, seq)
                reasons.each(f"seq_lens must fit in block_table, {held} tokens in the cache", stored, stored > held)
    reasons.done()
    return query, seq


def check_run(
    problem: AttnProblem, params: AttnParams, q, k, v, k_cache, v_cache, block_table, *, kv_layout, device, block_size, num_tokens,
    reads, fresh, out, sinks, q_descale, k_descale, v_descale,
) -> tuple[CacheView | None, AttnParams]:  # fmt: skip
    """Arguments of `Router.run` beside what its router and plan have fixed. ``reads``: most cached tokens of a request."""
    reasons = Reasons("Router.run", None, device)
    if not fresh:
        reasons.values.append("plan must be the latest of its batch size (decode-only plans of one size share a buffer), got an older one")
    same = (problem.dtype,)
    reasons.rows("q", q, 3, same)
    _new_tokens(reasons, q, k, v)
    cache = None
    if reads or k_cache is not None or v_cache is not None:
        reasons.cache(k_cache, v_cache, kv_layout)
    reasons.stop()
    heads = problem.num_kv_heads
    tokens = q.shape[0]
    reasons.shape("q", q, (-1, problem.num_q_heads, problem.head_size))
    if tokens < num_tokens:
        reasons.values.append(f"q must hold the {num_tokens} tokens of the plan, got {tokens}")
    if k is not None:
        reasons.shape("k", k, (tokens, heads, problem.head_size))
        reasons.shape("v", v, (tokens, heads, problem.v_head_size))
    if k_cache is not None:
        cache = layouts.view_unchecked(k_cache, v_cache, kv_layout)
        got, need = cache[6:9], (heads, problem.head_size, problem.v_head_size)
        if got != need:
            reasons.values.append(f"caches must have KV heads, D and Dv {list(need)}, got {list(got)}")
        if k_cache.dtype is not problem.kv_dtype:
            reasons.types.append(f"k_cache must be {problem.kv_dtype}, got {k_cache.dtype}")
        if block_size is not None and cache.block_size != block_size:
            reasons.values.append(f"caches must have the router's block size {block_size}, got {cache.block_size}")
        held = 0 if block_table is None else block_table.shape[1] * cache.block_size
        if reads > held:
            reasons.values.append(f"block_table must hold {reads} tokens, got room for {held} in blocks of {cache.block_size}")
    if out is not None:
        reasons.out(out, (tokens, problem.num_q_heads, problem.v_head_size))
    own = {"sinks": sinks, "q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    own = {name: value for name, value in own.items() if value is not None}
    for name, value in own.items():
        if name == "sinks":
            reasons.per_head(name, value, problem.num_q_heads)
        else:
            reasons.descale(name, value, heads)
    reasons.done()
    return cache, params._replace(**own) if own else params

# -- MLA router -----------------------------------------------------------------------------------------------


def check_mla_router(
    num_heads, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, dtype, device, kv_dtype, decode_threshold, chunk_tokens,
    block_size, softmax_scale, causal, kv_descale, rope_descale,
) -> tuple[AttnParams, MlaParams]:  # fmt: skip
    """Arguments of `MlaRouter`. Gives the options of the dense passes and of decode."""
    reasons = Reasons("MlaRouter", None, device)
    sizes = {
        "num_heads": num_heads, "kv_lora_rank": kv_lora_rank, "qk_nope_head_dim": qk_nope_head_dim, "qk_rope_head_dim": qk_rope_head_dim,
        "v_head_dim": v_head_dim, "decode_threshold": decode_threshold, "chunk_tokens": chunk_tokens,
    }  # fmt: skip
    for name, value in sizes.items():
        reasons.integer(name, value, 1)
    if block_size is not None:
        reasons.integer("block_size", block_size, 1)
    reasons.options(causal, (-1, -1), 0.0, None)
    reasons.number("softmax_scale", softmax_scale, positive=True)
    if dtype not in FLOATS:
        reasons.types.append(f"dtype must be {_either(FLOATS)}, got {dtype}")
    elif kv_dtype is not dtype and kv_dtype not in FP8_DTYPES:
        reasons.types.append(f"kv_dtype must be {dtype} like dtype, or an 8-bit float, got {kv_dtype}")
    reasons.done()
    reasons.heads(num_heads, num_heads, qk_nope_head_dim + qk_rope_head_dim, v_head_dim)
    _latent(reasons, kv_lora_rank, kv_lora_rank + qk_rope_head_dim)
    reasons.descale("kv_descale", kv_descale, 1)
    reasons.descale("rope_descale", rope_descale, 1)
    reasons.hardware(kv_dtype)
    reasons.done()
    return AttnParams(softmax_scale, causal), MlaParams(softmax_scale, causal, None, kv_descale, rope_descale)


def check_mla_run(
    paged: AttnProblem, dense: AttnProblem, params: MlaParams, q, k, v, kv_cache, block_table, *, device, block_size, num_tokens, reads,
    only_decodes, fresh, out, kv_descale, rope_descale,
) -> tuple[CacheView | None, MlaParams]:  # fmt: skip
    """Arguments of `MlaRouter.run`. The view has the latent columns as K and the rope columns as V."""
    reasons = Reasons("MlaRouter.run", None, device)
    if not fresh:
        reasons.values.append("plan must be the latest of its batch size (decode-only plans of one size share a buffer), got an older one")
    reasons.rows("q", q, 3, (dense.dtype,))
    if k is not None or v is not None or not only_decodes:
        reasons.rows("k", k, 3, (dense.dtype,))
        reasons.rows("v", v, 3, (dense.dtype,))
    if reads or kv_cache is not None:
        reasons.rows("kv_cache", kv_cache, 3, (paged.kv_dtype,))
    reasons.stop()
    tokens, heads = q.shape[0], dense.num_q_heads
    reasons.shape("q", q, (-1, heads, dense.head_size))
    if tokens < num_tokens:
        reasons.values.append(f"q must hold the {num_tokens} tokens of the plan, got {tokens}")
    if k is not None:
        reasons.shape("k", k, (tokens, heads, dense.head_size))
        reasons.shape("v", v, (tokens, heads, dense.v_head_size))
    if kv_cache is not None:
        reasons.shape("kv_cache", kv_cache, (-1, -1 if block_size is None else block_size, paged.head_size))
        held = 0 if block_table is None else block_table.shape[1] * kv_cache.shape[1]
        if reads > held:
            reasons.values.append(f"block_table must hold {reads} tokens, got room for {held} in blocks of {kv_cache.shape[1]}")
    reasons.out(out, (tokens, heads, dense.v_head_size))
    reasons.descale("kv_descale", kv_descale, 1)
    reasons.descale("rope_descale", rope_descale, 1)
    reasons.done()
    if kv_descale is not None or rope_descale is not None:
        params = params._replace(kv_descale=kv_descale, rope_descale=rope_descale)
    return None if kv_cache is None else _halves(kv_cache, paged.v_head_size), params


def check_absorbed(q, problem: AttnProblem, num_tokens: int) -> tuple[Tensor, Tensor | None]:
    """What `absorb` gave back: one tensor, or a latent and a rope part."""
    latent, rope = q if isinstance(q, tuple | list) and len(q) == 2 else (q, None)
    reasons = Reasons("MlaRouter.run", latent)
    reasons.rows("q from absorb", latent, 3, (problem.dtype,))
    if rope is not None:
        reasons.rows("rope part of q from absorb", rope, 3, (problem.dtype,))
    reasons.stop()
    width = problem.head_size if rope is None else problem.v_head_size
    reasons.shape("q from absorb", latent, (num_tokens, problem.num_q_heads, width))
    if rope is not None:
        need = (num_tokens, problem.num_q_heads, problem.head_size - problem.v_head_size)
        reasons.shape("rope part of q from absorb", rope, need)
    reasons.done()
    return latent, rope
