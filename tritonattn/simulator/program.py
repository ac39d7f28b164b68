"""A decoded kernel and its launch: arguments in, faults out."""

import concurrent.futures
import ctypes
import functools
from dataclasses import dataclass

from . import core
from .decode import decode
from .text import Unsupported, parse

_FNUZ = {"gfx942": True, "gfx950": False}  # which 8-bit floats the arch's instructions mean
BUDGET = 50_000_000  # instructions of one wave before it counts as a runaway
NAN = 0xFFFFFFFF  # what unwritten registers and LDS hold: NaN as f32, f16, bf16 and either fp8


class SimulatorError(RuntimeError):
    """A fault in the simulated kernel.

    `fault` is one of "memory", "lds bounds", "undefined value", "missing wait", "race", "runaway", "trap"; `instruction` is the line of assembly;
    `workgroup` (x, y, z), `wave` and `lane` say where.
    """

    def __init__(self, kernel, fault, instruction, workgroup, wave, lane, detail):
        self.kernel, self.fault, self.instruction, self.workgroup, self.wave, self.lane = kernel, fault, instruction, workgroup, wave, lane
        super().__init__(f"{kernel}: {fault} at `{instruction}` (workgroup {workgroup}, wave {wave}, lane {lane}): {detail}")


@dataclass(frozen=True)
class Memory:
    """Host bytes a launch may touch: `[start, start + size)`."""

    start: int
    size: int
    writable: bool = True


class Program:
    """One kernel, decoded. `text` is Triton's `amdgcn` text; raises `Unsupported` listing everything that is not modelled."""

    def __init__(self, text):
        self.kernel = parse(text)
        if self.kernel.arch not in _FNUZ:
            raise Unsupported(f"kernel {self.kernel.name} is for {self.kernel.arch}; the simulator knows {', '.join(_FNUZ)}")
        maps: list[core.LaneMap] = []
        insts, refused = [], []
        for k, line in enumerate(self.kernel.lines):
            try:
                insts.append(decode(line, k, maps))
            except Unsupported as why:
                refused.append(str(why))
        if refused:
            raise Unsupported(f"kernel {self.kernel.name} ({self.kernel.arch}): " + "; ".join(dict.fromkeys(refused)))
        self.code = (core.Inst * len(insts))(*insts)
        self.maps = (core.LaneMap * max(1, len(maps)))(*maps)
        self.has_atomics = any("atomic" in line.name for line in self.kernel.lines)

    def without(self, index):
        """The same program with instruction `index` doing nothing: a mutant."""
        other = object.__new__(Program)
        other.kernel, other.maps, other.has_atomics = self.kernel, self.maps, self.has_atomics
        other.code = (core.Inst * len(self.code))(*self.code)
        nothing = core.Inst()
        nothing.op, nothing.line, nothing.map = core.operations()["nothing"][0], index, -1
        other.code[index] = nothing
        return other

    def run(self, arguments, memory, grid, num_warps, shared=0, *, reverse=False, poison=NAN, threads=1, budget=BUDGET, counts=None):
        """Execute every workgroup of `grid` (x, y, z). Returns the number of instructions executed, summed over waves.

        arguments: bytes of the kernel arguments in signature order, naturally aligned. memory: list of `Memory`, disjoint.
        shared: bytes of LDS that Triton asks for. reverse: run the waves of a workgroup in descending order between barriers.
        poison: what unwritten registers and LDS hold. threads: workgroups run on this many host threads (1 with atomics).
        counts: a list of one int an instruction, increased by how often it ran with a lane active.
        Raises `SimulatorError` for the first faulting workgroup.
        """
        k = self.kernel
        kernarg = ctypes.create_string_buffer(
            bytes(arguments) + bytes(max(0, k.kernarg_size - len(arguments)) + 256), len(arguments) + max(0, k.kernarg_size - len(arguments)) + 256
        )
        spans = sorted(
            [(m.start, m.start + m.size, m.writable) for m in memory if m.size] + [(ctypes.addressof(kernarg), ctypes.addressof(kernarg) + len(kernarg), False)]
        )
        ranges = (core.Range * len(spans))(*[core.Range(*s, 0) for s in spans])
        launch = core.Launch(
            code=self.code,
            length=len(self.code),
            maps=self.maps,
            ranges=ranges,
            range_count=len(spans),
            kernarg=ctypes.addressof(kernarg),
            lds_size=shared + k.lds_size,
            waves=num_warps,
            user_sgprs=k.user_sgprs,
            kernarg_sgpr=k.kernarg_sgpr,
            workgroup_ids=sum(on << n for n, on in enumerate(k.workgroup_ids)),
            scratch_size=k.scratch_size,
            poison=poison,
            order=reverse,
            fnuz=_FNUZ[k.arch],
            budget=budget,
        )
        launch.grid[:] = grid
        tally = (core.u64 * len(self.code))() if counts is not None else None
        if tally is not None:
            launch.counts = tally
        total = grid[0] * grid[1] * grid[2]
        threads = 1 if self.has_atomics else max(1, min(threads, total))

        def part(n):
            outcome = core.Outcome()
            core.library().simulate(launch, total * n // threads, total * (n + 1) // threads, outcome)
            return outcome

        if threads == 1:
            outcomes = [part(0)]
        else:
            with concurrent.futures.ThreadPoolExecutor(threads) as pool:
                outcomes = list(pool.map(part, range(threads)))
        if tally is not None:
            counts[:] = [a + b for a, b in zip(counts, tally, strict=True)]
        for o in outcomes:
            if o.fault:
                where = k.lines[o.line].text if o.line < len(k.lines) else "end of code"
                raise SimulatorError(f"{k.name} ({k.arch})", core.FAULTS[o.fault], where, tuple(o.group), o.wave, o.lane, o.text.decode())
        return sum(o.executed for o in outcomes)


@functools.lru_cache(maxsize=256)
def program(text):
    """`Program(text)`, remembered."""
    return Program(text)
