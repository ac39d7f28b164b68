"""The executor: executor/*.h compiled once with the C compiler that Triton needs anyway, and the structures shared with it.

The C files hold one instruction family each. The table of instructions lives there alone: names and operand forms are read back from the library.
"""

import ctypes
import functools
import hashlib
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile

u8, u16, u32, u64, i32, i64 = ctypes.c_uint8, ctypes.c_uint16, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int32, ctypes.c_int64
NONE, SGPR, VGPR, CONST = range(4)
CLAMP, IS_SDWA, IS_DPP, DST_PAD = 1, 2, 4, 8
FAULTS = ("ok", "memory", "lds bounds", "undefined value", "missing wait", "race", "runaway", "trap")
_SOURCE = pathlib.Path(__file__).parent / "executor"
# No contraction: v_mul then v_add rounds twice; v_fma is fmaf.
_FLAGS = ["-O3", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC"]


class Operand(ctypes.Structure):
    _fields_ = [(n, u8) for n in ("kind", "count", "neg", "abs", "half", "sel", "sext", "hi")] + [("index", u32), ("pad", u32), ("value", u64)]


class LaneMap(ctypes.Structure):
    _fields_ = [("source", u8 * 64), ("valid", u64), ("enabled", u64), ("bound_ctrl", u32), ("pad", u32)]


class Inst(ctypes.Structure):
    _fields_ = [("op", i32), ("flags", u32), ("dst", Operand * 2), ("src", Operand * 4), ("imm", i64 * 4), ("map", i32), ("line", i32)]


class Range(ctypes.Structure):
    _fields_ = [("start", u64), ("end", u64), ("writable", i32), ("pad", i32)]


class Launch(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.POINTER(Inst)),
        ("length", u32),
        ("maps", ctypes.POINTER(LaneMap)),
        ("ranges", ctypes.POINTER(Range)),
        ("range_count", u32),
        ("kernarg", u64),
        ("lds_size", u32),
        ("waves", u32),
        ("user_sgprs", u32),
        ("workgroup_ids", u32),
        ("scratch_size", u32),
        ("poison", u32),
        ("order", u32),
        ("fnuz", u32),
        ("kernarg_sgpr", u32),
        ("budget", u64),
        ("grid", u32 * 3),
        ("pad2", u32),
        ("counts", ctypes.POINTER(u64)),
    ]


class Outcome(ctypes.Structure):
    _fields_ = [("fault", i32), ("line", i32), ("wave", i32), ("lane", i32), ("group", i32 * 3), ("pad", u32), ("executed", u64), ("text", ctypes.c_char * 192)]


def _cache_folder():
    """Where built executors are kept: the user's cache, else a folder for this process alone."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = pathlib.Path(base) / "tritonattn"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = pathlib.Path(tempfile.mkdtemp(prefix="tritonattn-"))
    return folder


@functools.cache
def library():
    """Build (once per source, compiler and machine) and load the executor."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError("the simulator needs a C compiler (CC, cc, gcc or clang), as Triton itself does; none was found")
    native = ["-march=native"] if platform.machine() in ("x86_64", "AMD64") else []
    digest = hashlib.sha256(repr((compiler, _FLAGS, platform.processor(), platform.node())).encode())
    for path in sorted(_SOURCE.iterdir()):
        digest.update(path.read_bytes())
    target = _cache_folder() / f"simulator-{digest.hexdigest()[:16]}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            built = pathlib.Path(folder) / target.name
            run = subprocess.run(
                [*compiler.split(), *_FLAGS, *native, "-o", built, _SOURCE / "simulator.c", "-lm"], capture_output=True, text=True, check=False
            )
            if run.returncode:
                raise RuntimeError(f"{compiler} could not build the simulator:\n{run.stderr}")
            os.replace(built, target)  # atomic: processes that build at once agree
    lib = ctypes.CDLL(str(target))
    lib.op_name.restype = lib.op_form.restype = ctypes.c_char_p
    lib.simulate.argtypes = [ctypes.POINTER(Launch), u64, u64, ctypes.POINTER(Outcome)]
    for k, structure in enumerate((Inst, Launch, LaneMap, Outcome)):
        if lib.sizes(k) != ctypes.sizeof(structure):
            raise RuntimeError(f"{structure.__name__}: core.py and machine.h disagree about its layout")
    return lib


@functools.cache
def operations():
    """name -> (number, form, family) of every instruction the executor knows; family is "scalar", "lanes", "compare" or "handler"."""
    lib = library()
    families = ("scalar", "lanes", "compare", "handler")
    return {lib.op_name(k).decode(): (k, lib.op_form(k).decode(), families[lib.op_family(k)]) for k in range(lib.op_count())}
