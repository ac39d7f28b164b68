"""Scalar, branch and wait instructions."""

import re

from ..core import SGPR
from ..text import Unsupported
from .operands import integer, integer_of, operand, register, wide
from .rules import handler, rule


@rule(r"s_(nop|setprio|sleep|sched_barrier|icache_inv|dcache_wb|inst_prefetch)|buffer_(wbl2|inv)|s_ttracedata")
def _no_effect(inst, line, m, maps):
    handler(inst, "nothing")
    line.operands.clear()
    line.modifiers.clear()


@rule(r"s_endpgm")
def _end(inst, line, m, maps):
    handler(inst, "end")


@rule(r"s_barrier")
def _barrier(inst, line, m, maps):
    handler(inst, "barrier")


@rule(r"s_trap")
def _trap(inst, line, m, maps):
    handler(inst, "trap")
    inst.imm[0] = integer_of(line.operands.pop())


@rule(r"s_waitcnt")
def _waitcnt(inst, line, m, maps):
    handler(inst, "waitcnt")
    inst.imm[0] = inst.imm[1] = 1 << 20
    text = line.operands.pop()
    if re.fullmatch(r"0x[0-9a-f]+|\d+", text):
        v = integer_of(text)
        inst.imm[0], inst.imm[1] = v & 15 | v >> 10 & 48, v >> 8 & 15
        return
    for counter, n in re.findall(r"(\w+)\((\d+)\)", text):
        if counter not in ("vmcnt", "lgkmcnt", "expcnt"):
            raise Unsupported(f"wait for {counter}")
        if counter != "expcnt":
            inst.imm[counter == "lgkmcnt"] = int(n)


@rule(r"s_setreg_imm32_b32")
def _setreg(inst, line, m, maps):
    register, value = line.operands
    if not re.fullmatch(r"hwreg\(HW_REG_MODE,\s*23,\s*1\)", register):
        raise Unsupported(f"setting {register}")
    handler(inst, "setreg")
    inst.imm[0] = integer_of(value)
    line.operands.clear()


@rule(r"s_(?:branch|cbranch_(scc0|scc1|vccz|vccnz|execz|execnz))")
def _branch(inst, line, m, maps):
    handler(inst, "branch")
    inst.imm[0], inst.imm[1] = line.target, (None, "scc0", "scc1", "vccz", "vccnz", "execz", "execnz").index(m[1])
    line.operands.clear()


@rule(r"s_(and|or|xor|andn2|orn2|andn1)_saveexec_b64")
def _saveexec(inst, line, m, maps):
    handler(inst, "saveexec")
    inst.imm[0] = ("and", "or", "xor", "andn2", "orn2", "andn1").index(m[1])
    inst.dst[0], inst.src[0] = register(line.operands[0], SGPR), wide(operand(line.operands[1]), line.operands[1])
    line.operands.clear()


@rule(r"s_load_dword(?:x(\d+))?")
def _scalar_load(inst, line, m, maps):
    handler(inst, "scalar_load")
    inst.dst[0], inst.src[0], inst.src[1] = register(line.operands[0], SGPR), register(line.operands[1], SGPR), integer(line.operands[2])
    inst.imm[0], inst.imm[1] = int(m[1] or 1), integer_of(line.modifiers.pop("offset", "0"))
    line.operands.clear()
    line.modifiers.pop("glc", None)
