"""Facts of each GPU, and which one a tensor lives on.

A fact appears here once, with its source in `Arch.sources`. Nothing is asked of a device at import; `detect` asks when a call
needs it and remembers the answer. What identifies a GPU is its instruction set (`gfx942`, `sm_90`), its number of compute
units and, between two SKUs equal in both, its memory: a product name never decides.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from types import MappingProxyType

from tritonattn import environment

ROCM_SPECS = "rocm.docs.amd.com, AMD GPU specifications table"
DATASHEET = "vendor product page"
COMPILED = "compiled and counted from the assembly with Triton 3.6.0 and 3.9.0, no GPU"
CUDA_GUIDE = "CUDA programming guide, compute capability 9.0"
ASSUMED = "assumed, no public source found"
FITTED = "fitted to times on an H200 by `tritonattn model --measure`, see tuning.model"


@dataclass(frozen=True, eq=False)  # identity is equality: `detect` and `by_name` hand out one object per GPU
class Arch:
    """What the library needs to know about one GPU. Sizes in bytes, bandwidths in bytes per second, clocks in Hz."""

    name: str  # instruction set: "gfx942", "gfx950", "sm_90", or "interpreter"
    sku: str
    table: str  # folder of autotune_configs/ whose rows are meant for this instruction set
    backend: str  # Triton's name of it: "hip", "cuda" or "cpu"
    compute_units: int
    fp8_types: tuple[str, ...]  # torch dtype names that the matrix units take as they are
    lds_bytes: int  # local (shared) memory that one program may use
    lds_bytes_per_clock: int = 128
    lds_bytes_per_unit: int = 0  # that of a compute unit; 0: the same as lds_bytes
    lds_reserved: int = 0  # taken by the system from each program's share
    dies: int = 1  # XCDs: consecutive programs go round-robin over them, each has its own L2
    simds: int = 4  # per compute unit
    wave_size: int = 64
    registers: int = 512  # 32-bit registers per lane and SIMD; on CDNA vector and accumulator registers share them
    register_granule: int = 8
    max_waves: int = 8  # per SIMD
    max_registers: int = 512  # per lane of one wave
    clock: float = 1e9
    hbm_bytes: float = 0.0
    hbm_bandwidth: float = 0.0
    hbm_efficiency: float = 0.8  # streaming ceiling over the data-sheet figure
    l2_bytes: int = 0  # of one die
    last_level_bytes: int = 0  # shared by all dies
    matrix_flops: float = 0.0  # bf16, dense, data sheet
    matrix_flops_fp8: float = 0.0
    exp_cycles: int = 16  # that one wave's exponential holds its pipe
    vector_cycles: int = 4  # that another vector instruction of a wave does
    issue_cycles: float = 4.0  # between two instructions of one wave
    # For the cost model, see there:
    memory_cycles: float = 3000.0  # of a load's latency that a loop waits for, from HBM under load
    cache_cycles: float = 600.0  # likewise, from a cache that holds the line already
    scratch_cycles: float = 160.0  # of an access to spilled registers, beyond its issue
    sustained: float = 0.6  # clock under matrix load over `clock`
    async_copy_bits: int = 0  # widest global-to-LDS copy per lane; 0: none
    sources: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __getstate__(self) -> dict:
        """For processes that compile or time for this GPU: there it is another object of the same facts."""
        return {**self.__dict__, "sources": dict(self.sources)}

    @property
    def target(self) -> str | int:
        """The instruction set as Triton writes it: "gfx942", or 90 for sm_90."""
        return int(self.name.removeprefix("sm_").rstrip("a")) if self.backend == "cuda" else self.name

    @property
    def simulated(self) -> bool:
        """True for the CPU pseudo-arch, where time means nothing."""
        return self.backend == "cpu"

    def occupancy(self, registers: int, lds: int, num_warps: int) -> float:
        """Waves per SIMD that fit at once, from registers per lane (vector and accumulator), LDS bytes and warps of a program.

        Computed, because the assembler's own line is capped by `waves_per_eu` and ignores LDS.
        """
        granule = self.register_granule
        used = max(granule, -(-registers // granule) * granule)
        per_simd = min(self.max_waves, self.registers // used)
        programs = per_simd * self.simds // num_warps
        if lds:
            programs = min(programs, (self.lds_bytes_per_unit or self.lds_bytes) // (lds + self.lds_reserved))
        return programs * num_warps / self.simds


def _sku(base: Arch, sku: str, sources: Mapping[str, str] | None = None, **facts) -> Arch:
    """A SKU of an instruction set: the base's facts with its own."""
    return replace(base, sku=sku, sources=MappingProxyType({**base.sources, **(sources or {})}), **facts)


