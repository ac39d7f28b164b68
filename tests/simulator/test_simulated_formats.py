"""Number formats: every 8-bit code, rounding ties and saturation, and the matrix instructions over them."""

import ml_dtypes
import numpy as np
import pytest
from machine import U32, run

F = np.float32
FP8 = {"gfx942": {"fp8": ml_dtypes.float8_e4m3fnuz, "bf8": ml_dtypes.float8_e5m2fnuz}, "gfx950": {"fp8": ml_dtypes.float8_e4m3fn, "bf8": ml_dtypes.float8_e5m2}}
ARCH_KIND = [(arch, kind) for arch in FP8 for kind in ("fp8", "bf8")]


def decoded(arch, kind):
    return np.arange(256, dtype=np.uint8).view(FP8[arch][kind]).astype(F)


def equal(got, want):
    got, want = got.view(F), np.asarray(want, F)
    nan = np.isnan(want)
    assert (np.isnan(got) == nan).all()
    np.testing.assert_array_equal(got.view(U32)[~nan], want.view(U32)[~nan])


@pytest.mark.parametrize("arch, kind", ARCH_KIND)
def test_all_codes_unpack(arch, kind):
    codes = np.arange(256, dtype=np.uint8).reshape(64, 4)
    packed = codes.view(U32)[:, 0]
    out = run(f"v_cvt_pk_f32_{kind}_e32 v[2:3], v1\nv_cvt_pk_f32_{kind}_sdwa v[4:5], v1 src0_sel:WORD_1", {1: packed}, [2, 3, 4, 5], arch=arch)
    for k in range(4):
        equal(out[k], decoded(arch, kind)[codes[:, k]])
    for byte in range(4):
        [got] = run(f"v_cvt_f32_{kind}_sdwa v2, v1 src0_sel:BYTE_{byte}", {1: packed}, [2], arch=arch)
        equal(got, decoded(arch, kind)[codes[:, byte]])


@pytest.mark.parametrize("kind", ["fp8", "bf8"])
def test_all_codes_unpack_scaled(kind):
    codes = np.arange(256, dtype=np.uint8).reshape(64, 4)
    for scale in (1.0, 4.0, 0.125):
        out = run(
            f"""v_mov_b32_e32 v9, {np.array(scale, F).view(U32):#x}
            v_cvt_scalef32_pk_f32_{kind} v[2:3], v1, v9
            v_cvt_scalef32_pk_bf16_{kind} v4, v1, v9 op_sel:[1,0,0]
            v_cvt_scalef32_pk_f16_{kind} v5, v1, v9""",
            {1: codes.view(U32)[:, 0]},
            [2, 3, 4, 5],
            arch="gfx950",
        )
        value = decoded("gfx950", kind) * F(scale)
        equal(out[0], value[codes[:, 0]])
        equal(out[1], value[codes[:, 1]])
        equal(out[2] << U32(16), value[codes[:, 2]])
        equal((out[2] >> U32(16)) << U32(16), value[codes[:, 3]])
        equal((out[3] & U32(0xFFFF)).astype(np.uint16).view(np.float16).astype(F), value[codes[:, 0]].astype(np.float16).astype(F))


def hard_floats(arch, kind):
    """Every finite value of the format, the midpoints between neighbours, and values just beside the midpoints; then what lies beyond."""
    finite = np.unique(decoded(arch, kind)[np.isfinite(decoded(arch, kind))]).astype(np.float64)
    middle = ((finite[1:] + finite[:-1]) / 2).astype(F)
    top = F(finite[-1])
    beyond = np.array(
        [top * F(1.01), top * F(1.0624), top * F(1.0626), top * F(1.07), top * F(1.2), top * F(1.5), 1e30, np.inf, np.nan, 2.0**-40, 2.0**-149], F
    )
    x = np.concatenate([finite.astype(F), middle, np.nextafter(middle, F(np.inf)), np.nextafter(middle, F(-np.inf)), beyond, -beyond])
    return np.concatenate([x, np.zeros(-len(x) % 64, F)]).reshape(-1, 64)


