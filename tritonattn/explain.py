"""``tritonattn explain``: which path, table row and split each request of a batch takes, and why. Host arithmetic; no GPU is asked.

    tritonattn explain --shape 32/8x128 --arch gfx942 1@4095x30 512@8192 300
"""
from __future__ import annotations

import argparse
import json
import re
from typing import Any

import torch

from tritonattn import environment
from tritonattn.batch import Kind, Plan
from tritonattn.mla_router import MlaRouter
from tritonattn.plan import device_plan, prefill_row
from tritonattn.problem import AttnProblem, short_name
from tritonattn.router import Router
from tritonattn.tuning.arch import INTERPRETER, Arch, assume, by_name, detect
from tritonattn.tuning.models import MODELS, Model, named_shape, parse_shape
from tritonattn.tuning.table import Row

SHAPE = "32/8x128"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
WHY = {
    Kind.PREFILL: "no context in the cache",
    Kind.EXTEND: "context, and more than {threshold} new token(s)",
    Kind.DECODE: "context, and at most {threshold} new token(s)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("requests", nargs="+", metavar="NEW[@CONTEXT][xCOUNT]",
                        help="new tokens, tokens in the cache before them, and how many such requests: 1@4095x30, 512@8192, 300")
    parser.add_argument("--shape", help=f"query heads / KV heads x head size [/ that of V] (default: {SHAPE})")
    parser.add_argument("--model", help=f"in place of --shape, one of: {', '.join(MODELS)}")
    parser.add_argument("--tp", type=int, default=1, help="GPUs that share the heads")
    parser.add_argument("--arch", help="arch or SKU, such as gfx942 or MI355X (default: TRITONATTN_ARCH, the GPU of this machine, else gfx942)")
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--kv-dtype", default="", choices=("", "fp8"), help="dtype of the cache (default: that of --dtype)")
    parser.add_argument("--kv-layout", default="preshuffled", choices=("nhd", "hnd", "preshuffled"))
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--chunk-tokens", type=int, default=32768)
    parser.add_argument("--decode-threshold", type=int, default=1, help="1 + speculated tokens")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--json", action="store_true")


