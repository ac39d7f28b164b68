"""Calls that are repeated from a recording: same results, from the pointers at hand, and nothing taken that was refused before."""

import os
import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from triton import knobs

import tritonattn
from tritonattn import layouts, mha
from tritonattn.bench.ahead import compile_only
from tritonattn.paths import cache, combine, launch, replay
from tritonattn.simulator import simulated
from tritonattn.simulator.device import launches_go_to
from tritonattn.tuning.arch import assume, detect
from tritonattn.tuning.table import pin, rows

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter repeats nothing")
ON_GPU = torch.cuda.is_available() and "TRITONATTN_SIM" not in os.environ
ARCH = os.environ.get("TRITONATTN_SIM", "gfx942")
DEVICE = "cuda" if ON_GPU else "cpu"


@pytest.fixture(autouse=True)
def somewhere():
    """The GPU where there is one, else a simulated one, whose tensors are the CPU's."""
    with torch.device(DEVICE), nullcontext() if ON_GPU else simulated(ARCH):
        yield


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape).to(dtype)


def paged(batch, seq_len, layout):
    pages = -(-seq_len // 16)
    k_cache, v_cache = layouts.allocate(layout, batch * pages + 1, 16, 2, 64, dtype=torch.bfloat16, device=DEVICE)
    table = torch.randperm(batch * pages).int().view(batch, pages)
    return {"k_cache": k_cache.normal_(), "v_cache": v_cache.normal_(), "block_table": table}


def decode(batch=2, seq_len=40, layout="nhd", tokens=None, **options):
    lens = torch.randint(1, seq_len + 1, (batch,)).int()
    return "decode_attention", {
        "q": normal(tokens or batch, 4, 64), **paged(batch, seq_len, layout), "seqused_k": lens, "max_seqlen_k": seq_len,
        "kv_layout": layout, **options,
    }  # fmt: skip


def latent(batch=2, seq_len=48, **options):
    pages = -(-seq_len // 16)
    return "mla_decode", {
        "q": normal(batch, 3, 80), "kv_cache": normal(batch * pages + 1, 16, 80), "block_table": torch.randperm(batch * pages).int().view(batch, pages),
        "seqused_k": torch.randint(1, seq_len + 1, (batch,)).int(), "max_seqlen_k": seq_len, "softmax_scale": 0.1, "kv_lora_rank": 64, **options,
    }  # fmt: skip


def halves(**options):
    name, args = latent(**options)
    q = args["q"]
    return name, args | {"q": (q[..., :64].contiguous(), q[..., 64:].contiguous())}


def merge(tokens=5, **options):
    parts = {f"out_{x}": normal(tokens, 4, 64) for x in "ab"} | {f"lse_{x}": torch.randn(4, tokens) for x in "ab"}
    return "merge_attn_states", parts | options


def write(layout="preshuffled", dtype=torch.bfloat16, slots=5):
    k_cache, v_cache = (x.zero_() for x in layouts.allocate(layout, 3, 16, 2, 64, dtype=dtype, device=DEVICE))
    key, value = normal(slots, 2, 64), normal(slots, 2, 64)
    return "reshape_and_cache", {
        "key": key, "value": value, "k_cache": k_cache, "v_cache": v_cache, "slot_mapping": torch.randperm(48)[:slots].int(), "kv_layout": layout,
    }  # fmt: skip


def in_one(make):
    """With the caches of keys and values as parts of one tensor, as vLLM has them."""

    def call():
        name, args = make()
        both = torch.cat([args["k_cache"].view(torch.uint8), args["v_cache"].view(torch.uint8)], -1).view(args["k_cache"].dtype)
        k_cache, v_cache = both.chunk(2, -1)
        return name, args | {"k_cache": k_cache, "v_cache": v_cache}

    return call


def out(make, *shape):
    return lambda: (lambda name, args: (name, args | {"out": torch.full(shape, 9.0, dtype=torch.bfloat16)}))(*make())


FP8 = torch.float8_e4m3fnuz if ARCH == "gfx942" and not ON_GPU else torch.float8_e4m3fn
CALLS = {
    "decode": decode,
    "decode preshuffled": lambda: decode(layout="preshuffled"),
    "decode in parts": lambda: decode(num_splits=3, return_lse=True),
    "decode into out": out(lambda: decode(num_splits=2), 2, 4, 64),
    "decode with padding": lambda: decode(tokens=4, cu_seqlens_q=torch.tensor([0, 1, 2]).int()),
    "decode with sinks": lambda: decode(sinks=torch.nn.Parameter(torch.randn(4), requires_grad=False), window_size=(9, 0), softcap=5.0),
    "decode with descales": lambda: decode(k_descale=torch.rand(2) + 1, v_descale=torch.rand(1) + 1, softmax_scale=0.3),
    "mla": latent,
    "mla in parts": lambda: latent(num_splits=2, return_lse=True, cu_seqlens_q=torch.tensor([0, 1, 2]).int()),
    "mla of halves": halves,
    "merge": lambda: merge(return_lse=True),
    "write": write,
    "write fp8": lambda: write("nhd", FP8),
    "write in one": in_one(lambda: write("nhd")),
    "write fp8 in one": in_one(lambda: write("nhd", FP8)),
}


def tensors(result):
    return [x.float() for x in (result if isinstance(result, tuple) else (result,)) if x is not None]


def run(name, args):
    """What the call gives, and what it leaves in the caches."""
    result = getattr(tritonattn, name)(**args)
    return [*tensors(result), *(args[key].float().clone() for key in ("k_cache", "v_cache") if key in args)]


def counted(monkeypatch):
    """A list that grows with each recording."""
    seen = []
    start = replay.Recording.__init__
    monkeypatch.setattr(replay.Recording, "__init__", lambda self, given: (seen.append(self), start(self, given))[1])
    return seen


@pytest.mark.parametrize("make", CALLS.values(), ids=CALLS)
def test_a_repeat_gives_what_the_call_gives(make, monkeypatch):
    recordings = counted(monkeypatch)
    run(*make())
    name, args = make()
    copies = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in args.items()}
    repeated = run(name, args)
    assert len(recordings) <= 1 and all(recording.complete for recording in recordings)
    monkeypatch.setattr(replay, "NEVER", True)
    for got, want in zip(repeated, run(name, copies), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("change", [{"max_seqlen_q": 1.0}, {"num_splits": False}, {"causal": 1}, {"window_size": (9.0, 0)}, {"softcap": False}], ids=str)
def test_an_equal_number_of_another_type_is_refused(change):
    name, args = decode(max_seqlen_q=1, num_splits=0, causal=True, window_size=(9, 0), softcap=0.0)
    for _ in range(2):
        run(name, args)
    with pytest.raises(TypeError, match=next(iter(change))):
        run(name, args | change)


def spoiled(value):
    """The value changed in one thing at a time."""
    if isinstance(value, torch.Tensor):
        yield None
        yield value.tolist()
        yield value.to(torch.float64)
        yield value.to("meta")
        yield value[None]
        yield torch.cat([value, value], -1)[..., ::2]
        for axis in range(value.ndim):
            yield value.narrow(axis, 0, value.shape[axis] - 1)
    elif isinstance(value, bool | str):
        yield from (2, None)
    elif isinstance(value, int):
        yield from (-7, 0.5, str(value), torch.tensor(value))
    elif isinstance(value, tuple):
        yield from (value[:1], value[0])


def outcome(call, args):
    try:
        call(**args)
    except Exception as error:  # whatever it is
        return type(error), str(error)
    return None


def decodes_of_a_router():
    cached = paged(3, 48, "nhd")
    router = tritonattn.Router(4, 2, 64, dtype=torch.bfloat16, device=DEVICE, kv_layout="nhd", block_size=16)
    plan = router.plan((1, 1, 1), (40, 9, 2), cached.pop("block_table"))
    new = {"q": normal(3, 4, 64), "k": normal(3, 2, 64), "v": normal(3, 2, 64), "out": normal(3, 4, 64)}
    return lambda **args: router.run(plan, **args), {**new, **cached, "sinks": torch.zeros(4), "k_descale": torch.ones(2)}


@pytest.mark.parametrize("make", [
    lambda: decode(cu_seqlens_q=torch.tensor([0, 1, 2]).int(), max_seqlen_q=1, sinks=torch.zeros(4), alibi_slopes=torch.zeros(4),
                   k_descale=torch.ones(2), num_splits=1, causal=True, window_size=(9, 0), out=normal(2, 4, 64)),
    lambda: decode(layout="preshuffled"), lambda: latent(kv_descale=torch.ones(1), out=normal(2, 3, 64)), halves, merge, write,
    decodes_of_a_router,
], ids=["decode", "decode preshuffled", "mla", "mla of halves", "merge", "write", "router"])  # fmt: skip
def test_what_was_taken_once_and_is_spoiled_is_refused_as_ever(make, monkeypatch):
    call, args = make()
    call = getattr(tritonattn, call) if isinstance(call, str) else call
    sound, refused = None, 0
    for name, value in args.items():
        for change in spoiled(value):
            monkeypatch.setattr(replay, "NEVER", True)
            with nullcontext() if ON_GPU else launches_go_to(lambda *launch: None):
                want = outcome(call, args | {name: change})
                monkeypatch.setattr(replay, "NEVER", False)
                assert outcome(call, args) is sound
                assert outcome(call, args | {name: change}) == want, (name, change)
            refused += want is not None
    assert refused > 10


def test_one_tensor_given_twice_and_then_two():
    name, args = merge(tokens=7)  # which nothing else here has, so that this is the call recorded
    run(name, args | {"out_b": args["out_a"], "lse_b": args["lse_a"]})
    one = run(name, args | {"out_b": args["out_a"], "lse_b": args["lse_a"]})
    torch.testing.assert_close(one[0], args["out_a"].float(), rtol=1e-2, atol=1e-2)
    weight = torch.sigmoid(args["lse_a"] - args["lse_b"]).T[..., None]
    want = weight * args["out_a"] + (1 - weight) * args["out_b"]
    for _ in range(2):
        torch.testing.assert_close(run(name, args)[0], want.float(), rtol=1e-2, atol=1e-2)


def test_caches_that_are_one_are_refused_after_two_that_were_not():
    new, slots = normal(3, 2, 64), torch.arange(3)
    k_cache, v_cache = normal(2, 16, 2, 64), normal(2, 16, 2, 64)
    for _ in range(2):
        tritonattn.reshape_and_cache(new, new, k_cache, v_cache, slots, kv_layout="nhd")
    with pytest.raises(ValueError, match="k_cache and v_cache must share no memory"):
        tritonattn.reshape_and_cache(new, new, k_cache, k_cache, slots, kv_layout="nhd")


def test_alignment_and_strides_are_part_of_what_a_call_is(monkeypatch):
    recordings = counted(monkeypatch)
    name, args = decode()
    want = run(name, args)
    wide = normal(2, 5, 72)
    q = wide[:, 1:, 1:65]
    q.copy_(args["q"])
    for _ in range(2):
        torch.testing.assert_close(run(name, args | {"q": q})[0], want[0], rtol=2e-2, atol=2e-2)
    odd = torch.empty(args["q"].numel() + 1, dtype=torch.bfloat16)[1:].view(args["q"].shape)
    odd.copy_(args["q"])
    torch.testing.assert_close(run(name, args | {"q": odd})[0], want[0], rtol=2e-2, atol=2e-2)
    assert len(recordings) >= 2


@pytest.mark.parametrize("make", [lambda batch: decode(batch, 700), lambda batch: latent(batch, 700)], ids=["decode", "mla"])
def test_a_repeat_is_cut_by_the_lengths_that_it_finds(make, monkeypatch):
    """A batch of unlike lengths, which the device cuts: that launch is repeated too, and its lists are not those of the call before."""
    base = replace(detect(DEVICE), compute_units=2)
    recordings = counted(monkeypatch)
    with assume(pin(base, cut={**rows("cut", base)[-1].config, "cut_keys": 1})):
        name, args = make(5)
        for lens in ([700, 3, 20, 0, 9], [1, 5, 8, 690, 2], [300, 300, 310, 1, 290]):
            args["seqused_k"].copy_(torch.tensor(lens))
            found = run(name, args)
        assert len(recordings) == 1 and recordings[0].complete
        assert [launch[0].fn.__name__ for launch in recordings[0]._launches][::2] == ["cut", "combine"]
        monkeypatch.setattr(replay, "NEVER", True)
        for got, want in zip(found, run(name, args | {"num_splits": 1}), strict=True):
            torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_launch_hooks_see_every_launch():
    name, args = decode(num_splits=2)
    run(name, args)
    seen = []
    hook = lambda metadata: seen.append(metadata.get()["name"])  # noqa: E731
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        run(name, args)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    run(name, args)
    assert len(seen) == 2 and seen[1] == "combine"


def test_pre_run_hooks_see_every_launch(monkeypatch):
    name, args = merge()
    run(name, args)
    seen = []
    monkeypatch.setattr(combine.merge, "pre_run_hooks", [lambda *args, **kwargs: seen.append(kwargs["DV"])])
    for _ in range(2):
        run(name, args)
    assert seen == [64, 64]


@pytest.mark.parametrize("ahead", [launch.preparing, lambda: compile_only(1)], ids=["one by one", "in parallel"])
@pytest.mark.parametrize("known", [False, True])
def test_compiling_ahead_launches_nothing_and_leaves_nothing(known, ahead):
    name, args = write("hnd", slots=6 + known + 2 * (ahead is launch.preparing))  # not recorded elsewhere
    if known:
        run(name, args)
    else:
        cache.write.device_caches.clear()
    args["k_cache"].fill_(9.0)
    with ahead():
        run(name, args)
    assert (args["k_cache"] == 9.0).all()
    run(name, args)
    assert not (args["k_cache"] == 9.0).all()


def test_another_arch_is_another_call(monkeypatch):
    name, args = decode()
    run(name, args)
    recordings = counted(monkeypatch)
    with assume(replace(detect(torch.device(DEVICE)))):
        run(name, args)
    assert len(recordings) == 1


def test_a_tensor_from_nowhere_is_noticed():
    known = {}
    q, out = normal(2, 4, 64), torch.empty(2, 4, 64, dtype=torch.bfloat16)
    lse = torch.zeros(4, 2)

    def call():
        mha.run_merge(out, None, q, lse, q.clone(), lse)
        return out

    for _ in range(2):
        replay.repeat(known, (), (q, lse, out), call)
    assert [recording.complete for recording in known.values()] == [False]


def test_a_result_from_nowhere_is_noticed():
    known = {}
    q = normal(2, 4, 64)
    for _ in range(2):
        assert replay.repeat(known, (), (q,), lambda: q[:1]).shape == (1, 4, 64)
    assert [recording.complete for recording in known.values()] == [False]


def test_recordings_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(replay, "MOST_CALLS", 3)
    known = {}
    x = torch.zeros(1)
    for i in range(7):
        replay.repeat(known, (), (x, i), lambda: x)
    assert len(known) <= 3


def test_a_repeat_holds_no_tensor_of_the_call():
    import weakref

    name, args = decode(batch=3, num_splits=2)  # recorded here for the first time
    run(name, args)
    last = [weakref.ref(value) for value in args.values() if isinstance(value, torch.Tensor)]
    del args
    assert all(ref() is None for ref in last)


def test_what_a_repeat_costs():
    """Calls of this package's functions in a repeat: what it costs does not depend on the machine."""
    name, args = decode(num_splits=2)
    args["out"] = torch.empty(2, 4, 64, dtype=torch.bfloat16)
    for _ in range(2):
        run(name, args)
    count = 0

    def profile(frame, event, _):
        nonlocal count
        ours = os.sep + "tritonattn" + os.sep in frame.f_code.co_filename and "simulator" not in frame.f_code.co_filename + frame.f_code.co_name
        count += event == "call" and ours

    call = getattr(tritonattn, name)
    sys.setprofile(profile)
    try:
        call(**args)
    finally:
        sys.setprofile(None)
    assert count <= 12


# -- router ---------------------------------------------------------------------------------------------------


def step(router, query_lens, seq_lens, table):
    plan = router.plan(query_lens, seq_lens, table)
    tokens = sum(query_lens)
    return plan, (normal(tokens, 4, 64), normal(tokens, 2, 64), normal(tokens, 2, 64))


@pytest.mark.parametrize(("query_lens", "first", "second"), [
    ((1, 1, 1), (40, 9, 2), (7, 30, 48)), ((1, 5, 7), (40, 9, 7), (40, 9, 7)),
], ids=["decodes", "mixed"])  # fmt: skip
def test_layers_of_a_router(query_lens, first, second, monkeypatch):
    cached = paged(3, 48, "nhd")
    table = cached.pop("block_table")
    router = tritonattn.Router(4, 2, 64, dtype=torch.bfloat16, device=DEVICE, kv_layout="nhd", block_size=16, sinks=torch.randn(4))
    plan, new = step(router, query_lens, first, table)
    router.run(plan, *new, **cached, return_lse=True)
    if max(query_lens) == 1:
        plan, new = step(router, query_lens, second, table)
    recordings = counted(monkeypatch)
    new = tuple(x.clone() for x in new)
    got = router.run(plan, *new, **cached, return_lse=True)
    assert not recordings
    monkeypatch.setattr(replay, "NEVER", True)
    for x, y in zip(got, router.run(plan, *new, **cached, return_lse=True), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_layers_of_an_mla_router(monkeypatch):
    sizes = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
    router = tritonattn.MlaRouter(3, softmax_scale=0.1, dtype=torch.bfloat16, device=DEVICE, block_size=16, **sizes)
    down, up = normal(48, 80) / 7, normal(64, 32) / 8
    cache, table = normal(7, 16, 80), torch.randperm(6).int().view(2, 3)

    def layer(q):
        return router.run(plan, q, None, None, cache, absorb=lambda q: q @ down, up_project=None, up_project_v=lambda x: x @ up, return_lse=True)

    plan = router.plan((1, 1), (40, 9), table)
    layer(normal(2, 3, 48))
    plan = router.plan((1, 1), (7, 30), table)
    recordings = counted(monkeypatch)
    q = normal(2, 3, 48)
    got = layer(q)
    assert not recordings
    monkeypatch.setattr(replay, "NEVER", True)
    for x, y in zip(got, layer(q), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)