def encode(x, dtype, saturate):
    """ml_dtypes' rounding, and the rule beyond the largest value: it where saturating, else infinity if there is one, else NaN."""
    with np.errstate(all="ignore"):
        code = x.astype(dtype).view(np.uint8).copy()
    largest = F(ml_dtypes.finfo(dtype).max)
    if saturate:
        big = ~np.isnan(x) & (np.abs(x) > largest)
        code[big] = np.copysign(largest, x[big]).astype(dtype).view(np.uint8)
    return code


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("arch, kind", ARCH_KIND)
def test_pack_rounds_to_nearest_even_and_saturates(arch, kind, saturate):
    dtype = FP8[arch][kind]
    mode = "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1\n" if saturate else ""
    for x in hard_floats(arch, kind):
        [got] = run(mode + f"v_mov_b32_e32 v2, 0\nv_cvt_pk_{kind}_f32 v2, v1, -v1\nv_cvt_pk_{kind}_f32 v2, v1, 1.0 op_sel:[0,0,1]", {1: x}, [2], arch=arch)
        for byte, source in enumerate((x, -x, x, np.ones(64, F))):
            code = (got >> U32(8 * byte)).astype(np.uint8)
            want = encode(source, dtype, saturate)
            nan = np.isnan(want.view(dtype).astype(F))
            assert np.isnan(code.view(dtype).astype(F))[nan].all(), source[nan]
            np.testing.assert_array_equal(code[~nan], want[~nan], str(source[~nan][code[~nan] != want[~nan]]))


@pytest.mark.parametrize("name, wide", [("bf16", ml_dtypes.bfloat16), ("f16", np.float16)])
def test_scaled_pack_from_16_bits(name, wide):
    for x in hard_floats("gfx950", "fp8"):
        h = x.astype(wide).view(np.uint16).astype(U32)
        [got] = run(f"v_mov_b32_e32 v2, 0\nv_cvt_scalef32_pk_fp8_{name} v2, v1, v3", {1: h | h[::-1] << U32(16), 3: np.full(64, 2, F)}, [2], arch="gfx950")
        real = x.astype(wide).astype(F) / F(2)
        for byte, source in enumerate((real, real[::-1])):
            want = encode(np.ascontiguousarray(source), ml_dtypes.float8_e4m3fn, False)
            code = (got >> U32(8 * byte)).astype(np.uint8)
            nan = (want & 127) == 127
            assert ((code & 127) == 127)[nan].all()
            np.testing.assert_array_equal(code[~nan], want[~nan])


@pytest.mark.parametrize("dtype, name", [(ml_dtypes.bfloat16, "v_cvt_pk_bf16_f32"), (np.float16, "v_cvt_pk_f16_f32")])
def test_16_bit_ties_and_denormals(dtype, name):
    codes = np.arange(0, 65536, 37, dtype=np.uint16)
    base = codes.view(dtype).astype(np.float64)
    nxt = (codes + np.uint16(1)).view(dtype).astype(np.float64)
    with np.errstate(all="ignore"):
        middle = ((base + nxt) / 2).astype(F)
    x = np.concatenate([base.astype(F), middle, np.nextafter(middle, F(np.inf)), np.nextafter(middle, F(-np.inf))])
    x = np.concatenate([x, np.zeros(-len(x) % 64, F)]).reshape(-1, 64)
    for row in x:
        [got] = run(f"{name} v2, v1, 0", {1: row}, [2], arch="gfx950")
        with np.errstate(all="ignore"):
            want = row.astype(dtype).view(np.uint16)
        nan = np.isnan(row)
        np.testing.assert_array_equal(got[~nan], want[~nan])
        assert np.isnan((got[nan] & U32(0xFFFF)).astype(np.uint16).view(dtype).astype(F)).all()


# ---- matrix instructions

SHAPES = [
    ("gfx942", "16x16x16_bf16"),
    ("gfx942", "32x32x8_bf16"),
    ("gfx942", "16x16x16_f16"),
    ("gfx942", "32x32x8_f16"),
    ("gfx942", "16x16x4_f32"),
    ("gfx942", "32x32x2_f32"),
    ("gfx942", "16x16x8_xf32"),
    ("gfx942", "32x32x4_xf32"),
    *[(arch, f"{shape}_{a}_{b}") for arch in FP8 for shape in ("16x16x32", "32x32x16") for a in ("fp8", "bf8") for b in ("fp8", "bf8")],
    ("gfx950", "16x16x32_bf16"),
    ("gfx950", "32x32x16_bf16"),
    ("gfx950", "16x16x32_f16"),
    ("gfx950", "32x32x16_f16"),
    ("gfx950", "16x16x128_f8f6f4"),
    ("gfx950", "32x32x64_f8f6f4"),
]


