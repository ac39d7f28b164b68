# ruff: noqa: B023  (lambdas in the tables bind their loop variable by a call)
"""Every lane instruction of the executor against numpy, on all pairs (triples) of edge values."""

import itertools

import numpy as np
import pytest
from machine import U32, run

from tritonattn.simulator import core

np.seterr(all="ignore")
F, I, Q = np.float32, np.int32, np.uint64
FLOATS = np.array(
    [
        0,
        0x80000000,
        1,
        0x80000001,
        0x007FFFFF,
        0x00800000,
        0x3F800000,
        0xBF800000,
        0x3F800001,
        0x3FFFFFFF,
        0x7F7FFFFF,
        0xFF7FFFFF,
        0x7F800000,
        0xFF800000,
        0x7FC00000,
        0x3F000000,
        0x40490FDB,
        0xC2C80000,
        0x4B000001,
        0xCF000001,
        0x4F7FFFFF,
        0x477FF000,
    ],
    U32,
)
INTS = np.array(
    [
        0,
        1,
        2,
        3,
        7,
        8,
        15,
        16,
        17,
        24,
        31,
        32,
        33,
        63,
        0x7F,
        0x80,
        0xFF,
        0x7FFF,
        0x8000,
        0xFFFF,
        0x10000,
        0x7FFFFF,
        0x800000,
        0xFFFFFF,
        0x7FFFFFFF,
        0x80000000,
        0x80000001,
        0xFFFFFFFE,
        0xFFFFFFFF,
        0x12345678,
        0x9ABCDEF0,
        0x00FF00FF,
    ],
    U32,
)
MIX = np.random.default_rng(0).integers(0, 1 << 32, 64, dtype=U32)


def f(x):
    return x.view(F)


def i(x):
    return x.view(I)


def lo(x):
    return x & U32(0xFFFF)


def half(x):
    return lo(x).astype(np.uint16).view(np.float16).astype(F)


def to_half(x):
    return np.asarray(x, F).astype(np.float16).view(np.uint16).astype(U32)


def flush(x):
    return np.where(np.abs(x) < F(2) ** -126, np.copysign(F(0), x), x).astype(F)


def wide(x):
    return x.astype(np.float64)


def bf16(x):
    import ml_dtypes

    return np.asarray(x, F).astype(ml_dtypes.bfloat16).view(np.uint16).astype(U32)


def count(fn):
    """A function of Python ints, applied lane by lane."""

    def apply(*sources):
        return np.array([fn(*(int(s[k]) for s in sources)) & 0xFFFFFFFF for k in range(len(sources[0]))], U32)

    return apply


def signed(x, bits=32):
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> bits - 1 else x


def clip(lo_, hi):
    return lambda x: int(min(max(np.trunc(x), lo_), hi)) if x == x else 0


def maximum(*xs):
    """Larger number; a NaN loses; +0 beats -0."""
    out = xs[0]
    for x in xs[1:]:
        out = np.where(out == x, np.where(np.signbit(out), x, out), np.fmax(out, x))
    return out


def minimum(*xs):
    return -maximum(*[-x for x in xs])


def byte_permute(a, b, sel):
    data = (a << 32 | b).to_bytes(8, "little")
    out = []
    for s in sel.to_bytes(4, "little"):
        out.append(data[s] if s < 8 else (255 if data[2 * (s - 8) + 1] & 128 else 0) if s < 12 else 0 if s == 12 else 255)
    return int.from_bytes(bytes(out), "little")


def fma(a, b, c):
    """float32 fused multiply-add through exact rationals, rounded once."""
    from fractions import Fraction

    out = np.empty(len(a), F)
    for k, (x, y, z) in enumerate(zip(a, b, c, strict=True)):
        if not np.isfinite(x) or not np.isfinite(y) or not np.isfinite(z):
            out[k] = wide(x) * wide(y) + wide(z)
            continue
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        if exact == 0:
            out[k] = wide(x) * wide(y) + wide(z)
            continue
        guess = F(float(exact)) if abs(exact) < Fraction(2) ** 130 else F(np.inf if exact > 0 else -np.inf)
        if np.isinf(guess):
            out[k] = guess if abs(exact) >= Fraction(2) ** 128 - Fraction(2) ** 103 else np.copysign(np.finfo(F).max, guess)
            continue
        near = [guess, np.nextafter(guess, F(np.inf)), np.nextafter(guess, F(-np.inf))]
        near = [n for n in near if np.isfinite(n)]
        best = min(near, key=lambda n: (abs(Fraction(float(n)) - exact), int(n.view(U32)) & 1))
        out[k] = np.copysign(best, 1 if exact > 0 else -1)
    return out


