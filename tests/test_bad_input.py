"""Bad input: one error with every reason, naming argument, value and need, before any launch."""

import re
from functools import partial

import numpy as np
import pytest
import torch
from triton import knobs

import tritonattn
from tests import cases
from tritonattn import layouts
from tritonattn.batch import DECODE
from tritonattn.checks.reasons import overlaps
from tritonattn.fuzz.calls import build
from tritonattn.fuzz.inputs import onto
from tritonattn.fuzz.recipes import OPS
from tritonattn.fuzz.wrong import ways

PAIR = (-1, -1)


def floats(*shape, dtype=torch.bfloat16):
    return torch.zeros(*shape, dtype=dtype)


def ints(*shape):
    return torch.zeros(*shape, dtype=torch.int32)


def prefill():
    return {
        "q": floats(6, 4, 64), "k": floats(9, 2, 64), "v": floats(9, 2, 64), "cu_seqlens_q": ints(3), "cu_seqlens_k": ints(3),
        "max_seqlen_q": 4, "max_seqlen_k": 5,
    }  # fmt: skip


def caches():
    k_cache, v_cache = layouts.allocate("preshuffled", 5, 16, 2, 64, dtype=torch.bfloat16)
    return {"k_cache": k_cache, "v_cache": v_cache}


def extend():
    return {
        "q": floats(6, 4, 64), "k": floats(6, 2, 64), "v": floats(6, 2, 64), **caches(), "cu_seqlens_q": ints(3), "context_lens": ints(2),
        "block_table": ints(2, 4), "max_seqlen_q": 4, "max_context_len": 5,
    }  # fmt: skip


def decode():
    return {"q": floats(6, 4, 64), **caches(), "seqused_k": ints(6), "block_table": ints(6, 4), "max_seqlen_k": 30}


def merge():
    return {name: floats(6, 4, 64) for name in ("out_a", "out_b")} | {name: floats(4, 6, dtype=torch.float32) for name in ("lse_a", "lse_b")}


def write():
    return {"key": floats(6, 2, 64), "value": floats(6, 2, 64), **caches(), "slot_mapping": ints(6)}


def gather():
    return {**caches(), "block_table": ints(2, 4), "starts": ints(2), "lengths": ints(2), "kv_layout": "preshuffled"}


def mla_decode():
    return {"q": floats(6, 4, 80), "kv_cache": floats(5, 16, 80), "seqused_k": ints(6), "block_table": ints(6, 4), "max_seqlen_k": 30,
            "softmax_scale": 0.1, "kv_lora_rank": 64}  # fmt: skip


def mla_extend():
    return {
        "q": floats(6, 4, 64), "k": floats(6, 4, 64), "v": floats(6, 4, 64), "kv_cache": floats(5, 16, 80), "cu_seqlens_q": ints(3),
        "context_lens": ints(2), "block_table": ints(2, 4), "max_seqlen_q": 4, "max_context_len": 5, "softmax_scale": 0.1, "kv_lora_rank": 64,
        "up_project": lambda latent, rope: (latent[:, None].expand(-1, 4, -1), latent[:, None].expand(-1, 4, -1)),
    }  # fmt: skip


def mla_write():
    return {"latent": floats(6, 64), "rope": floats(6, 16), "kv_cache": floats(5, 16, 80), "slot_mapping": ints(6)}


def mla_gather():
    return {"kv_cache": floats(5, 16, 80), "block_table": ints(2, 4), "starts": ints(2), "lengths": ints(2), "kv_lora_rank": 64}


SOUND = {
    "flash_attn_varlen_func": prefill, "extend_attention": extend, "decode_attention": decode, "merge_attn_states": merge,
    "reshape_and_cache": write, "gather_cache": gather, "mla_decode": mla_decode, "mla_extend": mla_extend, "mla_cache_write": mla_write,
    "mla_gather_cache": mla_gather,
}  # fmt: skip
ATTENTION = ("flash_attn_varlen_func", "extend_attention", "decode_attention")
PAGED = ("extend_attention", "decode_attention")


def refuse(op, error, words, device, **changes):
    args = {name: cases.to(value, device) for name, value in SOUND[op]().items()}
    if not knobs.runtime.interpret:  # what is refused is not taken for the sound call before it, from which it differs in one thing
        getattr(tritonattn, op)(**args)
    args |= {name: cases.to(value, device) for name, value in changes.items()}
    with pytest.raises((ValueError, TypeError)) as caught:
        getattr(tritonattn, op)(**args)
    assert caught.type is error
    for text in words:
        assert text in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("op", SOUND)
def test_sound_input_is_taken(device, op):
    getattr(tritonattn, op)(**{name: cases.to(value, device) for name, value in SOUND[op]().items()})