def run(args: argparse.Namespace) -> int:
    new, context = parse_requests(args.requests)
    arch = by_name(args.arch) if args.arch else detect()
    if arch is INTERPRETER and not (args.arch or environment.arch()):
        arch = by_name("gfx942")
    with assume(arch):
        router = make_router(args, named_shape(args.shape, args.model) or parse_shape(SHAPE), arch)
        lens = [n + c for n, c in zip(new, context, strict=True)]
        row = torch.zeros(-(-max(lens) // args.block_size), dtype=torch.int32, device="cpu")  # of any sequence: none is read
        facts = explain(router, router.plan(new, lens, row.expand(len(lens), -1)), arch)
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        show(facts)
    return 0


def parse_requests(words: list[str]) -> tuple[list[int], list[int]]:
    """``["1@40x2", "9"]`` -> new tokens [1, 1, 9] and context [40, 40, 0]. ValueError names every word that is neither."""
    found = [(word, re.fullmatch(r"(\d{1,9})(?:@(\d{1,9}))?(?:x0*([1-9]\d{0,5}))?", word)) for word in words]
    wrong = [word for word, match in found if match is None]
    if wrong:
        need = "NEW, NEW@CONTEXT or NEW@CONTEXTxCOUNT, of tokens below a billion and a count from 1 to 999999"
        raise ValueError(f"a request must be {need}, got {', '.join(wrong)}")
    numbers = [tuple(int(group or default) for group, default in zip(match.groups(), (0, 0, 1), strict=True)) for _, match in found if match]
    return [n for n, _, count in numbers for _ in range(count)], [c for _, c, count in numbers for _ in range(count)]


def make_router(args: argparse.Namespace, shape: Model, arch: Arch) -> Router:
    if shape.is_mla and args.batch_invariant:
        raise ValueError("--batch-invariant: not for MLA, where the projections are the caller's")
    own = {"chunk_tokens": args.chunk_tokens, "decode_threshold": args.decode_threshold}
    if not shape.is_mla:
        own["batch_invariant"] = args.batch_invariant
    return router_of(shape.shared(args.tp), arch, args.dtype, args.kv_dtype, args.kv_layout, args.block_size, **own)


def router_of(shape: Model, arch: Arch, dtype: str, kv_dtype: str, kv_layout: str, block_size: int, **own: Any) -> Router:
    """A router for the shape, by the words of the command line. To be made and used where `arch` is assumed.

    Raises ValueError or TypeError for all that the ops refuse too.
    """
    if kv_dtype and not arch.fp8_types:
        raise ValueError(f"--kv-dtype fp8: {arch.name} has no 8-bit floats")
    own |= {"dtype": DTYPES[dtype], "kv_dtype": getattr(torch, arch.fp8_types[0]) if kv_dtype else DTYPES[dtype], "device": "cpu", "block_size": block_size}
    if shape.is_mla:
        nope = shape.head_size - shape.rope
        return MlaRouter(shape.num_heads, softmax_scale=shape.head_size**-0.5, kv_lora_rank=shape.latent, qk_nope_head_dim=nope,
                         qk_rope_head_dim=shape.rope, v_head_dim=shape.v_head_size, **own)
    return Router(shape.num_heads, shape.num_kv_heads, shape.head_size, v_head_size=shape.v_head_size or None, kv_layout=kv_layout,
                  softcap=shape.softcap, window_size=(shape.window - 1, 0) if shape.window else (-1, -1),
                  sinks=torch.zeros(shape.num_heads, device="cpu") if shape.sinks else None, **own)


def explain(router: Router, plan: Plan, arch: Arch) -> dict[str, Any]:
    """The plan as plain data: what each request gets, then what each path launches."""
    kinds = [Kind(kind) for kind in plan.kinds]
    splits: dict[int, int] = {}
    if plan.decode:
        items = plan.decode.work.items.view(-1, 3).tolist()  # on the CPU here: nothing is read from a device
        splits = {sequence: count for sequence, _, count in items if count}
    return {
        "arch": arch.name, "gpu": arch.sku, "compute_units": arch.compute_units,
        "requests": [{"request": index, "new_tokens": int(new), "context": int(seq - new), "path": kind.name.lower() if new else "none",
                      "because": WHY[kind].format(threshold=router.decode_threshold) if new else "padding: nothing to do",
                      "splits": splits.get(index) if new else None}
                     for index, (new, seq, kind) in enumerate(zip(plan.query_lens, plan.seq_lens, kinds, strict=True))],
        "order": plan.order,
        "paths": {name: facts for name, facts in (("decode", _decode(router, plan, arch)), ("extend", _extend(router, plan, arch)),
                                                  ("prefill", _prefill(router, plan, arch))) if facts},
    }


def _decode(router: Router, plan: Plan, arch: Arch) -> dict[str, Any] | None:
    launch, problem = plan.decode, router.paged
    requests = int(((plan.kinds == Kind.DECODE) & (plan.query_lens > 0)).sum())
    if launch is None or not requests:  # padding alone has programs too, which find nothing to do
        return None
    chosen, work = launch.plan, launch.work
    per_unit = chosen.row.config["programs_per_cu"]
    longest = int(plan.seq_lens[plan.kinds == Kind.DECODE].max(initial=1))
    alone = device_plan(arch, problem, launch.num_seqs, launch.max_seqlen_q, longest, 0, router.params.window_size[0])
    return {
        "requests": requests,
        "programs": problem.num_kv_heads * chosen.row_blocks * work.num_items,
        "why so many": f"the row wants {per_unit:g} programs on each of {arch.compute_units} compute units; one part of a request's keys "
                       f"is {problem.num_kv_heads * chosen.row_blocks} of them",
        "query rows of a program": f"{problem.group * launch.max_seqlen_q} of {chosen.rows}",
        "parts of keys": work.num_items,
        "requests merged from parts": work.num_merges,
        "where the device alone knows the lengths": "cut there, in the same way" if alone.cut else f"{alone.num_splits} parts of each request",
        **_row(chosen.row, problem),
    }


def _extend(router: Router, plan: Plan, arch: Arch) -> dict[str, Any] | None:
    launch = plan.extend
    if launch is None:
        return None
    chunks = -(-launch.row_length // router.chunk_tokens)
    which, after = ("", "") if router.new_in_row else ("cached ", "; 1 over the new ones")
    return {
        "requests": int((plan.kinds == Kind.EXTEND).sum()),
        "programs": launch.num_tiles * router.extended.num_q_heads,
        "passes": f"{chunks} over the {which}keys, {launch.row_length} in all, at most {router.chunk_tokens} a pass{after}",
        **_row(prefill_row(arch, router.extended, launch.max_seqlen_q), router.extended),
    }


def _prefill(router: Router, plan: Plan, arch: Arch) -> dict[str, Any] | None:
    launch = plan.prefill
    if launch is None:
        return None
    return {
        "requests": int(((plan.kinds == Kind.PREFILL) & (plan.query_lens > 0)).sum()),
        "programs": launch.num_tiles * router.dense.num_q_heads,
        **_row(prefill_row(arch, router.dense, launch.max_seqlen_q), router.dense),
    }


def _row(row: Row, problem: AttnProblem) -> dict[str, Any]:
    heads = f"{problem.num_q_heads}/{problem.num_kv_heads}x{problem.head_size}"
    return {
        "problem": f"{heads}, {short_name(problem.dtype)}, keys {problem.kv_layout} {short_name(problem.kv_dtype)}",
        "row": row.where, "when": dict(row.when), "config": dict(row.config), "provenance": row.provenance["kind"],
    }


def show(facts: dict[str, Any]) -> None:
    from rich.table import Table

    from tritonattn.console import console

    out = console()
    out.print(f"[bold]{facts['arch']}[/] (as {facts['gpu']}, {facts['compute_units']} compute units)", highlight=False)
    table = Table("requests", "new", "context", "path", "because", "splits", box=None, padding=(0, 2, 0, 0), title_justify="left")
    for first, last, request in _runs(facts["requests"]):
        table.add_row(str(first) if first == last else f"{first}-{last}", str(request["new_tokens"]), str(request["context"]),
                      f"[bold]{request['path']}", request["because"], str(request["splits"] or ""))
    out.print(table)
    for path, launch in facts["paths"].items():
        out.print(f"\n[bold]{path}")
        lines = Table(show_header=False, box=None, padding=(0, 2, 0, 2))
        for name, value in launch.items():
            plain = ", ".join(f"{k} {v}" for k, v in value.items()) or "always" if isinstance(value, dict) else str(value)
            lines.add_row(name, plain)
        out.print(lines)


def _runs(requests: list[dict[str, Any]]) -> list[tuple[int, int, dict[str, Any]]]:
    """Neighbours that are treated alike, as (first, last, the facts)."""
    runs: list[tuple[int, int, dict[str, Any]]] = []
    for request in requests:
        alike = {**request, "request": None}
        if runs and runs[-1][2] == alike:
            runs[-1] = (runs[-1][0], request["request"], alike)
        else:
            runs.append((request["request"], request["request"], alike))
    return runs
