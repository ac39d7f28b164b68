"""TRITONATTN_LOG, in processes of their own: the variable is read once."""

import os
import subprocess
import sys

import pytest

CALL = """
import torch, tritonattn as ta
q = torch.randn(3, 2, 32)
cu = torch.tensor([0, 3], dtype=torch.int32)
kwargs = dict(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=3, max_seqlen_k=3)
ta.flash_attn_varlen_func(q, q, {v}, **kwargs)
"""


def run(mode: str, tmp_path, v: str = "q") -> subprocess.CompletedProcess:
    env = os.environ | {"TRITON_INTERPRET": "1", "TRITONATTN_LOG": mode}
    env.pop("TRITONATTN_SIM", None)
    env["PYTHONPATH"] = os.pathsep.join([os.getcwd(), env.get("PYTHONPATH", "")])
    return subprocess.run([sys.executable, "-c", CALL.format(v=v)], env=env, cwd=tmp_path, capture_output=True, text=True)


def test_call_prints_shapes_row_and_flags(tmp_path):
    text = run("call", tmp_path).stderr
    assert "flash_attn_varlen_func(<float32 [3, 2, 32] cpu>" in text and "max_seqlen_q=3" in text
    assert "attend grid (" in text and "from interpreter/prefill.json row" in text and "BLOCK_M=" in text


@pytest.mark.parametrize("v, reason", [("q[:, :, :31]", "ValueError"), ("q * float('nan')", "the result holds NaN")])
def test_dump_saves_the_arguments_of_a_failing_call(tmp_path, v, reason):
    import torch

    run("dump", tmp_path, v)
    saved = torch.load(tmp_path / "tritonattn-dump-0.pt")
    assert saved["op"] == "flash_attn_varlen_func" and saved["error"].startswith(reason)
    assert saved["args"][0].shape == (3, 2, 32) and saved["kwargs"]["max_seqlen_q"] == 3


def test_a_good_call_leaves_no_dump(tmp_path):
    assert run("dump", tmp_path).returncode == 0
    assert not list(tmp_path.iterdir())


def test_unknown_mode_is_refused(tmp_path):
    assert "TRITONATTN_LOG must be call, dump or call,dump, got 'all'" in run("all", tmp_path).stderr
