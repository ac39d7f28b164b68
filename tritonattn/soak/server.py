"""The host side of a server that never runs dry: requests, a pool of cache blocks with prefix reuse, and what each step computes."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from dataclasses import dataclass, field


@dataclass(eq=False)
class Request:
    """``computed`` of its ``tokens`` are in the cache; it ends when it has ``limit`` of them."""

    tokens: list[int]
    limit: int
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    published: int = 0  # of its blocks, the first so many are findable by what they hold
    prefix: int = 0  # the name of all that those hold


@dataclass(frozen=True)
class Slice:
    """Tokens ``start .. start + len(tokens)`` of a request in one step; the last ``drafts`` of them are guesses."""

    request: Request
    start: int
    tokens: list[int]
    drafts: int = 0

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


class Pool:
    """Blocks in random order. A full block stays findable by its tokens, and all before them, until its place is needed."""

    def __init__(self, count: int, block_size: int, rng: random.Random):
        self.block_size = block_size
        self.freed: list[int] = []
        """Blocks that hold nothing any more: to be poisoned before the next write."""
        self._free = rng.sample(range(count), count)
        self._users: Counter[int] = Counter()
        self._found: dict[int, int] = {}  # prefix -> block
        self._prefix: dict[int, int] = {}  # and back
        self._unused: OrderedDict[int, None] = OrderedDict()  # findable blocks without a user, oldest first

    def take(self) -> int | None:
        if not self._free and self._unused:
            block, _ = self._unused.popitem(last=False)
            del self._found[self._prefix.pop(block)]
            self._release(block)
        if not self._free:
            return None
        block = self._free.pop()
        self._users[block] = 1
        return block

    def match(self, request: Request) -> None:
        """Gives the request the blocks that hold the beginning of its tokens, but for the last one at least."""
        while (prefix := self._next_prefix(request, len(request.tokens) - 1)) in self._found:
            block = self._found[prefix]
            self._unused.pop(block, None)
            self._users[block] += 1
            request.blocks.append(block)
            request.published, request.prefix = len(request.blocks), prefix
        request.computed = len(request.blocks) * self.block_size

    def publish(self, request: Request) -> None:
        while prefix := self._next_prefix(request, request.computed):
            block = request.blocks[request.published]
            if prefix not in self._found:
                self._prefix[block], self._found[prefix] = prefix, block
            request.published, request.prefix = request.published + 1, prefix

    def drop(self, blocks: list[int]) -> None:
        for block in blocks:
            self._users[block] -= 1
            if self._users[block]:
                continue
            if block in self._prefix:
                self._unused[block] = None
            else:
                self._release(block)

    def _release(self, block: int) -> None:
        self._free.append(block)
        self.freed.append(block)

    def _next_prefix(self, request: Request, most: int) -> int:
        """The name of one block more, if it ends within the first ``most`` tokens; else 0."""
        begin = request.published * self.block_size
        end = begin + self.block_size
        return hash((request.prefix, *request.tokens[begin:end])) if end <= most else 0


@dataclass(frozen=True)
class Load:
    """How much of what arrives."""

    vocabulary: int
    blocks: int
    block_size: int
    longest: int  # tokens of a request
    budget: int  # tokens of a step
    running: int
    threshold: int = 1  # 1 + most drafts of a decode


class Server:
    """Arrivals, chunked prompts, speculated tokens that are taken back, preemption and the end of requests, by a seed."""

    def __init__(self, load: Load, seed: int):
        self.load, self.rng = load, random.Random(seed)
        self.pool = Pool(load.blocks, load.block_size, self.rng)
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.seen: Counter[str] = Counter()
        self._old: list[list[int]] = []

    def next(self) -> list[Slice]:
        """What the next step computes, in no particular order."""
        self._arrive()
        budget = self.load.budget
        slices: list[Slice] = []
        for request in self.rng.sample(self.running, len(self.running)):
            if request not in self.running:
                continue
            known = len(request.tokens) - request.computed
            drafts: list[int] = []
            if known == 1 and request.computed:
                room = min(self.load.threshold - 1, self.load.longest - len(request.tokens))
                drafts = self._draw(self.rng.randint(0, room))
            count = min(budget, known) if known > 1 else known + len(drafts)
            if not count or count > budget:
                continue
            if known > 1 and self.rng.random() < 0.3:
                count = self.rng.randint(1, count)
            if self._make_room(request, request.computed + count, [piece.request for piece in slices]):
                new = (request.tokens[request.computed :] + drafts)[:count]
                slices.append(Slice(request, request.computed, new, len(drafts)))
                budget -= count
        self.rng.shuffle(slices)
        return slices

    def finish(self, slices: list[Slice]) -> None:
        """Takes the step in: some drafts hold, one token more is drawn, and requests come to their end."""
        for piece in slices:
            request, accepted = piece.request, self.rng.randint(0, piece.drafts)
            self.seen["drafts taken back"] += piece.drafts - accepted
            request.computed = piece.stop - piece.drafts + accepted
            request.tokens += piece.tokens[len(piece.tokens) - piece.drafts :][:accepted]
            self.pool.publish(request)
            if request.computed == len(request.tokens):
                if len(request.tokens) >= request.limit:
                    self._end(request)
                else:
                    request.tokens += self._draw(1)

    def _arrive(self) -> None:
        while len(self.waiting) + len(self.running) < self.load.running and self.rng.random() < 0.5:
            length = round(self.load.longest ** self.rng.uniform(0, 1))
            tokens = self._draw(length)
            if self._old and self.rng.random() < 0.4:
                old = self.rng.choice(self._old)
                tokens = old[: self.rng.randint(1, len(old))] + tokens
            limit = min(len(tokens) + round(2 ** self.rng.uniform(0, 8)), self.load.longest)
            self.waiting.append(Request(tokens[:limit], limit))
            self.seen["arrived"] += 1
        while self.waiting and self.rng.random() < 0.8:
            request = self.waiting.pop()
            self.pool.match(request)
            self.seen["tokens found in the cache"] += request.computed
            self.running.append(request)

    def _make_room(self, request: Request, tokens: int, busy: list[Request]) -> bool:
        """Blocks for so many tokens, at the cost of requests that are not busy; False where that is not enough."""
        while len(request.blocks) * self.load.block_size < tokens:
            block = self.pool.take()
            if block is not None:
                request.blocks.append(block)
                continue
            others = [other for other in self.running if other is not request and other not in busy and other.blocks]
            if not others:
                return False
            self._preempt(self.rng.choice(others))
        return True

    def _preempt(self, request: Request) -> None:
        self.seen["preempted"] += 1
        self.running.remove(request)
        self.pool.drop(request.blocks)
        request.blocks, request.computed, request.published, request.prefix = [], 0, 0, 0
        self.waiting.append(request)

    def _end(self, request: Request) -> None:
        self.seen["finished"] += 1
        self.running.remove(request)
        self.pool.drop(request.blocks)
        self._old = [*self._old[-30:], request.tokens]

    def _draw(self, count: int) -> list[int]:
        return [self.rng.randrange(self.load.vocabulary) for _ in range(count)]
