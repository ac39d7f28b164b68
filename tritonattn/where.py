"""Where kernels run: the device that a caller names, and the one that a command of this package takes."""

from __future__ import annotations

import os

import torch


def device_of(device: torch.device | str) -> torch.device:
    """The device that is meant, a GPU with its number. ValueError, TypeError: torch knows no such device, or finds no such GPU."""
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device must be one that torch knows, such as cuda:0 or cpu, got {device!r}") from None
    except TypeError:
        raise TypeError(f"device must be a torch.device or its name, got {type(device).__name__}") from None
    if found.type != "cuda":
        return found
    count = torch.cuda.device_count()
    index = found.index if found.index is not None else torch.cuda.current_device() if count else 0
    if index >= count:
        raise ValueError(f"device must be one of the GPUs that torch finds, of which there are {count}, got {found}")
    return torch.device("cuda", index)


def is_capturing(device: torch.device) -> bool:
    """The current stream records a graph: nothing runs, and nothing may wait, be loaded, or come from the host anew at each replay."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def working_device() -> torch.device:
    """The current GPU; without one the CPU, in Triton's interpreter unless a simulated GPU is set up. To call before Triton is imported."""
    if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        return torch.device("cuda", torch.cuda.current_device())
    if not os.environ.get("TRITONATTN_SIM"):
        os.environ["TRITON_INTERPRET"] = "1"
    return torch.device("cpu")
