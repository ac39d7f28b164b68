"""Representative calls of the public ops: what `check` compiles, `tune` times and `warmup` compiles ahead.

A case is one call. Its tensors are made when it runs, on any device; on a machine without the GPU nothing reads them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

import tritonattn
from tritonattn.layouts import allocate

from .arch import Arch
from .models import MODELS, Model, model

# Kernels by the table that tunes them: the names of their entry functions.
ENTRY_POINTS = {
    "prefill": ("attend",),
    "decode": ("decode", "decode_wave"),
    "decode_unaligned": ("decode", "decode_wave"),
    "mla_decode": ("mla_decode", "mla_decode_wave", "mla_decode_wide"),
    "mla_decode_unaligned": ("mla_decode", "mla_decode_wave"),
    "combine": ("combine",),
    "cut": ("cut",),
    "cache_write": ("write", "write_latent"),
    "gather": ("gather",),
    "merge": ("merge",),
}
_DISTINCT = ("llama-3-8b", "qwen3-235b", "gpt-oss-120b", "gemma-2-9b", "phi-3-mini", "phi-2")  # in head size, group and features
EXPECT_MATRIX = ("prefill", "decode", "decode_unaligned", "mla_decode", "mla_decode_unaligned")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Case:
    """One call, by the facts that a table row may ask for. `kernel` is the table that it is meant to exercise."""

    kernel: str
    shape: Model
    dtype: str = "bf16"  # "fp8": the flavour of the arch
    kv_dtype: str = ""  # "": dtype
    layout: str = "dense"  # "dense", or a cache layout by its public name
    block_size: int = 16
    batch: int = 4
    query_len: int = 1
    kv_len: int = 4096
    num_splits: int = 0
    local: bool = False  # with the model's sliding window

    def __str__(self) -> str:
        s = self.shape
        heads = f"{s.num_heads}/{s.num_kv_heads}" if not s.is_mla or self.layout == "dense" else f"{s.num_heads}"
        size = f"{s.head_size}" if s.v_head_size in (0, s.head_size) else f"{s.head_size}/{s.v_head_size}"
        size = f"{s.latent}+{s.rope}" if self.layout == "latent" else size
        parts = [f"{heads}x{size}", self.dtype if not self.kv_dtype else f"{self.dtype}, cache {self.kv_dtype}"]
        parts += [self.layout + (f" {self.block_size}" if self.layout != "dense" else "")]
        parts += [f"batch {self.batch}, {self.query_len} on {self.kv_len}"]
        parts += ["window"] * self.local + ["softcap"] * (s.softcap > 0) + ["sinks"] * s.sinks
        return ", ".join(parts)


def cases(kernel: str) -> Iterator[Case]:
    """The calls that stand for a kernel's table."""
    if kernel == "prefill":
        for name in (*_DISTINCT, "deepseek-r1"):
            yield Case(kernel, MODELS[name], query_len=1024, kv_len=1024)
        yield Case(kernel, MODELS["gpt-oss-120b"], query_len=1024, kv_len=1024, local=True)
        yield Case(kernel, MODELS["llama-3-8b"], dtype="fp16", query_len=1024, kv_len=1024)
        yield Case(kernel, MODELS["llama-3-8b"], dtype="fp32", query_len=256, kv_len=256)
        yield Case(kernel, MODELS["llama-3-8b"], layout="preshuffled", query_len=512, kv_len=4096)
        yield Case(kernel, MODELS["gemma-2-9b"], layout="nhd", query_len=512, kv_len=4096, local=True)
        few = replace(MODELS["deepseek-r1"], num_heads=16, num_kv_heads=16)  # a rank's: the heads do not matter to the code
        yield Case(kernel, few, layout="latent", block_size=64, query_len=256, kv_len=1024)
    elif kernel == "decode":
        for name in _DISTINCT:
            for layout in ("nhd", "preshuffled"):
                for kv_dtype in ("", "fp8"):
                    yield Case(kernel, MODELS[name], kv_dtype=kv_dtype, layout=layout, local=MODELS[name].window > 0)
        for layout in ("nhd", "preshuffled"):
            for name, query_len in (("qwen3-235b", 2), ("qwen3-235b", 4), ("qwen3-next", 4), ("qwen3-next", 8)):
                for kv_dtype in ("", "fp8"):
                    yield Case(kernel, MODELS[name], kv_dtype=kv_dtype, layout=layout, query_len=query_len)
            yield Case(kernel, MODELS["llama-3-8b"], layout=layout, batch=256, kv_len=1024)
        yield Case(kernel, MODELS["llama-3-8b"], layout="hnd", block_size=64, batch=1, kv_len=131072)
        yield Case(kernel, MODELS["llama-3-8b"], dtype="fp32", layout="nhd")
    elif kernel == "decode_unaligned":
        for layout in ("nhd", "preshuffled"):
            for kv_dtype in ("", "fp8"):
                for name, query_len in (("llama-3-8b", 1), ("qwen3-235b", 2), ("qwen3-235b", 4), ("phi-2", 1), ("gemma-2-9b", 1), ("qwen3-next", 8)):
                    yield Case(kernel, MODELS[name], kv_dtype=kv_dtype, layout=layout, query_len=query_len, local=MODELS[name].window > 0)
        yield Case(kernel, MODELS["llama-3-8b"], dtype="fp32", layout="nhd")
    elif kernel == "mla_decode":
        for heads_here in (16, 32, 64, 128):
            shape = replace(MODELS["deepseek-r1"], num_heads=heads_here, num_kv_heads=heads_here)
            yield Case(kernel, shape, layout="latent", block_size=64)
            if heads_here in (16, 128):
                yield Case(kernel, shape, layout="latent", kv_dtype="fp8", block_size=64)
        for kv_dtype in ("", "fp8"):
            yield Case(kernel, MODELS["minicpm3"], layout="latent", kv_dtype=kv_dtype, block_size=64)
        yield Case(kernel, replace(MODELS["deepseek-r1"], num_heads=16, num_kv_heads=16, rope=32), layout="latent", block_size=64)
    elif kernel == "mla_decode_unaligned":
        for heads_here in (16, 128):
            shape = replace(MODELS["deepseek-r1"], num_heads=heads_here, num_kv_heads=heads_here)
            for kv_dtype in ("", "fp8"):
                yield Case(kernel, shape, layout="latent", kv_dtype=kv_dtype, block_size=64)
        yield Case(kernel, MODELS["minicpm3"], layout="latent", block_size=64)
    elif kernel in ("cache_write", "gather"):
        for layout in ("nhd", "preshuffled"):
            for kv_dtype in ("", "fp8"):
                for query_len in (64,) if kernel == "cache_write" else (0, 64):  # the op, and as extend does it with new tokens
                    yield Case(kernel, MODELS["llama-3-8b"], kv_dtype=kv_dtype, layout=layout, query_len=query_len)
    elif kernel == "combine":
        yield Case(kernel, MODELS["llama-3-8b"], layout="nhd", num_splits=8)
    elif kernel == "cut":
        yield Case(kernel, MODELS["llama-3-8b"], layout="nhd", batch=128, kv_len=131072)
    elif kernel == "merge":
        yield Case(kernel, MODELS["llama-3-8b"], query_len=64)


