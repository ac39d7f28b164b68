"""Every code block of README.md runs."""
from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = [(language, body) for language, body in re.findall(r"^```(\w*)\n(.*?)^```$", README, re.M | re.S) if language != "text"]
COMMANDS = sorted({line for language, body in BLOCKS if language == "sh" for line in body.splitlines()}
                  | set(re.findall(r"`((?:pip install|make|tritonattn) [^`]+)`", README)))

LONG = {"bench", "demo", "check", "warmup", "tune", "model", "fuzz", "soak"}


def test_each_block_has_a_language_that_is_run():
    assert {language for language, _ in BLOCKS} == {"python", "sh"}


@pytest.mark.parametrize("where", ["here", "gfx942", "gfx950"])
def test_python_blocks_run_one_after_another(where):
    if where == "here":
        env = os.environ | ({} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"})
    elif torch.cuda.is_available() or not shutil.which("cc"):
        pytest.skip("the simulator runs CPU tensors and is built with cc")
    else:
        env = os.environ | {"TRITON_INTERPRET": "0", "TRITONATTN_SIM": where}
    code = "\n".join(body for language, body in BLOCKS if language == "python")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "[1, 2, 0]"


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_are_accepted(line):
    """Runs what is quick; asks pip and make what they would do; a long command has its arguments read and prints its help."""
    if line.startswith("pip install --no-deps"):
        assert line.split()[-1] in (ROOT / ".ci/venv").read_text()  # the same pin; asking for it takes a network
        return
    if line.startswith("pip install"):
        pytest.importorskip("hatchling")
        run = f"{sys.executable} -m {line} --dry-run --no-deps --no-build-isolation --disable-pip-version-check"
    elif line.startswith("make "):
        run = f"{line} --dry-run"
    else:
        run = f"{sys.executable} -m {line}" + (" --help" if line.split()[1] in LONG else "")
    done = subprocess.run(run, cwd=ROOT, shell=True, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "does not provide the extra" not in done.stdout + done.stderr
