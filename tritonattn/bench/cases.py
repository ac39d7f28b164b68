"""The calls that compete on a row, and the work that each of them does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

import tritonattn
from tritonattn.bench.inputs import Inputs, random_inputs
from tritonattn.bench.rows import Row
from tritonattn.bench.sample import sample_error
from tritonattn.layouts import allocate, from_nhd, to_nhd

Call = Callable[[], Any]
PLANNED_STEPS = 32


@dataclass
class Case:
    """What is timed for one row. The first call is the one that the others are compared with."""

    calls: dict[str, Call]
    flops: float
    bytes: float
    error: Callable[[Any], float]  # of what a call returned
    kernel: str  # whose table row `--config` and `--sweep` replace
    host: bool = False  # time on the host is what matters


class Peers(Protocol):
    """Other libraries' calls on the same inputs, by the name of the library."""

    def calls(self, x: Inputs) -> dict[str, Call]: ...

    def merge(self, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> dict[str, Call]: ...


def build(row: Row, device: torch.device, peers: Peers | None = None, only: str = "") -> Case:
    """Fresh random inputs and every call that can run on them; `only` keeps those with this text in their name."""
    case = _BUILDERS[row.suite](row, device, peers, only)
    case.calls = {name: call for name, call in case.calls.items() if only in name}
    if not case.calls:
        raise ValueError(f"--only {only!r} leaves no call of {row.suite} {row.name}")
    return case


def work(row: Row) -> tuple[float, float]:
    """(FLOP, bytes) that attention over the row cannot do without.

    FLOP: the scores that are seen. Bytes: each input and output once; in decode keys and values alone, as is the custom.
    """
    pairs = keys = 0.0
    for length, queries in zip(row.seq_lens, row.query_lens, strict=True):
        seen = queries * (length - queries / 2) if queries > 1 else float(length)
        pairs += min(seen, queries * row.window) if row.window else seen
        keys += min(length, row.window + queries) if row.window else length
    width = row.head_size if row.suite == "mla" else row.head_size + row.dv
    moved = keys * row.kv_heads * width * (1 if row.fp8 else 2)
    if max(row.query_lens) > 16:
        moved += sum(row.query_lens) * row.heads * (row.head_size + row.dv) * 2
    return 2 * pairs * row.heads * (row.head_size + row.dv), moved


def _attention(x: Inputs, ours: dict[str, Callable[[], Call]], peers: Peers | None, only: str, kernel: str) -> Case:
    calls = {name: make() for name, make in ours.items() if only in name}
    calls |= peers.calls(x) if peers else {}
    return Case(calls, *work(x.row), lambda out: sample_error(x, out), kernel)


def _prefill(row: Row, device: torch.device, peers: Peers | None, only: str) -> Case:
    x = random_inputs(row, device, cached=False)

    def ours():
        out = x.empty_out()
        return lambda: tritonattn.flash_attn_varlen_func(
            x.q, x.k, x.v, cu_seqlens_q=x.cu_seqlens_q, cu_seqlens_k=x.cu_seqlens_q, max_seqlen_q=x.max_seqlen_q,
            max_seqlen_k=x.max_seqlen_k, causal=True, softmax_scale=x.scale, window_size=x.window_size, out=out,
        )  # fmt: skip

    return _attention(x, {"tritonattn": ours}, peers, only, "prefill")


def _extend(row: Row, device: torch.device, peers: Peers | None, only: str) -> Case:
    x = random_inputs(row, device, cached=True)
    k, v = x.new_tokens()
    context_lens = x.seq_lens - row.query_len

    def ours(layout):
        k_cache, v_cache = from_nhd(x.k_cache, x.v_cache, layout)
        out = x.empty_out()
        return lambda: tritonattn.extend_attention(
            x.q, k, v, k_cache, v_cache, cu_seqlens_q=x.cu_seqlens_q, context_lens=context_lens, block_table=x.block_table,
            max_seqlen_q=x.max_seqlen_q, max_context_len=x.max_seqlen_k - row.query_len, kv_layout=layout, softmax_scale=x.scale,
            window_size=x.window_size, out=out,
        )  # fmt: skip

    return _attention(x, _both_layouts(ours), peers, only, "prefill")


def _decode(row: Row, device: torch.device, peers: Peers | None, only: str) -> Case:
    x = random_inputs(row, device, cached=True)

    def ours(layout):
        k_cache, v_cache = from_nhd(x.k_cache, x.v_cache, layout)
        out = x.empty_out()
        return lambda: tritonattn.decode_attention(
            x.q, k_cache, v_cache, seqused_k=x.seq_lens, block_table=x.block_table, max_seqlen_k=x.max_seqlen_k,
            max_seqlen_q=row.query_len, kv_layout=layout, softmax_scale=x.scale, window_size=x.window_size,
            k_descale=x.descales[0], v_descale=x.descales[1], ragged=bool(row.key_lengths), out=out,
        )  # fmt: skip

    if row.suite == "cliffs":
        calls: dict[str, Callable[[], Call]] = {"tritonattn nhd": lambda: ours("nhd")}
        if row.key_lengths:
            calls["tritonattn router"] = lambda: _router_run(x, *x.new_tokens())
        return _attention(x, calls, None, only, "decode")
    return _attention(x, _both_layouts(ours), peers, only, "decode")


def _both_layouts(make: Callable[[str], Call]) -> dict[str, Callable[[], Call]]:
    return {"tritonattn nhd": lambda: make("nhd"), "tritonattn preshuffled": lambda: make("preshuffled")}


def _mla(row: Row, device: torch.device, peers: Peers | None, only: str) -> Case:
    x = random_inputs(row, device, cached=True)
    x.scale = 192**-0.5  # of the head before absorption

    def ours():
        cache, out = x.k_cache.squeeze(2), x.empty_out()
        return lambda: tritonattn.mla_decode(
            x.q, cache, seqused_k=x.seq_lens, block_table=x.block_table, max_seqlen_k=x.max_seqlen_k, softmax_scale=x.scale,
            max_seqlen_q=row.query_len, ragged=bool(row.key_lengths), out=out,
        )  # fmt: skip

    return _attention(x, {"tritonattn": ours}, peers, only, "mla_decode")


def _mixed(row: Row, device: torch.device, peers: Peers | None, only: str) -> Case:
    """One step through the router, and the same requests path by path."""
    x = random_inputs(row, device, cached=True)
    k, v = x.new_tokens()
    decodes = row.query_lens.count(1)
    prefilled = row.query_lens[-1]

    def paths():
        out = x.empty_out()
        extended = slice(decodes, len(x.q) - prefilled)
        context = (x.seq_lens - torch.tensor(row.query_lens, dtype=torch.int32, device=device))[decodes:-1].contiguous()
        cu_extend = torch.tensor([0, row.query_lens[-2]], dtype=torch.int32, device=device)
        cu_prefill = torch.tensor([0, prefilled], dtype=torch.int32, device=device)
        decode_lens = x.seq_lens[:decodes].contiguous()
        q, new = x.q, len(x.q) - prefilled

        def call():
            tritonattn.decode_attention(
                q[:decodes], x.k_cache, x.v_cache, seqused_k=decode_lens, block_table=x.block_table[:decodes],
                max_seqlen_k=max(row.seq_lens[:decodes]), kv_layout="nhd", softmax_scale=x.scale, out=out[:decodes],
            )  # fmt: skip
            tritonattn.extend_attention(
                q[extended], k[extended], v[extended], x.k_cache, x.v_cache, cu_seqlens_q=cu_extend, context_lens=context,
                block_table=x.block_table[decodes:-1], max_seqlen_q=row.query_lens[-2],
                max_context_len=row.seq_lens[-2] - row.query_lens[-2], kv_layout="nhd", softmax_scale=x.scale, out=out[extended],
            )  # fmt: skip
            tritonattn.flash_attn_varlen_func(
                q[new:], k[new:], v[new:], cu_seqlens_q=cu_prefill, cu_seqlens_k=cu_prefill, max_seqlen_q=prefilled,
                max_seqlen_k=prefilled, causal=True, softmax_scale=x.scale, out=out[new:],
            )  # fmt: skip
            return out

        return call

    return _attention(x, {"tritonattn router": lambda: _router_run(x, k, v), "tritonattn path by path": paths}, peers, only, "prefill")


def _router_run(x: Inputs, k: Tensor, v: Tensor) -> Call:
    row, out = x.row, x.empty_out()
    router = tritonattn.Router(
        row.heads, row.kv_heads, row.head_size, dtype=x.q.dtype, device=x.q.device, kv_layout="nhd", softmax_scale=x.scale,
        block_size=row.block_size,
    )  # fmt: skip
    plan = router.plan(row.query_lens, row.seq_lens, x.block_table)
    return lambda: router.run(plan, x.q, k, v, x.k_cache, x.v_cache, out=out)


def _run_call(row: Row, device: torch.device, peers: Peers | None, only: str) -> Case:
    x = random_inputs(row, device, cached=True)
    return _attention(x, {"tritonattn router": lambda: _router_run(x, *x.new_tokens())}, peers, only, "decode")


def _plan(row: Row, device: torch.device, peers: Peers | None, only: str) -> Case:
    calls = {"decode call": _decode, "mla call": _mla, "run call": _run_call}
    if row.what in calls:
        case = calls[row.what](row, device, peers, only)
        case.host = True
        return case
    table = torch.zeros(row.batch, -(-(row.seq_len + PLANNED_STEPS) // row.block_size), dtype=torch.int32, device=device)

    def planner(kind, leave):
        """Steps over which every context grows; in every second one the first `leave` requests are missing."""
        router = tritonattn.Router(row.heads, row.kv_heads, row.head_size, dtype=torch.bfloat16, device=device, kv_layout="nhd")
        steps = []
        for i in range(PLANNED_STEPS):
            first = leave * (i % 2)
            requests = list(zip(row.query_lens, row.seq_lens, strict=True))[first:]
            lengths = [length + i if length > query else length for query, length in requests]
            steps.append((kind([query for query, _ in requests]), kind(lengths), table[first:]))
        turn = cycle(steps)
        return lambda: router.plan(*next(turn))

    forms = {"": (list, 0), " of arrays": (partial(np.array, dtype=np.int32), 0), " of other requests": (list, 1)}
    plans = {f"tritonattn router.plan{name}": planner(*form) for name, form in forms.items()}
    return Case(plans, 0.0, 0.0, lambda plan: 0.0, "decode", host=True)


def _graph(row: Row, device: torch.device, peers: Peers | None, only: str) -> Case:
    """A step whose plan has room for its own lengths, as the measure, and for `row.room` keys a sequence, as a graph is captured."""
    x = random_inputs(row, device, cached=True)
    latent = row.latent
    if latent:
        x.scale = 192**-0.5
    pages = -(-row.room // row.block_size)
    wide = torch.zeros(row.batch, pages, dtype=torch.int32, device=device)
    wide[:, : x.block_table.shape[1]] = x.block_table
    k, v = x.new_tokens()
    own: dict[str, Any] = {"dtype": x.q.dtype, "device": device, "kv_dtype": x.k_cache.dtype, "block_size": row.block_size, "softmax_scale": x.scale}

    def router(table):
        out = x.empty_out()
        if latent:
            return _latent_step(x, table, out, own)
        step = tritonattn.Router(
            row.heads, row.kv_heads, row.head_size, kv_layout="nhd", k_descale=x.descales[0], v_descale=x.descales[1], **own
        )
        plan = step.plan(row.query_lens, row.seq_lens, table)
        return lambda: step.run(plan, x.q, k, v, x.k_cache, x.v_cache, out=out)

    def op(most):
        out = x.empty_out()
        common: dict[str, Any] = {"seqused_k": x.seq_lens, "block_table": wide, "max_seqlen_k": most, "softmax_scale": x.scale, "out": out}
        if latent:
            cache = x.k_cache.squeeze(2)
            return lambda: tritonattn.mla_decode(x.q, cache, **common)
        scales = {"k_descale": x.descales[0], "v_descale": x.descales[1]}
        return lambda: tritonattn.decode_attention(x.q, x.k_cache, x.v_cache, kv_layout="nhd", **scales, **common)

    ours = {
        "tritonattn router": lambda: router(x.block_table), f"tritonattn router in {row.room}": lambda: router(wide),
        "tritonattn op": lambda: op(row.seq_len), f"tritonattn op in {row.room}": lambda: op(row.room),
    }  # fmt: skip
    return _attention(x, ours, None, only, "mla_decode" if latent else "decode")


def _latent_step(x: Inputs, table: Tensor, out: Tensor, own: dict[str, Any]) -> Call:
    """The router's decode without projections: they are the caller's, and would hide what is timed."""
    row = x.row
    step = tritonattn.MlaRouter(row.heads, kv_lora_rank=row.dv, qk_nope_head_dim=128, v_head_dim=128, **own)
    plan = step.plan(row.query_lens, row.seq_lens, table)
    q, narrow, cache = x.q.new_zeros(len(x.q), row.heads, 192), out.new_empty(len(out), row.heads, 128), x.k_cache.squeeze(2)

    def up_project_v(latent):
        out.copy_(latent)
        return latent[..., :128]

    def call():
        step.run(plan, q, None, None, cache, absorb=lambda _: x.q, up_project=None, up_project_v=up_project_v, out=narrow)
        return out

    return call


def _cache(row: Row, device: torch.device, peers: Peers | None, only: str) -> Case:
    x = random_inputs(row, device, cached=True)
    if row.what == "gather":
        return _gather(x)
    tokens = sum(row.seq_lens)
    slots = (x.block_table.long() * row.block_size)[:, :, None] + torch.arange(row.block_size, device=device)
    slots = torch.cat([pages.flatten()[:length] for pages, length in zip(slots, row.seq_lens, strict=True)])
    dtype, latent = x.q.dtype, row.what == "write latent"
    k = torch.randn(tokens, row.kv_heads, row.head_size, dtype=dtype, device=device)
    v = k[..., : row.dv] if latent else torch.randn(tokens, row.kv_heads, row.dv, dtype=dtype, device=device)

    def ours(layout):
        shape = (len(x.k_cache), row.block_size, row.kv_heads, row.head_size)
        k_cache, v_cache = allocate(layout, *shape, v_head_size=row.dv, dtype=x.k_cache.dtype, device=device)

        def call():
            if latent:
                tritonattn.mla_cache_write(k[:, 0, : row.dv], k[:, 0, row.dv :], k_cache, slots)
            else:
                tritonattn.reshape_and_cache(
                    k, v, k_cache, v_cache, slots, kv_layout=layout, k_descale=x.descales[0], v_descale=x.descales[1]
                )
            return k_cache, v_cache, layout

        return call

    def indexing():
        x.k_cache.view(-1, *k.shape[1:])[slots] = k
        if not latent:
            x.v_cache.view(-1, *v.shape[1:])[slots] = v
        return x.k_cache, x.v_cache, "nhd"

    def error(written):
        caches = to_nhd(*written)
        pairs = zip(caches, (k, v), x.descales, strict=True)
        return max(_relative(c.flatten(0, 1)[slots], (new / descale).to(c.dtype)) for c, new, descale in pairs)

    calls = {f"tritonattn {layout}": ours(layout) for layout in (("latent",) if latent else ("nhd", "preshuffled"))}
    if not row.fp8:
        calls["torch indexing"] = indexing
    width = row.head_size if latent else row.head_size + row.dv
    return Case(calls, 0.0, tokens * row.kv_heads * width * (2 + x.k_cache.itemsize), error, "cache_write")


def _gather(x: Inputs) -> Case:
    row, tokens = x.row, sum(x.row.seq_lens)
    starts = torch.zeros_like(x.seq_lens)
    exact = [torch.cat([torch.stack([x.keys(i, h)[part].to(x.q.dtype) for h in range(row.kv_heads)], 1) for i in range(row.batch)])
             for part in (0, 1)]  # fmt: skip

    def ours(layout):
        k_cache, v_cache = from_nhd(x.k_cache, x.v_cache, layout)
        out = tuple(x.q.new_empty(tokens, row.kv_heads, width) for width in (row.head_size, row.dv))
        return lambda: tritonattn.gather_cache(
            k_cache, v_cache, x.block_table, starts, x.seq_lens, kv_layout=layout, k_descale=x.descales[0], v_descale=x.descales[1], out=out
        )

    def error(out):
        return max(_relative(got, want) for got, want in zip(out, exact, strict=True))

    moved = tokens * row.kv_heads * (row.head_size + row.dv) * (2 + x.k_cache.itemsize)
    return Case({f"tritonattn {layout}": ours(layout) for layout in ("nhd", "preshuffled")}, 0.0, moved, error, "gather")


def _merge(row: Row, device: torch.device, peers: Peers | None, only: str) -> Case:
    tokens, heads, width = row.batch * row.seq_len, row.heads, row.head_size
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    parts = [(torch.randn(tokens, heads, width, dtype=dtype, device=device), torch.randn(heads, tokens, device=device)) for _ in (0, 1)]
    (out_a, lse_a), (out_b, lse_b) = parts
    out = torch.empty_like(out_a)

    def ours():
        return tritonattn.merge_attn_states(out_a, lse_a, out_b, lse_b, out=out, return_lse=True)[0]

    def error(merged):
        share = torch.sigmoid(lse_a - lse_b).T[:, :, None]
        return _relative(merged, share * out_a + (1 - share) * out_b)

    calls = {"tritonattn": ours, **(peers.merge(out_a, lse_a, out_b, lse_b) if peers else {})}
    return Case(calls, 0.0, 3 * tokens * heads * (width * out.itemsize + 4), error, "merge")


def _relative(got: Tensor, want: Tensor) -> float:
    """``||got - want|| / ||want||``; NaN where anything is not finite."""
    return float((got.float() - want.float()).norm() / want.float().norm())


_BUILDERS: dict[str, Callable[[Row, torch.device, Peers | None, str], Case]] = {
    "prefill": _prefill, "extend": _extend, "decode": _decode, "spec-decode": _decode, "mla": _mla, "mixed": _mixed, "cache": _cache,
    "merge": _merge, "plan": _plan, "graph": _graph, "cliffs": _decode,
}  # fmt: skip