_CDNA3 = Arch(
    name="gfx942",
    sku="",
    table="gfx942",
    backend="hip",
    compute_units=304,
    dies=8,
    fp8_types=("float8_e4m3fnuz", "float8_e5m2fnuz"),
    lds_bytes=64 << 10,
    lds_bytes_per_clock=128,
    async_copy_bits=32,
    exp_cycles=16,
    clock=2.1e9,
    l2_bytes=4 << 20,
    last_level_bytes=256 << 20,
    matrix_flops=1307.4e12,
    matrix_flops_fp8=2614.9e12,
    sources={
        "compute_units": ROCM_SPECS,
        "dies": ROCM_SPECS,
        "lds_bytes": ROCM_SPECS,
        "lds_bytes_per_clock": "ROCm blog, FP8 GEMM optimisation on CDNA4, table 1",
        "registers": ROCM_SPECS,
        "register_granule": COMPILED,
        "max_waves": COMPILED,
        "l2_bytes": ROCM_SPECS,
        "last_level_bytes": ROCM_SPECS,
        "fp8_types": "Triton, backends/amd/compiler.py",
        "async_copy_bits": COMPILED,
        "clock": DATASHEET,
        "exp_cycles": ASSUMED,
        "vector_cycles": "CDNA3 instruction set architecture guide: 16 lanes a cycle",
        "memory_cycles": ASSUMED,
        "cache_cycles": ASSUMED,
        "scratch_cycles": "sgl-project/sglang#34741: 186 scratch instructions, in one loop or in two, made a kernel 2.3 times as slow",
        "sustained": "published plain-Triton prefill against the data sheet",
        "issue_cycles": "CDNA3 instruction set architecture guide: a SIMD issues every fourth cycle",
        "hbm_bytes": DATASHEET,
        "hbm_bandwidth": DATASHEET,
        "hbm_efficiency": "ROCm/legacy-rocm-build#5070: 4.2 of 5.3 TB/s on MI300X",
        "matrix_flops": DATASHEET,
        "matrix_flops_fp8": DATASHEET,
    },
)
_CDNA4 = _sku(
    _CDNA3,
    "",
    name="gfx950",
    table="gfx950",
    compute_units=256,
    fp8_types=("float8_e4m3fn", "float8_e5m2"),
    lds_bytes=160 << 10,
    lds_bytes_per_clock=256,
    async_copy_bits=128,
    exp_cycles=8,
    hbm_bytes=288e9,
    hbm_bandwidth=8.0e12,
    sources={"hbm_efficiency": "ROCm/aiter#5190 and tokenspeed#191: 5.0 to 6.5 of 8.0 TB/s on MI355X"},
)
_HOPPER = Arch(
    name="sm_90",
    sku="",
    table="sm_90",
    backend="cuda",
    compute_units=132,
    fp8_types=("float8_e4m3fn", "float8_e5m2"),
    lds_bytes=227 << 10,
    lds_bytes_per_unit=228 << 10,
    lds_reserved=1 << 10,
    async_copy_bits=128,
    wave_size=32,
    max_waves=16,
    max_registers=255,
    vector_cycles=1,
    issue_cycles=1.6,
    memory_cycles=800.0,
    cache_cycles=130.0,
    scratch_cycles=26.0,
    sustained=0.93,
    clock=1.83e9,
    l2_bytes=50 << 20,
    hbm_efficiency=0.9,
    matrix_flops=989e12,
    matrix_flops_fp8=1979e12,
    exp_cycles=8,
    sources={
        "compute_units": DATASHEET,
        "lds_bytes": CUDA_GUIDE,
        "registers": CUDA_GUIDE,
        "max_waves": CUDA_GUIDE,
        "max_registers": CUDA_GUIDE,
        "exp_cycles": CUDA_GUIDE + ": 16 results a clock and unit",
        "vector_cycles": CUDA_GUIDE + ": 128 FP32 results a clock and unit",
        "issue_cycles": FITTED,
        "memory_cycles": FITTED,
        "cache_cycles": FITTED,
        "scratch_cycles": FITTED,
        "sustained": FITTED,
        "lds_reserved": CUDA_GUIDE,
        "fp8_types": "PTX ISA, wgmma",
        "async_copy_bits": "PTX ISA, cp.async",
        "clock": DATASHEET,
        "l2_bytes": DATASHEET,
        "hbm_bytes": DATASHEET,
        "hbm_bandwidth": DATASHEET,
        "hbm_efficiency": "measured on an H200: 4.2 to 4.5 of 4.8 TB/s, reading",
        "matrix_flops": DATASHEET,
        "matrix_flops_fp8": DATASHEET,
    },
)
INTERPRETER = Arch(
    name="interpreter",
    sku="CPU",
    table="interpreter",
    backend="cpu",
    compute_units=8,
    lds_bytes=1 << 30,
    fp8_types=("float8_e4m3fn", "float8_e5m2"),
    sources={
        "compute_units": "chosen: small, so that tests reach split and unsplit plans with few tokens",
        "lds_bytes": "no limit",
        "fp8_types": "those that Triton's interpreter reads",
    },
)

