"""``tritonattn soak``: serve random requests for a while, and look for wrong rows, leaks and late compiles.

    tritonattn soak --minutes 5 --seed 1        every setup in turn, for five minutes together
    tritonattn soak --only "mla fp8" --steps 50

Requests arrive, share prefixes, are prefilled in chunks, decoded (with speculated tokens that are taken back), preempted and finished at
random, all through the public router and cache writes; a cache block that nobody owns is filled with NaN at once. Every row must be
finite, and rows of random requests are held against float64. The exit code is 1 if any is wrong, or if memory is lost.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

NOWHERE = 10**9  # a table entry past the end of a request
SAMPLES = 2  # requests of a step that are checked
WARM = 0.4  # of the time; what is allocated later and kept is lost
LEAK = 8 << 20  # bytes of device memory beside scratch that a setup may gain once warm


@dataclass
class Result:
    """What one setup did."""

    name: str
    steps: int = 0
    tokens: int = 0
    checked: int = 0
    worst: float = 0.0  # ||out - exact|| / ||exact|| of a row
    worst_lse: float = 0.0
    kinds: dict[str, int] = field(default_factory=dict)
    events: dict[str, int] = field(default_factory=dict)
    compiled: int = 0
    compiled_late: list[str] = field(default_factory=list)
    device_growth: int = 0  # bytes beside scratch since it was warm
    host_growth: int = 0
    scratch: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def leaks(self) -> bool:
        return self.device_growth > LEAK


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=5.0, help="for all setups together (default 5)")
    parser.add_argument("--steps", type=int, default=0, help="stop each setup after so many steps at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", metavar="TEXT", help="setups with this text in their name")
    parser.add_argument("--json", metavar="FILE", help="write the result")


def run(args: argparse.Namespace) -> int:
    from rich.progress import Progress

    from tritonattn.where import working_device

    device = working_device()
    from tritonattn.bench.machine import describe
    from tritonattn.soak.layers import SETUPS

    setups = [setup for setup in SETUPS if args.only in setup.name]
    if not setups:
        raise ValueError(f"--only must be part of one of: {', '.join(setup.name for setup in SETUPS)}; got {args.only!r}")
    if not 0 < args.minutes < float("inf"):
        raise ValueError(f"--minutes must be above 0, got {args.minutes}")
    results = []
    with Progress(transient=True) as progress:
        for setup in setups:
            task = progress.add_task(setup.name, total=1.0)
            show = partial(progress.update, task)
            results.append(serve(setup, device, args.minutes * 60 / len(setups), args.seed, args.steps, show))
            progress.remove_task(task)
            progress.console.print(tell(results[-1]), highlight=False, markup=False, soft_wrap=True)
    if args.json:
        document = {"machine": describe(device), "seed": args.seed, "results": [asdict(result) for result in results]}
        Path(args.json).write_text(json.dumps(document, indent=1), encoding="utf-8")
    return 1 if any(result.wrong or result.leaks for result in results) else 0


def tell(result: Result) -> str:
    lines = [
        f"{result.name}: {result.steps} steps, {result.tokens} tokens ({', '.join(f'{n} {kind}' for kind, n in result.kinds.items())})",
        f"  {', '.join(f'{n} {event}' for event, n in result.events.items())}",
        f"  {result.checked} rows checked: worst error {result.worst:.2e}, lse {result.worst_lse:.2e}; {len(result.wrong)} wrong",
        f"  compiled {result.compiled} kernels, {len(result.compiled_late)} of them late; device memory beside scratch "
        f"{result.device_growth:+d} bytes since warm, host {result.host_growth / 2**20:+.1f} MiB, scratch {result.scratch / 2**20:.1f} MiB",
    ]
    return "\n".join([*lines, *(f"  late: {event[:200]}" for event in result.compiled_late[:8]), *(f"  WRONG {text}" for text in result.wrong[:20])])


def serve(setup: Any, device: Any, seconds: float, seed: int, steps: int = 0, show: Callable[..., Any] = lambda **state: None) -> Result:
    """One setup for so many seconds, or steps, whichever comes first."""
    import torch

    from tritonattn.soak.layers import Gqa, Mla, sizes
    from tritonattn.soak.server import Server
    from tritonattn.warmup import Compilations

    begin, warm = time.monotonic(), (0, 0)
    load, shape = sizes(setup, device)
    layer = (Mla if setup.mla else Gqa)(setup, load, shape, device, seed)
    server, picks, result = Server(load, seed), random.Random(seed), Result(setup.name)
    with Compilations() as seen:
        if device.type == "cuda":
            _compile_ahead(layer)
        ahead, done = len(seen.new) + len(seen.found), 0.0
        while not result.wrong and done < 1:
            _step(server, layer, picks, result)
            before, done = done, max((time.monotonic() - begin) / seconds, result.steps / steps if steps else 0.0)
            if before < WARM <= done:
                warm = _held(layer), _resident()
            show(completed=done)
    made = [*seen.new, *seen.found]
    result.compiled, result.events = len(made), dict(server.seen)
    result.compiled_late = [f"{event.kernel}: {event.key}" for event in made[ahead:]]
    result.device_growth, result.host_growth = _held(layer) - warm[0], _resident() - warm[1]
    result.scratch = layer.router.scratch.nbytes
    del layer
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return result


def _compile_ahead(layer: Any) -> None:
    """As a server does before it opens: the kernels of every kind of batch, in parallel, launching none."""
    import os

    import torch

    from tritonattn.bench.ahead import compile_only
    from tritonattn.tuning.models import MODELS
    from tritonattn.warmup import Deployment, batches

    load, size = layer.load, layer.load.block_size
    like = Deployment(MODELS["llama-3-8b"], max_model_len=load.longest, max_batch=load.running, decode_threshold=load.threshold)
    with compile_only(os.cpu_count() or 1):
        for query, seq in batches(like):
            table = torch.zeros(len(seq), -(-max(seq) // size), dtype=torch.int32, device=layer.device)
            tokens = torch.zeros(sum(query), dtype=torch.int64, device=layer.device)
            layer.step(layer.router.plan(query, seq, table), tokens, tokens)


def _step(server: Any, layer: Any, picks: random.Random, result: Result) -> None:
    import torch

    from tritonattn.batch import Kind

    slices = server.next()
    if not slices:
        return
    device, size, result.steps = layer.device, server.load.block_size, result.steps + 1
    if server.pool.freed:
        layer.poison(server.pool.freed)
        server.pool.freed.clear()
    pads = picks.choice((0, 0, 1, 3))  # as a graph of a larger batch would have
    query = [len(piece.tokens) for piece in slices] + [0] * pads
    seq = [piece.stop for piece in slices] + [0] * pads
    width = max(len(piece.request.blocks) for piece in slices)
    rows = [piece.request.blocks for piece in slices] + [[]] * pads
    table = torch.tensor([blocks + [NOWHERE] * (width - len(blocks)) for blocks in rows], dtype=torch.int32, device=device)
    slots = [piece.request.blocks[at // size] * size + at % size for piece in slices for at in range(piece.start, piece.stop)]
    tokens = [token for piece in slices for token in piece.tokens]
    plan = layer.router.plan(query, seq, table)
    out, lse = layer.step(plan, torch.tensor(tokens, device=device), torch.tensor(slots, device=device))
    result.tokens += len(tokens)
    for kind in plan.kinds[: len(slices)].tolist():
        name = Kind(kind).name.lower()
        result.kinds[name] = result.kinds.get(name, 0) + 1
    where = f"step {result.steps}"
    if not bool(out.isfinite().all()):
        bad = sorted({int(row) for row in (~out.isfinite()).nonzero()[:, 0].tolist()})
        result.wrong.append(f"{where}: rows {bad[:10]} of {len(out)} are not finite; query {query}, seq {seq}")
    for chosen in picks.sample(range(len(slices)), min(SAMPLES, len(slices))):
        piece = slices[chosen]
        row = picks.choice((0, len(piece.tokens) - 1, picks.randrange(len(piece.tokens))))
        decoded = plan.kinds[chosen] == Kind.DECODE
        seen = (piece.request.tokens[: piece.start] + piece.tokens)[: piece.start + row + 1]
        exact, exact_lse = layer.exact(seen, len(seen) if decoded else piece.start)
        at = sum(query[:chosen]) + row
        error = float((out[at].double() - exact).norm() / exact.norm())
        lse_error = float((lse[:, at].double() - exact_lse).abs().max())
        result.checked += 1
        result.worst, result.worst_lse = max(result.worst, error), max(result.worst_lse, lse_error)
        if not (error <= layer.setup.tolerance and lse_error <= layer.setup.tolerance):
            kind = Kind(int(plan.kinds[chosen])).name.lower()
            result.wrong.append(f"{where}: error {error:.2e}, lse {lse_error:.2e} in row {row} of a {kind} of {len(piece.tokens)} on {piece.stop}")
    server.finish(slices)


def _held(layer: Any) -> int:
    """Bytes of device memory in use beside scratch, which grows with the largest batch."""
    import torch

    return torch.cuda.memory_allocated(layer.device) - layer.router.scratch.nbytes if layer.device.type == "cuda" else 0


def _resident() -> int:
    """The most memory this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
