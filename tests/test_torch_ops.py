"""The ops under `torch.compile`: schema and fakes by opcheck, and a small attention module as one graph."""

import inspect

import pytest
import torch

import tritonattn as ta
from tritonattn import torch_ops


def caches(device, kv_layout="preshuffled"):
    torch.manual_seed(0)
    k_cache, v_cache = ta.layouts.allocate(kv_layout, 4, 16, 2, 32, dtype=torch.float32, device=device)
    return k_cache.normal_(), v_cache.normal_()


def ints(device, *values):
    return torch.tensor(values, dtype=torch.int32, device=device)


def calls(device):
    """name -> (positional arguments, keyword arguments) of one call of each op."""
    k_cache, v_cache = caches(device)
    table = ints(device, [1, 3], [2, 0])
    q = torch.randn(2, 6, 32, device=device).transpose(0, 1).contiguous().transpose(0, 1)  # a transposed view
    new = torch.randn(2, 2, 32, device=device)
    latent = torch.randn(4, 16, 48, device=device)
    lse = torch.randn(6, 2, device=device)
    number = torch.tensor([2.0], device=device)
    prefill = {"cu_seqlens_q": ints(device, 0, 2), "cu_seqlens_k": ints(device, 0, 2), "max_seqlen_q": 2, "max_seqlen_k": 2}
    cached = {"seqused_k": ints(device, 20, 7), "block_table": table, "max_seqlen_k": 20}
    context = {"context_lens": ints(device, 20, 7), "block_table": table, "max_context_len": 20}
    pair = torch.randn(2, 3, 32, device=device), torch.randn(2, 3, 16, device=device)
    rows = torch.randn(2, 32, device=device), torch.randn(2, 16, device=device)
    return {
        "flash_attn_varlen_func": ((q, new, new), {**prefill, "causal": True}),
        "decode_attention": ((q, k_cache, v_cache), {**cached, "k_descale": number, "v_descale": 0.5}),
        "extend_attention": (
            (q, new, new, k_cache, v_cache),
            {**context, "cu_seqlens_q": ints(device, 0, 1, 2), "max_seqlen_q": 1, "total_context_len": 27, "window_size": (9, -1)},
        ),
        "mla_decode": ((pair, latent), {**cached, "softmax_scale": 0.2, "kv_lora_rank": 32}),
        "merge_attn_states": ((q.contiguous(), lse, torch.randn_like(q), lse + 1), {}),
        "reshape_and_cache": ((new, new, k_cache, v_cache, torch.tensor([3, -1], device=device)), {"k_descale": number}),
        "mla_cache_write": ((*rows, latent, torch.tensor([3, 60], device=device)), {}),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["flash_attn_varlen_func", "decode_attention", "extend_attention", "mla_decode", "merge_attn_states",
                                  "reshape_and_cache", "mla_cache_write"])  # fmt: skip
def test_opcheck(device, name):
    args, kwargs = calls(device)[name]
    function = getattr(torch_ops, name).__wrapped__
    schema = inspect.signature(function).bind(*args, **kwargs)
    schema.apply_defaults()
    _, names = torch_ops._flatten(function, ())
    values = torch_ops._values(function, names, dict(schema.arguments))
    op = getattr(torch.ops.tritonattn, name).default
    if "return_lse" in inspect.signature(function).parameters:
        eager = function(*args, **kwargs)
        values = [torch.empty_like(eager), True, *values]
    torch.library.opcheck(op, tuple(values), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", ["flash_attn_varlen_func", "decode_attention", "extend_attention", "mla_decode", "merge_attn_states"])
def test_compiled_call_is_the_eager_call(device, name):
    """As one graph, for given and for new outputs: values, shapes and strides of the eager call."""
    args, kwargs = calls(device)[name]
    function = getattr(ta, name)
    compiled = torch.compile(lambda: function(*args, **kwargs, return_lse=True), backend="aot_eager", fullgraph=True)
    for got, want in zip(compiled(), function(*args, **kwargs, return_lse=True), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        assert got.stride() == want.stride()
    out = torch.full_like(function(*args, **kwargs), 777.0)
    torch.compile(lambda: function(*args, **kwargs, out=out), backend="aot_eager", fullgraph=True)()
    torch.testing.assert_close(out, function(*args, **kwargs), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["decode_attention", "mla_decode"])
def test_padding_of_a_compiled_decode(device, name):
    """Rows of padding are 0 there too, wherever the new result lies: here in memory that is NaN before."""
    args, kwargs = calls(device)[name]
    function = getattr(ta, name)
    long = [torch.cat([q, q, q]) for q in (args[0] if isinstance(args[0], tuple) else (args[0],))]
    padded = long if len(long) > 1 else long[0]  # the pair as a list
    for given in ({"cu_seqlens_q": ints(device, 0, 1, 2)}, {}):
        want = function(padded, *args[1:], **kwargs, **given, return_lse=True)
        assert (want[0][2:] == 0).all() and (want[1][:, 2:] == -torch.inf).all()
        compiled = torch.compile(lambda given=given: function(padded, *args[1:], **kwargs, **given, return_lse=True), backend="aot_eager", fullgraph=True)
        torch.use_deterministic_algorithms(True)  # which fills what is not initialised
        try:
            got = compiled()
        finally:
            torch.use_deterministic_algorithms(False)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


class Attention(torch.nn.Module):
    """A decode step of one layer: project, write the cache, attend, project."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = torch.nn.Linear(64, 6 * 32 + 4 * 32), torch.nn.Linear(6 * 32, 64)

    def forward(self, x, k_cache, v_cache, slots, lens, table):
        q, k, v = self.qkv(x).split([6 * 32, 2 * 32, 2 * 32], -1)
        ta.reshape_and_cache(k.unflatten(-1, (2, 32)), v.unflatten(-1, (2, 32)), k_cache, v_cache, slots)
        out = ta.decode_attention(q.unflatten(-1, (6, 32)), k_cache, v_cache, seqused_k=lens, block_table=table, max_seqlen_k=32)
        return x + self.o(out.flatten(1))


def test_module_as_one_graph(device):
    torch.manual_seed(0)
    layer = Attention().to(device)
    x = torch.randn(2, 64, device=device)
    rest = (torch.tensor([16 + 4, 32 + 6], device=device), ints(device, 5, 7), ints(device, [1, 3], [2, 0]))
    ours, theirs = caches(device), caches(device)
    with torch.no_grad():
        want = layer(x, *ours, *rest)
        got = torch.compile(layer, backend="aot_eager", fullgraph=True)(x, *theirs, *rest)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
