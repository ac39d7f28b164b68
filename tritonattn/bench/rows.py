"""What is timed: the suites and their rows, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product, zip_longest


@dataclass(frozen=True)
class Row:
    """One shape. `batch` sequences of `seq_len` keys, the last `query_len` of them new."""

    suite: str
    batch: int
    seq_len: int
    heads: int = 64
    kv_heads: int = 4
    head_size: int = 128
    v_head_size: int = 0  # 0: head_size
    query_len: int = 1
    block_size: int = 16
    fp8: bool = False  # the cache
    window: int = 0  # keys that a query sees, itself among them; 0: all
    room: int = 0  # keys per sequence that a captured plan is made for; 0: seq_len
    what: str = ""  # in suites that time several things
    key_lengths: tuple[int, ...] = ()  # instead of batch x seq_len, where the sequences differ
    query_lengths: tuple[int, ...] = ()  # instead of query_len

    @property
    def name(self) -> str:
        """As `--row` takes it: unique within a suite."""
        parts = [self.what] if self.what else []
        parts.append(f"B{self.batch}")
        if self.suite in ("extend", "spec-decode") or (self.suite == "mla" and self.query_len > 1):
            parts.append(f"q{self.query_len}")
        parts.append(f"S{self.seq_len}")
        if self.suite == "mla" or (self.suite == "graph" and self.latent):
            parts.append(f"h{self.heads}")
        else:
            parts.append(f"{self.heads}/{self.kv_heads}")
            if self.dv != self.head_size:
                parts.append(f"D{self.head_size}/{self.dv}")
            elif self.head_size != 128:
                parts.append(f"D{self.head_size}")
        if self.window:
            parts.append(f"window {self.window}")
        if self.fp8:
            parts.append("fp8")
        if self.room:
            parts.append(f"in {self.room}")
        return " ".join(parts)

    @property
    def latent(self) -> bool:
        """A cache of MLA: one head, whose values are its first columns."""
        return self.kv_heads == 1 and self.dv < self.head_size

    @property
    def dv(self) -> int:
        return self.v_head_size or self.head_size

    @property
    def seq_lens(self) -> tuple[int, ...]:
        return self.key_lengths or (self.seq_len,) * self.batch

    @property
    def query_lens(self) -> tuple[int, ...]:
        return self.query_lengths or (self.query_len,) * self.batch

    def smoke(self) -> Row:
        """The same kind of row at a size that the interpreter can run."""
        heads = min(self.heads, 4)
        batch = min(self.batch, 3 if self.key_lengths else 2)
        query_len = 48 if self.query_len == self.seq_len else min(self.query_len, 9)
        pairs = zip_longest(self.key_lengths[-batch:], self.query_lengths[-batch:])  # of a ragged row the last are the longest
        lengths = [(min(k, 48), min(k, 48) if k == q else min(q or 1, 9)) for k, q in pairs]
        return replace(
            self, batch=batch, seq_len=48, query_len=query_len, heads=heads, kv_heads=max(1, heads * self.kv_heads // self.heads),
            window=min(self.window, 16), room=min(self.room, 200), key_lengths=tuple(k for k, _ in lengths), query_lengths=tuple(q for _, q in lengths),
        )  # fmt: skip


def _prefill() -> list[Row]:
    shapes = [(1, 8192, 64, 4), (8, 2048, 64, 4), (16, 512, 32, 8), (1, 32768, 32, 8), (4, 4096, 16, 16)]
    widths = [(4, 4096, 64, 8, 64, 64), (4, 4096, 16, 8, 256, 256), (4, 4096, 16, 16, 192, 128)]
    rows = [Row("prefill", *shape, query_len=shape[1]) for shape in shapes]
    return rows + [Row("prefill", *shape, query_len=shape[1]) for shape in widths]


def _extend() -> list[Row]:
    return [
        Row("extend", 1, 32768, query_len=2048),
        Row("extend", 1, 131072, query_len=2048),
        Row("extend", 8, 8192, 32, 8, query_len=512),
    ]


def _decode() -> list[Row]:
    sizes = [
        (1, 1024), (1, 8192), (1, 32768), (1, 131072), (8, 8192), (32, 2048), (64, 1024), (64, 8192), (256, 512), (256, 4096),
    ]  # fmt: skip
    rows = [Row("decode", batch, length, *heads) for batch, length in sizes for heads in ((64, 4), (32, 8))]
    rows += [Row("decode", 32, 4096, *shape) for shape in ((40, 8, 128), (64, 8, 64), (16, 8, 256))]
    rows += [Row("decode", 64, 8192, *heads, fp8=True) for heads in ((64, 4), (32, 8))]
    return [*rows, Row("decode", 8, 4096), Row("decode", 8, 131072, window=4096)]


def _spec_decode() -> list[Row]:
    return [Row("spec-decode", 16, 8192, query_len=n) for n in (1, 2, 4, 8)]


def _latent(suite: str, batch: int, length: int, heads: int, query_len: int = 1, what: str = "") -> Row:
    return Row(suite, batch, length, heads, 1, 576, 512, query_len, 64, what=what)


def _mla() -> list[Row]:
    sizes = [(1, 8192), (1, 65536), (16, 4096), (64, 4096), (128, 4096), (64, 32768)]
    rows = [_latent("mla", *size, heads) for size in sizes for heads in (128, 16)]
    return rows + [_latent("mla", 16, 8192, 16, query_len) for query_len in (1, 4)]


def _mixed() -> list[Row]:
    """64 decodes, one extend and one prefill in a step."""
    return [Row("mixed", 66, 32768, key_lengths=(8192,) * 64 + (32768, 4096), query_lengths=(1,) * 64 + (2048, 4096))]


def _cache() -> list[Row]:
    rows = [Row("cache", 16, 4096, 64, 8, what=what, fp8=fp8) for what in ("write", "gather") for fp8 in (False, True)]
    return [*rows, Row("cache", 256, 1, 64, 8, what="write"), _latent("cache", 16, 4096, 16, what="write latent")]


def _merge() -> list[Row]:
    return [Row("merge", 1, tokens, 64, 64) for tokens in (256, 16384)]


def _plan() -> list[Row]:
    """Host time: of a step's plan, of decodes alone and with one extend and one prefill among them; and of calls."""
    rows = [Row("plan", n, 8192, what="router, decodes") for n in (256, 1024)]
    rows += [
        Row("plan", n, 8192, what="router", key_lengths=(8192,) * (n - 2) + (8192, 4096), query_lengths=(1,) * (n - 2) + (2048, 4096))
        for n in (256, 1024)
    ]
    rows += [Row("plan", batch, 1024, what="decode call") for batch in (1, 64)]
    return [*rows, Row("plan", 64, 1024, what="run call"), *(_latent("plan", batch, 1024, 16, what="mla call") for batch in (1, 64))]


