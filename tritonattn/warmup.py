"""Compile ahead, so that serving never does.

A kernel is compiled for the static facts of a call (heads, sizes, dtypes, layout, table row, which optional arguments are there) and
for whether strides are multiples of 16 bytes; lengths, batch sizes and the strides themselves are not among them. So the keys a model
can reach are few: `compile_ahead` drives the routers, the MLA ops and the cache writes over batches that reach all of them, without
launching, into Triton's cache folder. It needs no GPU: an image for MI355X is warmed on any machine. `Compilations` counts what is
compiled later; after a warm-up that is nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, product
from typing import Any, Protocol

import torch
from torch import Tensor

from tritonattn.tuning.arch import Arch, by_name, detect
from tritonattn.tuning.models import MODELS, Model, model
from tritonattn.tuning.worker import jobs_of

BATCHES = (1, 2, 3, 4, 8, 16, 32, 64, 128, 256)
ALIGNMENTS = ((True, True), (False, True), (True, False), (False, False))  # of the strides of q, k, v, and of out
HUGE = 1 << 31  # bytes: from there on Triton addresses a tensor otherwise, which is a key of its own


@dataclass(frozen=True)
class Compilation:
    """One kernel that Triton had to make ready: compiled, or found in the cache folder."""

    kernel: str
    module: str
    target: str
    key: str  # what it was compiled for: the constexprs, the types of the arguments, and what is promised of them
    from_cache: bool
    seconds: float


@dataclass
class Compilations:
    """Within the block, what Triton compiles: `new` was compiled, `found` came from the cache folder.

    on_new is called with each new one, for example to log it: a server that compiles while it serves should say so.
    """

    on_new: Callable[[Compilation], None] | None = None
    new: list[Compilation] = field(default_factory=list)
    found: list[Compilation] = field(default_factory=list)

    def __enter__(self) -> Compilations:
        from triton import knobs

        self._before = knobs.compilation.listener
        knobs.compilation.listener = self._listen
        return self

    def __exit__(self, *_: object) -> None:
        from triton import knobs

        knobs.compilation.listener = self._before

    def _listen(self, *, src: Any, metadata: dict[str, Any], cache_hit: bool, times: Any, **rest: Any) -> None:
        target = metadata["target"]
        names = src.fn.arg_names
        fixed = {names[path[0]]: value for path, value in src.constants.items() if len(path) == 1}
        promised = {names[path[0]]: facts for path, facts in src.attrs.items() if len(path) == 1}
        types = {name: _with(kind, promised.get(name)) for name, kind in src.signature.items() if kind != "constexpr"}
        key = ", ".join([f"{k}={v}" for k, v in fixed.items()] + [f"{k}: {v}" for k, v in types.items()])
        event = Compilation(src.fn.__name__, src.fn.fn.__module__, str(getattr(target, "arch", target)), key, cache_hit, times.total / 1e6)
        (self.found if cache_hit else self.new).append(event)
        if not cache_hit and self.on_new:
            self.on_new(event)
        if self._before:
            self._before(src=src, metadata=metadata, cache_hit=cache_hit, times=times, **rest)


def _with(kind: str, promised: Any) -> str:
    """A type, and in brackets what Triton takes for granted of such an argument: its alignment, its size."""
    facts = [" ".join(map(str, fact)).removeprefix("tt.") for fact in promised or ()]
    return f"{kind} ({', '.join(facts)})" if facts else kind


@dataclass(frozen=True)
class Deployment:
    """How a model is served; what its compile keys follow from."""

    shape: Model
    dtype: str = "bf16"
    kv_dtype: str = ""  # "": dtype; "fp8": the flavour of the arch
    kv_layout: str = "preshuffled"
    block_size: int = 16
    tensor_parallel: int = 1
    max_model_len: int = 131072
    max_batch: int = 256
    decode_threshold: int = 1
    return_lse: bool = False
    descale_tensors: bool = False  # descales as device tensors, not as numbers

    def __post_init__(self) -> None:
        reasons = [f"{name} must be at least 1, got {getattr(self, name)}" for name in ("block_size", "max_model_len", "max_batch", "decode_threshold")
                   if getattr(self, name) < 1]  # fmt: skip
        try:
            self.shape.shared(self.tensor_parallel)
        except ValueError as error:
            reasons.append(str(error))
        if self.dtype not in ("bf16", "fp16"):
            reasons.append(f"dtype must be bf16 or fp16, got {self.dtype!r}")
        if self.kv_dtype not in ("", "fp8"):
            reasons.append(f"kv_dtype must be empty (that of dtype) or fp8, got {self.kv_dtype!r}")
        if reasons:
            raise ValueError("; ".join(reasons))

    @property
    def heads(self) -> tuple[int, int]:
        """Query and KV heads of one GPU."""
        own = self.shape.shared(self.tensor_parallel)
        return own.num_heads, own.num_kv_heads


class Limits(Protocol):
    """What the batches of a server keep to."""

    @property
    def max_model_len(self) -> int: ...
    @property
    def max_batch(self) -> int: ...
    @property
    def decode_threshold(self) -> int: ...
    @property
    def block_size(self) -> int: ...


def batches(deployment: Limits) -> Iterator[tuple[list[int], list[int]]]:
    """(query_lens, seq_lens) that reach every kind of plan: decode at all sizes and lengths, prefill, extend, mixed."""
    top, lengths = deployment.max_model_len, _lengths(deployment)
    sizes = [n for n in BATCHES if n <= deployment.max_batch]
    for size in sizes:
        for length in lengths:
            yield [1] * size, [length] * size
    if deployment.decode_threshold > 1:
        for size in sizes:
            yield [deployment.decode_threshold] * size, [top] * size
    queries = [n for n in lengths if n <= min(top, 16384)]
    for query in queries:
        yield [query], [query]
        if query < top:
            yield [query], [min(top, query + 100)]
            yield [query, 1, query], [min(top, query + 100), top // 2, query]


def _lengths(deployment: Limits) -> list[int]:
    return [n for n in (1 << i for i in range(1, 31)) if n < deployment.max_model_len] + [deployment.max_model_len]


def calls(deployment: Deployment, arch: Arch, device: str | torch.device = "cpu") -> Iterator[Callable[[], Any]]:
    """The calls of the library that a server makes of a model, over all batches of `batches`.

    Caches come small and, where nothing is really allocated, larger than 2 GiB. Without a GPU the lengths are the point, not the
    contents: every request uses the same few pages.
    """
    if deployment.shape.is_mla:
        yield from _mla_calls(deployment, arch, device)
    else:
        yield from _mha_calls(deployment, arch, device)


def _tensors(deployment: Deployment, arch: Arch, device: str | torch.device):
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[deployment.dtype]
    kv_dtype = getattr(torch, arch.fp8_types[0]) if deployment.kv_dtype == "fp8" else dtype
    scale: Any = None
    if deployment.kv_dtype == "fp8":
        scale = torch.ones(1, device=device) if deployment.descale_tensors else 0.5
    sizes = [1] if torch.device(device).type != "cpu" or arch.backend == "cuda" else [1, HUGE]
    return dtype, kv_dtype, scale, sizes


def _mha_calls(deployment: Deployment, arch: Arch, device: str | torch.device) -> Iterator[Callable[[], Any]]:
    import tritonattn
    from tritonattn.layouts import allocate

    s, (heads, kv_heads) = deployment.shape, deployment.heads
    v_size = s.v_head_size or s.head_size
    dtype, kv_dtype, scale, sizes = _tensors(deployment, arch, device)
    sinks = torch.zeros(heads, device=device) if s.sinks else None
    page = deployment.block_size * kv_heads * min(s.head_size, v_size) * kv_dtype.itemsize
    caches = []
    for least in sizes:
        size = (deployment.kv_layout, max(4, -(-least // page) + 1), deployment.block_size, kv_heads, s.head_size)
        caches.append(allocate(*size, v_head_size=v_size, dtype=kv_dtype, device=device))
    layout = {"kv_layout": deployment.kv_layout}
    scales = {"k_descale": scale, "v_descale": scale}
    for aligned, (k_cache, v_cache) in product(ALIGNMENTS, caches):
        for window in {(-1, -1), (s.window - 1, 0)} if s.window else {(-1, -1)}:
            router = tritonattn.Router(
                heads, kv_heads, s.head_size, v_head_size=v_size, dtype=dtype, device=device, kv_dtype=kv_dtype,
                block_size=deployment.block_size, decode_threshold=deployment.decode_threshold, window_size=window,
                softcap=s.softcap, sinks=sinks, **scales, **layout,
            )  # fmt: skip
            for query, seq in planned(deployment, arch, router):
                yield partial(_step, deployment, router, query, seq, k_cache, v_cache, aligned)
        if not aligned[1]:  # nothing but the caches is written
            continue
        new_k, new_v = (_rows(8, kv_heads, size, dtype, device, aligned[0]) for size in (s.head_size, v_size))
        for slot_type in (torch.int64, torch.int32):
            slots = torch.arange(8, dtype=slot_type, device=device)
            yield partial(tritonattn.reshape_and_cache, new_k, new_v, k_cache, v_cache, slots, **scales, **layout)


def planned(deployment: Limits, arch: Arch, router: Any) -> Iterator[tuple[list[int], list[int]]]:
    """The batches of `batches`, and those of any other size that is served by another decode row of the table, or cut in another way."""
    from tritonattn.plan import device_plan

    known: set[tuple] = set()

    def is_new(query: int, seq: int, size: int) -> bool:
        plan = device_plan(arch, router.paged, size, query, -(-seq // deployment.block_size) * deployment.block_size)
        before = len(known)
        known.add((plan.row, plan.rows, plan.num_splits > 1, plan.cut is None))
        return len(known) > before

    for queries, seqs in batches(deployment):
        if max(queries) <= deployment.decode_threshold:
            is_new(max(queries), max(seqs), len(queries))
        yield queries, seqs
    for query in {1, deployment.decode_threshold}:
        for size in range(1, deployment.max_batch + 1):
            for seq in _lengths(deployment):
                if seq >= query and is_new(query, seq, size):
                    yield [query] * size, [seq] * size


def _rows(tokens: int, heads: int, size: int, dtype: torch.dtype, device: str | torch.device, aligned: bool) -> Tensor:
    """[tokens, heads, size]; not aligned: with a stride that is no multiple of 16 bytes."""
    return torch.empty(tokens, heads * size + (not aligned), dtype=dtype, device=device)[:, : heads * size].unflatten(1, (heads, size))


def _step(
    deployment: Deployment, router, query: list[int], seq: list[int], k_cache: Tensor, v_cache: Tensor, aligned: tuple[bool, bool]
) -> None:
    """One layer of one batch."""
    (heads, kv_heads), s, tokens = deployment.heads, deployment.shape, sum(query)
    new = partial(_rows, tokens, dtype=router.paged.dtype, device=router.device)
    plan = router.plan(query, seq, _table(deployment, seq, router.device))
    v_size = s.v_head_size or s.head_size
    q, k, v = (new(h, size, aligned=aligned[0]) for h, size in ((heads, s.head_size), (kv_heads, s.head_size), (kv_heads, v_size)))
    out = None if aligned[1] else new(heads, v_size, aligned=False)
    router.run(plan, q, k, v, k_cache, v_cache, out=out, return_lse=deployment.return_lse)


def _table(deployment: Deployment, seq: list[int], device: str | torch.device) -> Tensor:
    return torch.zeros(len(seq), -(-max(seq) // deployment.block_size), dtype=torch.int32, device=device)


def _mla_calls(deployment: Deployment, arch: Arch, device: str | torch.device) -> Iterator[Callable[[], Any]]:
    import tritonattn

    s = deployment.shape
    dtype, kv_dtype, scale, sizes = _tensors(deployment, arch, device)
    page = (deployment.block_size, s.latent + s.rope)
    pages = [max(4, -(-least // (page[0] * page[1] * kv_dtype.itemsize)) + 1) for least in sizes]
    for aligned, cache in product(ALIGNMENTS, [torch.empty(n, *page, dtype=kv_dtype, device=device) for n in pages]):
        router = tritonattn.MlaRouter(
            deployment.heads[0], softmax_scale=s.head_size**-0.5, dtype=dtype, device=device, kv_lora_rank=s.latent, kv_dtype=kv_dtype,
            qk_nope_head_dim=s.head_size - s.rope, qk_rope_head_dim=s.rope, v_head_dim=s.v_head_size, block_size=deployment.block_size,
            decode_threshold=deployment.decode_threshold, kv_descale=scale,
        )  # fmt: skip
        for query, seq in planned(deployment, arch, router):
            yield partial(_mla_step, deployment, router, query, seq, cache, aligned)
        if aligned != ALIGNMENTS[0]:
            continue
        for query, seq in batches(deployment):
            if max(query) <= deployment.decode_threshold:
                yield partial(_mla_decode, deployment, query, seq, cache, dtype, scale)
            elif len(query) == 1:
                yield partial(_mla_extend, deployment, query, seq, cache, dtype, scale)
        latent = torch.empty(8, s.latent, dtype=dtype, device=device)
        rope = torch.empty(8, s.rope, dtype=dtype, device=device)
        for slot_type in (torch.int64, torch.int32):
            slots = torch.arange(8, dtype=slot_type, device=device)
            yield partial(tritonattn.mla_cache_write, latent, rope, cache, slots, kv_descale=scale)


def _mla_step(deployment: Deployment, router, query: list[int], seq: list[int], cache: Tensor, aligned: tuple[bool, bool]) -> None:
    """One layer of one batch."""
    s, heads, tokens = deployment.shape, deployment.heads[0], sum(query)
    new = partial(_rows, dtype=router.paged.dtype, device=router.device)
    plan = router.plan(query, seq, _table(deployment, seq, router.device))
    q, k = (new(tokens, heads, s.head_size, aligned=aligned[0]) for _ in range(2))
    v = new(tokens, heads, s.v_head_size, aligned=aligned[0])
    router.run(
        plan, q, k, v, cache, absorb=lambda q: new(len(q), heads, s.latent + s.rope, aligned=aligned[0]),
        up_project=lambda latent, rope: tuple(new(len(latent), heads, n, aligned=aligned[0]) for n in (s.head_size, s.v_head_size)),
        up_project_v=lambda latent: new(len(latent), heads, s.v_head_size, aligned=True),
        out=None if aligned[1] else new(tokens, heads, s.v_head_size, aligned=False), return_lse=deployment.return_lse,
    )  # fmt: skip


def _mla_decode(deployment: Deployment, query: list[int], seq: list[int], cache: Tensor, dtype: torch.dtype, scale: Any) -> None:
    import tritonattn

    s, device = deployment.shape, cache.device
    q = torch.empty(sum(query), deployment.heads[0], s.latent + s.rope, dtype=dtype, device=device)
    tritonattn.mla_decode(
        q, cache, seqused_k=torch.tensor(seq, dtype=torch.int32, device=device), block_table=_table(deployment, seq, device),
        max_seqlen_k=max(seq), max_seqlen_q=max(query), softmax_scale=s.head_size**-0.5, kv_lora_rank=s.latent, kv_descale=scale,
        return_lse=deployment.return_lse,
    )  # fmt: skip


def _mla_extend(deployment: Deployment, query: list[int], seq: list[int], cache: Tensor, dtype: torch.dtype, scale: Any) -> None:
    import tritonattn

    s, device, heads = deployment.shape, cache.device, deployment.heads[0]
    new = partial(torch.empty, dtype=dtype, device=device)
    ints = partial(torch.tensor, dtype=torch.int32, device=device)
    context = [total - fresh for total, fresh in zip(seq, query, strict=True)]

    def up_project(latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        return new(len(latent), heads, s.head_size), new(len(latent), heads, s.v_head_size)

    q, k, v = new(sum(query), heads, s.head_size), new(sum(query), heads, s.head_size), new(sum(query), heads, s.v_head_size)
    tritonattn.mla_extend(
        q, k, v, cache, up_project=up_project, cu_seqlens_q=ints([0, *accumulate(query)]), context_lens=ints(context),
        block_table=_table(deployment, seq, device), max_seqlen_q=max(query), max_context_len=max(context),
        softmax_scale=s.head_size**-0.5, kv_descale=scale, return_lse=deployment.return_lse,
    )  # fmt: skip


def compile_ahead(deployment: Deployment, arch: Arch, part: int = 0, parts: int = 1) -> list[Compilation]:
    """Make every kernel that the deployment can reach on a GPU ready in Triton's cache folder; nothing is launched.

    part, parts: this process's share of the calls; processes may share one folder. Calls of one kind follow one another, so each takes a
    run of them and few kernels are compiled twice. Returns what was compiled, and what was there.
    """
    from tritonattn.tuning.codegen import capture

    with Compilations() as seen, capture(arch):
        work = list(calls(deployment, arch))
        for call in work[len(work) * part // parts : len(work) * (part + 1) // parts]:
            call()
    return [*seen.new, *seen.found]


def _worker(deployment: Deployment, arch: Arch, folder: str | None, part: int, parts: int) -> list[Compilation]:
    os.environ.pop("TRITON_INTERPRET", None)
    if folder:
        os.environ["TRITON_CACHE_DIR"] = folder
    return compile_ahead(deployment, arch, part, parts)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help=f"one of: {', '.join(MODELS)}")
    parser.add_argument("--arch", help="arch or SKU (default: the GPU of this machine)")
    parser.add_argument("--out", metavar="DIR", help="cache folder to fill (default: Triton's own; serve with TRITON_CACHE_DIR=DIR)")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16"))
    parser.add_argument("--kv-dtype", default="", choices=("", "fp8"), help="dtype of the cache (default: that of --dtype)")
    parser.add_argument("--kv-layout", default="preshuffled", choices=("nhd", "hnd", "preshuffled"))
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--tp", type=int, default=1, help="GPUs that share the heads")
    parser.add_argument("--max-model-len", type=int, default=131072)
    parser.add_argument("--max-batch", type=int, default=256)
    parser.add_argument("--decode-threshold", type=int, default=1, help="1 + speculated tokens")
    parser.add_argument("--lse", action="store_true", help="the log-sum-exp is wanted too")
    parser.add_argument("--descale-tensors", action="store_true", help="descales are device tensors, not numbers")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)")
    parser.add_argument("--json", action="store_true")


def run(args: argparse.Namespace) -> int:
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from multiprocessing import get_context

    arch, jobs = by_name(args.arch) if args.arch else detect(), jobs_of(args)
    if arch.simulated:
        raise ValueError("--arch must be that of a GPU (gfx942, MI355X, sm_90, ...) where none is at hand")
    deployment = Deployment(
        model(args.model), args.dtype, args.kv_dtype, args.kv_layout, args.block_size, args.tp, args.max_model_len, args.max_batch,
        args.decode_threshold, args.lse, args.descale_tensors,
    )  # fmt: skip
    folder = os.path.abspath(args.out) if args.out else None
    start, made = time.monotonic(), []
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        parts = [pool.submit(_worker, deployment, arch, folder, i, jobs) for i in range(jobs)]
        for done in as_completed(parts):
            made += done.result()
            print(f"{len(made)} kernels ready, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    keys = {(event.kernel, event.key): event for event in sorted(made, key=lambda event: event.from_cache, reverse=True)}
    compiled = sum(not event.from_cache for event in keys.values())
    summary = {"arch": arch.name, "model": args.model, "kernels": len(keys), "compiled": compiled, "seconds": round(time.monotonic() - start, 1)}
    if args.json:
        print(json.dumps({**summary, "keys": sorted(f"{kernel}: {key}" for kernel, key in keys)}))
    else:
        print(f"{len(keys)} kernels for {args.model} on {arch.name}: {compiled} compiled in {summary['seconds']} s, the rest were there")
        if folder:
            print(f"serve with TRITON_CACHE_DIR={folder}")
    return 0