# Where detection cannot tell two SKUs apart it names the first of them.
KNOWN = (
    _sku(_CDNA3, "MI300X", hbm_bytes=192e9, hbm_bandwidth=5.3e12),
    _sku(_CDNA3, "MI325X", hbm_bytes=256e9, hbm_bandwidth=6.0e12),
    _sku(
        _CDNA3,
        "MI300A",
        compute_units=228,
        dies=6,
        hbm_bytes=128e9,
        hbm_bandwidth=5.3e12,
        matrix_flops=980.6e12,
        matrix_flops_fp8=1961.2e12,
    ),
    _sku(
        _CDNA3,
        "MI308X",
        compute_units=80,
        dies=4,
        hbm_bytes=192e9,
        hbm_bandwidth=5.3e12,
        matrix_flops=344e12,
        matrix_flops_fp8=688e12,
        sources={
            "compute_units": ASSUMED,
            "dies": ASSUMED,
            "hbm_bandwidth": ASSUMED,
            "matrix_flops": "2048 FLOP per clock and unit, as MI300X",
            "matrix_flops_fp8": "4096 FLOP per clock and unit, as MI300X",
        },
    ),
    _sku(_CDNA4, "MI355X", clock=2.4e9, matrix_flops=2516e12, matrix_flops_fp8=5033e12),
    _sku(_CDNA4, "MI350X", clock=2.2e9, matrix_flops=2307e12, matrix_flops_fp8=4614e12),
    _sku(_HOPPER, "H200", hbm_bytes=141e9, hbm_bandwidth=4.8e12),
    _sku(_HOPPER, "H100", hbm_bytes=80e9, hbm_bandwidth=3.35e12),
    INTERPRETER,
)

# Cycles that one wave's matrix instruction holds its SIMD, by the shape in the instruction's name. Source: the LLVM 22 scheduling
# model, cross-checked against the data-sheet peak; the two f8f6f4 shapes (64 and 128 deep) are for fp8, twice what it prints for fp4.
MATRIX_CYCLES = {
    "32x32x64": 64,
    "16x16x128": 32,
    "32x32x16": 32,
    "32x32x8": 32,
    "32x32x4": 64,
    "16x16x32": 16,
    "16x16x16": 16,
    "16x16x8": 16,
    "16x16x4": 32,
}


def by_name(name: str, what: str = "arch") -> Arch:
    """The facts for an instruction set ("gfx942": its first SKU), a SKU ("MI308X") or "interpreter", as a user names it.

    ValueError, which says `what` was to name one, for any other.
    """
    for arch in KNOWN:
        if name.lower() in (arch.name.lower(), arch.sku.lower()):
            return arch
    raise _no_arch(name, what)


