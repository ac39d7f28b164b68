"""Compile any launch for any GPU on a machine that has none, and read what the compiler made of it.

`capture` puts a stand-in driver under Triton, so that the ops users call, on CPU tensors, go through their own launchers with
their real arguments and specialisation; each launch is compiled and kept, and nothing runs. `read` then takes the assembly
apart: registers, spills, LDS, occupancy, and what each hot loop spends its instructions on. `judge` says whether it may ship.
"""

from __future__ import annotations

import itertools
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from .arch import MATRIX_CYCLES, Arch, assume, by_name

_devices = itertools.count(1 << 20)  # Triton keys compiled kernels by device index: one index per capture keeps arches apart


@dataclass(frozen=True, eq=False)
class Launch:
    """One kernel launch, compiled and not run."""

    kernel: str
    arch: Arch
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]  # every parameter by name, constexprs included
    constexprs: Mapping[str, Any]
    signature: Mapping[str, str]  # Triton types: "*bf16", "i32", "constexpr"
    compiled: Any = field(repr=False)  # triton's CompiledKernel
    compile_seconds: float = 0.0  # of the processor; next to none where it was in a cache

    @property
    def num_warps(self) -> int:
        return self.compiled.metadata.num_warps

    @property
    def assembly(self) -> str:
        return self.compiled.asm["amdgcn"]

    @property
    def key(self) -> str:
        """What makes Triton compile again: the hash of the compiled kernel."""
        return self.compiled.hash


