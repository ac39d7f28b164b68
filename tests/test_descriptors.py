"""Keys and values by the bulk copies of NVIDIA GPUs: what follows a sequence must not get in."""

import os

import pytest

from tests import cases
from tritonattn.tuning import table
from tritonattn.tuning.arch import assume, detect

CONFIG = {"BLOCK_M": 32, "BLOCK_N": 16, "NUM_STAGES": 2, "num_warps": 4, "num_stages": 2, "DESCRIPTORS": True}
pytestmark = pytest.mark.skipif("TRITONATTN_SIM" in os.environ, reason="no table row of an AMD GPU has them")


@pytest.fixture(autouse=True)
def descriptors(device):
    base = detect(device)
    config = CONFIG if base.name == "interpreter" else {**CONFIG, "BLOCK_M": 128, "BLOCK_N": 64}
    with assume(table.pin(base, prefill=config)):
        yield


@pytest.mark.parametrize("head_size,v_head_size", [(64, 64), (96, 96), (80, 80), (192, 128), (48, 48)])
def test_prefill(device, head_size, v_head_size):
    lens = [(37, 37), (1, 1), (0, 0), (20, 33)]
    cases.prefill(lens, heads=(4, 2), head_size=head_size, v_head_size=v_head_size, options={"causal": True}).check(device)


@pytest.mark.parametrize("layout", ["nhd", "preshuffled"])
def test_extend(device, layout):
    cases.extend([(5, 37), (3, 3), (20, 50)], layout=layout, head_size=64).check(device, chunk_tokens=32)
