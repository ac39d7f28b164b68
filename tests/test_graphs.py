"""Decode batches in a graph: captured once, replayed over other lengths, other blocks and padding.

On a GPU it is a CUDA (HIP) graph. Elsewhere a `Recording` stands in: it keeps every launch and every torch operation of a call with the
addresses and host values of that moment, and does the same again, as a graph does.
"""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.compiler import CompiledKernel

import tritonattn
from tests import cases, mla_cases
from tests.test_mla_router import HEADS, NOPE, ROPE, SCALE, Layer, V
from tritonattn import batch
from tritonattn.paths import cache as cache_moves
from tritonattn.paths import launch
from tritonattn.tuning.table import Row
from tritonattn.warmup import Compilations

LONGEST = 4096 if torch.cuda.is_available() else 700
PADDING = (0, 0)
ONE_TOKEN = [
    [PADDING] * 4,
    [(1, 2)] * 4,
    [(1, 300), (1, 20), (1, 77), (1, 5)],
    [(1, 17), (1, LONGEST), PADDING, (1, 33)],
    [(1, LONGEST), (1, 2), PADDING, PADDING],
]
SPECULATED = [
    [PADDING] * 4,
    [(3, 4), (1, 2), (2, 3), (3, 16)],
    [(3, 300), (1, 9), PADDING, (2, 77)],
    [(3, LONGEST), (3, 50), (3, 33), (3, 20)],
    [(1, 40), PADDING, PADDING, (2, LONGEST)],
]


class Recording(TorchDispatchMode):
    """What a call did, to do again. A read of the device, which no graph can hold, is an error."""

    def __init__(self):
        super().__init__()
        self.steps, self.launching = [], False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not self.launching:
            assert func is not torch.ops.aten._local_scalar_dense.default, "a graph cannot read the device"
            self.steps.append(partial(self.again, func, args, kwargs or {}, result))
        return result

    @staticmethod
    def again(func, args, kwargs, result):
        for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
            if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                old.copy_(new)

    def launch(self, *args):
        self.launching = True
        self.original(*args)
        self.launching = False
        self.steps.append(partial(self.original, *args))

    def __enter__(self):
        self.original, launch.run = launch.run, self.launch
        return super().__enter__()

    def __exit__(self, *error):
        launch.run = self.original
        return super().__exit__(*error)

    def replay(self):
        for step in self.steps:
            step()


