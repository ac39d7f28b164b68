"""`tritonattn check`: compile what every table row leads to, without a GPU, and judge the code.

Each kernel's representative calls go through the public ops on CPU tensors; what they launch is compiled for the arch and read. A
row that no standing call reaches gets one made to its conditions. Exit code 1 when any row's code is refused. With --execute the same
rows also run in the simulator, on small data with known answers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from . import cases, codegen, schema, table
from .arch import Arch, by_name


@dataclass(frozen=True)
class Verdict:
    """What one row leads to in one call."""

    kernel: str
    row: str  # where the row stands
    case: cases.Case
    launch: codegen.Launch
    report: codegen.Report
    reasons: list[str]  # why it must not ship
    accepted: list[str]  # what the row owns up to, within the limits that it sets itself

    @property
    def work(self) -> tuple[float, str] | None:
        """Wave-instructions of the main loop per unit of work, and the unit."""
        loop, tile = self.report.main, self.launch.constexprs
        if loop is None or not loop.matrix:
            return None
        instructions = loop.instructions * self.report.num_warps
        if self.kernel == "prefill":
            return instructions / (tile["BLOCK_M"] * tile["BLOCK_N"]), "row and key"
        if self.kernel.startswith("mla_decode"):
            return instructions / (tile["ROWS"] * tile["BLOCK_N"]), "head and key"
        return instructions / tile["BLOCK_N"], "key of a KV head"

    def facts(self) -> dict[str, Any]:
        """All of it as plain data."""
        loops = [{name: value for name, value in vars(loop).items() if name != "body"} for loop in self.report.loops]
        report = {name: value for name, value in vars(self.report).items() if name not in ("loops", "kernel", "constexprs")}
        work = self.work
        return {
            "kernel": self.kernel,
            "entry": self.report.kernel,
            "row": self.row,
            "case": str(self.case),
            "reasons": self.reasons,
            "accepted": self.accepted,
            "work": work and {"wave_instructions": round(work[0], 4), "per": work[1]},
            **report,
            "constexprs": {name: value if isinstance(value, int | str) else str(value) for name, value in self.report.constexprs.items()},
            "main": self.report.loops.index(self.report.main) if self.report.main else None,
            "loops": loops,
        }


def verdicts(arch: Arch, kernel: str) -> Iterator[Verdict]:
    """Every row of a kernel's table through at least one call. A row that cannot be reached raises table.TableError."""
    reached = set()
    for case in cases.cases(kernel):
        for verdict in judge_case(arch, case):
            reached.add(verdict.row)
            yield verdict
    for row in table.rows(kernel, arch):
        if row.where in reached:
            continue
        yield judge_case(arch, case_for(arch, kernel, row))[0]


def case_for(arch: Arch, kernel: str, row: table.Row) -> cases.Case:
    """A call that leads to a row of the kernel's table: a standing one, or one made to its conditions. TableError if there is none."""
    standing = list(cases.cases(kernel))
    for case in (*standing, *(cases.meeting(case, row.when, arch) for case in standing)):
        watched, found = table.watch(arch)
        with codegen.capture(watched, dry=True):
            cases.run(case, watched)
        if (kernel, row.where) in [(asked, row.where) for asked, row in found]:
            return case
    raise table.TableError(f"{row.where}: no call reaches it; rows before it take all that it describes")


def judge_case(arch: Arch, case: cases.Case) -> list[Verdict]:
    """Run one case on a stand-in for the arch."""
    watched, found = table.watch(arch)
    with codegen.capture(watched) as launches:
        cases.run(case, watched)
    row = next((row for kernel, row in found if kernel == case.kernel), None)
    if row is None:
        return []
    names = cases.ENTRY_POINTS[case.kernel]
    seen: dict[str, Verdict] = {}
    for launch in launches:
        if launch.kernel in names and launch.key not in seen:
            report = codegen.read(launch)
            seen[launch.key] = Verdict(case.kernel, row.where, case, launch, report, *_judge(report, arch, case.kernel, row))
    return list(seen.values())


