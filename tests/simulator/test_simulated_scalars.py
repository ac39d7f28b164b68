# ruff: noqa: B023  (lambdas in the tables bind their loop variable by a call)
"""Scalar instructions against Python integers, on all pairs of edge values; SCC and exec included."""

import itertools

import numpy as np
import pytest
from machine import run

from tritonattn.simulator import core

EDGES32 = [
    0,
    1,
    2,
    5,
    31,
    32,
    33,
    0x7F,
    0xFF,
    0x8000,
    0xFFFF,
    0x10005,
    0x100010,
    0x80000,
    0x200008,
    0x280020,
    0x7FFFFFFF,
    0x80000000,
    0x80000001,
    0xFFFFFFFE,
    0xFFFFFFFF,
    0x12345678,
]
M32, M64 = (1 << 32) - 1, (1 << 64) - 1


def s32(x):
    return x - (1 << 32) if x >> 31 & 1 else x


def s16(x):
    x &= 0xFFFF
    return x - 65536 if x >> 15 else x


def s64(x):
    return x - (1 << 64) if x >> 63 else x


def nonzero(fn, bits=32):
    mask = (1 << bits) - 1
    return lambda a, b, d, c: (fn(a, b) & mask, (fn(a, b) & mask) != 0)


def keep(fn):
    return lambda a, b, d, c: (fn(a, b), c)


def add_like(fn, is_carry):
    def apply(a, b, d, c):
        r = fn(a, b, c)
        return r & M32, is_carry(r, a, b)

    return apply


def overflow(r, a, b):
    return not -(1 << 31) <= r < 1 << 31


def field(a, b, sign, bits=32):
    at, n = b & bits - 1, b >> 16 & 127
    v = ((s32 if bits == 32 else s64)(a) if sign else a) >> at
    if n == 0:
        return 0
    v &= (1 << min(n, bits)) - 1
    return v - (1 << n) if sign and n < bits and v >> n - 1 else v


