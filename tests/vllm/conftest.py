"""Tests of the plug-in with a real vLLM, in Triton's interpreter on the CPU. Without vLLM there is nothing to collect."""

import importlib.metadata
import os

INSTALLED = any(importlib.metadata.distributions(name="vllm"))
collect_ignore_glob = [] if INSTALLED else ["test_*.py"]
if INSTALLED:
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # "": without a driver vLLM would otherwise take Triton for missing
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

    import pytest
    import torch
    import vllm.platforms.interface as platforms
    import vllm.utils.torch_utils

    from tritonattn.integrations.vllm import register

    torch.cuda.get_device_capability = lambda *_: (9, 0)  # vLLM's own kernels ask
    platforms.UnspecifiedPlatform.fp8_dtype = classmethod(lambda _: torch.float8_e4m3fn)
    platforms.UnspecifiedPlatform.num_compute_units = classmethod(lambda *_: 8)
    vllm.utils.torch_utils.PIN_MEMORY = False
    register()

    @pytest.fixture(autouse=True)
    def _seed():
        torch.manual_seed(0)
