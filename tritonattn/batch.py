"""A batch as the router sees it: the kind of each request, the order of kinds, and the launches that a plan is made of.

Host arithmetic alone; `Upload` is how its arrays reach the device. A plan is made every step, from arrays so short that a call costs more
than its arithmetic: hence the constants below, which NumPy takes in half the time of a Python number, and classes that are not frozen, which
would be a tenth of the time.
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
from tritonattn.where import is_capturing

Ints = NDArray[np.int32]
Sent = Sequence[Tensor]


class Kind(IntEnum):
    """The path of a request; the order of the values is that of `Plan.order`."""

    DECODE = 0
    EXTEND = 1
    PREFILL = 2


DECODE, EXTEND, PREFILL = (int(kind) for kind in Kind)  # an enum's member costs ten times an integer, at every use
ZERO, ONE = (np.array(number, np.int32) for number in (0, 1))


def starts(lengths: Ints) -> Ints:
    """[n + 1] int32: the sums of the first 0 .. n lengths."""
    sums = np.zeros(len(lengths) + 1, np.int32)
    np.add.accumulate(lengths, 0, None, sums[1:])  # a third of the time of `cumsum`
    return sums


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


class Mix:
    """What query lengths and the requests without context (``new``) decide by themselves: steps that differ in contexts alone share it."""

    def __init__(self, query: Ints, new: NDArray[np.bool_], threshold: Ints) -> None:
        self._threshold = threshold
        self._key = query.tobytes(), new.tobytes()
        live, long = query > ZERO, query > threshold
        others = (long | new) & live
        decodes = live > others  # of booleans: the one and not the other
        self.decode_only = not np.count_nonzero(others)
        self.decoded, self.extended, self.prefilled = decodes.nonzero()[0], (long > new).nonzero()[0], (new & live).nonzero()[0]
        self.decode_lens = query * decodes
        self.cu_seqlens_q = starts(query)
        self.num_tokens = int(self.cu_seqlens_q.item(-1))

    @cached_property
    def decode_starts(self) -> Ints:
        """Like `cu_seqlens_q`, among the tokens of decode requests."""
        return starts(self.decode_lens)

    @cached_property
    def decode_tokens(self) -> NDArray[np.int64]:
        """Where these are among all tokens."""
        shift = self.cu_seqlens_q - self.decode_starts
        return np.arange(self.decode_starts[-1]) + shift[:-1].repeat(self.decode_lens)

    def of(self, query: Ints, new: NDArray[np.bool_]) -> Mix:
        """That of another step; this one where it is the same."""
        return self if self._key == (query.tobytes(), new.tobytes()) else Mix(query, new, self._threshold)


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


@dataclass(eq=False)
class DecodeLaunch:
    """The decode requests of a plan."""

    plan: DecodePlan
    num_seqs: int
    max_seqlen_q: int
    cut: Ints
    """Parts that the keys of the longest are cut into, longest first; the others are whole."""
    work: DecodeWork

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.work.items, self.work.merges

    @cached_property
    def key(self) -> tuple:
        """Equal where kernels are launched alike, on the same places of the device buffer."""
        places = (place.data_ptr() for place in self.tensors)
        return self.plan, self.num_seqs, self.max_seqlen_q, self.work.num_items, self.work.num_merges, *places


@dataclass(eq=False)
class TileLaunch:
    """Requests of a plan as blocks of query rows."""

    max_seqlen_q: int
    num_tiles: int
    tiles: Tensor
    """[num_tiles, 2] int32, flat: sequence, first row; those with most keys last, which is where kernels begin."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.tiles,)


@dataclass(eq=False)
class ExtendLaunch(TileLaunch):
    """And the keys that they need, laid end to end."""

    row: ContextRow
    row_length: int

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.tiles, *self.row


@dataclass(eq=False)
class Plan:
    """What `Router.run` does for one batch: host data, and views of one device buffer."""

    num_seqs: int
    num_tokens: int
    query_lens: Ints
    seq_lens: Ints
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
    def kinds(self) -> Ints:
        """The `Kind` of each request."""
        return kinds_of(self.query_lens, self.seq_lens - self.query_lens, self.router.decode_threshold)

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
    """Arrays that reach the device in one copy."""

    def __init__(self) -> None:
        self._arrays: list[NDArray[np.integer]] = []
        self._sizes: list[int] = []

    def put(self, array: NDArray[np.integer]) -> int:
        """Takes a flat array, at a multiple of 16 bytes. Its number among the tensors that `send` gives."""
        number, size = len(self._sizes), array.size
        self._arrays.append(array)
        self._sizes.append(size)
        if gap := -size % 4:
            self._arrays.append(_GAPS[gap])
            self._sizes.append(gap)
        return number

    def send(self, device: torch.device, kept: dict[tuple[int, ...], Buffer] | None = None) -> Sent:
        """The arrays as int32. ``kept``: earlier buffers; arrays of the same sizes take the place of those there, if they differ at all."""
        if is_capturing(device):
            raise RuntimeError("a plan cannot be made while a graph is captured, which would replay this one for ever: plan, and run once, before")
        values = np.concatenate(self._arrays, dtype=np.int32, casting="same_kind")
        if kept is None:
            return _pinned(values, device).to(device, non_blocking=True).unsafe_split_with_sizes(self._sizes)  # a third of the time of slices
        sizes = tuple(self._sizes)
        buffer = kept.get(sizes)
        if buffer is None:
            place = torch.empty(len(values), dtype=torch.int32, device=device)
            buffer = kept[sizes] = Buffer(place, place.split_with_sizes(self._sizes))
        content = values.tobytes()
        if content != buffer.content:
            buffer.place.copy_(_pinned(values, device), non_blocking=True)
            buffer.content = content
        return buffer.views


@dataclass(eq=False)
class Buffer:
    """A place on the device and what it was last sent."""

    place: Tensor
    views: Sent
    content: bytes = b""


def _pinned(values: Ints, device: torch.device) -> Tensor:
    """A copy that the device can fetch by itself; its memory is kept by the allocator until that is done."""
    host = torch.empty(len(values), dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
    host.numpy()[:] = values
    return host


_GAPS = [np.zeros(gap, np.int32) for gap in range(4)]
