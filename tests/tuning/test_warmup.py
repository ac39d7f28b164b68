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


@pytest.mark.slow
@pytest.mark.parametrize("name, served", [("gfx942", "llama-3-8b"), ("sm_90", "llama-3-8b"), ("sm_90", "deepseek-r1")])
def test_nothing_compiles_after_a_warm_up(name, served, tmp_path):
    path = os.pathsep.join([str(HERE.parents[1]), *sys.path])
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": path}
    done = subprocess.run([sys.executable, str(HERE / "warm_process.py"), name, served], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert 5 < found["before"] < 120 and ("cut" in found["kernels"]) == (served == "deepseek-r1")
    assert found["after"] == []
    assert found["late"] == ["merge"] and "DV=32" in found["key"] and "out_a: *fp16 (divisibility 16" in found["key"]


def test_batches_reach_the_ends():
    deployment = warmup.Deployment(model("llama-3-8b"), max_model_len=1000, max_batch=64, decode_threshold=4)
    made = list(warmup.batches(deployment))
    assert ([1] * 64, [1000] * 64) in made and ([4] * 64, [1000] * 64) in made
    assert max(max(seq) for _, seq in made) == 1000
    assert any(len(set(query)) > 1 for query, _ in made), "mixed batches"


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"tensor_parallel": 3}, "tensor_parallel must divide 32 heads and 8 KV heads, got 3"),
        ({"max_batch": 0, "block_size": -1, "tensor_parallel": 0}, "block_size must be at least 1, got -1; max_batch must .*; tensor_parallel must divide"),
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


@pytest.mark.slow
def test_eight_processes_share_a_cache_folder(tmp_path):
    cache, meeting = tmp_path / "cache", tmp_path / "meeting"
    meeting.mkdir()
    path = os.pathsep.join([str(HERE.parents[1]), *sys.path])
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}

    def start(number, processes):
        command = [sys.executable, str(HERE / "share_process.py"), str(meeting), str(number), str(processes)]
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def result(process):
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, err
        return json.loads(out)

    at_once = [result(process) for process in [start(i, 8) for i in range(8)]]
    later = result(start(8, 9))
    assert all(one["sound"] for one in [*at_once, later])
    assert max(one["compiled"] for one in at_once) > 0
    assert {tuple(one["keys"]) for one in at_once} == {tuple(later["keys"])}
    assert later["compiled"] == 0 and later["found"] >= 4
    groups = list(cache.rglob("__grp__*.json"))
    assert len(groups) >= 4
    for group in groups:
        assert all(Path(file).stat().st_size for file in json.loads(group.read_text())["child_paths"].values())
    assert not [file for file in cache.rglob("*") if "tmp" in file.name], "nothing half-written is left"


def test_no_kernel_is_tuned_while_it_serves():
    """Triton's own autotuner times candidates at the first call with a new shape: in a request, or in a graph capture."""
    package = Path(warmup.__file__).parent
    kernels = [path for path in package.rglob("*.py") if "@triton.jit" in path.read_text()]
    assert len(kernels) > 8
    assert not [path.name for path in kernels if "autotune(" in path.read_text() or "do_bench" in path.read_text()]