def meeting(case: Case, when: Mapping[str, Any], arch: Arch) -> Case:
    """`case` changed so that it meets the conditions of a table row: how a row that no standing case reaches is reached."""

    def pick(name: str, now):
        condition = when.get(name, now)
        if isinstance(condition, list):
            return condition[0]
        if isinstance(condition, dict):
            return min(max(now, condition.get("min", now)), condition.get("max", math.inf))
        return condition

    shape = case.shape
    head_size = int(pick("head_size", shape.head_size))
    v_head_size = int(pick("v_head_size", shape.v_head_size or head_size))
    group = int(pick("group", shape.num_heads // shape.num_kv_heads))
    num_heads = int(pick("num_heads", shape.num_heads))
    shape = replace(shape, head_size=head_size, v_head_size=v_head_size, num_heads=num_heads, num_kv_heads=max(1, num_heads // group))
    layouts = {"plain": "nhd", "dense": "dense", "preshuffled": "preshuffled", "latent": "latent"}
    names = {"nhd": "plain", "hnd": "plain"}
    dtype = pick("dtype", case.dtype)
    units = shape.num_kv_heads * case.batch / arch.compute_units
    wanted = pick("units_per_cu", units)
    batch = wanted * arch.compute_units / shape.num_kv_heads
    return replace(
        case,
        shape=shape,
        dtype=dtype,
        kv_dtype=pick("kv_dtype", case.kv_dtype or dtype),
        layout=layouts[pick("kv_layout", names.get(case.layout, case.layout))] if "kv_layout" in when else case.layout,
        block_size=int(pick("block_size", case.block_size)),
        batch=max(1, math.floor(batch) if wanted < units else math.ceil(batch)),
        query_len=max(1, int(pick("max_seqlen_q", -(-pick("rows", case.query_len * group) // group)))),
        kv_len=int(pick("max_seqlen_k", case.kv_len)),
        local=case.local or pick("features", "none") == "masked",
    )


def run(case: Case, arch: Arch, device: str | torch.device = "cpu") -> None:
    """Call the op once, on tensors of the case's shapes whose contents are whatever memory holds; lengths are all full."""
    prepare(case, arch, device)()


def prepare(case: Case, arch: Arch, device: str | torch.device = "cpu", real: bool = False) -> partial:
    """The call, with its tensors made: run it as often as wanted. Its `func`, `args` and `keywords` are those of the public op.

    real: the contents are random normal numbers and every sequence has pages of its own; otherwise memory is taken as it comes.
    """
    s = case.shape
    fp8 = getattr(torch, arch.fp8_types[0])
    dtype = fp8 if case.dtype == "fp8" else _DTYPES[case.dtype]
    v_size = s.v_head_size or s.head_size
    kv_dtype = fp8 if case.kv_dtype == "fp8" else dtype
    tokens = case.batch * case.query_len

    def new(*size, dtype=dtype):
        return _fill(torch.empty(size, dtype=dtype, device=device), real)

    def ints(values):
        return torch.as_tensor(values, dtype=torch.int32, device=device)

    window = ((s.window or 1024) - 1, 0) if case.local else (-1, -1)
    common: dict[str, Any] = {
        "softcap": s.softcap,
        "sinks": new(s.num_heads, dtype=torch.float32) if s.sinks else None,
        "window_size": window,
    }
    cu_q = ints([i * case.query_len for i in range(case.batch + 1)])
    q = new(tokens, s.num_heads, s.head_size)
    if case.kernel == "merge":
        lse = new(s.num_heads, tokens, dtype=torch.float32)
        out = new(tokens, s.num_heads, v_size)
        return partial(tritonattn.merge_attn_states, out, lse, out, lse)
    if case.layout == "dense":
        k, v = new(tokens, s.num_kv_heads, s.head_size), new(tokens, s.num_kv_heads, v_size)
        bounds = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_q, "max_seqlen_q": case.query_len, "max_seqlen_k": case.query_len}
        return partial(tritonattn.flash_attn_varlen_func, q, k, v, causal=True, **bounds, **common)
    if case.layout == "latent":
        return _prepare_mla(case, new, ints, kv_dtype, real)

    # Where nothing is read every sequence may use the same pages; the table has its real width.
    pages = -(-case.kv_len // case.block_size)
    blocks = case.batch * pages if real else 4
    k_cache, v_cache = allocate(case.layout, blocks, case.block_size, s.num_kv_heads, s.head_size, v_head_size=v_size, dtype=kv_dtype, device=device)
    _fill(k_cache, real), _fill(v_cache, real)
    if case.kernel == "decode_unaligned":
        k_cache, v_cache = unaligned(k_cache), unaligned(v_cache)
    table = (torch.arange(case.batch * pages, dtype=torch.int32, device=device) % blocks).view(case.batch, pages)
    layout = {"kv_layout": case.layout}
    descale = {"k_descale": 0.5, "v_descale": 0.5} if case.kv_dtype == "fp8" else {}
    lengths = ints([case.kv_len] * case.batch)
    if case.kernel == "cache_write":
        k, v = new(tokens, s.num_kv_heads, s.head_size), new(tokens, s.num_kv_heads, v_size)
        slots = ints(range(tokens)).to(torch.int64) % (blocks * case.block_size)
        return partial(tritonattn.reshape_and_cache, k, v, k_cache, v_cache, slots, **layout, **descale)
    if case.kernel == "gather" and not case.query_len:
        out = (new(case.batch * 64, s.num_kv_heads, s.head_size), new(case.batch * 64, s.num_kv_heads, v_size))
        bounds = {"starts": ints([0] * case.batch), "lengths": ints([64] * case.batch)}
        return partial(tritonattn.gather_cache, k_cache, v_cache, table, **bounds, out=out, **layout, **descale)
    if case.kernel in ("prefill", "gather"):
        k, v = new(tokens, s.num_kv_heads, s.head_size), new(tokens, s.num_kv_heads, v_size)
        bounds = {"cu_seqlens_q": cu_q, "block_table": table, "max_seqlen_q": case.query_len}
        context = {"context_lens": lengths - case.query_len, "max_context_len": case.kv_len - case.query_len}
        return partial(tritonattn.extend_attention, q, k, v, k_cache, v_cache, **bounds, **context, **layout, **descale, **common)
    bounds = {"seqused_k": lengths, "block_table": table, "max_seqlen_k": case.kv_len, "max_seqlen_q": case.query_len}
    splits = {"num_splits": case.num_splits}
    return partial(tritonattn.decode_attention, q, k_cache, v_cache, **bounds, **splits, **layout, **descale, **common)


def unaligned(cache: torch.Tensor) -> torch.Tensor:
    """The same numbers at strides of which one is no multiple of 16 bytes."""
    pages = cache.flatten(1)
    return torch.cat([pages, pages[:, :1]], 1)[:, :-1].unflatten(1, cache.shape[1:])


def _fill(tensor: torch.Tensor, real: bool) -> torch.Tensor:
    if real:  # by pieces: random numbers come in float32, and a cache may be large
        for piece in tensor.view(-1).split(1 << 26):
            piece.copy_(torch.randn(piece.shape, dtype=torch.float32, device=piece.device))
    return tensor


def _prepare_mla(case: Case, new, ints, kv_dtype, real: bool) -> partial:
    s = model("deepseek-r1") if not case.shape.latent else case.shape
    pages = -(-case.kv_len // case.block_size)
    tokens = case.batch * case.query_len
    blocks = case.batch * pages if real else 4
    cache = new(blocks, case.block_size, s.latent + s.rope, dtype=kv_dtype)
    if case.kernel == "mla_decode_unaligned":
        cache = unaligned(cache)
    table = (torch.arange(case.batch * pages, dtype=torch.int32, device=cache.device) % blocks).view(case.batch, pages)
    scale = {"softmax_scale": s.head_size**-0.5, "kv_lora_rank": s.latent, "kv_descale": 0.5 if case.kv_dtype == "fp8" else None}
    if case.kernel == "prefill":
        context = case.kv_len - case.query_len
        k, v = new(case.batch * context, s.num_heads, s.head_size), new(case.batch * context, s.num_heads, s.v_head_size)
        bounds = {"context_lens": ints([context] * case.batch), "block_table": table, "max_seqlen_q": case.query_len, "max_context_len": context}
        starts = ints([i * case.query_len for i in range(case.batch + 1)])
        q, k_new, v_new = new(tokens, s.num_heads, s.head_size), k[:tokens], v[:tokens]
        return partial(
            tritonattn.mla_extend, q, k_new, v_new, cache, up_project=lambda latent, rope: (k[: len(latent)], v[: len(latent)]),
            cu_seqlens_q=starts, **bounds, **scale,
        )  # fmt: skip
    q = new(tokens, s.num_heads, s.latent + s.rope)
    bounds = {"seqused_k": ints([case.kv_len] * case.batch), "block_table": table, "max_seqlen_k": case.kv_len}
    return partial(tritonattn.mla_decode, q, cache, max_seqlen_q=case.query_len, num_splits=case.num_splits, **bounds, **scale)