EVERYWHERE = [
    ({"q": floats(6, 256)}, ValueError, "q must have 3 dimensions, got shape [6, 256]"),
    ({"q": [1.0]}, TypeError, "q must be a tensor, got list"),
    ({"q": floats(6, 4, 64).double()}, TypeError, "got torch.float64"),
    ({"q": floats(6, 3, 64)}, ValueError, "query heads must be a multiple of KV heads, got 3 and 2"),
    ({"q": floats(6, 64, 4).transpose(1, 2)}, ValueError, "q must have a last stride of 1"),
    ({"window_size": (-2, 0)}, ValueError, "window_size left (-1: unlimited) must be at least -1, got -2"),
    ({"window_size": (3, -7)}, ValueError, "window_size right (-1: unlimited) must be at least -1, got -7"),
    ({"window_size": 3}, TypeError, "window_size must be a pair (left, right), got 3"),
    ({"window_size": (1.5, 0)}, TypeError, "window_size left (-1: unlimited) must be an int on the host, got float"),
    ({"window_size": np.array([4, 0])}, TypeError, "window_size must be a pair (left, right), got array([4, 0])"),
    ({"window_size": (np.array([4, 5]), 0)}, TypeError, "window_size left (-1: unlimited) must be an int on the host, got ndarray"),
    ({"window_size": (torch.tensor(-1), -1)}, TypeError, "window_size left (-1: unlimited) must be an int on the host, got Tensor"),
    ({"softmax_scale": 0.0}, ValueError, "softmax_scale must be finite and above 0, got 0.0"),
    ({"softmax_scale": float("nan")}, ValueError, "softmax_scale must be finite and above 0, got nan"),
    ({"softmax_scale": torch.ones(1)}, TypeError, "softmax_scale must be a float, got Tensor"),
    ({"softmax_scale": np.float32("nan")}, ValueError, "softmax_scale must be finite and above 0, got nan"),
    ({"softcap": -1.0}, ValueError, "softcap must be finite and at least 0, got -1.0"),
    ({"softcap": np.array([1.0, 2.0])}, TypeError, "softcap must be a float, got ndarray"),
    ({"causal": 1}, TypeError, "causal must be a bool, got int"),
    ({"alibi_slopes": torch.zeros(3)}, ValueError, "alibi_slopes must be [4], got [3]"),
    ({"alibi_slopes": torch.zeros(4).int()}, TypeError, "alibi_slopes must be"),
    ({"sinks": torch.zeros(4, 1)}, ValueError, "sinks must have 1 dimension, got shape [4, 1]"),
    ({"sinks": 1.0}, TypeError, "sinks must be a tensor, got float"),
    ({"k_descale": -1.0}, ValueError, "k_descale must be finite and above 0, got -1.0"),
    ({"v_descale": torch.zeros(3)}, ValueError, "v_descale must have 1 element or be [2], contiguous, got [3]"),
    ({"v_descale": torch.zeros(2).half()}, TypeError, "v_descale must be torch.float32, got torch.float16"),
    ({"out": floats(6, 4, 60)}, ValueError, "out must be ["),
    ({"out": floats(6, 4, 64).int()}, TypeError, "out must be"),
]


