"""Which lane reads which: the patterns of DPP and of ds_swizzle."""

import re

from ..core import IS_DPP, LaneMap
from ..text import Unsupported
from .operands import MASK64, integer_of, numbers


def lane_map(source, valid=MASK64, enabled=MASK64, bound_ctrl=False):
    m = LaneMap()
    m.source[:] = source
    m.valid, m.enabled, m.bound_ctrl = valid, enabled, bound_ctrl
    return m


def bits(lanes):
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
        q = numbers(q)
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


def dpp(inst, mods, maps):
    source = _dpp_source(mods)
    rows, banks = integer_of(mods.pop("row_mask", "0xf")), integer_of(mods.pop("bank_mask", "0xf"))
    enabled = bits([rows >> lane // 16 & 1 and banks >> lane // 4 % 4 & 1 for lane in range(64)])
    inst.flags |= IS_DPP
    inst.map = len(maps)
    maps.append(lane_map([s or 0 for s in source], bits([s is not None for s in source]), enabled, mods.pop("bound_ctrl", None) is not None))


def swizzle(pattern):
    """The source lane of each lane; patterns repeat over groups of 32 lanes."""
    if m := re.fullmatch(r"swizzle\((\w+),(.*)\)", pattern.replace(" ", "")):
        kind, args = m[1], m[2]
        if kind == "SWAP":
            return [lane ^ int(args) for lane in range(64)]
        if kind == "REVERSE":
            return [lane ^ int(args) - 1 for lane in range(64)]
        if kind == "BROADCAST":
            size, at = numbers(args)
            return [lane // size * size + at for lane in range(64)]
        if kind == "QUAD_PERM":
            return [lane & ~3 | numbers(args)[lane & 3] for lane in range(64)]
        if kind == "BITMASK_PERM":
            rule = {"0": (0, 0, 0), "1": (0, 1, 0), "p": (1, 0, 0), "i": (1, 0, 1)}
            masks = [int("".join(str(rule[c][k]) for c in args.strip('"')), 2) for k in range(3)]
            return [lane & 32 | ((lane & 31 & masks[0]) | masks[1]) ^ masks[2] for lane in range(64)]
    elif re.fullmatch(r"\d+|0x[0-9a-f]+", pattern):
        v = integer_of(pattern)
        if v >> 15:
            return [lane & ~3 | v >> 2 * (lane & 3) & 3 for lane in range(64)]
        return [lane & 32 | ((lane & 31 & v) | v >> 5 & 31) ^ v >> 10 & 31 for lane in range(64)]
    raise Unsupported(f"swizzle pattern {pattern}")
