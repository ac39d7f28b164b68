"""Read NVIDIA machine code (SASS, sm_90) into the same report as `codegen.read` makes of AMD code, for the cost model.

The disassemblers are those that come with Triton, or those in PATH. Sources: CUDA programming guide, table of arithmetic throughput for compute capability
9.0; the data-sheet peak for `HGMMA`; for `HMMA`, which Hopper runs below that peak, published microbenchmarks (arXiv:2402.13499).
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

from .codegen import Launch, Loop, Report, fp8_among, tallied

FLOPS_PER_CYCLE = 1024.0  # of one SIMD (a quarter of a multiprocessor), 16-bit operands
HMMA_SHARE = 0.62  # of that, through the synchronous instruction
_LABEL = re.compile(r"^\s*(\.L_x_\d+):")
_CODE = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?(U?P\d|U?PT)\s+)?([A-Z0-9_][\w.]*)([^;]*);")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
# By pipe; what is in none of them goes to the FMA pipe, 32 lanes a cycle, or to the uniform one. 16 lanes a cycle:
_HALF_RATE = re.compile(
    r"(FMNMX|FSEL|SEL|FSETP|ISETP|LOP3|LEA|IADD3|VIADD|VIMNMX|IMNMX|SHF|PRMT|F2FP|IABS|POPC|VOTE|P2R|R2P|PLOP3|MOV|CS2R|IDP|BMSK|SGXT|R2UR|S2R)\b"
)
_UNIFORM = re.compile(r"U[A-Z]|ULDC|S2UR|REDUX")
_MEMORY = re.compile(r"(LD|ST|ATOM|RED|LDGSTS|UTMA|CCTL|SYNCS|LDC|LDL|STL|MEMBAR)")
_CONTROL = re.compile(r"(BRA|BAR|WARP|DEPBAR|LDGDEPBAR|NOP|EXIT|BSSY|BSYNC|ELECT|ERRBAR|CALL|RET|WARPSYNC|FENCE|NANOSLEEP|YIELD)")


def read(launch: Launch) -> Report:
    """Take one launch compiled for NVIDIA apart. ValueError if the tools print what this reader does not know."""
    usage, text = disassemble(launch.compiled.asm["cubin"], launch.compiled.metadata.name)
    lds = launch.compiled.metadata.shared
    registers = usage["REG"]
    loops = hot_loops(text)
    return Report(
        kernel=launch.kernel,
        arch=launch.arch.name,
        vector_registers=registers,
        accumulator_registers=0,
        registers=registers,
        scalar_registers=0,
        spills=usage["STACK"] // 4,
        scalar_spills=0,
        scratch=usage["STACK"],
        lds=lds,
        num_warps=launch.num_warps,
        occupancy=launch.arch.occupancy(registers, lds, launch.num_warps),
        loops=loops,
        fp8_input=fp8_among(launch.signature),
        grid=launch.grid,
        constexprs=launch.constexprs,
        compile_seconds=launch.compile_seconds,
    )


def disassemble(cubin: bytes, function: str) -> tuple[dict[str, int], str]:
    """(figures of resource usage by name, the text of the code). OSError without the tools."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

    def run(name: str, *arguments: str) -> str:
        tool = tools / name
        return subprocess.run([str(tool) if tool.is_file() else name, *arguments], check=True, capture_output=True, text=True).stdout

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = run("cuobjdump", "--dump-resource-usage", file.name)
        text = run("nvdisasm", "-c", file.name)
    found = re.search(rf"Function {re.escape(function)}:\s*\n(.*)", usage)
    if not found:
        raise ValueError(f"no resource usage of {function} in: {usage[-300:]}")
    return {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", found[1])}, text


def hot_loops(text: str) -> tuple[Loop, ...]:
    """The innermost loops that hold matrix instructions; without any such, all innermost loops.

    A loop ends in a conditional branch backwards: the waits that the compiler moves behind the end of the code return by plain ones.
    """
    lines = text.split("\n")
    label = {match[1]: i for i, line in enumerate(lines) if (match := _LABEL.match(line))}
    ends: dict[int, int] = {}
    for i, line in enumerate(lines):
        code, target = _CODE.match(line), _TARGET.search(line)
        if code and target and code[2] == "BRA" and code[1] and label.get(target[1], len(lines)) <= i:
            ends[label[target[1]]] = i
    spans = sorted(ends.items())
    with_matrix = [(a, b) for a, b in spans if any(" HGMMA." in x or " HMMA." in x or " QGMMA." in x for x in lines[a : b + 1])]
    spans = with_matrix or spans
    inner = [(a, b) for a, b in spans if not any((c, d) != (a, b) and a <= c and d <= b for c, d in spans)]
    return tuple(_count(a, lines[a : b + 1]) for a, b in inner)


def matrix_cycles(op: str) -> float:
    """Cycles that a matrix instruction of a warp holds the matrix unit of its SIMD."""
    if match := re.match(r"([HQ])GMMA\.64x(\d+)x(\d+)", op):  # a warp has 16 of the 64 rows
        return 2.0 * 16 * int(match[2]) * int(match[3]) / FLOPS_PER_CYCLE / (2 if match[1] == "Q" else 1)
    if match := re.match(r"HMMA\.(168)(\d+)\.(.*)", op):
        rate = FLOPS_PER_CYCLE * HMMA_SHARE / (2 if "TF32" in match[3] else 1)
        return 2.0 * 16 * 8 * int(match[2]) / rate
    raise ValueError(f"matrix instruction {op!r} of unknown shape")


def _width(op: str) -> int:
    """Bytes per lane: LDS.128, LDG.E.64, LDGSTS.E.BYPASS.128, LDSM.16.M88.4 (4 matrices: 4 bytes each)."""
    if op.startswith(("LDSM", "STSM")):
        return 4 * int(op.rsplit(".", 1)[1]) if op.rsplit(".", 1)[1].isdigit() else 4
    sizes = [int(part) for part in re.findall(r"\.[US]?(8|16|32|64|128)\b", op)]
    return sizes[-1] // 8 if sizes else 4


def _count(line: int, body: list[str]) -> Loop:
    n: Counter[str] = Counter()
    cycles = 0.0
    width: dict[str, Counter[int]] = defaultdict(Counter)
    code = tuple(f"{match[2]}{match[3]}" for text in body if (match := _CODE.match(text)))
    for text in code:
        op = text.split()[0]
        if re.match(r"[HQ]G?MMA\.", op):
            n["matrix"] += 1
            cycles += matrix_cycles(op)
        elif op.startswith(("LDSM", "LDS.", "LDS")) and not op.startswith("LDSTS"):
            width["lds_reads"][_width(op)] += 1
        elif op.startswith("LDGSTS"):
            width["lds_copies"][_width(op)] += 1
        elif op.startswith(("STSM", "STS")):
            width["lds_writes"][_width(op)] += 1
        elif op.startswith("SHFL"):
            n["lane_moves"] += 1
        elif re.match(r"LDG\b", op):
            width["global_loads"][_width(op)] += 1
        elif re.match(r"STG\b", op):
            width["global_stores"][_width(op)] += 1
        elif op.startswith(("LDL", "STL")):
            n["scratch"] += 1
        elif op.startswith("BAR."):
            n["barriers"] += 1
        elif op.startswith(("DEPBAR", "WARPGROUP.DEPBAR", "SYNCS.PHASECHK")):
            n["waits"] += 1
        elif not (_UNIFORM.match(op) or _MEMORY.match(op) or _CONTROL.match(op)):
            n["vector"] += 1
            n["exponentials"] += op.startswith("MUFU")
            n["half_rate"] += bool(_HALF_RATE.match(op))
    return tallied(line, code, n, width, cycles)