REFERENCE = {
    "v_mov_b32": lambda a: a,
    "v_accvgpr_read_b32": lambda a: a,
    "v_accvgpr_write_b32": lambda a: a,
    "v_accvgpr_mov_b32": lambda a: a,
    "v_not_b32": lambda a: ~a,
    "v_and_b32": lambda a, b: a & b,
    "v_or_b32": lambda a, b: a | b,
    "v_xor_b32": lambda a, b: a ^ b,
    "v_xnor_b32": lambda a, b: ~(a ^ b),
    "v_and_or_b32": lambda a, b, c: a & b | c,
    "v_or3_b32": lambda a, b, c: a | b | c,
    "v_bfi_b32": lambda a, b, c: a & b | ~a & c,
    "v_bfe_u32": count(lambda a, b, c: a >> (b & 31) & (1 << (c & 31)) - 1),
    "v_bfe_i32": count(lambda a, b, c: signed(signed(a) >> (b & 31), c & 31) if c & 31 else 0),
    "v_bfm_b32": count(lambda a, b: ((1 << (a & 31)) - 1) << (b & 31)),
    "v_bfrev_b32": count(lambda a: int(f"{a:032b}"[::-1], 2)),
    "v_bcnt_u32_b32": count(lambda a, b: a.bit_count() + b),
    "v_ffbl_b32": count(lambda a: (a & -a).bit_length() - 1),
    "v_ffbh_u32": count(lambda a: 32 - a.bit_length() if a else -1),
    "v_lshlrev_b32": count(lambda a, b: b << (a & 31)),
    "v_lshrrev_b32": count(lambda a, b: b >> (a & 31)),
    "v_ashrrev_i32": count(lambda a, b: signed(b) >> (a & 31)),
    "v_lshl_or_b32": count(lambda a, b, c: a << (b & 31) & 0xFFFFFFFF | c),
    "v_lshl_add_u32": count(lambda a, b, c: (a << (b & 31)) + c),
    "v_add_lshl_u32": count(lambda a, b, c: a + b << (c & 31)),
    "v_alignbit_b32": count(lambda a, b, c: (a << 32 | b) >> (c & 31)),
    "v_alignbyte_b32": count(lambda a, b, c: (a << 32 | b) >> 8 * (c & 3)),
    "v_perm_b32": count(byte_permute),
    "v_add_u32": lambda a, b: a + b,
    "v_sub_u32": lambda a, b: a - b,
    "v_subrev_u32": lambda a, b: b - a,
    "v_add3_u32": lambda a, b, c: a + b + c,
    "v_xad_u32": lambda a, b, c: (a ^ b) + c,
    "v_mul_lo_u32": lambda a, b: a * b,
    "v_mul_hi_u32": count(lambda a, b: a * b >> 32),
    "v_mul_hi_i32": count(lambda a, b: signed(a) * signed(b) >> 32),
    "v_mul_u32_u24": count(lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF)),
    "v_mul_hi_u32_u24": count(lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF) >> 32),
    "v_mul_i32_i24": count(lambda a, b: signed(a, 24) * signed(b, 24)),
    "v_mad_u32_u24": count(lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c),
    "v_mad_i32_i24": count(lambda a, b, c: signed(a, 24) * signed(b, 24) + c),
    "v_sad_u32": count(lambda a, b, c: abs(a - b) + c),
    "v_min_u32": np.minimum,
    "v_max_u32": np.maximum,
    "v_min_i32": lambda a, b: np.minimum(i(a), i(b)),
    "v_max_i32": lambda a, b: np.maximum(i(a), i(b)),
    "v_min3_u32": count(min),
    "v_max3_u32": count(max),
    "v_min3_i32": count(lambda *x: min(map(signed, x))),
    "v_max3_i32": count(lambda *x: max(map(signed, x))),
    "v_med3_i32": count(lambda *x: sorted(map(signed, x))[1]),
    "v_med3_u32": count(lambda *x: sorted(x)[1]),
    "v_add_u16": count(lambda a, b: a + b & 0xFFFF),
    "v_sub_u16": count(lambda a, b: a - b & 0xFFFF),
    "v_subrev_u16": count(lambda a, b: b - a & 0xFFFF),
    "v_mul_lo_u16": count(lambda a, b: a * b & 0xFFFF),
    "v_mad_u16": count(lambda a, b, c: a * b + c & 0xFFFF),
    "v_mad_legacy_u16": count(lambda a, b, c: a * b + c & 0xFFFF),
    "v_min_u16": lambda a, b: np.minimum(lo(a), lo(b)),
    "v_max_u16": lambda a, b: np.maximum(lo(a), lo(b)),
    "v_min_i16": count(lambda a, b: min(signed(a, 16), signed(b, 16)) & 0xFFFF),
    "v_max_i16": count(lambda a, b: max(signed(a, 16), signed(b, 16)) & 0xFFFF),
    "v_lshlrev_b16": count(lambda a, b: b << (a & 15) & 0xFFFF),
    "v_lshrrev_b16": count(lambda a, b: (b & 0xFFFF) >> (a & 15)),
    "v_ashrrev_i16": count(lambda a, b: signed(b, 16) >> (a & 15) & 0xFFFF),
    "v_pack_b32_f16": count(lambda a, b: a & 0xFFFF | (b & 0xFFFF) << 16),
    "v_add_f32": lambda a, b: f(a) + f(b),
    "v_sub_f32": lambda a, b: f(a) - f(b),
    "v_subrev_f32": lambda a, b: f(b) - f(a),
    "v_mul_f32": lambda a, b: f(a) * f(b),
    "v_mul_legacy_f32": lambda a, b: np.where((f(a) == 0) | (f(b) == 0), F(0), f(a) * f(b)),
    "v_fma_f32": lambda a, b, c: fma(f(a), f(b), f(c)),
    "v_fmac_f32": lambda a, b, d: fma(f(a), f(b), f(d)),
    "v_fmamk_f32": lambda a, b, c: fma(f(a), f(b), f(c)),
    "v_fmaak_f32": lambda a, b, c: fma(f(a), f(b), f(c)),
    "v_max_f32": lambda a, b: maximum(f(a), f(b)),
    "v_min_f32": lambda a, b: minimum(f(a), f(b)),
    "v_max3_f32": lambda a, b, c: maximum(f(a), f(b), f(c)),
    "v_min3_f32": lambda a, b, c: minimum(f(a), f(b), f(c)),
    "v_maximum3_f32": lambda a, b, c: np.where(np.isnan(f(a)) | np.isnan(f(b)) | np.isnan(f(c)), F("nan"), maximum(f(a), f(b), f(c))),
    "v_minimum3_f32": lambda a, b, c: np.where(np.isnan(f(a)) | np.isnan(f(b)) | np.isnan(f(c)), F("nan"), minimum(f(a), f(b), f(c))),
    "v_med3_f32": lambda a, b, c: np.where(
        np.isnan(f(a)) | np.isnan(f(b)) | np.isnan(f(c)), minimum(f(a), f(b), f(c)), np.sort(np.stack([f(a), f(b), f(c)]), 0)[1]
    ),
    "v_exp_f32": lambda a: flush(np.exp2(wide(flush(f(a)))).astype(F)),
    "v_log_f32": lambda a: np.log2(wide(flush(f(a)))).astype(F),
    "v_rcp_f32": lambda a: flush(F(1) / flush(f(a))),
    "v_rcp_iflag_f32": lambda a: flush(F(1) / flush(f(a))),
    "v_rsq_f32": lambda a: (1 / np.sqrt(wide(flush(f(a))))).astype(F),
    "v_sqrt_f32": lambda a: np.sqrt(flush(f(a))),
    "v_sin_f32": lambda a: np.sin(2 * np.pi * wide(f(a))).astype(F),
    "v_cos_f32": lambda a: np.cos(2 * np.pi * wide(f(a))).astype(F),
    "v_floor_f32": lambda a: np.floor(f(a)),
    "v_ceil_f32": lambda a: np.ceil(f(a)),
    "v_trunc_f32": lambda a: np.trunc(f(a)),
    "v_rndne_f32": lambda a: np.rint(f(a)),
    "v_fract_f32": lambda a: np.minimum(f(a) - np.floor(f(a)), np.nextafter(F(1), F(0))),
    "v_ldexp_f32": lambda a, b: np.ldexp(f(a), np.clip(i(b), -2000, 2000)),
    "v_frexp_exp_i32_f32": lambda a: np.where(np.isfinite(f(a)), np.frexp(f(a))[1], 0),
    "v_frexp_mant_f32": lambda a: np.frexp(f(a))[0],
    "v_cvt_f32_u32": lambda a: a.astype(F),
    "v_cvt_f32_i32": lambda a: i(a).astype(F),
    "v_cvt_u32_f32": lambda a: np.array([clip(0, 0xFFFFFFFF)(x) for x in wide(f(a))], U32),
    "v_cvt_i32_f32": lambda a: np.array([clip(-(2**31), 2**31 - 1)(x) for x in wide(f(a))], I),
    **{f"v_cvt_f32_ubyte{n}": (lambda n: lambda a: (a >> U32(8 * n) & U32(255)).astype(F))(n) for n in range(4)},
    "v_cvt_f16_f32": lambda a: to_half(f(a)),
    "v_cvt_f32_f16": half,
    "v_cvt_f32_bf16": lambda a: f(a << U32(16)),
    "v_cvt_pk_bf16_f32": lambda a, b: bf16(f(a)) | bf16(f(b)) << U32(16),
    "v_cvt_pk_f16_f32": lambda a, b: to_half(f(a)) | to_half(f(b)) << U32(16),
    "v_cvt_pk_u16_u32": count(lambda a, b: min(a, 65535) | min(b, 65535) << 16),
    "v_add_f16": lambda a, b: to_half(half(a) + half(b)),
    "v_sub_f16": lambda a, b: to_half(half(a) - half(b)),
    "v_mul_f16": lambda a, b: to_half(half(a) * half(b)),
    "v_max_f16": lambda a, b: to_half(maximum(half(a), half(b))),
    "v_min_f16": lambda a, b: to_half(minimum(half(a), half(b))),
    "v_fma_f16": lambda a, b, c: to_half((wide(half(a)) * wide(half(b)) + wide(half(c))).astype(F)),
}
REFERENCE_64 = {
    "v_lshl_add_u64": lambda a, b, c: (a << Q(int(b) & 7)) + c,
    "v_lshlrev_b64": lambda a, b: b << Q(int(a) & 63),
    "v_lshrrev_b64": lambda a, b: b >> Q(int(a) & 63),
    "v_ashrrev_i64": lambda a, b: (b.view(np.int64) >> np.int64(int(a) & 63)).view(Q),
    "v_mov_b64": lambda a: a,
}
LANE_OPS = {name: form for name, (_, form, family) in core.operations().items() if family == "lanes"}
F16_RESULTS = {"v_cvt_f16_f32", "v_cvt_pk_f16_f32", "v_add_f16", "v_sub_f16", "v_mul_f16", "v_max_f16", "v_min_f16", "v_fma_f16"}


