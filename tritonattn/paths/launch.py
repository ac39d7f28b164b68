"""What every launcher needs: strides that keep their alignment, the right device, Triton's names of dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.runtime import _allocation

# What the matrix products run in. Triton's interpreter multiplies the bits of bfloat16 as integers: there it is widened.
TRITON_DTYPES = {
    torch.bfloat16: tl.float32 if knobs.runtime.interpret else tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32,
}  # fmt: skip
_NOWHERE: AbstractContextManager = nullcontext()


def vec_width(*tensors: Tensor) -> int:
    """Elements in 16 bytes if every pointer and every stride but the last is a multiple of that, else 1.

    Strides go to a kernel divided by this number, and it multiplies them again by the constant: so it knows their alignment, and
    is compiled twice at most, whatever the strides are.
    """
    width = 16 // tensors[0].element_size()
    for tensor in tensors:
        if tensor.data_ptr() % 16:
            return 1
        for stride in tensor.stride()[:-1]:
            if stride % width:
                return 1
    return width


def on(tensor: Tensor) -> AbstractContextManager:
    """Makes the tensor's device the current one for a launch, which is where Triton launches."""
    device = tensor.device
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NOWHERE
    return torch.cuda.device(device)


def workspace(tensor: Tensor, needed: bool) -> AbstractContextManager:
    """Lets a kernel that makes descriptors have the global memory they are written to; the caller's own allocator comes back after."""
    return _allocator(tensor.device) if needed else _NOWHERE


@contextmanager
def _allocator(device: torch.device) -> Iterator[None]:
    before = _allocation._allocator.get()
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=device))
    try:
        yield
    finally:
        triton.set_allocator(before)
