"""Which table row, how many splits, what grid: host arithmetic alone, without Triton and without reading a device.

Everything here follows from the static facts of a call and from host integers, and is cached.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from tritonattn.problem import SHORT_NAMES, AttnParams, AttnProblem
from tritonattn.tuning.arch import Arch
from tritonattn.tuning.table import Row, lookup

LOG2E = math.log2(math.e)
MAX_SPLITS = 128
REDUCTION_SHARE = 8  # a split reads at least this many times the bytes that merging it moves
MAX_ROWS = 64  # query rows of one decode program, where its table row does not say; more share a KV head in several blocks
MAX_LENGTH = 1 << 30  # tokens of a sequence, new ones included: a sum of two positions fits int32
UNLIMITED = MAX_LENGTH  # a window side without a bound: it joins the arithmetic of positions without overflowing it


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def compute_dtype(problem: AttnProblem) -> torch.dtype:
    """What the matrix products run in: fp8 queries are taken as bfloat16, which holds every fp8 value.

    Triton's interpreter multiplies bfloat16 numbers by their bits: there float32 takes their place.
    """
    dtype = problem.dtype if problem.dtype in SHORT_NAMES else torch.bfloat16
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return torch.float32 if interpreted and dtype is torch.bfloat16 else dtype


def least_contraction(row: Row) -> int:
    """What the contraction of a product is padded to at least: 16; 32 under kpack 2, where Triton 3.6 counts each product of 16 twice (gfx942)."""
    return 16 * row.config.get("kpack", 1)


def bounded(window_size: Sequence[int]) -> tuple[int, int]:
    """A window without sides that reach beyond all lengths: those are -1, so that no sum of positions wraps."""
    left, right = (-1 if side >= UNLIMITED else int(side) for side in window_size)
    return left, right


def window(params: AttnParams) -> tuple[int, int]:
    """(left, right) with -1 as UNLIMITED and causal as right = 0."""
    left, right = params.window_size
    if params.causal:
        right = 0
    return left if left >= 0 else UNLIMITED, right if right >= 0 else UNLIMITED


class Descale(NamedTuple):
    """A descale as a kernel takes it: a host factor, and a device pointer with the stride between KV heads."""

    factor: float
    pointer: Tensor | None
    stride: int


def descale(value: float | Tensor | None) -> Descale:
    if value is None:
        return Descale(1.0, None, 0)
    if isinstance(value, Tensor):
        return Descale(1.0, value, 0 if value.numel() == 1 else value.stride(-1))
    return Descale(float(value), None, 0)


@lru_cache(maxsize=4096)
def prefill_row(arch: Arch, problem: AttnProblem, max_seqlen_q: int) -> Row:
    """The row for prefill and every pass of extend. The query length counts by its power of two."""
    return lookup("prefill", arch, **problem.table_key(), max_seqlen_q=power_of_two(max_seqlen_q))


class Cut(NamedTuple):
    """How a batch is cut on the device, which alone knows its lengths: see `split_length`."""

    row: Row
    parts: int
    least: int
    max_keys: int  # that a sequence counts at most: three times as many fit int32


@dataclass(frozen=True, eq=False)
class DecodePlan:
    row: Row
    rows: int  # query rows of one program
    row_blocks: int
    num_splits: int
    cut: Cut | None = None  # in place of num_splits for each


@lru_cache(maxsize=4096)
def _decode_row(arch: Arch, problem: AttnProblem, rows: int, units: int, max_seqlen_k: int) -> Row:
    kernel = "mla_decode" if problem.kv_layout == "latent" else "decode"
    key = problem.table_key()
    return lookup(kernel, arch, **key, rows=rows, units_per_cu=units / arch.compute_units, max_seqlen_k=max_seqlen_k)


@lru_cache(maxsize=8192)
def decode_plan(
    arch: Arch, problem: AttnProblem, num_seqs: int, max_seqlen_q: int, max_seqlen_k: int, num_splits: int = 0
) -> DecodePlan:
    """Rows per program and number of splits of `decode` and `mla_decode`; num_splits > 0 is the caller's choice.

    Splits fill the compute units with as many programs as the row says they hold, in whole waves, with at least one tile of keys
    each (or `keys_per_split`): too few leave units idle, too many make the merge the larger part.
    """
    rows = problem.group * max_seqlen_q
    units = max(num_seqs * problem.num_kv_heads * -(-rows // MAX_ROWS), 1)
    row = _decode_row(arch, problem, rows, units, power_of_two(max_seqlen_k))
    block_rows = min(power_of_two(max(rows, 16)), row.config.get("BLOCK_H", MAX_ROWS))
    row_blocks = -(-rows // block_rows)
    units = max(num_seqs * problem.num_kv_heads * row_blocks, 1)
    if num_splits <= 0:
        room = int(row.config["programs_per_cu"] * arch.compute_units) // units
        parts = -(-max_seqlen_k // row.config.get("keys_per_split", row.config["BLOCK_N"]))
        num_splits = max(1, min(room, parts, MAX_SPLITS))
    num_splits = min(num_splits, max(max_seqlen_k, 1))  # more than one a key are empty
    return DecodePlan(row, block_rows, row_blocks, num_splits)


@lru_cache(maxsize=8192)
def device_plan(
    arch: Arch, problem: AttnProblem, num_seqs: int, max_seqlen_q: int, max_seqlen_k: int, num_splits: int = 0, window_left: int = -1,
    ragged: bool = True,
) -> DecodePlan:
    """`decode_plan` of sequences whose lengths the host does not know: they may differ, and one of them may be the only long one.

    Then a long sequence would get no more splits than the short ones, and the call last as long as its few programs. So the batch is cut
    on the device: where a lone sequence would have more splits, and a split is so long that it pays, `cut_keys` of the table. ragged:
    whether they may differ at all.
    """
    plan = decode_plan(arch, problem, num_seqs, max_seqlen_q, max_seqlen_k, num_splits)
    if not ragged or num_splits > 0 or num_seqs < 2 or plan.num_splits >= decode_plan(arch, problem, 1, max_seqlen_q, max_seqlen_k).num_splits:
        return plan
    keys = min(max_seqlen_k, window_left + max_seqlen_q) if window_left >= 0 else max_seqlen_k
    row = lookup("cut", arch, **problem.table_key())
    if keys < row.config["cut_keys"] * plan.num_splits:
        return plan
    return replace(plan, cut=Cut(row, *split_rule(arch, problem, plan, max_seqlen_q, num_seqs), min(max_seqlen_k, MAX_LENGTH // 2)))


@cache
def split_rule(arch: Arch, problem: AttnProblem, plan: DecodePlan, max_seqlen_q: int, num_seqs: int) -> tuple[int, int]:
    """Parts of so many sequences that fill the device with programs, and the keys that one has at least: then merging it (a float32 row
    out and in again per query row) costs little beside reading them."""
    programs = int(plan.row.config["programs_per_cu"] * arch.compute_units)
    parts = min(max(1, programs // (problem.num_kv_heads * plan.row_blocks)), num_seqs * MAX_SPLITS)
    merged = 2 * 4 * problem.v_head_size * problem.group * max_seqlen_q
    read = (problem.head_size + problem.v_head_size) * problem.kv_dtype.itemsize
    return parts, plan.row.config.get("keys_per_split") or -(-REDUCTION_SHARE * merged // read)


# How sequences of unlike lengths are cut: into parts of about one length. Arithmetic alone, of numbers here, of arrays in the router, and of
# what the device holds in `paths.cut`.


def split_length(total, longest, parts, most, least):
    """The keys of a part, so that there are about `parts` over all sequences, and of one `most`."""
    return max(max((total + parts - 1) // parts, (longest + most - 1) // most), least)


def part_counts(keys, length):
    """How many parts of about this length make up the keys; where that is less than two, they stay whole."""
    return (2 * keys + length) // (2 * length)


def fewer_parts(keys, length):
    """In place of `part_counts` where all sequences are cut, and into more than `parts`: the few too many would run when all others are done."""
    whole = keys // length
    return whole + (whole < 2)


def most_work(num_seqs: int, parts: int) -> tuple[int, int, int]:
    """Room of `DecodeWork` for any lengths: items, merges, and parts (rounding makes 4 of 3 at most: of 1.5 two)."""
    return num_seqs + parts, min(num_seqs, parts), 4 * parts // 3


@lru_cache(maxsize=1024)
def unaligned_row(arch: Arch, problem: AttnProblem, rows: int) -> Row:
    """In place of a decode plan's row, which is chosen before the cache is seen, where the address or a stride of that is no multiple of
    16 bytes: elements that come one by one take more registers. rows: of one program, as the plan has them."""
    kernel = "mla_decode_unaligned" if problem.kv_layout == "latent" else "decode_unaligned"
    return lookup(kernel, arch, **problem.table_key(), rows=rows)


class DecodeWork(NamedTuple):
    """The parts of a decode batch in which each sequence has its own number of splits, longest sequences first. int32, flat, on the device."""

    items: Tensor  # [num_items, 3] sequence, split, splits of it; 0 splits: no item
    num_items: int
    merges: Tensor  # [num_merges, 3] sequence, its first item, items of it; 0 items: no merge
    num_merges: int
    num_parts: int  # so many items at most are parts of a sequence that is cut; they come first


ROW_ALIGN = 16  # where a sequence's part of a `ContextRow` may begin: then V of a preshuffled page is gathered in 16-byte runs


class ContextRow(NamedTuple):
    """The keys that a batch of extend requests needs, laid end to end. int32, on the device."""

    starts: Tensor  # [B] the first position that some query sees
    lengths: Tensor  # [B] how many from there on
    cu: Tensor  # [B + 1] offsets in the row, multiples of `ROW_ALIGN` (in MLA of 1); what lies between the end of a sequence and the next is not read