def _graph() -> list[Row]:
    """Steps far shorter than what their graph was captured for."""
    rows = [Row("graph", batch, length, 64, 4, room=131072) for batch, length in ((1, 256), (8, 256), (8, 2048), (64, 256), (256, 1024))]
    rows += [Row("graph", 8, 1024, 32, 8, room=131072), Row("graph", 8, 1024, room=131072, fp8=True)]
    sizes = ((1, 256), (16, 256), (64, 1024))
    return rows + [Row("graph", *size, heads, 1, 576, 512, 1, 64, room=131072) for size in sizes for heads in (16, 128)]


def _cliffs() -> list[Row]:
    grid = product((1, 4, 8), (256, 8192, 32768, 131072), (1, 8, 12, 16, 64, 256))
    rows = [Row("cliffs", batch, length, 8 * kv_heads, kv_heads) for kv_heads, length, batch in grid]
    rows += [Row("cliffs", 32, 4096, 32, 8, width) for width in (72, 80)]
    return [*rows, Row("cliffs", 64, 131072, what="ragged", key_lengths=(128,) * 63 + (131072,)), Row("cliffs", 1, 131072)]


SUITES: dict[str, list[Row]] = {
    "prefill": _prefill(), "extend": _extend(), "decode": _decode(), "spec-decode": _spec_decode(), "mla": _mla(), "mixed": _mixed(),
    "cache": _cache(), "merge": _merge(), "plan": _plan(), "graph": _graph(), "cliffs": _cliffs(),
}  # fmt: skip


def select(suites: list[str], wanted: list[str]) -> list[Row]:
    """Rows of the suites named (none: all of them) whose name is, or else contains, one of `wanted` (none: all)."""
    unknown = [name for name in suites if name not in SUITES]
    if unknown:
        raise ValueError(f"SUITE must be one of {', '.join(SUITES)}, got {', '.join(unknown)}")
    rows = [row for suite in suites or SUITES for row in SUITES[suite]]
    if not wanted:
        return rows
    chosen: list[Row] = []
    for text in wanted:
        found = [row for row in rows if row.name.lower() == text.lower()]
        found = found or [row for row in rows if text.lower() in row.name.lower()]
        if not found:
            raise ValueError(f"--row {text!r} names no row of {', '.join(suites or SUITES)}; --list prints them")
        chosen += [row for row in found if row not in chosen]
    return chosen
