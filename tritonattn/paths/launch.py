"""What every launcher needs: strides that keep their alignment, the right device, Triton's names of dtypes."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import _allocation

from tritonattn import log
from tritonattn.paths import replay
from tritonattn.tile.fp8 import FP8_FORMATS
from tritonattn.tuning.table import Row
from tritonattn.where import is_capturing

# What the matrix products run in. Triton's interpreter multiplies the bits of bfloat16 as integers: there it is widened.
TRITON_DTYPES = {
    torch.bfloat16: tl.float32 if knobs.runtime.interpret else tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32,
}  # fmt: skip
# Arguments that any slice of a larger tensor may be: a kernel is not compiled anew for their alignment, which is worth nothing to it.
METADATA = (
    "cu_seqlens_q", "cu_seqlens_k", "seq_lens", "context_lens", "key_starts", "block_table", "slot_mapping", "cu_rows", "starts", "lengths",
    "tiles", "work", "merges", "sinks", "alibi_slopes", "q_descale", "k_descale", "v_descale", "kv_descale", "rope_descale", "lse", "lse_out",
    "lse_a", "lse_b",
)  # fmt: skip
# Numbers of a call, none of which a kernel is compiled for: each would be a key of its own where it is 1 or a multiple of 16.
NUMBERS = re.compile(r"stride_|num_|max_|row_|chunk_|window_")
_NOWHERE: AbstractContextManager = nullcontext()


def kernel(function: Any = None, *, never: tuple[str, ...] = ()) -> Any:
    """`triton.jit` of a kernel that is compiled anew neither for the `NUMBERS` of a call nor for the alignment of `METADATA`.

    never: arguments besides that are not specialised on.
    """
    if function is None:
        return partial(kernel, never=never)
    numbers = [name for name in inspect.signature(function).parameters if NUMBERS.match(name)]
    return triton.jit(function, do_not_specialize=[*never, *numbers], do_not_specialize_on_alignment=METADATA)


def vec_width(*tensors: Tensor, size: int = 16) -> int:
    """Elements in `size` bytes if every pointer and every stride but the last is a multiple of that, else 1.

    Strides go to a kernel divided by this number, and it multiplies them again by the constant: so it knows their alignment, and
    is compiled twice at most, whatever the strides are.
    """
    width = size // tensors[0].element_size()
    for tensor in tensors:
        if tensor.data_ptr() % size:
            return 1
        for stride in tensor.stride()[:-1]:
            if stride % width:
                return 1
    return width


def cache_width(k_cache: Tensor, v_cache: Tensor) -> int:
    """`vec_width` of a cache; of 8-bit floats also 8 bytes, which is all that tokens of 72 bytes in a row allow."""
    width = vec_width(k_cache, v_cache)
    return vec_width(k_cache, v_cache, size=8) if width == 1 and k_cache.element_size() == 1 else width


def codes(out: Tensor) -> tuple[Tensor, tuple | None]:
    """A result of an 8-bit float type as the bytes that kernels write, and its format; any other as it is."""
    fp8 = FP8_FORMATS.get(out.dtype)
    return (out if fp8 is None else out.view(torch.uint8)), fp8


def run(kernel: Any, grid: tuple[int, ...], args: tuple, flags: Mapping[str, Any], static: Mapping[str, Any], row: Row) -> None:
    """`kernel[grid](*args, **flags, **static, **row.options)`, at a third of the host time from the second launch on.

    Triton inspects every argument at every launch; here a launch is recognised by what its compile key depends on (dtype and
    alignment of each tensor, flags, the identity of `row` and of the cached `static`) and goes straight to the compiled kernel.
    """
    if replay.PREPARING.get():
        replay.unrepeatable()
        _prepare(kernel, grid, args, {**flags, **static, **row.options})
        return
    if log.CALLS:
        log.launch(kernel, grid, row.where, {**flags, **row.config})
    key = None if replay.NEVER or not args[0].is_cuda or kernel.pre_run_hooks else _key(kernel, args, flags, static, row)
    known = _compiled.get(key)
    if known is None:
        if args[0].is_cuda and is_capturing(args[0].device):
            _require_loaded(kernel, grid, args, {**flags, **static, **row.options})
        with np.errstate(all="ignore"):  # the interpreter's NumPy: unwritten slots are multiplied too, and masked after it
            compiled = kernel[grid](*args, **flags, **static, **row.options)
        if not isinstance(compiled, CompiledKernel):  # interpreted, or compiling elsewhere, ahead of time
            replay.unrepeatable()
            return
        values = {**flags, **static}
        known = compiled, tuple(values[name] for name in kernel.arg_names[len(args) :]), static, row
        if key is not None:
            _compiled[key] = known  # the last two stay alive, so their ids stay theirs
    else:
        known[0][(*grid, 1, 1)[:3]](*args, *known[1])
    replay.launched(kernel, known[0], grid, args, known[1])


def _key(kernel: Any, args: tuple, flags: Mapping[str, Any], static: Mapping[str, Any], row: Row) -> tuple | None:
    facts: list[Any] = [kernel, torch.cuda.current_device(), id(static), id(row), *flags.values()]
    for arg in args:
        if isinstance(arg, Tensor):
            facts += (arg.dtype, arg.data_ptr() % 16 == 0)
            if replay.ON_ROCM:  # where a tensor fits 2 GiB the backend addresses it with 32 bits
                facts.append(arg.untyped_storage().nbytes() < 1 << 31)
        elif arg is None:
            facts.append(None)
        elif type(arg) is int and arg >= 1 << 31:
            return None
    return tuple(facts)


_compiled: dict[tuple | None, tuple] = {}


def settled(static: Mapping[str, Any], row: Row, make: Callable[[], dict], *more: Any) -> dict:
    """What `make` gives: the constexprs of a form of a kernel, from those of another. Made once for each `static`, `row` and `more`."""
    key = id(static), id(row), *more
    found = _settled.get(key)
    if found is None:
        found = _settled[key] = make(), static, row  # the last two stay alive, so their ids stay theirs
    return found[0]


_settled: dict[tuple, tuple] = {}


def _require_loaded(kernel: Any, grid: tuple[int, ...], args: tuple, keywords: dict[str, Any]) -> None:
    """The driver loads no code while a graph is captured; asked all the same, it spoils the capture, whose end then raises an error of its own."""
    compiled = kernel.run(*args, grid=grid, warmup=True, **keywords)
    if isinstance(compiled, CompiledKernel) and compiled.module is None:
        name = kernel.fn.__name__
        raise RuntimeError(f"a graph cannot be captured around the first run of a kernel ({name}): make the same call once before the capture")


@contextmanager
def preparing() -> Iterator[None]:
    """Within the block, launches of this thread are compiled and loaded on the tensors' device, and not made."""
    token = replay.PREPARING.set(True)
    try:
        yield
    finally:
        replay.PREPARING.reset(token)


