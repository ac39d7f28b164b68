"""The serving loop, and the check of what it served."""
from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from tritonattn.demo.attention import Attention
from tritonattn.demo.llama import Llama
from tritonattn.demo.scheduler import Request, Scheduler, Slice


@dataclass(frozen=True)
class Step:
    """One forward pass over the new tokens of several requests."""

    number: int
    slices: list[Slice]
    paths: list[str]
    seconds: float
    blocks_used: int


def serve(model: Llama, attention: Attention, scheduler: Scheduler, end: int) -> Iterator[Step]:
    """Runs the scheduler dry with greedy sampling; ``end`` is the token that ends a request. Yields after each step."""
    while not scheduler.done:
        slices = scheduler.next()
        if not slices:
            continue
        started = time.perf_counter()
        blocks_used = scheduler.blocks.used
        paths = attention.begin(slices)
        sampled = forward(model, attention, slices).argmax(-1).tolist()
        scheduler.finish_step(slices, sampled, end)
        yield Step(scheduler.step - 1, slices, paths, time.perf_counter() - started, blocks_used)


def forward(model: Llama, attention: Attention, slices: list[Slice]) -> torch.Tensor:
    """Logits of the last token of each slice that samples."""
    tokens: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    for piece in slices:
        tokens += piece.request.tokens[piece.start:piece.stop]
        positions += range(piece.start, piece.stop)
        if piece.samples:
            rows.append(len(tokens) - 1)
    flat = (torch.tensor(integers, device=model.device, dtype=torch.int64) for integers in (tokens, positions, rows))
    return model.logits(attention, *flat)


@dataclass(frozen=True)
class Verdict:
    """``gaps[i]``: how far the logit of output token i lies below the best one when the request runs alone. 0: it is the best."""

    gaps: list[float]
    tie: float

    @property
    def equal(self) -> int:
        return sum(gap == 0 for gap in self.gaps)

    @property
    def passed(self) -> bool:
        return bool(self.gaps) and max(self.gaps) <= self.tie


def check(model: Llama, attention: Attention, served: Request, tie: float) -> Verdict:
    """Runs one served request alone and compares every token.

    Each token is judged after the tokens that were served before it. While all are equal that is the request's own greedy
    run; a token that differs passes only within ``tie`` (0 in float32: none may).
    """
    alone = replace(served, output=[], computed=0, blocks=[])
    gaps = []
    for token in served.output:
        piece = Slice(alone, alone.computed, len(alone.tokens) - alone.computed)
        attention.begin([piece])
        logits = forward(model, attention, [piece])[0]
        best = int(logits.argmax())
        gaps.append(0.0 if best == token else float(logits[best] - logits[token]))
        alone.computed = piece.stop
        alone.output.append(token)
    return Verdict(gaps, tie)
