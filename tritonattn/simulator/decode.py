"""One `Line` of text -> one `Inst` record for the executor, or `Unsupported` naming what is not modelled.

`decode` looks the name up in order: special rules below, then the executor's own table, whose form says which operands to expect.
"""
import functools
import re
import struct

from .core import CLAMP, CONST, DST_PAD, IS_DPP, IS_SDWA, SGPR, VGPR, Inst, LaneMap, Operand, operations
from .text import Unsupported

_SPECIAL = {"vcc": (106, 2), "vcc_lo": (106, 1), "vcc_hi": (107, 1), "m0": (124, 1), "exec": (126, 2), "exec_lo": (126, 1), "exec_hi": (127, 1)}
_MASK64 = (1 << 64) - 1


# ---- operands

def _operand(text, half=False):
    """Register, range, special register or constant, with `-`, `|..|`, `abs()`, `neg()`, `sext()` around it."""
    o, t = Operand(), text
    o.count, o.half = 1, half
    while True:
        if t.startswith("-") and not re.match(r"-[\d.]", t):
            o.neg, t = 1 - o.neg, t[1:]
        elif t.startswith("|") and t.endswith("|"):
            o.abs, t = 1, t[1:-1]
        elif m := re.fullmatch(r"(sext|abs|neg)\((.*)\)", t):
            setattr(o, m[1], 1)
            t = m[2]
        else:
            break
    if m := re.fullmatch(r"([vsa])(\d+)", t) or re.fullmatch(r"([vsa])\[(\d+):(\d+)\]", t):
        first, last = int(m[2]), int(m[m.lastindex])
        o.kind, o.index, o.count = (SGPR if m[1] == "s" else VGPR), first + 256 * (m[1] == "a"), last - first + 1
        if o.kind == SGPR and last >= 104:
            raise Unsupported(f"operand {text}")
    elif t in _SPECIAL:
        o.kind, (o.index, o.count) = SGPR, _SPECIAL[t]
    elif re.fullmatch(r"-?(0x[0-9a-f]+|\d+)", t):
        o.kind, o.value = CONST, int(t, 0) & _MASK64
    elif re.fullmatch(r"-?\d*\.\d*(e[-+]?\d+)?", t):
        o.kind = CONST
        o.value = struct.unpack("<H", struct.pack("<e", float(t)))[0] if half else struct.unpack("<I", struct.pack("<f", float(t)))[0]
    else:
        raise Unsupported(f"operand {text}")
    return o


def _wide(o, text):
    """A 64-bit source: a pair, or an integer constant."""
    if o.kind != CONST and o.count != 2:
        raise Unsupported(f"{text} where a pair is needed")
    if o.kind == CONST and "." in text:
        raise Unsupported(f"64-bit float constant {text}")
    return o


def _narrow(o):
    if o.kind == CONST:
        o.value &= 0xFFFFFFFF
    return o


def _integer(text):
    """A 32-bit source that takes no sign modifiers."""
    o = _narrow(_operand(text))
    if o.neg or o.abs:
        raise Unsupported(f"operand {text}")
    return o


def _register(text, kind=VGPR):
    o = _operand(text)
    if o.kind != kind or o.neg or o.abs:
        raise Unsupported(f"operand {text} where a {'vector' if kind == VGPR else 'scalar'} register is needed")
    return o


def _int(text):
    return int(text, 0)


def _list(text):
    return [int(x) for x in text.strip("[]").split(",")]


# ---- lane maps (DPP, swizzle)

def _lane_map(source, valid=_MASK64, enabled=_MASK64, bound_ctrl=False):
    m = LaneMap()
    m.source[:] = source
    m.valid, m.enabled, m.bound_ctrl = valid, enabled, bound_ctrl
    return m


def _bits(lanes):
    return sum(1 << lane for lane, on in enumerate(lanes) if on)