@pytest.mark.parametrize(("changes", "error", "text"), EVERYWHERE, ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize("op", ATTENTION)
def test_attention_refuses(device, op, changes, error, text):
    refuse(op, error, [op, text], device, **changes)


@pytest.mark.parametrize(("op", "changes", "error", "text"), [
    ("flash_attn_varlen_func", {"k": floats(9, 2, 96)}, ValueError, "k must be [.., .., 64], got [9, 2, 96]"),
    ("flash_attn_varlen_func", {"v": floats(8, 2, 64)}, ValueError, "v must be [9, 2, ..], got [8, 2, 64]"),
    ("flash_attn_varlen_func", {"k": floats(9, 2, 64).half()}, TypeError, "k must be torch.bfloat16, got torch.float16"),
    ("flash_attn_varlen_func", {"cu_seqlens_k": ints(4)}, ValueError, "both be [B + 1], got lengths 3 and 4"),
    ("flash_attn_varlen_func", {"cu_seqlens_q": ints(3).long()}, TypeError, "cu_seqlens_q must be torch.int32, got torch.int64"),
    ("flash_attn_varlen_func", {"max_seqlen_q": -1}, ValueError, "max_seqlen_q must be at least 0, got -1"),
    ("flash_attn_varlen_func", {"max_seqlen_k": torch.tensor(3)}, TypeError, "max_seqlen_k must be an int on the host, got Tensor"),
    ("flash_attn_varlen_func", {"q": floats(6, 4, 24), "k": floats(9, 2, 24)}, ValueError, "a multiple of 8 from 32 to 256, got 24"),
    ("flash_attn_varlen_func", {"v": floats(9, 2, 264)}, ValueError, "head size of v must be a multiple of 8 from 32 to 256, got 264"),
    ("extend_attention", {"k": None}, TypeError, "k and v must both be tensors or both be None, got NoneType and Tensor"),
    ("extend_attention", {"k": floats(5, 2, 64)}, ValueError, "k must be [6, 2, 64], got [5, 2, 64]"),
    ("extend_attention", {"v": floats(6, 2, 32)}, ValueError, "v must be [6, 2, 64], got [6, 2, 32]"),
    ("extend_attention", {"chunk_tokens": 0}, ValueError, "chunk_tokens must be at least 1, got 0"),
    ("extend_attention", {"total_context_len": -1}, ValueError, "total_context_len must be at least 0, got -1"),
    ("extend_attention", {"total_context_len": torch.tensor(3)}, TypeError, "total_context_len must be an int on the host, got Tensor"),
    ("extend_attention", {"context_lens": ints(3)}, ValueError, "cu_seqlens_q must be [4], got [3]"),
    ("extend_attention", {"block_table": ints(3, 4)}, ValueError, "block_table must be [2, ..], got [3, 4]"),
    ("decode_attention", {"ragged": 0}, TypeError, "ragged must be a bool, got int"),
    ("mla_decode", {"ragged": None}, TypeError, "ragged must be a bool, got NoneType"),
    ("decode_attention", {"num_splits": -1}, ValueError, "num_splits must be at least 0, got -1"),
    ("decode_attention", {"num_splits": 10**9}, ValueError, "num_splits must be at most 128, got 1000000000"),
    ("mla_decode", {"num_splits": 129}, ValueError, "num_splits must be at most 128, got 129"),
    ("decode_attention", {"num_splits": 2.0}, TypeError, "num_splits must be an int on the host, got float"),
    ("decode_attention", {"max_seqlen_q": 2}, ValueError, "q must hold 6 sequences of max_seqlen_q 2 tokens where cu_seqlens_q is None, got 6"),
    ("decode_attention", {"cu_seqlens_q": ints(2)}, ValueError, "cu_seqlens_q must be [7], got [2]"),
    ("decode_attention", {"q": floats(6, 4, 96)}, ValueError, "q must be [.., .., 64] like k_cache, got [6, 4, 96]"),
    ("merge_attn_states", {"out_b": floats(6, 4, 32)}, ValueError, "out_b must be [6, 4, 64], got [6, 4, 32]"),
    ("merge_attn_states", {"lse_a": floats(6, 4).float()}, ValueError, "lse_a must be [4, 6], got [6, 4]"),
    ("merge_attn_states", {"lse_b": floats(6, 4).float().T}, ValueError, "lse_b must have a last stride of 1, got strides [1, 4]"),
    ("merge_attn_states", {"lse_b": floats(4, 6)}, TypeError, "lse_b must be torch.float32, got torch.bfloat16"),
    ("reshape_and_cache", {"slot_mapping": ints(7)}, ValueError, "slot_mapping must be at most as long as key, 6 tokens, got 7"),
    ("reshape_and_cache", {"key": floats(6, 3, 64)}, ValueError, "key must be [.., 2, 64], got [6, 3, 64]"),
    ("reshape_and_cache", {"value": floats(5, 2, 64)}, ValueError, "value must be [6, 2, 64], got [5, 2, 64]"),
    ("reshape_and_cache", {"slot_mapping": ints(6).float()}, TypeError, "slot_mapping must be torch.int32 or torch.int64"),
    ("gather_cache", {"lengths": ints(3)}, ValueError, "lengths must be [2], got [3]"),
    ("gather_cache", {"out": floats(3, 2, 64)}, TypeError, "out must be a pair (k, v) of tensors, got Tensor"),
    ("gather_cache", {"out": (floats(3, 2, 64), floats(4, 2, 64))}, ValueError, "out[1] must be [3, 2, 64], got [4, 2, 64]"),
])  # fmt: skip
def test_op_refuses(device, op, changes, error, text):
    changes = {name: tuple(x.to(device) for x in value) if isinstance(value, tuple) else value for name, value in changes.items()}
    refuse(op, error, [op, text], device, **changes)


@pytest.mark.parametrize("op", [*PAGED, "reshape_and_cache", "gather_cache"])
@pytest.mark.parametrize(("changes", "error", "text"), [
    ({"kv_layout": "shuffled"}, ValueError, "kv_layout must be one of nhd, hnd, preshuffled, got 'shuffled'"),
    ({"kv_layout": "latent"}, ValueError, "kv_layout must be one of nhd, hnd, preshuffled, got 'latent'"),
    ({"kv_layout": "nhd"}, ValueError, "k_cache must have 4 dimensions in the nhd layout"),
    ({"k_cache": None}, TypeError, "k_cache must be a tensor, got NoneType"),
    ({"v_cache": floats(5, 2, 2, 64, 4)}, ValueError, "v_cache must be [5, 2, 16/8, Dv, 8]"),
    (dict(zip(("k_cache", "v_cache"), layouts.allocate("preshuffled", 5, 16, 2, 64, dtype=torch.uint8), strict=True)), TypeError, "got torch.uint8"),
])  # fmt: skip
def test_cache_is_refused(device, op, changes, error, text):
    refuse(op, error, [text], device, **changes)


@pytest.mark.parametrize("op", PAGED)
def test_cache_of_another_dtype_is_refused(device, op):
    k_cache, v_cache = layouts.allocate("preshuffled", 5, 16, 2, 64, dtype=torch.float16)
    refuse(op, TypeError, ["k_cache must be torch.bfloat16 like q, or an 8-bit float, got torch.float16"], device, k_cache=k_cache, v_cache=v_cache)


def expanded(x):
    """Each row is the same memory."""
    return x[:1].expand(x.shape)


def staggered(x):
    """Each row begins inside the one before it."""
    return x.new_zeros(x.numel()).as_strided(x.shape, (x.stride(0) // 2, *x.stride()[1:]))


@pytest.mark.parametrize("overlapping", [expanded, staggered])
@pytest.mark.parametrize(("op", "argument"), [
    *((op, "out") for op in (*ATTENTION, "merge_attn_states", "gather_cache")), *(("reshape_and_cache", name) for name in ("k_cache", "v_cache")),
    ("mla_decode", "out"), ("mla_extend", "out"), ("mla_cache_write", "kv_cache"), ("mla_gather_cache", "out"),
])  # fmt: skip
def test_memory_that_is_written_twice_is_refused(device, op, argument, overlapping):
    args = {name: cases.to(value, device) for name, value in SOUND[op]().items()}
    if op == "gather_cache":
        args["out"] = floats(8, 2, 64).to(device), overlapping(floats(8, 2, 64).to(device))
    elif op == "mla_gather_cache":
        args["out"] = overlapping(floats(8, 64).to(device)), floats(8, 16).to(device)
    elif op == "mla_decode":
        args["out"] = overlapping(floats(6, 4, 64).to(device))
    else:
        args[argument] = overlapping(args[argument] if argument in args else floats(6, 4, 64).to(device))
    with pytest.raises(ValueError, match=rf"{argument}(\[.\])? must have each element at a place of its own, got shape \[.*\] with strides"):
        getattr(tritonattn, op)(**args)


@pytest.mark.parametrize(("caches", "shared"), [
    (lambda x: (x[:, 0], x[:, 0]), True), (lambda x: (x[:, 0], x[:, 1]), False),
    (lambda x: (x[:4, 0], x[1:, 0]), True), (lambda x: (x[:4, 1], x[1:, 0]), False),
    (lambda x: (x[:, 0, ..., :64], x[:, 0, ..., 64:]), False), (lambda x: (x[:, 0, ..., :64], x[:, 0, ..., 63:]), True),
    (lambda x: (x[:, 0, ..., :64], x[:, 0, ..., 64:72]), False), (lambda x: (x[:, 1, :, ::2], x[:, 1, :, 1::2]), False),
    (lambda x: (x[:, 0, ..., :64].clone(), x[:, 0, ..., :64]), False), (lambda x: (x[:0, 0], x[:0, 0]), False),
])  # fmt: skip
def test_caches_that_share_memory_are_not_written(device, caches, shared):
    """K and V may be interleaved in any way, and lie on one another in none."""
    k_cache, v_cache = caches(torch.zeros(5, 2, 16, 4, 128, device=device))
    heads, k_size, v_size = k_cache.shape[2], k_cache.shape[3], v_cache.shape[3] // 8 * 8
    v_cache = v_cache[..., :v_size]
    args = torch.zeros(1, heads, k_size, device=device), torch.zeros(1, heads, v_size, device=device), k_cache, v_cache, torch.tensor([-1], device=device)
    if shared:
        with pytest.raises(ValueError, match="reshape_and_cache: k_cache and v_cache must share no memory"):
            tritonattn.reshape_and_cache(*args, kv_layout="nhd")
    else:
        tritonattn.reshape_and_cache(*args, kv_layout="nhd")


@pytest.mark.parametrize(("op", "widths"), [("gather_cache", (2, 64)), ("mla_gather_cache", (64,))])
def test_rows_are_gathered_to_two_places(device, op, widths):
    args = {name: cases.to(value, device) for name, value in SOUND[op]().items()}
    rows = floats(9, *widths).to(device)
    second = rows if op == "gather_cache" else rows[:, :16]
    with pytest.raises(ValueError, match=rf"{op}: out\[0\] and out\[1\] must share no memory"):
        getattr(tritonattn, op)(**args, out=(rows, second))


def test_a_cache_that_is_read_may_overlap(device):
    """Of a sequence that repeats itself one block is enough."""
    args = {name: cases.to(value, device) for name, value in decode().items()}
    k_cache, v_cache = (expanded(args[name].zero_()) for name in ("k_cache", "v_cache"))
    tritonattn.decode_attention(**args | {"k_cache": k_cache, "v_cache": v_cache})


@pytest.mark.parametrize(("shape", "strides", "shared"), [
    ((4, 3, 8), (24, 8, 1), False), ((4, 3, 8), (8, 32, 1), False), ((4, 3, 8), (100, 9, 1), False), ((4, 3, 8), (24, 7, 1), True),
    ((4, 3, 8), (23, 8, 1), True), ((4, 3, 8), (0, 8, 1), True), ((1, 3, 8), (0, 8, 1), False), ((4, 0, 8), (0, 0, 1), False),
    ((4, 1, 8), (8, 3, 1), False), ((), (), False),
])  # fmt: skip
def test_overlaps(shape, strides, shared):
    assert overlaps(torch.zeros(400).as_strided(shape, strides)) is shared


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("op", [op for op in OPS if "Router" not in op])
def test_numbers_of_numpy_are_numbers(device, op, kind):
    """The results are those of Python's numbers."""
    recipe = {"lens": [[2, 30], [1, 17]], "scale": 0.5, "softcap": 2.0, "window": [9, 0], "num_splits": 2, "chunk_tokens": 16, "descale": "number"}
    results = []
    for kinds in ({float: lambda x: float(kind(x))}, {float: kind, int: np.int32}):
        args = {name: kinds.get(type(x), lambda x: x)(onto(x, device)) for name, x in build({"op": op, **recipe}).args.items()}
        got = getattr(tritonattn, op)(**args)
        results.append([x for x in (*args.values(), *(got if isinstance(got, tuple) else (got,))) if isinstance(x, torch.Tensor)])
    assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(*results, strict=True))


def test_every_reason_at_once(device):
    text = refuse(
        "decode_attention", ValueError,
        ["seqused_k must be torch.int32", "block_table must be [6, ..]", "sinks must be [4]", "num_splits must be at least 0",
         "softmax_scale must be finite", "out must be [6, 4, 64]", "q must be [.., .., 64]"],
        device, q=floats(6, 4, 80), seqused_k=ints(6).long(), block_table=ints(3, 4), sinks=torch.zeros(5), num_splits=-3,
        softmax_scale=-1.0, out=floats(2, 4, 32),
    )  # fmt: skip
    assert text.count(";") == 6
    text = refuse(
        "decode_attention", ValueError, ["q must have 3 dim", "block_table must be torch.int32", "k_cache must be a tensor", "softcap", "sinks must be a ten"],
        device, q=floats(6, 256), block_table=ints(6, 4).long(), k_cache=None, softcap=-1.0, sinks=3,
    )  # fmt: skip
    assert text.count(";") == 4
    text = refuse("merge_attn_states", TypeError, ["out_a", "lse_a"], device, out_a=3, lse_a="x")
    assert "out_b" not in text


BY_ITSELF = ("text", "number", "rank", "no rank", "float64", "int32", "float", "int64", "bool", "none", "negative", "tensor", "nan", "infinite",
             "zero", "half", "one", "too small", "nones", "ranks", "list", "array", "tensors")  # fmt: skip


@pytest.mark.parametrize("op", [op for op in OPS if "Router" not in op])
def test_no_reason_hides_another(device, op):
    """Of two arguments wrong at once, one of them so that its size is not known, both are named."""
    call = build({"op": op, "sinks": True, "alibi": True, "descale": "number", "out": "given", "softcap": 2.0, "window": [3, 0]})
    args = {name: onto(value, device) for name, value in call.args.items()}
    wrong = [(name, how, onto(value, device)) for name, args_value in args.items() for how, value in ways(name, args_value, op) if how in BY_ITSELF]
    for name, how, value in wrong:
        if how not in ("text", "rank", "float64"):
            continue
        for other, how_other, other_value in wrong:
            if other == name or ("kv_layout" in (name, other) and "rank" in f"{how} {how_other}"):  # of which that of a cache follows
                continue
            with pytest.raises((ValueError, TypeError)) as error:
                getattr(tritonattn, op)(**args | {name: value, other: other_value})
            said = re.split("[:;] ", str(error.value))
            for each in (name, other):
                assert any(reason.startswith(each) or f" {each} " in reason for reason in said), (name, how, other, how_other, str(error.value))


def test_nothing_was_written(device):
    out = torch.full((2, 4, 64), cases.MARK, dtype=torch.bfloat16, device=device)
    refuse("decode_attention", ValueError, ["num_splits"], device, num_splits=-1, out=out)
    assert (out == cases.MARK).all()


def test_8_bit_floats_that_the_gpu_lacks(device, monkeypatch):
    """No sound call comes before: under the name of another GPU, code cannot be compiled for this one."""
    monkeypatch.setenv("TRITONATTN_ARCH", "gfx942")
    k_cache, v_cache = layouts.allocate("preshuffled", 5, 16, 2, 64, dtype=torch.float8_e4m3fn)
    args = decode() | {"k_cache": k_cache, "v_cache": v_cache}
    with pytest.raises(TypeError, match=r"decode_attention: .*8-bit floats on gfx942 must be float8_e4m3fnuz.*got float8_e4m3fn"):
        tritonattn.decode_attention(**{name: cases.to(value, device) for name, value in args.items()})


def test_tensors_elsewhere_are_refused(device):
    elsewhere = torch.device("meta")
    for op, name in (("decode_attention", "block_table"), ("extend_attention", "k"), ("flash_attn_varlen_func", "cu_seqlens_k"),
                     ("merge_attn_states", "lse_b"), ("reshape_and_cache", "k_cache")):  # fmt: skip
        args = {key: cases.to(value, elsewhere if key == name else device) for key, value in SOUND[op]().items()}
        with pytest.raises(ValueError, match=f"{name} must be on {device}, got meta"):
            getattr(tritonattn, op)(**args)


# -- router ---------------------------------------------------------------------------------------------------


def router(place, **changes):
    args = {"num_q_heads": 4, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16, "device": place, "block_size": 16} | changes
    return tritonattn.Router(args.pop("num_q_heads"), args.pop("num_kv_heads"), args.pop("head_size"), **args)


@pytest.mark.parametrize(("changes", "error", "text"), [
    ({"num_q_heads": 5}, ValueError, "query heads must be a multiple of KV heads, got 5 and 2"),
    ({"head_size": 20}, ValueError, "head size of q and k must be a multiple of 8 from 32 to 256, got 20"),
    ({"dtype": torch.float64}, TypeError, "dtype must be"),
    ({"kv_dtype": torch.float16}, TypeError, "kv_dtype must be torch.bfloat16 like dtype, or an 8-bit float, got torch.float16"),
    ({"kv_layout": "latent"}, ValueError, "kv_layout must be one of nhd, hnd, preshuffled"),
    ({"decode_threshold": 0}, ValueError, "decode_threshold must be at least 1, got 0"),
    ({"chunk_tokens": 0}, ValueError, "chunk_tokens must be at least 1, got 0"),
    ({"window_size": (-3, 0)}, ValueError, "window_size left"),
    ({"softcap": -2.0}, ValueError, "softcap must be finite"),
    ({"batch_invariant": 1}, TypeError, "batch_invariant must be a bool, got int"),
    ({"device": "foo", "softcap": -2.0}, ValueError, "device must be one that torch knows, such as cuda:0 or cpu, got 'foo'; softcap must be finite"),
    ({"block_size": 12}, ValueError, "block_size must be a multiple of 8 (16 bytes of torch.bfloat16), got 12"),
    ({"head_size": 72, "kv_dtype": torch.float8_e4m3fn}, ValueError, "head_size must be a multiple of 16 (16 bytes of torch.float8_e4m3fn), got 72"),
    ({"device": "cuda:99"}, ValueError, "device must be one of the GPUs that torch finds"),
    ({"device": None}, TypeError, "device must be a torch.device or its name, got NoneType"),
    ({"device": "meta"}, ValueError, "tensors must be on a GPU, got meta"),
    ({"head_size": 20, "num_kv_heads": "x", "decode_threshold": 0, "sinks": torch.zeros(3), "kv_dtype": torch.int8}, ValueError,
     "num_kv_heads must be an int on the host, got str; kv_dtype must be torch.bfloat16 like dtype, or an 8-bit float, got torch.int8; "
     "decode_threshold must be at least 1, got 0; head size of q and k must be a multiple of 8 from 32 to 256, got 20; "
     "sinks must be [4], got [3]"),
])  # fmt: skip
def test_router_refuses(device, changes, error, text):
    with pytest.raises(error, match="Router: ") as caught:
        router(device, **changes)
    assert text in str(caught.value)


def test_router_of_numbers_of_numpy(device):
    sizes = {"num_q_heads": 4, "num_kv_heads": 2, "head_size": 64, "v_head_size": 64, "decode_threshold": 2, "chunk_tokens": 16, "block_size": 16}
    sizes |= {"window_size": (9, 0), "softcap": 2.0, "softmax_scale": 0.5}
    kinds = {int: np.int32, float: np.float32, tuple: lambda pair: tuple(map(np.int64, pair))}
    results, args = [], run_arguments(device, 40)
    for tensor in args.values():
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)))
    for given in (sizes, {name: kinds[type(value)](value) for name, value in sizes.items()}):
        one = router(device, **given)
        results.append(one.run(one.plan([2, 35, 3], [20, 60, 3], torch.tensor([[0, 1, 0, 0], [2, 3, 4, 1], [0] * 4]).int().to(device)), **args))
    assert torch.equal(*results)


