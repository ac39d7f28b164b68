"""The time of a call on a GPU, as a server would see it: cold caches, no cost of launching from Python."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

FLUSH_BYTES = 512 << 20


def samples(call: Callable[[], object], repeats: int, device: str | torch.device = "cuda") -> list[float]:
    """Sorted seconds of `repeats` runs of the call, replayed as a graph, each after a read of more than the last-level cache holds, which
    empties it, leaves nothing to be written back, and lets the host run ahead. RuntimeError if the call cannot be captured."""
    for _ in range(2):
        call()  # compiles, allocates
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    torch.cuda.synchronize(device)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in events:
        _flush_buffer(device).sum()
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize(device)
    return sorted(begin.elapsed_time(end) * 1e-3 for begin, end in events)


@cache
def _flush_buffer(device: str | torch.device) -> torch.Tensor:
    return torch.zeros(FLUSH_BYTES // 4, dtype=torch.float32, device=device)
