"""Which GPU and which stream a call runs on: that of its tensors, and the current one of the caller."""

from __future__ import annotations

import math
import threading

import pytest
import torch

import tritonattn
from tests import cases, mla_cases
from tests.test_mla_router import Layer
from tritonattn.tuning.arch import detect

pytestmark = pytest.mark.gpu
LENS = [(1, 300), (3, 70), (2, 2), (1, 40)]
several = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def attention_cases(dtype=torch.bfloat16):
    shape = {"dtype": dtype, "head_size": 64, "heads": (4, 2)}
    batch = cases.Batch(LENS, **shape)
    return [
        cases.prefill([(40, 40), (3, 90)], options={"causal": True}, **shape), cases.extend(batch, layout="preshuffled"),
        cases.decode(batch, layout="preshuffled"), cases.decode(batch, layout="nhd"), mla_cases.decode(LENS, dtype=dtype),
        mla_cases.extend(LENS, dtype=dtype),
    ]  # fmt: skip


@several
def test_calls_run_on_the_device_of_their_tensors():
    """With another one current, which stays current; the same bits as on that one."""
    here, there = torch.device("cuda", 0), torch.device("cuda", 1)
    torch.cuda.set_device(here)
    for case in attention_cases():
        want = case.check(here)
        got = case.check(there)
        assert torch.cuda.current_device() == 0
        for a, b in zip(got, want, strict=True):
            assert a.device == there and torch.equal(a.cpu(), b.cpu()), case.op


@several
def test_writes_gathers_and_merges_run_on_the_device_of_their_tensors():
    torch.cuda.set_device(0)
    there = torch.device("cuda", 1)
    key = torch.randn(20, 2, 64, device=there)
    k_cache, v_cache = (x.fill_(math.nan) for x in tritonattn.layouts.allocate("preshuffled", 3, 16, 2, 64, dtype=torch.float32, device=there))
    slots = torch.arange(20, device=there) + 16
    tritonattn.reshape_and_cache(key, key, k_cache, v_cache, slots)
    ints = [torch.tensor(values, dtype=torch.int32, device=there) for values in ([[1, 2]], [0], [20])]
    for got in tritonattn.gather_cache(k_cache, v_cache, *ints, kv_layout="preshuffled"):
        assert got.device == there and torch.equal(got, key)
    lse = torch.zeros(2, 20, device=there)
    torch.testing.assert_close(tritonattn.merge_attn_states(key, lse, key, lse), key)
    latent = torch.full((3, 16, 80), math.nan, device=there)
    tritonattn.mla_cache_write(key[:, 0], key[:, 1, :16], latent, slots)
    assert torch.equal(latent.view(-1, 80)[slots], torch.cat([key[:, 0], key[:, 1, :16]], 1))
    assert torch.cuda.current_device() == 0


@several
def test_every_router_has_its_scratch_and_its_tables_where_it_is():
    torch.cuda.set_device(0)
    devices = [torch.device("cuda", i) for i in range(2)]
    case = cases.Mixed(cases.Batch([(1, 2000), (20, 90), (30, 30), (1, 9)], dtype=torch.bfloat16, head_size=64))
    routers = [case.router(device) for device in devices]
    results = [case.run(device, router) for device, router in zip(devices, routers, strict=True)]
    for device, router in zip(devices, routers, strict=True):
        held = [buffer for kept in router.scratch._buffers.values() for buffer in kept]
        assert held and all(buffer.device == device for buffer in held)
        assert router._arch == detect(device)
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(*results, strict=True))
    layer = Layer([(1, 40), (9, 30), (5, 5)])
    assert torch.equal(layer.check(devices[1])[0], layer.check(devices[0])[0])
    assert torch.cuda.current_device() == 0
    router = tritonattn.Router(4, 2, 64, dtype=torch.bfloat16, device="cuda")
    assert router.device == devices[0], "the current one when it was made"


def late_call(device, call, q):
    """The result of ``call(q)`` on a side stream that is still busy making q when the call is made."""
    side, late = torch.cuda.Stream(device), torch.full_like(q, math.nan)
    torch.cuda.synchronize(device)
    with torch.cuda.stream(side):
        torch.cuda._sleep(400_000_000)  # a fifth of a second
        late.copy_(q)
        result = call(late)
        busy = not side.query()
    side.synchronize()
    return busy, result


def test_calls_run_on_the_current_stream(device):
    for case in attention_cases():
        args = {name: cases.to(value, device) for name, value in case.args.items()}
        if case.cache is not None:
            names = ("kv_cache",) if case.op.startswith("mla") else ("k_cache", "v_cache")
            dirty = case.cache.poisoned("nan")
            dirty = (dirty,) if len(names) == 1 else dirty[:2]
            args |= {name: x.to(device) for name, x in zip(names, dirty, strict=True)}
            args["block_table"] = (case.cache.table if len(names) == 1 else case.cache.hidden_table).to(device)
        q, op = args.pop("q"), getattr(tritonattn, case.op)

        def call(q, op=op, args=args):
            return op(q, **args, return_lse=True)

        want = call(q)
        busy, got = late_call(device, call, q)
        assert all(torch.equal(a[: case.rows], b[: case.rows]) for a, b in zip((got[0], got[1].T), (want[0], want[1].T), strict=True)), case.op
        assert busy or case.op == "mla_extend", "nothing waits for the stream but the caller's projection"


def test_a_router_runs_on_the_current_stream(device):
    case = cases.Mixed(cases.Batch([(1, 2000), (20, 90), (30, 30), (1, 9)], dtype=torch.bfloat16, head_size=64))
    router, args, table = case.router(device), case.arguments(device), case.cache.hidden_table.to(device)
    q, rows = args.pop("q"), case.batch.tokens

    def call(q):
        return router.run(router.plan(case.batch.query_lens, case.batch.seq_lens, table), q, **args, return_lse=True)

    want = call(q)
    busy, got = late_call(device, call, q)
    assert torch.equal(got[0][:rows], want[0][:rows]) and torch.equal(got[1][:, :rows], want[1][:, :rows])
    assert busy, "neither plan nor run waits"


def test_threads_with_streams_of_their_own(device):
    """The same bits from four threads at once as from one; on as many devices as there are."""
    many = attention_cases()
    want = [[x.cpu() for x in case.run(device)] for case in many]
    problems = []

    def work(number):
        own = torch.device("cuda", number % torch.cuda.device_count())
        try:
            with torch.cuda.device(own), torch.cuda.stream(torch.cuda.Stream(own)):
                for turn in range(10):
                    at = (number + turn) % len(many)
                    got = many[at].run(own)
                    if not all(torch.equal(a.cpu(), b) for a, b in zip(got, want[at], strict=True)):
                        problems.append(f"{many[at].op} in thread {number}")
        except Exception as error:
            problems.append(repr(error))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
