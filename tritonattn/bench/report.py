"""What came out: a table, JSON, a comparison with an earlier run, a picture."""

from __future__ import annotations

import json
import math
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.table import Table

from tritonattn.console import console

OURS = "tritonattn"


def bound(result: dict[str, Any], ceilings: dict[str, float]) -> str:
    """Which ceiling holds the row: "flops" or "bytes"."""
    if not ceilings:
        return "flops" if result["flops"] > 200 * result["bytes"] else "bytes"
    return "flops" if result["flops"] / ceilings["matmul_flops"] > result["bytes"] / ceilings["copy_bytes"] else "bytes"


def rate(result: dict[str, Any], us: float, ceilings: dict[str, float]) -> str:
    """ "512 TFLOP/s 65 %" of the matmul rate, or "4.10 TB/s 95 %" of the copy rate: of what holds the row."""
    kind = bound(result, ceilings)
    speed = result[kind] / us * 1e6
    if not speed:
        return ""
    share = f" {speed / ceilings['matmul_flops' if kind == 'flops' else 'copy_bytes']:4.0%}" if ceilings else ""
    return (f"{speed / 1e12:.0f} TFLOP/s" if kind == "flops" else f"{speed / 1e12:.2f} TB/s") + share


def table(results: list[dict[str, Any]], ceilings: dict[str, float], base: dict[str, Any] | None = None) -> Table:
    """One line per call; `x` is the time of the call over that of the row's first one: above 1, the first is faster."""
    old = {(r["suite"], r["name"]): r["calls"] for r in base["results"]} if base else {}
    shown = Table(box=None, pad_edge=False)
    for name, style in (("row", "bold"), ("call", ""), ("kernel us", ""), ("±", "dim"), ("rate", ""), ("eager us", ""), ("host us", ""),
                        ("x", "bold"), ("error", "")):  # fmt: skip
        shown.add_column(name, style=style, justify="left" if name in ("row", "call") else "right", no_wrap=True)
    if base:
        shown.add_column("base us", justify="right")
        shown.add_column("base / now", justify="right", style="bold")
    for result in results:
        title = f"{result['suite']} {result['name']}"
        for i, (name, call) in enumerate(result["calls"].items()):
            cells = [title if i == 0 else "", name, *_cells(result, call, ceilings)]
            if base:
                before = old.get((result["suite"], result["name"]), {}).get(name, {}).get("us")
                now = call.get("us")
                cells += [f"{before:.1f}", f"{before / now:.3f}"] if before and now else ["", ""]
            shown.add_row(*cells)
    return shown


def _cells(result: dict[str, Any], call: dict[str, Any], ceilings: dict[str, float]) -> list[str]:
    if "refused" in call:
        return ["-", "", "", "", "", "", "none"]
    first = next((c["us"] for c in result["calls"].values() if "us" in c), call["us"])
    us, error = call["us"], "NaN" if call["error"] is None or math.isnan(call["error"]) else f"{call['error']:.1e}"
    return [
        f"{us:.1f}", f"{(call['high'] - call['low']) / us:.0%}", rate(result, us, ceilings), f"{call['eager_us']:.0f}",
        f"{call['host_us']:.0f}", f"{us / first:.2f}", f"[red]{error}" if call["wrong"] else error,
    ]  # fmt: skip


def wrong(results: list[dict[str, Any]]) -> list[str]:
    """Our calls whose error is beyond rounding."""
    return [
        f"{result['suite']} {result['name']}: {name}"
        for result in results for name, call in result["calls"].items() if name.startswith(OURS) and call.get("wrong")
    ]  # fmt: skip


def ratios(results: list[dict[str, Any]]) -> list[str]:
    """Per suite and peer, the geometric mean and the least of peer time over our first call's time."""
    seen: dict[tuple[str, str], list[float]] = {}
    for result in results:
        calls = result["calls"]
        first = next(iter(calls.values()))
        for name, call in calls.items():
            if not name.startswith(OURS) and "us" in call and "us" in first:
                seen.setdefault((result["suite"], name), []).append(call["us"] / first["us"])
    return [
        f"{suite}: {name} takes {statistics.geometric_mean(values):.2f}x our time over {len(values)} rows, at least {min(values):.2f}x"
        for (suite, name), values in seen.items()
    ]


def refusals(results: list[dict[str, Any]]) -> list[str]:
    """Why calls did not run."""
    return [
        f"{result['suite']} {result['name']}: {name}: {call['refused']}"
        for result in results for name, call in result["calls"].items() if "refused" in call
    ]  # fmt: skip


def cliffs(results: list[dict[str, Any]]) -> list[str]:
    """Neighbouring batch sizes of a `cliffs` row whose time grows faster than the batch by more than half."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for result in results:
        batch, _, rest = result["name"].partition(" ")
        first = next(iter(result["calls"].values()))
        if result["suite"] == "cliffs" and batch[1:].isdigit() and "us" in first:
            lines.setdefault(rest, []).append((int(batch[1:]), first["us"]))
    found = []
    for rest, points in lines.items():
        for (small, before), (large, after) in pairwise(sorted(points)):
            if after / before > 1.5 * large / small:
                found.append(f"cliff: {rest} from B{small} {before:.1f} us to B{large} {after:.1f} us")
    return found


def roomy(results: list[dict[str, Any]]) -> list[str]:
    """What a plan with room for more keys than there are costs, in the `graph` suite; more than twice is too much."""
    found = []
    for result in results:
        for name, call in result["calls"].items():
            tight, _, room = name.partition(" in ")
            if result["suite"] == "graph" and room and "us" in call and "us" in result["calls"].get(tight, {}):
                factor = call["us"] / result["calls"][tight]["us"]
                found.append(f"graph: {result['name']}, {tight}: room costs {factor:.2f}x{' - TOO MUCH' if factor > 2 else ''}")
    return found


def show_machine(document: dict[str, Any]) -> None:
    out, ceilings = console(), document["ceilings"]
    out.print(" · ".join(f"{name} {value}" for name, value in document["machine"].items()), highlight=False)
    if ceilings:
        copy, matmul = ceilings["copy_bytes"] / 1e12, ceilings["matmul_flops"] / 1e12
        out.print(f"copy {copy:.2f} TB/s, read and written · matmul {matmul:.0f} TFLOP/s")
    for name, why in document["missing peers"].items():
        out.print(f"no {name}: {why}", highlight=False)
    if document["cold"]:
        out.print("cold: the calls go round several sets of inputs")
    for name in document.get("left out", ()):
        out.print(f"out of time for {name}", highlight=False)
    if document["meaningless"]:
        out.print("[yellow]tiny sizes: the times mean nothing")


def show(document: dict[str, Any], base: dict[str, Any] | None = None) -> None:
    show_machine(document)
    out = console()
    out.print(table(document["results"], document["ceilings"], base))
    for line in (*refusals(document["results"]), *ratios(document["results"]), *cliffs(document["results"]), *roomy(document["results"])):
        out.print(line, highlight=False, markup=False)


def load(path: str) -> dict[str, Any]:
    """A file that `--json` wrote. ValueError if it is none."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        document["results"], document["ceilings"], document["machine"], document["cold"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} must be a file written by bench --json: {error}") from None
    return document


def save(document: dict[str, Any], path: str) -> None:
    """NaN is written as null, so that every JSON reader takes the file."""

    def plain(value):
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list):
            return [plain(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    Path(path).write_text(json.dumps(plain(document), indent=1), encoding="utf-8")
