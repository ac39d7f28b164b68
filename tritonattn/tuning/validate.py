"""`tritonattn model`: hold the cost model against a GPU.

`--measure FILE` compiles candidates of `space.json` for a few calls, predicts each from its code, times it on the GPU, and keeps
everything in FILE; `--figures FILE` predicts anew from what such a file keeps, without a GPU. Both end in the same scores: for each
call the rank correlation (Spearman) of predicted and measured times, and how far the best of the predicted top three is from the best.

Candidates are compiled in several processes, launching nothing, into Triton's cache folder; one process then times them all, from there.
One that dies or stands still is replaced, and its candidate counts as refused.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch

from . import codegen, model, search, stopwatch, table
from .arch import Arch, assume, detect, nearest
from .cases import ENTRY_POINTS, Case, prepare
from .cases import run as call_once
from .codegen import Loop, Report
from .models import MODELS, Model
from .worker import Worker, jobs_of, reason, spread

TOP = 3
DIFFERENCE_ALLOWED = 0.02  # from the output of the row in force, over its largest value: bfloat16
COMPILE_SECONDS = 120.0  # of one candidate in all its cases
REPEATS = {"prefill": 12, "decode": 25, "mla_decode": 20}


def cases() -> list[Case]:
    """The calls that are timed: for each kernel long and short work, full and empty GPUs, one and several programs per sequence."""
    llama, qwen, oss, gemma = MODELS["llama-3-8b"], MODELS["qwen3-235b"], replace(MODELS["gpt-oss-120b"], sinks=False), MODELS["gemma-2-9b"]

    def mla(heads: int, batch: int, kv_len: int) -> Case:
        shape = replace(MODELS["deepseek-r1"], num_heads=heads, num_kv_heads=heads)
        return Case("mla_decode", shape, layout="latent", block_size=64, batch=batch, kv_len=kv_len)

    return [
        Case("prefill", llama, batch=1, query_len=8192, kv_len=8192),
        Case("prefill", llama, batch=8, query_len=1024, kv_len=1024),
        Case("prefill", oss, batch=2, query_len=4096, kv_len=4096),
        Case("decode", llama, layout="nhd", batch=64, kv_len=8192),
        Case("decode", llama, layout="nhd", batch=2, kv_len=65536),
        Case("decode", qwen, layout="nhd", batch=16, kv_len=4096),
        Case("decode", qwen, layout="nhd", batch=1, kv_len=2048),
        mla(16, 64, 4096),
        mla(16, 2, 65536),
        mla(128, 16, 4096),
        # The constants of the model were fitted to those before; these it had not seen.
        Case("prefill", qwen, batch=4, query_len=2048, kv_len=2048),
        Case("prefill", gemma, batch=2, query_len=2048, kv_len=2048),
        Case("decode", llama, layout="preshuffled", batch=32, kv_len=4096),
        Case("decode", llama, layout="nhd", kv_dtype="fp8", batch=64, kv_len=8192),
        Case("decode", qwen, layout="nhd", batch=8, query_len=4, kv_len=16384),
        mla(64, 32, 8192),
        mla(16, 128, 1024),
    ]


@dataclass
class Entry:
    """A candidate in a case, and what is known of it."""

    case: int  # index in the list of cases
    config: dict[str, Any]
    reports: list[dict[str, Any]]  # of the launches of the case's kernel, see `keep`
    key: str = ""  # of their code and grids: candidates that differ in neither are one
    seconds: float | None = None  # measured, median
    low: float | None = None  # 20th and 80th percentile
    high: float | None = None
    difference: float | None = None
    refused: str = ""


# --- what a report looks like in a file -------------------------------------------------------------------------------------------


def keep(report: Report) -> dict[str, Any]:
    """A report as plain data; of each loop's text the number of each instruction is kept."""
    made = {f.name: getattr(report, f.name) for f in fields(report) if f.name not in ("loops", "constexprs")}
    constexprs = {k: v if isinstance(v, (int, float, str)) else str(v) for k, v in report.constexprs.items()}
    loops = []
    for loop in report.loops:
        counts = {f.name: getattr(loop, f.name) for f in fields(loop) if f.name != "body"}
        loops.append({**counts, "operations": dict(Counter(text.split()[0] for text in loop.body).most_common())})
    return {**made, "grid": list(report.grid), "constexprs": constexprs, "loops": loops}


def kept(data: dict[str, Any]) -> Report:
    """The report back, without the text of its loops."""
    loops = []
    for loop in data["loops"]:
        values: dict[str, Any] = {k: {int(w): n for w, n in v.items()} if isinstance(v, dict) else v for k, v in loop.items() if k != "operations"}
        loops.append(Loop(**values))
    return Report(**{**data, "grid": tuple(data["grid"]), "loops": tuple(loops)})


def predicted(entry: Entry, case: Case, arch: Arch) -> float | None:
    """Seconds by the model; None where nothing was compiled."""
    reports = [kept(data) for data in entry.reports]
    seconds = [model.predict(report, arch, case).seconds for report in reports if report.main and report.main.matrix]
    return sum(seconds) if seconds else None


