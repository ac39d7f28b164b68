"""One `Line` of text -> one `Inst` record for the executor, or `Unsupported` naming what is not modelled.

`decode` looks the name up in order: the rules of the family files beside this one, then the executor's own table, whose form says which
operands to expect.
"""

from ..core import CLAMP, DST_PAD, IS_SDWA, SGPR, VGPR, Inst, operations
from ..text import Unsupported
from . import lds, matrix, memory, scalar, vector  # noqa: F401  (they register their rules)
from .lane_maps import dpp
from .operands import narrow, operand, register, wide
from .rules import RULES

_SELECTS = {"DWORD": 0, "BYTE_0": 1, "BYTE_1": 2, "BYTE_2": 3, "BYTE_3": 4, "WORD_0": 5, "WORD_1": 6}


def _scalar(inst, line, form):
    results, sources = form.split("=")
    texts = list(line.operands)
    if results:
        inst.dst[0] = register(texts.pop(0), SGPR)
        if inst.dst[0].count != (2 if results == "S" else 1):
            raise Unsupported(f"operand {line.operands[0]}")
    for k, (kind, text) in enumerate(zip(sources, texts, strict=True)):
        inst.src[k] = wide(operand(text), text) if kind == "S" else narrow(operand(text))
    line.operands.clear()


def _lanes(inst, line, form, result_kind):
    sources = form[2:].removesuffix("d")
    half = line.name.endswith("_f16") and line.name != "v_cvt_pk_f16_f32"
    inst.dst[0] = register(line.operands[0], result_kind)
    texts = line.operands[1:]
    for k, (kind, text) in enumerate(zip(sources, texts, strict=True)):
        o = operand(text, half and line.name != "v_cvt_f16_f32")
        if kind in "ui" and (o.neg or o.abs) and not half:
            raise Unsupported(f"operand {text}")
        inst.src[k] = wide(o, text) if kind == "q" else narrow(o)
    line.operands.clear()


def _sub_dword(inst, line):
    """SDWA: which part of each source is taken, and which part of the destination is written."""
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
            dpp(inst, line.modifiers, maps)
        for pattern, rule in RULES:
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
