"""What the demo shows: a line per step with each request's path, the answers as they grow, and the check."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tritonattn.demo.engine import Step
from tritonattn.demo.scheduler import Request

COLOURS = {"prefill": "cyan", "extend": "magenta", "decode": "green"}
CELL = 14


class View:
    def __init__(self, quiet: bool = False):
        self._console = Console(quiet=quiet)
        self._live = Live(console=self._console, refresh_per_second=8)
        self._prompts: Sequence[str] = ()

    def __enter__(self) -> View:
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def start(self, where: dict[str, str], prompts: Sequence[str]) -> None:
        self._prompts = prompts
        self._console.print("[bold]SmolLM2-135M-Instruct[/] on", where["device"], "·", where["dtype"], "· triton", where["triton"],
                            "· torch", where["torch"], highlight=False)
        self._console.print("A cell is one request's part of the step: path, new tokens, and after @ the tokens its cache held.\n")
        names = "".join(f"request {index}".ljust(CELL) for index in range(len(prompts)))
        self._console.print(Text(f"step   {names}blocks   seconds", style="bold"))
        self._live.start()

    def step(self, step: Step, requests: Sequence[Request], texts: Sequence[str]) -> None:
        line = Text(f"{step.number:>4}   ")
        parts = {piece.request.id: (piece, path) for piece, path in zip(step.slices, step.paths, strict=True)}
        for request in requests:
            if request.id in parts:
                piece, path = parts[request.id]
                line.append(f"{path} {piece.count}@{piece.start}".ljust(CELL), COLOURS.get(path, ""))
            elif request.computed or request.arrival > step.number:
                line.append(" " * CELL)
            else:
                line.append("waits".ljust(CELL), "dim")
        line.append(f"{step.blocks_used:>6}   {step.seconds:7.3f}", "dim")
        self._console.print(line)
        self._live.update(self._answers(texts))

    def finish(self, report: dict[str, Any]) -> None:
        self._live.update(self._answers([request["text"] for request in report["requests"]]))
        self._live.stop()
        checks = Table("request", "tokens", "equal to the same request alone", "", title="\nCheck against plain float32 attention",
                       title_justify="left", title_style="bold", box=None, padding=(0, 3, 0, 0))
        for request in report["requests"]:
            tokens = len(request["tokens"])
            differs = request["equal_tokens"] < tokens
            checks.add_row(str(request["request"]), str(tokens), f"{request['equal_tokens']} of {tokens}"
                           + (f", largest logit gap {request['largest_gap']:.3g}" if differs else ""),
                           "[green]passed" if request["passed"] else "[red]FAILED")
        note = "  (no measure of any GPU)" if report["device"].startswith("CPU") else ""
        self._console.print(checks)
        self._console.print(f"\n{report['generated_tokens_per_s']:.1f} generated tokens/s, {report['computed_tokens_per_s']:.1f} computed "
                            f"tokens/s, {len(report['steps'])} steps in {report['seconds']:.1f} s{note}", highlight=False)

    def _answers(self, texts: Sequence[str]) -> Group:
        return Group(*(Text.assemble("\n", (prompt, "bold"), "\n", text) for prompt, text in zip(self._prompts, texts, strict=True)))