def same(got, want, name):
    """Equal bits; a NaN need only be a NaN; transcendental results may differ in the last place."""
    want = np.ascontiguousarray(want)
    if want.dtype.kind != "f":
        want = want.astype(U32) if want.dtype != I else want.view(U32)
        if name in F16_RESULTS or "bf16" in name:  # any NaN pattern of 16 bits will do
            for shift in (0, 16):
                g, w = got >> U32(shift) & U32(0xFFFF), want >> U32(shift) & U32(0xFFFF)
                top = U32(0x7F80 if "bf16" in name else 0x7C00)
                nan = (w & U32(0x7FFF)) > top
                assert ((g & U32(0x7FFF)) > top)[nan].all() and (g == w)[~nan].all(), name
            return
        np.testing.assert_array_equal(got, want, name)
        return
    want = want.astype(F)
    nan = np.isnan(want)
    assert np.isnan(f(got))[nan].all(), name
    if name in ("v_exp_f32", "v_log_f32", "v_rsq_f32", "v_sin_f32", "v_cos_f32"):
        np.testing.assert_allclose(f(got)[~nan], want[~nan], rtol=3e-7, atol=1e-30)
    elif name == "v_med3_f32":  # which of two zeros is in the middle is not defined
        np.testing.assert_array_equal(f(got)[~nan], want[~nan])
    else:
        np.testing.assert_array_equal(got[~nan], want.view(U32)[~nan], name)


