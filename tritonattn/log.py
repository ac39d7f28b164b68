"""TRITONATTN_LOG: what each call was and how it ran, for people who look for a fault. Off by default, and then not in the way.

`TRITONATTN_LOG=call` prints, to stderr, each public call with the shapes of its arguments, then each kernel launch with its grid, the
table row that chose its configuration and the compile flags. `TRITONATTN_LOG=dump` saves the arguments of a call that raises, or whose
result holds NaN, to `tritonattn-dump-<n>.pt` in the working directory: a dictionary of "op", "args", "kwargs" and "error". A dump
reads results back and so waits for the device at every call. Both may be given: `call,dump`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from tritonattn.environment import log_modes

MODES = log_modes()
CALLS = "call" in MODES
_dumps = 0


def traced(function: Callable) -> Callable:
    """`function` as it is, unless TRITONATTN_LOG asks for more."""
    if not MODES:
        return function

    @wraps(function)
    def call(*args, **kwargs):
        if CALLS:
            say(f"{function.__name__}({', '.join([describe(a) for a in args] + [f'{k}={describe(v)}' for k, v in kwargs.items()])})")
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            if "dump" in MODES:
                dump(function.__name__, args, kwargs, f"{type(error).__name__}: {error}")
            raise
        if "dump" in MODES and _has_nan(result):
            dump(function.__name__, args, kwargs, "the result holds NaN")
        return result

    return call


def describe(value: Any) -> str:
    """A value in one short line; a tensor by dtype, shape, strides where they are not dense, and device."""
    import torch

    if isinstance(value, torch.Tensor):
        strides = "" if value.is_contiguous() else f" strides {list(value.stride())}"
        return f"<{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{strides} {value.device}>"
    if isinstance(value, tuple | list) and any(isinstance(item, torch.Tensor) for item in value):
        return f"({', '.join(map(describe, value))})"
    return repr(value)


def launch(kernel: Any, grid: tuple[int, ...], where: str | None, values: dict[str, Any]) -> None:
    """One line for a launch; called where CALLS."""
    chosen = " ".join(f"{name}={value}" for name, value in values.items())
    say(f"  {getattr(kernel, '__name__', kernel)} grid {tuple(grid)} from {where or 'its table'}: {chosen}")


def dump(op: str, args: tuple, kwargs: dict[str, Any], error: str) -> None:
    import torch

    global _dumps
    path = f"tritonattn-dump-{_dumps}.pt"
    _dumps += 1
    torch.save({"op": op, "args": args, "kwargs": kwargs, "error": error}, path)
    say(f"{op}: {error}; arguments saved to {path}")


def say(text: str) -> None:
    print(f"tritonattn: {text}", file=sys.stderr, flush=True)


def _has_nan(result: Any) -> bool:
    import torch

    tensors = result if isinstance(result, tuple) else (result,)
    return any(isinstance(t, torch.Tensor) and t.is_floating_point() and bool(t.isnan().any()) for t in tensors)
