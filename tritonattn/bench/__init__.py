"""``tritonattn bench``: times side by side, each with its error, against other libraries and the card's own ceilings.

    tritonattn bench decode --row "B64 S8192 64/4"       one row, in seconds
    tritonattn bench --peers DIR --json now.json         every suite, with the peers in DIR
    tritonattn bench decode --base before.json           against an earlier run
    tritonattn bench decode --row "B1 S8192 64/4" --config BLOCK_N=128,num_warps=8
    tritonattn bench decode --row "B1 " --sweep candidates.json
"""

from __future__ import annotations

import argparse
import math
import time
from typing import Any

from tritonattn.bench.rows import SUITES, Row, select


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("suites", nargs="*", metavar="SUITE", help=f"{', '.join(SUITES)}; none: all")
    add("--row", action="append", default=[], metavar="NAME", help="rows of this name, or else containing it; repeatable")
    add("--only", default="", metavar="TEXT", help="calls with this text in their name")
    add("--peers", metavar="DIR", help="folder with other libraries' kernels")
    add("--base", metavar="FILE", help="compare with this earlier --json")
    add("--json", metavar="FILE", help="write the result")
    add("--picture", metavar="FILE", help="draw the result (needs matplotlib)")
    add("--config", default="", metavar="KEY=VALUE,...", help="replace values of the suite's tuning row, or KERNEL.KEY=VALUE of another's")
    add("--sweep", metavar="FILE", help="rank the configs of this JSON list, each laid over the tuning row")
    add("--show", metavar="FILE", help="show or draw this earlier --json, and time nothing")
    add("--cold", action="store_true", help="go round several sets of inputs, so that no cache holds them")
    add("--seconds", type=float, default=math.inf, metavar="N", help="begin no further row after so long")
    add("--list", action="store_true", help="print the rows and stop")
    add("--smoke", action="store_true", help="tiny sizes: do they run? the times mean nothing")


def run(args: argparse.Namespace) -> int:
    rows = select(args.suites, args.row)
    if args.list:
        for row in rows:
            print(f"{row.suite}: {row.name}")
        return 0
    from tritonattn.bench import report, sweep

    base = report.load(args.base) if args.base else None
    document = report.load(args.show) if args.show else _measure(rows, args)
    if any("candidates" in result for result in document["results"]):
        report.show_machine(document)
        sweep.show(document["results"])
        return 0
    report.show(document, base)
    if args.picture:
        from tritonattn.bench.picture import draw

        draw(document, args.picture)
    wrong = report.wrong(document["results"])
    if wrong:
        print("wrong results:", *wrong, sep="\n  ")
    return 1 if wrong else 0


def _measure(rows: list[Row], args: argparse.Namespace) -> dict[str, Any]:
    """The document of a run; with --json it is on disk after every row, for whoever is cut short."""
    import torch
    from rich.progress import Progress

    from tritonattn.bench import ahead, report, sweep
    from tritonattn.bench.machine import describe
    from tritonattn.bench.peers import Installed
    from tritonattn.bench.runner import parse_config, run_row
    from tritonattn.bench.timing import ceilings, reason

    begin = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not args.smoke:
        raise ValueError("bench needs a GPU; --smoke runs tiny sizes in the interpreter (TRITON_INTERPRET=1)")
    if args.smoke:
        rows = list(dict.fromkeys(row.smoke() for row in rows))
    peers, config = Installed(args.peers), parse_config(args.config)
    candidates = sweep.load(args.sweep) if args.sweep else {}
    document: dict[str, Any] = {
        "machine": describe(device), "ceilings": {} if args.smoke or args.sweep else ceilings(device), "meaningless": args.smoke,
        "cold": args.cold, "config": config, "configs": candidates, "missing peers": peers.missing, "results": [],
    }  # fmt: skip
    with Progress(transient=True) as progress:
        task = progress.add_task("compiling", total=len(rows))
        if device.type == "cuda":
            try:
                if candidates:
                    ahead.compile_rows(rows, device, None, candidates.values(), args.only or report.OURS)
                else:
                    ahead.compile_rows(rows, device, peers, [config], args.only)
            except Exception as error:  # it only saves time
                progress.console.print(f"not compiled ahead: {reason(error)}")
        for row in rows:
            if time.monotonic() - begin > args.seconds:
                document["left out"] = [f"{row.suite} {row.name}" for row in rows[len(document["results"]) :]]
                break
            progress.update(task, description=f"{row.suite} {row.name}")
            if candidates:
                document["results"].append(sweep.sweep_row(row, device, candidates, args.only))
            else:
                document["results"].append(run_row(row, device, peers, config, args.only, args.cold))
            if args.json:
                report.save(document, args.json)
            progress.advance(task)
    return document
