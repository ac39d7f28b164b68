"""The attention of one model over the steps of a server, twice: through tritonattn, and in plain PyTorch to check it by."""
from __future__ import annotations

import math
from typing import Protocol

import torch

from tritonattn import Router, layouts, reshape_and_cache
from tritonattn.batch import Kind
from tritonattn.demo.scheduler import Blocks, Slice
from tritonattn.demo.weights import Config


class Attention(Protocol):
    """What the model and the loop ask of attention."""

    def begin(self, slices: list[Slice]) -> list[str]:
        """Takes in whose tokens the next forward pass holds, in order; returns the path that each slice takes."""
        ...

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Keeps ``k``, ``v`` [T, Hkv, D] of the pass's tokens and returns each query's output, as q [T, Hq, D]."""
        ...


class RouterAttention:
    """Paged cache in the preshuffled layout; one plan a step, run once per layer."""

    def __init__(self, config: Config, blocks: Blocks, dtype: torch.dtype, device: torch.device):
        self._device, self._block_size = device, blocks.block_size
        self._router = Router(config.q_heads, config.kv_heads, config.head_size, dtype=dtype, device=device, kv_layout="preshuffled")
        self._caches = [layouts.allocate("preshuffled", blocks.count, blocks.block_size, config.kv_heads, config.head_size,
                                         dtype=dtype, device=device) for _ in range(config.layers)]
        for caches in self._caches:
            for cache in caches:
                cache.fill_(math.nan)  # a slot that was never written must never be read

    def begin(self, slices: list[Slice]) -> list[str]:
        query_lens = [piece.count for piece in slices]
        seq_lens = [piece.stop for piece in slices]
        width = max(len(piece.request.blocks) for piece in slices)
        table = [piece.request.blocks + [0] * (width - len(piece.request.blocks)) for piece in slices]
        slots = [piece.request.blocks[token // self._block_size] * self._block_size + token % self._block_size
                 for piece in slices for token in range(piece.start, piece.stop)]
        self._slots = torch.tensor(slots, dtype=torch.int64, device=self._device)
        self._plan = self._router.plan(query_lens, seq_lens, torch.tensor(table, dtype=torch.int32, device=self._device))
        return [Kind(kind).name.lower() for kind in self._plan.kinds]

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        caches = self._caches[layer]
        reshape_and_cache(k, v, *caches, self._slots, kv_layout="preshuffled")
        return self._router.run(self._plan, q, k, v, *caches)


class PlainAttention:
    """softmax(q k^T / sqrt(D)) v in float32 over each request's own keys and values; nothing paged, nothing tiled."""

    def __init__(self) -> None:
        self._history: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._slices: list[Slice] = []

    def begin(self, slices: list[Slice]) -> list[str]:
        self._slices = slices
        return ["plain"] * len(slices)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        counts = [piece.count for piece in self._slices]
        rows = zip(self._slices, q.float().split(counts), k.float().split(counts), v.float().split(counts), strict=True)
        return torch.cat([self._one(layer, piece, *qkv) for piece, *qkv in rows]).to(q.dtype)

    def _one(self, layer: int, piece: Slice, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        key = piece.request.id, layer
        if key in self._history:
            k, v = (torch.cat(pair) for pair in zip(self._history[key], (k, v), strict=True))
        self._history[key] = k, v
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(piece.start + 1)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), v)
