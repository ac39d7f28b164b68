"""A batch as the router sees it: the kind of each request, the order of kinds, and the launches that a plan is made of.

Host arithmetic alone; `Upload` is how its arrays reach the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tritonattn.checks import check_lengths
from tritonattn.plan import ContextRow, DecodePlan, DecodeWork

Ints = NDArray[np.int32]


class Kind(IntEnum):
    """The path of a request; the order of the values is that of `Plan.order`."""

    DECODE = 0
    EXTEND = 1
    PREFILL = 2


DECODE, EXTEND, PREFILL = (int(kind) for kind in Kind)  # an enum's member costs ten times an integer, at every use


def classify(query_lens: Sequence[int] | Ints, context_lens: Sequence[int] | Ints, decode_threshold: int = 1) -> Ints:
    """The `Kind` of each request: prefill without context, else decode up to ``decode_threshold`` query tokens, else extend.

    Raises ValueError or TypeError with every reason: lists of different lengths, negative lengths, a threshold below 1.
    """
    return kinds_of(*check_lengths("classify", query_lens, context_lens, decode_threshold), decode_threshold)


def kinds_of(query: Ints, context: Ints, decode_threshold: int) -> Ints:
    """`classify` of lengths that were checked."""
    kinds = (query > decode_threshold).astype(np.int32)  # DECODE or EXTEND
    kinds[context == 0] = PREFILL
    return kinds


def reorder_batch(
    query_lens: Sequence[int] | Ints, context_lens: Sequence[int] | Ints, decode_threshold: int = 1
) -> list[tuple[int, int]]:
    """Swaps ``(i, j)`` that, applied one after the other to every per-request list, order a batch as [decode : extend : prefill].

    The order within a kind is kept. Empty for a batch that is in order already. A cycle of n misplaced requests takes n - 1
    swaps; a request that is in its place is not touched. Errors are those of `classify`.
    """
    query, context = check_lengths("reorder_batch", query_lens, context_lens, decode_threshold)
    order = np.argsort(kinds_of(query, context, decode_threshold), kind="stable").tolist()
    holder = list(range(len(order)))  # which request stands at a position
    place = list(range(len(order)))  # and the reverse
    swaps = []
    for i, request in enumerate(order):
        j = place[request]
        if j != i:
            swaps.append((i, j))
            holder[j] = holder[i]
            place[holder[j]] = j
    return swaps


@dataclass(frozen=True)
class DecodeLaunch:
    """The decode requests of a plan."""

    plan: DecodePlan
    num_seqs: int
    max_seqlen_q: int
    splits: Ints
    """Parts that the keys of each are split into, longest sequence first."""
    work: DecodeWork

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.work.items, self.work.merges

    @cached_property
    def key(self) -> tuple:
        """Equal where kernels are launched alike, on the same places of the device buffer."""
        places = (place.data_ptr() for place in self.tensors)
        return self.plan, self.num_seqs, self.max_seqlen_q, self.work.num_items, self.work.num_merges, *places


@dataclass(frozen=True)
class TileLaunch:
    """Requests of a plan as blocks of query rows."""

    max_seqlen_q: int
    num_tiles: int
    tiles: Tensor
    """[num_tiles, 2] int32: sequence, first row; those with most keys last, which is where kernels begin."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.tiles,)


@dataclass(frozen=True)
class ExtendLaunch(TileLaunch):
    """And the cached keys that they need, laid end to end."""

    row: ContextRow
    row_length: int

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.tiles, *self.row


@dataclass(frozen=True, eq=False)
class Plan:
    """What `Router.run` does for one batch: host data, and views of one device buffer."""

    num_seqs: int
    num_tokens: int
    query_lens: Ints
    seq_lens: Ints
    kinds: Ints
    """The `Kind` of each request."""
    decode: DecodeLaunch | None
    extend: ExtendLaunch | None
    prefill: TileLaunch | None
    device_cu_seqlens_q: Tensor
    device_seq_lens: Tensor
    device_context_lens: Tensor
    block_table: Tensor | None
    max_cached_len: int
    """Most tokens that a request reads from the cache, where new ones come as k and v."""
    max_seq_len: int
    version: int
    router: Any = field(repr=False)
    """The router that made it, and alone can run it."""

    @cached_property
    def order(self) -> list[int]:
        """Request indices as [decode : extend : prefill], stable within each."""
        return self.kinds.argsort(kind="stable").tolist()

    @property
    def decode_only(self) -> bool:
        return self.extend is None and self.prefill is None

    @cached_property
    def key(self) -> tuple:
        """Equal for plans of decodes alone whose runs differ in nothing but the numbers in the device buffer."""
        places = self.device_cu_seqlens_q.data_ptr(), self.device_seq_lens.data_ptr()
        return self.num_seqs, self.num_tokens, *places, *(() if self.decode is None else self.decode.key)

    @property
    def tensors(self) -> list[Tensor]:
        """The views of the device buffer that kernels take."""
        parts = [part for part in (self.decode, self.extend, self.prefill) if part is not None]
        return [self.device_cu_seqlens_q, self.device_seq_lens, self.device_context_lens, *(view for part in parts for view in part.tensors)]


class Upload:
    """Arrays laid one behind the other, in host memory and at the same places of a device buffer.

    views: of that buffer, by place, where earlier uploads went to it.
    """

    def __init__(self, device: Tensor, views: dict[tuple[int, int], Tensor] | None = None) -> None:
        self._device = device
        self._views = {} if views is None else views
        self._host = torch.empty(len(device), dtype=torch.int32, device="cpu", pin_memory=device.is_cuda)
        self._array: Ints = self._host.numpy()
        self._used = 0

    def room(self, count: int, width: int = 0) -> tuple[Ints, Tensor]:
        """A place for [count] or [count, width] values, 16-byte aligned: to be written to, and on the device, which has them after `send`."""
        begin, size = self._used, count * max(width, 1)
        self._used = (begin + size + 3) // 4 * 4
        host, view = self._array[begin : begin + size], self._views.get((begin, size))
        if view is None:
            view = self._device.narrow(0, begin, size)  # half the time of a slice
            view = self._views[begin, size] = view.view(count, width) if width else view
        return host.reshape(count, width) if width else host, view

    def put(self, array: NDArray[np.integer]) -> Tensor:
        """The place of the array on the device."""
        host, view = self.room(array.size)
        host[:] = array.reshape(-1)
        return view

    def send(self) -> None:
        """One copy; the pinned memory is kept by its allocator until the copy is done."""
        used = self._used
        self._device.narrow(0, 0, used).copy_(self._host.narrow(0, 0, used), non_blocking=True)
