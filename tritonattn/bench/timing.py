"""Time on a GPU, and the ceilings of the one at hand.

Work under `GRAPH_LIMIT` microseconds is captured several times into one graph and the graph replayed, so that launching costs nothing;
longer work is timed call by call between events, after writes that empty the last-level cache and let the host run ahead.
Contenders take turns, so that a clock that drifts moves all of them.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

GRAPH_LIMIT = 200.0  # microseconds
GRAPH_MICROSECONDS = 2000.0  # of work in one graph: what starting it takes does not show
ROUNDS = 3
ROUND_SECONDS = 0.06  # of each contender
FLUSH_BYTES = 256 << 20


@dataclass(frozen=True)
class Timing:
    """Microseconds. `us` is the median of kernel time, `low` and `high` its 20th and 80th percentile."""

    us: float
    low: float
    high: float
    eager_us: float  # one of many eager calls in a row, whichever of host and device is slower
    host_us: float  # until such a call has returned
    how: str  # "graph", "events", "host", or "interpreter": wall time without a meaning

    @property
    def spread(self) -> float:
        """(high - low) / us."""
        return (self.high - self.low) / self.us if self.us else 0.0


def measure(
    calls: dict[str, Callable[[], object]], device: torch.device, *, host: bool = False, hopeless: float = math.inf
) -> tuple[dict[str, Timing], dict[str, str]]:
    """Times of the calls, and for those that raised the reason why there is none.

    host: time the host alone. hopeless: calls slower than the fastest by this factor after the first round are timed no further.
    """
    refused: dict[str, str] = {}
    clocks: dict[str, _Clock] = {}
    kind: type[_Clock] = _InterpreterClock if device.type != "cuda" else _HostClock if host else _DeviceClock
    for name, call in calls.items():
        try:
            clocks[name] = kind(call)
            clocks[name].sample()
        except Exception as error:  # a peer may raise anything, and the row goes on without it
            refused[name] = reason(error)
            clocks.pop(name, None)
    fastest = min((clock.median for clock in clocks.values()), default=0.0)
    for _ in range(kind.rounds - 1):
        for clock in clocks.values():
            if clock.median <= fastest * hopeless:
                clock.sample()
    return {name: clock.result() for name, clock in clocks.items()}, refused


def reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


class _Clock:
    """Samples of the time of a call, in microseconds."""

    rounds = 1
    how = "interpreter"

    def __init__(self, call: Callable[[], object]):
        self.call = call
        self.samples: list[float] = []
        self.eager_us = self.host_us = 0.0

    def sample(self) -> None:
        raise NotImplementedError

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    def result(self) -> Timing:
        ordered = sorted(self.samples)
        low, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.2, 0.8))
        return Timing(self.median, low, high, self.eager_us or self.median, self.host_us or self.median, self.how)


class _InterpreterClock(_Clock):
    def sample(self) -> None:
        begin = time.perf_counter()
        self.call()
        self.samples.append((time.perf_counter() - begin) * 1e6)


class _HostClock(_Clock):
    """Until the call returns, with an idle device and few calls queued."""

    rounds = ROUNDS
    how = "host"

    def sample(self) -> None:
        for _ in range(10):
            self.call()
            torch.cuda.synchronize()
            for _ in range(10):
                begin = time.perf_counter()
                self.call()
                self.samples.append((time.perf_counter() - begin) * 1e6)
        torch.cuda.synchronize()


class _DeviceClock(_Clock):
    rounds = ROUNDS

    def __init__(self, call: Callable[[], object]):
        super().__init__(call)
        call()  # compiles
        torch.cuda.synchronize()
        first = self._events(call, 1)
        estimate = self._events(call, 5 if first < 20_000 else 1)
        self.eager_us, self.host_us = self._eager(estimate)
        self.graph = None
        host_bound = self.host_us > self.eager_us / 2  # then eager calls do not tell how short the work is
        if (host_bound or self.eager_us < GRAPH_LIMIT) and (trial := _capture(call, 10)):
            kernels = self._events(trial.replay, 1) / 10
            if kernels < GRAPH_LIMIT:
                self.per_graph = min(max(round(GRAPH_MICROSECONDS / kernels), 1), 500)
                self.graph = _capture(call, self.per_graph)
        if self.graph is not None:
            estimate = self._events(self.graph.replay, 1)
        self.how = "events" if self.graph is None else "graph"
        self.flushes = 1 + round(self.host_us / 50)  # one takes that long or longer
        self.repeats = min(max(round(ROUND_SECONDS * 1e6 / estimate), 3), 200)

    def sample(self) -> None:
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(self.repeats)]
        for begin, end in events:
            if self.graph is None:
                for _ in range(self.flushes):
                    _flush_buffer().zero_()
            begin.record()
            self.call() if self.graph is None else self.graph.replay()
            end.record()
        torch.cuda.synchronize()
        calls = 1 if self.graph is None else self.per_graph
        self.samples += [begin.elapsed_time(end) * 1e3 / calls for begin, end in events]

    @staticmethod
    def _events(call: Callable[[], object], count: int) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(count):
            call()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e3 / count

    def _eager(self, estimate: float) -> tuple[float, float]:
        count = min(max(round(10_000 / estimate), 3), 100)
        begin = time.perf_counter()
        for _ in range(count):
            self.call()
        queued = time.perf_counter()
        torch.cuda.synchronize()
        done = time.perf_counter()
        return (done - begin) / count * 1e6, (queued - begin) / count * 1e6


@cache
def _flush_buffer() -> torch.Tensor:
    return torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")


def _capture(call: Callable[[], object], count: int) -> torch.cuda.CUDAGraph | None:
    """`count` calls as one graph, replayed once; None where the call cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for _ in range(count):
                call()
    except RuntimeError:
        return None
    graph.replay()
    torch.cuda.synchronize()
    return graph


def ceilings(device: torch.device) -> dict[str, float]:
    """What the card reaches on the plainest work: "copy_bytes" a second, read and written, and "matmul_flops" in bfloat16."""
    if device.type != "cuda":
        return {}
    source = torch.empty(1 << 30, dtype=torch.int32, device=device).random_()
    target = torch.empty_like(source)
    a = torch.randn(8192, 8192, device=device).bfloat16()
    b, c = torch.randn_like(a), torch.empty_like(a)
    times, _ = measure({"copy": lambda: target.copy_(source), "matmul": lambda: torch.mm(a, b, out=c)}, device)
    return {"copy_bytes": 2 * source.nbytes / times["copy"].us * 1e6, "matmul_flops": 2 * 8192**3 / times["matmul"].us * 1e6}
