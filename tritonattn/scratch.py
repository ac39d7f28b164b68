"""Device memory that outlives no call, or no router, and whoever records what a call takes (`paths.replay`)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tritonattn.paths.replay import Recording


class _Current(threading.local):
    recording: Recording | None = None


current = _Current()


def take(make: Callable[[], Tensor]) -> Tensor:
    """Memory of the call at hand, as `make` gives it."""
    return make() if current.recording is None else current.recording.take(make)


def keep(*tensors: Tensor | None) -> None:
    """Tensors that every call like the one at hand uses."""
    for tensor in tensors:
        if tensor is not None:
            take(partial(_same, tensor))


def _same(tensor: Tensor) -> Tensor:
    return tensor


class Fresh:
    """Scratch of a single call, from torch's caching allocator: safe on any stream and in graph capture, no growth in steady state."""

    def __init__(self, device: torch.device):
        self.device = device

    def take(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        return take(partial(torch.empty, numel, dtype=dtype, device=self.device))


class Arena:
    """Scratch with fixed addresses: one buffer per name, which only grows.

    A buffer that had to grow is kept as well: a graph captured earlier still writes to the old address. Calls that share an arena
    must run on one stream, one after the other.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._buffers: dict[str, list[Tensor]] = {}

    def take(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        need = numel * dtype.itemsize
        kept = self._buffers.setdefault(name, [])
        if not kept or kept[-1].numel() < need:
            kept.append(torch.empty(need, dtype=torch.uint8, device=self.device))
        return take(partial(_same, kept[-1][:need].view(dtype)))

    @property
    def nbytes(self) -> int:
        return sum(buffer.numel() for kept in self._buffers.values() for buffer in kept)


Scratch = Fresh | Arena
