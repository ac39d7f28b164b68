"""Continuous batching in small: who gets how many tokens of the next step, and which cache blocks hold them."""
from __future__ import annotations

import random
from dataclasses import dataclass, field


@dataclass
class Request:
    """``computed`` of its ``tokens`` (prompt, then what was generated) are in the cache, in the blocks ``blocks``."""

    id: int
    prompt: list[int]
    max_tokens: int
    arrival: int = 0  # the first step that may serve it
    output: list[int] = field(default_factory=list)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    finished: bool = False

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def most_tokens(self) -> int:
        """The last generated token is never fed back, so it takes no slot."""
        return len(self.prompt) + self.max_tokens - 1


@dataclass(frozen=True)
class Slice:
    """The tokens ``start .. start + count`` of one request, computed in one step."""

    request: Request
    start: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.count

    @property
    def samples(self) -> bool:
        """The step that reaches the last known token yields the next one."""
        return self.stop == len(self.request.tokens)


class Blocks:
    """A pool of cache blocks. Shuffled at the start, as any pool is after an hour of serving."""

    def __init__(self, count: int, block_size: int):
        self.count, self.block_size = count, block_size
        self._free = list(range(count))
        random.Random(0).shuffle(self._free)

    @property
    def used(self) -> int:
        return self.count - len(self._free)

    def needed(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def take(self, count: int) -> list[int] | None:
        """``count`` blocks, or None where fewer are free."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def give_back(self, blocks: list[int]) -> None:
        self._free += blocks


class Scheduler:
    """First come, first served, ``budget`` tokens a step: running requests first, then what waits, its prompt in chunks.

    A request is let in once the pool holds all it can come to need, so none is ever thrown out halfway.
    """

    def __init__(self, requests: list[Request], blocks: Blocks, budget: int):
        for request in requests:
            needed = blocks.needed(request.most_tokens)
            if needed > blocks.count:
                raise ValueError(f"request {request.id} needs {needed} cache blocks, the pool has {blocks.count}")
        self.blocks, self.budget, self.step = blocks, budget, 0
        self._waiting = sorted(requests, key=lambda request: request.arrival)
        self._running: list[Request] = []

    @property
    def done(self) -> bool:
        return not (self._waiting or self._running)

    def next(self) -> list[Slice]:
        """The slices of the next step; empty while all that is left has yet to arrive."""
        left = self.budget
        slices: list[Slice] = []
        for request in self._running:
            left -= self._add(slices, request, left)
        while left and self._waiting and self._waiting[0].arrival <= self.step:
            taken = self.blocks.take(self.blocks.needed(self._waiting[0].most_tokens))
            if taken is None:
                break
            request = self._waiting.pop(0)
            request.blocks = taken
            self._running.append(request)
            left -= self._add(slices, request, left)
        self.step += 1
        return slices

    @staticmethod
    def _add(slices: list[Slice], request: Request, left: int) -> int:
        count = min(left, len(request.tokens) - request.computed)
        if count:
            slices.append(Slice(request, request.computed, count))
        return count

    def finish_step(self, slices: list[Slice], sampled: list[int], end: int) -> None:
        """Takes in the step's result: ``sampled`` holds one token for each slice that samples, in order."""
        new = iter(sampled)
        for piece in slices:
            request, samples = piece.request, piece.samples
            request.computed = piece.stop
            if samples:
                request.output.append(next(new))
                request.finished = request.output[-1] == end or len(request.output) == request.max_tokens
            if request.finished:
                self._running.remove(request)
                self.blocks.give_back(request.blocks)
                request.blocks = []