def samples(kinds):
    """Rows of 64 source values covering the edge values of each kind, all pairs and a sample of triples."""
    edges = [np.concatenate([FLOATS, MIX[:4]]) if k in "fd" else INTS for k in kinds]
    combos = list(itertools.product(*edges))
    if len(kinds) == 3:
        np.random.default_rng(1).shuffle(combos)
        combos = combos[:2048]
    columns = np.array(combos, U32).T
    pad = -columns.shape[1] % 64
    return np.concatenate([columns, np.repeat(columns[:, -1:], pad, 1)], 1).reshape(len(kinds), -1, 64)


@pytest.mark.parametrize("name", sorted(n for n, form in LANE_OPS.items() if form[0] != "V"))
def test_lane_instruction(name):
    form = LANE_OPS[name]
    kinds = form[2:]
    rows = samples(kinds)
    if name.endswith("_f16") and name not in ("v_cvt_pk_f16_f32", "v_pack_b32_f16"):
        rows = rows.copy()
        rows[:, 0] = np.random.default_rng(2).integers(0, 1 << 16, (len(kinds), 64))
    registers = [f"v{k + 1}" for k in range(len(kinds) - kinds.count("d"))]
    result = "v9"
    if kinds.endswith("d"):
        result = f"v{len(kinds)}"
    if "accvgpr" in name:
        before = {
            "v_accvgpr_read_b32": ("v_accvgpr_write_b32 a1, v1\n", "v9", "a1"),
            "v_accvgpr_write_b32": ("", "a3", "v1"),
            "v_accvgpr_mov_b32": ("v_accvgpr_write_b32 a1, v1\n", "a3", "a1"),
        }[name]
        body, result = f"{before[0]}{name} {before[1]}, {before[2]}", before[1]
    else:
        body = f"{name} {result}, {', '.join(registers)}"
    for k in range(rows.shape[1]):
        [got] = run(body, {n + 1: rows[n, k] for n in range(len(kinds))}, [result])
        same(got, REFERENCE[name](*rows[:, k]), name)


