"""Operand text -> `Operand`."""

import re
import struct

from ..core import CONST, SGPR, VGPR, Operand
from ..text import Unsupported

_SPECIAL = {"vcc": (106, 2), "vcc_lo": (106, 1), "vcc_hi": (107, 1), "m0": (124, 1), "exec": (126, 2), "exec_lo": (126, 1), "exec_hi": (127, 1)}
MASK64 = (1 << 64) - 1


def operand(text, half=False):
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
        first, last = int(m[2]), int(m[m.lastindex or 2])
        o.kind, o.index, o.count = (SGPR if m[1] == "s" else VGPR), first + 256 * (m[1] == "a"), last - first + 1
        if o.kind == SGPR and last >= 104:
            raise Unsupported(f"operand {text}")
    elif t in _SPECIAL:
        o.kind, (o.index, o.count) = SGPR, _SPECIAL[t]
    elif re.fullmatch(r"-?(0x[0-9a-f]+|\d+)", t):
        o.kind, o.value = CONST, int(t, 0) & MASK64
    elif re.fullmatch(r"-?\d*\.\d*(e[-+]?\d+)?", t):
        o.kind = CONST
        o.value = struct.unpack("<H", struct.pack("<e", float(t)))[0] if half else struct.unpack("<I", struct.pack("<f", float(t)))[0]
    else:
        raise Unsupported(f"operand {text}")
    return o


def wide(o, text):
    """A 64-bit source: a pair, or an integer constant."""
    if o.kind != CONST and o.count != 2:
        raise Unsupported(f"{text} where a pair is needed")
    if o.kind == CONST and "." in text:
        raise Unsupported(f"64-bit float constant {text}")
    return o


def narrow(o):
    if o.kind == CONST:
        o.value &= 0xFFFFFFFF
    return o


def integer(text):
    """A 32-bit source that takes no sign modifiers."""
    o = narrow(operand(text))
    if o.neg or o.abs:
        raise Unsupported(f"operand {text}")
    return o


def register(text, kind=VGPR):
    o = operand(text)
    if o.kind != kind or o.neg or o.abs:
        raise Unsupported(f"operand {text} where a {'vector' if kind == VGPR else 'scalar'} register is needed")
    return o


def integer_of(text):
    return int(text, 0)


def numbers(text):
    return [int(x) for x in text.strip("[]").split(",")]