def operand(matrix, kind, arch):
    """[n, K] values -> (registers [count, 64], the values as the format holds them): lane l has row l mod n, values of group l / n."""
    n, depth = matrix.shape
    dtype = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": F, "xf32": F}.get(kind) or FP8[arch][kind]
    typed = matrix.astype(dtype)
    groups = 64 // n
    lanes = typed.reshape(n, groups, depth // groups).transpose(1, 0, 2).reshape(64, -1)
    held = typed.astype(np.float64)
    if kind == "xf32":
        u = matrix.astype(F).view(U32)
        held = ((u + U32(0xFFF) + (u >> U32(13) & U32(1))) & ~U32(0x1FFF)).view(F).astype(np.float64)
    return np.ascontiguousarray(lanes).view(np.uint8).reshape(64, -1, 4).copy().view(U32)[:, :, 0].T, held


@pytest.mark.parametrize("arch, name", SHAPES)
@pytest.mark.parametrize("accumulators", [False, True])
def test_matrix_product(arch, name, accumulators):
    shape, kind = name.split("_", 1)
    n, _, depth = map(int, shape.split("x"))
    kinds = kind.split("_") * 2 if kind not in ("f8f6f4",) else ["fp8", "bf8"]
    mods = " cbsz:0 blgp:1" if kind == "f8f6f4" else ""
    rng = np.random.default_rng(0)
    a, held_a = operand(rng.standard_normal((n, depth)).astype(F), kinds[0], arch)
    b, held_b = operand(rng.standard_normal((n, depth)).astype(F), kinds[1], arch)
    regs = n * n // 64
    c = rng.standard_normal((regs, 64)).astype(F)
    inputs = {10 + k: r for k, r in enumerate(a)} | {30 + k: r for k, r in enumerate(b)} | {50 + k: r for k, r in enumerate(c)}
    d, source = f"v[50:{49 + regs}]", f"v[50:{49 + regs}]"
    lines, outputs = [], list(range(50, 50 + regs))
    if accumulators:
        lines = [f"v_accvgpr_write_b32 a{k}, v{50 + k}" for k in range(regs)]
        d = source = f"a[0:{regs - 1}]"
        outputs = [f"a{k}" for k in range(regs)]
    if len(inputs) > 15:  # the harness' offsets reach fifteen registers
        c = np.zeros_like(c)
        inputs = {k: v for k, v in inputs.items() if k < 50}
        lines = [f"v_mov_b32_e32 v{50 + k}, 0" for k in range(regs)] + lines

    def first(at, x):
        return f"v{at}" if len(x) == 1 else f"v[{at}:{at + len(x) - 1}]"

    got = []
    for part in (outputs[:8], outputs[8:]):
        if part:
            got += run("\n".join([*lines, f"v_mfma_f32_{name} {d}, {first(10, a)}, {first(30, b)}, {source}{mods}"]), inputs, part, arch=arch)
    product = held_a @ held_b.T
    lane = np.arange(64)
    for r in range(regs):
        row = 8 * (r // 4) + 4 * (lane // 32) + r % 4 if n == 32 else 4 * (lane // 16) + r
        np.testing.assert_allclose(got[r].view(F), product[row, lane % n] + c[r], rtol=2e-6, atol=2e-6)


def test_matrix_result_may_overlap_its_addend():
    rng = np.random.default_rng(1)
    a, held_a = operand(rng.standard_normal((16, 16)).astype(F), "bf16", "gfx942")
    c = rng.standard_normal((4, 64)).astype(F)
    got = run("v_mfma_f32_16x16x16_bf16 v[22:25], v[10:11], v[10:11], v[20:23]", {10: a[0], 11: a[1], **{20 + k: c[k] for k in range(4)}}, [22, 23, 24, 25])
    product, lane = held_a @ held_a.T, np.arange(64)
    for r in range(4):
        np.testing.assert_allclose(got[r].view(F), product[4 * (lane // 16) + r, lane % 16] + c[r], rtol=2e-6, atol=2e-6)