# --- compiling --------------------------------------------------------------------------------------------------------------------


def _compiler() -> Callable[..., dict[str, Any]]:
    torch.set_num_threads(1)
    return _compile


def _compile(arch: Arch, work: list[tuple[int, Case]], config: dict[str, Any]) -> dict[str, Any]:
    """One candidate in its cases, in a process of its own."""
    entries = []
    for index, case in work:
        entry = Entry(index, config, [])
        entries.append(entry)
        try:
            candidate = table.candidate(arch, case.kernel, config)
            with codegen.capture(candidate) as launches:
                call_once(case, candidate)
            reports = [codegen.read(launch) for launch in launches if launch.kernel in ENTRY_POINTS[case.kernel]]
            entry.reports = [keep(report) for report in reports]
            entry.key = json.dumps([(launch.key, launch.grid) for launch in launches])
            entry.refused = "; ".join(_will_not_launch(report, arch) for report in reports).strip("; ")
        except Exception as error:
            entry.refused = reason(error)
    return {"entries": entries}


def _will_not_launch(report: Report, arch: Arch) -> str:
    if report.lds + arch.lds_reserved > (arch.lds_bytes_per_unit or arch.lds_bytes):
        return f"{report.lds} bytes of shared memory, {arch.name} has {arch.lds_bytes}"
    return ""


def compiled(arch: Arch, work: list[Case], jobs: int, limit: int) -> Iterator[list[Entry]]:
    """Entries as they are ready. limit: of the candidates for one kernel, at most so many, drawn at random; 0: all."""
    tasks = []
    for kernel in dict.fromkeys(case.kernel for case in work):
        candidates = search.space(kernel, arch)
        if 0 < limit < len(candidates):
            candidates = random.Random(0).sample(candidates, limit)
        tasks += [([(i, case) for i, case in enumerate(work) if case.kernel == kernel], config) for config in candidates]

    def call(worker: Worker, task: tuple[list[tuple[int, Case]], dict[str, Any]]) -> list[Entry]:
        found = worker(arch, *task, seconds=COMPILE_SECONDS)
        return found["entries"] if "entries" in found else [Entry(i, task[1], [], refused="; ".join(found["refused"])) for i, _ in task[0]]

    for _, entries in spread(tasks, jobs, partial(Worker, _compiler), call):
        yield entries


# --- timing -----------------------------------------------------------------------------------------------------------------------


class Timer:
    """Calls of one case after another on the GPU, each candidate through the ops that users call."""

    def __init__(self, arch: Arch, device: str = "cuda"):
        self.arch, self.device = arch, device
        self.case: Case | None = None
        self.call: Any = None
        self.expected: Any = None

    def __call__(self, case: Case, config: dict[str, Any]) -> dict[str, Any]:
        """seconds, low, high and difference; raises whatever the candidate raises."""
        if case != self.case:
            self.case = self.call = self.expected = None  # their memory is needed again
            torch.cuda.empty_cache()
            torch.manual_seed(0)
            self.call = prepare(case, self.arch, self.device, real=True)
            self.expected = self.call().float()
            self.case = case
        with assume(table.candidate(self.arch, case.kernel, config)):
            difference = ((self.call().float() - self.expected).abs().max() / self.expected.abs().max()).item()
            taken = stopwatch.samples(self.call, REPEATS[case.kernel], self.device)
        low, high = (taken[round(share * (len(taken) - 1))] for share in (0.2, 0.8))
        return {"seconds": statistics.median(taken), "low": low, "high": high, "difference": difference}


# --- scores -----------------------------------------------------------------------------------------------------------------------


def ranks(values: list[float]) -> list[float]:
    """Ranks from 1, equal values sharing the mean of theirs."""
    order = sorted(values)
    first = {value: order.index(value) for value in set(values)}
    count = Counter(values)
    return [first[value] + (count[value] + 1) / 2 for value in values]


def spearman(a: list[float], b: list[float]) -> float:
    """Rank correlation; nan for fewer than two or all equal values."""
    if len(a) < 2 or len(set(a)) < 2 or len(set(b)) < 2:
        return math.nan
    return statistics.correlation(ranks(a), ranks(b))


@dataclass(frozen=True)
class Score:
    case: str
    kernel: str
    timed: int
    spearman: float
    regret: float  # best measured time among the predicted top three, over the best of all
    error: float  # of the predicted time: geometric mean of the factor by which it is off

    def __str__(self) -> str:
        return (f"{self.kernel:11} {self.case:60} {self.timed:3} configurations: Spearman {self.spearman:5.2f}, best of the top {TOP} within "
                f"{self.regret:.3f}, time off by {self.error:.2f}x")  # fmt: skip