@pytest.mark.parametrize(("query", "seq", "width", "error", "text"), [
    ([1, 2], [3], 4, ValueError, "seq_lens must be as long as query_lens, 2, got 1"),
    ([1, -2], [3, 3], 4, ValueError, "query_lens must be at least 0, got -2 (request 1)"),
    ([1, 7], [3, 5], 4, ValueError, "seq_lens must be at least query_lens, got 5 (request 1)"),
    ([1, 1], [3, 65], 4, ValueError, "seq_lens must fit in block_table, 64 tokens in the cache, got 65 (request 1)"),
    ([1, 9], [3, 75], 4, ValueError, "got 66 (request 1)"),
    ([1.5], [3], 4, TypeError, "query_lens must be a sequence of integers"),
    ([None], ["x"], 4, TypeError, "query_lens must be a sequence of integers, got object of shape [1]; seq_lens must be a sequence of integers"),
    ([1, 1], [2**70, 6], 4, ValueError, f"Router.plan: seq_lens must be at most {1 << 30}, got {2**70} (request 0)"),
    ([1, 2**63], [-(2**70), 6], 4, ValueError, f"at most {1 << 30}, got {2**63} (request 1); seq_lens must be at least 0, got -{2**70} (request 0)"),
    ([[1]], [3], 4, TypeError, "query_lens must be a sequence of integers"),
    ([1, [1]], [3, 3], 4, TypeError, "query_lens must be a sequence of integers, got [1, [1]]"),
    ([1, 1, 1], [3, 3, 3], 4, ValueError, "block_table must be [3, ..], got [2, 4]"),
    ([1, -1], None, 4, ValueError, "seq_lens must be a sequence of integers, got object of shape []; query_lens must be at least 0, got -1 (request 1)"),
    ([1, 1], [3, 3], None, ValueError, "block_table must be given where a request has context, got 3 (request 0), 3 (request 1)"),
])  # fmt: skip
def test_plan_refuses(device, query, seq, width, error, text):
    table = None if width is None else ints(2, width).to(device)
    with pytest.raises(error, match=r"Router\.plan: ") as caught:
        router(device).plan(query, seq, table)
    assert text in str(caught.value)


