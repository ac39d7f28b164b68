"""The collector of what is wrong with a call, and the questions that all ops ask."""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tritonattn import layouts
from tritonattn.layouts import CacheView
from tritonattn.plan import MAX_LENGTH
from tritonattn.problem import FP8_DTYPES
from tritonattn.tuning.arch import detect
from tritonattn.where import device_of

Ints = NDArray[np.int32]
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
FLOATS_AND_FP8 = FLOATS + FP8_DTYPES
INT32 = (torch.int32,)
INTS = (torch.int32, torch.int64)
FP32 = (torch.float32,)
MAX_INT32 = (1 << 31) - 1
MIN_HEAD_SIZE, MAX_HEAD_SIZE, HEAD_SIZE_STEP = 32, 256, 8


UNKNOWN = -1
"""A size that cannot be told, since what has it is not what it must be: that is a reason already, and the size agrees with any other."""
UNKNOWN_CACHE = CacheView(*(torch.empty(0, device="meta"),) * 2, "", "", *(UNKNOWN,) * 12)


class Reasons:
    """Collects what is wrong with a call; `done` raises it as one error. All tensors must be where the first one is.

    A check gives back the sizes that others are compared with, or `UNKNOWN`: so one reason does not hide those that do not follow from it.
    """

    __slots__ = ("device", "op", "types", "values")

    def __init__(self, op: str, first: Tensor | None, device: torch.device | None = None) -> None:
        self.op = op
        self.device = first.device if isinstance(first, Tensor) else device
        self.types: list[str] = []
        self.values: list[str] = []

    def done(self) -> None:
        """Raise if there is any reason."""
        if self.types or self.values:
            self.refuse()

    def refuse(self) -> NoReturn:
        error = ValueError if self.values else TypeError
        raise error(f"{self.op}: " + "; ".join(self.types + self.values))

    def place(self, device: torch.device | str) -> torch.device:
        """The device that the caller names, which is where all tensors must be; where torch has none such, "meta" stands for it."""
        try:
            self.device = device_of(device)
        except TypeError as error:
            self.types.append(str(error))
        except ValueError as error:
            self.values.append(str(error))
        return self.device or torch.device("meta")

    # -- tensors --------------------------------------------------------------------------------------------------

    def tensor(self, name: str, tensor: Tensor, rank: int, dtypes: Sequence[torch.dtype]) -> Sequence[int]:
        """A tensor of this rank, one of these dtypes, on this device. Its shape."""
        if not isinstance(tensor, Tensor):
            self.types.append(f"{name} must be a tensor, got {type(tensor).__name__}")
            return (UNKNOWN,) * rank
        if tensor.dtype not in dtypes:
            self.types.append(f"{name} must be {either(dtypes)}, got {tensor.dtype}")
        self.here(name, tensor)
        shape = tensor.shape
        if len(shape) == rank:
            return shape
        self.values.append(f"{name} must have {rank} dimension{'s' * (rank > 1)}, got shape {list(shape)}")
        return (UNKNOWN,) * rank

    def here(self, name: str, tensor: Tensor) -> None:
        """A tensor on this device."""
        if tensor.device != self.device and self.device is not None:
            self.values.append(f"{name} must be on {self.device}, got {tensor.device}")

    def rows(self, name: str, tensor: Tensor, rank: int, dtypes: Sequence[torch.dtype]) -> Sequence[int]:
        """As `tensor`, with a unit last stride."""
        shape = self.tensor(name, tensor, rank, dtypes)
        if isinstance(tensor, Tensor) and tensor.ndim and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            self.values.append(f"{name} must have a last stride of 1, got strides {list(tensor.stride())}")
        return shape

    def written(self, name: str, tensor: Tensor) -> None:
        """A tensor that the op writes: of two programs that write one element, either may come last."""
        if isinstance(tensor, Tensor) and overlaps(tensor):
            got = f"shape {list(tensor.shape)} with strides {list(tensor.stride())}"
            self.values.append(f"{name} must have each element at a place of its own, got {got}")

    def apart(self, a: str, first: Tensor, b: str, second: Tensor) -> None:
        """Two tensors that the op writes."""
        if isinstance(first, Tensor) and isinstance(second, Tensor) and share_memory(first, second):
            self.values.append(f"{a} and {b} must share no memory, got views of the same")

    def shape(self, name: str, tensor: Tensor, need: tuple[int, ...]) -> None:
        """The shape of a tensor; a negative number stands for any size. What is no tensor of this rank was named before."""
        if not isinstance(tensor, Tensor) or tensor.shape == need:
            return
        shape = tensor.shape
        if len(shape) == len(need) and any(n >= 0 and n != size for n, size in zip(need, shape, strict=True)):
            wanted = ", ".join(".." if n < 0 else str(n) for n in need)
            self.values.append(f"{name} must be [{wanted}], got {list(shape)}")

    def cache(self, k_cache: Tensor, v_cache: Tensor, kv_layout: str) -> CacheView:
        """A pair of caches of this layout, and how they are seen."""
        whole = True
        for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
            if not isinstance(cache, Tensor):
                whole = False
                self.types.append(f"{name} must be a tensor, got {type(cache).__name__}")
                continue
            if cache.dtype not in FLOATS_AND_FP8:
                self.types.append(f"{name} must be {either(FLOATS)} or an 8-bit float, got {cache.dtype}")
            self.here(name, cache)
        if kv_layout not in layouts.PAGED_LAYOUTS:
            self.values.append(f"kv_layout must be one of {', '.join(layouts.PAGED_LAYOUTS)}, got {kv_layout!r}")
        elif whole:
            refusals = layouts.refusals(k_cache, v_cache, kv_layout)
            if not refusals:
                return layouts.view_unchecked(k_cache, v_cache, kv_layout)
            self.values += refusals
        else:
            self.values += layouts.wrong_ranks(k_cache, v_cache, kv_layout)
        return UNKNOWN_CACHE

    def hardware(self, *dtypes: torch.dtype | None) -> None:
        """The device runs kernels and has these 8-bit floats; None: a dtype that is not known."""
        device = self.device
        if device is None:
            return
        if device.type not in ("cpu", "cuda"):
            self.values.append(f"tensors must be on a GPU, got {device}")
            return
        if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1" and detect(device).simulated:
            self.values.append("tensors must be on a GPU, got cpu (TRITON_INTERPRET=1 runs the kernels there, slowly)")
        for dtype in dtypes:
            if dtype in FP8_DTYPES:
                arch = detect(device)
                name = str(dtype).removeprefix("torch.")
                if name not in arch.fp8_types:
                    self.types.append(f"8-bit floats on {arch.name} must be {either(arch.fp8_types)}, got {name}")

    # -- numbers --------------------------------------------------------------------------------------------------

    def integer(self, name: str, value: int, least: int, most: int | None = None) -> int:
        """A host integer, at least ``least`` and at most ``most``."""
        if type(value) is int:
            if value < least:
                self.values.append(f"{name} must be at least {least}, got {value}")
            elif most is not None and value > most:
                self.values.append(f"{name} must be at most {most}, got {value}")
            else:
                return value
        elif isinstance(value, bool | Tensor | np.ndarray) or not hasattr(value, "__index__"):
            self.types.append(f"{name} must be an int on the host, got {type(value).__name__}")
        else:
            return self.integer(name, value.__index__(), least, most)
        return UNKNOWN

    def longest(self, name: str, value: int, least: int = 0) -> int:
        """A host integer that bounds the length of a sequence."""
        return self.integer(name, value, least, MAX_LENGTH)

    def flag(self, name: str, value: bool) -> None:
        if type(value) is not bool:
            self.types.append(f"{name} must be a bool, got {type(value).__name__}")

    def number(self, name: str, value: float, *, positive: bool) -> None:
        """A finite host number, one of NumPy's too, above 0 or (``positive=False``) at least 0."""
        if isinstance(value, bool) or not isinstance(value, float | int | np.floating | np.integer):
            self.types.append(f"{name} must be a float, got {type(value).__name__}")
        elif not math.isfinite(value) or value < 0 or (positive and value == 0):
            self.values.append(f"{name} must be finite and {'above 0' if positive else 'at least 0'}, got {value}")

    def table(self, block_table: Tensor, batch: int, longest: int) -> None:
        """[batch, blocks]; ``longest``: most cached tokens of a request, as far as the host knows."""
        _, blocks = self.rows("block_table", block_table, 2, INT32)
        self.shape("block_table", block_table, (batch, -1))
        if batch and longest > 0 and blocks == 0:
            self.values.append(f"block_table must have a column at least where up to {longest} tokens are cached, got shape {list(block_table.shape)}")

    def lengths(self, name: str, values: Sequence[int] | Ints) -> Ints | None:
        """Host integers, one per request, as int32; None where they are none."""
        if (type(values) is list or type(values) is tuple) and values and type(values[0]) is int:
            with suppress(TypeError, OverflowError):  # what it does not take is named below
                # Of a list and as unsigned numbers: a quarter of the time of `asarray`.
                lengths = np.frombuffer(array("I", values if type(values) is list else list(values)), np.uint32)
                if lengths.item(lengths.argmax()) <= MAX_LENGTH:
                    return lengths.view(np.int32)
        if isinstance(values, Tensor) and values.is_cuda:
            self.types.append(f"{name} must be on the host, got a tensor on {values.device}")
            return None
        try:
            lengths = np.asarray(values)
        except ValueError:  # sequences of different lengths
            self.types.append(f"{name} must be a sequence of integers, got {values!r:.80}")
            return None
        if lengths.dtype.kind in "fO" and lengths.ndim == 1 and lengths.size and all(type(value) is int for value in values):  # beyond 64 bits
            whole = np.asarray(values, object)
            self.each(f"{name} must be at most {MAX_LENGTH}", whole, whole > MAX_LENGTH)
            self.each(f"{name} must be at least 0", whole, whole < 0)
            return None
        if lengths.ndim != 1 or (lengths.dtype.kind not in "iu" and lengths.size):
            self.types.append(f"{name} must be a sequence of integers, got {lengths.dtype} of shape {list(lengths.shape)}")
            return None
        if lengths.size and lengths.item(lengths.argmax()) > MAX_LENGTH:  # a quarter of the time of `max`
            self.each(f"{name} must be at most {MAX_LENGTH}", lengths, lengths > MAX_LENGTH)
            return None
        if lengths.itemsize > 4 and lengths.size and lengths.item(lengths.argmin()) < -MAX_INT32:  # would wrap; others are named by who asked
            self.each(f"{name} must be at least 0", lengths, lengths < 0)
            return None
        return lengths.astype(np.int32)  # a copy, since a plan outlives the call

    def each(self, need: str, values: NDArray[np.integer], wrong: NDArray[np.bool_]) -> None:
        """Requests that are wrong, the first few by number and value."""
        if wrong.any():
            which = np.flatnonzero(wrong)
            got = ", ".join(f"{values[i]} (request {i})" for i in which[:4])
            self.values.append(f"{need}, got {got}{', ...' if len(which) > 4 else ''}")

    def options(self, causal: bool, window_size: tuple[int, int], softcap: float, softmax_scale: float | None) -> None:
        """Options of the scores and of the mask that are plain values."""
        if softmax_scale is not None:
            self.number("softmax_scale", softmax_scale, positive=True)
        if type(softcap) is not float or softcap != 0.0:
            self.number("softcap", softcap, positive=False)
        self.flag("causal", causal)
        if not isinstance(window_size, tuple | list) or len(window_size) != 2:
            self.types.append(f"window_size must be a pair (left, right), got {window_size!r}")
        else:
            self.integer("window_size left (-1: unlimited)", window_size[0], -1)
            self.integer("window_size right (-1: unlimited)", window_size[1], -1)

    def per_head(self, name: str, tensor: Tensor | None, heads: int) -> None:
        """``[heads]``, contiguous, or None."""
        if tensor is None:
            return
        self.rows(name, tensor, 1, FLOATS)
        self.shape(name, tensor, (heads,))

    def descale(self, name: str, value: float | Tensor | None, heads: int) -> None:
        """A number, a tensor of one element, or ``[heads]``; fp32."""
        if value is None:
            return
        if not isinstance(value, Tensor):
            self.number(name, value, positive=True)
            return
        if value.dtype != torch.float32:
            self.types.append(f"{name} must be torch.float32, got {value.dtype}")
        self.here(name, value)
        if value.numel() != 1 and heads != UNKNOWN and (value.shape != (heads,) or value.stride(0) != 1):
            self.values.append(f"{name} must have 1 element or be [{heads}], contiguous, got {list(value.shape)}")

    def heads(self, num_q_heads: int, num_kv_heads: int, head_size: int, v_head_size: int) -> None:
        """The GQA ratio and the head sizes that the MHA kernels take."""
        if UNKNOWN not in (num_q_heads, num_kv_heads) and (num_kv_heads < 1 or num_q_heads < 1 or num_q_heads % num_kv_heads):
            self.values.append(f"query heads must be a multiple of KV heads, got {num_q_heads} and {num_kv_heads}")
        for name, size in (("head size of q and k", head_size), ("head size of v", v_head_size)):
            if size != UNKNOWN and (size % HEAD_SIZE_STEP or not MIN_HEAD_SIZE <= size <= MAX_HEAD_SIZE):
                need = f"a multiple of {HEAD_SIZE_STEP} from {MIN_HEAD_SIZE} to {MAX_HEAD_SIZE}"
                self.values.append(f"{name} must be {need}, got {size}")

    def out(self, out: Tensor | None, shape: tuple[int, ...]) -> None:
        """A buffer for the result, or None."""
        if out is None:
            return
        self.rows("out", out, len(shape), FLOATS)
        self.written("out", out)
        self.shape("out", out, shape)


