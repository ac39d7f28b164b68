"""A simulated Instinct: the machine code that Triton compiles for gfx942 and gfx950, executed on the CPU.

    TRITONATTN_SIM=gfx942 python my_script.py        # every Triton launch in the process, on CPU tensors
    with tritonattn.simulator.simulated("gfx950"): ...

What it shows: results as the compiled code computes them, and faults that only machine code has: an access one byte outside the tensors of the
launch, LDS or registers used before they are written, a missing barrier, a missing wait.

What it does not show: time (there is no clock, no cache, no bank conflict); races between workgroups and memory ordering beyond the waits;
the last bits of exp, log, rcp, rsq and of sums inside a matrix instruction; hazards that the assembler's s_nop covers; and anything the
HIP runtime does. The rules are AMD's published ones; no result here was ever compared with an AMD GPU.
"""

from .program import Memory, Program, SimulatorError, program
from .text import Unsupported

__all__ = ["Memory", "Program", "SimulatorError", "Unsupported", "active", "program", "simulated", "use"]


def __getattr__(name):  # the device needs Triton and torch; the executor does not
    if name in ("active", "simulated", "use"):
        from . import device

        return getattr(device, name)
    raise AttributeError(name)