def _stand_in(arch: Arch):
    """A driver that claims a GPU of this arch on CPU tensors and can launch nothing."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    index = next(_devices)

    class StandIn(DriverBase):
        def __init__(self):
            pass

        @classmethod
        def is_active(cls):
            return True

        def map_python_to_cpp_type(self, ty):
            return ty

        def get_current_target(self):
            return GPUTarget(arch.backend, arch.target, arch.wave_size)

        def get_active_torch_device(self):
            return torch.device("cpu")

        def get_current_device(self):
            return index

        def set_current_device(self, device):
            pass

        def get_current_stream(self, device=None):
            return 0

        def get_device_interface(self):
            return None

        def get_benchmarker(self):
            raise RuntimeError("a stand-in driver compiles and never runs: there is nothing to time")

        def get_empty_cache_for_benchmark(self):
            raise RuntimeError("a stand-in driver compiles and never runs: there is nothing to time")

        def clear_cache(self, cache):
            pass

    return StandIn(), index


@contextmanager
def capture(arch: str | Arch, dry: bool = False) -> Iterator[list[Launch]]:
    """Within the block, every kernel launch on CPU tensors is compiled for `arch` and listed instead of run.

        with capture("gfx942") as launches:
            tritonattn.decode_attention(...)
        print(read(launches[0]).loops)

    dry: launches are not compiled either, and not listed; just the host side of the ops runs.
    Outputs of the ops stay unwritten. Not for use beside other threads that launch kernels: Triton has one active driver.
    ValueError for an arch Triton cannot compile without its GPU; RuntimeError under TRITON_INTERPRET=1, which compiles nothing.
    """
    from triton import knobs
    from triton.runtime import jit
    from triton.runtime.driver import driver

    arch = by_name(arch) if isinstance(arch, str) else arch
    if arch.simulated:
        raise ValueError(f"arch must be a GPU (gfx..., sm_...), got {arch.name}")
    if knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET=1 replaces the compiler: unset it to compile")
    stand_in, index = _stand_in(arch)
    launches: list[Launch] = []
    seconds: defaultdict[str, float] = defaultdict(float)
    touched = []
    run = jit.JITFunction.run

    def compile_only(self, *args, grid, warmup=False, **kwargs):
        if dry and not warmup:
            return None
        begin = time.process_time()
        compiled = run(self, *args, grid=grid, warmup=True, **kwargs)
        seconds[compiled.hash] += time.process_time() - begin  # a launcher may ask for its kernel before it launches
        touched.append(self)
        if not warmup:
            names = self.signature.parameters
            bound = self.signature.bind(*args, **{k: v for k, v in kwargs.items() if k in names})
            bound.apply_defaults()
            constexprs = {p.name: bound.arguments[p.name] for p in self.params if p.is_constexpr}
            shape = grid(bound.arguments | kwargs) if callable(grid) else grid
            launches.append(Launch(self.fn.__name__, arch, tuple(shape), bound.arguments, constexprs, compiled.src.signature, compiled, seconds[compiled.hash]))
        return compiled

    before = driver._active
    jit.JITFunction.run = compile_only
    driver.set_active(stand_in)
    try:
        with assume(arch):
            yield launches
    finally:
        jit.JITFunction.run = run
        driver._active = before
        for function in touched:
            function.device_caches.pop(index, None)


# --- reading assembly ---------------------------------------------------------------------------------------------------------

_BYTES = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "short": 2, "byte": 1}
_GLOBAL = re.compile(r"(?:buffer|global|flat)_(load|store)_(lds_)?[us]?(dwordx[234]|dword|short|byte)")
_LABEL = re.compile(r"^(\.LBB\d+_\d+):")
_BRANCH = re.compile(r"^\s+s_c?branch\S*\s+(\.LBB\d+_\d+)")
_NATIVE_FP8 = re.compile(r"v_cvt_\S*(fp8|bf8)|v_mfma\S*(fp8|bf8|f8f6f4)")
_BYTE_ARITHMETIC = re.compile(r"^v_\S+_(b16|u16|i16)\b|\bBYTE_[0-3]\b|\b0x7f\b|\b0x80\b")


@dataclass(frozen=True)
class Loop:
    """What one innermost loop executes per iteration and wave. Widths are bytes per lane."""

    line: int  # of its label in the assembly
    instructions: int
    matrix: int
    vector: int  # vector ALU, matrix instructions not included
    exponentials: int
    lds_reads: Mapping[int, int]  # bytes per lane -> count
    lds_writes: Mapping[int, int]
    lane_moves: int  # permutes through the LDS crossbar: no storage, but its pipe
    global_loads: Mapping[int, int]
    lds_copies: Mapping[int, int]  # global to LDS without registers
    global_stores: Mapping[int, int]
    barriers: int
    waits: int
    accumulator_moves: int
    lane_accesses: int  # v_readlane, v_writelane: also what a spilled scalar register costs
    scratch: int
    matrix_cycles: float  # that its matrix instructions hold the SIMD
    native_fp8: int
    byte_arithmetic: int
    half_rate: int = 0  # NVIDIA: vector instructions of the pipes with 16 lanes
    body: tuple[str, ...] = field(repr=False, default=())

    @property
    def lds_bytes(self) -> int:
        """Bytes per lane through the LDS."""
        return sum(width * n for part in (self.lds_reads, self.lds_writes, self.lds_copies) for width, n in part.items())


@dataclass(frozen=True)
class Report:
    """What the compiler made of one launch."""

    kernel: str
    arch: str
    vector_registers: int
    accumulator_registers: int
    registers: int  # both, as the hardware allocates them from one pool
    scalar_registers: int
    spills: int  # vector registers
    scalar_spills: int  # scalar registers, kept in lanes of vector registers
    scratch: int  # bytes per lane
    lds: int  # bytes per program
    num_warps: int
    occupancy: float  # waves per SIMD, from registers and LDS
    loops: tuple[Loop, ...]  # innermost loops with matrix instructions, or without any if none has; in order of the text
    fp8_input: bool
    grid: tuple[int, ...] = ()
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    compile_seconds: float = 0.0

    @property
    def main(self) -> Loop | None:
        """The loop that long problems spend their time in: of those with most matrix work, the one without masks (the shortest)."""
        return min(self.loops, key=lambda loop: (-loop.matrix_cycles, loop.instructions), default=None)


def read(launch: Launch) -> Report:
    """Take one compiled launch apart. ValueError if the assembly lacks a figure that Triton 3.6 to 3.9 print."""
    if launch.arch.backend == "cuda":
        from . import sass

        return sass.read(launch)
    text = launch.assembly
    registers = _figure(text, r"; TotalNumVgprs: (\d+)")
    lds = launch.compiled.metadata.shared
    return Report(
        kernel=launch.kernel,
        arch=launch.arch.name,
        vector_registers=_figure(text, r"; NumVgprs: (\d+)"),
        accumulator_registers=_figure(text, r"; NumAgprs: (\d+)"),
        registers=registers,
        scalar_registers=_figure(text, r"\.sgpr_count:\s+(\d+)"),
        spills=_figure(text, r"\.vgpr_spill_count:\s+(\d+)"),
        scalar_spills=_figure(text, r"\.sgpr_spill_count:\s+(\d+)"),
        scratch=_figure(text, r"; ScratchSize: (\d+)"),
        lds=lds,
        num_warps=launch.num_warps,
        occupancy=launch.arch.occupancy(registers, lds, launch.num_warps),
        loops=hot_loops(text),
        fp8_input=fp8_among(launch.signature),
        grid=launch.grid,
        constexprs=launch.constexprs,
        compile_seconds=launch.compile_seconds,
    )


def fp8_among(signature: Mapping[str, str]) -> bool:
    return any(t.startswith("*fp8") for t in signature.values() if isinstance(t, str))


def _figure(text: str, pattern: str) -> int:
    found = re.findall(pattern, text)
    if not found:
        raise ValueError(f"the assembly has no line like {pattern!r}: a compiler this reader does not know")
    return int(found[-1])


def hot_loops(text: str) -> tuple[Loop, ...]:
    """The innermost loops that hold matrix instructions; without any such, all innermost loops."""
    lines = text.split("\n")
    label = {match[1]: i for i, line in enumerate(lines) if (match := _LABEL.match(line))}
    ends: dict[int, int] = {}  # first line of a loop -> its last backward branch
    for i, line in enumerate(lines):
        match = _BRANCH.match(line)
        if match and label.get(match[1], len(lines)) <= i:
            ends[label[match[1]]] = i
    spans = sorted(ends.items())
    with_matrix = [(a, b) for a, b in spans if any("v_mfma" in line for line in lines[a : b + 1])]
    spans = with_matrix or spans
    inner = [(a, b) for a, b in spans if not any((c, d) != (a, b) and a <= c and d <= b for c, d in spans)]
    return tuple(_count(a, lines[a : b + 1]) for a, b in inner)


def _count(line: int, body: list[str]) -> Loop:
    stripped = (raw.split(";")[0].split("//")[0].strip() for raw in body)
    code = tuple(text for text in stripped if text and text[0] != "." and text[-1] != ":")
    n: Counter[str] = Counter()
    width: dict[str, Counter[int]] = defaultdict(Counter)
    for text in code:
        op = text.split()[0]
        if op.startswith("v_mfma"):
            n["matrix"] += 1
            n["matrix_cycles"] += next((cycles for shape, cycles in MATRIX_CYCLES.items() if shape in op), 16)
        elif op.startswith("v_"):
            n["vector"] += 1
            n["exponentials"] += op.startswith("v_exp")
            n["accumulator_moves"] += op.startswith("v_accvgpr")
            n["lane_accesses"] += op.startswith(("v_readlane", "v_writelane"))
            n["byte_arithmetic"] += bool(_BYTE_ARITHMETIC.search(text))
        elif re.match(r"ds_b?permute|ds_swizzle", op):
            n["lane_moves"] += 1
        elif op.startswith("ds_"):
            width["lds_reads" if "read" in op or "load" in op else "lds_writes"][_lds_width(op)] += 1
        elif match := _GLOBAL.match(op):
            to_lds = match[2] or re.search(r"\blds\b", text)
            width["global_stores" if match[1] == "store" else "lds_copies" if to_lds else "global_loads"][_BYTES[match[3]]] += 1
        n["scratch"] += op.startswith("scratch_")
        n["barriers"] += op.startswith("s_barrier")
        n["waits"] += op.startswith("s_waitcnt")
        n["native_fp8"] += bool(_NATIVE_FP8.match(op))
    return tallied(line, code, n, width, n["matrix_cycles"])


WIDTHS = ("lds_reads", "lds_writes", "global_loads", "lds_copies", "global_stores")


def tallied(line: int, code: tuple[str, ...], n: Counter[str], width: Mapping[str, Counter[int]], matrix_cycles: float) -> Loop:
    """A loop from its counts by name: `n` of instructions, `width` of accesses by their bytes. What is in neither does not occur."""
    counts: dict[str, Any] = {f.name: n[f.name] for f in fields(Loop) if f.name not in ("line", "instructions", "matrix_cycles", "body", *WIDTHS)}
    widths: dict[str, Any] = {name: dict(sorted(width.get(name, {}).items())) for name in WIDTHS}
    return Loop(line=line, instructions=len(code), matrix_cycles=matrix_cycles, body=code, **counts, **widths)



def _lds_width(op: str) -> int:
    """Bytes per lane of ds_read_b128 (16), ds_read2st64_b64 (two of 8), ds_read_b64_tr_b16 (8), ds_read_u16_d16_hi (2)."""
    match = re.search(r"_[bui](\d+)", op)
    if not match:
        raise ValueError(f"LDS instruction {op!r} of unknown width")
    return int(match[1]) // 8 * (2 if re.match(r"ds_(read|write)2", op) else 1)


# --- judging ------------------------------------------------------------------------------------------------------------------

# What a hot loop may hold; a table row that cannot do better says so and sets its own ("accepts").
LIMITS = {"accumulator_move_share": 0.05, "accumulator_spills": 0, "narrow_loads": 0, "narrow_lds_reads": 0, "scalar_spill_accesses": 0}
COMPILE_SECONDS = 20  # who serves without a warm-up waits that long
BYTE_ARITHMETIC_SHARE = 0.25
SCRATCH_SHARE_NVIDIA = 0.05  # ptxas keeps some loop-invariant values on the stack: the fastest prefill measured on an H200 does


def judge(report: Report, arch: Arch, needs_matrix: bool = True, limits: Mapping[str, float] | None = None) -> list[str]:
    """Why this code must not ship; empty when it may. Hard rules, none of which needs a GPU or a calibrated model.

    A scalar register that is spilled to a lane of a vector register before the loop and read after it costs an instruction each and
    no memory: it is refused only where the hot loop pays for it.
    needs_matrix: False for kernels that only move or merge. limits: in place of some of LIMITS.
    """
    reasons = []
    limits = {**LIMITS, **(limits or {})}
    if (report.scratch or report.spills > limits["accumulator_spills"]) and arch.backend != "cuda":
        reasons.append(f"{report.spills} registers spilled, {report.scratch} bytes of scratch a lane")
    if report.lds > arch.lds_bytes:
        reasons.append(f"{report.lds} bytes of LDS, {arch.name} has {arch.lds_bytes}")
    elif report.occupancy * arch.simds < report.num_warps:
        reasons.append(f"{report.registers} registers: {report.num_warps} warps do not fit a compute unit")
    if report.compile_seconds > COMPILE_SECONDS:
        reasons.append(f"{report.compile_seconds:.0f} s to compile, at most {COMPILE_SECONDS} s")
    if needs_matrix and not any(loop.matrix for loop in report.loops):
        reasons.append("no matrix instructions in a loop")
    for i, loop in enumerate(report.loops):
        at = f"loop {i + 1} of {len(report.loops)}"
        if loop.scratch > (SCRATCH_SHARE_NVIDIA * loop.instructions if arch.backend == "cuda" else 0):
            reasons.append(f"{at}: {loop.scratch} scratch accesses")
        if report.scalar_spills and loop.lane_accesses > limits["scalar_spill_accesses"]:
            reasons.append(f"{at}: {loop.lane_accesses} accesses to spilled scalar registers")
        for name, widths in (("loads", loop.global_loads), ("LDS reads", loop.lds_reads)):
            narrow = {width: n for width, n in widths.items() if width < 4}
            if sum(narrow.values()) <= limits["narrow_" + name.lower().replace(" ", "_")]:
                continue
            reasons += [f"{at}: {n} {name} of {width} byte{'s' if width > 1 else ''}" for width, n in narrow.items()]
        if loop.accumulator_moves > limits["accumulator_move_share"] * loop.instructions:
            reasons.append(f"{at}: {loop.accumulator_moves} of {loop.instructions} instructions only move accumulators")
        if report.fp8_input and needs_matrix and loop.matrix and arch.backend == "hip" and software_fp8(loop):
            reasons.append(f"{at}: fp8 converted in software")
    return reasons


def software_fp8(loop: Loop) -> bool:
    """True when a loop over fp8 data converts it, or half of it, without the hardware's conversions.

    Signs: no native fp8 instruction at all; native conversions (two elements each) for less than half of the bytes loaded, and no
    fp8 matrix instruction that takes them as they are; or vector work that is to a quarter 8- and 16-bit integer arithmetic.
    """
    converts = sum(op.startswith("v_cvt") for op in loop.body if _NATIVE_FP8.match(op))
    loaded = sum(width * n for widths in (loop.global_loads, loop.lds_copies) for width, n in widths.items() if width >= 8)
    partly = converts == loop.native_fp8 and 2 * converts < loaded / 2
    return not loop.native_fp8 or partly or loop.byte_arithmetic > BYTE_ARITHMETIC_SHARE * loop.vector
