"""What a result must be read with: the card, the versions, the commit, the day."""

from __future__ import annotations

import datetime
import subprocess
from pathlib import Path

import torch
import triton

from tritonattn.tuning.arch import detect


def describe(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {
        "device": name, "arch": detect(device).name, "torch": torch.__version__, "triton": triton.__version__, "commit": _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }  # fmt: skip


def _commit() -> str:
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()