LOGIC = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "xnor": lambda a, b: ~(a ^ b),
    "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b),
    "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b,
}
ORDER = {
    "eq": lambda a, b: a == b,
    "lg": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
REFERENCE = {
    "s_mov_b32": keep(lambda a, b: a),
    "s_mov_b64": keep(lambda a, b: a),
    "s_movk_i32": keep(lambda a, b: s16(a)),
    "s_cmov_b32": lambda a, b, d, c: (a if c else d, c),
    "s_not_b32": nonzero(lambda a, b: ~a),
    "s_not_b64": nonzero(lambda a, b: ~a, 64),
    **{f"s_{n}_b{w}": nonzero(fn, w) for n, fn in LOGIC.items() for w in (32, 64)},
    "s_lshl_b32": nonzero(lambda a, b: a << (b & 31)),
    "s_lshl_b64": nonzero(lambda a, b: a << (b & 63), 64),
    "s_lshr_b32": nonzero(lambda a, b: a >> (b & 31)),
    "s_lshr_b64": nonzero(lambda a, b: a >> (b & 63), 64),
    "s_ashr_i32": nonzero(lambda a, b: s32(a) >> (b & 31)),
    "s_ashr_i64": nonzero(lambda a, b: s64(a) >> (b & 63), 64),
    "s_bfe_u32": nonzero(lambda a, b: field(a, b, False)),
    "s_bfe_i32": nonzero(lambda a, b: field(a, b, True)),
    "s_bfe_u64": nonzero(lambda a, b: field(a, b, False, 64), 64),
    "s_bfe_i64": nonzero(lambda a, b: field(a, b, True, 64), 64),
    "s_bfm_b64": keep(lambda a, b: ((1 << (a & 63)) - 1) << (b & 63)),
    "s_bfm_b32": keep(lambda a, b: ((1 << (a & 31)) - 1) << (b & 31)),
    "s_bitset0_b32": lambda a, b, d, c: (d & ~(1 << (a & 31)), c),
    "s_bitset1_b32": lambda a, b, d, c: (d | 1 << (a & 31), c),
    "s_brev_b32": keep(lambda a, b: int(f"{a:032b}"[::-1], 2)),
    "s_bcnt1_i32_b32": nonzero(lambda a, b: a.bit_count()),
    "s_bcnt1_i32_b64": nonzero(lambda a, b: a.bit_count()),
    "s_ff1_i32_b32": keep(lambda a, b: (a & -a).bit_length() - 1),
    "s_ff1_i32_b64": keep(lambda a, b: (a & -a).bit_length() - 1),
    "s_flbit_i32_b32": keep(lambda a, b: 32 - a.bit_length() if a else -1),
    "s_flbit_i32_b64": keep(lambda a, b: 64 - a.bit_length() if a else -1),
    "s_sext_i32_i8": keep(lambda a, b: (a & 255) - 256 if a & 128 else a & 255),
    "s_sext_i32_i16": keep(lambda a, b: s16(a)),
    "s_abs_i32": nonzero(lambda a, b: abs(s32(a))),
    "s_add_i32": add_like(lambda a, b, c: s32(a) + s32(b), overflow),
    "s_sub_i32": add_like(lambda a, b, c: s32(a) - s32(b), overflow),
    "s_add_u32": add_like(lambda a, b, c: a + b, lambda r, a, b: r > M32),
    "s_sub_u32": add_like(lambda a, b, c: a - b, lambda r, a, b: r < 0),
    "s_addc_u32": add_like(lambda a, b, c: a + b + c, lambda r, a, b: r > M32),
    "s_subb_u32": add_like(lambda a, b, c: a - b - c, lambda r, a, b: r < 0),
    "s_addk_i32": lambda a, b, d, c: ((d + s16(a)) & M32, overflow(s32(d) + s16(a), 0, 0)),
    "s_mulk_i32": lambda a, b, d, c: (s32(d) * s16(a), c),
    "s_mul_i32": keep(lambda a, b: a * b),
    "s_mul_hi_u32": keep(lambda a, b: a * b >> 32),
    "s_mul_hi_i32": keep(lambda a, b: s32(a) * s32(b) >> 32),
    **{f"s_lshl{n}_add_u32": add_like((lambda n: lambda a, b, c: (a << n) + b)(n), lambda r, a, b: r > M32) for n in (1, 2, 3, 4)},
    "s_min_i32": lambda a, b, d, c: (min(s32(a), s32(b)), s32(a) <= s32(b)),
    "s_max_i32": lambda a, b, d, c: (max(s32(a), s32(b)), s32(a) >= s32(b)),
    "s_min_u32": lambda a, b, d, c: (min(a, b), a <= b),
    "s_max_u32": lambda a, b, d, c: (max(a, b), a >= b),
    "s_pack_ll_b32_b16": keep(lambda a, b: a & 0xFFFF | (b & 0xFFFF) << 16),
    "s_pack_lh_b32_b16": keep(lambda a, b: a & 0xFFFF | b >> 16 << 16),
    "s_pack_hh_b32_b16": keep(lambda a, b: a >> 16 | b >> 16 << 16),
    "s_cselect_b32": lambda a, b, d, c: (a if c else b, c),
    "s_cselect_b64": lambda a, b, d, c: (a if c else b, c),
    **{
        f"s_cmp_{n}_{t}": (lambda fn, cv: lambda a, b, d, c: (0, fn(cv(a), cv(b))))(fn, cv)
        for n, fn in ORDER.items()
        for t, cv in (("i32", s32), ("u32", int), ("u64", int))
    },
    **{f"s_cmpk_{n}_i32": (lambda fn: lambda a, b, d, c: (0, fn(s32(a), s16(b))))(fn) for n, fn in ORDER.items()},
    **{f"s_cmpk_{n}_u32": (lambda fn: lambda a, b, d, c: (0, fn(a, b & 0xFFFF)))(fn) for n, fn in ORDER.items()},
    "s_bitcmp0_b32": lambda a, b, d, c: (0, not a >> (b & 31) & 1),
    "s_bitcmp1_b32": lambda a, b, d, c: (0, a >> (b & 31) & 1),
}
FORMS = {name: form for name, (_, form, family) in core.operations().items() if family == "scalar"}
IMMEDIATE = {"s_movk_i32", "s_addk_i32", "s_mulk_i32"}


@pytest.mark.parametrize("name", sorted(FORMS))
def test_scalar_instruction(name):
    """Many cases in one run: operands sit in s10.., results and SCC are collected in the lanes of v5-v7."""
    results, sources = FORMS[name].split("=")
    edges = {"s": EDGES32, "S": [a | b << 32 for a, b in zip(EDGES32, reversed(EDGES32), strict=True)] + [0, M64], "k": [0, 1, 0x7FFF, 0x8000, 0xFFFF]}
    operands = ["k" if name in IMMEDIATE else s for s in sources]
    cases = list(itertools.product(*(edges[s] for s in operands), [0, 1]))
    if len(cases) > 128:
        np.random.default_rng(0).shuffle(cases)
        cases = cases[:128]
    cases = [c if len(operands) == 2 else (c[0], 0, c[1]) for c in cases]
    for start in range(0, len(cases), 64):
        part, lines = cases[start : start + 64], []
        for lane, (a, b, scc) in enumerate(part):
            texts = []
            for register, kind, value in ((10, operands[0], a), (12, operands[1] if len(operands) > 1 else None, b)):
                if kind == "k":
                    texts.append(hex(value))
                elif kind:
                    lines += [f"s_mov_b32 s{register}, {value & M32:#x}", f"s_mov_b32 s{register + 1}, {value >> 32:#x}"]
                    texts.append(f"s[{register}:{register + 1}]" if kind == "S" else f"s{register}")
            if results:
                lines += ["s_mov_b32 s14, 0x40001000", "s_mov_b32 s15, 0"]
                texts.insert(0, "s[14:15]" if results == "S" else "s14")
            lines += [f"s_cmp_eq_u32 0, {1 - scc}", f"{name} {', '.join(texts)}", "s_cselect_b32 s16, 1, 0"]
            lines += [f"v_writelane_b32 v5, s14, {lane}", f"v_writelane_b32 v6, s15, {lane}", f"v_writelane_b32 v7, s16, {lane}"]
        low, high, scc_out = run(
            "\n".join(["s_mov_b64 s[14:15], 0", "v_mov_b32_e32 v5, 0", "v_mov_b32_e32 v6, 0", "v_mov_b32_e32 v7, 0", *lines]), {}, [5, 6, 7]
        )
        for lane, (a, b, scc) in enumerate(part):
            value, flag = REFERENCE[name](a, b, 0x40001000, scc)
            got = int(low[lane]) | (int(high[lane]) << 32 if results == "S" else 0)
            assert not results or got == value & (M64 if results == "S" else M32), f"{name} {a:#x} {b:#x} scc {scc}: {got:#x}"
            assert int(scc_out[lane]) == int(flag), f"{name} {a:#x} {b:#x} scc {scc}: SCC {int(scc_out[lane])}"


@pytest.mark.parametrize(
    "op, fn",
    [
        ("and", lambda s, e: s & e),
        ("or", lambda s, e: s | e),
        ("xor", lambda s, e: s ^ e),
        ("andn2", lambda s, e: s & ~e),
        ("orn2", lambda s, e: s | ~e),
        ("andn1", lambda s, e: ~s & e),
    ],
)
def test_saveexec(op, fn):
    s, e = 0xF0F0F0F0_12345678, 0x00FF00FF_0000FFFF
    out, *words = run(
        f"""s_mov_b32 exec_lo, {e & M32:#x}
        s_mov_b32 exec_hi, {e >> 32:#x}
        s_{op}_saveexec_b64 s[14:15], s[10:11]
        s_cselect_b32 s16, 1, 0
        s_mov_b64 s[12:13], exec
        v_mov_b32_e32 v3, 1""",
        {3: np.zeros(64, np.uint32)},
        [3],
        scalars={10: s, 11: s >> 32},
        scalar_outputs=[12, 13, 14, 15, 16],
    )
    want = fn(s, e) & M64
    assert words == [want & M32, want >> 32, e & M32, e >> 32, 1]
    assert [int(x) for x in out] == [want >> n & 1 for n in range(64)]


@pytest.mark.parametrize(
    "branch, setup, taken",
    [
        ("s_branch", "", True),
        ("s_cbranch_scc0", "s_cmp_eq_u32 0, 1", True),
        ("s_cbranch_scc0", "s_cmp_eq_u32 0, 0", False),
        ("s_cbranch_scc1", "s_cmp_eq_u32 0, 0", True),
        ("s_cbranch_vccz", "s_mov_b64 vcc, 0", True),
        ("s_cbranch_vccz", "s_mov_b64 vcc, 4", False),
        ("s_cbranch_vccnz", "s_mov_b64 vcc, 4", True),
        ("s_cbranch_execz", "", False),
        ("s_cbranch_execnz", "", True),
    ],
)
def test_branch(branch, setup, taken):
    [got] = run(f"{setup}\ns_mov_b32 s10, 1\n{branch} .LBB0_1\ns_mov_b32 s10, 0\n.LBB0_1:", {}, scalar_outputs=[10])
    assert got == taken