def _judge(report: codegen.Report, arch: Arch, kernel: str, row: table.Row) -> tuple[list[str], list[str]]:
    """What speaks against the code, and what of it the row has owned up to."""
    needs_matrix = kernel in cases.EXPECT_MATRIX
    found = codegen.judge(report, arch, needs_matrix)
    if not row.accepts:
        return found, []
    refused = codegen.judge(report, arch, needs_matrix, row.accepts["limits"])
    owned = [reason for reason in found if reason not in refused]
    return refused, [f"{'; '.join(owned)} ({row.accepts['reason']})"] if owned else []


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kernels = schema.tables()["properties"]["kernel"]["enum"]
    parser.add_argument("--arch", default="gfx942,gfx950", help="comma-separated arches or SKUs (default: %(default)s)")
    parser.add_argument("--kernel", default=",".join(kernels), help="comma-separated kernels (default: all)")
    parser.add_argument("--execute", action="store_true", help="also run each row's machine code in the simulator and compare with float64")
    parser.add_argument("--peers", metavar="DIR", help="instead: compare with other libraries' kernels in this folder (a package vllm)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(args: argparse.Namespace) -> int:
    arches = [by_name(name.strip()) for name in args.arch.split(",")]
    if args.peers:
        return _peers(args.peers, arches, args.json)
    known = schema.tables()["properties"]["kernel"]["enum"]
    kernels = [name.strip() for name in args.kernel.split(",")]
    unknown = [name for name in kernels if name not in known]
    if unknown:
        raise ValueError(f"--kernel must be among {', '.join(known)}; got {', '.join(unknown)}")
    if len(arches) > 1:
        return _each_apart(args)
    [arch] = arches
    found = []
    for kernel in kernels:
        for verdict in verdicts(arch, kernel):
            found.append(verdict)
            print(f"{arch.name} {verdict.kernel}: {verdict.case}{_execute(verdict, arch) if args.execute else ''}", file=sys.stderr, flush=True)
    if args.json:
        print(json.dumps({"triton": _triton_version(), "results": {arch.sku: [verdict.facts() for verdict in found]}}))
    else:
        _print(arch.sku, found)
    return int(any(verdict.reasons for verdict in found))


def _each_apart(args: argparse.Namespace) -> int:
    """Each arch in a process of its own, as many at a time as there are cores. Triton 3.6 compiles for a second arch with what it knows of the
    first: on gfx950 it then emulates conversions that the hardware has."""
    command = [sys.executable, "-m", "tritonattn", "check", "--kernel", args.kernel, *["--execute"] * args.execute, *["--json"] * args.json]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    def check(name: str) -> subprocess.CompletedProcess:
        return subprocess.run([*command, "--arch", name], env=env, stdout=subprocess.PIPE, text=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        done = list(pool.map(check, args.arch.split(",")))
    if args.json and not any(one.returncode > 1 for one in done):
        parts = [json.loads(one.stdout) for one in done]
        print(json.dumps({**parts[0], "results": {sku: found for part in parts for sku, found in part["results"].items()}}))
    else:
        print("\n".join(one.stdout for one in done), end="")
    return max(one.returncode for one in done)


def _peers(folder: str, arches: list[Arch], as_json: bool) -> int:
    from .peer_code import compare, show

    found = {arch.sku: list(compare(folder, arch)) for arch in arches}
    if as_json:
        print(json.dumps({"triton": _triton_version(), "results": {sku: [vars(c) for c in rows] for sku, rows in found.items()}}))
    else:
        show(found)
    return 0


def _execute(verdict: Verdict, arch: Arch) -> str:
    """Run the row in the simulator; what is wrong joins the reasons against it."""
    from tritonattn.simulator.rows import execute

    row = next(row for row in table.rows(verdict.kernel, arch) if row.where == verdict.row)
    done = execute(verdict.case, arch, row)
    verdict.reasons.extend(done.reasons)
    return f"; executed {done.instructions} instructions, off by {done.error:.2g} (allowed {done.allowed:.2g})"


def _triton_version() -> str:
    import triton

    return triton.__version__


_WHOLE = ("row", "call", "loop", "regs", "spill", "LDS", "occ")  # of the kernel; the rest is by loop
_COLUMNS = (*_WHOLE, "instr", "matrix", "vector", "LDS r/w", "loads", "barrier", "wait", "acc", "per unit")


def _print(sku: str, found: list[Verdict]) -> None:
    from rich.table import Table

    from tritonattn.console import console

    out = console()
    grid = Table(title=f"{sku} ({found[0].report.arch}), Triton {_triton_version()}: compiled and counted, nothing timed", title_justify="left")
    for name in _COLUMNS:
        grid.add_column(name, justify="left" if name in ("row", "call", "loop") else "right", overflow="fold")
    for verdict in found:
        for cells in _rows(verdict):
            grid.add_row(*cells, style=None if not verdict.reasons else "red")
        for reason in verdict.reasons:
            grid.add_row("", f"[red]refused: {reason}[/red]", *[""] * (len(_COLUMNS) - 2))
        for reason in verdict.accepted:
            grid.add_row("", f"[yellow]accepted: {reason}[/yellow]", *[""] * (len(_COLUMNS) - 2))
    out.print(grid)
    bad = sum(bool(verdict.reasons) for verdict in found)
    named = sum(bool(verdict.accepted and not verdict.reasons) for verdict in found)
    kinds = [f"{len(found) - bad - named} of {len(found)} clean"]
    kinds += [f"[yellow]{named} accepted with a reason in the row[/yellow]"] * (named > 0) + [f"[red]{bad} refused[/red]"] * (bad > 0)
    out.print(", ".join(kinds))


def _rows(verdict: Verdict) -> Iterator[tuple[str, ...]]:
    """The table cells of one verdict: a line for each loop, the main one first."""
    report, work = verdict.report, verdict.work
    registers = f"{report.vector_registers}+{report.accumulator_registers}"
    spills = f"{report.spills}+{report.scalar_spills}/{report.scratch}"
    whole = (registers, spills, f"{report.lds / 1024:.0f}K" if report.lds else "0", f"{report.occupancy:g}")
    if not report.loops:
        yield (verdict.row, str(verdict.case), "", *whole, *[""] * (len(_COLUMNS) - len(_WHOLE)))
    for i, loop in enumerate(sorted(report.loops, key=lambda loop: loop is not report.main)):
        first = (verdict.row, str(verdict.case)) if i == 0 else ("", "")
        yield (
            *first,
            "main" if loop is report.main else "other",
            *(whole if i == 0 else ("",) * 4),
            str(loop.instructions),
            str(loop.matrix),
            str(loop.vector),
            f"{_widths(loop.lds_reads)}/{_widths(loop.lds_writes)}",
            _widths(loop.global_loads) + (f" to LDS {_widths(loop.lds_copies)}" if loop.lds_copies else ""),
            str(loop.barriers),
            str(loop.waits),
            str(loop.accumulator_moves),
            f"{work[0]:.3g} per {work[1]}" if work and loop is report.main else "",
        )


def _widths(counts) -> str:
    """{16: 8, 4: 2} as "8x16 2x4": count x bytes per lane."""
    return " ".join(f"{n}x{width}" for width, n in sorted(counts.items(), reverse=True)) or "0"
