"""What is timed: the suites and their rows, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace


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
    lengths: tuple[int, ...] = ()  # instead of batch x seq_len where the sequences differ

    @property
    def name(self) -> str:
        """As `--row` takes it: unique within a suite."""
        parts = [f"B{self.batch}"]
        if self.suite in ("extend", "spec-decode") or (self.query_len > 1 and self.suite not in ("prefill", "cache", "merge")):
            parts.append(f"q{self.query_len}")
        parts.append(f"S{self.seq_len}")
        if self.suite == "mla":
            parts.append(f"h{self.heads}")
        else:
            parts.append(f"{self.heads}/{self.kv_heads}")
            if self.dv != self.head_size:
                parts.append(f"D{self.head_size}/{self.dv}")
            elif self.head_size != 128:
                parts.append(f"D{self.head_size}")
        if self.lengths:
            parts.append("ragged")
        if self.window:
            parts.append(f"window {self.window}")
        if self.fp8:
            parts.append("fp8")
        return " ".join(parts)

    @property
    def dv(self) -> int:
        return self.v_head_size or self.head_size

    @property
    def seq_lens(self) -> tuple[int, ...]:
        return self.lengths or (self.seq_len,) * self.batch

    def smoke(self) -> Row:
        """The same kind of row at a size that the interpreter can run."""
        heads = min(self.heads, 4)
        kv_heads = max(1, min(self.kv_heads, heads * self.kv_heads // self.heads))
        query_len = self.seq_len if self.suite == "prefill" else self.query_len
        return replace(
            self, batch=min(self.batch, 2), seq_len=40, query_len=min(query_len, 40 if self.suite == "prefill" else 9), heads=heads,
            kv_heads=kv_heads, window=min(self.window, 16), lengths=(5, 40) if self.lengths else (),
        )  # fmt: skip


def _prefill() -> list[Row]:
    shapes = [
        (1, 8192, 64, 4), (8, 2048, 64, 4), (16, 512, 32, 8), (1, 32768, 32, 8), (4, 4096, 16, 16),
        (4, 4096, 64, 8, 64), (4, 4096, 16, 8, 256), (4, 4096, 16, 16, 192, 128),
    ]  # fmt: skip
    return [Row("prefill", *shape, query_len=shape[1]) for shape in shapes]


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
    rows += [Row("decode", 8, 4096), Row("decode", 8, 131072, window=4096)]
    return rows


def _spec_decode() -> list[Row]:
    return [Row("spec-decode", 16, 8192, query_len=n) for n in (1, 2, 4, 8)]


def _mla() -> list[Row]:
    sizes = [(1, 8192), (1, 65536), (16, 4096), (64, 4096), (128, 4096), (64, 32768)]
    shape = {"kv_heads": 1, "head_size": 576, "v_head_size": 512, "block_size": 64}
    rows = [Row("mla", *size, heads, **shape) for size in sizes for heads in (128, 16)]
    return rows + [Row("mla", 16, 4096, 16, query_len=4, **shape)]


SUITES: dict[str, list[Row]] = {
    "prefill": _prefill(),
    "extend": _extend(),
    "decode": _decode(),
    "spec-decode": _spec_decode(),
    "mla": _mla(),
}


def select(suites: list[str], wanted: list[str]) -> list[Row]:
    """Rows of the suites named (none: all of them) whose name is, or else contains, one of `wanted` (none: all)."""
    unknown = [name for name in suites if name not in SUITES]
    if unknown:
        raise ValueError(f"SUITE must be one of {', '.join(SUITES)}, got {', '.join(unknown)}")
    rows = [row for suite in suites or SUITES for row in SUITES[suite]]
    if not wanted:
        return rows
    chosen = []
    for text in wanted:
        found = [row for row in rows if row.name.lower() == text.lower()]
        found = found or [row for row in rows if text.lower() in row.name.lower()]
        if not found:
            raise ValueError(f"--row {text!r} names no row; rows: " + ", ".join(f"{row.suite}: {row.name}" for row in rows))
        chosen += [row for row in found if row not in chosen]
    return chosen
