"""Read Triton's `amdgcn` assembly text: what the kernel descriptor says, and one `Line` for each instruction.

The text assembles to the shipped binary bit for bit (a test shows it where llvm-mc is present), so nothing is lost by starting from it.
"""

import re
from dataclasses import dataclass, field


class Unsupported(Exception):
    """An instruction, modifier, operand or kernel feature that the simulator does not model. The message names it."""


@dataclass
class Line:
    """One instruction: `v_add_f32_e32 v1, s2, v3` is name `v_add_f32`, operands `["v1", "s2", "v3"]`, modifiers `{}`."""

    text: str
    name: str
    encoding: str  # "", "dpp" or "sdwa"
    operands: list
    modifiers: dict
    target: int = -1  # index of the instruction a branch goes to


@dataclass
class Kernel:
    """Facts of the kernel descriptor, and its instructions."""

    name: str
    arch: str
    kernarg_sgpr: int  # scalar pair with the address of the arguments
    user_sgprs: int  # workgroup ids follow at this scalar register
    workgroup_ids: tuple  # which of x, y, z are passed
    kernarg_size: int
    lds_size: int  # static part; Triton adds metadata.shared at launch
    scratch_size: int  # bytes a lane
    lines: list = field(default_factory=list)


# Settings under which the instruction rules in executor/ hold; a kernel that asks for others is refused.
_REQUIRED = {
    "float_round_mode_32": 0,
    "float_round_mode_16_64": 0,
    "float_denorm_mode_32": 3,
    "float_denorm_mode_16_64": 3,
    "dx10_clamp": 1,
    "fp16_overflow": 0,
    "user_sgpr_kernarg_segment_ptr": 1,
    "system_sgpr_workgroup_info": 0,
    "uses_dynamic_stack": 0,
}
_BARE = {"s_endpgm", "s_barrier", "s_waitcnt", "s_nop", "s_setprio", "s_sleep", "s_sethalt", "s_trap"}
_FLAGS = {"offen", "idxen", "lds", "glc", "slc", "nt", "sc0", "sc1", "clamp", "gds", "row_mirror", "row_half_mirror"}


def _split(text):
    """Split at commas outside brackets."""
    parts, depth, last = [], 0, 0
    for k, ch in enumerate(text):
        depth += (ch in "[(") - (ch in "])")
        if ch == "," and depth == 0:
            parts.append(text[last:k])
            last = k + 1
    return [p.strip() for p in parts + [text[last:]] if p.strip()]


def parse_line(text):
    """One instruction without comment. Modifiers follow the last operand, separated by blanks."""
    word, _, rest = text.strip().partition(" ")
    name, encoding = word, ""
    for suffix in ("_dpp", "_sdwa"):
        if name.endswith(suffix):
            name, encoding = name[: -len(suffix)], suffix[1:]
    name = re.sub(r"_e(32|64)$", "", name)
    operands: list[str] = []
    modifiers: dict = {}
    if name in _BARE:
        operands = [rest.strip()] if rest.strip() else []
        return Line(text.strip(), name, encoding, operands, modifiers)
    for part in _split(rest):
        # a blank inside hwreg(...) or swizzle(...) does not separate
        for k, token in enumerate(re.findall(r"(?:[^\s\[(]|\[[^\]]*\]|\([^)]*\))+", part)):
            key, colon, value = token.partition(":")
            if k == 0 and not (operands and token in _FLAGS):
                operands.append(token)
            elif token in _FLAGS:
                modifiers[token] = True
            elif colon and re.fullmatch(r"[a-z_0-9]+", key):
                modifiers[key] = value
            else:
                operands.append(token)
    return Line(text.strip(), name, encoding, operands, modifiers)


def parse(text):
    """Assembly text of one kernel -> `Kernel`."""

    def find(pattern):
        found = re.search(pattern, text)
        if not found:
            raise Unsupported(f"assembly text without {pattern}")
        return found[1]

    name = find(r"\.amdhsa_kernel\s+(\S+)")
    arch = find(r"\.amdgcn_target\s+\"\S*?(gfx\w+)")
    facts = dict(re.findall(r"\.amdhsa_(\w+)\s+(\S+)", text))

    def fact(key, default=0):
        return int(facts.get(key, default))

    wrong = [f"{k} is {facts[k]}, must be {v}" for k, v in _REQUIRED.items() if k in facts and fact(k) != v]
    if wrong:
        raise Unsupported(f"kernel {name}: " + "; ".join(wrong))
    before = 2 * (fact("user_sgpr_dispatch_ptr") + fact("user_sgpr_queue_ptr"))  # these two stay undefined: reading them is a fault
    kernel = Kernel(
        name,
        arch,
        before,
        fact("user_sgpr_count"),
        tuple(bool(fact("system_sgpr_workgroup_id_" + x)) for x in "xyz"),
        fact("kernarg_size"),
        fact("group_segment_fixed_size"),
        fact("private_segment_fixed_size"),
    )
    labels, inside = {}, False
    for raw in text.splitlines():
        line = raw.split(";")[0].rstrip()
        if not inside:
            inside = line.startswith(name + ":")
            continue
        if re.match(r"\.Lfunc_end|\s*\.section", line):
            break
        label = re.match(r"\s*(\.?[\w$]+):\s*$", line)
        if label:
            labels[label[1]] = len(kernel.lines)
        elif line.strip() and not line.lstrip().startswith("."):
            kernel.lines.append(parse_line(line))
    for line in kernel.lines:
        if line.name.startswith(("s_branch", "s_cbranch")):
            if line.operands[0] not in labels:
                raise Unsupported(f"branch to an unknown label: {line.text}")
            line.target = labels[line.operands[0]]
    return kernel
