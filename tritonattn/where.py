"""Where a command of this package runs kernels."""

from __future__ import annotations

import os

import torch


def working_device() -> torch.device:
    """The current GPU; without one the CPU, in Triton's interpreter unless a simulated GPU is set up. To call before Triton is imported."""
    if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        return torch.device("cuda", torch.cuda.current_device())
    if not os.environ.get("TRITONATTN_SIM"):
        os.environ["TRITON_INTERPRET"] = "1"
    return torch.device("cpu")
