"""The text that is executed is the binary that ships: llvm-mc turns one into the other, bit for bit."""

import os
import shutil
import struct
import subprocess

import pytest
import simulated_kernels
import torch

LLVM_MC = next((found for name in ("llvm-mc-22", "llvm-mc") if (found := shutil.which(name))), None)
pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter makes no machine code"),
    pytest.mark.skipif(LLVM_MC is None, reason="needs llvm-mc of LLVM 22 (gfx950)"),
]


def section(elf, name):
    """Bytes of one section of an ELF64 file."""
    (table,) = struct.unpack_from("<Q", elf, 40)
    size, count, names = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, table + k * size) for k in range(count)]
    strings = headers[names][4]
    for header in headers:
        start = strings + header[0]
        if elf[start : elf.index(b"\0", start)] == name:
            return elf[header[4] : header[4] + header[5]]
    raise ValueError(f"no section {name}")


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_text_and_binary_agree(arch, tmp_path):
    from tritonattn.simulator import simulated

    q = torch.randn(64, 64, dtype=torch.bfloat16)
    with simulated(arch):
        compiled = simulated_kernels.attend[(2,)](q, q, q, torch.empty_like(q), torch.empty(64), 0.1, 64, 64, BM=32, BN=32, D=64, num_warps=4)
    (tmp_path / "kernel.s").write_text(compiled.asm["amdgcn"])
    done = subprocess.run(
        [LLVM_MC, "-triple=amdgcn-amd-amdhsa", f"-mcpu={arch}", "-filetype=obj", "-o", tmp_path / "kernel.o", tmp_path / "kernel.s"],
        check=False,
        capture_output=True,
        text=True,
    )
    if "not a recognized processor" in done.stderr:
        pytest.skip(f"this llvm-mc does not know {arch}")
    assert done.returncode == 0, done.stderr
    text = section((tmp_path / "kernel.o").read_bytes(), b".text")
    assert len(text) > 1000 and text == section(compiled.asm["hsaco"], b".text")