@pytest.mark.parametrize("name", sorted(n for n, form in LANE_OPS.items() if form[0] == "V"))
def test_64_bit_instruction(name):
    kinds = LANE_OPS[name][2:]
    rng = np.random.default_rng(3)
    inputs, values, register, texts = {}, [], 2, []
    for kind in kinds:
        x = rng.integers(0, 1 << 63, 64, dtype=Q) * Q(2) + rng.integers(0, 2, 64, dtype=Q) if kind == "q" else rng.integers(0, 80, 64, dtype=U32).astype(Q)
        values.append(x)
        inputs[register] = (x & Q(0xFFFFFFFF)).astype(U32)
        texts.append(f"v[{register}:{register + 1}]" if kind == "q" else f"v{register}")
        if kind == "q":
            inputs[register + 1] = (x >> Q(32)).astype(U32)
        register += 2
    low, high = run(f"{name} v[20:21], {', '.join(texts)}", inputs, [20, 21])
    want = np.array([REFERENCE_64[name](*(v[k] for v in values)) for k in range(64)], Q)
    np.testing.assert_array_equal(low.astype(Q) | high.astype(Q) << Q(32), want)


COMPARES = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "lg": lambda a, b: (a < b) | (a > b),
    "neq": lambda a, b: ~(a == b),
    "nlt": lambda a, b: ~(a < b),
    "nle": lambda a, b: ~(a <= b),
    "ngt": lambda a, b: ~(a > b),
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "u": lambda a, b: np.isnan(a) | np.isnan(b),
}
VIEWS = {
    "f32": f,
    "u32": lambda x: x,
    "i32": i,
    "u16": lo,
    "i16": lambda x: lo(x).astype(np.uint16).view(np.int16),
    "f16": half,
    "u64": lambda x: x,
    "i64": lambda x: x.view(np.int64),
}


@pytest.mark.parametrize("name", sorted(n for n, (_, _, family) in core.operations().items() if family == "compare" and "class" not in n))
def test_comparison(name):
    _, _, relation, kind = name.split("_")
    bits64 = kind.endswith("64")
    rows = samples("ff" if kind[0] == "f" else "uu")
    for k in range(rows.shape[1]):
        a, b = rows[:, k]
        if bits64:
            x, y = a.astype(Q) | a.astype(Q)[::-1] << Q(32), b.astype(Q) | a.astype(Q)[::-1] << Q(32)
            inputs, text = {2: a, 3: a[::-1], 4: b, 5: a[::-1]}, "v[2:3], v[4:5]"
        else:
            x, y, inputs, text = a, b, {2: a, 4: b}, "v2, v4"
        low, high = run(f"{name} s[10:11], {text}", inputs, scalar_outputs=[10, 11])
        want = COMPARES[relation](VIEWS[kind](x), VIEWS[kind](y))
        assert low | high << 32 == sum(1 << n for n in range(64) if want[n]), name


def test_class_comparison():
    values = np.resize(np.array([0x7F800001, 0x7FC00000, 0xFF800000, 0xBF800000, 0x80000001, 0x80000000, 0, 1, 0x3F800000, 0x7F800000], U32), 64)
    for bit in range(10):
        low, high = run("v_cmp_class_f32 s[10:11], v1, v2", {1: values, 2: np.full(64, 1 << bit, U32)}, scalar_outputs=[10, 11])
        assert low | high << 32 == sum(1 << n for n in range(64) if n % 10 == bit)


def test_comparison_and_selection_under_a_partial_exec():
    lanes = np.arange(64, dtype=U32)
    out, low, high = run(
        """v_mov_b32_e32 v3, 7
        s_mov_b64 exec, 0xff00
        v_cmp_gt_u32_e32 vcc, 12, v1
        v_cndmask_b32_e32 v3, v1, v2, vcc""",
        {1: lanes, 2: lanes + 100},
        [3],
        scalar_outputs=["vcc_lo", "vcc_hi"],
    )
    assert (low, high) == (0x0F00, 0)
    want = np.full(64, 7)
    want[8:12], want[12:16] = np.arange(108, 112), np.arange(12, 16)
    np.testing.assert_array_equal(out, want)


