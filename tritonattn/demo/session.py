"""One demo from the model file to the report: load, serve, check."""
from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import triton

from tritonattn.demo.attention import PlainAttention, RouterAttention
from tritonattn.demo.engine import Step, Verdict, check, serve
from tritonattn.demo.llama import Llama
from tritonattn.demo.scheduler import Blocks, Request, Scheduler
from tritonattn.demo.view import View
from tritonattn.demo.weights import Gguf, default_path

BLOCK_SIZE = 16
BUDGET = 52  # tokens a step: fewer than two of the default prompts, so that some are computed in chunks


def arrival(index: int) -> int:
    """The step at which a request arrives: two at once, then one a step."""
    return max(0, index - 1)


class Session:
    def __init__(self, path: Path | None, device: str, dtype: str, tie: float):
        if device == "cpu":
            torch.set_num_threads(1)  # a few dozen rows a step gain nothing from more, and lose much where cores are shared
        gguf = Gguf(path or default_path())
        self.chat = gguf.chat()
        self.model = Llama(gguf.config, gguf.weights(getattr(torch, dtype), torch.device(device)))
        self.tie = tie

    def run(self, prompts: Sequence[str], max_tokens: int, view: View) -> dict[str, Any]:
        """Serves the prompts together, then each one alone, and says how they compare; JSON-ready."""
        view.start(self._where(), prompts)
        if self.model.device.type != "cpu":
            for _ in self._serve(self._requests(prompts, max_tokens)):  # compiles, so that the timed run does not
                pass
        requests = self._requests(prompts, max_tokens)
        steps = []
        for step in self._serve(requests):
            steps.append(step)
            view.step(step, requests, [self.chat.decode(request.output) for request in requests])
        verdicts = [check(self.model, PlainAttention(), request, self.tie) for request in requests]
        report = self._report(prompts, requests, steps, verdicts)
        view.finish(report)
        return report

    def _requests(self, prompts: Sequence[str], max_tokens: int) -> list[Request]:
        return [Request(index, self.chat.encode(prompt), max_tokens, arrival(index)) for index, prompt in enumerate(prompts)]

    def _serve(self, requests: list[Request]):
        blocks = Blocks(sum(-(-request.most_tokens // BLOCK_SIZE) for request in requests), BLOCK_SIZE)
        attention = RouterAttention(self.model.config, blocks, self.model.dtype, self.model.device)
        return serve(self.model, attention, Scheduler(requests, blocks, BUDGET), self.chat.end)

    def _where(self) -> dict[str, str]:
        device = self.model.device
        return {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {self._stand_in()}",
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "torch": torch.__version__,
            "triton": triton.__version__,
        }

    @staticmethod
    def _stand_in() -> str:
        arch = os.environ.get("TRITONATTN_SIM")
        return f"simulated {arch}" if arch else "Triton's interpreter"

    def _report(self, prompts: Sequence[str], requests: list[Request], steps: list[Step], verdicts: list[Verdict]) -> dict[str, Any]:
        seconds = sum(step.seconds for step in steps)
        return self._where() | {
            "steps": [{"step": step.number, "seconds": step.seconds, "blocks_used": step.blocks_used, "requests": [
                {"request": piece.request.id, "path": path, "context": piece.start, "new_tokens": piece.count}
                for piece, path in zip(step.slices, step.paths, strict=True)]} for step in steps],
            "requests": [{"request": request.id, "prompt": prompt, "prompt_tokens": len(request.prompt), "tokens": request.output,
                          "text": self.chat.decode(request.output), "equal_tokens": verdict.equal, "largest_gap": max(verdict.gaps),
                          "passed": verdict.passed}
                         for prompt, request, verdict in zip(prompts, requests, verdicts, strict=True)],
            "seconds": seconds,
            "generated_tokens_per_s": sum(len(request.output) for request in requests) / seconds,
            "computed_tokens_per_s": sum(piece.count for step in steps for piece in step.slices) / seconds,
            "passed": all(verdict.passed for verdict in verdicts),
        }
