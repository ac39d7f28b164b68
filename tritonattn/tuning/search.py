"""`tritonattn tune`: sweep the configurations of a kernel for a model's shapes, and write the winners into the tables.

Each candidate of `space.json` is compiled in one of several processes, refused by the hard rules of `check`, ranked by the cost model;
with a GPU the promising ones are checked against the oracle and timed there, one at a time, the best by the model first; a process that
crashes or hangs costs its candidate alone. Outcomes go to a journal as they come,
so an interrupted sweep goes on where it stopped. A table file is replaced in one step.
"""

from __future__ import annotations

import argparse
import html
import itertools
import json
import math
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from tritonattn.explain import router_of
from tritonattn.plan import MAX_ROWS, power_of_two

from . import model, schema, table, trial
from .arch import Arch, assume, by_name, detect, nearest
from .cases import Case, cases
from .models import MODELS, Model, named_shape
from .worker import Worker, jobs_of, spread

KERNELS = ("prefill", "decode", "mla_decode")
MAX_LEN = 1 << 24  # tokens
PROMISING = 1.5  # timed: candidates predicted within this factor of the best prediction


def space(kernel: str, arch: Arch) -> list[dict[str, Any]]:
    """All candidates of a kernel: the product of the axes in space.json, for the arch or its nearest kin.

    Later axes have the last word: a form that fits one tile alone names all of it, and counts once.
    """
    axes = json.loads(Path(__file__).with_name("space.json").read_text(encoding="utf-8"))
    chosen = axes.get(arch.name) or axes[arch.table]
    configs = [{k: v for part in parts for k, v in part.items()} for parts in itertools.product(*chosen[kernel])]
    return list({json.dumps(config, sort_keys=True): config for config in configs}.values())