def test_source_modifiers_flip_signs_and_clamp_bounds_the_result():
    x = np.resize(FLOATS, 64)
    a, b, c = run("v_add_f32_e64 v2, -v1, 0\nv_mul_f32_e64 v3, |v1|, -1.0\nv_add_f32_e64 v4, v1, 0 clamp", {1: x}, [2, 3, 4])
    same(a, -f(x) + F(0), "v_add_f32")
    same(b, -np.abs(f(x)), "v_mul_f32")
    np.testing.assert_array_equal(f(c), np.where(np.isnan(f(x)), 0, np.clip(f(x), 0, 1)))


def test_carries():
    a, b = samples("uu")[:, :16].reshape(2, -1)[:, :64]
    for op, fn in (("add", lambda x, y, c: x + y + c), ("sub", lambda x, y, c: x - y - c), ("subrev", lambda x, y, c: y - x - c)):
        with_carry = {"add": "addc", "sub": "subb", "subrev": "subbrev"}[op]
        low, high, c0, c1 = run(
            f"v_{op}_co_u32_e32 v3, vcc, v1, v2\nv_{with_carry}_co_u32_e32 v4, vcc, v1, v2, vcc", {1: a, 2: b}, [3, 4], scalar_outputs=["vcc_lo", "vcc_hi"]
        )
        first = [fn(int(x), int(y), 0) for x, y in zip(a, b, strict=True)]
        second = [fn(int(x), int(y), int(not 0 <= p < 1 << 32)) for x, y, p in zip(a, b, first, strict=True)]
        assert [p & 0xFFFFFFFF for p in first] == low.tolist() and [p & 0xFFFFFFFF for p in second] == high.tolist()
        assert c0 | c1 << 32 == sum(1 << n for n, p in enumerate(second) if not 0 <= p < 1 << 32)


@pytest.mark.parametrize("name, sign", [("u64_u32", False), ("i64_i32", True)])
def test_wide_multiply_add(name, sign):
    a, b, c, d = np.random.default_rng(5).integers(0, 1 << 32, (4, 64), dtype=U32)
    low, high = run(f"v_mad_{name} v[6:7], s[10:11], v1, v2, v[4:5]", {1: a, 2: b, 4: c, 5: d}, [6, 7])
    for k in range(64):
        x, y = (signed(int(a[k])), signed(int(b[k]))) if sign else (int(a[k]), int(b[k]))
        assert int(low[k]) | int(high[k]) << 32 == x * y + (int(c[k]) | int(d[k]) << 32) & (1 << 64) - 1


def test_the_division_sequence_is_exact():
    """The steps LLVM emits for a / b, on all pairs of edge values: correctly rounded, as IEEE division is."""
    rows = samples("ff")
    body = """v_div_scale_f32 v3, s[10:11], v2, v2, v1
        v_div_scale_f32 v4, vcc, v1, v2, v1
        v_rcp_f32_e32 v5, v3
        v_fma_f32 v6, -v3, v5, 1.0
        v_fmac_f32_e32 v5, v6, v5
        v_mul_f32_e32 v6, v4, v5
        v_fma_f32 v7, -v3, v6, v4
        v_fmac_f32_e32 v6, v7, v5
        v_fma_f32 v3, -v3, v6, v4
        v_div_fmas_f32 v3, v3, v5, v6
        v_div_fixup_f32 v3, v3, v2, v1"""
    for k in range(rows.shape[1]):
        a, b = rows[:, k]
        [got] = run(body, {1: a, 2: b}, [3])
        want = f(a) / f(b)
        odd = np.isnan(f(got)) != np.isnan(want)
        assert not odd.any(), f"{f(a)[odd]} / {f(b)[odd]}: {f(got)[odd]}"
        normal = ~np.isnan(want) & (np.abs(want) >= F(2) ** -126)
        np.testing.assert_array_equal(got[normal], want.view(U32)[normal])
        np.testing.assert_allclose(f(got)[~normal & ~np.isnan(want)], want[~normal & ~np.isnan(want)], atol=2**-148)