def plus(a: int, b: int) -> int:
    """The sum of two sizes, if both are known."""
    return UNKNOWN if UNKNOWN in (a, b) else a + b


def dtype_of(tensor: Tensor) -> torch.dtype | None:
    """None of what is no tensor."""
    return tensor.dtype if isinstance(tensor, Tensor) else None


def same_as(tensor: Tensor, dtypes: Sequence[torch.dtype]) -> Sequence[torch.dtype]:
    """The dtype that another tensor has, if it is one of these; else any of them."""
    return (tensor.dtype,) if isinstance(tensor, Tensor) and tensor.dtype in dtypes else dtypes


def overlaps(tensor: Tensor) -> bool:
    """Whether two elements may share memory: from the smallest stride to the largest, each must step over all that the ones before reach.

    That is more than needed (strides 2 and 3 of two elements each meet nowhere), and what every view of dense memory has.
    """
    if tensor.is_contiguous() or not tensor.numel():
        return False
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return True
            reach += stride * (size - 1)
    return False


class Places:
    """Where a tensor's elements are, as NumPy takes it; nothing of it is read."""

    def __init__(self, x: Tensor) -> None:
        strides = tuple(stride * x.itemsize for stride in x.stride())
        self.__array_interface__ = {"version": 3, "data": (x.data_ptr(), False), "typestr": f"|V{x.itemsize}", "shape": tuple(x.shape), "strides": strides}


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether some element of one lies on one of the other, however they are interleaved; False also where that takes too long to tell."""
    if a.device != b.device or a.device.type == "meta" or not a.numel() or not b.numel():
        return False
    try:
        return np.shares_memory(np.asarray(Places(a)), np.asarray(Places(b)), max_work=100_000)
    except np.exceptions.TooHardError:
        return False


def either(names: Sequence[object]) -> str:
    return " or ".join(str(name) for name in names)
