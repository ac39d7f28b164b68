"""Vector instructions with operands of their own: selections, carries, division, packed pairs, lane moves."""

from ..core import SGPR
from ..text import Unsupported
from .operands import integer, integer_of, narrow, numbers, operand, register, wide
from .rules import handler, rule


@rule(r"v_cndmask_b32")
def _select(inst, line, m, maps):
    handler(inst, "select")
    d, a, b, mask = line.operands
    inst.dst[0], inst.src[0], inst.src[1], inst.src[2] = register(d), narrow(operand(a)), narrow(operand(b)), wide(operand(mask), mask)
    line.operands.clear()


@rule(r"v_(add|addc|sub|subb|subrev|subbrev)_co_u32")
def _carry(inst, line, m, maps):
    handler(inst, "carry")
    d, out, a, b, *carry = line.operands
    inst.dst[0], inst.dst[1] = register(d), register(out, SGPR)
    inst.src[0], inst.src[1] = integer(a), integer(b)
    if bool(carry) != (m[1] in ("addc", "subb", "subbrev")):
        raise Unsupported("carry operand")
    if carry:
        inst.src[2] = wide(operand(carry[0]), carry[0])
    inst.imm[0] = {"add": 0, "addc": 0, "sub": 1, "subb": 1}.get(m[1], 2)
    line.operands.clear()


@rule(r"v_mad_(u64_u32|i64_i32)")
def _mad64(inst, line, m, maps):
    handler(inst, "mad64")
    d, out, a, b, c = line.operands
    inst.dst[0], inst.dst[1] = register(d), register(out, SGPR)
    inst.src[0], inst.src[1], inst.src[2] = integer(a), integer(b), wide(operand(c), c)
    inst.imm[0] = m[1] == "i64_i32"
    line.operands.clear()


@rule(r"v_div_(scale|fmas|fixup)_f32")
def _division(inst, line, m, maps):
    handler(inst, "div_" + m[1])
    inst.dst[0] = register(line.operands.pop(0))
    if m[1] == "scale":
        inst.dst[1] = register(line.operands.pop(0), SGPR)
    for k in range(3):
        inst.src[k] = narrow(operand(line.operands[k]))
    line.operands.clear()


def _packed_sources(inst, line, half):
    n = len(line.operands) - 1
    low, high = numbers(line.modifiers.pop("op_sel", str([0] * n))), numbers(line.modifiers.pop("op_sel_hi", str([1] * n)))
    neg_low, neg_high = numbers(line.modifiers.pop("neg_lo", str([0] * n))), numbers(line.modifiers.pop("neg_hi", str([0] * n)))
    inst.dst[0] = register(line.operands[0])
    for k in range(n):
        o = narrow(operand(line.operands[k + 1], half))
        if o.neg or o.abs:
            raise Unsupported(f"operand {line.operands[k + 1]} of a packed instruction")
        o.half, o.sel, o.hi, o.neg, o.abs = 0, low[k], high[k], neg_low[k], neg_high[k]
        inst.src[k] = o
    line.operands.clear()


@rule(r"v_pk_(mul|add|fma|mov)_[fb]32")
def _packed32(inst, line, m, maps):
    handler(inst, "packed32")
    _packed_sources(inst, line, False)
    inst.imm[0] = ("mul", "add", "fma", "mov").index(m[1])
    if m[1] == "mov":  # (source 0 by its op_sel, source 1 by its op_sel); op_sel_hi means nothing
        inst.src[1].hi = inst.src[1].sel


_PACKED16 = (
    "add_f16", "mul_f16", "fma_f16", "max_f16", "min_f16", "add_u16", "sub_u16", "mul_lo_u16", "mad_u16", "max_i16", "min_i16", "max_u16", "min_u16",
    "lshlrev_b16", "lshrrev_b16", "ashrrev_i16",
)  # fmt: skip


@rule(r"v_pk_(" + "|".join(_PACKED16) + ")")
def _packed16(inst, line, m, maps):
    handler(inst, "packed16")
    _packed_sources(inst, line, True)
    inst.imm[0] = _PACKED16.index(m[1])


@rule(r"v_fma_mix(_f32|lo_f16|hi_f16)")
def _fma_mix(inst, line, m, maps):
    handler(inst, "fma_mix")
    inst.dst[0] = register(line.operands[0])
    select, is_half = numbers(line.modifiers.pop("op_sel", "[0,0,0]")), numbers(line.modifiers.pop("op_sel_hi", "[0,0,0]"))
    for k in range(3):
        inst.src[k] = narrow(operand(line.operands[k + 1]))
        inst.src[k].sel, inst.src[k].hi = select[k], is_half[k]
    inst.imm[0] = ("_f32", "lo_f16", "hi_f16").index(m[1])
    line.operands.clear()


@rule(r"v_bitop3_b(32|16)")
def _bitop3(inst, line, m, maps):
    handler(inst, "bitop3")
    inst.dst[0] = register(line.operands[0])
    for k in range(3):
        inst.src[k] = integer(line.operands[k + 1])
    inst.imm[0], inst.imm[1] = integer_of(line.modifiers.pop("bitop3", "0")), int(m[1])
    line.operands.clear()


@rule(r"v_read(firstlane|lane)_b32")
def _readlane(inst, line, m, maps):
    handler(inst, "readlane")
    inst.dst[0], inst.src[0] = register(line.operands[0], SGPR), register(line.operands[1])
    if m[1] == "lane":
        inst.src[1] = operand(line.operands[2])
    line.operands.clear()


@rule(r"v_writelane_b32")
def _writelane(inst, line, m, maps):
    handler(inst, "writelane")
    inst.dst[0], inst.src[0], inst.src[1] = register(line.operands[0]), integer(line.operands[1]), operand(line.operands[2])
    line.operands.clear()


@rule(r"v_mbcnt_(lo|hi)_u32_b32")
def _mbcnt(inst, line, m, maps):
    handler(inst, "mbcnt")
    inst.dst[0], inst.src[0], inst.src[1] = register(line.operands[0]), integer(line.operands[1]), integer(line.operands[2])
    inst.imm[0] = m[1] == "hi"
    line.operands.clear()


@rule(r"v_(swap|permlane16_swap|permlane32_swap)_b32")
def _swap(inst, line, m, maps):
    handler(inst, "swap" if m[1] == "swap" else "permlane_swap")
    inst.dst[0], inst.src[0] = register(line.operands[0]), register(line.operands[1])
    inst.imm[0] = 0 if m[1] == "swap" else int(m[1][8:10])
    line.operands.clear()
