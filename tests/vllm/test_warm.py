"""After a layer's first step nothing is compiled any more, whatever comes; checked by compiling for an Instinct without one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("slot", ["mha", "mla"])
def test_nothing_is_compiled_after_the_first_step(slot):
    script = Path(__file__).with_name("warmed.py")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, str(script), slot], capture_output=True, text=True, check=False, timeout=280, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    before, after = (line.split() for line in done.stdout.splitlines() if line.startswith(("first", "later")))
    assert before[0] == "first" and int(before[1]) > 5
    assert after == ["later", "0"]
