"""``python simulated.py ARCH``: mixed batches through the plug-in as machine code of ARCH. Prints the largest errors."""

import os
import sys

arch = sys.argv[1]
os.environ |= {"TRITONATTN_SIM": arch, "CUDA_VISIBLE_DEVICES": "", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ.pop("TRITON_INTERPRET", None)

import torch  # noqa: E402
import vllm.platforms.interface as platforms  # noqa: E402
import vllm.utils.torch_utils  # noqa: E402
from pytest import MonkeyPatch  # noqa: E402

import tritonattn.integrations.vllm  # noqa: E402

platforms.UnspecifiedPlatform.fp8_dtype = classmethod(lambda _: torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn)
platforms.UnspecifiedPlatform.num_compute_units = classmethod(lambda *_: 8)
vllm.utils.torch_utils.PIN_MEMORY = False
tritonattn.integrations.vllm.register()

from harness import Layer, v2_order  # noqa: E402
from test_mla import Mla, run  # noqa: E402

torch.manual_seed(0)
for kv_cache_dtype in ("auto", "fp8"):
    layer = Layer(dtype=torch.bfloat16, kv_cache_dtype=kv_cache_dtype, head_size=128)
    out, expected = layer.step(v2_order([(1, 33), (20, 50), (3, 20), (20, 20)]))
    print(kv_cache_dtype, layer.impl.kv_layout, float((out.double() - expected).abs().max()))
    out, expected = layer.step(v2_order([(1, 33), (20, 50), (1, 200), (20, 20)]), output_scale=torch.tensor(1 / 128))
    most = torch.finfo(out.dtype).max / 128
    print(f"{kv_cache_dtype}-8bit", layer.impl.kv_layout, float((out.double() / 128 - expected.clamp(-most, most)).abs().max()))

with MonkeyPatch.context() as patch:
    out, expected, _ = run(Mla(patch), [(1, 33), (20, 50), (3, 3)])
    print("mla", "latent", float((out.double() - expected).abs().max()))
