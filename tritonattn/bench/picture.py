"""Bars of the rate of every call, a ceiling over them."""

from __future__ import annotations

from typing import Any

from tritonattn.bench.report import OURS, bound

REDS = ("#b03a2e", "#e59a90", "#f3cfc9")
OTHERS = ("#2c3e50", "#6f8196", "#a9b6c2", "#cfc3a5", "#9aa88a", "#d9dde1")


def draw(document: dict[str, Any], path: str) -> None:
    """One panel per suite and kind of limit, to `path` (any format that matplotlib writes). ImportError without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise ImportError("--picture needs matplotlib: pip install 'tritonattn[bench]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for result in document["results"]:
        if result["bytes"] and result["suite"] not in ("plan", "cliffs"):
            panels.setdefault((result["suite"], bound(result, document["ceilings"])), []).append(result)
    if not panels:
        raise ValueError("--picture: no row chosen has a rate to draw")
    names = list(dict.fromkeys(name for results in panels.values() for result in results for name in result["calls"]))
    names.sort(key=lambda name: not name.startswith(OURS))
    colour: dict[str, str] = {}
    for name in names:
        shades = REDS if name.startswith(OURS) else OTHERS
        colour[name] = shades[sum(known.startswith(OURS) == name.startswith(OURS) for known in colour) % len(shades)]
    heights = [0.9 + 0.65 * len(results) for results in panels.values()]
    figure, axes = pyplot.subplots(len(panels), figsize=(10, sum(heights)), squeeze=False, gridspec_kw={"height_ratios": heights})
    for ax, ((suite, kind), results) in zip(axes[:, 0], panels.items(), strict=True):
        _panel(ax, suite, kind, results, document["ceilings"], colour)
    figure.legend(*_legend(axes[:, 0]), loc="upper center", ncols=4, frameon=False)
    machine = document["machine"]
    figure.text(0.5, 0.001, " · ".join(machine[key] for key in ("device", "triton", "torch", "date")), ha="center", va="bottom", fontsize=8)
    figure.tight_layout(rect=(0, 0.02, 1, 1 - 0.6 / sum(heights)))
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _panel(ax, suite: str, kind: str, results: list[dict[str, Any]], ceilings: dict[str, float], colour: dict[str, str]) -> None:
    shown = list(dict.fromkeys(name for result in results for name, call in result["calls"].items() if "us" in call))
    if not shown:
        return
    thick = 0.8 / len(shown)
    for i, name in enumerate(shown):
        at = [(y, result["calls"][name]["us"]) for y, result in enumerate(results) if "us" in result["calls"].get(name, {})]
        rates = [results[y][kind] / us * 1e-6 for y, us in at]
        ax.barh([y - 0.4 + thick * (i + 0.5) for y, _ in at], rates, thick, label=name, color=colour[name])
    if ceilings:
        ax.axvline(ceilings["matmul_flops" if kind == "flops" else "copy_bytes"] / 1e12, color="black", linestyle="--", linewidth=1)
    ax.set_yticks(range(len(results)), [result["name"] for result in results], fontsize=8)
    ax.invert_yaxis()
    ax.set_title(f"{suite}, {'TFLOP/s; dashed: matmul' if kind == 'flops' else 'TB/s; dashed: copy'}", fontsize=9, loc="left")
    ax.spines[["top", "right"]].set_visible(False)


def _legend(axes):
    handles = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    return list(handles.values()), list(handles)
