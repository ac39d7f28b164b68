"""Which facts belong to a GPU: by instruction set and counts, without touching a device until asked."""

import subprocess
import sys

import pytest
import torch

from tritonattn.cli import main
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


def test_an_unknown_gpu_takes_the_nearest_facts():
    assert arch.nearest("gfx999").table == "gfx950"
    assert arch.nearest("gfx90a").table == "gfx942"
    assert arch.nearest("sm_100").table == "sm_90"
    assert arch.nearest("gfx999").name == "gfx999"
    assert arch.nearest("gfx999") is arch.nearest("gfx999")
    assert arch.nearest("MI308X") is arch.by_name("MI308X")
    assert arch._match("gfx999", 304, 192e9).compute_units == 304


@pytest.mark.parametrize("name", ["", "gfx", "MI9000", "navi", "sm_x"])
def test_what_a_gpu_never_calls_itself(name):
    with pytest.raises(ValueError, match="arch must be one of gfx942, "):
        arch.nearest(name)


@pytest.mark.parametrize("name", ["", "gfx", "MI9000", "navi", "sm_x", "gfx1", "gfx999", "sm_100"])
def test_what_a_user_names_must_be_known(name, monkeypatch, capsys):
    known = "must be one of gfx942, gfx950, sm_90, interpreter, MI300X, MI325X, MI300A, MI308X, MI355X, MI350X, H200, H100, CPU, got"
    with pytest.raises(ValueError, match=f"arch {known} {name!r}"):
        arch.by_name(name)
    if name:
        assert main(["explain", "--arch", name, "300"]) == 2
        assert main(["check", "--arch", f"gfx942,{name}"]) == 2
        assert main(["warmup", "--arch", name, "--model", "llama-3-8b"]) == 2
        assert main(["tune", "--arch", name, "--offline", "--dry-run"]) == 2
        assert capsys.readouterr().err.count(known) == 4
        monkeypatch.setenv("TRITONATTN_ARCH", name)
        with pytest.raises(ValueError, match=f"TRITONATTN_ARCH {known} {name!r}"):
            arch.detect("cpu")


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