def _no_arch(name: str, what: str) -> ValueError:
    known = dict.fromkeys((*(arch.name for arch in KNOWN), *(arch.sku for arch in KNOWN)))
    return ValueError(f"{what} must be one of {', '.join(known)}, got {name!r}")


@cache
def nearest(name: str) -> Arch:
    """The facts for a GPU that calls itself so. One that is not known gets those of the nearest known instruction set and keeps its
    own name, so that `tuning.table` looks for tables of its own first, and says that there are none (`warn_untuned`)."""
    with suppress(ValueError):
        return by_name(name)
    family, code = ("sm_", 10) if name.startswith("sm_") else ("gfx", 16)
    try:
        number = int(name[len(family) :].rstrip("a") if code == 10 else name[len(family) :], code)
        if not name.startswith(family):
            raise ValueError
    except ValueError:
        raise _no_arch(name, "arch") from None
    kin = [arch for arch in KNOWN if arch.name.startswith(family)]
    near = min(kin, key=lambda arch: abs(int(arch.name[len(family) :], code) - number))
    return replace(near, name=name, sku="unknown")


def detect(device=None) -> Arch:
    """The GPU behind a `torch.device` (or its name; None: the current one).

    In this order: what `assume` says; the environment variable TRITONATTN_ARCH; for the CPU, the pseudo-arch "interpreter", unless Triton's
    active driver reports a HIP target there (a stand-in driver that compiles or simulates); the device's own properties.
    """
    if _assumed:
        return _assumed[-1]
    if os.environ.get("TRITONATTN_ARCH"):  # looked at before it is asked for: this is a part of every call that is repeated
        return by_name(environment.arch())
    import torch

    if device is None:
        device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    elif isinstance(device, (str, int)):
        device = torch.device(device)
    if device.type == "cpu":
        return _of_driver()
    if device.type != "cuda":
        raise ValueError(f"device must be cpu or cuda (ROCm calls its devices cuda too), got {device}")
    return _of_device(torch.cuda.current_device() if device.index is None else device.index)


_assumed: list[Arch] = []


@contextmanager
def assume(arch: Arch) -> Iterator[None]:
    """Within the block every device is taken for `arch`: how a plan for one GPU is made, or a candidate tried, on another machine."""
    _assumed.append(arch)
    try:
        yield
    finally:
        _assumed.pop()


def _of_driver() -> Arch:
    """The arch of Triton's active driver when it claims to run CPU tensors, else the interpreter's."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return INTERPRETER
    try:
        from triton.runtime.driver import driver

        target = driver.active.get_current_target()
        on_cpu = driver.active.get_active_torch_device().type == "cpu"
    except (ImportError, RuntimeError, AttributeError):  # no Triton, or no driver for this machine
        return INTERPRETER
    return nearest(target.arch) if on_cpu and target.backend == "hip" else INTERPRETER


@cache
def _of_device(index: int) -> Arch:
    import torch

    props = torch.cuda.get_device_properties(index)
    gcn = getattr(props, "gcnArchName", "") if torch.version.hip else ""
    name = gcn.split(":")[0] or f"sm_{props.major}{props.minor}"
    return _match(name, props.multi_processor_count, props.total_memory)


def _match(name: str, compute_units: int, memory: float) -> Arch:
    """The known SKU nearest in compute units, then in memory, with the device's own number of units.

    A GPU in a partition mode (fewer units than its SKU) is such a case: the tables hold, the counts are the device's.
    """
    kin = [arch for arch in KNOWN if arch.name == name] or [nearest(name)]
    arch = min(kin, key=lambda a: (abs(a.compute_units - compute_units), abs(a.hbm_bytes - memory)))
    return arch if arch.compute_units == compute_units else replace(arch, compute_units=compute_units)


def warn_untuned(arch: Arch, table: str) -> None:
    """Say once per instruction set that rows made for another one are in use, and how to make its own."""
    if arch.name not in _warned:
        _warned.add(arch.name)
        warnings.warn(
            f"no tables for {arch.name}: using those of {table}. Results are right, speed is untuned; "
            f"`tritonattn tune` writes autotune_configs/{arch.name}/.",
            RuntimeWarning,
            stacklevel=3,
        )


_warned: set[str] = set()