def capture(call, device):
    if device.type != "cuda":
        with Recording() as graph:
            call()
        return graph
    call()  # compiles, and gives scratch its place
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def settle(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def poison_free_memory(device):
    """NaN in what torch has freed and not given back, as another user of the memory would leave."""
    if device.type == "cuda":
        free = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        blocks = [torch.full((1 << shift,), math.nan, device=device) for shift in range(8, 24) for _ in range(4) if 4 << shift < free]
        torch.cuda.synchronize()
        del blocks


def check_padding(rows):
    assert ((rows == cases.MARK) | (rows == 0)).all(), "padding must stay or be 0"


class Decoding:
    """A place for every tensor of a decode step; `load` fills them with one of the `batches`, and plans it."""

    def __init__(self, device, batches, *, router=None, shared=False, layout="preshuffled", **shape):
        self.device, kv = device, {name: shape.pop(name) for name in ("kv_dtype", "options") if name in shape}
        threshold = max(max(query, 1) for lens in batches for query, _ in lens)
        self.batches = [
            cases.Mixed(cases.Batch(lens, seed=seed, **shape), threshold, layout, shared=shared, **kv) for seed, lens in enumerate(batches)
        ]
        first = self.batches[0]
        self.router = router or first.router(device, block_size=16)
        rows, (q_heads, kv_heads), size = len(batches[0]) * threshold, first.batch.heads, first.batch.head_size
        new = partial(torch.full, fill_value=math.nan, dtype=first.batch.dtype, device=device)
        self.q, self.k, self.v = (new((rows, heads, size)) for heads in (q_heads, kv_heads, kv_heads))
        self.out = new((rows, q_heads, size))
        blocks = max(len(case.cache.k) for case in self.batches)
        self.caches = tuple(
            torch.empty(blocks, *x.shape[1:], dtype=x.dtype, device=device) for x in (first.cache.k, first.cache.v)
        )
        self.table = torch.zeros(len(batches[0]), max(case.cache.table.shape[1] for case in self.batches), dtype=torch.int32, device=device)
        if shared:
            self.k = self.v = None

    def load(self, case):
        args, tokens = case.arguments(self.device), case.batch.tokens
        for cache, name in zip(self.caches, ("k_cache", "v_cache"), strict=True):
            cases.fill(cache, "nan")
            cache[: len(args[name])] = args[name]
        self.q.fill_(math.nan)
        self.q[:tokens] = args["q"][:tokens]
        self.out.fill_(cases.MARK)
        self.table.fill_(cases.WILD_BLOCK)
        self.table[:, : case.cache.table.shape[1]] = case.cache.hidden_table.to(self.device)
        return self.router.plan(case.batch.query_lens, case.batch.seq_lens, self.table)

    def capture(self, at=0):
        plan = self.load(self.batches[at])
        return capture(lambda: self.router.run(plan, self.q, self.k, self.v, *self.caches, out=self.out), self.device)

    def check(self, graph, case):
        self.load(case)
        graph.replay()
        settle(self.device)
        tokens = case.batch.tokens
        if tokens:
            case.oracle().check(self.out, None, slice(0, tokens))
        check_padding(self.out[tokens:])

    def addresses(self):
        return [buffer.data_ptr() for kept in self.router.scratch._buffers.values() for buffer in kept]


@pytest.mark.parametrize("batches", [ONE_TOKEN, SPECULATED], ids=["one token", "speculated"])
@pytest.mark.parametrize("layout", ["nhd", "preshuffled"])
@pytest.mark.parametrize("at", [0, 3], ids=["captured empty", "captured at the longest"])
def test_replays_follow_the_plan(device, batches, layout, at):
    """Lengths from one cached token to the maximum, padding, and blocks of other ids each time; scratch stays where it was."""
    shape = {"dtype": torch.bfloat16, "head_size": 128, "heads": (16, 2)} if device.type == "cuda" else {}
    step = Decoding(device, batches, layout=layout, **shape)
    graph = step.capture(at)
    addresses = step.addresses()
    for case in (*step.batches, *step.batches[::-1]) if device.type == "cuda" else step.batches:
        step.check(graph, case)
    assert step.addresses() == addresses


@pytest.mark.parametrize("layout", ["nhd", "preshuffled"])
def test_replays_over_an_fp8_cache_read_the_descales_again(device, layout):
    for kv_dtype in cases.fp8_dtypes(device):
        descales = {"k_descale": torch.tensor([0.5]), "v_descale": torch.tensor([2.0])}
        shape = {"dtype": torch.bfloat16, "head_size": 64, "heads": (4, 2), "kv_dtype": kv_dtype}
        step = Decoding(device, ONE_TOKEN[2:4], layout=layout, shared=True, options=descales, **shape)
        graph = step.capture()
        for case in step.batches:
            step.check(graph, case)
        before = step.out[: case.batch.tokens].float().clone()
        step.router.params.v_descale.fill_(4.0)
        graph.replay()
        settle(device)
        torch.testing.assert_close(step.out[: case.batch.tokens].float(), 2 * before)


def test_a_graph_outlives_larger_batches(device):
    """Captured at one request, then at eight; larger and longer eager batches of the same router; freed memory full of NaN."""
    small = Decoding(device, [[(1, 40)], [(1, LONGEST)]])
    one = small.capture()
    addresses = small.addresses()
    large = Decoding(device, [[(1, 90 + i) for i in range(8)], [(1, LONGEST)] * 2 + [(1, 3)] * 6], router=small.router)
    eight = large.capture()
    more = cases.Mixed(cases.Batch([(1, 50 + i) for i in range(24)] + [(40, 200), (70, 70)]))
    more.oracle().check(*more.run(device, small.router), slice(0, more.batch.tokens))
    del more
    poison_free_memory(device)
    for _ in range(2):
        small.check(one, small.batches[1])
        large.check(eight, large.batches[1])
        small.check(one, small.batches[0])
        large.check(eight, large.batches[0])
    assert set(addresses) <= set(small.addresses())


@pytest.mark.parametrize("batches", [ONE_TOKEN, SPECULATED], ids=["one token", "speculated"])
@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
def test_replays_of_mla(device, batches, fp8):
    dtype = torch.bfloat16 if fp8 else torch.float32
    kv = {"kv_dtype": cases.fp8_dtypes(device)[0], "kv_descale": 0.25, "rope_descale": 0.5} if fp8 else {}
    threshold = max(query for lens in batches for query, _ in lens)
    layers = [Layer(lens, dtype=dtype, seed=seed, threshold=threshold, **kv) for seed, lens in enumerate(batches)]
    router = layers[0].router(device)
    new, rows = partial(torch.full, fill_value=math.nan, dtype=dtype, device=device), len(batches[0]) * threshold
    q, out = new((rows, HEADS, NOPE + ROPE)), new((rows, HEADS, V))
    widest = max(layers, key=lambda layer: len(layer.cache.clean)).cache.clean
    cache = torch.empty_like(widest, device=device)
    table = torch.zeros(len(batches[0]), max(layer.cache.table.shape[1] for layer in layers), dtype=torch.int32, device=device)
    w_k, w_v = (w.to(device) for w in (layers[0].up_project.w_k, layers[0].up_project.w_v))

    def absorb(x):
        return torch.einsum("thd,hdl->thl", x[..., :NOPE].float(), w_k).to(dtype), x[..., NOPE:]

    functions = {
        "absorb": absorb, "up_project": None, "up_project_v": lambda x: torch.einsum("thl,hdl->thd", x.float(), w_v).to(dtype),
    }  # fmt: skip

    def load(layer):
        tokens, width = layer.batch.tokens, layer.cache.table.shape[1]
        cases.fill(cache, "nan")
        cache[: len(layer.cache.clean)] = layer.cache.poisoned("nan").to(device)
        q.zero_()  # a projection of NaN would be NaN: what is in the padding of q is the caller's
        q[:tokens] = layer.q[:tokens].to(device)
        table.fill_(cases.WILD_BLOCK)
        table[:, :width] = layer.cache.table.to(device)
        return router.plan(layer.batch.query_lens, layer.batch.seq_lens, table)

    plan = load(layers[0])
    graph = capture(lambda: router.run(plan, q, None, None, cache, out=out, **functions), device)
    for layer in layers:
        load(layer)
        out.fill_(cases.MARK)
        graph.replay()
        settle(device)
        tokens = layer.batch.tokens
        if tokens:
            torch.testing.assert_close(out[:tokens].cpu().double(), layer.exact()[0], rtol=0, atol=0.04 if fp8 else 2e-5)
        check_padding(out[tokens:])


def op_calls(device, lens, make, **shape):
    """One call of an op per batch, all over the same tensors: (load, call, check) of it."""
    many = [make(batch, seed=seed, **shape) for seed, batch in enumerate(lens)]
    paged = ("kv_cache",) if make is mla_cases.decode else ("k_cache", "v_cache")

    def tensors(case):
        cache = case.cache
        got = (cache.poisoned("nan"),) if len(paged) == 1 else cache.poisoned("nan")[:2]
        table = cache.table if len(paged) == 1 else cache.hidden_table
        return {**dict(zip(paged, got, strict=True)), "block_table": table, **{name: case.args[name] for name in ("q", "seqused_k", "cu_seqlens_q")}}

    held = {}
    for case in many:
        for name, tensor in tensors(case).items():
            shape_ = [max(a, b) for a, b in zip(tensor.shape, held[name].shape, strict=True)] if name in held else tensor.shape
            held[name] = torch.zeros(shape_, dtype=tensor.dtype, device=device)

    def load(case):
        for name, tensor in tensors(case).items():
            cases.fill(held[name], "nan") if name in paged or name == "q" else held[name].fill_(cases.WILD_BLOCK if name == "block_table" else 0)
            held[name][tuple(slice(0, n) for n in tensor.shape)] = tensor.to(device)

    return many, held, load


@pytest.mark.parametrize("make", [cases.decode, mla_cases.decode], ids=["decode_attention", "mla_decode"])
def test_replays_of_the_ops(device, make):
    """Captured for the maximum; the lengths, of sequences of none and of one key among them, are the device's."""
    lens = [[(2, LONGEST), (2, 20), (1, 1), (0, 0)], [(1, 1), (2, 2), (2, 50), (1, 3)], [(1, 0), (2, 300), (0, 9), (1, 16)], [(2, LONGEST)] * 2 + [(1, 7)] * 2]
    many, held, load = op_calls(device, lens, make)
    fixed = {name: value for name, value in many[0].args.items() if name not in held} | {"max_seqlen_k": LONGEST, "max_seqlen_q": 2}
    size = many[0].out_size if make is mla_cases.decode else many[0].cache.v.shape[-1]
    out = torch.empty(*held["q"].shape[:2], size, device=device)
    load(many[0])
    graph = capture(lambda: getattr(tritonattn, many[0].op)(**held, **fixed, out=out), device)
    for case in many:
        load(case)
        out.fill_(cases.MARK)
        graph.replay()
        settle(device)
        if make is mla_cases.decode:
            args = {"kv_cache": case.cache.clean, "block_table": case.cache.table, **case.args}
            cases.Oracle.of("mla_decode", torch.float32, **args).check(out, None, slice(0, case.rows))
        else:
            case.oracle().check(out, None, slice(0, case.rows))
        check_padding(out[case.rows :])


# -- case 83: capture without a first run ------------------------------------------------------------------------


def test_case_83_what_a_graph_cannot_hold_is_refused(device, monkeypatch):
    """Before anything has spoilt the capture: the upload of a plan, and a gather that asks the device how many rows it gives."""
    step, layer = Decoding(device, ONE_TOKEN), cases.extend([(2, 40), (1, 9)])
    plan = step.load(step.batches[0])
    for module in (batch, cache_moves):
        monkeypatch.setattr(module, "is_capturing", lambda device: True)
    with pytest.raises(RuntimeError, match="a plan cannot be made while a graph is captured"):
        step.load(step.batches[1])
    table, starts = layer.cache.table.to(device), torch.zeros(2, dtype=torch.int32, device=device)
    k_cache, v_cache = (x.to(device) for x in (layer.cache.k, layer.cache.v))
    with pytest.raises(RuntimeError, match=r"^gather_cache: out must be given while a graph is captured"):
        tritonattn.gather_cache(k_cache, v_cache, table, starts, starts, kv_layout="nhd")
    with pytest.raises(RuntimeError, match=r"^mla_gather_cache: out must be given while a graph is captured"):
        tritonattn.mla_gather_cache(torch.zeros(9, 16, 80, device=device), table, starts, starts, kv_lora_rank=64)
    step.router.run(plan, step.q, step.k, step.v, *step.caches, out=step.out)  # the older plan is still the latest, and right


@pytest.mark.parametrize("module", [None, "loaded"])
def test_case_83_the_first_run_of_a_kernel(monkeypatch, module):
    """Triton would ask the driver to load it, which spoils the capture; one that is loaded goes its way."""
    launched = []
    compiled = object.__new__(CompiledKernel)
    compiled.module = module
    kernel = MagicMock(pre_run_hooks=["none"], arg_names=[], fn=SimpleNamespace(__name__="decode"))
    kernel.run.return_value = compiled
    kernel.__getitem__.return_value = lambda *args, **options: launched.append(args) or compiled
    monkeypatch.setattr(launch, "is_capturing", lambda device: True)
    call = partial(launch.run, kernel, (1,), (SimpleNamespace(is_cuda=True, device=None),), {}, {}, Row({}, {}, {}, "a row"))
    if module is None:
        with pytest.raises(RuntimeError, match=r"around the first run of a kernel \(decode\): make the same call once before the capture"):
            call()
    else:
        call()
    assert len(launched) == (module is not None)


@pytest.mark.gpu
@pytest.mark.parametrize("make", [cases.decode, mla_cases.decode], ids=["decode_attention", "mla_decode"])
def test_case_83_ops_that_never_ran(device, make):
    """Shapes that no other test has. Refused by name, the capture ends in peace, and after a run it is right."""
    shape = {"heads": (10, 2), "head_size": 88} if make is cases.decode else {"heads": 5, "latent": 112, "rope": 48}
    many, held, load = op_calls(device, [[(1, 300), (1, 20)]], make, dtype=torch.bfloat16, **shape)
    (case,) = many
    fixed = {name: value for name, value in case.args.items() if name not in held}
    load(case)

    def call():
        return getattr(tritonattn, case.op)(**held, **fixed)

    with pytest.raises(RuntimeError, match="make the same call once before the capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        call()
    want = call().clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    out.fill_(cases.MARK)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, want)


@pytest.mark.gpu
def test_case_83_a_router_that_never_ran(device):
    """Its kernels have to be loaded; given that, a router whose scratch is made in the capture is right too."""
    shape = {"dtype": torch.bfloat16, "head_size": 104, "heads": (12, 2), "layout": "nhd"}
    first, second = (Decoding(device, ONE_TOKEN, **shape) for _ in range(2))
    plan = first.load(first.batches[0])
    with pytest.raises(RuntimeError, match="make the same call once before the capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        first.router.run(plan, first.q, first.k, first.v, *first.caches, out=first.out)
    graph = first.capture()
    for case in first.batches:
        first.check(graph, case)
    plan, graph = second.load(second.batches[0]), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        second.router.run(plan, second.q, second.k, second.v, *second.caches, out=second.out)
    for case in second.batches:
        second.check(graph, case)
        poison_free_memory(device)
    with pytest.raises(RuntimeError, match="a plan cannot be made"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        second.router.plan([1] * 4, [9] * 4, second.table)


# -- what only a GPU shows ------------------------------------------------------------------------------------


def check_steady(device, router, step, many, memory):
    """Of a few steps more, of all lengths: nothing is compiled, no scratch is taken, nothing waits for the device, and `memory()` stays."""
    torch.cuda.synchronize()
    before, scratch = memory(), router.scratch.nbytes
    torch.cuda.set_sync_debug_mode("error")
    try:
        with Compilations() as seen:
            for lens in many * 3:
                step(lens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert memory() == before, "a steady step allocates"
    assert router.scratch.nbytes == scratch
    assert not seen.new and not seen.found, [event.kernel for event in (*seen.new, *seen.found)]


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["nhd", "preshuffled"])
@pytest.mark.parametrize("threshold", [1, 3])
def test_steady_steps_allocate_compile_and_wait_for_nothing(device, layout, threshold):
    """A plan, a replay and an eager run a step, of all lengths up to the maximum and with padding."""
    router = tritonattn.Router(
        16, 2, 128, dtype=torch.bfloat16, device=device, kv_layout=layout, decode_threshold=threshold, block_size=16
    )
    new = partial(torch.randn, dtype=torch.bfloat16, device=device)
    rows = 8 * threshold
    q, k, v, out = (new(rows, heads, 128) for heads in (16, 2, 2, 16))
    caches = tritonattn.layouts.allocate(layout, 64, 16, 2, 128, dtype=torch.bfloat16, device=device)
    for cache in caches:
        cache.normal_()
    table = torch.randint(64, (8, 131072 // 16), dtype=torch.int32, device=device)

    def step(lens):
        plan = router.plan([min(n - 1, threshold) if n else 0 for n in lens], lens, table)
        graph.replay()
        router.run(plan, q, k, v, *caches, out=out)

    plan = router.plan([1] * 8, [131072] * 8, table)
    graph = capture(lambda: router.run(plan, q, k, v, *caches, out=out), device)
    many = [[2] * 8, [131072] * 8, [0] * 8, [5, 0, 131072, 17, 300, 0, 4096, 65536], [1000] * 4 + [0] * 4, *([n] * 8 for n in (15, 16, 17, 2048))]
    step(many[0])
    check_steady(device, router, step, many, lambda: torch.cuda.memory_stats(device)["allocation.all.allocated"])
    assert out.isfinite().all()


@pytest.mark.gpu
def test_steady_steps_of_mla_allocate_no_scratch(device):
    """The projections are the caller's and allocate; the router's own scratch stays, nothing compiles and nothing waits."""
    router = tritonattn.MlaRouter(16, softmax_scale=SCALE, dtype=torch.bfloat16, device=device, block_size=64)
    new = partial(torch.randn, dtype=torch.bfloat16, device=device)
    q, out, cache = new(8, 16, 192), new(8, 16, 128), new(64, 64, 576)
    w_k, w_v = new(16, 128, 512) / 23, new(16, 128, 512) / 23
    table = torch.randint(64, (8, 65536 // 64), dtype=torch.int32, device=device)
    functions = {
        "absorb": lambda x: (torch.einsum("thd,hdl->thl", x[..., :128], w_k), x[..., 128:]), "up_project": None,
        "up_project_v": lambda x: torch.einsum("thl,hdl->thd", x, w_v),
    }  # fmt: skip
    plan = router.plan([1] * 8, [65536] * 8, table)
    graph = capture(lambda: router.run(plan, q, None, None, cache, out=out, **functions), device)

    def step(lens):
        plan = router.plan([min(n - 1, 1) if n else 0 for n in lens], lens, table)
        graph.replay()
        router.run(plan, q, None, None, cache, out=out, **functions)

    many = [[2] * 8, [65536] * 8, [0] * 8, [5, 0, 65536, 17, 300, 0, 4096, 100], *([n] * 8 for n in (63, 64, 65, 2048))]
    for lens in many:
        step(lens)
    check_steady(device, router, step, many, lambda: torch.cuda.memory_allocated(device))
    assert out.isfinite().all()
