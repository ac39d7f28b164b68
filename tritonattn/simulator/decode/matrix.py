"""8-bit conversions and matrix instructions."""

from ..core import SGPR, VGPR
from ..text import Unsupported
from .operands import integer, integer_of, narrow, numbers, operand, register
from .rules import handler, rule

_WIDE = {"f32": 0, "f16": 1, "bf16": 2}


@rule(r"v_cvt_(scalef32_)?pk_(f32|f16|bf16)_(fp8|bf8)")
def _unpack_small(inst, line, m, maps):
    handler(inst, "unpack_small")
    inst.dst[0], inst.src[0] = register(line.operands[0]), integer(line.operands[1])
    if m[1]:
        inst.src[1] = integer(line.operands[2])
    elif m[2] != "f32":
        raise Unsupported("conversion")
    high = numbers(line.modifiers.pop("op_sel", "[0]"))[0] or {"WORD_1": 1, "WORD_0": 0, "DWORD": 0}[line.modifiers.pop("src0_sel", "DWORD")]
    inst.imm[0], inst.imm[1], inst.imm[2] = high, m[3] == "bf8", _WIDE[m[2]]
    line.operands.clear()
    line.encoding = ""


@rule(r"v_cvt_f32_(fp8|bf8)")
def _unpack_one(inst, line, m, maps):
    handler(inst, "unpack_one")
    inst.dst[0], inst.src[0] = register(line.operands[0]), integer(line.operands[1])
    select = line.modifiers.pop("src0_sel", "BYTE_0")
    byte = integer_of(line.modifiers.pop("byte_sel", "0")) or {"DWORD": 0}.get(select, int(select[-1]) if select.startswith("BYTE") else -1)
    if byte < 0 or "op_sel" in line.modifiers:
        raise Unsupported("byte selection")
    inst.imm[0], inst.imm[1] = byte, m[1] == "bf8"
    line.operands.clear()
    line.encoding = ""


@rule(r"v_cvt_(scalef32_)?pk_(fp8|bf8)_(f32|f16|bf16)")
def _pack_small(inst, line, m, maps):
    if not m[1] and m[3] != "f32":
        raise Unsupported("conversion")
    handler(inst, "pack_small")
    inst.dst[0] = register(line.operands[0])
    for k, text in enumerate(line.operands[1:]):
        inst.src[k] = narrow(operand(text))
    inst.imm[0], inst.imm[1], inst.imm[2] = numbers(line.modifiers.pop("op_sel", "[0]"))[-1], m[2] == "bf8", _WIDE[m[3]]
    line.operands.clear()


_MATRIX_TYPES = {"bf16": (0, 0), "f16": (1, 1), "f32": (2, 2), "xf32": (5, 5), "fp8_fp8": (3, 3), "fp8_bf8": (3, 4), "bf8_fp8": (4, 3), "bf8_bf8": (4, 4)}


@rule(r"v_mfma_f32_(16x16|32x32)x(\d+)_(bf16|f16|f32|xf32|fp8_fp8|fp8_bf8|bf8_fp8|bf8_bf8|f8f6f4)")
def _mfma(inst, line, m, maps):
    handler(inst, "mfma")
    n, depth = int(m[1][:2]), int(m[2])
    formats = [int(line.modifiers.pop(key, "0")) for key in ("cbsz", "blgp")]
    if m[3] == "f8f6f4" and max(formats) <= 1:
        types = (3 + formats[0], 3 + formats[1])
    elif m[3] != "f8f6f4" and not any(formats):
        types = _MATRIX_TYPES[m[3]]
    else:
        raise Unsupported("matrix formats below 8 bits, or a broadcast matrix instruction")
    d, a, b, c = line.operands
    inst.dst[0], inst.src[0], inst.src[1], inst.src[2] = register(d), register(a), register(b), narrow(operand(c))
    values = depth * n // 64
    size = {0: 2, 1: 2, 2: 4, 5: 4}
    expected = [values * size.get(t, 1) // 4 for t in types] + [n * n // 64] * 2
    counts = [inst.src[0].count, inst.src[1].count, inst.dst[0].count, inst.src[2].count if inst.src[2].kind == VGPR else n * n // 64]
    if counts != expected or inst.src[2].kind == SGPR or inst.src[2].neg or inst.src[2].abs:
        raise Unsupported("matrix operands")
    inst.imm[0], inst.imm[1], inst.imm[2], inst.imm[3] = n, depth, *types
    line.operands.clear()
