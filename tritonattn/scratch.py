"""Device memory that outlives no call, or no router."""

from __future__ import annotations

import torch
from torch import Tensor


class Fresh:
    """Scratch of a single call, from torch's caching allocator: safe on any stream and in graph capture, no growth in steady state."""

    def __init__(self, device: torch.device):
        self.device = device

    def take(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=self.device)


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
        return kept[-1][:need].view(dtype)

    @property
    def nbytes(self) -> int:
        return sum(buffer.numel() for kept in self._buffers.values() for buffer in kept)


Scratch = Fresh | Arena