def is_preparing() -> bool:
    return replay.PREPARING.get()


def _prepare(kernel: Any, grid: tuple[int, ...], args: tuple, keywords: dict[str, Any]) -> None:
    if knobs.runtime.interpret:
        return
    compiled = kernel.run(*args, grid=grid, warmup=True, **keywords)
    if args[0].is_cuda and isinstance(compiled, CompiledKernel):
        _ = compiled.run  # loads the code: later that could fall into the capture of a graph


def on(tensor: Tensor, row: Row | None = None) -> AbstractContextManager:
    """Around a launch: makes the tensor's device the current one, which is where Triton launches, and sets what the table row asks
    for that is no compile option: copies from memory to LDS without registers ("async_copy", gfx950)."""
    device = tensor.device
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    async_copy = None if row is None else row.config.get("async_copy")
    if async_copy is not None and _ASYNC_COPY not in os.environ and _async_copy_default() != async_copy:
        return _with_async_copy(async_copy, device if elsewhere else None)
    return torch.cuda.device(device) if elsewhere else _NOWHERE


_ASYNC_COPY = "TRITON_HIP_USE_ASYNC_COPY"  # a user who sets it has the last word


def _async_copy_default() -> bool:
    """What Triton does on gfx950 unless told. Where it leaves the question open (3.8 on), it answers yes."""
    default = knobs.amd.use_async_copy
    return True if default is None else bool(default)


@contextmanager
def _with_async_copy(wanted: bool, device: torch.device | None) -> Iterator[None]:
    """Triton takes this from the environment alone, at the moment it compiles."""
    os.environ[_ASYNC_COPY] = str(int(wanted))
    with ExitStack() as stack:
        stack.callback(os.environ.pop, _ASYNC_COPY, None)
        if device is not None:
            stack.enter_context(torch.cuda.device(device))
        yield


def workspace(tensor: Tensor, needed: bool) -> AbstractContextManager:
    """Lets a kernel that makes descriptors have the global memory they are written to; the caller's own allocator comes back after."""
    if not needed:
        return _NOWHERE
    replay.unrepeatable()
    return _allocator(tensor.device)


@contextmanager
def _allocator(device: torch.device) -> Iterator[None]:
    before = _allocation._allocator.get()
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=device))
    try:
        yield
    finally:
        triton.set_allocator(before)
