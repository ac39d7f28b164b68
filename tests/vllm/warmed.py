"""``python warmed.py mha|mla``: how many kernels the first step of a layer compiles for gfx942, and how many all kinds of later steps do."""

import os
import sys

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ.pop("TRITON_INTERPRET", None)

import torch
import vllm.platforms.interface as platforms
import vllm.utils.torch_utils
from pytest import MonkeyPatch

import tritonattn.integrations.vllm

platforms.UnspecifiedPlatform.fp8_dtype = classmethod(lambda _: torch.float8_e4m3fnuz)
platforms.UnspecifiedPlatform.num_compute_units = classmethod(lambda *_: 8)
vllm.utils.torch_utils.PIN_MEMORY = False
tritonattn.integrations.vllm.register()

from harness import Layer, v2_order  # noqa: E402
from test_mla import Mla, run  # noqa: E402

from tritonattn.tuning.codegen import capture  # noqa: E402
from tritonattn.warmup import Compilations  # noqa: E402

LATER = [[(1, 33)], [(1, 250)] * 2, [(1, 33), (20, 50), (20, 20)], [(64, 64)], [(64, 200)], [(200, 200)], [(1, 1), (1, 16)], [(7, 7)]]
with capture("gfx942"), MonkeyPatch.context() as patch:
    if sys.argv[1] == "mha":
        layer = Layer(dtype=torch.bfloat16, head_size=128, blocks=512)

        def step(requests):
            layer.step(v2_order(requests))
    else:
        layer = Mla(patch)

        def step(requests):
            run(layer, v2_order(requests))

    with Compilations() as first:
        step([(5, 5), (1, 20)])
    with Compilations() as later:
        for requests in LATER:
            step(requests)

print("first", len(first.new) + len(first.found))
print("later", len(later.new) + len(later.found), *later.new, *later.found)
