"""Run what a table row leads to, as machine code, on small data with known answers: for `tritonattn check --execute`.

The call keeps all that decides the code (head sizes, dtypes, layout, block size, heads of a KV head, features, the row's config) and
shrinks what does not: one KV head, a few short sequences. Lengths make full and ragged tiles and one sequence of a single key; cache
slots and table entries that must not be read are poison.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

import tritonattn
from tritonattn import layouts, reference
from tritonattn.tuning import check
from tritonattn.tuning.arch import Arch, assume
from tritonattn.tuning.cases import Case, unaligned
from tritonattn.tuning.table import Row, pin

from .device import launches_go_to, simulated
from .program import SimulatorError
from .text import Unsupported

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_WILD = 1 << 30  # a table entry past the end of a sequence


@dataclass(frozen=True)
class Execution:
    """How one row's code did. `error` is max |got - float64|; the row is right where `reasons` is empty."""

    error: float
    allowed: float
    instructions: int
    reasons: list[str]


def case_of(kernel: str, row: Row, arch: Arch) -> Case:
    """A call that leads to the row, with head sizes that exist; a cache that is not fp8 has the dtype of the queries."""
    case = check.case_for(arch, kernel, row)
    shape = case.shape
    case = replace(case, shape=replace(shape, head_size=shape.head_size // 16 * 16, v_head_size=shape.v_head_size // 16 * 16))
    if case.kv_dtype == "fp8":
        return case
    return replace(case, dtype=case.dtype if "dtype" in row.when else case.kv_dtype or case.dtype, kv_dtype="")


def execute(case: Case, arch: Arch, row: Row) -> Execution:
    """Simulate `case`, shrunk, with `row` in place of what the table of `case.kernel` says. ValueError for an arch that is not simulated."""
    generator = torch.Generator().manual_seed(0)
    done = 0

    def run(program, arguments, memory, grid, metadata):
        nonlocal done
        done += program.run(arguments, memory, grid, metadata.num_warps, metadata.shared)

    worst, allowed, reasons = 0.0, math.inf, []
    config = row.config
    if case.kernel == "cut":  # a batch of any length, on a device that three sequences fill
        arch, config = replace(arch, compute_units=1), {**config, "cut_keys": 1}
    with simulated(arch.name), assume(pin(arch, **{case.kernel: config})), launches_go_to(run):
        for call, expected in _problems(case, arch, row, generator):
            try:
                got = call()
            except (SimulatorError, Unsupported, OutOfResources) as problem:
                reasons.append(f"executed: {problem}")
                continue
            for a, b in zip(got, expected, strict=True):
                a, b = a.double(), b.double()
                bound = 2 * max(torch.finfo(_DTYPES[case.dtype]).eps, 2e-5) * max(1.0, float(b[b.isfinite()].abs().max()))
                same = (a == b) | ((a - b).abs() <= bound)
                if not same.all():
                    off = float((a - b)[~same].abs().max())
                    reasons.append(f"executed: {int((~same).sum())} of {same.numel()} results wrong, off by {off:.3g}, allowed is {bound:.3g}")
                finite = (a - b)[a.isfinite() & b.isfinite()]
                worst, allowed = max(worst, float(finite.abs().max()) if len(finite) else 0.0), min(allowed, bound)
    return Execution(worst, allowed, done, reasons)


_Problem = tuple[Callable[[], tuple[Tensor, ...]], tuple[Tensor, ...]]


def _problems(case: Case, arch: Arch, row: Row, generator: torch.Generator) -> list[_Problem]:
    """(call, what it must return) of each call that exercises the row."""
    shape, dtype = case.shape, _DTYPES[case.dtype]
    kv_dtype = getattr(torch, arch.fp8_types[0]) if case.kv_dtype == "fp8" else _DTYPES[case.kv_dtype or case.dtype]
    step = row.config.get("BLOCK_N", 64)
    group = shape.num_heads // shape.num_kv_heads
    v_size = shape.v_head_size or shape.head_size

    def random(*size, to=dtype):
        return torch.randn(size, generator=generator).to(to)

    options: dict[str, Any] = {"softcap": shape.softcap, "window_size": (step + 9, 0) if case.local else (-1, -1)}
    if case.kernel == "merge":
        parts = [random(8, 4, v_size), random(4, 8, to=torch.float32), random(8, 4, v_size), random(4, 8, to=torch.float32)]
        return [(lambda: tritonattn.merge_attn_states(*parts, return_lse=True), reference.merge_attn_states(*parts))]
    if case.layout == "latent" and case.kernel == "prefill":
        return [_mla_extend(case, row.config.get("BLOCK_M", 64), step, random)]
    if case.layout == "latent":
        return [_mla(case, kv_dtype, step, random, splits) for splits in (1, 2)]
    if shape.sinks:
        options["sinks"] = random(group, to=torch.float32)
    if case.layout == "dense":
        block = row.config.get("BLOCK_M", 64)
        lens = [block + block // 2 + 5, block, 1]
        q, k, v = random(sum(lens), group, shape.head_size), random(sum(lens), 1, shape.head_size), random(sum(lens), 1, v_size)
        cu = _cumulative(lens)
        args = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": max(lens), "max_seqlen_k": max(lens), "causal": True, **options}
        return [(lambda: tritonattn.flash_attn_varlen_func(q, k, v, return_lse=True, **args), reference.flash_attn_varlen_func(q, k, v, **args))]

    descale = {"k_descale": 0.5, "v_descale": 0.25} if case.kv_dtype == "fp8" else {}
    query = case.query_len
    if case.kernel == "prefill":
        query = row.config.get("BLOCK_M", 64) + 7
    queries = [query, query, 1]
    lens = [query + 2 * step + step // 2 + 3, query + step - query % step, 1]
    k_cache, v_cache, table = _cache(case, lens, kv_dtype, v_size, random)
    layout = {"kv_layout": case.layout}
    if case.kernel == "cache_write" or (case.kernel == "gather" and not case.query_len):
        return _movers(case, k_cache, v_cache, table, lens, random, layout | descale, v_size)
    q = random(sum(queries), group, shape.head_size)
    cu = _cumulative(queries)
    if case.kernel in ("prefill", "gather"):
        k, v = random(len(q), 1, shape.head_size), random(len(q), 1, v_size)
        context = torch.tensor([n - query for n, query in zip(lens, queries, strict=True)], dtype=torch.int32)
        args = {
            "cu_seqlens_q": cu,
            "context_lens": context,
            "block_table": table,
            "max_seqlen_q": query,
            "max_context_len": int(context.max()),
            **layout,
            **descale,
            **options,
        }
        return [
            (
                lambda: tritonattn.extend_attention(q, k, v, k_cache, v_cache, return_lse=True, **args),
                reference.extend_attention(q, k, v, k_cache, v_cache, **args),
            )
        ]
    args = {
        "seqused_k": torch.tensor(lens, dtype=torch.int32),
        "block_table": table,
        "max_seqlen_k": max(lens),
        "cu_seqlens_q": cu,
        "max_seqlen_q": query,
        **layout,
        **descale,
        **options,
    }
    expected = reference.decode_attention(q, k_cache, v_cache, **args)

    def decode(splits):
        return lambda: tritonattn.decode_attention(q, k_cache, v_cache, num_splits=splits, return_lse=True, **args)

    return [(decode(splits), expected) for splits in ((0,) if case.kernel == "cut" else (1, 2) if case.num_splits == 0 else (case.num_splits,))]


def _cumulative(lens) -> Tensor:
    return torch.tensor([0, *lens]).cumsum(0).int()


def _table(lens, block_size: int) -> tuple[Tensor, int]:
    """Each sequence's blocks in a shuffled order, wild entries after them; and how many blocks there are."""
    counts = [-(-n // block_size) for n in lens]
    order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(1)).int()
    table = torch.full((len(lens), max(counts) + 1), _WILD, dtype=torch.int32)
    for row, count in zip(table, counts, strict=True):
        row[:count], order = order[:count], order[count:]
    return table, sum(counts) + 2


def _live(table: Tensor, lens, blocks: int, block_size: int) -> Tensor:
    """[blocks, block_size]: slots that hold a token."""
    live = torch.zeros(blocks, block_size, dtype=torch.bool)
    for row, n in zip(table, lens, strict=True):
        at = torch.arange(n)
        live[row[at // block_size].long(), at % block_size] = True
    return live


def _cache(case: Case, lens, dtype: torch.dtype, v_size: int, random) -> tuple[Tensor, Tensor, Tensor]:
    table, blocks = _table(lens, case.block_size)
    k, v = random(blocks, case.block_size, 1, case.shape.head_size), random(blocks, case.block_size, 1, v_size)
    dead = ~_live(table, lens, blocks, case.block_size)
    k[dead] = v[dead] = math.nan
    k, v = layouts.from_nhd(k.to(dtype), v.to(dtype), case.layout)
    return (unaligned(k), unaligned(v), table) if case.kernel == "decode_unaligned" else (k, v, table)


def _mla(case: Case, dtype: torch.dtype, step: int, random, splits: int) -> _Problem:
    s, query = case.shape, case.query_len
    lens = [query + 2 * step + step // 2 + 3, query + step, query]
    table, blocks = _table(lens, case.block_size)
    cache = random(blocks, case.block_size, s.latent + s.rope)
    cache[~_live(table, lens, blocks, case.block_size)] = math.nan
    cache = unaligned(cache.to(dtype)) if case.kernel == "mla_decode_unaligned" else cache.to(dtype)
    q = random(len(lens) * query, s.num_heads, s.latent + s.rope)
    args = {"seqused_k": torch.tensor(lens, dtype=torch.int32), "block_table": table, "max_seqlen_k": max(lens), "max_seqlen_q": query,
            "softmax_scale": s.head_size**-0.5, "kv_lora_rank": s.latent, "kv_descale": 0.5 if case.kv_dtype == "fp8" else None}  # fmt: skip
    return lambda: tritonattn.mla_decode(q, cache, num_splits=splits, return_lse=True, **args), reference.mla_decode(q, cache, **args)


def _mla_extend(case: Case, block: int, step: int, random) -> _Problem:
    """Two heads, on one request that has a context and one that has none."""
    s, heads = case.shape, 2
    queries, contexts = [block + 7, 3], [2 * step + 5, 0]
    table, blocks = _table(contexts, case.block_size)
    cache = random(blocks, case.block_size, s.latent + s.rope)
    cache[~_live(table, contexts, blocks, case.block_size)] = math.nan
    q, k, v = (random(sum(queries), heads, size) for size in (s.head_size, s.head_size, s.v_head_size))
    w_k, w_v = (random(heads, size, s.latent) * s.latent**-0.5 for size in (s.head_size - s.rope, s.v_head_size))

    def up_project(latent, rope):
        nope, value = (torch.einsum("nl,hdl->nhd", latent, w.to(latent.dtype)) for w in (w_k, w_v))
        return torch.cat([nope, rope[:, None].expand(-1, heads, -1)], dim=-1), value

    args = {
        "up_project": up_project, "cu_seqlens_q": _cumulative(queries), "context_lens": torch.tensor(contexts, dtype=torch.int32),
        "block_table": table, "max_seqlen_q": max(queries), "max_context_len": max(contexts), "softmax_scale": s.head_size**-0.5,
        "kv_lora_rank": s.latent,
    }  # fmt: skip
    return lambda: tritonattn.mla_extend(q, k, v, cache, return_lse=True, **args), reference.mla_extend(q, k, v, cache, **args)


def _movers(case: Case, k_cache, v_cache, table, lens, random, options, v_size: int) -> list[_Problem]:
    """The cache write (compared as real numbers) and the gather."""
    if case.kernel == "gather":
        bounds = {"starts": torch.tensor([1, 0, 0], dtype=torch.int32), "lengths": torch.tensor([lens[0] - 1, lens[1] - 3, 1], dtype=torch.int32)}
        shape = (int(bounds["lengths"].sum()), 1)
        dtype = _DTYPES[case.dtype]
        out = torch.full((*shape, case.shape.head_size), math.nan, dtype=dtype), torch.full((*shape, v_size), math.nan, dtype=dtype)
        return [
            (
                lambda: tritonattn.gather_cache(k_cache, v_cache, table, out=out, **bounds, **options),
                reference.gather_cache(k_cache, v_cache, table, **bounds, **options),
            )
        ]
    tokens = 37
    key, value = random(tokens, 1, case.shape.head_size), random(tokens, 1, v_size)
    slots = torch.randperm(k_cache.shape[0] * case.block_size, generator=torch.Generator().manual_seed(2))[:tokens]
    slots[5] = -1
    for cache in (k_cache, v_cache):
        cache.view(torch.uint8).fill_(0)
    wanted = k_cache.clone(), v_cache.clone()
    reference.reshape_and_cache(key, value, *wanted, slots, **options)

    def write():
        tritonattn.reshape_and_cache(key, value, k_cache, v_cache, slots, **options)
        return k_cache, v_cache

    return [(write, wanted)]
