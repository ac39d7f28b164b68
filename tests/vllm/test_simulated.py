"""The plug-in as CDNA machine code, in the simulator: the layout and the fp8 type that the device asks for."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(shutil.which("cc") is None, reason="the simulator needs a C compiler")
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_mixed_batches(arch):
    script = Path(__file__).with_name("simulated.py")
    done = subprocess.run([sys.executable, str(script), arch], capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith(("auto", "fp8", "mla"))]
    assert [line[:2] for line in lines] == [
        *([name, "preshuffled"] for name in ("auto", "auto-8bit", "fp8", "fp8-8bit")), ["mla", "latent"],
    ]  # fmt: skip
    limits = (2e-2, 3.5 / 16 + 2e-2, 0.1, 3.5 / 16 + 0.1, 1e-4)
    assert all(float(line[2]) < limit for line, limit in zip(lines, limits, strict=True))