def _dpp_source(mods):
    """Which lane each lane reads; None where there is none."""
    def take(key):
        return key in mods and mods.pop(key)

    if take("row_mirror"):
        return [lane ^ 15 for lane in range(64)]
    if take("row_half_mirror"):
        return [lane ^ 7 for lane in range(64)]
    if q := take("quad_perm"):
        q = _list(q)
        return [(lane & ~3) + q[lane & 3] for lane in range(64)]
    if n := take("row_shr"):
        return [lane - int(n) if lane % 16 >= int(n) else None for lane in range(64)]
    if n := take("row_shl"):
        return [lane + int(n) if lane % 16 + int(n) < 16 else None for lane in range(64)]
    if n := take("row_ror"):
        return [lane // 16 * 16 + (lane - int(n)) % 16 for lane in range(64)]
    if n := take("row_newbcast"):
        return [lane // 16 * 16 + int(n) for lane in range(64)]
    if n := take("row_bcast"):
        return [lane // 16 * 16 - 1 if lane >= 16 else None for lane in range(64)] if int(n) == 15 else [31 if lane >= 32 else None for lane in range(64)]
    raise Unsupported(f"DPP pattern {mods}")


def _dpp(inst, mods, maps):
    source = _dpp_source(mods)
    rows, banks = _int(mods.pop("row_mask", "0xf")), _int(mods.pop("bank_mask", "0xf"))
    enabled = _bits([rows >> lane // 16 & 1 and banks >> lane // 4 % 4 & 1 for lane in range(64)])
    inst.flags |= IS_DPP
    inst.map = len(maps)
    maps.append(_lane_map([s or 0 for s in source], _bits([s is not None for s in source]), enabled, mods.pop("bound_ctrl", None) is not None))


def _swizzle(pattern):
    """The source lane of each lane; patterns repeat over groups of 32 lanes."""
    if m := re.fullmatch(r"swizzle\((\w+),(.*)\)", pattern.replace(" ", "")):
        kind, args = m[1], m[2]
        if kind == "SWAP":
            return [lane ^ int(args) for lane in range(64)]
        if kind == "REVERSE":
            return [lane ^ int(args) - 1 for lane in range(64)]
        if kind == "BROADCAST":
            size, at = _list(args)
            return [lane // size * size + at for lane in range(64)]
        if kind == "QUAD_PERM":
            return [lane & ~3 | _list(args)[lane & 3] for lane in range(64)]
        if kind == "BITMASK_PERM":
            rule = {"0": (0, 0, 0), "1": (0, 1, 0), "p": (1, 0, 0), "i": (1, 0, 1)}
            masks = [int("".join(str(rule[c][k]) for c in args.strip('"')), 2) for k in range(3)]
            return [lane & 32 | ((lane & 31 & masks[0]) | masks[1]) ^ masks[2] for lane in range(64)]
    elif re.fullmatch(r"\d+|0x[0-9a-f]+", pattern):
        v = _int(pattern)
        if v >> 15:
            return [lane & ~3 | v >> 2 * (lane & 3) & 3 for lane in range(64)]
        return [lane & 32 | ((lane & 31 & v) | v >> 5 & 31) ^ v >> 10 & 31 for lane in range(64)]
    raise Unsupported(f"swizzle pattern {pattern}")


# ---- rules for names the executor's table does not list by themselves

_RULES = []


def _rule(pattern):
    def register(fn):
        _RULES.append((re.compile(pattern), fn))
        return fn
    return register


def _handler(inst, name):
    inst.op = operations()[name][0]


@_rule(r"s_(nop|setprio|sleep|sched_barrier|icache_inv|dcache_wb|inst_prefetch)|buffer_(wbl2|inv)|s_ttracedata")
def _no_effect(inst, line, m, maps):
    _handler(inst, "nothing")
    line.operands.clear()
    line.modifiers.clear()


@_rule(r"s_endpgm")
def _end(inst, line, m, maps):
    _handler(inst, "end")


@_rule(r"s_barrier")
def _barrier(inst, line, m, maps):
    _handler(inst, "barrier")


@_rule(r"s_trap")
def _trap(inst, line, m, maps):
    _handler(inst, "trap")
    inst.imm[0] = _int(line.operands.pop())


@_rule(r"s_waitcnt")
def _waitcnt(inst, line, m, maps):
    _handler(inst, "waitcnt")
    inst.imm[0] = inst.imm[1] = 1 << 20
    text = line.operands.pop()
    if re.fullmatch(r"0x[0-9a-f]+|\d+", text):
        v = _int(text)
        inst.imm[0], inst.imm[1] = v & 15 | v >> 10 & 48, v >> 8 & 15
        return
    for counter, n in re.findall(r"(\w+)\((\d+)\)", text):
        if counter not in ("vmcnt", "lgkmcnt", "expcnt"):
            raise Unsupported(f"wait for {counter}")
        if counter != "expcnt":
            inst.imm[counter == "lgkmcnt"] = int(n)


@_rule(r"s_setreg_imm32_b32")
def _setreg(inst, line, m, maps):
    register, value = line.operands
    if not re.fullmatch(r"hwreg\(HW_REG_MODE,\s*23,\s*1\)", register):
        raise Unsupported(f"setting {register}")
    _handler(inst, "setreg")
    inst.imm[0] = _int(value)
    line.operands.clear()


@_rule(r"s_(?:branch|cbranch_(scc0|scc1|vccz|vccnz|execz|execnz))")
def _branch(inst, line, m, maps):
    _handler(inst, "branch")
    inst.imm[0], inst.imm[1] = line.target, (None, "scc0", "scc1", "vccz", "vccnz", "execz", "execnz").index(m[1])
    line.operands.clear()


@_rule(r"s_(and|or|xor|andn2|orn2|andn1)_saveexec_b64")
def _saveexec(inst, line, m, maps):
    _handler(inst, "saveexec")
    inst.imm[0] = ("and", "or", "xor", "andn2", "orn2", "andn1").index(m[1])
    inst.dst[0], inst.src[0] = _register(line.operands[0], SGPR), _wide(_operand(line.operands[1]), line.operands[1])
    line.operands.clear()


@_rule(r"s_load_dword(?:x(\d+))?")
def _scalar_load(inst, line, m, maps):
    _handler(inst, "scalar_load")
    inst.dst[0], inst.src[0], inst.src[1] = _register(line.operands[0], SGPR), _register(line.operands[1], SGPR), _integer(line.operands[2])
    inst.imm[0], inst.imm[1] = int(m[1] or 1), _int(line.modifiers.pop("offset", "0"))
    line.operands.clear()
    line.modifiers.pop("glc", None)


@_rule(r"v_cndmask_b32")
def _select(inst, line, m, maps):
    _handler(inst, "select")
    d, a, b, mask = line.operands
    inst.dst[0], inst.src[0], inst.src[1], inst.src[2] = _register(d), _narrow(_operand(a)), _narrow(_operand(b)), _wide(_operand(mask), mask)
    line.operands.clear()


@_rule(r"v_(add|addc|sub|subb|subrev|subbrev)_co_u32")
def _carry(inst, line, m, maps):
    _handler(inst, "carry")
    d, out, a, b, *carry = line.operands
    inst.dst[0], inst.dst[1] = _register(d), _register(out, SGPR)
    inst.src[0], inst.src[1] = _integer(a), _integer(b)
    if bool(carry) != (m[1] in ("addc", "subb", "subbrev")):
        raise Unsupported("carry operand")
    if carry:
        inst.src[2] = _wide(_operand(carry[0]), carry[0])
    inst.imm[0] = {"add": 0, "addc": 0, "sub": 1, "subb": 1}.get(m[1], 2)
    line.operands.clear()


@_rule(r"v_mad_(u64_u32|i64_i32)")
def _mad64(inst, line, m, maps):
    _handler(inst, "mad64")
    d, out, a, b, c = line.operands
    inst.dst[0], inst.dst[1] = _register(d), _register(out, SGPR)
    inst.src[0], inst.src[1], inst.src[2] = _integer(a), _integer(b), _wide(_operand(c), c)
    inst.imm[0] = m[1] == "i64_i32"
    line.operands.clear()


@_rule(r"v_div_(scale|fmas|fixup)_f32")
def _division(inst, line, m, maps):
    _handler(inst, "div_" + m[1])
    inst.dst[0] = _register(line.operands.pop(0))
    if m[1] == "scale":
        inst.dst[1] = _register(line.operands.pop(0), SGPR)
    for k in range(3):
        inst.src[k] = _narrow(_operand(line.operands[k]))
    line.operands.clear()


def _packed_sources(inst, line, half):
    n = len(line.operands) - 1
    low, high = _list(line.modifiers.pop("op_sel", str([0] * n))), _list(line.modifiers.pop("op_sel_hi", str([1] * n)))
    neg_low, neg_high = _list(line.modifiers.pop("neg_lo", str([0] * n))), _list(line.modifiers.pop("neg_hi", str([0] * n)))
    inst.dst[0] = _register(line.operands[0])
    for k in range(n):
        o = _narrow(_operand(line.operands[k + 1], half))
        if o.neg or o.abs:
            raise Unsupported(f"operand {line.operands[k + 1]} of a packed instruction")
        o.half, o.sel, o.hi, o.neg, o.abs = 0, low[k], high[k], neg_low[k], neg_high[k]
        inst.src[k] = o
    line.operands.clear()


@_rule(r"v_pk_(mul|add|fma|mov)_[fb]32")
def _packed32(inst, line, m, maps):
    _handler(inst, "packed32")
    _packed_sources(inst, line, False)
    inst.imm[0] = ("mul", "add", "fma", "mov").index(m[1])
    if m[1] == "mov":                                # (source 0 by its op_sel, source 1 by its op_sel); op_sel_hi means nothing
        inst.src[1].hi = inst.src[1].sel


_PACKED16 = ("add_f16", "mul_f16", "fma_f16", "max_f16", "min_f16", "add_u16", "sub_u16", "mul_lo_u16", "mad_u16", "max_i16", "min_i16", "max_u16", "min_u16",
             "lshlrev_b16", "lshrrev_b16", "ashrrev_i16")


@_rule(r"v_pk_(" + "|".join(_PACKED16) + ")")
def _packed16(inst, line, m, maps):
    _handler(inst, "packed16")
    _packed_sources(inst, line, True)
    inst.imm[0] = _PACKED16.index(m[1])


@_rule(r"v_fma_mix(_f32|lo_f16|hi_f16)")
def _fma_mix(inst, line, m, maps):
    _handler(inst, "fma_mix")
    inst.dst[0] = _register(line.operands[0])
    select, is_half = _list(line.modifiers.pop("op_sel", "[0,0,0]")), _list(line.modifiers.pop("op_sel_hi", "[0,0,0]"))
    for k in range(3):
        inst.src[k] = _narrow(_operand(line.operands[k + 1]))
        inst.src[k].sel, inst.src[k].hi = select[k], is_half[k]
    inst.imm[0] = ("_f32", "lo_f16", "hi_f16").index(m[1])
    line.operands.clear()


@_rule(r"v_bitop3_b(32|16)")
def _bitop3(inst, line, m, maps):
    _handler(inst, "bitop3")
    inst.dst[0] = _register(line.operands[0])
    for k in range(3):
        inst.src[k] = _integer(line.operands[k + 1])
    inst.imm[0], inst.imm[1] = _int(line.modifiers.pop("bitop3", "0")), int(m[1])
    line.operands.clear()


@_rule(r"v_read(firstlane|lane)_b32")
def _readlane(inst, line, m, maps):
    _handler(inst, "readlane")
    inst.dst[0], inst.src[0] = _register(line.operands[0], SGPR), _register(line.operands[1])
    if m[1] == "lane":
        inst.src[1] = _operand(line.operands[2])
    line.operands.clear()


@_rule(r"v_writelane_b32")
def _writelane(inst, line, m, maps):
    _handler(inst, "writelane")
    inst.dst[0], inst.src[0], inst.src[1] = _register(line.operands[0]), _integer(line.operands[1]), _operand(line.operands[2])
    line.operands.clear()


@_rule(r"v_mbcnt_(lo|hi)_u32_b32")
def _mbcnt(inst, line, m, maps):
    _handler(inst, "mbcnt")
    inst.dst[0], inst.src[0], inst.src[1] = _register(line.operands[0]), _integer(line.operands[1]), _integer(line.operands[2])
    inst.imm[0] = m[1] == "hi"
    line.operands.clear()


@_rule(r"v_(swap|permlane16_swap|permlane32_swap)_b32")
def _swap(inst, line, m, maps):
    _handler(inst, "swap" if m[1] == "swap" else "permlane_swap")
    inst.dst[0], inst.src[0] = _register(line.operands[0]), _register(line.operands[1])
    inst.imm[0] = 0 if m[1] == "swap" else int(m[1][8:10])
    line.operands.clear()


_WIDE = {"f32": 0, "f16": 1, "bf16": 2}


@_rule(r"v_cvt_(scalef32_)?pk_(f32|f16|bf16)_(fp8|bf8)")
def _unpack_small(inst, line, m, maps):
    _handler(inst, "unpack_small")
    inst.dst[0], inst.src[0] = _register(line.operands[0]), _integer(line.operands[1])
    if m[1]:
        inst.src[1] = _integer(line.operands[2])
    elif m[2] != "f32":
        raise Unsupported("conversion")
    high = _list(line.modifiers.pop("op_sel", "[0]"))[0] or {"WORD_1": 1, "WORD_0": 0, "DWORD": 0}[line.modifiers.pop("src0_sel", "DWORD")]
    inst.imm[0], inst.imm[1], inst.imm[2] = high, m[3] == "bf8", _WIDE[m[2]]
    line.operands.clear()
    line.encoding = ""


@_rule(r"v_cvt_f32_(fp8|bf8)")
def _unpack_one(inst, line, m, maps):
    _handler(inst, "unpack_one")
    inst.dst[0], inst.src[0] = _register(line.operands[0]), _integer(line.operands[1])
    select = line.modifiers.pop("src0_sel", "BYTE_0")
    byte = _int(line.modifiers.pop("byte_sel", "0")) or {"DWORD": 0}.get(select, int(select[-1]) if select.startswith("BYTE") else -1)
    if byte < 0 or "op_sel" in line.modifiers:
        raise Unsupported("byte selection")
    inst.imm[0], inst.imm[1] = byte, m[1] == "bf8"
    line.operands.clear()
    line.encoding = ""


@_rule(r"v_cvt_(scalef32_)?pk_(fp8|bf8)_(f32|f16|bf16)")
def _pack_small(inst, line, m, maps):
    if not m[1] and m[3] != "f32":
        raise Unsupported("conversion")
    _handler(inst, "pack_small")
    inst.dst[0] = _register(line.operands[0])
    for k, text in enumerate(line.operands[1:]):
        inst.src[k] = _narrow(_operand(text))
    inst.imm[0], inst.imm[1], inst.imm[2] = _list(line.modifiers.pop("op_sel", "[0]"))[-1], m[2] == "bf8", _WIDE[m[3]]
    line.operands.clear()


_MATRIX_TYPES = {"bf16": (0, 0), "f16": (1, 1), "f32": (2, 2), "xf32": (5, 5), "fp8_fp8": (3, 3), "fp8_bf8": (3, 4), "bf8_fp8": (4, 3), "bf8_bf8": (4, 4)}


@_rule(r"v_mfma_f32_(16x16|32x32)x(\d+)_(bf16|f16|f32|xf32|fp8_fp8|fp8_bf8|bf8_fp8|bf8_bf8|f8f6f4)")
def _mfma(inst, line, m, maps):
    _handler(inst, "mfma")
    n, depth = int(m[1][:2]), int(m[2])
    formats = [int(line.modifiers.pop(key, "0")) for key in ("cbsz", "blgp")]
    if m[3] == "f8f6f4" and max(formats) <= 1:
        types = [3 + f for f in formats]
    elif m[3] != "f8f6f4" and not any(formats):
        types = _MATRIX_TYPES[m[3]]
    else:
        raise Unsupported("matrix formats below 8 bits, or a broadcast matrix instruction")
    d, a, b, c = line.operands
    inst.dst[0], inst.src[0], inst.src[1], inst.src[2] = _register(d), _register(a), _register(b), _narrow(_operand(c))
    values = depth * n // 64
    size = {0: 2, 1: 2, 2: 4, 5: 4}
    expected = [values * size.get(t, 1) // 4 for t in types] + [n * n // 64] * 2
    counts = [inst.src[0].count, inst.src[1].count, inst.dst[0].count, inst.src[2].count if inst.src[2].kind == VGPR else n * n // 64]
    if counts != expected or inst.src[2].kind == SGPR or inst.src[2].neg or inst.src[2].abs:
        raise Unsupported("matrix operands")
    inst.imm[0], inst.imm[1], inst.imm[2], inst.imm[3] = n, depth, *types
    line.operands.clear()


# ---- memory

_SIZES = {"b8": 1, "u8": 1, "i8": 1, "b16": 2, "u16": 2, "i16": 2, "b32": 4, "b64": 8, "b96": 12, "b128": 16,
          "ubyte": 1, "sbyte": 1, "byte": 1, "ushort": 2, "sshort": 2, "short": 2, "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}
_EXTENDS = {"i8": 1, "i16": 1, "sbyte": 1, "sshort": 1}


def _extension(kind, half):
    return {"_d16": 2, "_d16_hi": 3}.get(half, _EXTENDS.get(kind, 0))


@_rule(r"ds_read_b64_tr_b(16|8)")
def _lds_read_transposed(inst, line, m, maps):
    _handler(inst, "lds_read_transposed")
    inst.dst[0], inst.src[0] = _register(line.operands[0]), _register(line.operands[1])
    inst.imm[0], inst.imm[1] = int(m[1]) // 8, _int(line.modifiers.pop("offset", "0"))
    line.operands.clear()


@_rule(r"ds_(read|write)(2)?(st64)?_(b8|u8|i8|b16|u16|i16|b32|b64|b96|b128)(_d16_hi|_d16)?")
def _lds(inst, line, m, maps):
    size = _SIZES[m[4]]
    unit = size * (64 if m[3] else 1)
    if m[2]:
        inst.imm[1], inst.imm[2] = (_int(line.modifiers.pop(k, "0")) * unit for k in ("offset0", "offset1"))
    else:
        inst.imm[1], inst.imm[2] = _int(line.modifiers.pop("offset", "0")), -1
    inst.imm[0] = size
    registers = [_register(t) for t in line.operands]
    if m[1] == "read":
        _handler(inst, "lds_read")
        inst.dst[0], inst.src[0] = registers
        inst.imm[3] = _extension(m[4], m[5])
        if m[5] == "_d16_hi" and m[4] == "u16":
            inst.imm[3] = 3
    else:
        _handler(inst, "lds_write")
        for k, r in enumerate(registers):
            inst.src[k] = r
        inst.imm[3] = m[5] == "_d16_hi"
    line.operands.clear()


@_rule(r"ds_(bpermute|permute|swizzle)_b32")
def _lds_lanes(inst, line, m, maps):
    _handler(inst, m[1])
    inst.dst[0] = _register(line.operands[0])
    for k, text in enumerate(line.operands[1:]):
        inst.src[k] = _register(text)
    if m[1] == "swizzle":
        inst.map = len(maps)
        maps.append(_lane_map(_swizzle(line.modifiers.pop("offset"))))
    else:
        inst.imm[0] = _int(line.modifiers.pop("offset", "0"))
    line.operands.clear()


_HINTS = ("glc", "slc", "nt", "sc0", "sc1")


def _addressing(inst, line, buffer, has_result, has_data):
    """Fill the address operands (sources 0-2), result and data (source 3). Returns the address mode."""
    ops = list(line.operands)
    if has_result:
        inst.dst[0] = _register(ops.pop(0))
    if buffer:
        if has_data:
            inst.src[3] = _register(ops.pop(0))
        vector, resource, scalar = ops
        inst.src[1], inst.src[2] = _register(resource, SGPR), _narrow(_operand(scalar))
        offen = line.modifiers.pop("offen", False)
        if offen != (vector != "off"):
            raise Unsupported(f"buffer address {vector}")
        if offen:
            inst.src[0] = _register(vector)
        return 3 if offen else 2
    inst.src[0] = _register(ops.pop(0))
    if has_data:
        inst.src[3] = _register(ops.pop(0))
    [base] = ops
    if base == "off":
        return 0
    inst.src[1] = _register(base, SGPR)
    return 1


@_rule(r"(global|buffer)_(load|store)(_lds)?_(ubyte|sbyte|byte|ushort|sshort|short|dword|dwordx2|dwordx3|dwordx4)(_d16_hi|_d16)?")
def _memory(inst, line, m, maps):
    to_lds = bool(m[3]) or bool(line.modifiers.pop("lds", False))
    load = m[2] == "load"
    for hint in _HINTS:
        line.modifiers.pop(hint, None)
    _handler(inst, "load_lds" if to_lds else "load" if load else "store")
    inst.imm[0], inst.imm[1] = _SIZES[m[4]], _int(line.modifiers.pop("offset", "0"))
    inst.imm[2] = _addressing(inst, line, m[1] == "buffer", load and not to_lds, not load)
    inst.imm[3] = _extension(m[4], m[5]) if load else m[5] == "_d16_hi"
    line.operands.clear()


@_rule(r"(global|buffer)_load_(short|ubyte|sbyte)_d16(_hi)?")
def _memory_half(inst, line, m, maps):
    for hint in _HINTS:
        line.modifiers.pop(hint, None)
    _handler(inst, "load")
    inst.imm[0], inst.imm[1] = _SIZES[m[2]], _int(line.modifiers.pop("offset", "0"))
    inst.imm[2] = _addressing(inst, line, m[1] == "buffer", True, False)
    if m[2] == "sbyte":
        raise Unsupported("sign extension into half a register")
    inst.imm[3] = 3 if m[3] else 2
    line.operands.clear()


@_rule(r"scratch_(load|store)_(ubyte|sbyte|byte|ushort|sshort|short|dword|dwordx2|dwordx3|dwordx4)(_d16_hi|_d16)?")
def _scratch(inst, line, m, maps):
    load = m[1] == "load"
    _handler(inst, "scratch_" + m[1])
    register, vector = line.operands[:2] if load else line.operands[1::-1]
    if vector != "off":
        raise Unsupported(f"scratch address {vector}")
    if load:
        inst.dst[0] = _register(register)
    else:
        inst.src[3] = _register(register)
    if line.operands[2] != "off":
        inst.src[1] = _register(line.operands[2], SGPR)
    inst.imm[0], inst.imm[1] = _SIZES[m[2]], _int(line.modifiers.pop("offset", "0"))
    inst.imm[3] = _extension(m[2], m[3]) if load else m[3] == "_d16_hi"
    line.operands.clear()


_ATOMICS = ("add", "sub", "smin", "umin", "smax", "umax", "and", "or", "xor", "swap", "cmpswap", "add_f32", "pk_add_f16", "pk_add_bf16")


@_rule(r"(global|buffer)_atomic_(" + "|".join(sorted(_ATOMICS, key=len, reverse=True)) + ")(_x2)?")
def _atomic(inst, line, m, maps):
    returns = line.modifiers.pop("sc0", False)
    for hint in _HINTS:
        line.modifiers.pop(hint, None)
    _handler(inst, "atomic")
    buffer = m[1] == "buffer"
    if buffer:                                       # a buffer atomic returns into its data register
        inst.imm[2] = _addressing(inst, line, True, False, True)
        inst.dst[0] = inst.src[3]
    else:
        inst.imm[2] = _addressing(inst, line, False, returns, True)
    inst.imm[0], inst.imm[1], inst.imm[3], inst.map = _ATOMICS.index(m[2]), _int(line.modifiers.pop("offset", "0")), returns, m[3] is not None
    line.operands.clear()


# ---- instructions of the executor's table

_SELECTS = {"DWORD": 0, "BYTE_0": 1, "BYTE_1": 2, "BYTE_2": 3, "BYTE_3": 4, "WORD_0": 5, "WORD_1": 6}


def _scalar(inst, line, form):
    results, sources = form.split("=")
    texts = list(line.operands)
    if results:
        inst.dst[0] = _register(texts.pop(0), SGPR)
        if inst.dst[0].count != (2 if results == "S" else 1):
            raise Unsupported(f"operand {line.operands[0]}")
    for k, (kind, text) in enumerate(zip(sources, texts, strict=True)):
        inst.src[k] = _wide(_operand(text), text) if kind == "S" else _narrow(_operand(text))
    line.operands.clear()


def _lanes(inst, line, form, result_kind):
    sources = form[2:].removesuffix("d")
    half = line.name.endswith("_f16") and line.name != "v_cvt_pk_f16_f32"
    inst.dst[0] = _register(line.operands[0], result_kind)
    texts = line.operands[1:]
    for k, (kind, text) in enumerate(zip(sources, texts, strict=True)):
        o = _operand(text, half and line.name != "v_cvt_f16_f32")
        if kind in "ui" and (o.neg or o.abs) and not half:
            raise Unsupported(f"operand {text}")
        inst.src[k] = _wide(o, text) if kind == "q" else _narrow(o)
    line.operands.clear()


def _sub_dword(inst, line):
    """SDWA selections, or op_sel of a 16-bit instruction."""
    mods = line.modifiers
    if line.encoding == "sdwa":
        inst.flags |= IS_SDWA
        for k in range(2):
            inst.src[k].sel = _SELECTS[mods.pop(f"src{k}_sel", "DWORD")]
        inst.dst[0].sel = _SELECTS[mods.pop("dst_sel", "DWORD")]
        unused = mods.pop("dst_unused", "UNUSED_PRESERVE")
        if unused == "UNUSED_PAD":
            inst.flags |= DST_PAD
        elif unused != "UNUSED_PRESERVE":
            raise Unsupported(unused)


def decode(line, number, maps):
    """`Line` -> `Inst`; appends to `maps` the lane map it needs, if any. Raises `Unsupported`."""
    inst = Inst()
    inst.line, inst.map = number, -1
    line = type(line)(line.text, line.name, line.encoding, list(line.operands), dict(line.modifiers), line.target)
    try:
        if line.encoding == "dpp":
            _dpp(inst, line.modifiers, maps)
        for pattern, rule in _RULES:
            if m := pattern.fullmatch(line.name):
                rule(inst, line, m, maps)
                break
        else:
            known = operations().get(line.name)
            if known is None or known[2] == "handler":
                raise Unsupported("instruction")
            inst.op, form, family = known
            if family == "scalar":
                _scalar(inst, line, form)
            else:
                _lanes(inst, line, form, SGPR if family == "compare" else VGPR)
                if family == "compare":
                    inst.imm[0] = 16 if line.name.endswith("16") else 32
                elif line.modifiers.pop("clamp", None):
                    if form[:2] != "v_" or not line.name.endswith("_f32") or line.name.startswith("v_cvt_"):
                        raise Unsupported("clamp")
                    inst.flags |= CLAMP
        _sub_dword(inst, line)
        if line.encoding == "dpp" and operations().get(line.name, (0, 0, ""))[2] != "lanes":
            raise Unsupported("DPP form")
        if line.encoding == "sdwa" and not (line.name == "v_cndmask_b32" or operations().get(line.name, (0, 0, ""))[2] in ("lanes", "compare")):
            raise Unsupported("SDWA form")
        if line.operands or line.modifiers:
            raise Unsupported(f"modifier {', '.join([*line.operands, *line.modifiers])}")
    except Unsupported as why:
        raise Unsupported(f"{line.text}: not modelled ({why})") from None
    except (ValueError, KeyError, IndexError) as why:
        raise Unsupported(f"{line.text}: not modelled (unexpected operands: {why})") from None
    return inst


@functools.cache
def names():
    """Every name pattern the simulator accepts: for listings and the inventory test."""
    return sorted(name for name, (_, _, family) in operations().items() if family != "handler"), [p.pattern for p, _ in _RULES]
