"""``tritonattn bench``: times side by side, each with its error, against other libraries and the card's own ceilings.

    tritonattn bench decode --row "B64 S8192 64/4"       one row, in seconds
    tritonattn bench --peers DIR --json now.json         every suite, with the peers in DIR
    tritonattn bench decode --base before.json           against an earlier run
    tritonattn bench decode --row "B1 S8192 64/4" --config BLOCK_N=128,num_warps=8
    tritonattn bench decode --row "B1 S8192 64/4" --sweep candidates.json
"""

from __future__ import annotations

import argparse
from typing import Any

from tritonattn.bench.rows import SUITES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"{', '.join(SUITES)}; none: all")
    parser.add_argument("--row", action="append", default=[], metavar="NAME", help="rows of this name, or else containing it; repeatable")
    parser.add_argument("--peers", metavar="DIR", help="folder with other libraries' kernels")
    parser.add_argument("--base", metavar="FILE", help="compare with this earlier --json")
    parser.add_argument("--json", metavar="FILE", help="write the result")
    parser.add_argument("--config", default="", metavar="KEY=VALUE,...", help="replace values of the suite's tuning row")
    parser.add_argument("--list", action="store_true", help="print the rows and stop")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: do they run? the times mean nothing")


def run(args: argparse.Namespace) -> int:
    from tritonattn.bench.rows import select

    rows = select(args.suites, args.row)
    if args.list:
        for row in rows:
            print(f"{row.suite}: {row.name}")
        return 0
    from tritonattn.bench import report

    base = report.load(args.base) if args.base else None
    document = _measure(rows, args)
    report.show(document, base)
    if args.json:
        report.save(document, args.json)
    wrong = report.wrong(document["results"])
    if wrong:
        print("wrong results:", *wrong, sep="\n  ")
    return 1 if wrong else 0


def _measure(rows, args) -> dict[str, Any]:
    import torch
    from rich.progress import Progress

    from tritonattn.bench.machine import describe
    from tritonattn.bench.peers import Installed
    from tritonattn.bench.runner import parse_config, run_row
    from tritonattn.bench.timing import ceilings

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not args.smoke:
        raise ValueError("bench needs a GPU; --smoke runs tiny sizes in the interpreter (TRITON_INTERPRET=1)")
    peers = Installed(args.peers)
    config = parse_config(args.config)
    document = {
        "machine": describe(device), "ceilings": {} if args.smoke else ceilings(device), "meaningless": args.smoke, "config": config,
        "missing peers": peers.missing, "results": [],
    }  # fmt: skip
    with Progress(transient=True) as progress:
        if args.smoke:
            rows = list(dict.fromkeys(row.smoke() for row in rows))
        task = progress.add_task("bench", total=len(rows))
        for row in rows:
            progress.update(task, description=f"{row.suite} {row.name}")
            document["results"].append(run_row(row, device, peers, config))
            progress.advance(task)
    return document