@dataclass(frozen=True)
class Sweep:
    """What to sweep, where, and what it may cost."""

    arch: Arch
    device: str | None  # None: without a GPU, ranked by the model
    folder: Path  # gets <arch>/<kernel>.json and the journal
    jobs: int = 1
    deadline: float = float("inf")  # of time.monotonic()
    trial_seconds: float = 180.0
    env: tuple[tuple[str, str], ...] = ()

    @property
    def journal(self) -> Path:
        return self.folder / self.arch.name / "tune.jsonl"

    def outcomes(self, case: Case) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """(config, outcome) of every candidate of a case, those in the journal first."""
        known = self._journalled()
        candidates = space(case.kernel, self.arch)
        waiting = []
        for config in candidates:
            past = known.get(self._key(case, config, None))
            if past is None and not self.arch.simulated:
                waiting.append(config)
            else:
                yield config, past or {}
        yield from self._run(case, waiting, None, self.jobs)

    def timed(self, case: Case, configs: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """(config, outcome) on the device, one at a time."""
        known = self._journalled()
        waiting = []
        for config in configs:
            past = known.get(self._key(case, config, self.device))
            if past is None:
                waiting.append(config)
            else:
                yield config, past
        yield from self._run(case, waiting, self.device, 1)

    def _run(self, case, configs, device, jobs) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        def new() -> Worker:
            return Worker(trial.start, env=dict(self.env))

        return spread(configs, jobs, new, lambda worker, config: self._one(worker, case, config, device))

    def _one(self, worker: Worker, case: Case, config: dict[str, Any], device: str | None) -> dict[str, Any]:
        left = self.deadline - time.monotonic()
        if left <= 0:
            return {"skipped": "the budget is spent"}
        found = worker(case, config, self.arch, device, self.device is not None, seconds=min(self.trial_seconds, left))
        if "refused" in found and time.monotonic() > self.deadline:
            return {"skipped": "the budget is spent"}
        self.journal.parent.mkdir(parents=True, exist_ok=True)
        with self.journal.open("a", encoding="utf-8") as out:
            out.write(json.dumps({"key": self._key(case, config, device), "found": found}) + "\n")
        return found

    def _journalled(self) -> dict[str, dict[str, Any]]:
        if not self.journal.is_file():
            return {}
        entries = [json.loads(line) for line in self.journal.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
        return {entry["key"]: entry["found"] for entry in entries}

    def _key(self, case: Case, config: dict[str, Any], device: str | None) -> str:
        return json.dumps([repr(case), config, self.arch.sku, self.arch.compute_units, device and _device_name(device), versions()["triton"]], sort_keys=True)


@dataclass(frozen=True)
class Winner:
    case: Case
    config: dict[str, Any]
    provenance: dict[str, Any]
    ranking: list[tuple[float, dict[str, Any]]]  # seconds, measured or predicted
    refused: int
    compute_units: int = 0  # the row holds for GPUs with so many; 0: for all of the arch

    @property
    def rows(self) -> int:
        """Query rows that share a KV head, 1 for prefill."""
        s = self.case.shape
        per_token = {"prefill": 0, "decode": s.num_heads // s.num_kv_heads, "mla_decode": s.num_heads}[self.case.kernel]
        return max(1, per_token * self.case.query_len)

    @property
    def units(self) -> int:
        """Programs of the call if no sequence is split."""
        return self.case.batch * (1 if self.case.kernel == "mla_decode" else self.case.shape.num_kv_heads) * -(-self.rows // MAX_ROWS)

    @property
    def when(self) -> dict[str, Any]:
        """The row's conditions but for load: the case's static facts, and as many query rows as fill the same tile."""
        s, case = self.case.shape, self.case
        layout = {"nhd": "plain", "hnd": "plain"}.get(case.layout, case.layout)
        when: dict[str, Any] = {"kv_dtype": case.kv_dtype or case.dtype, "kv_layout": layout}
        if case.kernel != "mla_decode":
            when = {"head_size": s.head_size, "v_head_size": s.v_head_size or s.head_size, "dtype": case.dtype, **when}
        if self.compute_units:
            when["compute_units"] = self.compute_units
        if case.kernel != "prefill":
            tile = max(16, power_of_two(self.rows))
            when["rows"] = {"max": 16} if tile == 16 else {"min": tile // 2 + 1, "max": tile} if tile <= MAX_ROWS else {"min": MAX_ROWS + 1}
        return when


def conditions(winners: list[Winner], arch: Arch) -> list[tuple[dict[str, Any], Winner]]:
    """The winners with the conditions of their rows: those that differ in load alone divide the loads among them, half way on a logarithmic
    scale. Of two that do not even differ in that, the first stays."""
    groups: dict[str, list[Winner]] = {}
    for winner in winners:
        groups.setdefault(json.dumps(winner.when), []).append(winner)
    found = []
    for group in groups.values():
        if group[0].case.kernel == "prefill":
            found.append((group[0].when, group[0]))
            continue
        by_load = {winner.units: winner for winner in reversed(group)}
        loads = sorted(by_load)
        cuts = [round(math.sqrt(a * b) / arch.compute_units, 4) for a, b in itertools.pairwise(loads)]
        for load, low, high in zip(loads, [None, *cuts], [*cuts, None], strict=True):
            bounds = {name: cut for name, cut in (("min", low), ("max", high)) if cut is not None}
            winner = by_load[load]
            found.append(({**winner.when, **({"units_per_cu": bounds} if bounds else {})}, winner))
    return found


def versions() -> dict[str, str]:
    import torch
    import triton

    return {"triton": triton.__version__, "torch": torch.__version__}


def _device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "CPU interpreter"


def _driver() -> dict[str, str]:
    """The kernel driver, where Linux tells."""
    for name in ("amdgpu", "nvidia"):
        module = Path("/sys/module") / name
        if (module / "version").is_file():
            return {"driver": f"{name} {(module / 'version').read_text().strip()}"}
        if module.is_dir():
            return {"driver": f"{name} of Linux {platform.release()}"}
    return {}


def search(sweep: Sweep, case: Case, say) -> Winner | None:
    """The best candidate of a case, or None where none was accepted in time."""
    predicted: list[tuple[float, dict[str, Any]]] = []
    refused = skipped = 0
    reasons: Counter[str] = Counter()
    for config, found in sweep.outcomes(case):
        refused += "refused" in found
        reasons.update(found.get("refused", ()))
        skipped += "skipped" in found
        if "refused" not in found and "skipped" not in found:
            predicted.append((found.get("predicted", 0.0), config))
        best = min((seconds for seconds, _ in predicted), default=0.0)
        say(f"{len(predicted)} accepted, {refused} refused, {skipped} not tried" + (f", best {best * 1e3:.3f} ms by the model" if best else ""))
    predicted.sort(key=lambda entry: entry[0])
    ranking = predicted
    provenance: dict[str, Any] = {"kind": "modelled", "model": f"{model.VERSION}: {model.KNOWN_ERROR}", **versions()}
    if sweep.device is not None:
        limit = PROMISING * predicted[0][0] if predicted else 0.0
        ranking = []
        for config, found in sweep.timed(case, [config for seconds, config in predicted if seconds <= limit]):
            if "seconds" in found:
                ranking.append((found["seconds"], config))
            refused += "refused" in found
            reasons.update(found.get("refused", ()))
            say(f"{len(ranking)} timed" + (f", best {min(s for s, _ in ranking) * 1e6:.1f} us" if ranking else ""))
        ranking.sort(key=lambda entry: entry[0])
        provenance = {"kind": "measured", "device": _device_name(sweep.device), **_driver(), **versions()}
    if not ranking:
        say(f"none accepted, {refused} refused, {skipped} not tried" + "".join(f"; most often: {why}" for why, _ in reasons.most_common(1)))
        return None
    margin = ranking[1][0] / ranking[0][0] - 1 if len(ranking) > 1 else 0.0
    provenance |= {"date": date.today().isoformat(), "note": f"tritonattn tune: {case}", "runner_up_margin": round(margin, 4)}
    if provenance["kind"] == "measured":
        provenance["microseconds"] = round(ranking[0][0] * 1e6, 2)
    usual = nearest(sweep.arch.name).compute_units  # a SKU, or a partition, of another size gets rows of its own
    return Winner(case, ranking[0][1], provenance, ranking, refused, 0 if sweep.arch.compute_units == usual else sweep.arch.compute_units)


def write(sweep: Sweep, kernel: str, winners: list[Winner]) -> Path:
    """New rows in front of those that were in force; rows of the same conditions are replaced. Atomic."""
    path = sweep.folder / sweep.arch.name / f"{kernel}.json"
    fresh = [{"when": when, "config": w.config, "provenance": w.provenance} for when, w in conditions(winners, sweep.arch)]
    kept = []
    for row in table.rows(kernel, sweep.arch):
        old = {"when": dict(row.when), "config": dict(row.config), "provenance": dict(row.provenance)}
        if row.accepts:
            old["accepts"] = dict(row.accepts)
        origin = row.where.split("/")[0]
        if origin != sweep.arch.name:
            note = f"taken over from {origin}, untuned here: {old['provenance']['note']}"
            old["provenance"] = {"kind": "default", "note": note}
        if all(old["when"] != new["when"] for new in fresh):
            kept.append(old)
    content = {"schema": 1, "arch": sweep.arch.name, "kernel": kernel, "rows": [*fresh, *kept]}
    faults = schema.errors(content)
    if faults:
        raise table.TableError(f"{path} would not be valid: " + "; ".join(faults))
    body = ",\n".join("    " + json.dumps(row) for row in (*fresh, *kept))
    head = f'{{\n  "schema": 1, "arch": {json.dumps(sweep.arch.name)}, "kernel": {json.dumps(kernel)},\n  "rows": [\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".json.new")
    temporary.write_text(head + body + "\n  ]\n}\n", encoding="utf-8")
    os.replace(temporary, path)
    table.forget()
    return path


def report(path: Path, title: str, winners: list[Winner]) -> None:
    """A page with the landscape of each case: where the winner is, and how flat the top."""
    parts = [f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title><style>body{{font:14px sans-serif;margin:2em}}"
             "td{padding:1px 8px;font:12px monospace}.b{background:#47a;height:10px}</style>", f"<h1>{html.escape(title)}</h1>"]  # fmt: skip
    for winner in winners:
        best = winner.ranking[0][0]
        kind = winner.provenance["kind"]
        near = sum(seconds < 1.05 * best for seconds, _ in winner.ranking)
        parts.append(f"<h2>{html.escape(f'{winner.case.kernel}: {winner.case}')}</h2><p>{kind}; {near} of {len(winner.ranking)} within 5 % "
                     f"of the best, {winner.refused} refused</p><table>")  # fmt: skip
        for seconds, config in winner.ranking[:40]:
            width = int(300 * best / seconds)
            parts.append(f"<tr><td>{seconds * 1e6:.1f} us<td><div class=b style='width:{width}px'></div>"
                         f"<td>{html.escape(json.dumps(config))}</tr>")  # fmt: skip
        parts.append("</table>")
    path.write_text("\n".join(parts), encoding="utf-8")


def chosen_cases(kernel: str, shape: Model | None, args: argparse.Namespace) -> list[Case]:
    """The cases to sweep: the standing ones, or those of one shape."""
    if shape is None:
        return list(dict.fromkeys(cases(kernel)))
    kv_dtypes, batches = [args.kv_dtype], _integers("--batch", args.batch)
    if kernel == "prefill":
        return [Case(kernel, shape, batch=4, query_len=args.query_len or 4096, kv_len=args.query_len or 4096)]
    if kernel == "mla_decode":
        made = [Case(kernel, shape, kv_dtype=d, layout="latent", block_size=64) for d in kv_dtypes] if shape.is_mla else []
    elif shape.is_mla:
        made = []
    else:
        made = [Case(kernel, shape, kv_dtype=d, layout=layout) for layout in args.kv_layout.split(",") for d in kv_dtypes]
    return [replace(case, batch=batch, query_len=args.query_len or 1, kv_len=args.kv_len) for case in made for batch in batches]


def check_case(case: Case, arch: Arch) -> None:
    """ValueError or TypeError, as the ops would say it, for what they refuse."""
    lengths = {"--query-len": case.query_len, "--kv-len": case.kv_len}
    wrong = [f"{name} must be from 1 to {MAX_LEN}, got {n}" for name, n in lengths.items() if not 1 <= n <= MAX_LEN]
    if case.query_len > case.kv_len:
        wrong.append(f"--kv-len counts the query tokens too: it must be at least --query-len, {case.query_len}, got {case.kv_len}")
    if wrong:
        raise ValueError("; ".join(wrong))
    shape = case.shape if case.layout == "latent" or not case.shape.is_mla else replace(case.shape, latent=0, rope=0)
    with assume(arch):
        router_of(shape, arch, case.dtype, case.kv_dtype, "nhd" if case.layout == "dense" else case.layout, case.block_size)


def _integers(name: str, text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
        if min(found) < 1:
            raise ValueError
    except ValueError:
        raise ValueError(f"{name} must be positive integers separated by commas, got {text!r}") from None
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kernel", default=",".join(KERNELS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--arch", help="arch or SKU (default: the GPU of this machine)")
    parser.add_argument("--offline", action="store_true", help="no GPU: rank by the cost model, rows marked modelled")
    parser.add_argument("--model", help=f"one of: {', '.join(MODELS)}")
    parser.add_argument("--shape", help="64/4x128: query heads / KV heads x head size [/ that of V]")
    parser.add_argument("--kv-layout", default="nhd,preshuffled", help="of decode (default: %(default)s)")
    parser.add_argument("--kv-dtype", default="", choices=("", "fp8"))
    parser.add_argument("--batch", default="1,16,128", help="of decode, comma-separated: each gets its range of loads (default: %(default)s)")
    parser.add_argument("--kv-len", type=int, default=8192, help="of decode (default: %(default)s)")
    parser.add_argument("--query-len", type=int, default=0, help="tokens (default: 4096 for prefill, 1 for decode)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of tables to write (default: those in use)")
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="MINUTES")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compiling processes (default: one a core)")
    parser.add_argument("--dry-run", action="store_true", help="say what would be swept, and stop")
    parser.add_argument("--report", type=Path, metavar="FILE.html", help="write the landscape as a page")
    parser.add_argument("--json", action="store_true")


def run(args: argparse.Namespace) -> int:
    import torch

    here = detect()
    arch = by_name(args.arch) if args.arch else here
    device = None if args.offline else ("cpu" if here.simulated else "cuda")
    if device and arch.name != here.name:
        raise ValueError(f"this machine has {here.name}, not {arch.name}: tune there, or rank by the model with --offline")
    if args.offline and arch.simulated:
        raise ValueError("--offline needs --arch: the one whose code is to be compiled and ranked")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("torch finds no GPU to time on: rank by the model with --offline")
    jobs = jobs_of(args)
    if not args.budget > 0:
        raise ValueError(f"--budget must be above 0, got {args.budget}")
    kernels = args.kernel.split(",")
    wrong = [kernel for kernel in kernels if kernel not in KERNELS]
    if wrong:
        raise ValueError(f"--kernel must be among {', '.join(KERNELS)}; got {', '.join(wrong)}")
    shape = named_shape(args.shape, args.model)
    folder = args.out or table.folders()[0]
    work = {kernel: chosen_cases(kernel, shape, args) for kernel in kernels}
    if not any(work.values()):
        raise ValueError(f"--kernel {args.kernel} has nothing to sweep for {args.shape or args.model}: mla_decode is for MLA models, decode for others")
    if shape is not None:
        for case in itertools.chain(*work.values()):
            check_case(case, arch)
    if args.dry_run:
        for kernel, found in work.items():
            for case in found:
                print(f"{kernel}: {case}: {len(space(kernel, arch))} candidates")
        print(f"rows would go to {folder}/{arch.name}/; {'timed on ' + _device_name(device) if device else 'ranked by the cost model'}")
        return 0
    deadline = time.monotonic() + 60 * args.budget
    env = () if device == "cpu" else (("TRITON_INTERPRET", "0"),)
    sweep = Sweep(arch, device, folder, jobs, deadline, env=env)
    winners: list[Winner] = []
    for kernel, found in work.items():
        best = []
        for case in found:
            winner = search(sweep, case, lambda text, case=case: print(f"\r{case}: {text}".ljust(120), end="", file=sys.stderr, flush=True))
            print(file=sys.stderr)
            if winner is None:
                print("its rows stay", file=sys.stderr)
            else:
                best.append(winner)
        if best:
            print(f"wrote {write(sweep, kernel, best)}", file=sys.stderr)
        winners += best
    if args.report:
        report(args.report, f"tritonattn tune on {arch.name}", winners)
    if args.json:
        print(json.dumps([{"case": str(w.case), "when": w.when, "config": w.config, "provenance": w.provenance} for w in winners]))
    return 0 if winners else 1