def test_packed_pairs_pick_and_negate_their_sources():
    a = np.random.default_rng(6).standard_normal((6, 64)).astype(F)
    inputs = {2 + k: a[k] for k in range(6)}
    x, y, z, w = run(
        """v_pk_mul_f32 v[10:11], v[2:3], v[4:5] op_sel_hi:[1,0]
        v_pk_fma_f32 v[12:13], v[2:3], v[4:5], v[6:7] op_sel:[1,0,0] op_sel_hi:[0,1,1] neg_lo:[0,0,1] neg_hi:[1,0,0]""",
        inputs,
        [10, 11, 12, 13],
    )
    np.testing.assert_array_equal(f(x), a[0] * a[2])
    np.testing.assert_array_equal(f(y), a[1] * a[2])
    np.testing.assert_array_equal(f(z), fma(a[1], a[2], -a[4]))
    np.testing.assert_array_equal(f(w), fma(-a[0], a[3], a[5]))
    x, y, z, w = run("v_pk_add_f32 v[10:11], v[2:3], 1.0 op_sel_hi:[1,0]\nv_pk_mov_b32 v[12:13], v[2:3], v[4:5] op_sel:[1,0]", inputs, [10, 11, 12, 13])
    np.testing.assert_array_equal(f(x), a[0] + F(1))
    np.testing.assert_array_equal(f(y), a[1] + F(1))
    np.testing.assert_array_equal(f(z), a[1])
    np.testing.assert_array_equal(f(w), a[2])


def test_packed_halves():
    a, b = np.random.default_rng(7).integers(0, 1 << 32, (2, 64), dtype=U32)

    def high(x):
        return x >> U32(16)

    for name, fn in (
        ("v_pk_add_u16", lambda x, y: lo(x + y)),
        ("v_pk_mul_lo_u16", lambda x, y: lo(lo(x) * lo(y))),
        ("v_pk_max_u16", lambda x, y: np.maximum(lo(x), lo(y))),
        ("v_pk_lshlrev_b16", lambda x, y: lo(lo(y) << (x & U32(15)))),
        ("v_pk_mul_f16", lambda x, y: to_half(half(x) * half(y))),
    ):
        [got] = run(f"{name} v3, v1, v2", {1: a, 2: b}, [3])
        same(got, fn(lo(a), lo(b)) | fn(high(a), high(b)) << U32(16), "v_mul_f16" if "f16" in name else name)


def test_mixed_precision_fma():
    a, b = np.random.default_rng(12).standard_normal((2, 64)).astype(F)
    pair = to_half(a) | to_half(b) << U32(16)
    x, y = run(
        """v_fma_mix_f32 v3, v1, v2, -v4 op_sel:[1,0,0] op_sel_hi:[1,0,0]
        v_mov_b32_e32 v5, 0
        v_fma_mixlo_f16 v5, v1, v2, 0 op_sel_hi:[1,0,0]
        v_fma_mixhi_f16 v5, |v2|, v4, v1 op_sel:[0,0,1] op_sel_hi:[0,0,1]""",
        {1: pair, 2: a, 4: b},
        [3, 5],
    )
    low, high = half(pair), half(pair >> U32(16))
    np.testing.assert_array_equal(f(x), fma(high, a, -b))
    np.testing.assert_array_equal(lo(y), to_half(fma(low, a, np.zeros(64, F))))
    np.testing.assert_array_equal(y >> U32(16), to_half(fma(np.abs(a), b, high)))


@pytest.mark.parametrize("table", [0x78, 0xCA, 0x96, 0xE8, 1])
def test_truth_table(table):
    a, b, c = np.random.default_rng(8).integers(0, 1 << 32, (3, 64), dtype=U32)
    [got] = run(f"v_bitop3_b32 v4, v1, v2, v3 bitop3:{table:#x}", {1: a, 2: b, 3: c}, [4], arch="gfx950")
    for bit in range(32):
        at = [(x >> U32(bit) & U32(1)) for x in (a, b, c)]
        np.testing.assert_array_equal(got >> U32(bit) & U32(1), U32(table) >> (at[0] * U32(4) + at[1] * U32(2) + at[2]) & U32(1))


LANES = np.arange(64)


