"""Random ragged batches, their paged caches and their oracle.

A `Case` is one call of an op. What the op must not read is poisoned (dead slots, unused blocks, table entries past the end of a
sequence, rows of padding), what it must not write is marked, and the result is held against float64 under a bound that follows
from what PyTorch loses in the same dtype on the same input.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from triton import knobs

import tritonattn
from tritonattn import layouts, reference
from tritonattn.problem import FP8_DTYPES
from tritonattn.scratch import Fresh
from tritonattn.tuning.arch import detect

MARK = 777.0
WILD_BLOCK = 10**9  # a table entry that faults, or shows up in the output, when it is followed
PAD_ROWS = 3
PAD_COLUMNS = 8


# -- poison ---------------------------------------------------------------------------------------------------


def fill(tensor: Tensor, poison: str) -> None:
    """NaN, infinity or a huge number everywhere; an 8-bit float that has no infinity takes its largest number."""
    if tensor.dtype in FP8_DTYPES:
        nan = 0x80 if "fnuz" in str(tensor.dtype) else 0x7F
        value = {"nan": nan, "inf": 0x7C if tensor.dtype is torch.float8_e5m2 else 0x7E, "huge": 0x7B, "zero": 0}[poison]
        tensor.view(torch.uint8).fill_(value)
    else:
        tensor.fill_({"nan": math.nan, "inf": math.inf, "huge": 6e4, "zero": 0.0}[poison])


def poisoned(clean: Tensor, needed: Tensor, poison: str) -> Tensor:
    """A copy with the same strides, poison wherever it is not needed."""
    cache = torch.empty_strided(clean.shape, clean.stride(), dtype=clean.dtype).copy_(clean)  # a clone closes gaps between blocks
    other = torch.empty_like(clean)
    fill(other, poison)
    bits = torch.uint8 if cache.itemsize == 1 else cache.dtype
    cache.view(bits)[~needed] = other.view(bits)[~needed]
    return cache


# -- pages ----------------------------------------------------------------------------------------------------


def page(stored: Sequence[int], block_size: int, seed: int = 0) -> tuple[Tensor, list[Tensor], int]:
    """Blocks of shuffled ids for that many tokens of each sequence: (block table, slots of each one's tokens, number of blocks).

    Block 0 and another two are not used, and the table ends in two entries that must not be followed.
    """
    counts = [-(-n // block_size) for n in stored]
    ids = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(seed)) + 1
    table = torch.full((len(stored), max(counts, default=0) + 2), WILD_BLOCK, dtype=torch.int32)
    slots, used = [], 0
    for b, count in enumerate(counts):
        table[b, :count] = ids[used : used + count]
        used += count
        position = torch.arange(stored[b])
        slots.append(table[b].long()[position // block_size] * block_size + position % block_size)
    return table, slots, len(ids) + 1


def slots_outside(count: int, dtype: torch.dtype) -> list[int]:
    """Slots that a cache of `count` slots does not have: beside it, a whole turn of int32 away, and the farthest there are."""
    far = torch.iinfo(dtype)
    turn = [] if dtype is torch.int32 else [(1 << 32) + 3, 3 - (1 << 32)]
    return [-1, -2, -17, count, count + 1, count + 17, *turn, far.min, far.max]


def fp8_dtypes(device: torch.device) -> list[torch.dtype]:
    """The 8-bit floats of the device that our caches take."""
    return [dtype for dtype in FP8_DTYPES if str(dtype).removeprefix("torch.") in detect(device).fp8_types]


# -- oracle ---------------------------------------------------------------------------------------------------


def torch_attend(
    q, k, v, *, softmax_scale, causal, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, sinks=None, dtype=torch.float64
):
    """`reference.attend` written another way, in any dtype, as a user of PyTorch would: also the yardstick of what a dtype loses.

    Products are rounded to ``dtype``; scores and softmax are computed in float32 (float64 for float64).
    """
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    n, heads, size = q.shape
    m, kv_heads, v_size = v.shape
    if m == 0:
        lse = torch.full((heads, n), -math.inf) if sinks is None else sinks.float()[:, None].expand(heads, n)
        return torch.zeros(n, heads, v_size).double(), lse.double()
    q, k, v = (x.to(dtype).transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(heads // kv_heads, 0) for x in (k, v))
    exact = (q.to(wide) @ k.to(wide).transpose(1, 2)) * (size**-0.5 if softmax_scale is None else softmax_scale)

    def modify(s):
        s = torch.tanh(s / softcap) * softcap if softcap else s
        i, j = torch.arange(n)[:, None], torch.arange(m)[None, :]
        if alibi_slopes is not None:
            s = s + alibi_slopes.to(wide)[:, None, None] * (j - i - (m - n))
        left = window_size[0] if window_size[0] >= 0 else m + n
        right = 0 if causal else window_size[1] if window_size[1] >= 0 else m + n
        right = min(right, window_size[1]) if window_size[1] >= 0 else right
        hidden = (j - i - (m - n) < -left) | (j - i - (m - n) > right)
        s = s.masked_fill(hidden, -math.inf)
        sink = torch.full((heads, n, 1), -math.inf, dtype=wide) if sinks is None else sinks.to(wide)[:, None, None].expand(heads, n, 1)
        return torch.cat([s, sink], dim=2)

    lse = torch.logsumexp(modify(exact), dim=2)
    p = torch.softmax(modify(exact.to(dtype).to(wide)), dim=2)[:, :, :m].nan_to_num(0.0)
    return (p.to(dtype) @ v).transpose(0, 1).double(), lse.double()


@contextmanager
def _attend_by(function) -> Iterator[None]:
    """The reference ops on top of another `attend`."""
    original, reference.attend = reference.attend, function
    try:
        yield
    finally:
        reference.attend = original


@dataclass
class Oracle:
    """float64 results, and how far PyTorch is from them in the dtype of the call."""

    out: Tensor
    lse: Tensor
    out_error: float
    lse_error: float
    dtype: torch.dtype

    @classmethod
    def of(cls, op: str, dtype: torch.dtype, **args) -> Oracle:
        exact, exact_lse = getattr(reference, op)(**args)
        with _attend_by(partial(torch_attend, dtype=dtype)):
            low, low_lse = getattr(reference, op)(**args)
        finite = exact_lse.isfinite()
        return cls(exact, exact_lse, _largest(low - exact), _largest((low_lse - exact_lse)[finite]), dtype)

    def check(self, out: Tensor, lse: Tensor | None, rows: slice = slice(None)) -> None:
        """Twice the error of PyTorch, and the rounding of the result itself; where no key is seen, 0 and -inf exactly.

        Triton's interpreter truncates to bfloat16, which doubles the errors once more. In float32 PyTorch's error is that of one
        order of summation, which its number of threads decides: three times.
        """
        times = 4 if knobs.runtime.interpret and self.dtype is torch.bfloat16 else 3 if self.dtype is torch.float32 else 2
        exact, exact_lse = self.out[rows], self.lse[:, rows]
        out = out[rows].double().cpu()
        assert out.isfinite().all(), "the result has NaN or infinities"
        unit = torch.finfo(self.dtype).eps
        bound = times * self.out_error + 2 * unit * _largest(exact) + 1e-6
        assert _largest(out - exact) <= bound, f"out is off by {_largest(out - exact):.3g}, allowed is {bound:.3g}"
        blind = exact_lse == -math.inf
        assert (out.transpose(0, 1)[blind] == 0).all(), "a row that sees no key must be 0"
        if lse is None:
            return
        lse = lse[:, rows].double().cpu()
        assert (lse[blind] == -math.inf).all(), "the LSE of a row that sees no key must be -inf"
        error, bound = _largest((lse - exact_lse)[~blind]), times * self.lse_error + 1e-4 * max(1.0, 1e-2 * _largest(exact_lse[~blind]))
        assert error <= bound, f"lse is off by {error:.3g}, allowed is {bound:.3g}"


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


class Guarded(Fresh):
    """Scratch between marks, which `intact` looks at."""

    rooms: ClassVar[list[tuple[Tensor, int]]] = []
    MARGIN = 4096

    def take(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        room = torch.full((numel + 2 * self.MARGIN,), MARK, dtype=dtype, device=self.device)
        self.rooms.append((room, numel))
        return room[self.MARGIN : self.MARGIN + numel]

    @classmethod
    def intact(cls) -> bool:
        """Whether something was taken, and nothing written beside it; and begins anew."""
        rooms, cls.rooms = cls.rooms, []
        return bool(rooms) and all((room[: cls.MARGIN] == MARK).all() and (room[cls.MARGIN + n :] == MARK).all() for room, n in rooms)


# -- data -----------------------------------------------------------------------------------------------------


def cumulative(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


@dataclass
class Batch:
    """Sequences as (query_len, seq_len), with their tokens. Rows of padding follow the queries; they hold NaN."""

    lens: Sequence[tuple[int, int]]
    heads: tuple[int, int] = (3, 1)
    head_size: int = 32
    v_head_size: int | None = None
    dtype: torch.dtype = torch.float32
    seed: int = 0
    magnitude: float = 1.0
    q: Tensor = field(init=False)
    k: Tensor = field(init=False)
    v: Tensor = field(init=False)
    keys: list[Tensor] = field(init=False)
    values: list[Tensor] = field(init=False)

    def __post_init__(self):
        generator = torch.Generator().manual_seed(self.seed)
        q_heads, kv_heads = self.heads
        self.v_head_size = self.head_size if self.v_head_size is None else self.v_head_size

        def random(tokens, heads, size, scale=1.0):
            return (torch.randn(tokens, heads, size, generator=generator) * scale).to(self.dtype)

        self.q = random(self.tokens + PAD_ROWS, q_heads, self.head_size, self.magnitude)
        self.keys = [random(seq, kv_heads, self.head_size) for _, seq in self.lens]
        self.values = [random(seq, kv_heads, self.v_head_size) for _, seq in self.lens]
        self.refresh()

    def refresh(self) -> Batch:
        """New tokens are the last ones of each sequence. To call after a change of keys or values."""
        self.q[self.tokens :] = math.nan
        self.k, self.v = self._new(self.keys, self.head_size), self._new(self.values, self.v_head_size)
        return self

    def one_hot(self) -> Batch:
        """q = 0 and V[pos] = e_pos: an output row is the row of its weights, 1 / n for each of the n keys that it sees."""
        self.q.zero_()
        for values in self.values:
            values.copy_(torch.eye(len(values), self.v_head_size)[:, None])
        return self.refresh()

    def head_ids(self) -> Batch:
        """V = its KV head: the output of query head h is h // ratio."""
        for values in self.values:
            values.copy_(torch.arange(self.heads[1])[None, :, None])
        return self.refresh()

    def _new(self, rows: list[Tensor], size: int) -> Tensor:
        new = [seq_rows[len(seq_rows) - query :] for (query, _), seq_rows in zip(self.lens, rows, strict=True)]
        return torch.cat([*new, torch.full((PAD_ROWS, self.heads[1], size), math.nan, dtype=self.dtype)])

    @property
    def tokens(self) -> int:
        return sum(query for query, _ in self.lens)

    @property
    def query_lens(self) -> list[int]:
        return [query for query, _ in self.lens]

    @property
    def seq_lens(self) -> list[int]:
        return [seq for _, seq in self.lens]

    @property
    def context_lens(self) -> list[int]:
        return [seq - query for query, seq in self.lens]

    def cache(
        self, stored: Sequence[int], *, layout: str = "nhd", block_size: int = 16, dtype: torch.dtype | None = None,
        k_descale=None, v_descale=None, window_left: int = -1, seed: int = 0,
    ) -> Cache:  # fmt: skip
        """The first ``stored[b]`` tokens of each sequence in blocks of shuffled ids, block 0 among the unused ones."""
        table, slots, num_blocks = page(stored, block_size, seed)
        k_cache, v_cache = layouts.allocate(
            layout, num_blocks, block_size, self.heads[1], self.head_size, v_head_size=self.v_head_size, dtype=dtype or self.dtype
        )
        fill(k_cache, "zero")
        fill(v_cache, "zero")
        needed_k, needed_v = (torch.zeros_like(cache, dtype=torch.float32) for cache in (k_cache, v_cache))
        for b, count in enumerate(stored):
            scale = {"k_descale": k_descale, "v_descale": v_descale, "kv_layout": layout}
            reference.reshape_and_cache(self.keys[b][:count], self.values[b][:count], k_cache, v_cache, slots[b], **scale)
            first = max(0, self.context_lens[b] - window_left) if window_left >= 0 else 0
            one = torch.ones(max(count - first, 0), self.heads[1], 1)
            marks = {"kv_layout": layout}
            reference.reshape_and_cache(
                one.expand(-1, -1, self.head_size), one.expand(-1, -1, self.v_head_size), needed_k, needed_v, slots[b][first:], **marks
            )
        hidden = table.clone()
        if window_left >= 0:
            for b, context in enumerate(self.context_lens):
                hidden[b, : max(0, context - window_left) // block_size] = WILD_BLOCK
        return Cache(layout, k_cache, v_cache, table, hidden, needed_k > 0, needed_v > 0)


@dataclass
class Cache:
    """A paged cache twice: clean for the oracle; and for the op, with everything poisoned that no query sees."""

    layout: str
    k: Tensor
    v: Tensor
    table: Tensor
    hidden_table: Tensor
    needed_k: Tensor
    needed_v: Tensor

    def poisoned(self, poison: str) -> tuple[Tensor, Tensor, Tensor]:
        """k_cache, v_cache, block_table as the op gets them."""
        k, v = poisoned(self.k, self.needed_k, poison), poisoned(self.v, self.needed_v, poison)
        return k, v, self.table if poison == "zero" else self.hidden_table


# -- calls ----------------------------------------------------------------------------------------------------


class Marked:
    """A view of a wider buffer full of marks, as the result of a call with queries ``q``."""

    def __init__(self, q: Tensor, v_head_size: int) -> None:
        tokens, self.heads, _ = q.shape
        dtype = q.dtype if q.dtype not in FP8_DTYPES else torch.bfloat16
        self.wide = torch.full((tokens, self.heads + 1, v_head_size + PAD_COLUMNS), MARK, dtype=dtype, device=q.device)
        self.out = self.wide[:, : self.heads, :v_head_size]

    def verify(self, out: Tensor, lse: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """The first rows of both, after a look at what the op had to leave alone."""
        assert out.data_ptr() == self.out.data_ptr()
        beside = (self.wide[:, self.heads :], self.wide[:, :, out.shape[2] :])
        assert all((marks == MARK).all() for marks in beside), "wrote outside of out"
        padding = out[rows:]
        assert ((padding == MARK) | (padding == 0)).all(), "padding must stay or be 0"
        assert lse.shape == (self.heads, len(out)) and lse.dtype is torch.float32
        return out[:rows].contiguous(), lse[:, :rows].contiguous()


@dataclass
class Case:
    """A call of an op: arguments for the oracle, and what the op gets in their place."""

    op: str
    args: dict[str, Any]
    rows: int
    """Tokens that belong to a sequence; the rest is padding."""
    cache: Cache | None = None

    def run(self, device: torch.device, poison: str = "nan", **changes) -> tuple[Tensor, Tensor]:
        """(out, lse) of the op, after a look at what it had to leave alone."""
        args = self.args | changes
        if self.cache is not None:
            args["k_cache"], args["v_cache"], args["block_table"] = self.cache.poisoned(poison)
        args = {name: to(value, device) for name, value in args.items()}
        q, values = args["q"], args["v_cache"] if self.cache is not None else args["v"]
        room = Marked(q, values.shape[3] if self.cache is not None else values.shape[2])
        return room.verify(*getattr(tritonattn, self.op)(**args, out=room.out, return_lse=True), self.rows)

    def oracle(self) -> Oracle:
        dtype = self.args["q"].dtype
        args = self.args
        if self.cache is not None:
            args = args | {"k_cache": self.cache.k, "v_cache": self.cache.v, "block_table": self.cache.table}
        return Oracle.of(self.op, dtype if dtype not in FP8_DTYPES else torch.bfloat16, **args)

    def check(self, device: torch.device, poison: str = "nan", **changes) -> tuple[Tensor, Tensor]:
        """Run and hold against the oracle. ``changes`` are arguments that must not change the result."""
        out, lse = self.run(device, poison, **changes)
        self.oracle().check(out, lse, slice(0, self.rows))
        return out, lse

    def but(self, **changes) -> Case:
        return replace(self, args=self.args | changes)


def to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def as_batch(kind, lens, shape):
    if isinstance(lens, kind):
        if shape:
            raise TypeError(f"a Batch has its own {', '.join(shape)}")
        return lens
    return kind(lens, **shape)


def prefill(lens: Sequence[tuple[int, int]], *, q_descale=None, k_descale=None, v_descale=None, fp8=None, options=None, **shape) -> Case:
    """lens: (queries, keys) per sequence; they need not be equal."""
    batch = Batch([(query, query) for query, _ in lens], **shape)
    other = Batch([(keys, keys) for _, keys in lens], **(shape | {"seed": batch.seed + 1}))
    q, k, v = batch.q, other.k, other.v
    if fp8 is not None:
        q, k, v = (reference.quantise(x, 1.0, fp8) for x in (q, k, v))
    args = {
        "q": q, "k": k, "v": v, "cu_seqlens_q": cumulative([query for query, _ in lens]),
        "cu_seqlens_k": cumulative([keys for _, keys in lens]), "max_seqlen_q": max((query for query, _ in lens), default=0),
        "max_seqlen_k": max((keys for _, keys in lens), default=0),
        "q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale,
    }  # fmt: skip
    return Case("flash_attn_varlen_func", args | (options or {}), batch.tokens)


def extend(
    lens: Sequence[tuple[int, int]] | Batch, *, layout="nhd", block_size=16, kv_dtype=None, k_descale=None, v_descale=None,
    shared=False, options=None, **shape,
) -> Case:  # fmt: skip
    """shared: the new tokens are in the cache too and k = v = None."""
    batch = as_batch(Batch, lens, shape)
    options = options or {}
    cache = batch.cache(
        batch.seq_lens if shared else batch.context_lens, layout=layout, block_size=block_size, dtype=kv_dtype, k_descale=k_descale,
        v_descale=v_descale, window_left=options.get("window_size", (-1, -1))[0],
    )  # fmt: skip
    args = {
        "q": batch.q, "k": None if shared else batch.k, "v": None if shared else batch.v, "kv_layout": layout,
        "cu_seqlens_q": cumulative(batch.query_lens), "context_lens": torch.tensor(batch.context_lens).int(),
        "max_seqlen_q": max(batch.query_lens, default=0), "max_context_len": max(batch.context_lens, default=0),
        "k_descale": k_descale, "v_descale": v_descale,
    }  # fmt: skip
    return Case("extend_attention", args | options, batch.tokens, cache)


def decode(
    lens: Sequence[tuple[int, int]] | Batch, *, layout="nhd", block_size=16, kv_dtype=None, q_descale=None, k_descale=None,
    v_descale=None, fp8_q=None, options=None, **shape,
) -> Case:  # fmt: skip
    batch = as_batch(Batch, lens, shape)
    options = options or {}
    cache = batch.cache(
        batch.seq_lens, layout=layout, block_size=block_size, dtype=kv_dtype, k_descale=k_descale, v_descale=v_descale,
        window_left=options.get("window_size", (-1, -1))[0],
    )  # fmt: skip
    args = {
        "q": batch.q if fp8_q is None else reference.quantise(batch.q, 1.0, fp8_q), "kv_layout": layout,
        "seqused_k": torch.tensor(batch.seq_lens).int(), "max_seqlen_k": max(batch.seq_lens, default=0),
        "cu_seqlens_q": cumulative(batch.query_lens), "max_seqlen_q": max([1, *batch.query_lens]),
        "q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale,
    }  # fmt: skip
    return Case("decode_attention", args | options, batch.tokens, cache)


@dataclass
class Mixed:
    """A batch for the router. The cache holds of each request what its path reads from it, and poison elsewhere."""

    batch: Batch
    threshold: int = 1
    layout: str = "preshuffled"
    block_size: int = 16
    kv_dtype: torch.dtype | None = None
    shared: bool = False
    """k = v = None: every new token is in the cache."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of the router; sinks and descales among them."""

    def __post_init__(self):
        decoded = [self.shared or (query <= self.threshold and query < seq) for query, seq in self.batch.lens]
        stored = [seq if cached else seq - query for (query, seq), cached in zip(self.batch.lens, decoded, strict=True)]
        scale = {name: self.options.get(name) for name in ("k_descale", "v_descale")}
        left = self.options.get("window_size", (-1, -1))[0]
        self.cache = self.batch.cache(
            stored, layout=self.layout, block_size=self.block_size, dtype=self.kv_dtype, window_left=left, **scale
        )

    def router(self, device: torch.device, **changes) -> tritonattn.Router:
        batch = self.batch
        options = {name: to(value, device) for name, value in self.options.items()}
        return tritonattn.Router(
            *batch.heads, batch.head_size, v_head_size=batch.v_head_size, dtype=batch.dtype, device=device, kv_layout=self.layout,
            kv_dtype=self.kv_dtype, decode_threshold=self.threshold, **(options | changes),
        )  # fmt: skip

    def arguments(self, device: torch.device, poison: str = "nan") -> dict[str, Any]:
        k_cache, v_cache, _ = self.cache.poisoned(poison)
        batch = self.batch
        args = {"q": batch.q, "k": None if self.shared else batch.k, "v": None if self.shared else batch.v, "k_cache": k_cache, "v_cache": v_cache}
        return {name: to(value, device) for name, value in args.items()}

    def run(self, device: torch.device, router: tritonattn.Router | None = None, **changes) -> tuple[Tensor, Tensor]:
        router = router or self.router(device, **changes)
        plan = router.plan(self.batch.query_lens, self.batch.seq_lens, self.cache.hidden_table.to(device))
        args = self.arguments(device)
        room = Marked(args["q"], self.batch.v_head_size)
        return room.verify(*router.run(plan, **args, out=room.out, return_lse=True), self.batch.tokens)

    def oracle(self) -> Oracle:
        """All requests as extends: the path changes no result."""
        options = dict(self.options)
        scale = {name: options.pop(name, None) for name in ("k_descale", "v_descale")}
        cached = {"layout": self.layout, "block_size": self.block_size, "kv_dtype": self.kv_dtype, **scale}
        return extend(self.batch, shared=self.shared, options=options, **cached).oracle()

    def check(self, device: torch.device, **changes) -> tuple[Tensor, Tensor]:
        out, lse = self.run(device, **changes)
        self.oracle().check(out, lse, slice(0, self.batch.tokens))
        return out, lse
