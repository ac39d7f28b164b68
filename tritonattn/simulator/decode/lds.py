"""LDS instructions."""

from .lane_maps import lane_map, swizzle
from .memory import SIZES, extension
from .operands import integer_of, register
from .rules import handler, rule


@rule(r"ds_read_b64_tr_b(16|8)")
def _lds_read_transposed(inst, line, m, maps):
    handler(inst, "lds_read_transposed")
    inst.dst[0], inst.src[0] = register(line.operands[0]), register(line.operands[1])
    inst.imm[0], inst.imm[1] = int(m[1]) // 8, integer_of(line.modifiers.pop("offset", "0"))
    line.operands.clear()


@rule(r"ds_(read|write)(2)?(st64)?_(b8|u8|i8|b16|u16|i16|b32|b64|b96|b128)(_d16_hi|_d16)?")
def _lds(inst, line, m, maps):
    size = SIZES[m[4]]
    unit = size * (64 if m[3] else 1)
    if m[2]:
        inst.imm[1], inst.imm[2] = (integer_of(line.modifiers.pop(k, "0")) * unit for k in ("offset0", "offset1"))
    else:
        inst.imm[1], inst.imm[2] = integer_of(line.modifiers.pop("offset", "0")), -1
    inst.imm[0] = size
    registers = [register(t) for t in line.operands]
    if m[1] == "read":
        handler(inst, "lds_read")
        inst.dst[0], inst.src[0] = registers
        inst.imm[3] = extension(m[4], m[5])
        if m[5] == "_d16_hi" and m[4] == "u16":
            inst.imm[3] = 3
    else:
        handler(inst, "lds_write")
        for k, r in enumerate(registers):
            inst.src[k] = r
        inst.imm[3] = m[5] == "_d16_hi"
    line.operands.clear()


@rule(r"ds_(bpermute|permute|swizzle)_b32")
def _lds_lanes(inst, line, m, maps):
    handler(inst, m[1])
    inst.dst[0] = register(line.operands[0])
    for k, text in enumerate(line.operands[1:]):
        inst.src[k] = register(text)
    if m[1] == "swizzle":
        inst.map = len(maps)
        maps.append(lane_map(swizzle(line.modifiers.pop("offset"))))
    else:
        inst.imm[0] = integer_of(line.modifiers.pop("offset", "0"))
    line.operands.clear()