@pytest.mark.parametrize(
    "pattern, source",
    [
        ("quad_perm:[2,3,0,1]", LANES ^ 2),
        ("row_shr:3", np.where(LANES % 16 >= 3, LANES - 3, -1)),
        ("row_shl:1", np.where(LANES % 16 < 15, LANES + 1, -1)),
        ("row_ror:4", LANES // 16 * 16 + (LANES - 4) % 16),
        ("row_newbcast:5", LANES // 16 * 16 + 5),
        ("row_bcast:15", np.where(LANES >= 16, LANES // 16 * 16 - 1, -1)),
        ("row_bcast:31", np.where(LANES >= 32, 31, -1)),
        ("row_mirror", LANES ^ 15),
        ("row_half_mirror", LANES ^ 7),
    ],
)
@pytest.mark.parametrize("bound", ["", " bound_ctrl:1"])
def test_dpp(pattern, source, bound):
    x = LANES.astype(U32) + 1000
    [got] = run(f"v_mov_b32_e32 v2, 7\nv_mov_b32_dpp v2, v1 {pattern} row_mask:0xf bank_mask:0xf{bound}", {1: x}, [2])
    np.testing.assert_array_equal(got, np.where(source >= 0, x[source], 0 if bound else 7))


def test_dpp_masks_rows_and_adds():
    x = LANES.astype(F)
    [got] = run("v_mov_b32_e32 v2, 0\nv_add_f32_dpp v2, v1, v1 quad_perm:[1,0,3,2] row_mask:0xa bank_mask:0x3", {1: x}, [2])
    np.testing.assert_array_equal(f(got), np.where((LANES // 16 % 2 == 1) & (LANES // 4 % 4 < 2), x[LANES ^ 1] + x, 0))


def test_sdwa_selects_and_places():
    a, b = np.random.default_rng(9).integers(0, 1 << 32, (2, 64), dtype=U32)
    got = run(
        """v_or_b32_sdwa v3, v1, v2 dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:BYTE_3 src1_sel:WORD_1
        v_mov_b32_e32 v4, v2
        v_lshrrev_b32_sdwa v4, v5, v1 dst_sel:BYTE_1 dst_unused:UNUSED_PRESERVE src0_sel:DWORD src1_sel:DWORD
        v_ashrrev_i16_sdwa v6, v5, sext(v1) dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:BYTE_0
        s_mov_b64 vcc, 0xff
        v_cndmask_b32_sdwa v7, v1, v2, vcc dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_0 src1_sel:WORD_1""",
        {1: a, 2: b, 5: np.full(64, 4, U32)},
        [3, 4, 6, 7],
    )
    np.testing.assert_array_equal(got[0], (a >> U32(24) | b >> U32(16)) << U32(16))
    np.testing.assert_array_equal(got[1], b & U32(0xFFFF00FF) | (a >> U32(4) & U32(255)) << U32(8))
    np.testing.assert_array_equal(got[2], (lo(a).astype(np.uint8).view(np.int8).astype(np.int16) >> 4).view(np.uint16))
    np.testing.assert_array_equal(got[3], np.where(LANES < 8, b >> U32(16), lo(a)))


def test_lane_moves():
    x = np.random.default_rng(10).integers(0, 1 << 32, 64, dtype=U32)
    address = np.random.default_rng(11).permutation(64).astype(U32) * 4
    v3, v4, v5, v6, s10, s11 = run(
        """ds_bpermute_b32 v3, v2, v1
        ds_permute_b32 v4, v2, v1
        ds_swizzle_b32 v5, v1 offset:swizzle(SWAP,16)
        ds_swizzle_b32 v6, v1 offset:swizzle(BITMASK_PERM,"0p1ip")
        s_waitcnt lgkmcnt(0)
        v_readfirstlane_b32 s10, v1
        v_readlane_b32 s11, v1, 37""",
        {1: x, 2: address},
        [3, 4, 5, 6],
        scalar_outputs=[10, 11],
    )
    pushed = np.empty_like(x)
    pushed[address // 4] = x
    np.testing.assert_array_equal(v3, x[address // 4])
    np.testing.assert_array_equal(v4, pushed)
    np.testing.assert_array_equal(v5, x[LANES ^ 16])
    np.testing.assert_array_equal(v6, x[LANES & 32 | (LANES & 0b01011 | 0b00100) ^ 0b00010])
    assert (s10, s11) == (x[0], x[37])
    [v1] = run("s_movk_i32 s10, 0x55\nv_writelane_b32 v1, s10, 9", {1: x}, [1])
    np.testing.assert_array_equal(v1, np.where(LANES == 9, 0x55, x))
    [v3] = run("v_mbcnt_lo_u32_b32 v3, s10, 0\nv_mbcnt_hi_u32_b32 v3, s11, v3", {}, [3], scalars={10: 0xF0F0, 11: 0x3})
    np.testing.assert_array_equal(v3, [bin((0x3 << 32 | 0xF0F0) & (1 << n) - 1).count("1") for n in range(64)])


@pytest.mark.parametrize("n", [16, 32])
def test_permlane_swap(n):
    x, y = LANES.astype(U32), LANES.astype(U32) + 100
    a, b = run(f"v_permlane{n}_swap_b32_e32 v1, v2", {1: x, 2: y}, [1, 2], arch="gfx950")
    odd = LANES & n != 0
    np.testing.assert_array_equal(a, np.where(odd, y[LANES ^ n], x))
    np.testing.assert_array_equal(b, np.where(odd, y, x[LANES ^ n]))
