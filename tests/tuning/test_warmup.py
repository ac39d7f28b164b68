"""After a warm-up nothing compiles while serving, and what does compile is reported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tritonattn import warmup
from tritonattn.tuning.models import MODELS, model

HERE = Path(__file__).parent


def test_nothing_compiles_after_a_warm_up(tmp_path):
    path = os.pathsep.join([str(HERE.parents[1]), *sys.path])
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": path}
    done = subprocess.run([sys.executable, str(HERE / "warm_process.py"), "gfx942"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert 5 < found["before"] < 60
    assert found["after"] == 0
    assert found["late"] == ["merge"] and "DV=32" in found["key"]


def test_batches_reach_the_ends():
    deployment = warmup.Deployment(model("llama-3-8b"), max_model_len=1000, max_batch=64, decode_threshold=4)
    made = list(warmup.batches(deployment))
    assert ([1] * 64, [1000] * 64) in made and ([4] * 64, [1000] * 64) in made
    assert max(max(seq) for _, seq in made) == 1000
    assert any(len(set(query)) > 1 for query, _ in made), "mixed batches"


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"tensor_parallel": 3}, "tensor_parallel must divide 32 heads, got 3"),
        ({"dtype": "int8"}, "dtype must be bf16 or fp16, got 'int8'"),
        ({"kv_dtype": "int4"}, "kv_dtype must be empty"),
    ],
)
def test_bad_deployments_are_named(changes, reason):
    with pytest.raises(ValueError, match=reason):
        warmup.Deployment(model("llama-3-8b"), **changes)


def test_unknown_model_lists_the_known():
    with pytest.raises(ValueError, match="llama-3-8b, llama-3-70b"):
        model("gpt-5")


def test_kv_heads_are_replicated():
    assert warmup.Deployment(MODELS["qwen3-235b"], tensor_parallel=8).heads == (8, 1)