def scores(entries: list[Entry], work: list[Case], arch: Arch) -> list[Score]:
    """One for each case with two or more timed candidates."""
    made = []
    for index, case in enumerate(work):
        pairs = [
            (guess, entry.seconds)
            for entry in entries
            if entry.case == index and entry.seconds is not None and not entry.refused and (guess := predicted(entry, case, arch)) is not None
        ]
        if len(pairs) < 2:
            continue
        guesses, times = [p for p, _ in pairs], [t for _, t in pairs]
        best = min(t for _, t in sorted(pairs)[:TOP])
        error = math.exp(statistics.mean(abs(math.log(p / t)) for p, t in pairs))
        made.append(Score(str(case), case.kernel, len(pairs), spearman(guesses, times), best / min(times), error))
    return made


# --- the command ------------------------------------------------------------------------------------------------------------------


def measure(arch: Arch, work: list[Case], jobs: int, limit: int, deadline: float, timer: Callable, say: Callable[[str], None]) -> list[Entry]:
    """Compile all, then time what compiled, case by case, until the deadline (of time.monotonic())."""
    start = time.monotonic()
    entries: list[Entry] = []
    for part in compiled(arch, work, jobs, limit):
        entries += part
        say(f"{len(entries)} compiled, {time.monotonic() - start:.0f} s")
    entries.sort(key=lambda entry: (entry.case, json.dumps(entry.config)))
    seen = set()
    for i, entry in enumerate(entries):
        if not entry.refused and (entry.case, entry.key) in seen:
            entry.refused = "the same code and grid as another"
        if not entry.refused and time.monotonic() > deadline:
            entry.refused = "not timed: no time was left"
        if entry.refused:
            continue
        seen.add((entry.case, entry.key))
        found = timer(work[entry.case], entry.config)
        entry.refused = "; ".join(found.pop("refused", []))
        for name, value in found.items():
            setattr(entry, name, value)
        if entry.difference is not None and not entry.difference <= DIFFERENCE_ALLOWED:
            entry.refused = f"differs from the row in force by {entry.difference:.3g}"
        say(f"{i + 1} of {len(entries)} timed, {time.monotonic() - start:.0f} s")
    return entries


def save(path: Path, arch: Arch, work: list[Case], entries: list[Entry], made: list[Score], device: str) -> None:
    content = {
        "arch": arch.name, "sku": arch.sku, "device": device, **search.versions(), "date": date.today().isoformat(), "model": model.VERSION,
        "cases": [asdict(case) for case in work], "entries": [asdict(entry) for entry in entries], "scores": [asdict(score) for score in made],
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


def load(path: Path) -> tuple[Arch, list[Case], list[Entry]]:
    """What `save` wrote. ValueError if the file is none of those."""
    try:
        text = gzip.open(path, "rt", encoding="utf-8").read() if path.suffix == ".gz" else path.read_text(encoding="utf-8")
        content = json.loads(text)
        work = [Case(**{**case, "shape": Model(**case["shape"])}) for case in content["cases"]]
        known = content["sku"] if content["sku"] not in ("", "unknown") else content["arch"]
        return nearest(known), work, [Entry(**entry) for entry in content["entries"]]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"--figures must be a file that `tritonattn model --measure` wrote; {path}: {error}") from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--measure", type=Path, metavar="FILE", help="compile, time on this machine's GPU, and write all figures there")
    what.add_argument("--figures", type=Path, metavar="FILE", help="score the model against figures measured before; needs no GPU")
    parser.add_argument("--kernel", default=",".join(search.KERNELS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--limit", type=int, default=0, metavar="N", help="at most N candidates a kernel (default: all)")
    parser.add_argument("--budget", type=float, default=3.5, metavar="MINUTES", help="no timing begins after that (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compiling processes (default: one a core)")
    parser.add_argument("--json", action="store_true")


def run(args: argparse.Namespace) -> int:
    start = time.monotonic()
    kernels, jobs = args.kernel.split(","), jobs_of(args)
    if wrong := [kernel for kernel in kernels if kernel not in search.KERNELS]:
        raise ValueError(f"--kernel must be among {', '.join(search.KERNELS)}; got {', '.join(wrong)}")
    if args.figures:
        arch, work, entries = load(args.figures)
        entries = [entry for entry in entries if work[entry.case].kernel in kernels]
        made = scores(entries, work, arch)
    else:
        arch = detect()
        if arch.simulated or not torch.cuda.is_available():
            raise ValueError("--measure needs a GPU; on a CPU there is --figures FILE")
        work = [case for case in cases() if case.kernel in kernels]
        worker = Worker(Timer, arch)

        def say(text: str) -> None:
            print(f"\r{text}".ljust(60), end="", file=sys.stderr, flush=True)

        try:
            entries = measure(arch, work, jobs, args.limit, start + 60 * args.budget, worker, say)
        finally:
            worker.close()
        print(file=sys.stderr)
        made = scores(entries, work, arch)
        save(args.measure, arch, work, entries, made, torch.cuda.get_device_name())
    if args.json:
        print(json.dumps([asdict(score) for score in made]))
        return 0
    print(f"cost model {model.VERSION} on {arch.name} ({arch.sku})")
    for score in made:
        print(score)
    for text, count in Counter(entry.refused for entry in entries if entry.refused).most_common(8):
        print(f"{count} not counted: {text[:140]}")
    return 0