LONGEST = 1 << 30
HOLDERS = {
    "list": list, "tuple": tuple, **{name: partial(np.array, dtype=name) for name in ("int64", "uint64", "int32", "uint32")},
    "tensor": torch.tensor, "int32 tensor": partial(torch.tensor, dtype=torch.int32),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOLDERS)
@pytest.mark.parametrize("length", [LONGEST + 1, (1 << 31) - 1, (1 << 32) - 1, (1 << 32) + 3])
def test_one_limit_of_lengths(device, kind, length):
    """Whatever holds them, and whoever asks; up to the limit, sums of two positions do not wrap."""
    if "32" in kind and length >= 1 << (32 if kind == "uint32" else 31):
        pytest.skip("does not fit")
    hold = HOLDERS[kind]
    lens, said = hold([3, length, 9, length]), f"must be at most {LONGEST}, got {length} (request 1), {length} (request 3)"
    ones, table = [1, 1, 1, 1], ints(4, 2).to(device)
    for name, call in (
        ("seq_lens", lambda: router(device).plan(ones, lens, table)), ("query_lens", lambda: router(device).plan(lens, lens, None)),
        ("context_lens", lambda: tritonattn.classify(ones, lens)), ("query_lens", lambda: tritonattn.reorder_batch(lens, ones)),
        ("seq_lens", lambda: tritonattn.MlaRouter(2, softmax_scale=0.1, dtype=torch.bfloat16, device=device).plan(ones, lens, table)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=re.escape(f"{name} {said}")):
            call()
    assert tritonattn.classify([1], hold([LONGEST])).tolist() == [DECODE]


@pytest.mark.parametrize(("op", "name"), [(op, name) for op in SOUND for name in SOUND[op]() if name.startswith("max_")])
def test_the_same_limit_of_the_longest(device, op, name):
    text = refuse(op, ValueError, [f"{name} must be at most {LONGEST}, got {LONGEST + 1}"], device, **{name: LONGEST + 1})
    assert text.count(";") == 0


def test_plan_names_every_request_at_once(device):
    with pytest.raises(ValueError, match=r"query_lens must be at least 0, got -1 .*seq_lens must be at least query_lens.*, \.\.\."):
        router(device).plan([-1, 9, 9, 9, 9, 9], [0, 1, 1, 1, 1, 1], ints(6, 4).to(device))


def run_arguments(device, tokens=3):
    args = {"q": floats(tokens, 4, 64), "k": floats(tokens, 2, 64), "v": floats(tokens, 2, 64), **caches()}
    return {name: value.to(device) for name, value in args.items()}


@pytest.mark.parametrize(("changes", "error", "text"), [
    ({"q": floats(2, 4, 64)}, ValueError, "q must hold the 3 tokens of the plan, got 2"),
    ({"q": floats(3, 4, 64).half()}, TypeError, "q must be torch.bfloat16, got torch.float16"),
    ({"q": floats(3, 4, 64).half()}, TypeError, "Router.run: q must be torch.bfloat16, got torch.float16$"),
    ({"q": floats(3, 4, 64).half(), "k": floats(3, 2, 64).half()}, TypeError, "k must be torch.bfloat16, got torch.float16"),
    ({"k": None}, TypeError, "k and v must both be tensors or both be None"),
    ({"v": floats(3, 2, 32)}, ValueError, "v must be [3, 2, 64], got [3, 2, 32]"),
    ({"k_cache": None, "v_cache": None}, TypeError, "k_cache must be a tensor, got NoneType"),
    ({"k_cache": floats(5, 1, 8, 16, 8), "v_cache": floats(5, 1, 2, 64, 8)}, ValueError, "caches must have KV heads, D and Dv [2, 64, 64], got [1, 64, 64]"),
    ({"k_cache": floats(5, 2, 8, 32, 8), "v_cache": floats(5, 2, 4, 64, 8)}, ValueError, "caches must have the router's block size 16, got 32"),
    ({"sinks": torch.zeros(3)}, ValueError, "sinks must be [4], got [3]"),
    ({"out": floats(3, 4, 32)}, ValueError, "out must be [3, 4, 64], got [3, 4, 32]"),
])  # fmt: skip
def test_run_refuses(device, changes, error, text):
    one = router(device)
    plan = one.plan([1, 2], [20, 2], ints(2, 4).to(device))
    args = run_arguments(device)
    if not knobs.runtime.interpret:
        one.run(plan, **args)
    args |= {name: cases.to(value, device) for name, value in changes.items()}
    with pytest.raises(error, match=r"Router\.run: ") as caught:
        one.run(plan, **args)
    assert text in f"{caught.value}$"


def test_run_names_every_reason(device):
    one = router(device)
    plan = one.plan([1, 2], [20, 2], ints(2, 4).to(device))
    changes = {"q": floats(3, 256), "v": floats(3, 2, 32), "k_cache": None, "out": 3, "sinks": torch.zeros(3)}
    with pytest.raises(ValueError, match=r"^Router\.run: ") as caught:
        one.run(plan, **run_arguments(device) | {name: cases.to(value, device) for name, value in changes.items()})
    for text in ("q must have 3 dimensions", "v must be [.., 2, 64], got", "k_cache must be a tensor", "out must be a tensor", "sinks must be [4]"):
        assert text in str(caught.value)


def test_run_refuses_a_result_that_overlaps(device):
    one = router(device)
    plan = one.plan([1, 2], [20, 2], ints(2, 4).to(device))
    with pytest.raises(ValueError, match=r"Router\.run: out must have each element at a place of its own"):
        one.run(plan, **run_arguments(device), out=expanded(floats(3, 4, 64).to(device)))


def test_a_table_too_short_is_found_when_the_block_size_is(device):
    one = router(device, block_size=None)
    plan = one.plan([1, 2], [65, 2], ints(2, 4).to(device))
    with pytest.raises(ValueError, match="block_table must hold 65 tokens, got room for 64 in blocks of 16"):
        one.run(plan, **run_arguments(device))


@pytest.mark.parametrize("plan", [None, (), "plan"])
def test_what_is_no_plan_is_refused(device, plan):
    with pytest.raises(TypeError, match=r"Router\.run: plan must be one that `plan` gave, got"):
        router(device).run(plan, **run_arguments(device))


@pytest.mark.parametrize("name", ["classify", "reorder_batch"])
@pytest.mark.parametrize(("lens", "error", "text"), [
    (([1, 2], [3], 1), ValueError, "context_lens must be as long as query_lens, 2, got 1"),
    (([1, -2], [3, -1], 0), ValueError, "decode_threshold must be at least 1, got 0; query_lens must be at least 0, got -2 (request 1); context_lens must"),
    (([1.5], [3], 1), TypeError, "query_lens must be a sequence of integers"),
    (([1], None, 1), TypeError, "context_lens must be a sequence of integers"),
    (([1], [3], 1.5), TypeError, "decode_threshold must be an int on the host, got float"),
])  # fmt: skip
def test_lengths_are_refused(name, lens, error, text):
    with pytest.raises(error, match=f"^{name}: ") as caught:
        getattr(tritonattn, name)(*lens)
    assert text in str(caught.value)


@pytest.mark.parametrize("size", [0, 33])
def test_a_head_size_is_refused_once(device, size):
    with pytest.raises(ValueError, match=f"got {size}") as caught:
        tritonattn.Router(4, 2, size, dtype=torch.float32, device=device, kv_layout="nhd")
    assert "of v" not in str(caught.value) and "v_head_size" not in str(caught.value)


def test_an_overwritten_plan_is_refused(device):
    one = router(device)
    table = ints(2, 4).to(device)
    old = one.plan([1, 1], [5, 5], table)
    one.run(old, **run_arguments(device))
    one.plan([1, 1], [6, 6], table)
    with pytest.raises(ValueError, match="plan must be the latest of its batch size"):
        one.run(old, **run_arguments(device))


def test_a_plan_of_another_router_is_refused(device):
    """Layers with and without a window have a router each: a plan says what its own needs."""
    table = ints(2, 4).to(device)
    one, other = router(device), router(device)
    for lens in (([1, 1], [5, 5]), ([1, 2], [5, 6])):
        one.plan(*lens, table)
        with pytest.raises(ValueError, match=r"plan must be one that this router made, got one of another router$"):
            one.run(other.plan(*lens, table), **run_arguments(device))


@pytest.mark.parametrize("lens", [-(2**32) + 1, -(2**40)])
def test_lengths_do_not_wrap(device, lens):
    with pytest.raises(ValueError, match="query_lens must be at least 0"):
        router(device).plan([1, lens], [20, 7], ints(2, 4).to(device))


def test_a_table_without_columns_is_refused(device):
    cache = torch.zeros(4, 16, 2, 64, device=device)
    with pytest.raises(ValueError, match="block_table must have a column"):
        tritonattn.decode_attention(
            torch.zeros(2, 4, 64, device=device), cache, cache, seqused_k=ints(2).to(device), block_table=ints(2, 0).to(device), max_seqlen_k=20,
            kv_layout="nhd",
        )  # fmt: skip
