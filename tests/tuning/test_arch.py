"""Which facts belong to a GPU: by instruction set and counts, without touching a device until asked."""

import subprocess
import sys

import pytest
import torch

from tritonattn.tuning import arch


@pytest.mark.parametrize("known", arch.KNOWN, ids=lambda a: a.sku)
def test_every_fact_that_matters_has_a_source(known):
    needed = {"compute_units", "fp8_types", "lds_bytes"}
    needed |= set() if known.simulated else {"hbm_bandwidth", "matrix_flops", "registers", "clock"}
    assert needed <= set(known.sources)
    assert all(hasattr(torch, name) for name in known.fp8_types)


@pytest.mark.parametrize(
    "name, units, memory, sku",
    [
        ("gfx942", 304, 192e9, "MI300X"),
        ("gfx942", 304, 256e9, "MI325X"),
        ("gfx942", 228, 128e9, "MI300A"),
        ("gfx942", 80, 192e9, "MI308X"),
        ("gfx950", 256, 288e9, "MI355X"),
        ("sm_90", 132, 141e9, "H200"),
    ],
)
def test_match_by_counts(name, units, memory, sku):
    found = arch._match(name, units, memory)
    assert (found.sku, found.compute_units) == (sku, units)


def test_partition_keeps_the_device_count():
    found = arch._match("gfx942", 38, 24e9)
    assert found.compute_units == 38 and found.table == "gfx942"


def test_unknown_arch_takes_the_nearest_facts():
    assert arch.by_name("gfx999").table == "gfx950"
    assert arch.by_name("gfx90a").table == "gfx942"
    assert arch.by_name("sm_100").table == "sm_90"
    assert arch.by_name("gfx999").name == "gfx999"
    assert arch.by_name("gfx999") is arch.by_name("gfx999")


@pytest.mark.parametrize("name", ["", "gfx", "MI9000", "navi", "sm_x"])
def test_no_gpu_by_that_name(name):
    with pytest.raises(ValueError, match="arch must be a name like gfx942"):
        arch.by_name(name)


def test_override(monkeypatch):
    monkeypatch.setenv("TRITONATTN_ARCH", "MI308X")
    assert arch.detect("cpu").compute_units == 80


def test_cpu_is_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITONATTN_ARCH", raising=False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert arch.detect("cpu") is arch.INTERPRETER
    assert arch.detect(torch.device("cpu")).simulated


def test_other_devices_are_refused():
    with pytest.raises(ValueError, match="device must be cpu or cuda"):
        arch.detect("meta")


def test_import_needs_no_triton_and_no_device():
    code = (
        "import sys, tritonattn.tuning.arch, tritonattn.tuning.table as t;"
        "t.lookup('merge', tritonattn.tuning.arch.by_name('gfx942'), dtype='bf16', head_size=128);"
        "assert not {'torch', 'triton'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("registers, waves", [(64, 8), (65, 7), (80, 6), (96, 5), (128, 4), (168, 3), (256, 2), (257, 1), (512, 1)])
def test_occupancy_steps(registers, waves):
    assert arch.by_name("gfx942").occupancy(registers, 0, 4) == waves


def test_occupancy_by_lds():
    assert arch.by_name("gfx942").occupancy(64, 32 * 1024, 4) == 2
    assert arch.by_name("gfx950").occupancy(64, 32 * 1024, 4) == 5
    assert arch.by_name("gfx942").occupancy(64, 96 * 1024, 4) == 0
