"""One suite for every device: the GPU that torch sees, else Triton's interpreter on the CPU (or a simulated GPU, if one is set up)."""

import os

import torch

ON_GPU = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
if not ON_GPU and "TRITONATTN_SIM" not in os.environ:
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

import hypothesis  # noqa: E402
import pytest  # noqa: E402

hypothesis.settings.register_profile(
    "tests",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=60 if ON_GPU else 6,  # an interpreted kernel takes a second
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("tests")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if ON_GPU else torch.device("cpu")


def pytest_collection_modifyitems(items):
    for item in items:
        if "gpu" in item.keywords and not ON_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
