"""What every launcher needs: strides that keep their alignment, the right device, Triton's names of dtypes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton.language as tl
from torch import Tensor
from triton import knobs

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
