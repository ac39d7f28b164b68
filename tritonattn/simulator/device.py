"""The simulated device: a Triton driver that reports a gfx942 or gfx950 target and launches into the simulator.

    from tritonattn.simulator import use
    use("gfx942")
    kernel[grid](cpu_tensor, ...)            # compiled for gfx942 by the ordinary launcher, executed on the tensors' own memory

Everything before the launch is Triton's own: argument binding, specialisation, compilation and caches, resource limits.
Triton keys its in-process cache by device index, so each arch has an index of its own.
"""

import contextlib
import struct

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.cache import get_cache_manager
from triton.runtime.driver import driver

from tritonattn.environment import simulator_threads

from .program import Memory, program
from .text import Unsupported

# LDS bytes of a compute unit and number of compute units (MI300X, MI355X): what the HIP runtime would report.
DEVICES = {"gfx942": {"max_shared_mem": 64 << 10, "multiprocessor_count": 304}, "gfx950": {"max_shared_mem": 160 << 10, "multiprocessor_count": 256}}
_PACK = {
    "i1": "<b",
    "i8": "<b",
    "i16": "<h",
    "i32": "<i",
    "i64": "<q",
    "u1": "<B",
    "u8": "<B",
    "u16": "<H",
    "u32": "<I",
    "u64": "<Q",
    "fp16": "<e",
    "fp32": "<f",
    "f32": "<f",
    "fp64": "<d",
}


def _flatten(types, values):
    """(type, value) of every run-time argument, tuples opened."""
    for t, v in zip(types, values, strict=True):
        if isinstance(t, tuple):
            yield from _flatten(t, v)
        elif t != "constexpr":
            yield t, v


def pack(types, values):
    """Kernel arguments -> (bytes, [Memory]): naturally aligned in signature order, then the two scratch pointers, null.

    A tensor allows access to its whole storage, exactly.
    """
    out, memory = bytearray(), {}
    for kind, value in _flatten(types, values):
        if kind.startswith("*"):
            if value is None:
                address = 0
            elif isinstance(value, int):
                address = value
            else:
                address = value.data_ptr()
                storage = getattr(value, "untyped_storage", None)
                if storage is None or value.device.type != "cpu":
                    raise TypeError(f"the simulated device takes CPU tensors, got {type(value).__name__} on {getattr(value, 'device', '?')}")
                memory[storage().data_ptr()] = Memory(storage().data_ptr(), storage().nbytes())
            raw = struct.pack("<Q", address)
        elif kind == "bf16":
            raw = struct.pack("<f", value)[2:]
        elif kind in _PACK:
            raw = struct.pack(_PACK[kind], value)
        else:
            raise Unsupported(f"kernel argument of type {kind}")
        out += bytes(-len(out) % len(raw)) + raw
    out += bytes(-len(out) % 8 + 16)
    return bytes(out), list(memory.values())


class _Launcher:
    """What Triton calls to launch one compiled kernel."""

    def __init__(self, src, metadata):
        self.types, self.metadata = tuple(src.signature.values()), metadata
        for needed in ("global_scratch_size", "profile_scratch_size"):
            if getattr(metadata, needed, 0):
                raise Unsupported(f"kernel {metadata.name} needs {needed} = {getattr(metadata, needed)}")
        files = get_cache_manager(metadata.hash).get_group(f"{src.name[:150]}.json") or {}
        [path] = [p for name, p in files.items() if name.endswith(".amdgcn")]
        with open(path) as f:
            self.text = f.read()

    def __call__(self, x, y, z, stream, function, packed_metadata, launch_metadata, enter_hook, exit_hook, *args):
        if min(x, y, z) < 0 or max(y, z) > 65535 or x >= 1 << 31:
            raise ValueError(f"grid ({x}, {y}, {z}) is not launchable: x must be below 2^31, y and z below 2^16")
        if enter_hook is not None:
            enter_hook(launch_metadata)
        if x * y * z:
            arguments, memory = pack(self.types, args)
            for run in _observers or [_execute]:
                run(program(self.text), arguments, memory, (x, y, z), self.metadata)
        if exit_hook is not None:
            exit_hook(launch_metadata)


def _execute(prog, arguments, memory, grid, metadata):
    prog.run(arguments, memory, grid, metadata.num_warps, metadata.shared, threads=simulator_threads())


_observers: list = []


@contextlib.contextmanager
def launches_go_to(run):
    """Within: each launch calls `run(program, arguments, memory, grid, metadata)` instead of executing (tests use it to try mutants)."""
    _observers.append(run)
    try:
        yield
    finally:
        _observers.remove(run)


class _Utils:
    """The part of the HIP runtime that Triton's compiler asks."""

    def __init__(self, arch):
        self.arch = arch

    def get_device_properties(self, device):
        return {**DEVICES[self.arch], "arch": self.arch, "warpSize": 64, "max_num_regs": 65536, "sm_clock_rate": 0, "mem_clock_rate": 0, "mem_bus_width": 0}

    def load_binary(self, name, kernel, shared, device):
        return object(), object(), 0, 0, 1024  # module, function, registers, spills, largest workgroup


class SimulatedInstinct(DriverBase):
    """Triton driver of one simulated arch."""

    def __init__(self, arch):
        if arch not in DEVICES:
            raise ValueError(f"a simulated arch (TRITONATTN_SIM) must be one of {', '.join(DEVICES)}, got {arch!r}")
        self.arch, self.utils, self.launcher_cls = arch, _Utils(arch), _Launcher

    @classmethod
    def is_active(cls):
        return False  # never chosen by itself

    def map_python_to_cpp_type(self, ty):
        return ty

    def get_current_target(self):
        return GPUTarget("hip", self.arch, 64)

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_current_device(self):
        return list(DEVICES).index(self.arch)

    def set_current_device(self, device):
        pass

    def get_current_stream(self, device=None):
        return 0

    def get_device_interface(self):
        raise Unsupported("a torch device interface: simulated tensors are CPU tensors")

    def get_benchmarker(self):
        raise Unsupported("timing: the simulator has no clock")

    def get_empty_cache_for_benchmark(self):
        raise Unsupported("timing: the simulator has no clock")

    def clear_cache(self, cache):
        pass


def use(arch):
    """Make every Triton launch in this process run on a simulated `arch` ("gfx942" or "gfx950")."""
    from triton import knobs

    if knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: the interpreter runs no machine code, so there is nothing to simulate")
    driver.set_active(SimulatedInstinct(arch))


def active():
    """The simulated arch that launches go to, or None."""
    current = getattr(driver, "_active", None)
    return current.arch if isinstance(current, SimulatedInstinct) else None


@contextlib.contextmanager
def simulated(arch):
    """`use(arch)` for the extent of a `with` block."""
    before = getattr(driver, "_active", None)
    use(arch)
    try:
        yield
    finally:
        driver._active = before
