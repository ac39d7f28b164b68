"""Fixtures of the simulator's tests."""

import pytest


@pytest.fixture
def little_lds(monkeypatch):
    """Simulated GPUs with 16 bytes of LDS. Triton remembers what it was told about a device, so that is forgotten before and after."""
    from triton.compiler.compiler import max_shared_mem

    from tritonattn.simulator.device import DEVICES

    for facts in DEVICES.values():
        monkeypatch.setitem(facts, "max_shared_mem", 16)
    max_shared_mem.cache_clear()
    yield
    max_shared_mem.cache_clear()
