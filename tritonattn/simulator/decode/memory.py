"""Global, buffer and scratch instructions, and atomics."""

from ..core import SGPR
from ..text import Unsupported
from .operands import integer_of, narrow, operand, register
from .rules import handler, rule

SIZES = {
    "b8": 1, "u8": 1, "i8": 1, "b16": 2, "u16": 2, "i16": 2, "b32": 4, "b64": 8, "b96": 12, "b128": 16,
    "ubyte": 1, "sbyte": 1, "byte": 1, "ushort": 2, "sshort": 2, "short": 2, "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16,
}  # fmt: skip
_EXTENDS = {"i8": 1, "i16": 1, "sbyte": 1, "sshort": 1}


def extension(kind, half):
    return {"_d16": 2, "_d16_hi": 3}.get(half, _EXTENDS.get(kind, 0))


HINTS = ("glc", "slc", "nt", "sc0", "sc1")


def _addressing(inst, line, buffer, has_result, has_data):
    """Fill the address operands (sources 0-2), result and data (source 3). Returns the address mode."""
    ops = list(line.operands)
    if has_result:
        inst.dst[0] = register(ops.pop(0))
    if buffer:
        if has_data:
            inst.src[3] = register(ops.pop(0))
        vector, resource, scalar = ops
        inst.src[1], inst.src[2] = register(resource, SGPR), narrow(operand(scalar))
        offen = line.modifiers.pop("offen", False)
        if offen != (vector != "off"):
            raise Unsupported(f"buffer address {vector}")
        if offen:
            inst.src[0] = register(vector)
        return 3 if offen else 2
    inst.src[0] = register(ops.pop(0))
    if has_data:
        inst.src[3] = register(ops.pop(0))
    [base] = ops
    if base == "off":
        return 0
    inst.src[1] = register(base, SGPR)
    return 1


@rule(r"(global|buffer)_(load|store)(_lds)?_(ubyte|sbyte|byte|ushort|sshort|short|dword|dwordx2|dwordx3|dwordx4)(_d16_hi|_d16)?")
def _memory(inst, line, m, maps):
    to_lds = bool(m[3]) or bool(line.modifiers.pop("lds", False))
    load = m[2] == "load"
    for hint in HINTS:
        line.modifiers.pop(hint, None)
    handler(inst, "load_lds" if to_lds else "load" if load else "store")
    inst.imm[0], inst.imm[1] = SIZES[m[4]], integer_of(line.modifiers.pop("offset", "0"))
    inst.imm[2] = _addressing(inst, line, m[1] == "buffer", load and not to_lds, not load)
    inst.imm[3] = extension(m[4], m[5]) if load else m[5] == "_d16_hi"
    line.operands.clear()


@rule(r"(global|buffer)_load_(short|ubyte|sbyte)_d16(_hi)?")
def _memory_half(inst, line, m, maps):
    for hint in HINTS:
        line.modifiers.pop(hint, None)
    handler(inst, "load")
    inst.imm[0], inst.imm[1] = SIZES[m[2]], integer_of(line.modifiers.pop("offset", "0"))
    inst.imm[2] = _addressing(inst, line, m[1] == "buffer", True, False)
    if m[2] == "sbyte":
        raise Unsupported("sign extension into half a register")
    inst.imm[3] = 3 if m[3] else 2
    line.operands.clear()


@rule(r"scratch_(load|store)_(ubyte|sbyte|byte|ushort|sshort|short|dword|dwordx2|dwordx3|dwordx4)(_d16_hi|_d16)?")
def _scratch(inst, line, m, maps):
    load = m[1] == "load"
    handler(inst, "scratch_" + m[1])
    data, vector = line.operands[:2] if load else line.operands[1::-1]
    if vector != "off":
        raise Unsupported(f"scratch address {vector}")
    if load:
        inst.dst[0] = register(data)
    else:
        inst.src[3] = register(data)
    if line.operands[2] != "off":
        inst.src[1] = register(line.operands[2], SGPR)
    inst.imm[0], inst.imm[1] = SIZES[m[2]], integer_of(line.modifiers.pop("offset", "0"))
    inst.imm[3] = extension(m[2], m[3]) if load else m[3] == "_d16_hi"
    line.operands.clear()


_ATOMICS = ("add", "sub", "smin", "umin", "smax", "umax", "and", "or", "xor", "swap", "cmpswap", "add_f32", "pk_add_f16", "pk_add_bf16")


@rule(r"(global|buffer)_atomic_(" + "|".join(sorted(_ATOMICS, key=len, reverse=True)) + ")(_x2)?")
def _atomic(inst, line, m, maps):
    returns = line.modifiers.pop("sc0", False)
    for hint in HINTS:
        line.modifiers.pop(hint, None)
    handler(inst, "atomic")
    buffer = m[1] == "buffer"
    if buffer:  # a buffer atomic returns into its data register
        inst.imm[2] = _addressing(inst, line, True, False, True)
        inst.dst[0] = inst.src[3]
    else:
        inst.imm[2] = _addressing(inst, line, False, returns, True)
    inst.imm[0], inst.imm[1], inst.imm[3], inst.map = _ATOMICS.index(m[2]), integer_of(line.modifiers.pop("offset", "0")), returns, m[3] is not None
    line.operands.clear()
