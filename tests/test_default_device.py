"""torch's default device is the caller's business: set to another one, every op, router and helper still works where its tensors are.

The default is "meta" here, so a factory call that leaves its device open shows up on any machine.
"""

from __future__ import annotations

from functools import wraps

import pytest
import torch

import tritonattn
from tests import cases, mla_cases
from tests.test_mla_router import Layer
from tritonattn import layouts, reference
from tritonattn.cli import main
from tritonattn.integrations.vllm import warm

LENS = [(1, 40), (20, 20), (0, 0), (9, 33), (2, 2)]


def elsewhere(function):
    @wraps(function)
    def call(*args, **kwargs):
        with torch.device("meta"):
            return function(*args, **kwargs)

    return call


@pytest.fixture(autouse=True)
def default_device(monkeypatch):
    """Of the package alone; what the test makes for it is made where it should be."""
    for name in tritonattn.__all__:
        if callable(getattr(tritonattn, name)) and not isinstance(getattr(tritonattn, name), type):
            monkeypatch.setattr(tritonattn, name, elsewhere(getattr(tritonattn, name)))
    for router in (tritonattn.Router, tritonattn.MlaRouter):
        for name in ("__init__", "plan", "run"):
            monkeypatch.setattr(router, name, elsewhere(getattr(router, name)))


@pytest.mark.parametrize("make", [
    lambda: cases.prefill([(9, 9), (0, 5), (3, 0)]), lambda: cases.extend(LENS, layout="preshuffled"), lambda: cases.extend(LENS, shared=True),
    lambda: cases.decode([(1, 40), (1, 0)], layout="preshuffled", options={"num_splits": 3}), lambda: mla_cases.decode([(1, 40), (1, 3)]),
    lambda: mla_cases.extend([(2, 40), (3, 3)]),
])  # fmt: skip
def test_attention(device, make):
    make().check(device)


def test_writes_gathers_and_merges(device):
    key, slots = torch.randn(20, 2, 64, device=device), torch.arange(20, device=device) + 16
    caches = elsewhere(layouts.allocate)("preshuffled", 3, 16, 2, 64, dtype=torch.float32, device=device)
    tritonattn.reshape_and_cache(key, key, *caches, slots)
    ints = [torch.tensor(values, dtype=torch.int32, device=device) for values in ([[1, 2]], [0], [20])]
    for got in tritonattn.gather_cache(*caches, *ints, kv_layout="preshuffled"):
        assert torch.equal(got, key)
    lse = torch.zeros(2, 20, device=device)
    torch.testing.assert_close(tritonattn.merge_attn_states(key, lse, key, lse), key)
    latent = torch.zeros(3, 16, 80, device=device)
    tritonattn.mla_cache_write(key[:, 0], key[:, 1, :16], latent, slots)
    row = tritonattn.mla_gather_cache(latent, *ints, kv_lora_rank=64)
    assert torch.equal(torch.cat(row, 1), torch.cat([key[:, 0], key[:, 1, :16]], 1))


@pytest.mark.parametrize(("options", "invariant"), [({}, False), ({"window_size": (20, 0), "k_descale": 0.5}, False), ({}, True)])
def test_routers(device, options, invariant):
    cases.Mixed(cases.Batch(LENS), options=options).check(device, batch_invariant=invariant)
    cases.Mixed(cases.Batch([(1, 40), (0, 0), (1, 7)]), shared=True).check(device, batch_invariant=invariant)


def test_router_of_mla(device):
    Layer([(20, 20), (1, 40), (3, 26)]).check(device)
    Layer([(1, 40), (1, 3)]).check(device)


def test_reference():
    heads, scale = {"heads": (4, 2)}, {"k_descale": 0.5, "v_descale": torch.tensor([0.25, 2.0])}
    modified = {"alibi_slopes": torch.rand(4), "sinks": torch.rand(4), "window_size": (5, 2)}
    uniform = cases.decode([(2, 40), (2, 5)], **heads)
    many = [
        cases.prefill([(9, 9), (0, 5), (3, 0)], options=modified, **heads), cases.extend(LENS, kv_dtype=torch.float8_e4m3fn, **heads, **scale),
        uniform, uniform.but(cu_seqlens_q=None, max_seqlen_q=2), mla_cases.decode([(1, 40), (1, 3)]), mla_cases.extend([(2, 40), (3, 3)]),
    ]  # fmt: skip
    for case in many:
        args = case.args
        if case.op.startswith("mla"):
            args = args | {"kv_cache": case.cache.clean, "block_table": case.cache.table}
        elif case.cache is not None:
            args = args | {"k_cache": case.cache.k, "v_cache": case.cache.v, "block_table": case.cache.table}
        out, lse = elsewhere(getattr(reference, case.op))(**args)
        assert out.device == lse.device == torch.device("cpu"), case.op
    elsewhere(reference.merge_attn_states)(out, lse, out, lse)


@elsewhere
def test_commands_and_what_vllm_warms_up(device):
    assert main(["explain", "--arch", "gfx942", "--model", "gpt-oss-120b", "300", "1@4095x30", "512@8192"]) == 0
    made = warm.batch([1, 3], [5, 9], 16, device)
    assert made.query_start_loc_cpu.tolist() == [0, 1, 4] and made.seq_lens.tolist() == [5, 9]
